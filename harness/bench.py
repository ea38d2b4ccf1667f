"""How fast each implementation is, and how much memory it takes, beside Hugging Face's layer:  python -m harness.bench

The whole layer, forward and forward with backward, on the seeded case. Every implementation is a process of its own
(`harness.timed`) with as many threads as there are cores; they take turns, and only one computes at a time. A round
asks each of them once, in random order, so that whatever the machine does besides hits all alike. What counts is the
ratio to Hugging Face's sdpa in the same round, and the share of the machine's own rate, that of a large matrix product
in the same round. Compiling comes before and is not counted.

It writes `benchmark.json`, whose fields and schema are in `harness.rates`, and `benchmark.svg`.
"""

import argparse
import os
import queue
import random
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from harness import artifact, environment, runners
from harness.case import QWEN3_0_6B, BadInput, seeded_case
from harness.export import MOST_TOKENS, Arguments, command
from harness.rates import BASELINE, DTYPES, NAMES, Run, exponent, growth, rows, spread
from harness.report.benchmark import picture, print_benchmark
from harness.report.console import Progress, make_console
from harness.runners import Unusable, Worker
from harness.timed import DIRECTIONS, MATMUL, MATMUL_SIZE

SEQ_LENS = (12, 64, 512, 2048, 4096, 8192)
ROUNDS = 7
MOST_MEMORY = 0.8
"""Of what is free: a run that is expected to hold more is left out."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 2 for unusable arguments, 3 where an implementation failed."""
    try:
        options = make_parser().parse_args(argv)
        check_options(options)
        typed = shlex.join(["python", "-m", "harness.bench", *(sys.argv[1:] if argv is None else argv)])
        document = bench(options, typed)
        write(document, options.out / "benchmark.json")
    except (BadInput, Unusable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'this machine'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the last result is as it was", file=sys.stderr)
        return 130
    if not options.quiet:
        print_benchmark(document, make_console(), options.out)
    return 3 if any(each["failed"] for each in document["left_out"]) else 0


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = Arguments(
        prog="python -m harness.bench",
        description="Time the whole layer, forward and forward+backward, in every implementation: as ratios to Hugging "
        "Face's sdpa, and as shares of what a matrix product reaches. All of it takes over an hour on two cores.",
        epilog="exit status: 0 done, 2 unusable arguments, 3 an implementation failed (the others are measured)",
    )
    add = parser.add_argument
    add("--impl", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)} (all)")
    add("--seq-len", nargs="+", type=int, default=SEQ_LENS, metavar="T", help="tokens (several, from 12 to 8192)")
    add("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="(both)")
    add("--rounds", type=int, default=ROUNDS, metavar="R", help=f"samples of each ({ROUNDS})")
    add("--device", choices=["cpu", "gpu"], default="cpu", help="where JAX and PyTorch compute (cpu)")
    add("--out", type=Path, default=Path("artifacts"), metavar="DIR", help="receives benchmark.json (artifacts/)")
    add("--quiet", action="store_true", help="print nothing")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raises BadInput for what cannot be measured, or not be written."""
    for T in options.seq_len:
        if not 1 <= T <= MOST_TOKENS:
            raise BadInput(f"--seq-len {T}: it must be from 1 to {MOST_TOKENS}")
    if options.rounds < 1:
        raise BadInput(f"--rounds is {options.rounds}; it must be at least 1")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    except OSError as error:
        raise BadInput(f"--out {options.out}: cannot be written to ({error.strerror}); choose another") from error
    for name in ("benchmark.json", "benchmark.svg"):
        if (options.out / name).is_dir():
            raise BadInput(f"--out {options.out}: {name} is a folder there; choose another")


# ------------------------------------------------------------------------------------------------------------------ run


def bench(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure everything and return the document. Raises Unusable where there is no such device."""
    names = list(dict.fromkeys([BASELINE, *options.impl]))
    lengths, load = sorted(set(options.seq_len)), os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(make_console(sys.stderr), options.quiet) as progress,
        Processes([MATMUL, *names], options.device) as processes,
    ):
        measured = Measured(processes, progress)
        for T in steps(lengths):
            paths = seeded_case(Path(folder), 0, 1, T).paths
            files = {"weights": str(paths["weights"]), "input": str(paths["chapter"])}
            for dtype, direction in product(options.dtype, DIRECTIONS):
                run = {"dtype": dtype, "seq_len": T, "direction": direction}
                measured.run(run, files, options.rounds if T in lengths else 0)
        ready = processes.ready
    accelerator = next((each["accelerator"] for each in ready.values() if each["accelerator"]), None)
    return {
        "schema_version": artifact.SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": options.device,
        "batch_size": 1,
        "sizes": QWEN3_0_6B.sizes(),
        "rounds": options.rounds,
        "baseline": BASELINE,
        "matmul": {"size": MATMUL_SIZE[options.device], "gflops": measured.gflops},
        "load_average": round(load, 2),
        "results": measured.results,
        "growth": growth(measured.results),
        "left_out": measured.left_out,
        "environment": environment.describe(accelerator, environment.nvidia()[1] if accelerator else None)
        | {"versions": environment.versions()}
        | {"matmul_bits": {name: each["matmul_bits"] for name, each in ready.items()}},
    }


def steps(lengths: Sequence[int]) -> list[int]:
    """The lengths with shorter ones between, run once each, so that memory's growth is known before it is too large."""
    known = set(lengths)
    for T in lengths:
        while T > 1024 and not any(T / 4 <= each < T for each in known):
            T //= 4
            known.add(T)
    return sorted(known)


class Failed(Exception):
    """An implementation could not do what it was asked; the message says why."""


class Processes:
    """One process for each name; `ask` has one of them compute while the others wait."""

    def __init__(self, names: Sequence[str], device: str):
        self.names, self.device = names, device
        self.events: queue.SimpleQueue[tuple[Worker, dict[str, Any]]] = queue.SimpleQueue()
        self.workers: dict[str, Worker] = {}
        self.ready: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, str] = {}

    def __enter__(self) -> "Processes":
        try:
            for name in self.names:
                given = self.device, self.events, "harness.timed", variables(name, self.device)
                self.workers[name] = Worker([name], *given)
            while len(self.ready | self.ended) < len(self.names):
                self._hear()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.end()

    def ask(self, name: str, **job: Any) -> dict[str, Any]:
        """The answer to a job. Raises Failed where it failed, or its process has ended."""
        if name not in self.ended:
            self.workers[name].job(**job)
        while name not in self.ended:
            who, event = self._hear()
            if who == name and event["event"] == "failed":
                raise Failed(event["error"])
            if who == name and event["event"] in ("prepared", "timed"):
                return event
        raise Failed(self.ended[name])

    def _hear(self) -> tuple[str, dict[str, Any]]:
        worker, event = self.events.get()
        (name,) = worker.names
        if event["event"] == "unusable":
            raise Unusable(event["message"])
        if event["event"] == "ready":
            self.ready[name] = event
        elif event["event"] == "exit" or name not in self.ready:  # it could not be imported
            self.ended.setdefault(name, event["error"])
        return name, event


def variables(name: str, device: str) -> dict[str, str]:
    """A process's environment: all cores, but for numpy-tiled, whose heads are on threads; no cache of compilations."""
    root, threads = Path(__file__).resolve().parent.parent, 1 if name == "numpy-tiled" else os.cpu_count()
    own = {f"{library}_NUM_THREADS": str(threads) for library in ("OPENBLAS", "OMP", "MKL")}
    own |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the processes share the GPU's memory
    own |= {"MALLOC_ARENA_MAX": "1"}  # glibc: what a thread has freed can be given back before memory is measured
    given = runners.environment(root, device)
    return {key: value for key, value in given.items() if not key.startswith(("MALLOC_", "JAX_COMP", "JAX_PERS"))} | own


class Measured:
    """What is measured of a set of processes: one run of all of them after the other."""

    def __init__(self, processes: Processes, progress: Progress):
        self.processes, self.progress = processes, progress
        self.results: list[dict[str, Any]] = []
        self.left_out: list[dict[str, Any]] = []
        self.held: dict[tuple[str, ...], dict[int, int]] = {}
        self.matmul_seconds: list[float] = []

    @property
    def gflops(self) -> dict[str, float] | None:
        """The rate of the matrix product over all rounds, in 10⁹ operations a second."""
        size = MATMUL_SIZE[self.processes.device]
        return spread(2 * size**3 / 1e9 / np.array(self.matmul_seconds)) if self.matmul_seconds else None

    def run(self, run: Run, files: Mapping[str, str], rounds: int) -> None:
        """Prepare all of them, then ask each for a sample in every round."""
        title = f"T = {run['seq_len']:,}, {run['dtype']}, {run['direction']}"
        self.progress.started(title)
        prepared = {}
        for name in self.processes.names:
            self.progress.phase(title, f"preparing {name}")
            if answer := self.prepare(name, run, files):
                prepared[name] = answer
        seconds: dict[str, list[float]] = {name: [] for name in prepared}
        for number in range(rounds):
            self.progress.phase(title, f"round {number + 1} of {rounds}")
            for name in random.Random(f"{title} {number}").sample([*seconds], len(seconds)):
                try:
                    seconds[name].append(self.processes.ask(name)["seconds"])
                except Failed as error:
                    self.leave_out(name, run, str(error), failed=True)
                    del seconds[name]
        self.matmul_seconds += seconds.get(MATMUL, [])
        if rounds:
            self.results += rows(run, seconds, prepared, QWEN3_0_6B, self.processes.device)
        self.progress.finished(title, sum(map(sum, seconds.values())))

    def prepare(self, name: str, run: Run, files: Mapping[str, str]) -> dict[str, Any] | None:
        """What it says of its first call, whose memory is kept in mind; None where it is left out."""
        held = self.held.setdefault((name, run["dtype"], run["direction"]), {})
        reason = too_large(held, run["seq_len"]) if self.processes.device == "cpu" else ""
        if name.startswith("numpy") and run["dtype"] == "bfloat16":
            reason = "NumPy has no bfloat16 arithmetic"
        if name.startswith("numpy") and self.processes.device == "gpu":
            reason = "NumPy computes on no GPU"
        if reason:
            self.leave_out(name, run, reason, failed=False)
            return None
        try:
            answer = self.processes.ask(name, **files, dtype=run["dtype"], direction=run["direction"])
        except Failed as error:
            self.leave_out(name, run, str(error), failed=True)
            return None
        if answer["memory"]:
            held[run["seq_len"]] = answer["memory"]["working"]
        return answer

    def leave_out(self, name: str, run: Run, reason: str, failed: bool) -> None:
        """Say why there is no result."""
        self.left_out.append({"implementation": name, **run, "reason": reason, "failed": failed})


def too_large(held: Mapping[int, int], seq_len: int) -> str:
    """Why a run is not tried, "" if it may be: memory is taken to grow as over the two lengths before it, and by a
    quarter of a power more, for what was constant there."""
    free, points = psutil.virtual_memory().available, sorted((T, most) for T, most in held.items() if most)
    slope = exponent(dict(points[-2:]))
    if slope is None:
        return ""
    expected = points[-1][1] * (seq_len / points[-1][0]) ** min(2.0, max(1.0, slope + 0.25))
    if expected <= MOST_MEMORY * free:
        return ""
    return f"it would need about {expected / 2**30:.0f} GiB of memory, and {free / 2**30:.0f} GiB are free"


def write(document: Mapping[str, Any], path: Path) -> None:
    """The document and, beside it, its picture, each whole or not at all."""
    from harness.report.figures import standalone  # brings matplotlib

    part = path.with_name(f".{path.stem}.svg.{os.getpid()}")
    try:
        part.write_text(standalone(picture(document)), encoding="utf-8")
        part.replace(path.with_suffix(".svg"))
    finally:
        part.unlink(missing_ok=True)
    artifact.write(document, path)


if __name__ == "__main__":
    command(main)
