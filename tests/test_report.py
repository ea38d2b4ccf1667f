"""The report: what stands on the page, where its code comes from, that it is one file, and how a browser shows it."""

import functools
import html
import inspect
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import ml_dtypes
import numpy as np
import pytest
from conftest import make_case, numpy_run
from safetensors.numpy import save_file
from test_artifact import differing, document, framework, not_run

from harness import artifact, scaling
from harness.gates import EQUATION, NAMES, direction
from harness.report.figures import FORMATS
from harness.report.html import render_html, write_html
from harness.runners import Setting, trace_file
from impls import numpy_attention
from impls.spec import AttentionConfig

NUMBERS = [f"3.{number}" for number in range(1, 13)]
HOSTILE = '<script>alert("x")</script>&{{ 7*7 }}/a.py:f'


def checks(names: list[str], dtype: str = "float32", structure: bool = True) -> list[dict[str, Any]]:
    """What a run leaves of some implementations that match: every gate, every stage."""
    found = []
    for name, stage, rope in (
        (name, stage, rope) for name in names for stage in NAMES for rope in ("neutral", "model")
    ):
        place = {"layer": 0, "input": "chapter", "rope": rope, "dtype": dtype, "framework": name, "stage": stage}
        place |= {"equation": EQUATION[stage], "direction": direction(stage)}
        found += [
            artifact.judged(0.4, 1, **place, against="own inputs", gate="local", measure="bound"),
            artifact.judged(6.5, 5, True, **place, against="own inputs", gate="local", measure="bits"),
            artifact.judged(2e-7, 8e-7, **place, against="truth", gate="tolerance", measure="rms"),
            artifact.judged(0, 0, **place, against="exact", gate="probes", measure="exact"),
        ]
        if structure:
            place["dtype"] = "float64"
            found.append(artifact.judged(3e-15, 1e-12, **place, against="truth", gate="structure", measure="relative"))
            if stage == "d_masked_scores":
                found.append(
                    artifact.judged(2e-16, 1e-12, **place, against="jacobian", gate="structure", measure="jacobian")
                )
    return [row._asdict() for row in found]


@functools.cache
def measured() -> dict[str, Any]:
    config = AttentionConfig(20, 6, 3, 8, 1e-6)
    return scaling.measure() | {"parameters": scaling.parameters(config), "caching": scaling.caching()}


def whole(names: tuple[str, ...] = ("numpy", "jax"), **changes: Any) -> dict[str, Any]:
    """An artifact with every kind of check."""
    good = {"frameworks": {name: framework() for name in names}, "checks": checks(list(names)), "scaling": measured()}
    doc = document(**good | {"pairwise": {}, "seq_len": 5} | changes)
    jsonschema.validate(doc, artifact.SCHEMA)
    return doc


def failing(
    name: str = "jax",
    cause: str = " Likely cause: the last head left zero (eq. 3.11); that gives the same to rounding.",
) -> dict[str, Any]:
    """An artifact in which one implementation breaks at `heads`, another did not run."""
    first = {"stage": "heads", "equation": "3.11", "direction": "forward", "head": 4, "position": 2}
    first["explanation"] = "It is off by 1.0e+00 of its token's size." + cause
    frameworks = {"numpy": framework(), name: differing() | {"first_divergence": first}, "torch": not_run("no <torch>")}
    rows = checks(["numpy", name])
    for row in rows:
        if (row["framework"], row["stage"], row["gate"]) == (name, "heads", "structure"):
            row |= {"value": 1.0, "match": False}
    return whole(frameworks=frameworks, checks=rows, match=False, exit_status=1)


def traces(folder: Path, names: tuple[str, ...] = ("numpy", "jax"), T: int = 5, dtype: Any = np.float32) -> Path:
    """The traces of a small layer, as a run leaves them: the truth in float64, the implementations in `dtype`."""
    folder.mkdir(exist_ok=True)
    case = make_case(AttentionConfig(20, 6, 3, 8, 1e-6), B=2, T=T)
    truth = numpy_run(*case)
    save_file(truth, folder / "hf-eager.layer0.chapter.model.float64.safetensors")
    rounded = {name: np.ascontiguousarray(value.astype(dtype)) for name, value in truth.items()}
    for name in names:
        save_file(rounded, folder / trace_file(name, 0, Setting("chapter", "model", np.dtype(dtype).name)))
    return folder


class Page(HTMLParser):
    """A page's elements, ids, references and visible text; raises where elements are not properly nested."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open
        self.ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "hr", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r" (?=[.,;:])", "", " ".join(" ".join(self.words).split()))


@pytest.fixture(scope="module")
def matching(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run in which all is well, with everything on it."""
    planted = json.loads(
        (Path(__file__).parents[1] / "artifacts/evidence/planted_bugs.json").read_text(encoding="utf-8")
    )
    return render_html(whole(), traces(tmp_path_factory.mktemp("all") / "traces"), planted)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run in which one implementation differs and one did not run, under names that are hostile."""
    folder = traces(tmp_path_factory.mktemp("broken") / "traces", ("numpy", HOSTILE))
    return render_html(failing(HOSTILE), folder)


def lines(page: str) -> dict[int, str]:
    """The NumPy lines on the page by their number."""
    listings = re.findall(r"impls/numpy_attention.py</span></figcaption>\s*<pre.*?</pre>", page, re.DOTALL)
    found = re.findall(r'<span data-line="(\d+)">(.*)</span>$', "\n".join(listings), re.MULTILINE)
    return {
        int(number): html.unescape(re.sub(r"<[^>]*>", "", line.replace("</code></pre>", ""))) for number, line in found
    }


def test_every_equation_stands_in_order_with_its_formula(matching: str) -> None:
    page = Page(matching)
    shown = [each.removeprefix("eq-") for each in page.ids if each.startswith("eq-")]
    assert shown == ["3.1", "RMSNorm", "RoPE", *NUMBERS[1:]]
    parts = re.split(r'<h3 id="eq-', matching)[1:]
    assert all("<math" in part and "</p>" in part for part in parts)
    marked = [
        number for number, part in zip(shown, parts, strict=True) if ">reconstructed<" in part.partition("</h3>")[0]
    ]
    assert marked == ["3.3", "3.4", "3.5", "3.7", "3.8", "3.9"]
    evident = [number for number, part in zip(shown, parts, strict=True) if "from the layer" in part]
    assert evident == ["3.1", "RMSNorm", "RoPE", "3.2", "3.5", "3.6", "3.9", "3.10", "3.11", "3.12"]
    assert page.text.count("MATCH Only rounding differs between numpy, jax and Hugging Face’s layer.") == 1


def test_the_code_is_the_source(matching: str) -> None:
    source, shown = inspect.getsource(numpy_attention).splitlines(), lines(matching)
    assert {line.strip() for line in shown.values()} == {source[number - 1].strip() for number in shown}
    assert all(source[number - 1].strip() == line.strip() for number, line in shown.items())
    wanted = [number for number, line in enumerate(source, 1) if "observe(" in line and "Observe" not in line]
    wanted += [
        n
        for n, line in enumerate(source, 1)
        if line.startswith("def ") and "ward(" not in line.replace("_backward", "")
    ]
    assert len(wanted) > 45 and set(wanted) <= shown.keys(), "every observed line and every function of the page"


def test_the_code_follows_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.report import html as module

    real = inspect.getsource
    changed = real(numpy_attention).replace("x1, x2 = np.split", "first, second = np.split")
    module.source.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(inspect, "getsource", lambda each: changed if each is numpy_attention else real(each))
        page = render_html(whole())
    module.source.cache_clear()
    assert "    first, second = np.split(x, 2, axis=-1)" in lines(page).values()


def test_evidence_is_the_worst_of_its_rows() -> None:
    doc = whole(("numpy",))
    row = next(r for r in doc["checks"] if r["stage"] == "k_proj" and r["measure"] == "relative")
    row["value"] = 7.7e-13
    next(r for r in doc["checks"] if r["stage"] == "v_proj" and r["measure"] == "bits")["value"] = 5.1
    next(r for r in doc["checks"] if r["stage"] == "q_proj" and r["gate"] == "tolerance")["value"] = 6e-7
    page = render_html(doc)
    part = Page(
        page[page.index('<h3 id="eq-3.1"') : page.index("<summary>Stage by stage")].rpartition("</div>")[0] + "</div>"
    )
    assert "forward: q_proj, k_proj, v_proj ● numpy 7.7×10⁻¹³ 5.1 40% 75% exact" in part.text
    assert (
        "backward: d_hidden_states, d_q_proj.weight" in part.text and "● numpy 3.0×10⁻¹⁵ 6.5 40% 25% exact" in part.text
    )


def test_a_failure_leads_the_page(broken: str) -> None:
    page = Page(broken)
    assert broken.index("breaks at") < broken.index("<table") < broken.index('id="equations"')
    card = broken[broken.index('class="failure"') : broken.index("</section>")]
    text = Page(card.partition(">")[2]).text
    assert f"{HOSTILE} breaks at heads: equation 3.11, forward" in text
    assert "Likely cause: the last head left zero (eq. 3.11); that gives the same to rounding." in text
    assert "Worst at head 4, position 2. It is off by 1 of its token's size." in text
    assert "<math" in card and 'role="img"' in card and "def <span" not in text and "o_BTNH = observe" in text
    assert f"DIFFERS {HOSTILE}, first at heads (equation 3.11)." in page.text
    assert "DID NOT RUN torch: no <torch>" in page.text and "MATCH numpy: only rounding differs" in page.text


def test_names_are_text(broken: str) -> None:
    assert "<script" not in broken and "49" not in Page(broken).text.partition("breaks at")[0]
    doc = failing(HOSTILE, " Likely cause: <b>this</b>; that gives the same to rounding.")
    doc["inputs"]["chapter"]["tokens"] = ["<i>a</i>", "$x$", "\x00\n", "中文", "e"]
    doc["command"] = "</dd><img src=x>"
    doc["blind_to"] = [{"layer": 0, "name": "<u>", "says": "", "reason": "<s>"}]
    page = Page(render_html(doc))
    assert not {"img", "b-", "i-", "u", "s", "script"} & {tag for tag, _ in page.elements}
    assert "Likely cause: <b>this</b>; that gives" in page.text


def test_one_file_without_network_or_script(matching: str, broken: str) -> None:
    for text in (matching, broken):
        for tag, attributes in Page(text).elements:
            assert tag not in ("script", "iframe", "object", "embed", "base") and not any(
                name.startswith("on") for name in attributes
            )
            for name in ("src", "href", "xlink:href", "action", "srcset", "data"):
                assert (attributes.get(name) or "#").startswith(("#", "data:,"))
        assert not re.search(r"url\((?!#)|@import|https?://", text)
        assert len(text) < 2_000_000


def test_structure_for_a_reader_without_eyes_or_mouse(matching: str, broken: str) -> None:
    for text in (matching, broken):
        page = Page(text)
        assert len(page.ids) == len(set(page.ids))
        used = [
            a.get(name) for _, a in page.elements for name in ("aria-labelledby", "href", "clip-path") if a.get(name)
        ]
        used = [re.sub(r"^#|^url\(#|\)$", "", each) for each in used if each != "data:,"]
        assert set(used) <= set(page.ids)
        assert dict(page.elements)["html"] == {"lang": "en"}
        levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))
        for tag, attributes in page.elements:
            if tag == "svg":
                assert attributes["role"] == "img" and len(attributes["aria-label"] or "") > 40
            if attributes.get("tabindex"):
                assert attributes["role"] == "region" and attributes["aria-label"]
        first = next(attributes for tag, attributes in page.elements if tag == "a")
        assert first == {"class": "skip", "href": "#equations"}


def test_pictures(matching: str) -> None:
    labels = [attributes["aria-label"] or "" for tag, attributes in Page(matching).elements if tag == "svg"]
    assert len(labels) == 3 + 1 + 1 + 2
    assert any("Attention weights of 6 of 6 heads, each a lower triangle of 5 by 5" in label for label in labels)
    assert any(
        "Bits in which each of 30 stages agrees: float32 6.5 to 6.5; float64 48.2 to 48.2" in label for label in labels
    )
    assert sum("Error of 6 heads by 5 positions" in label for label in labels) == 2
    assert any("Variance of a score as d_k grows from 16 to 1024: unscaled from 17" in label for label in labels)
    assert all(f">{bits}</text>" in matching and f">{name}</text>" in matching for bits, (name, _) in FORMATS.items())
    assert "#0" not in "".join(re.findall(r'style="[^"]*"', matching)), "every colour is the page's"
    assert "Planted bugs" in matching and "115" in matching


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two colours, 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read_in_light_and_dark(matching: str) -> None:
    schemes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", matching, re.DOTALL)
    ]
    assert len(schemes) == 3
    for colours in schemes[:2]:
        for paper in ("paper", "raised"):
            for name in ("ink", "muted", "accent", "good", "bad", "warn"):
                assert contrast(colours[name], colours[paper]) >= 4.5, (name, paper)
        for index in range(5):
            assert contrast(colours[f"s{index}"], colours["paper"]) >= 3, index


def test_the_same_artifact_gives_the_same_bytes(tmp_path: Path, matching: str) -> None:
    folder = traces(tmp_path / "traces")
    one, other = (render_html(json.loads(json.dumps(whole())), folder) for _ in range(2))
    assert one == other
    code = "import json, sys; from harness.report.html import write_html; "
    code += "write_html(json.load(open(sys.argv[1])), sys.argv[2], sys.argv[3]); "
    code += "print(*{name.split('.')[0] for name in sys.modules})"
    (tmp_path / "check.json").write_text(json.dumps(whole()), encoding="utf-8")
    arguments = [str(tmp_path / name) for name in ("check.json", "new/report.html", "traces")]
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"torch", "jax", "flax", "transformers"} & set(run.stdout.split())
    assert (tmp_path / "new/report.html").read_text(encoding="utf-8") == one


def test_what_needs_no_result_is_prepared_without_one() -> None:
    """While the implementations start: what the page then costs is its own pictures and words."""
    code = "import sys; from harness.report import html; html.prepare(); "
    code += "print(html.template.cache_info().currsize, html.source.cache_info().currsize, "
    code += "'matplotlib.backends.backend_svg' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "1", "True"]


def test_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("the last one")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            write_html(whole(), path)
    assert path.read_text() == "the last one" and [each.name for each in tmp_path.iterdir()] == ["report.html"]
    write_html(whole(("\udc80",)), path)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_without_traces_the_page_says_what_is_left_out(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "nowhere"):
        text = Page(render_html(whole(), folder)).text
        assert "Left out, since the traces are not there: attention maps (of the layer in float64);" in text
        assert "where the error sits of numpy and jax (in float32)." in text
    text = Page(render_html(whole(), traces(tmp_path / "one", ("jax",)))).text
    assert "Left out, since the traces are not there: where the error sits of numpy (in float32)." in text
    (tmp_path / "one" / "jax.layer0.chapter.model.float32.safetensors").write_bytes(b"cut off")
    assert "where the error sits of numpy and jax" in Page(render_html(whole(), tmp_path / "one")).text
    assert "breaks at heads" in Page(render_html(failing(), None)).text


def test_an_artifact_with_next_to_nothing(tmp_path: Path) -> None:
    assert (
        "DID NOT RUN numpy; nothing that ran differs."
        in Page(
            render_html(document(frameworks={"numpy": not_run()}, checks=[], pairwise={}, match=False, exit_status=3))
        ).text
    )
    text = Page(render_html(document())).text
    assert "MATCH" in text and "Effective bits" not in text


@pytest.mark.parametrize(
    ("T", "dtype", "structure"), [(1, "float32", True), (1, "bfloat16", False), (70, "float16", False)]
)
def test_other_lengths_and_dtypes(tmp_path: Path, T: int, dtype: str, structure: bool) -> None:
    doc = failing() | {"seq_len": T}
    doc["inputs"]["chapter"]["tokens"] = [f"token {position}" for position in range(T)]
    doc["setting"] = doc["setting"] | {"dtype": dtype}
    doc["checks"] = checks(["numpy", "jax"], dtype, structure)
    doc["frameworks"]["jax"]["first_divergence"] |= {"position": T - 1}
    kind = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    page = Page(render_html(doc, traces(tmp_path / "traces", T=T, dtype=kind)))
    labels = [attributes["aria-label"] or "" for tag, attributes in page.elements if tag == "svg"]
    assert sum(f"Error of 6 heads by {T} positions" in label for label in labels) == 3
    size = min(T, 16)
    assert any(f"lower triangle of {size} by {size} squares" in label for label in labels)
    assert ("70 positions are drawn in blocks" in page.text) == (T == 70)
    assert f"in units of {dtype}’s rounding" in page.text and "Left out" not in page.text
    assert ("token 0" in page.text) == (T < 16)
    assert any(f"{dtype} 6.5 to 6.5" in label and ("float64" in label) == structure for label in labels)


def test_float64_alone() -> None:
    doc = whole(setting={"input": "chapter", "rope": "neutral", "dtype": "float64"})
    doc["checks"] = [row for row in doc["checks"] if row["dtype"] == "float64"]
    text = Page(render_html(doc)).text
    assert "● numpy 3.0×10⁻¹⁵ – – – –" in text and "Hollow" in text and "Filled" not in text


def test_an_unknown_stage_a_missing_one_and_nan_are_words(tmp_path: Path) -> None:
    doc = failing(cause="")
    place = doc["checks"][0] | {"gate": "structure", "dtype": "float64", "against": "truth", "framework": "jax"}
    place |= {"match": False, "value": None, "limit": 0.0}
    doc["checks"] += [
        place | {"stage": "probs", "equation": "3.6", "measure": "missing"},
        place | {"stage": "scores", "equation": "3.5", "measure": "not finite"},
        place | {"stage": "mystery", "equation": "none", "measure": "unknown"},
    ]
    doc["frameworks"]["jax"]["first_divergence"] |= {
        "stage": "mystery",
        "equation": "none",
        "head": None,
        "position": None,
    }
    text = Page(render_html(doc, traces(tmp_path / "traces"))).text
    assert "jax breaks at mystery It is off" in text and "✗ missing" in text and "✗ not finite" in text
    assert "DIFFERS jax, first at mystery." in text and "mystery none ✗ 0 of 1 unknown" in text


# ------------------------------------------------------------------------------------------------------------ browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FACTS = """<script>addEventListener("load", () => setTimeout(() => parent.postMessage({
  width: innerWidth, page: document.documentElement.scrollWidth, paper: getComputedStyle(document.body).backgroundColor,
  resources: performance.getEntriesByType("resource").length,
  math: document.querySelector("math mfrac").getBoundingClientRect().height,
  wide: [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, pre, .equation, nav, svg, details") &&
    e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80)),
}, "*"), 100));</script></body>"""
FRAME = """<!DOCTYPE html><meta name="color-scheme" content="light dark"><title>frame</title>
<script>const facts = []; onmessage = e => { facts.push(e.data); document.body.dataset.facts = JSON.stringify(facts) };
console.error("a control: what is logged is seen")</script>
<body><img src="http://control.invalid/seen.png">
<iframe src="page.html" width="360" height="800"></iframe><iframe src="page.html" width="1280" height="800"></iframe>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; Debian's package `chromium` has one")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(tmp_path: Path, matching: str, broken: str, scheme: str) -> None:
    """In both colour schemes and at both widths: nothing wider than the page, no error, no request. What would see an
    error or a request is shown to, by one of each from the frame around the page."""
    page = (broken if scheme == "dark" else matching).replace("</body>", FACTS)
    page = page.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME, encoding="utf-8")
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"),
        *("--window-size=1400,1000", "--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}"),
        *(f"--log-net-log={tmp_path / 'net.json'}", "--virtual-time-budget=5000"),
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        (tmp_path / "frame.html").as_uri(),
    ]
    run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=120)
    dumped = re.search(r'data-facts="([^"]*)"', run.stdout)
    assert dumped, run.stderr[-2000:]
    facts = sorted(json.loads(html.unescape(dumped[1])), key=lambda each: each["width"])
    assert [each["width"] for each in facts] == [360, 1280]
    for each in facts:
        assert each["page"] <= each["width"] and each["wide"] == [] and each["resources"] == 0
        assert each["paper"] == {"light": "rgb(253, 252, 249)", "dark": "rgb(23, 24, 27)"}[scheme]
        assert each["math"] > 25, "a fraction is set as one"
    logged = [line for line in run.stderr.splitlines() if ":CONSOLE" in line]
    assert any("a control" in line for line in logged) and not [line for line in logged if "page.html" in line]
    net = json.loads((tmp_path / "net.json").read_text(encoding="utf-8"))
    start = net["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    asked = [event["params"] for event in net["events"] if event["type"] == start and "url" in event.get("params", {})]
    ours = {each["url"] for each in asked if each.get("initiator") != "not an origin"}  # the browser's own have none
    assert ours == {"http://control.invalid/seen.png"}
