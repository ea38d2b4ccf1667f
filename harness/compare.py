"""Compare implementations of an attention layer with Hugging Face's, equation by equation:  python -m harness.compare

Each implementation runs in a process of its own, all at once; this process imports no framework. It makes the case,
draws the rounding noise while the others import, judges each trace as it lands, and writes the artifact at the end.
"""

import argparse
import os
import queue
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from harness import artifact, bugs, environment, judging, scaling
from harness.case import BadInput, Case
from harness.export import Arguments, add_case_arguments, command, open_cases
from harness.judging import LAYER, Judged, Judging
from harness.report import render
from harness.report.console import Progress, make_console
from harness.runners import IMPLEMENTATIONS, PROBES, REFERENCES, Setting, Unusable, Worker, give_way
from impls.spec import STAGES

DTYPES = ("float64", "float32")
ROPES = ("neutral", "model")


class ReferenceFailed(Exception):
    """Hugging Face's layer could not be run, so that there is nothing to compare with."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0 all match, 1 something differs, 2 unusable input, 3 did not run."""
    parser = make_parser()
    try:
        options = parser.parse_args(argv)
        if options.list:
            return print_list()
        check_names(options.impl)
        check_layers(options.layer or [])
        words = ["python", "-m", "harness.compare", *(sys.argv[1:] if argv is None else argv)]
        document = compare(options, shlex.join(words))
    except (BadInput, Unusable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'this machine'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except ReferenceFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted; the last artifact is as it was", file=sys.stderr)
        return 130
    if not options.quiet:
        render(document, options.out / "attention_check.json")
    return int(document["exit_status"])


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = Arguments(
        prog="python -m harness.compare",
        description="Recompute one attention layer in NumPy, JAX and PyTorch and prove, equation by equation, forward "
        "and backward, that only rounding differs from Hugging Face's Qwen3.",
        epilog="exit status: 0 all match, 1 something differs, 2 unusable input or arguments, 3 something did not run",
    )
    add_case_arguments(parser)
    run = parser.add_argument_group("run")
    run.add_argument(
        "--impl",
        nargs="+",
        default=list(IMPLEMENTATIONS),
        metavar="NAME",
        help="which implementations (default: numpy jax torch; --list names all)",
    )
    run.add_argument(
        "--rope",
        choices=["both", *ROPES],
        default="both",
        help="neutral: cos = 1, sin = 0, the chapter's equations alone; model: as in production (default: both)",
    )
    run.add_argument(
        "--dtype",
        choices=[*DTYPES, "bfloat16", "float16"],
        help="only this one (default: float64 for the structure, float32 for the rest). bfloat16 and float16: every "
        "value rounded where the layer rounds it, by NumPy in float32 arithmetic, by JAX and PyTorch natively",
    )
    run.add_argument(
        "--device", choices=["cpu", "gpu", "auto"], default="cpu", help="where JAX and PyTorch compute (default: cpu)"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        type=Path,
        default=Path("artifacts"),
        metavar="DIR",
        help="receives attention_check.json and traces/ (default: artifacts/)",
    )
    output.add_argument(
        "--keep-all",
        action="store_true",
        help="keep every trace whole: float64 and weight gradients too (1.4 GB for the default case)",
    )
    output.add_argument("--quiet", action="store_true", help="print nothing; the exit status tells")
    output.add_argument(
        "--list", action="store_true", help="name the implementations, stages and planted bugs, and stop"
    )
    output.add_argument(
        "--version",
        action="version",
        version=f"attention-check {environment.version('attention-check') or '(not installed)'}",
    )
    return parser


def print_list() -> int:
    """--list: what can be named on the command line and in a trace."""
    print("implementations  " + " ".join([*IMPLEMENTATIONS, "hf-sdpa"]))
    print("stages           " + " ".join(stage.name for stage in STAGES))
    print("planted bugs     an implementation with one of them in it agrees with …")
    for bug in bugs.BUGS:
        for framework in bug.frameworks:
            print(f"  {f'{framework}:{bug.name}':42} {bug.says}")
    return 0


def check_names(names: Sequence[str]) -> None:
    """Raises BadInput for an implementation that there is not."""
    for name in names:
        framework, _, bug = name.partition(":")
        if framework not in (*IMPLEMENTATIONS, "hf-sdpa") or (":" in name and bug not in bugs.names(framework)):
            known = ", ".join([*IMPLEMENTATIONS, "hf-sdpa"])
            raise BadInput(
                f"--impl {name}: no such implementation; there are {known} (--list shows the planted bugs, too)"
            )
        if names.count(name) > 1:
            raise BadInput(f"--impl {name}: named twice")


def check_layers(layers: Sequence[int]) -> None:
    """Raises BadInput for a layer that is named twice."""
    for layer in layers:
        if layers.count(layer) > 1:
            raise BadInput(f"--layer {layer}: named twice")


# ------------------------------------------------------------------------------------------------------------------ run


def compare(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Run everything, write the artifact and return it. Raises BadInput, Unusable, ReferenceFailed."""
    ropes = ROPES if options.rope == "both" else (options.rope,)
    dtypes = (options.dtype,) if options.dtype else DTYPES
    make_folder(options.out)
    console = make_console()
    with (
        scratch(options.out) as folder,
        threadpool_limits(1),  # one for each process, of which as many run as there are cores
        threads(2, give_way) as pool,
        threads(1, give_way) as sampler,
        Progress(console, options.quiet) as progress,
        Workers(options.impl, options.device, progress) as workers,
    ):
        (folder / "traces").mkdir()
        results: list[tuple[Case, list[Judged], Judging]] = []
        for case in open_cases(options, Path("weights")):
            settings = [Setting(name, rope, dtype) for name in case.inputs for rope in ropes for dtype in dtypes]
            case = case.rounded(dtypes[-1])
            judge = Judging(case, options.impl, settings, pool, sampler, folder)
            workers.run(case, settings, judge, folder, keep_all=options.keep_all)
            results.append((case, judge.finish(), judge))
        document = assemble(results, settings, workers, command)
        publish(document, folder, options.out)
    return document


@contextmanager
def threads(count: int, initializer: Callable[[], None] | None = None) -> Iterator[Executor]:
    """A pool of threads; if the run ends early, what they still do is not waited for."""
    pool = ThreadPoolExecutor(count, initializer=initializer)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def make_folder(out: Path) -> None:
    """Make `--out`, free of what killed runs left there. Raises BadInput where the results could not be put there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for left in out.glob(".run-*"):
            if not _alive(left.name.split("-")[1]):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        if (out / "attention_check.json").is_dir():
            raise BadInput(f"--out {out}: attention_check.json is a folder there; choose another folder")
        if (out / "traces").exists() and any(each.suffix != ".safetensors" for each in (out / "traces").iterdir()):
            raise BadInput(
                f"--out {out}: traces/ holds other files than traces, which a run replaces; choose another folder"
            )
    except OSError as error:
        raise BadInput(f"--out {out}: cannot be written to ({error.strerror}); choose another folder") from error


def _alive(process: str) -> bool:
    """Whether a process of this number runs (or cannot be asked)."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        pass
    return True


@contextmanager
def scratch(out: Path) -> Iterator[Path]:
    """A folder inside `out` for this run alone, gone at its end."""
    folder = Path(tempfile.mkdtemp(prefix=f".run-{os.getpid()}-", dir=out)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(document: dict[str, Any], folder: Path, out: Path) -> None:
    """Put the run's traces and its artifact where they belong, both or none. Raises BadInput where it cannot."""
    try:
        artifact.write(document, folder / "attention_check.json")
        if (out / "traces").exists():
            (out / "traces").rename(folder / "old-traces")
        try:
            (folder / "traces").rename(out / "traces")
            (folder / "attention_check.json").replace(out / "attention_check.json")
        except OSError:
            if (folder / "old-traces").exists():
                (out / "traces").rename(folder / "traces")
                (folder / "old-traces").rename(out / "traces")
            raise
    except OSError as error:
        raise BadInput(f"--out {out}: cannot be written to ({error.strerror}); choose another folder") from error


class Workers:
    """The processes of one run: one for each implementation, and one for Hugging Face's layer, eager and sdpa."""

    def __init__(self, names: Sequence[str], device: str, progress: Progress):
        self.names, self.progress = list(names), progress
        self.events: queue.SimpleQueue[tuple[Worker, dict[str, Any]]] = queue.SimpleQueue()
        self.errors: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.matmul_bits: dict[str, dict[str, int]] = {}
        self.accelerators: dict[str, str | None] = {}
        self.device = device
        self.workers: list[Worker] = []

    def __enter__(self) -> "Workers":
        layer = [LAYER, *(name for name in self.names if name in REFERENCES)]
        held = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}
        )  # none is started and not known
        try:
            for group in [layer, *([name] for name in self.names if name not in REFERENCES)]:
                self.progress.started(title(group[0]))
                self.workers.append(Worker(group, self.device, self.events))
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()

    def run(self, case: Case, settings: Sequence[Setting], judge: Judging, folder: Path, keep_all: bool) -> None:
        """Have all of them run one case, and hand each trace to the judge as it lands."""
        paths = {name: str(path) for name, path in case.paths.items()}
        exact = [setting for setting in PROBES if setting.input in judge.answers]
        needed = list(dict.fromkeys(each for s in settings for each in (s._replace(dtype="float64"), s)))
        busy = [worker for worker in self.workers if worker.process.poll() is None]
        for worker in busy:
            worker.job(
                weights=paths["weights"],
                inputs={name: path for name, path in paths.items() if name != "weights"},
                sha256=case.sha256,
                given=settings[-1].dtype,
                settings=needed if LAYER in worker.names else [*settings, *exact],
                traces=str(folder / "traces"),
                scratch=str(folder),
                keep_all=keep_all,
            )
        while busy:
            worker, event = self.events.get()
            if self._handle(worker, event, judge) and worker in busy:  # it may end after its job is done
                busy.remove(worker)

    def _handle(self, worker: Worker, event: dict[str, Any], judge: Judging) -> bool:
        """Take note of an event; whether the worker has ended its job."""
        what, name = event["event"], title(worker.names[0])
        if what == "ready":
            self.accelerators[worker.names[0]] = event["accelerator"]
            self.progress.phase(name, f"imported in {event['seconds']:.1f} s")
        elif what == "running":
            self.progress.phase(name, " ".join(event["setting"]))
        elif what == "trace":
            judge.land(event["name"], Setting(*event["setting"]), event["files"])
        elif what == "unusable":
            raise Unusable(event["message"])
        elif what == "failed":
            self._fail([event["name"]] if event.get("name") else worker.names, event["error"])
        elif what == "done":
            for each, seconds in event["seconds"].items():
                self.seconds[each] = self.seconds.get(each, 0.0) + seconds
            self.matmul_bits |= dict.fromkeys(worker.names, event["matmul_bits"])
            if worker.names[0] not in self.errors:
                self.progress.finished(name, event["seconds"][worker.names[0]])
            return True
        elif what == "exit":
            self._fail(worker.names, event["error"])
            return True
        return False

    def _fail(self, names: Sequence[str], error: str) -> None:
        if LAYER in names:
            raise ReferenceFailed(
                f"Hugging Face's layer could not be run, so there is nothing to compare with: {error}"
            )
        for name in names:
            if name not in self.errors:
                self.errors[name] = error
                self.progress.failed(title(name), error)


def title(name: str) -> str:
    """How progress names an implementation."""
    return "hugging face" if name in REFERENCES else name


# ----------------------------------------------------------------------------------------------------------- document


def assemble(
    results: Sequence[tuple[Case, list[Judged], Judging]], settings: Sequence[Setting], workers: Workers, command: str
) -> dict[str, Any]:
    """The artifact of a run, from the judged comparisons of each case (one for each layer)."""
    case, _, judge = results[0]
    headline = max(settings, key=lambda s: (s.input == "chapter", s.rope == "neutral", s.dtype != "float64"))
    noise = judge.tolerances[headline].result() if headline in judge.tolerances else None
    dtypes = dict.fromkeys(setting.dtype for setting in settings)
    precision = [
        each
        for name in workers.names
        if name in workers.matmul_bits
        for each in judging.precision(results[0][0].layer, name, workers.matmul_bits[name], dtypes)
    ]
    everything = [each for _, judged, _ in results for each in judged] + precision
    layers = [case.layer for case, _, _ in results]
    frameworks = {}
    for name in workers.names:
        entry = judging.verdict(name, everything, headline, noise, case.config.head_dim)
        entry["error"] = workers.errors.get(name)
        if first := entry["first_divergence"]:
            said = next(filter(None, (judge.diagnosis(name) for _, _, judge in results)), None)
            first["explanation"] += f" It agrees with {said} to rounding." if said else ""
        entry["match"] = entry["match"] and entry["error"] is None
        entry["seconds"] = workers.seconds.get(name)
        entry["not_checked"] = judging.not_checked(name, settings, layers, everything)
        frameworks[name] = entry
    checks = [row._asdict() for each in everything for row in judging.rows(each)]
    checks.sort(
        key=lambda row: [row[key] for key in ("layer", "framework", "gate", "against", "dtype", "input", "rope")]
    )
    bound = judging.bounds(noise, None)["max_abs"] if noise else None
    pairwise = judging.pairwise(everything, headline, workers.names, bound)
    ran = [entry for entry in frameworks.values() if entry["max_abs_diff"] is not None]
    match = all(entry["match"] for entry in frameworks.values()) and all(row["match"] for row in checks)
    status = artifact.exit_status(frameworks)
    versions = environment.versions()
    B, T, _ = case.inputs[headline.input]["hidden_states"].shape
    return {
        "schema_version": artifact.SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "model": case.source.get("model") or case.name,
        "layers": layers,
        "batch_size": B,
        "seq_len": T,
        "setting": headline._asdict(),
        "match": match,
        "exit_status": status if match or status else 1,
        "max_abs_diff": max((entry["max_abs_diff"] for entry in ran), default=None),
        "mean_abs_diff": max((entry["mean_abs_diff"] for entry in ran), default=None),
        "frameworks": frameworks,
        "pairwise": pairwise,
        "blind_to": [{"layer": case.layer, **bug} for case, _, judge in results for bug in judge.blind.result()],
        "scaling": scaling.measure() | {"parameters": scaling.parameters(case.config)},
        "weights": {
            "source": case.source,
            "description": case.describe(),
            "sha256": case.sha256["weights"]
            if len(results) == 1
            else {str(c.layer): c.sha256["weights"] for c, _, _ in results},
        },
        "inputs": {name: {**case.made[name], "sha256": case.sha256[name]} for name in case.inputs},
        "reference": {
            "class": "transformers.models.qwen3.modeling_qwen3.Qwen3Attention",
            "attn_implementation": "eager",
            "versions": {name: versions[name] for name in ("transformers", "torch")},
            "seconds": workers.seconds.get(LAYER),
        },
        "environment": environment.describe(next(filter(None, workers.accelerators.values()), None))
        | {
            "versions": versions,
            "matmul_bits": {name: bits[headline.dtype] for name, bits in workers.matmul_bits.items()},
        },
        "checks": checks,
    }


if __name__ == "__main__":
    command(main)
