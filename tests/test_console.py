"""What a person sees: the verdict in words, with and without colour, and the progress before it."""

import io
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console
from test_artifact import WHERE, differing, document, framework, not_run

from harness import artifact, report
from harness.report.console import Progress, make_console, print_verdict


def printed(doc: dict[str, Any], width: int = 80, folder: Path | None = Path("artifacts")) -> str:
    jsonschema.validate(doc, artifact.SCHEMA)
    console = Console(file=io.StringIO(), width=width)
    print_verdict(doc, console, folder)
    return console.file.getvalue()


def failing() -> dict[str, Any]:
    tolerance = framework()["tolerance"] | {"largest_share": 87.0}
    where = WHERE | {"framework": "jax", "stage": "q_norm", "equation": "RMSNorm", "gate": "structure"}
    where |= {"input": "stress", "dtype": "float64"}
    return document(
        match=False,
        exit_status=1,
        frameworks={
            "numpy": framework(not_checked=["float64: it computes in float32 only"]),
            "jax": differing(max_abs_diff=2e-3, structure=3.2e-5, tolerance=tolerance),
            "torch": not_run("No module named 'torch'; install it"),
        },
        checks=[artifact.judged(3.2e-5, 1e-12, **where)._asdict(), *document()["checks"]],
    )


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_match(width: int) -> None:
    text = printed(document(), width)
    words = " ".join(text.split())
    assert "seeded weights of Qwen3-0.6B's shape (made up, not the trained ones)" in words
    assert "inputs chapter and stress, B = 1, T = 12." in words
    assert (
        "MATCH numpy, jax and torch: only rounding differs, forward; no gradient was shown (checks held: 1)." in words
    )
    assert "artifacts/attention_check.json" in text and "DIFFERS" not in text
    if width >= 80:
        assert max(map(len, text.splitlines())) <= width
        (row,) = [line for line in text.splitlines() if line.split()[:1] == ["numpy"]]
        assert row.split() == "numpy 6.9e-06 2.3e-05 30% 4.1e-15 1.0e-12 MATCH 3.2 s".split()


def test_failure_is_a_sentence() -> None:
    words = " ".join(printed(failing()).split())
    rows = [line.split() for line in printed(failing()).splitlines()]
    assert "jax 2.0e-03 2.3e-05 87x 3.2e-05 1.0e-12 DIFFERS 3.2 s".split() in rows
    assert "torch - - - - 1.0e-12 DID NOT RUN -".split() in rows, "all columns fit at width 80"
    assert (
        "DIFFERS jax: first at q_norm (RMSNorm, forward), head 3, position 5. It is off by 3.2e-05 of its token's size."
        in words
    )
    assert "DID NOT RUN torch: No module named 'torch'; install it" in words
    assert "MATCH numpy: only rounding differs" in words
    assert "Not checked numpy: float64: it computes in float32 only" in words


def test_explanation() -> None:
    first = {"stage": "scores", "equation": "3.5", "direction": "forward", "head": None, "position": 0}
    bad = framework(match=False, first_divergence=first | {"explanation": "The scale is 1/d_k [not 1/√d_k]."})
    checks = [artifact.judged(float("nan"), 1e-12, **WHERE)._asdict()]
    words = " ".join(printed(document(frameworks={"numpy": bad}, checks=checks)).split())
    assert "first at scores (eq. 3.5, forward), position 0. The scale" in words
    assert "The scale is 1/d_k [not 1/√d_k]." in words, "brackets are text, not markup"


def test_difference_without_a_place() -> None:
    doc = document(frameworks={"numpy": framework(match=False)}, checks=[artifact.judged(2, 1, **WHERE)._asdict()])
    assert "DIFFERS  numpy: not every check was made; see the evidence." in printed(doc)


@pytest.mark.parametrize(("kind", "words"), [("checkpoint", "the checkpoint tiny"), ("hub", "tiny from the hub")])
def test_source(kind: str, words: str) -> None:
    weights = {"source": {"kind": kind, "revision": "abc"}, "sha256": "0" * 64}
    assert f"Layers 0 and 1, {words}" in printed(document(model="tiny", layers=[0, 1], weights=weights))


def test_long_name_of_a_candidate_stays_readable_at_80() -> None:
    text = printed(document(frameworks={"some/where/port.py:attention_with_a_long_name": framework()}))
    assert "MATCH" in text and "3.2 s" in text and "2.3e-05" in text
    assert max(map(len, text.splitlines())) <= 80


def terminal(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Console:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    file.isatty = lambda: True
    return make_console(file)


def test_colour_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = terminal(monkeypatch, TERM="xterm-256color", COLUMNS="90")
    print_verdict(failing(), coloured)
    assert "\x1b[1;31mDIFFERS" in coloured.file.getvalue()
    plain = terminal(monkeypatch, TERM="xterm-256color", COLUMNS="90", NO_COLOR="1")
    print_verdict(failing(), plain)
    text = plain.file.getvalue()
    assert "\x1b[1;31m" not in text and "31m" not in text and "DIFFERS" in text
    monkeypatch.delenv("COLUMNS")
    piped = make_console(io.StringIO())
    assert piped.width == 100
    print_verdict(failing(), piped)
    assert "\x1b" not in piped.file.getvalue()


def test_a_stream_without_unicode_still_gets_the_verdict() -> None:
    raw = io.BytesIO()
    console = make_console(io.TextIOWrapper(raw, encoding="ascii"))
    first = {"stage": "scores", "equation": "3.5", "direction": "forward", "head": 1, "position": 0}
    print_verdict(
        document(frameworks={"numpy": differing() | {"first_divergence": first | {"explanation": "√"}}}), console
    )
    console.file.flush()
    assert b"DIFFERS" in raw.getvalue()


def run(progress: Progress) -> None:
    with progress:
        for name in ("numpy", "jax", "torch"):
            progress.started(name)
        progress.phase("jax", "compiling")
        progress.live.refresh()
        progress.finished("numpy", 1.25)
        progress.failed("torch", "no module [torch]")
        progress.finished("jax", 3)


def test_progress_piped_is_a_line_as_each_ends() -> None:
    console = make_console(io.StringIO())
    run(Progress(console))
    lines = console.file.getvalue().splitlines()
    assert lines == ["numpy: done in 1.2 s", "torch: did not run: no module [torch]", "jax: done in 3.0 s"]


def test_progress_on_a_terminal_is_live_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal(monkeypatch, TERM="xterm", COLUMNS="80")
    run(Progress(console))
    text = console.file.getvalue()
    assert "compiling" in text and "0:00:0" in text and "did not run: no module [torch]" in text
    assert text.rstrip("\n").endswith("\x1b[2K"), "the last thing it does is to erase its lines"


def test_quiet_progress_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for console in (make_console(io.StringIO()), terminal(monkeypatch, TERM="xterm")):
        run(Progress(console, quiet=True))
        assert console.file.getvalue() == ""


def test_render(capsys: pytest.CaptureFixture[str]) -> None:
    report.render(document(), Path("here"))
    out = capsys.readouterr().out
    assert "MATCH" in out and out.endswith("Report: here/report.html\nEvidence: here/attention_check.json\n")
