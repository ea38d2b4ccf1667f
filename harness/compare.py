"""Compare implementations of an attention layer with Hugging Face's, equation by equation:  python -m harness.compare

Each implementation runs in a process of its own, all at once; this process imports no framework. It makes the case,
draws the rounding noise while the others import, judges each trace as it lands, and writes the artifact at the end.
"""

import argparse
import difflib
import fcntl
import itertools
import os
import shlex
import shutil
import sys
import tempfile
import warnings
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from harness import artifact, bugs, environment, exchange, long, mesh
from harness.case import BadInput, alive, open_tensors
from harness.document import Layer, assemble, conclude
from harness.export import Arguments, add_case_arguments, check_layers, command, open_cases, print_any_text
from harness.gates import whole
from harness.judging import LAYER, Judging
from harness.report import render
from harness.report.console import Progress, make_console
from harness.report.markdown import markdown
from harness.runners import (
    CACHED,
    IMPLEMENTATIONS,
    LIBRARIES,
    SPARE,
    TILED,
    Loaded,
    Setting,
    Unusable,
    delete,
    give_way,
    ours,
    room,
    shown,
    trace_file,
)
from harness.workers import Limits, Ran, ReferenceFailed, Workers
from impls.spec import STAGES

NAMED = (*IMPLEMENTATIONS, *LIBRARIES, *TILED, *CACHED, "hf-sdpa")
"""What --impl can name, and each of IMPLEMENTATIONS with a planted bug."""
PLANTED = (*IMPLEMENTATIONS, "jax-mesh", "torch-mesh")
"""What bugs can be planted in: the latter two in jax@… and torch@…."""
DTYPES = ("float64", "float32")
RUN, PASSING = ".run-", "attention-check-"
"""How the folders of a run are named, before its process: in `--out`, and in memory."""
MEMORY = Path("/dev/shm")
"""Linux's file system in memory."""
ROPES = ("neutral", "model")
DESCRIPTION = """\
Recompute one attention layer in NumPy, JAX and PyTorch and prove, equation by equation, forward and backward, that
only rounding differs from Hugging Face's Qwen3. Writes a report, report.html, and all evidence."""
EXAMPLES = """\
examples:
  python -m harness.compare --open                                   the three implementations, and the report
  python -m harness.compare --candidate port.py:attention            your own function
  python -m harness.compare --model Qwen/Qwen3-0.6B --text "The bank of the river"      real weights, real input
  python -m harness.compare --weights path/to/Qwen3-0.6B --layer 0 27                  layers of a checkpoint
  python -m harness.compare --impl numpy:eps_1e-5                    what a mistake looks like (--list names all)
  python -m harness.compare --impl torch jax-dpa --dtype bfloat16    in the format of production
  python -m harness.export --case kit                                for a program in another language, then
  python -m harness.compare --trace answers/                         what it wrote

exit status: 0 all match, 1 something differs, 2 unusable input or arguments, 3 something did not run"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0 all match, 1 something differs, 2 unusable input, 3 did not run."""
    parser = make_parser()
    print_any_text()
    try:
        options = parser.parse_args(argv)
        if options.list:
            return print_list()
        if options.impl is None:
            options.impl = [] if options.candidate or options.trace else list(IMPLEMENTATIONS)
        options.impl += [f"jax@{axes}" for axes in options.mesh] + [f"torch@heads={n}" for n in options.world_size]
        options.quiet |= options.json == "-"
        check_options(options)
        check_layers(options.layer or [])
        typed = shlex.join(["python", "-m", "harness.compare", *(sys.argv[1:] if argv is None else argv)])
        document = rejudge(options, typed) if options.rejudge else compare(options, typed)
        write_views(document, options)
    except (BadInput, Unusable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'this machine'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except ReferenceFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except MemoryError:
        print("error: this machine has too little memory; choose a smaller --batch or --seq-len", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the last artifact is as it was", file=sys.stderr)
        return 130
    return int(document["exit_status"])


def write_views(document: dict[str, Any], options: argparse.Namespace) -> None:
    """What was asked for besides the artifact: the console's verdict, JSON, a summary for GitHub, the page opened."""
    if options.json == "-":
        print(artifact.dumps(document), end="")
    elif options.json:
        artifact.write(document, options.json)
    if not options.quiet:
        render(document, None if options.rejudge else options.out)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(markdown(document))
    if options.open and not webbrowser.open((options.out / "report.html").resolve().as_uri()):
        print(f"--open: there is no browser here; the report is {options.out / 'report.html'}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = Arguments(
        prog="python -m harness.compare",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    add_case_arguments(parser)
    run = parser.add_argument_group("run")
    run.add_argument(
        "--impl",
        nargs="+",
        metavar="NAME",
        help="which implementations (default: numpy jax torch, and with --candidate or --trace none; --list names all)",
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
    run.add_argument(
        "--mesh",
        action="append",
        default=[],
        metavar="AXES",
        help="also JAX over a mesh of devices, as in heads=4,sequence=2 or batch=2 (a CPU poses as so many), perhaps "
        "with processes=2; the same as --impl jax@heads=4,sequence=2 (repeatable)",
    )
    run.add_argument(
        "--world-size",
        action="append",
        default=[],
        metavar="N",
        help="also PyTorch, tensor parallel in N processes; the same as --impl torch@heads=N (repeatable)",
    )
    own = parser.add_argument_group("your own")
    own.add_argument(
        "--candidate",
        action="append",
        default=[],
        metavar="F",
        help="file.py:function or package.module:function, called as function(weights, inputs, config) with NumPy "
        "arrays; returns the output, or a dict of stages (repeatable)",
    )
    own.add_argument(
        "--trace",
        nargs="+",
        action="extend",
        default=[],
        type=Path,
        metavar="FILE",
        help="what a program in any language wrote: files named after the runs that python -m harness.export --case "
        "wrote down, or their folder",
    )
    own.add_argument(
        "--rejudge",
        type=Path,
        metavar="DIR",
        help="judge the traces in this folder of an earlier run again; nothing is run, and nothing written but --json",
    )
    own.add_argument(
        "--time-limit",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds that a candidate, or jax@… and torch@…, may take for one run (120)",
    )
    own.add_argument(
        "--memory-limit", type=float, default=16.0, metavar="GiB", help="memory a candidate's process may hold (16)"
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
    output.add_argument(
        "--json", metavar="FILE|-", help="write the artifact there, too; - is standard output, and nothing else on it"
    )
    output.add_argument("--open", action="store_true", help="open the report in a browser")
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
    print("implementations  " + " ".join(NAMED))
    print("stages           " + " ".join(stage.name for stage in STAGES))
    print("planted bugs     an implementation with one of them in it has …")
    for bug in bugs.BUGS:
        for framework in (each.replace("-mesh", "@…") for each in bug.frameworks):
            print(f"  {f'{framework}:{bug.name}':42} {bug.says}")
    return 0


def check_options(options: argparse.Namespace) -> None:
    """Raises BadInput for an implementation that there is not, and for limits that nothing could keep."""
    for name in options.impl:
        framework, colon, bug = name.partition(":")
        page = f"{mesh.parse(name).framework}-mesh" if "@" in name else framework
        planted = page in PLANTED and bug in bugs.names(page)
        if not (planted if colon else "@" in name or name in NAMED):
            near = difflib.get_close_matches(name, [*NAMED, *(f"{framework}:{each}" for each in bugs.names(page))])
            hint = f" Did you mean {near[0]}?" if near else ""
            raise BadInput(
                f"--impl {name}: no such implementation; there are {', '.join(NAMED)} (--list shows the planted bugs, "
                f"too); your own is given by --candidate.{hint}"
            )
    for name in options.candidate:
        place, _, function = name.rpartition(":")
        if not place or not function.isidentifier() or ours(name):
            raise BadInput(f"--candidate {name}: expected path/to/file.py:function or package.module:function")
        if place.endswith(".py") and not Path(place).is_file():
            raise BadInput(f"--candidate {name}: there is no file {place}")
    for flag, names in (("--impl", options.impl), ("--candidate", options.candidate)):
        for name in names:
            if names.count(name) > 1:
                raise BadInput(f"{flag} {name}: named twice")
    if options.rejudge and (given := [flag for flag, value in of_a_run(options).items() if value]):
        raise BadInput(f"--rejudge judges what its folder holds; leave out {', '.join(given)}")
    if options.json not in (None, "-") and Path(options.json).is_dir():
        raise BadInput(f"--json {options.json}: a folder; name a file, or - for standard output")
    for flag, value in (("--time-limit", options.time_limit), ("--memory-limit", options.memory_limit)):
        if not value > 0:
            raise BadInput(f"{flag} is {value:g}; it must be above 0")


def of_a_run(options: argparse.Namespace) -> dict[str, bool]:
    """The flags that say what to run, and which of them are given."""
    return {
        "--impl": [name for name in options.impl if not mesh.spread(name)] != list(IMPLEMENTATIONS),
        "--mesh": bool(options.mesh),
        "--world-size": bool(options.world_size),
        "--candidate": bool(options.candidate),
        "--trace": bool(options.trace),
        "--open": options.open,
        "--rope": options.rope != "both",
        "--dtype": options.dtype is not None,
        "--device": options.device != "cpu",
        "--keep-all": options.keep_all,
    }


# ------------------------------------------------------------------------------------------------------------------ run


def compare(
    options: argparse.Namespace,
    command: str,
    here: Mapping[str, Loaded] | None = None,
    directory: Path = Path("weights"),
) -> dict[str, Any]:
    """Run everything, write the artifact and return it. Raises BadInput, Unusable, ReferenceFailed.

    `here` are implementations to run in this process; `directory` receives the case.
    """
    ropes = ROPES if options.rope == "both" else (options.rope,)
    dtypes: tuple[str, ...] = (options.dtype,) if options.dtype else DTYPES
    processes = [*options.impl, *options.candidate]
    traces = exchange.answers(options.trace)
    make_folder(options.out)
    with scratch(options.out) as folder:
        with (
            memory(folder) as passing,
            judges() as (pool, sampler),
            Progress(make_console(), options.quiet) as progress,
            Workers(processes, options.device, Limits(options.time_limit, options.memory_limit), progress) as workers,
        ):
            workers.delete(passing)
            prepared = pool.submit(prepare_report)
            (folder / "traces").mkdir()
            names = [*processes, *(here or {}), *traces]
            layers: list[Layer] = []
            for case in open_cases(options, directory):
                if long.is_long(case):
                    long.check(case, names, options.dtype, bool(options.candidate or traces or here))
                    names = list(dict.fromkeys(["hf-sdpa", *names]))
                    case, ropes = long.shortened(case), ropes[-1:]
                    dtypes = (options.dtype,) if options.dtype else long.dtypes(case)
                for name in filter(mesh.spread, names):
                    mesh.check(name, case.config, options.dtype)
                settings = [Setting(name, rope, dtype) for name in case.inputs for rope in ropes for dtype in dtypes]
                case = case.rounded(dtypes[-1])
                judging, goes = (long.RowJudging, folder) if long.is_long(case) else (Judging, passing)
                judge = judging(case, names, settings, pool, sampler, goes)
                exchange.land(traces, case, judge, settings)
                workers.run(case, settings, judge, folder, options.keep_all, here)
                layers.append(conclude(judge, names, {name for layer in layers for name in layer.diagnoses}))
                let_go(judge, layers, folder, options.keep_all)
            run = f"traces/{date.today()}-{folder.name.rpartition('-')[2]}"
            if passing != folder:
                delete(passing)  # while there are workers: they do it if this process is killed now
            workers.kill()
            document = assemble(layers, names, workers.ran, command, run)
            prepared.result()
        write_report(document, folder, options.out)
        publish(document, folder, options.out)
    return document


def let_go(judge: Judging, layers: Sequence[Layer], folder: Path, keep_all: bool) -> None:
    """Delete the traces of a layer that are not to stay: of several, the first one's stay, and of those that differ."""
    differs = any(not finding.match for each in layers[-1].judged for finding in each.findings)
    stays = {folder / "traces"} if keep_all or differs or len(layers) == 1 else set()
    for files in judge.files.values():
        path = Path(files[""])
        if (path.is_relative_to(folder) or path.parent == judge.folder) and path.parent not in stays:
            path.unlink(missing_ok=True)  # of a long case, the layer in float32 has two names


def rejudge(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Judge the traces that a run has kept, and return the artifact that it would have; nothing is run or written.

    Raises BadInput where there are none, or the case chosen is not theirs.
    """
    old = read_artifact(options.rejudge)
    names, traces = list(old["frameworks"]), old.get("traces", "traces")
    ran = Ran(
        errors={name: each["error"] for name, each in old["frameworks"].items() if each["error"] is not None},
        seconds={name: each["seconds"] for name, each in old["frameworks"].items() if each["seconds"] is not None},
    )
    settings = [Setting(*each) for each in dict.fromkeys((r["input"], r["rope"], r["dtype"]) for r in old["checks"])]
    settings = [each for each in settings if each.input in old["inputs"] and each.rope in ROPES]
    if not settings or not names:
        raise BadInput(
            f"--rejudge {options.rejudge}: its artifact has no checks of its inputs; run the comparison again"
        )
    rounded = [each.dtype for each in settings if each.dtype != "float64"]
    with tempfile.TemporaryDirectory() as folder, judges() as (pool, sampler):
        layers: list[Layer] = []
        for case in open_cases(options, Path(folder, "weights")):
            hashes = old["weights"]["sha256"]
            wanted = {"weights": hashes.get(str(case.layer)) if isinstance(hashes, dict) else hashes}
            wanted |= {name: made["sha256"] for name, made in old["inputs"].items()}
            if case.layer not in old["layers"] or wanted != case.sha256:
                raise BadInput(
                    f"--rejudge {options.rejudge}: its traces are of another case; choose it by its run's flags: "
                    f"{old['command']}"
                )
            case = case.rounded(rounded[-1] if rounded else "float64")
            judge = Judging(case, names, settings, pool, sampler, Path(folder))
            kept = itertools.product([LAYER, *names], [*settings, *(s._replace(dtype="float64") for s in settings)])
            for name, setting in dict.fromkeys(kept):
                path = options.rejudge / traces / trace_file(name, case.layer, setting)
                if path.is_file():
                    with open_tensors(path, "run the comparison again"):
                        judge.land(name, setting, {"": str(path)})
            if not judge.files:
                raise BadInput(
                    f"--rejudge {options.rejudge}: there are no traces of layer {case.layer} in {traces}/; "
                    "run the comparison again"
                )
            layers.append(conclude(judge, names))
        document = assemble(layers, names, ran, command, traces)
    for name, entry in document["frameworks"].items():
        seen = {row["stage"] for row in document["checks"] if row["framework"] == name}
        lost = [each for each in shown(name, whole(case.config)) if each not in seen] if ours(name) else []
        entry["not_checked"] += [f"{', '.join(lost)}: not in the saved traces"] if lost else []
        entry["not_checked"].append("precision, and what is sent between devices: nothing was run")
    return document | {"environment": old["environment"], "reference": old["reference"]}


def read_artifact(folder: Path) -> dict[str, Any]:
    """The artifact in a folder that a run left. Raises BadInput."""
    path = folder / "attention_check.json"
    try:
        document = artifact.read(path)
    except OSError as error:
        raise BadInput(f"--rejudge {folder}: {path.name}: {error.strerror}; give the folder of a run") from error
    except ValueError as error:
        raise BadInput(f"--rejudge {path}: not an artifact ({error}); run the comparison again") from error
    if why := artifact.fault(document):
        raise BadInput(f"--rejudge {path}: not an artifact of this release ({why}); run the comparison again")
    return document


def prepare_report() -> None:
    """Import what writes the report, and more, while the implementations start."""
    from harness.report import html  # brings matplotlib

    html.prepare()


def write_report(document: dict[str, Any], folder: Path, out: Path) -> None:
    """The page, in the run's own folder, from the traces there. Raises BadInput where it cannot be written."""
    from harness.report.benchmark import latest
    from harness.report.html import write_html

    evidence = Path(__file__).resolve().parent.parent / "artifacts" / "evidence"
    record = evidence / "planted_bugs.json"
    planted = artifact.read(record) if record.is_file() else None
    measured = latest(out / "benchmark.json", evidence / "benchmark.json")
    try:
        write_html(document, folder / "report.html", folder / "traces", planted, measured)
    except OSError as error:
        raise full(out, error) from error


@contextmanager
def judges() -> Iterator[tuple[Executor, Executor]]:
    """Threads to compare on, and to draw noise on, each of one thread for BLAS.

    NumPy's warning of a signalling NaN is not printed: a trace may hold one, and a gate says so.
    """
    with threadpool_limits(1), warnings.catch_warnings(), threads(2, give_way) as pool, threads(2, give_way) as sampler:
        warnings.filterwarnings("ignore", "invalid value encountered in cast", RuntimeWarning)
        yield pool, sampler


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
        with alone(out):
            sweep(out, RUN)
            with tempfile.TemporaryFile(dir=out):
                pass
            for name in ("attention_check.json", "report.html"):
                if (out / name).is_dir():
                    raise BadInput(f"--out {out}: {name} is a folder there; choose another folder")
            if (out / "traces").exists() and not all(map(of_traces, (out / "traces").iterdir())):
                raise BadInput(
                    f"--out {out}: traces/ holds other files than traces, which a run replaces; choose another folder"
                )
    except OSError as error:
        raise full(out, error) from error


def full(out: Path, error: OSError) -> BadInput:
    """The error that the results cannot be written."""
    return BadInput(f"--out {out}: cannot be written to ({error.strerror}); choose another folder")


def of_traces(path: Path) -> bool:
    """A trace, or a folder that holds nothing else."""
    inside = path.iterdir() if path.is_dir() else [path]
    return all(each.suffix == ".safetensors" and not each.is_dir() for each in inside)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """While no other run is in here with this folder, where its file system has locks; a killed one holds none."""
    folder = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@contextmanager
def scratch(root: Path, name: str = RUN) -> Iterator[Path]:
    """A folder inside `root` for this run alone, locked, gone at its end."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}{os.getpid()}-", dir=root)).resolve()
    try:
        with alone(folder):
            yield folder
    except BadInput as error:
        raise BadInput(str(error).replace(str(folder), str(root))) from error
    finally:
        delete(folder)


@contextmanager
def memory(folder: Path) -> Iterator[Path]:
    """A folder in memory for what a run writes and deletes again, while there is room; `folder` where there is none."""
    try:
        with tempfile.TemporaryFile(dir=MEMORY) as file:
            file.truncate(SPARE)  # takes no room; raises where files may not be as large
        there_is = room(MEMORY) >= 0
    except OSError:
        there_is = False
    if not there_is:
        yield folder
        return
    sweep(MEMORY, PASSING)
    with scratch(MEMORY, PASSING) as passing:
        yield passing


def sweep(root: Path, name: str) -> None:
    """Delete the folders that killed runs left here: of no living process, nor locked by one that is not seen."""
    for left in root.glob(f"{name}*"):
        if not alive(left.name.removeprefix(name).split("-")[0]) and not locked(left):
            delete(left)


def locked(folder: Path) -> bool:
    """Whether a run is alone with this folder, perhaps one in another container; or it is another user's, or none."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(handle)
    return False


def publish(document: dict[str, Any], folder: Path, out: Path) -> None:
    """Put a run's traces, artifact and report where they belong, all of one run. Raises BadInput where it cannot.

    Whenever it is killed, the artifact is the old one or the new one, with its own traces: those lie in a folder of
    their own, which the artifact names, so that the renaming of the artifact changes both.
    """
    traces = out / document["traces"]
    try:
        artifact.write(document, folder / "attention_check.json")
        with alone(out):
            traces.parent.mkdir(exist_ok=True)
            (folder / "traces").rename(traces)
            try:
                (folder / "attention_check.json").replace(out / "attention_check.json")
            except OSError:
                shutil.rmtree(traces, ignore_errors=True)
                raise
            (folder / "report.html").replace(out / "report.html")
            for old in traces.parent.iterdir():
                if old != traces and of_traces(old):
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
    except OSError as error:
        raise full(out, error) from error


if __name__ == "__main__":
    environment.keep_freed_memory()
    command(main)
