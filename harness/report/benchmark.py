"""Views of a benchmark: the console's tables, the picture, and what the report shows of it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness import artifact
from harness.rates import BASELINE, DTYPES
from harness.report.console import listed
from harness.timed import DIRECTIONS

Result = Mapping[str, Any]
LEGEND = (
    f"Of {BASELINE}, which without a mask is causal by itself, milliseconds; of the others the multiple of that in the "
    "same round: median, and half of what lies between the quartiles. At the largest length: rate, as a share of that "
    "of a float32 matrix product, and working memory. Time, memory: the exponents with which they grow with the length."
)


class Line(NamedTuple):
    """An implementation in one dtype and direction: cells by length, and the figures that follow from all of them."""

    name: str
    cells: list[tuple[str, str]]  # median, and half of what lies between the quartiles
    share: str
    memory: str
    time_grows: str
    memory_grows: str


class Sheet(NamedTuple):
    """All implementations in one dtype and direction."""

    title: str
    lengths: list[int]
    lines: list[Line]


def latest(*paths: Path) -> Result | None:
    """The first of these files that holds a benchmark of this release."""
    for path in paths:
        with suppress(OSError, ValueError):
            document = artifact.read(path)
            if document.get("schema_version") == artifact.SCHEMA_VERSION and "growth" in document:
                return document
    return None


def sheets(document: Result) -> Iterator[Sheet]:
    """A sheet for each dtype and direction: the baseline's milliseconds, the others as ratios to it."""
    for dtype, direction in product(DTYPES, DIRECTIONS):
        own, grown = (of(document[part], dtype, direction) for part in ("results", "growth"))
        lengths, slopes = sorted({each["seq_len"] for each in own}), {each["implementation"]: each for each in grown}
        if own:
            yield Sheet(f"{dtype}, {direction}", lengths, [line(name, own, lengths, slopes[name]) for name in slopes])


def of(rows: Sequence[Result], dtype: str, direction: str) -> list[Result]:
    """Those of one dtype and direction."""
    return [each for each in rows if (each["dtype"], each["direction"]) == (dtype, direction)]


def line(name: str, results: Sequence[Result], lengths: Sequence[int], slopes: Result) -> Line:
    """The figures of one implementation; a dash where there is none."""
    own = {each["seq_len"]: each for each in results if each["implementation"] == name}
    last = own.get(lengths[-1], {"matmul_share": None, "working_bytes": None})
    return Line(
        f"{name}, ms" if name == BASELINE else name,
        [time_or_ratio(own[T]) if T in own else ("-", "") for T in lengths],
        f"{last['matmul_share']['median']:.0%}" if last["matmul_share"] else "-",
        f"{last['working_bytes'] / 2**20:,.0f}" if last["working_bytes"] else "-",
        *("-" if slopes[key] is None else f"{slopes[key]:.2f}" for key in ("seconds", "working_bytes")),
    )


def time_or_ratio(result: Result) -> tuple[str, str]:
    """The baseline's time in milliseconds, another's ratio to it: its median, and half of what its quartiles span."""
    absolute = result["implementation"] == BASELINE or result["ratio"] is None
    factor, each = (1000, result["seconds"]) if absolute else (1, result["ratio"])
    median, half = factor * each["median"], factor * (each["q3"] - each["q1"]) / 2
    digits = max(0, 2 - int(math.log10(max(median, 1))))
    return f"{median:,.{digits}f}", f"{half:,.{digits}f}"


def omissions(document: Result) -> list[str]:
    """What was left out, and why, in words."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for each in document["left_out"]:
        groups.setdefault((each["dtype"], each["reason"]), []).append(each)
    said = []
    for (dtype, reason), runs in groups.items():
        names, ways = ({each[key]: None for each in runs} for key in ("implementation", "direction"))
        lengths = dict.fromkeys(f"{each['seq_len']:,}" for each in runs)
        said.append(f"{listed(names)}, {dtype}, {listed(ways)}, T = {', '.join(lengths)}: {reason}")
    return said


def print_benchmark(document: Result, console: Console, folder: Path) -> None:
    """Every sheet as a table, what was left out, and where the result lies."""
    for sheet in sheets(document):
        view = Table(title=sheet.title, box=box.SIMPLE_HEAD, pad_edge=False, padding=0, title_justify="left")
        for heading in ("", *(f"{T:,}" for T in sheet.lengths), "rate", "MiB", "time", "memory"):
            view.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for each in sheet.lines:
            cells = [f"{median}±{half.removeprefix('0')}" if half else median for median, half in each.cells]
            view.add_row(Text(each.name), *cells, *each[2:])
        console.print(view)
    console.print(Text(LEGEND))
    for said in omissions(document):
        console.print(Text(f"Left out  {said}"))
    console.print(Text(f"Written: {folder / 'benchmark.json'} and benchmark.svg"), soft_wrap=True)


def picture(document: Result) -> Markup:
    """Time and memory against the length, for the inside of a page."""
    from harness.report import figures  # brings matplotlib

    panels = []
    for dtype in dict.fromkeys(each["dtype"] for each in document["results"]):
        own = [each for each in document["results"] if each["dtype"] == dtype]
        forward, both = ([each for each in own if each["direction"] == direction] for direction in DIRECTIONS)
        panels += [
            (f"{dtype}: forward, ms", series(forward, lambda each: 1000 * each["seconds"]["median"])),
            ("forward + backward, ms", series(both, lambda each: 1000 * each["seconds"]["median"])),
            ("its memory, MiB", series(both, lambda each: (each["working_bytes"] or 0) / 2**20)),
        ]
    return figures.against_length(panels, columns=3)


def series(results: Sequence[Result], value: Any) -> dict[str, dict[int, float]]:
    """Implementation -> length -> value, of what is above 0."""
    found: dict[str, dict[int, float]] = {}
    for each in results:
        if value(each) > 0:
            found.setdefault(each["implementation"], {})[each["seq_len"]] = value(each)
    return found
