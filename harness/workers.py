"""The processes that run the implementations of one comparison, and what is known of them afterwards."""

import queue
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from harness.case import Case
from harness.judging import LAYER, Judging
from harness.report.console import Progress
from harness.runners import PROBES, REFERENCES, Loaded, Setting, Unusable, Worker, ours, work


@dataclass
class Ran:
    """What is known of each implementation besides its traces, by name."""

    errors: dict[str, str] = field(default_factory=dict)  # why it could not run
    seconds: dict[str, float] = field(default_factory=dict)
    matmul_bits: dict[str, dict[str, int]] = field(default_factory=dict)  # by dtype
    accelerators: dict[str, str | None] = field(default_factory=dict)
    written: dict[str, set[str]] = field(default_factory=dict)  # what it was given and changed
    printed: dict[str, list[str]] = field(default_factory=dict)  # the first line, and how many
    exchanged: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # `mesh.Exchanged`


class ReferenceFailed(Exception):
    """Hugging Face's layer could not be run, so that there is nothing to compare with."""


class Workers:
    """The processes of one run: one for each implementation, and one for Hugging Face's layer, eager and sdpa."""

    def __init__(self, names: Sequence[str], device: str, limits: "Limits", progress: Progress):
        self.names, self.device, self.limits, self.progress = list(names), device, limits, progress
        self.events: queue.SimpleQueue[tuple[Worker, dict[str, Any]]] = queue.SimpleQueue()
        self.workers: list[Worker] = []
        self.gone: set[Worker] = set()  # whose exit was heard; what has ended unheard may have said why
        self.ran = Ran()

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
        self.kill()
        for worker in self.workers:
            worker.end()

    def kill(self) -> None:
        """End them all, and wait for none."""
        for worker in self.workers:
            worker.kill()

    def delete(self, folder: Path) -> None:
        """Have the workers delete a folder if this process is killed."""
        for worker in self.workers:
            worker.job(passing=str(folder))

    def run(
        self,
        case: Case,
        settings: Sequence[Setting],
        judge: Judging,
        folder: Path,
        keep_all: bool = False,
        here: Mapping[str, Loaded] | None = None,
    ) -> None:
        """Have all of them run one case, and hand each trace to the judge as it lands.

        Those `here` run in this process, while the others start. What is not kept is written to the judge's folder, or
        to this one where that, in memory, has no room.
        """
        paths = {name: str(path) for name, path in case.paths.items()}
        exact = [setting for setting in PROBES if setting.input in judge.answers]
        needed = list(dict.fromkeys(each for s in settings for each in (s._replace(dtype="float64"), s)))
        job = {
            "weights": paths.pop("weights"),
            "inputs": paths,
            "sha256": case.sha256,
            "given": settings[-1].dtype,
            "settings": [*settings, *exact],
            "traces": str(folder / "traces" if judge.rows is None else folder),
            "scratch": str(folder),
            "memory": str(judge.folder),
            "keep_all": keep_all,
            "rows": judge.rows,
        }
        busy = [worker for worker in self.workers if worker not in self.gone]
        for worker in busy:
            worker.job(**job | ({"settings": needed} if LAYER in worker.names else {}))
        for name, loaded in (here or {}).items():
            self.progress.started(title(name))
            events = partial(self._hear, (name,), judge)
            self.ran.seconds |= work(job, {name: loaded}, events)
        while busy:
            try:
                worker, event = self.events.get(timeout=0.1)
            except queue.Empty:
                for worker in busy:
                    if worker.process.poll() is not None:
                        worker.kill()  # what it has left behind; its exit event comes when that is gone
                    elif limited(worker.names[0]) and (reason := self.limits.broken(worker)):
                        self._fail(worker.names, reason)
                        worker.end()
                continue
            self.limits.alive(worker)
            if event["event"] == "exit":
                self.gone.add(worker)
            if self._handle(worker.names, event, judge) and worker in busy:  # it may end after its job is done
                busy.remove(worker)

    def _hear(self, names: Sequence[str], judge: Judging, event: str, **fields: Any) -> None:
        self._handle(names, {"event": event, **fields}, judge)

    def _handle(self, names: Sequence[str], event: dict[str, Any], judge: Judging) -> bool:
        """Take note of an event; whether the job has ended."""
        what, name = event["event"], title(names[0])
        if what == "ready":
            self.ran.accelerators[names[0]] = event["accelerator"]
            self.progress.phase(name, f"imported in {event['seconds']:.1f} s")
        elif what == "running":
            self.progress.phase(name, " ".join(event["setting"]))
        elif what == "trace":
            judge.land(event["name"], Setting(*event["setting"]), event["files"])
        elif what == "refused":
            judge.refuse(event["name"], Setting(*event["setting"]), f"it cannot run in float64 ({event['error']})")
        elif what == "written":
            self.ran.written.setdefault(event["name"], set()).update(event["entries"])
        elif what == "unusable":
            raise Unusable(event["message"])
        elif what == "failed":
            self._fail([event["name"]] if event.get("name") else names, event["error"])
        elif what == "exchanged":
            self.ran.exchanged[event["name"]] = event["sent"]
        elif what == "done":
            for each, seconds in event["seconds"].items():
                self.ran.seconds[each] = self.ran.seconds.get(each, 0.0) + seconds
            if event["matmul_bits"]:
                self.ran.matmul_bits |= dict.fromkeys(names, event["matmul_bits"])
            if event["printed"]:
                self.ran.printed[names[0]] = event["printed"]
            if names[0] not in self.ran.errors:
                self.progress.finished(name, event["seconds"][names[0]])
            return True
        elif what == "exit":
            self._fail(names, event["error"])
            return True
        return False

    def _fail(self, names: Sequence[str], error: str) -> None:
        if LAYER in names:
            raise ReferenceFailed(
                f"Hugging Face's layer could not be run, so there is nothing to compare with: {error}"
            )
        for name in names:
            if name not in self.ran.errors:
                self.ran.errors[name] = error
                self.progress.failed(title(name), error)


def limited(name: str) -> bool:
    """Whether an implementation may hang, or eat memory: somebody's own, and one that waits for other processes."""
    return not ours(name) or "@" in name


class Limits:
    """The time and memory that a candidate's process may take: seconds for one run, GiB of resident memory in all."""

    def __init__(self, seconds: float, gibibytes: float):
        self.seconds, self.gibibytes = seconds, gibibytes
        self.since: dict[Worker, float] = {}

    def alive(self, worker: Worker) -> None:
        """It has just said something: its next run begins."""
        self.since[worker] = time.monotonic()

    def broken(self, worker: Worker) -> str | None:
        """Which limit it has broken, in words."""
        if time.monotonic() - self.since.setdefault(worker, time.monotonic()) > self.seconds:
            return f"it took longer than {self.seconds:g} s for one run (--time-limit)"
        try:
            process = psutil.Process(worker.process.pid)
            held = sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])
        except psutil.Error:  # it has just ended
            return None
        if held > self.gibibytes * 2**30:
            return f"it held more than {self.gibibytes:g} GiB (--memory-limit)"
        return None


def title(name: str) -> str:
    """How progress names an implementation."""
    return "hugging face" if name in REFERENCES else name
