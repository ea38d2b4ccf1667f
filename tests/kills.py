"""kill -9 at any moment of a run: the artifact is the old one or the new one, whole, and its traces belong to it.

python tests/kills.py [N]    N kills (200) and a table of what they left; `make campaign` runs it
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from safetensors.numpy import load_file

from harness import artifact
from harness.case import seeded_case
from harness.compare import MEMORY, PASSING
from impls.spec import AttentionConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIG = AttentionConfig(hidden_size=20, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6)
LENGTHS = (4, 5)
"""Each run has the other sequence length than the artifact before it, so that all its files tell whose they are."""
FILES = {
    f"{name}.layer0.{input}.model.{dtype}.safetensors"
    for input in ("chapter", "stress")
    for name, dtype in (("numpy", "float32"), ("hf-eager", "float32"), ("hf-eager", "float64"))
}


def prepare(folder: Path) -> None:
    """The weights that all runs in this folder have."""
    seeded_case(folder / "case", config=CONFIG)


def command(length: int, *more: str) -> list[str]:
    """A small run: NumPy beside Hugging Face's layer, in float32."""
    arguments = ["--weights", "case/seeded-0.safetensors", "--impl", "numpy", "--rope", "model", "--dtype", "float32"]
    return [sys.executable, "-m", "harness.compare", *arguments, "--seq-len", str(length), *more]


@contextmanager
def started(folder: Path, length: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A run in this folder; killed, should it still run at the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command(length, *more), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def whole(folder: Path) -> int:
    """The sequence length of the artifact in this folder. Raises AssertionError where anything of it is not its own."""
    out = folder / "artifacts"
    document = artifact.read(out / "attention_check.json")
    assert artifact.fault(document) is None and document["match"]
    traces = out / document["traces"]
    assert {path.name for path in traces.iterdir()} == FILES
    for path in traces.iterdir():
        assert load_file(path)["output"].shape == (1, document["seq_len"], CONFIG.hidden_size), path
    return int(document["seq_len"])


def passing(process: int) -> list[Path]:
    """What this process has in memory, to be deleted again."""
    return list(MEMORY.glob(f"{PASSING}{process}-*"))


def running(folder: Path) -> list[int]:
    """The processes that work in this folder."""

    def here(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == folder.resolve()
        except (psutil.Error, OSError):
            return False

    return [process.pid for process in psutil.process_iter() if here(process)]


def end(folder: Path, seconds: float = 30) -> None:
    """Waits until no process is left. Raises AssertionError where one stays."""
    until = time.monotonic() + seconds
    while left := running(folder):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def fill(folder: Path, run: str) -> dict[str, str]:
    """A run's artifact, report and traces in a folder, as they are before they are published."""
    (folder / "traces").mkdir(parents=True)
    for i in range(3):
        (folder / "traces" / f"{i}.safetensors").write_text(run)
    document = {"run": run, "traces": f"traces/{run}"}
    for name in ("attention_check.json", "report.html"):
        (folder / name).write_text(json.dumps(document))
    return document


def belongs(out: Path) -> str:
    """Whose artifact is there. Raises AssertionError where its traces are not there, or are another's."""
    document = artifact.read(out / "attention_check.json")
    traces = sorted((out / document["traces"]).iterdir()) if "traces" in document else []
    assert [path.name for path in traces] == [f"{i}.safetensors" for i in range(3)]
    assert {path.read_text() for path in traces} == {document["run"]}
    return str(document["run"])


# -------------------------------------------------------------------------------------------------------------- moments

Moment = Callable[[Path, "subprocess.Popen[str]"], object]


def after(seconds: float) -> Moment:
    """So long after the start."""
    return lambda folder, process: time.sleep(seconds)


def after_the_layer(seconds: float) -> Moment:
    """So long after Hugging Face's layer is done: what is left is to judge, and to write."""

    def wait(folder: Path, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("hugging face: done"):
                break
        time.sleep(seconds)

    return wait


def after_the_report(seconds: float) -> Moment:
    """So long after the report is there, in the run's own folder: all is then put where it belongs."""

    def wait(folder: Path, process: "subprocess.Popen[str]") -> None:
        while process.poll() is None and not list(folder.glob(f"artifacts/.run-{process.pid}-*/report.html")):
            time.sleep(0.001)
        time.sleep(seconds)

    return wait


def kill(folder: Path, moment: Moment) -> str:
    """One run, killed at this moment, and what it left: "old" or "new". Raises AssertionError for anything else."""
    before = whole(folder)
    bytes_before = (folder / "artifacts" / "attention_check.json").read_bytes()
    with started(folder, next(each for each in LENGTHS if each != before)) as process:
        moment(folder, process)
        process.kill()
    end(folder)
    assert not passing(process.pid)
    if whole(folder) != before:
        return "new"
    assert (folder / "artifacts" / "attention_check.json").read_bytes() == bytes_before
    return "old"


def finish(folder: Path) -> float:
    """A run that nobody kills, after which nothing is left of those that were; in seconds."""
    start = time.monotonic()
    with started(folder, LENGTHS[0], "--quiet") as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (0, "", ""), out + err
    assert whole(folder) == LENGTHS[0]
    assert {path.name for path in (folder / "artifacts").iterdir()} == {"attention_check.json", "report.html", "traces"}
    assert len(list((folder / "artifacts" / "traces").iterdir())) == 1
    assert not [path for path in (folder / "weights").iterdir() if path.name.startswith(".")]
    return time.monotonic() - start


def moments(count: int, seconds: float) -> list[tuple[str, Moment]]:
    """Half of them anywhere in a run of so many seconds, a quarter near its end, a quarter where it puts its files."""
    r = random.Random(0)
    kinds = (
        ("anywhere", lambda: after(r.uniform(0, seconds))),
        ("near the end", lambda: after_the_layer(r.uniform(0, seconds / 4))),
        ("anywhere", lambda: after(r.uniform(0, seconds))),
        ("as it publishes", lambda: after_the_report(r.uniform(0, 0.03))),
    )
    return [(kinds[i % 4][0], kinds[i % 4][1]()) for i in range(count)]


def campaign(count: int) -> str:
    """So many kills, and what they left, in words. Raises AssertionError at the first that leaves anything else."""
    left = dict[str, Counter[str]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        seconds = finish(folder)
        start = time.monotonic()
        for number, (kind, moment) in enumerate(moments(count, seconds), 1):
            left.setdefault(kind, Counter())[kill(folder, moment)] += 1
            if number % 10 == 0:
                print(f"{number} of {count} in {(time.monotonic() - start) / 60:.0f} min: {left}", file=sys.stderr)
        finish(folder)
    total = sum(left.values(), Counter[str]())
    lines = [
        f"  {kind:16} {sum(each.values()):4}  old {each['old']:4}  new {each['new']:4}" for kind, each in left.items()
    ]
    return "\n".join(
        [
            f"{count} kills of a run of {seconds:.0f} s: {total['old']} times the old artifact, {total['new']} times "
            "the new one, each time whole, by its schema, with its own traces, and no process left.",
            *lines,
        ]
    )


if __name__ == "__main__":
    print(campaign(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
