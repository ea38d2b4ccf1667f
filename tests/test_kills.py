"""Whatever ends a run, and however many run at once: an artifact and its traces are of one run. See kills.py."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from kills import LENGTHS, ROOT, after, after_the_report, belongs, end, fill, finish, kill, prepare, started, whole

from harness import artifact
from harness.compare import publish


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


MOMENTS = {"at its start": after(0.5), "while it imports": after(2), "as it publishes": after_the_report(0.005)}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_leaves_the_old_artifact_or_the_new_one(folder: Path, moment: str) -> None:
    assert kill(folder, MOMENTS[moment]) in ("old", "new")


def test_a_run_after_them_leaves_nothing_of_them(folder: Path) -> None:
    finish(folder)
    end(folder)


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
