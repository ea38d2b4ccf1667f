"""Whatever ends a run, and however many run at once: an artifact and its traces are of one run. See kills.py."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from kills import (
    LENGTHS,
    ROOT,
    after,
    after_the_layer,
    after_the_report,
    belongs,
    end,
    fill,
    finish,
    kill,
    passing,
    prepare,
    started,
    whole,
)

from harness import artifact, compare, runners
from harness.compare import alone, publish, scratch, sweep


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two runs of different inputs have ended, that went on at the same time."""
    folder = tmp_path_factory.mktemp("runs")
    prepare(folder)
    runs = [started(folder, length, "--json", f"{length}.json") for length in LENGTHS]
    with runs[0] as one, runs[1] as other:
        for process in (one, other):
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0 and not err, out + err
    return folder


def test_two_runs_at_once_do_not_mix(folder: Path) -> None:
    """What is there is of one of them: artifact, traces and report."""
    length = whole(folder)
    document = artifact.read(folder / "artifacts" / "attention_check.json")
    jsonschema.validate(document, artifact.SCHEMA)
    assert document == artifact.read(folder / f"{length}.json") != artifact.read(folder / f"{9 - length}.json")
    assert f"T = {length}" in (folder / "artifacts" / "report.html").read_text()
    assert len(list((folder / "artifacts" / "traces").iterdir())) == 1


MOMENTS = {
    "at its start": after(0.5),
    "while it imports": after(2),
    "while it judges": after_the_layer(0),
    "as it publishes": after_the_report(0.005),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_leaves_the_old_artifact_or_the_new_one(folder: Path, moment: str) -> None:
    assert kill(folder, MOMENTS[moment]) in ("old", "new")


def test_a_run_after_them_leaves_nothing_of_them(folder: Path) -> None:
    finish(folder)
    end(folder)


SIGNALS = {"term": [signal.SIGTERM], "term twice": [signal.SIGTERM, signal.SIGTERM], "kill": [signal.SIGKILL]}


@pytest.mark.skipif(not compare.MEMORY.is_dir(), reason="this system has no file system in memory")
@pytest.mark.parametrize("signals", SIGNALS)
def test_nothing_stays_in_memory_of_a_run_that_is_ended_while_it_writes(tmp_path: Path, signals: str) -> None:
    """Of the default case, whose traces take their time to be written and to be deleted."""
    command = [sys.executable, "-m", "harness.compare", "--impl", "numpy", "torch", "--quiet", "--out", "artifacts"]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        while process.poll() is None and sum(len(list(folder.iterdir())) for folder in passing(process.pid)) < 8:
            time.sleep(0.01)
        for each in SIGNALS[signals]:
            process.send_signal(each)
            time.sleep(0.03)
    assert process.returncode == (-signal.SIGKILL if signals == "kill" else 130)
    end(tmp_path)
    assert not passing(process.pid)


def test_what_a_killed_run_left_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    """Not what belongs to a living process, nor, locked, to one of another container."""
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    for name in (f"{gone}-a", f"{gone}-b", f"{os.getpid()}-c"):
        (tmp_path / f"run-{name}" / "traces").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / f"run-{gone}-d")  # anybody's, where all may write
    with alone(tmp_path / f"run-{gone}-b"):
        sweep(tmp_path, "run-")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"run-{gone}-b", f"run-{os.getpid()}-c", f"run-{gone}-d", "other"}


@pytest.mark.parametrize("free", [2**62, 0, -1], ids=["much", "none for a trace", "none"])
def test_what_goes_lies_in_memory_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Else on the disk, as what stays does."""
    for module in (compare, runners):
        monkeypatch.setattr(module, "room", lambda memory: free)
    monkeypatch.setattr(compare, "MEMORY", tmp_path / "memory")
    for name in ("memory", "out"):
        (tmp_path / name).mkdir()
    with scratch(tmp_path / "out") as folder, compare.memory(folder) as passing:
        assert passing.parent.name == ("out" if free < 0 else "memory")
        job = {"keep_all": False, "memory": str(passing), "scratch": str(folder), "traces": str(tmp_path)}
        setting = runners.Setting("chapter", "model", "float64")
        trace = {"output": np.zeros((1, 2, 3)), "d_q_proj.weight": np.zeros((4, 5))}
        files = runners._keep(trace, "numpy", setting, 0, job)
        assert {Path(file).parent for file in files.values()} == {passing if free else folder}
        assert runners.fetch(files).keys() == trace.keys()
    assert [path.name for path in tmp_path.rglob("*")] in (["memory", "out"], ["out", "memory"])


STEPS = """
import os, shutil, signal, sys
from pathlib import Path
from harness.compare import publish
from kills import belongs, fill

STEPS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate"}
for step in range(1, 1000):
    out = Path(f"{step}")
    fill(out, "old")
    publish(fill(out / ".run", "new"), out / ".run", out)
    fill(out / ".run", "newer")
    child = os.fork()
    if not child:
        done = 0

        def hook(event, arguments):
            global done
            done += event in STEPS
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        publish({"run": "newer", "traces": "traces/newer"}, out / ".run", out)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(belongs(out), flush=True)
    shutil.rmtree(out)
    if not status:
        break
"""


def test_publishing_may_be_killed_at_every_step(tmp_path: Path) -> None:
    """Before each thing that it does to the file system: the artifact that is there has its traces."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEPS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    left = done.stdout.split()
    assert len(left) > 8 and left == sorted(left, key=["new", "newer"].index) and set(left) == {"new", "newer"}


def test_of_two_that_publish_at_once_the_last_has_all(tmp_path: Path) -> None:
    """Whichever that is: artifact, traces and report are of one of them, and nothing of the other is left."""
    with ThreadPoolExecutor(4) as pool:
        for turn in range(25):
            runs = [f"{turn}-{i}" for i in range(4)]
            for run in runs:
                fill(tmp_path / f".run-{run}", run)
            jobs = [
                pool.submit(publish, {"run": run, "traces": f"traces/{run}"}, tmp_path / f".run-{run}", tmp_path)
                for run in runs
            ]
            for job in jobs:
                job.result()
            run = belongs(tmp_path)
            assert run in runs and run in (tmp_path / "report.html").read_text()
            assert [path.name for path in (tmp_path / "traces").iterdir()] == [run]
