"""The verdict as a table that a person reads in five seconds, and the progress of a run before it."""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich import box, progress
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

MATCH, DIFFERS, DID_NOT_RUN = "MATCH", "DIFFERS", "DID NOT RUN"
STYLE = {MATCH: "bold green", DIFFERS: "bold red", DID_NOT_RUN: "bold yellow"}


def make_console(file: IO[str] | None = None) -> Console:
    """A console on `file` (standard output): coloured on a terminal unless NO_COLOR is set, 100 wide where piped."""
    file = file or sys.stdout
    if (reconfigure := getattr(file, "reconfigure", None)) is not None:
        reconfigure(errors="replace")  # a stream that cannot encode a symbol still gets the verdict
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 100
    console.width = max(console.width, 72)  # narrower, the table would lose its columns
    return console


# ------------------------------------------------------------------------------------------------------------ verdict


def print_verdict(document: Mapping[str, Any], console: Console, folder: Path | None = None) -> None:
    """Print what was compared, the table, the verdict in words, what was not checked, and where the evidence lies."""
    console.print(Text(subject(document)))
    console.print(verdict_table(document))
    if exchanges := exchanged(document):
        console.print(exchange_table(exchanges))
    for word, sentence in sentences(document):
        console.print(Text.assemble((word, STYLE[word]), f"  {sentence}"))
    for what, owners in not_checked(document).items():
        console.print(Text(f"Not checked  {listed(owners)}: {what}"))
    for reason, names in blind_spots(document).items():
        console.print(Text(f"Hidden from the output  {listed(names)}: {reason}"))
    if folder is not None:
        console.print(Text(f"Report: {folder / 'report.html'}"), soft_wrap=True)
        console.print(Text(f"Evidence: {folder / 'attention_check.json'}"), soft_wrap=True)


def verdict(framework: Mapping[str, Any]) -> str:
    """MATCH, DIFFERS or DID NOT RUN; one that differed before it crashed differs."""
    if framework["error"] is not None and not framework["first_divergence"]:
        return DID_NOT_RUN
    return MATCH if framework["match"] else DIFFERS


def subject(document: Mapping[str, Any]) -> str:
    """Which weights and inputs were used, in plain words."""
    source, model = document["weights"]["source"], document["model"]
    weights = {
        "seeded": f"seeded weights of {model}'s shape (made up, not the trained ones)",
        "checkpoint": f"the checkpoint {model}",
        "hub": f"{model} from the hub, revision {source.get('revision')}",
    }[source["kind"]]
    layers = document["layers"]
    return (
        f"Layer{'s' * (len(layers) > 1)} {listed(str(layer) for layer in layers)}, {weights}; "
        f"input{'s' * (len(document['inputs']) > 1)} {listed(document['inputs'])}, "
        f"B = {document['batch_size']}, T = {document['seq_len']}."
    )


def verdict_table(document: Mapping[str, Any]) -> Table:
    """One line for each implementation: difference, tolerance, share; structure, limit; verdict; time."""
    setting = document["setting"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption = f"Difference: {setting['input']} input, {setting['rope']} RoPE, {setting['dtype']}, against "
    table.caption += "Hugging Face's layer. Used: largest share of any tolerance. Structure: worst relative "
    table.caption += "difference in float64, of any stage or gradient."
    if any(verdict(framework) == DIFFERS for framework in document["frameworks"].values()):
        table.caption += " What differs may show in another input, RoPE or stage only."
    table.caption_justify, table.caption_style = "left", "dim"
    table.add_column("", overflow="fold", min_width=5)
    for heading in ("max |diff|", "tolerance", "used", "structure", "limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for name, framework in document["frameworks"].items():
        word = verdict(framework)
        tolerance = framework["tolerance"] or {}
        table.add_row(
            Text(name),
            number(framework["max_abs_diff"]),
            number(tolerance.get("max_abs")),
            share(tolerance.get("largest_share")),
            number(framework["structure"]),
            number(framework["structure_limit"]),
            Text(word, STYLE[word]),
            "-" if framework["seconds"] is None else f"{framework['seconds']:.1f} s",
        )
    return table


EXCHANGES = (
    "Between devices: what all of them together send. JAX's is read from its compiled program, PyTorch's is counted as "
    "it is called; each as a ring sends it."
)


def exchanged(document: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What each implementation that is spread over devices sends, by pass, in words."""
    return {
        name: {
            which: ", ".join(f"{size(n)} {what}" for what, n in sent.items()) or "nothing"
            for which, sent in framework["exchanged"].items()
        }
        for name, framework in document["frameworks"].items()
        if framework.get("exchanged")
    }


def exchange_table(exchanges: Mapping[str, Mapping[str, str]]) -> Table:
    """One line for each implementation and pass."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    table.caption, table.caption_justify, table.caption_style = EXCHANGES, "left", "dim"
    for name, passes in exchanges.items():
        for i, (which, sent) in enumerate(passes.items()):
            table.add_row(Text(name * (not i)), which, sent)
    return table


def size(count: float) -> str:
    """Bytes in words: 12.3 kB."""
    return decimal(round(count), precision=1)


def sentences(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The verdict in words: one sentence if all is well, else one for each implementation that is not."""
    frameworks = document["frameworks"]
    for name, framework in frameworks.items():
        if verdict(framework) == DIFFERS:
            alone = any(what.startswith("all but the output") for what in framework["not_checked"])
            yield DIFFERS, f"{name}: {divergence(framework['first_divergence'], alone)}"
    owners = dict.fromkeys(row["framework"] for row in document["checks"] if not row["match"])
    for name in owners:
        if name not in frameworks:
            yield DIFFERS, f"{name}: Hugging Face's own layer is outside the tolerance; see the evidence."
    for pair, between in document["pairwise"].items():
        if not between["match"] and all(frameworks[name]["match"] for name in pair.split("/")):
            yield DIFFERS, f"{pair}: each agrees with the layer, but not with the other; see the evidence."
    for name, framework in frameworks.items():
        if verdict(framework) == DID_NOT_RUN:
            yield DID_NOT_RUN, f"{name}: {framework['error']}"
    well = [name for name, framework in frameworks.items() if verdict(framework) == MATCH]
    backward = {
        (row["framework"], row["gate"] == "probes") for row in document["checks"] if row["direction"] == "backward"
    }
    groups: dict[str, list[str]] = {}
    for name in well:
        probed = "forward, and backward on the probes alone" if (name, True) in backward else None
        words = "forward and backward" if (name, False) in backward else probed or "forward; no gradient was shown"
        partial = any("no trace of" in what for what in frameworks[name]["not_checked"])
        groups.setdefault(words + ", and not all runs" * partial, []).append(name)
    for ways, names in groups.items():
        if names:
            count = sum(row["framework"] in names for row in document["checks"])
            yield MATCH, f"{listed(names)}: only rounding differs, {ways} (checks held: {count:,})."


def divergence(first: Mapping[str, Any] | None, alone: bool = False) -> str:
    """Where an implementation first differs: stage, equation, direction, head, position, and what it means.

    `alone` where nothing but its output was seen.
    """
    if first is None:
        return "not every check was made; see the evidence."
    equation = first["equation"]
    place = f" ({'eq. ' * equation[:1].isdigit()}{equation}, {first['direction']})" if equation != "none" else ""
    text = "in its output, which is all that it returned" if alone else f"first at {first['stage']}{place}"
    text += "".join(f", {what} {first[what]}" for what in ("head", "position") if first[what] is not None)
    return f"{text}. {first['explanation'] or ''}".rstrip()


def not_checked(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """What no gate saw, and of which implementations."""
    said: dict[str, list[str]] = {}
    for name, framework in document["frameworks"].items():
        for what in framework["not_checked"]:
            said.setdefault(what, []).append(name)
    return said


def blind_spots(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """What this case cannot show, by reason: bugs that would move its output by no more than rounding."""
    spots: dict[str, dict[str, None]] = {}
    for bug in document["blind_to"]:
        spots.setdefault(bug["reason"].partition(" (")[0], {})[bug["name"]] = None
    return {reason: list(names) for reason, names in spots.items()}


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def share(value: float | None) -> str:
    """A share of a limit: what is far beyond it is said in multiples."""
    if value is None:
        return "-"
    return f"{value:.0%}" if value < 10 else f"{float(f'{value:.2g}'):,.0f}x" if value < 1e7 else f"{value:.0e}x"


def listed(names: Any) -> str:
    """a, b and c"""
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last


# ----------------------------------------------------------------------------------------------------------- progress


class Progress:
    """What each implementation is doing: a live line each on a terminal, a plain line at its end where piped.

    A context manager. The live lines vanish at the end, so that the table stands alone; `quiet` shows nothing.
    """

    def __init__(self, console: Console, quiet: bool = False) -> None:
        live = console.is_interactive and not quiet
        self.console, self.plain = console, not live and not quiet
        self.tasks: dict[str, progress.TaskID] = {}
        self.live = progress.Progress(
            progress.SpinnerColumn("dots" if console.encoding.startswith("utf") else "line"),
            progress.TextColumn("{task.description}", markup=False),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
            disable=not live,
        )

    def __enter__(self) -> "Progress":
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def started(self, name: str) -> None:
        """Its process was started; its clock runs from here."""
        self.tasks[name] = self.live.add_task(name, total=1, text="")

    def phase(self, name: str, text: str) -> None:
        """What it is doing now."""
        self.live.update(self.tasks[name], text=text)

    def finished(self, name: str, seconds: float) -> None:
        """It is done, after so many seconds."""
        self.end(name, f"done in {seconds:.1f} s")

    def failed(self, name: str, why: str) -> None:
        """It could not run."""
        self.end(name, f"did not run: {why}")

    def end(self, name: str, text: str) -> None:
        if self.plain:
            self.console.print(Text(f"{name}: {text}"), soft_wrap=True)
        self.live.update(self.tasks[name], text=text, completed=1)
