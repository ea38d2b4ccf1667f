"""The artifact as a page that reads as the chapter: one file, no network, no script."""

import ast
import functools
import inspect
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers.python import PythonLexer
from safetensors import SafetensorError, safe_open

from harness import scaling
from harness.gates import EQUATION, NAMES, ROUNDING, Finding, compared, difference, direction, letters
from harness.report import benchmark as speed
from harness.report import console, figures
from harness.runners import Setting, trace_file
from impls import numpy_attention
from impls.spec import BIAS_GRADIENTS

Row = Mapping[str, Any]
LAYER, TRUTH, JACOBIAN = "hf-eager", "truth", "jacobian"
"""As `harness.judging` writes them: Hugging Face's layer, that in float64, and the Jacobian built in full."""


def write_html(
    document: Mapping[str, Any],
    path: str | Path,
    traces: str | Path | None = None,
    planted: Mapping[str, Any] | None = None,
    benchmark: Mapping[str, Any] | None = None,
) -> None:
    """Write the report of an artifact, whole or not at all: a temporary file beside `path`, renamed over it.

    Args: the artifact as `harness.artifact.read` gives it; the folder of the run's traces, without which the pictures
    of attention and of errors are left out, and the page says so; planted_bugs.json and benchmark.json as read. The
    same arguments give the same bytes. Raises OSError where the file cannot be written.
    """
    path, page = Path(path), render_html(document, traces, planted, benchmark)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def render_html(
    document: Mapping[str, Any],
    traces: str | Path | None = None,
    planted: Mapping[str, Any] | None = None,
    benchmark: Mapping[str, Any] | None = None,
) -> str:
    """The page as text; the arguments are those of `write_html`."""
    frameworks, checks = document["frameworks"], document["checks"]
    folder = Folder(Path(traces) if traces else None, document)
    failed = list(failures(document, folder))
    sentences = list(console.sentences(document))
    return template().render(
        document=document,
        headline=headline(document, sentences),
        subject=console.subject(document),
        sentences=[
            (word, text) for word, text in sentences if not any(text.startswith(f"{each['name']}: ") for each in failed)
        ],
        verdicts={name: console.verdict(each) for name, each in frameworks.items()},
        signs={name: figures.SIGNS[index % len(figures.SIGNS)] for index, name in enumerate(frameworks)},
        failures=failed,
        sections=SECTIONS,
        biases=(biases := any(row["stage"] in BIAS_GRADIENTS for row in checks)),
        entries=EQUATION if biases else NAMES,
        code=code,
        evidence=functools.partial(evidence, grouped(checks, "framework", "stage"), list(frameworks)),
        head_sizes=(sizes := [each for each in document["scaling"]["head_sizes"] if "unscaled" in each]),
        scaling=figures.scaling(sizes) if sizes else [],
        attention=attention(document, folder),
        bits=bits(document),
        errors=errors(document, folder),
        missing=folder.missing,
        gates=Counter((row["gate"], row["match"]) for row in checks),
        blind_spots=console.blind_spots(document),
        exchanged=console.exchanged(document),
        exchanges=console.EXCHANGES,
        planted=planted and planted_matrix(planted),
        benchmark=benchmark and benchmark_view(benchmark),
        checks={name: list(summary(rows)) for (name,), rows in grouped(checks, "framework").items()},
    )


def prepare() -> None:
    """Do what takes time and needs no result: import matplotlib, compile the page's template, colour the code."""
    template()
    source(numpy_attention)
    figures.matplotlib()


@functools.cache
def template() -> Template:
    """The page, to be filled in."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"sci": scientific, "percent": percent, "listed": console.listed}
    return environment.get_template("report.html.jinja")


# ------------------------------------------------------------------------------------------------------------ verdict


def headline(document: Mapping[str, Any], sentences: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The verdict of the whole run: MATCH, DIFFERS or DID NOT RUN, and the rest of the line."""
    frameworks = document["frameworks"]
    if document["match"]:
        return console.MATCH, f"Only rounding differs between {console.listed([*frameworks, 'Hugging Face’s layer'])}."
    word = console.DID_NOT_RUN if document["exit_status"] == 3 else console.DIFFERS
    names = [name for name, each in frameworks.items() if console.verdict(each) == word]
    if word == console.DID_NOT_RUN:
        return word, f"{console.listed(names)}; nothing that ran differs."
    if len(names) == 1 and (first := frameworks[names[0]]["first_divergence"]):
        equation = f"equation {first['equation']}" if first["equation"][:1].isdigit() else first["equation"]
        return word, f"{names[0]}, first at {first['stage']}" + f" ({equation})" * (equation != "none") + "."
    return word, f"{console.listed(names)}." if names else sentences[0][1]


def failures(document: Mapping[str, Any], folder: "Folder") -> Iterator[dict[str, Any]]:
    """Each implementation that differs: the equation that broke, where, and the cause if it is named."""
    for name, framework in document["frameworks"].items():
        first = framework["first_divergence"]
        if console.verdict(framework) == console.DIFFERS and first:
            what, _, cause = (first["explanation"] or "").partition(" Likely cause: ")
            section = next((each for each in SECTIONS if each.number == first["equation"]), None)
            picture = failure_picture(document, folder, name, first)
            cause = cause.removesuffix("; that gives the same to rounding.")
            yield first | {"name": name, "what": pretty(what), "cause": cause, "section": section, "picture": picture}


def failure_picture(
    document: Mapping[str, Any], folder: "Folder", name: str, first: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Where the stage that broke is off, by head and position, in the run that shows it most; its trace in float64 is
    seldom kept, so that in the dtype of the run stands for it."""
    stage, gates = first["stage"], {"structure": 0, "local": 1, "probes": 2}
    rows = [row for row in document["checks"] if row["framework"] == name and row["stage"] == stage]
    key = f"failure-{list(document['frameworks']).index(name)}"
    for row in sorted(rows, key=lambda row: (row["match"], gates.get(row["gate"], 3), -excess(row))):
        run = {"layer": row["layer"], "input": row["input"], "rope": row["rope"]}
        for dtype in dict.fromkeys((row["dtype"], document["setting"]["dtype"])):
            if letters(stage) and (error := folder.error(name, stage, dtype, **run)) is not None:
                digits = 16 if dtype == "float64" else 7
                shades = np.log10(np.clip(np.nan_to_num(error, nan=1), 10.0**-digits, 1)) + digits
                mark = None if first["position"] is None else (first["head"] or 0, first["position"])
                unit = "powers of ten above rounding"
                svg = figures.by_head(key, shades, digits, unit, mark, bad=True)
                return run | {"svg": svg, "dtype": dtype, "least": 10.0**-digits}
    return None


# ----------------------------------------------------------------------------------------------------------- sections


class Section(NamedTuple):
    """One equation: its number and title, the functions that compute it and undo it, and other stages than its own."""

    number: str
    title: str
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    shown: str = ""
    module: ModuleType = numpy_attention

    def names(self, way: str) -> list[str]:
        """The stages of this equation, or the gradients."""
        own = self.shown.split() or [name for name in EQUATION if EQUATION[name] == self.number]
        return [name for name in own if direction(name) == way]


LOOKUP = "scores masked_scores probs heads d_probs d_v_proj d_masked_scores d_scores d_q_rope d_k_rope"
SECTIONS = (
    Section(
        "3.1",
        "Three roles, three projections",
        ("project",),
        ("project_backward", "weight_gradient", "bias_gradient"),
    ),
    Section(
        "RMSNorm", "Every head at one size", ("rms_norm", "inverse_rms"), ("rms_norm_backward", "norm_weight_gradient")
    ),
    Section("RoPE", "Position as rotation", ("rope", "rotate_half"), ("rope_backward",)),
    Section("3.2", "Attention is a soft lookup", ("share",), ("share_backward",), LOOKUP),
    Section("3.3", "A dot product grows with the head", ("measure",), module=scaling),
    Section("3.4", "Scaled, it does not", ("spread",), module=scaling),
    Section("3.5", "Scaled scores", ("scores",), ("scores_backward",)),
    Section("3.6", "The softmax", ("softmax",)),
    Section("3.7", "How a weight answers a score", ("softmax_jacobian",)),
    Section("3.8", "The Jacobian, and how it vanishes"),
    Section("3.9", "The gradient through the softmax", (), ("softmax_backward",)),
    Section("3.10", "No looking ahead", ("causal_mask",)),
    Section("3.11", "Several ways of looking", ("mix",), ("mix_backward",)),
    Section("3.12", "Concatenated and mixed", ("merge",), ("merge_backward",)),
)


@functools.cache
def source(module: ModuleType) -> tuple[list[str], dict[str, list[tuple[int, int]]]]:
    """A module's lines as HTML, and the first and last line of what stands in it: "def f" a function; in `forward` and
    `backward`, "q_proj" what is observed and "f()" what is called without being observed."""
    text, spans = inspect.getsource(module), dict[str, list[tuple[int, int]]]()
    for function in ast.parse(text).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        spans[f"def {function.name}"] = [(function.lineno, function.end_lineno or 0)]
        calls = [each for each in ast.walk(function) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]
        seen = [call for call in calls if ast.unparse(call.func) == "observe"]
        lines = {call.lineno for call in seen}
        for call in calls if function.name in ("forward", "backward") else ():
            if call in seen:
                spans[ast.literal_eval(call.args[0])] = [(call.lineno, call.end_lineno or 0)]
            elif call.lineno not in lines:
                spans.setdefault(f"{ast.unparse(call.func)}()", []).append((call.lineno, call.end_lineno or 0))
    return highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n"), spans


def code(section: Section, way: str, stage: str | None = None) -> Markup:
    """The lines that compute an equation, or undo it: those of `forward` or `backward` (of these only the one that
    observes `stage`, if that is given), then the functions that they call."""
    html, spans = source(section.module)
    functions = section.forward if way == "forward" else section.backward
    names = [stage] if stage else [*section.names(way), *(f"{name}()" for name in functions)]
    (top, bottom), *_ = spans.get(f"def {way}", [(0, 0)])
    parts = sorted({span for name in names for span in spans.get(name, ()) if top <= span[0] <= bottom})
    lines, before = [], 0
    for first, last in [*parts, *(spans[f"def {name}"][0] for name in functions)]:
        lines += [""] * (first != before + 1 and before > 0)
        text = dedent("\n".join(html[first - 1 : last])).split("\n")
        lines += [f'<span data-line="{number}">{line}</span>' for number, line in enumerate(text, first)]
        before = last
    return Markup("\n".join(lines))


# ----------------------------------------------------------------------------------------------------------- evidence


class Cell(NamedTuple):
    """A figure of an evidence table, whether all of the checks behind it held, and where it was found."""

    text: str
    match: bool
    where: str


def evidence(
    groups: Mapping[tuple[str, ...], list[Row]], frameworks: Iterable[str], stages: Collection[str]
) -> dict[str, dict[str, Cell | None]]:
    """For each implementation the worst of each kind of check of some stages; nothing where none was made."""
    found = {name: [row for stage in stages for row in groups.get((name, stage), ())] for name in frameworks}
    return {name: cells(rows) for name, rows in found.items()} if any(found.values()) else {}


def cells(rows: Sequence[Row]) -> dict[str, Cell | None]:
    """The worst of the rows in each column of an evidence table; None where nothing was checked."""

    def of(gate: str, form: Callable[[float], str], where: Callable[[Row], bool] = lambda row: True) -> Cell | None:
        return cell([row for row in rows if row["gate"] == gate and where(row)], form)

    return {
        "structure": of("structure", scientific, lambda row: row["measure"] != JACOBIAN),
        "bits": of("local", lambda x: f"{x:.1f}" if x < 53 else "exact", lambda row: row["measure"] != "bound"),
        "bound": of("local", percent, lambda row: not row["measure"].startswith("bits")),
        "tolerance": of("tolerance", percent, lambda row: row["against"] in (TRUTH, LAYER)),
        "probes": of("probes", lambda x: scientific(x) if x else "exact"),
        "jacobian": of("structure", scientific, lambda row: row["measure"] == JACOBIAN),
    }


def cell(rows: Sequence[Row], form: Callable[[float], str]) -> Cell | None:
    """The worst of these rows: its value, or in the tolerance gate its share of the limit, written by `form`."""
    if not rows:
        return None
    row = worst(rows)
    if row["value"] is None:
        text = row["measure"] if row["measure"] in ("missing", "unknown", "shape", "dtype") else "not finite"
    else:
        text = form(row["value"] / (row["limit"] or math.inf) if row["gate"] == "tolerance" else row["value"])
    return Cell(text, all(each["match"] for each in rows), f"{row['stage']}, {place(row)}; limit {row['limit']:.3g}")


def worst(rows: Sequence[Row]) -> Row:
    """The row that failed, or came closest to it."""
    return max(rows, key=lambda row: (not row["match"], excess(row)))


def excess(row: Row) -> float:
    """How far a row went towards its limit, comparable within a measure."""
    value = row["value"]
    return math.inf if value is None else Finding(row["stage"], row["measure"], value, row["limit"]).excess


def place(row: Row) -> str:
    """In which run a row was found."""
    if row["input"] == "any":
        return str(row["dtype"])
    given = row["input"] if row["input"].startswith("probe") else f"{row['input']} input"
    return f"layer {row['layer']}, {given}, {row['rope']} RoPE, {row['dtype']}"


def summary(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """For each gate and stage its worst row, with how many there are and how many of them held."""
    groups = grouped(rows, "gate", "stage")
    order = {name: index for index, name in enumerate(EQUATION)}
    for key in sorted(groups, key=lambda key: (key[0], order.get(key[1], -1))):
        row, held = worst(groups[key]), sum(each["match"] for each in groups[key])
        yield {**row, "count": len(groups[key]), "held": held, "place": place(row)}


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by the values of some keys."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


# ----------------------------------------------------------------------------------------------------------- pictures


class Folder:
    """The traces of a run. `missing`: the pictures that could not be drawn for want of one."""

    def __init__(self, path: Path | None, document: Mapping[str, Any]):
        self.missing: list[str] = []
        self.path, self.inputs, self.T = path, document["inputs"], document["seq_len"]

    def read(self, name: str, stage: str, dtype: str, layer: int, input: str, rope: str) -> np.ndarray | None:
        """One stage of one trace, or None where it was not kept."""
        if self.path is None:
            return None
        file = self.path / trace_file(name, layer, Setting(input, rope, dtype))
        try:
            with safe_open(file, framework="numpy") as trace:
                return trace.get_tensor(stage)
        except (OSError, SafetensorError):
            return None

    def seen(self, input: str) -> np.ndarray | None:
        """Which keys a query of a padded batch may see, [B,1,T,S]."""
        padding = self.inputs.get(input, {}).get("left_pad")
        if padding is None:
            return None
        return np.tri(self.T, dtype=bool) & (np.arange(self.T) >= np.array(padding)[:, None, None, None])

    def error(self, name: str, stage: str, dtype: str, rms: bool = False, **run: Any) -> np.ndarray | None:
        """The error of a stage at each head and position, relative to the truth's size there: [N or K, T], or [1, T]
        without heads; the largest or the rms over all else, of the worst sequence. None without the traces."""
        value, truth = self.read(name, stage, dtype, **run), self.read(LAYER, stage, "float64", **run)
        if value is None or truth is None or value.shape != truth.shape:
            return None
        kept = [axis for axis, letter in enumerate(letters(stage).replace("TS", "T-")) if letter in "BTSNK"]
        order = sorted(kept, key=lambda axis: letters(stage)[axis] in "TS")
        seen = self.seen(run["input"])
        pair = difference(stage, value, truth, seen), compared(stage, truth, seen)
        ends = [np.moveaxis(x, order, range(len(kept))) for x in pair]
        error, size = (np.abs(x).reshape(*x.shape[: len(kept)], -1) for x in ends)
        error, size = (np.sqrt(np.mean(x**2, axis=-1)) if rms else np.max(x, axis=-1) for x in (error, size))
        return np.atleast_2d(np.max(error / np.where(size > 0, size, 1), axis=0))


def attention(document: Mapping[str, Any], folder: Folder) -> dict[str, Any] | None:
    """The layer's own weights in float64, of the first sequence of the first layer."""
    source = "text" if "text" in document["inputs"] else document["setting"]["input"]
    for rope in ("model", "neutral"):
        run = {"layer": document["layers"][0], "input": source, "rope": rope}
        if (probs := folder.read(LAYER, "probs", "float64", **run)) is not None:
            svg = figures.attention(probs[0].astype(np.float64), document["inputs"].get(source, {}).get("tokens"))
            return run | {"svg": svg, "heads": probs.shape[1], "blocks": probs.shape[2] > figures.BINS}
    folder.missing.append("attention maps (of the layer in float64)")
    return None


def errors(document: Mapping[str, Any], folder: Folder) -> dict[str, Any] | None:
    """Where each implementation's error sits in the last stage that it shows by head, in units of its rounding."""
    dtype, found, lost = document["setting"]["dtype"], dict[str, dict[str, Any]](), []
    for name, framework in document["frameworks"].items():
        for rope, stage in (("model", "heads"), ("neutral", "heads"), ("model", "output"), ("neutral", "output")):
            run = {"layer": document["layers"][0], "input": document["setting"]["input"], "rope": rope}
            error = folder.error(name, stage, dtype, rms=True, **run)
            if error is not None:
                error = np.nan_to_num(error / max(ROUNDING[dtype][:2]), posinf=1e300)
                found[name] = run | {"stage": stage, "error": error, "bad": not framework["match"]}
                break
        else:
            lost += [name] * (framework["error"] is None)
    if lost:
        folder.missing.append(f"where the error sits of {console.listed(lost)} (in {dtype})")
    largest = max((np.max(each["error"]) for each in found.values() if not each["bad"]), default=100.0)
    for index, each in enumerate(found.values()):
        each["svg"] = figures.by_head(f"error-{index}", each["error"], largest, "roundings", bad=each["bad"])
    return {"pictures": found, "largest": float(largest), "dtype": dtype} if found else None


def bits(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Effective bits of every stage: by the local certificate, and in float64 by the distance from the layer."""
    order = {name: index for index, name in enumerate(document["frameworks"])}
    series, due = dict[tuple[int, str], dict[str, float]](), dict[str, float]()
    for row in document["checks"]:
        if row["framework"] not in order or row["value"] is None or row["stage"] not in EQUATION:
            continue
        if row["measure"] == "bits" and row["gate"] == "local":
            value, due[row["stage"]] = row["value"], max(row["limit"], due.get(row["stage"], 0))
        elif row["measure"] == "relative":
            value = min(53.0, -math.log2(row["value"])) if row["value"] else 53.0
        else:
            continue
        stages = series.setdefault((order[row["framework"]], row["dtype"]), {})
        stages[row["stage"]] = min(value, stages.get(row["stage"], value))
    shown = [name for name in EQUATION if any(name in stages for stages in series.values())]
    if not shown:
        return None
    return {"svg": figures.bits(shown, series, due), "dtypes": list({dtype: 0 for _, dtype in series})}


def planted_matrix(planted: Mapping[str, Any]) -> Mapping[str, Any]:
    """The matrix with, for each kind of bug, how many each gate catches, and how many the customary comparison does."""
    rows = []
    for (kind,), bugs in grouped(planted["bugs"], "kind").items():
        caught = {gate: sum(bool(bug["gates"].get(gate)) for bug in bugs) for gate in "SLTP"}
        rows.append((kind, len(bugs), [*caught.values(), sum(bug["naive"]["caught"] for bug in bugs)]))
    return {**planted, "rows": rows}


def benchmark_view(benchmark: Mapping[str, Any]) -> Mapping[str, Any]:
    """The benchmark with its tables, its picture, and what was left out of it in words."""
    views = {"sheets": list(speed.sheets(benchmark)), "omissions": speed.omissions(benchmark)}
    return {**benchmark, **views, "legend": speed.LEGEND, "svg": speed.picture(benchmark)}


# -------------------------------------------------------------------------------------------------------------- words


def scientific(value: float | None) -> str:
    """9.5×10⁻⁷, or 0.12 where that is shorter; a dash for what is not there."""
    if value is None:
        return "–"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}×10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def pretty(text: str) -> str:
    """Text whose numbers are written as `scientific` does."""
    return re.sub(r"\b\d(\.\d+)?e[+-]\d\d\b", lambda found: scientific(float(found[0])), text)


def percent(value: float | None) -> str:
    """A share of a limit; what is far beyond it is said in multiples."""
    if value is None or value >= 10:
        return "–" if value is None else f"{value:.0f}×" if value < 1e5 else f"{scientific(value)} ×"
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"
