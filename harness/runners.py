"""Runs an implementation on a case: in this process, or in one of its own that leaves its traces as files.

    load(name).run(weights, inputs, d_output, config) -> trace     here
    Worker(names, device, events)                                  there

An implementation never shares a process with another one or with the judges: none can read, or write into, what
another computed, and one that crashes takes nobody with it. `python -m harness.runners DEVICE NAME …` is that process.
It reads jobs from standard input and writes events to standard output, one line of JSON each.
"""

import contextlib
import functools
import gc
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import psutil
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from harness.case import BadInput, Case, read_case, write_tensors
from harness.environment import SIGNIFICAND, matmul_bits
from harness.gates import NAMES, letters, probes
from impls.spec import BIAS_GRADIENTS, GRADIENTS, AttentionConfig, Observe, keep, weight_shapes

Array = np.ndarray
Trace = dict[str, Array]
Convert = Callable[[Array], Array]
Run = Callable[[Mapping[str, Array], Mapping[str, Array], Array, AttentionConfig], Trace]

IMPLEMENTATIONS = ("numpy", "jax", "torch")
"""The three that recompute the layer from the equations."""
LIBRARIES = ("torch-sdpa", "jax-dpa")
"""The same with 3.5 to 3.11 left to the framework's own attention."""
TILED = ("numpy-tiled", "jax-tiled")
"""The same with 3.5 to 3.11 computed tile by tile, in memory linear in T."""
CACHED = ("numpy-cache", "jax-cache", "torch-cache", "hf-cache")
"""The layer's forward with a key/value cache: half of the tokens together, then one by one."""
SPREAD = ("jax", "torch")
"""Those that can be spread over devices, as in "jax@heads=4,sequence=2" (harness/mesh.py)."""
REFERENCES = ("hf-eager", "hf-sdpa", "hf-cache")
"""Hugging Face's own layer: eager, the truth in float64; with PyTorch's fused attention; eager, with its own cache."""
FUSED = (*LIBRARIES, *TILED, "hf-sdpa")
"""Those that show no scores and no probabilities."""

_UNSEEN = {"scores", "masked_scores", "probs", "d_scores", "d_masked_scores", "d_probs"}
_BEYOND_DECODING = {"scores", *GRADIENTS, *BIAS_GRADIENTS}


def ours(name: str) -> bool:
    """Whether this project runs it, perhaps with a bug planted ("numpy:eps_1e-5"); else it is somebody's own."""
    known = (*IMPLEMENTATIONS, *LIBRARIES, *TILED, *CACHED, *REFERENCES)
    return name.partition(":")[0] in known or name.partition("@")[0] in SPREAD


def shown(name: str, entries: Sequence[str] = NAMES) -> list[str]:
    """Which of the entries of a whole trace an implementation's must have: all, less what a fused kernel never holds,
    or decoding never computes; of somebody's own, the output."""
    if not ours(name):
        return ["output"]
    hidden = _UNSEEN if name in FUSED else _BEYOND_DECODING if name in CACHED else set()
    return [entry for entry in entries if entry not in hidden]


class Setting(NamedTuple):
    """One run of a case: which input, RoPE "neutral" or "model", and the dtype of all arrays."""

    input: str
    rope: str
    dtype: str

    @property
    def label(self) -> str:
        """In one word, for the name of a file."""
        return ".".join(self).replace(" ", "-")


PROBES = tuple(Setting(f"probe {name}", "model", "float32") for name in probes.NAMES)
"""Runs of gate P: inputs and weights of their own, for the case's geometry."""


def probe_cases(
    config: AttentionConfig, folder: Path, fused: bool = True
) -> tuple[dict[str, probes.Probe], dict[str, str]]:
    """The probes for a layer's geometry, their answers by the input of a setting, and why some could not be built.

    B = 2 and T = 12, or as many tokens as the hidden size tells apart. What implementations are given is written to
    `folder`, not kept. `fused`: whether a kernel that keeps no probabilities is among them.
    """
    tokens = max(1, min(12, (config.hidden_size - 1) // 2))
    answers, reasons = {}, {}
    for name in (setting.input for setting in PROBES):
        try:
            made = probes.build(name.removeprefix("probe "), config, tokens, 2, fused)
        except ValueError as error:
            reasons[name] = str(error)
            continue
        write_tensors(probe_file(folder, name), {**made.weights, **made.inputs, "d_output": made.d_output}, {})
        answers[name] = made._replace(weights={}, inputs={})
    return answers, reasons


def probe_file(folder: Path, name: str) -> Path:
    """Where `probe_cases` puts what implementations are given of a probe."""
    return folder / f"{name.replace(' ', '-')}.safetensors"


def given(case: Case, setting: Setting, folder: Path) -> tuple[Trace, Trace, Array]:
    """What an implementation is given: weights, inputs and d_output of the case, or of a probe in `folder`."""
    if setting not in PROBES:
        return case.arrays(*setting)
    arrays = load_file(probe_file(folder, setting.input))
    d_output = arrays.pop("d_output")
    return {name: arrays.pop(name) for name in weight_shapes(case.config)}, arrays, d_output


class Unusable(Exception):
    """What was asked for cannot be had on this machine; the message is the one line that the user gets."""


# ------------------------------------------------------------------------------------------------------ in this process


class Loaded(NamedTuple):
    """An implementation whose framework is imported and whose device is chosen.

    `matmul` is a product as it computes one, None where that is not known.
    """

    run: Run
    matmul: Callable[[Array, Array], Array] | None
    device: str = "cpu"
    accelerator: str | None = None
    exchanged: Callable[..., dict[str, dict[str, float]]] | None = None  # between devices (harness/mesh.py)


def load(name: str, device: str = "cpu") -> Loaded:
    """Import an implementation, with its bug planted if it names one ("numpy:norm_after_rope"), or somebody's own.

    Raises Unusable where a GPU is asked for and its framework sees none, BadInput where there is no such function.
    """
    if not ours(name):
        from harness import candidates

        return Loaded(candidates.load(name), None)
    if "@" in name:
        return _load_spread(name, device)
    framework, _, bug = name.partition(":")
    if bug:
        from harness import bugs

        bugs.plant(framework, bug)
    if framework == "numpy":
        return Loaded(run_numpy, matmul_numpy)
    if framework == "numpy-tiled":
        from impls import numpy_tiled

        return Loaded(functools.partial(run_numpy, page=numpy_tiled), matmul_numpy)
    if framework == "numpy-cache":
        return Loaded(run_numpy_cache, matmul_numpy)
    return _load_jax(framework, device) if framework.startswith("jax") else _load_torch(framework, device)


def run_numpy(
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    d_output: Array,
    config: AttentionConfig,
    observe: Observe = keep,
    page: ModuleType | None = None,
) -> Trace:
    """The forward and backward of the NumPy page, or of another one, with every observed value kept."""
    if page is None:
        from impls import numpy_attention

        page = numpy_attention
    trace: Trace = {}
    with rounding_to(d_output.dtype) as (given, rounded):

        def record(name: str, value: Array) -> Array:
            trace[name] = rounded(observe(name, value))
            return given(trace[name])

        weights, inputs = ({name: given(value) for name, value in each.items()} for each in (weights, inputs))
        _, cache = page.forward(weights, inputs, config, record)
        page.backward(given(d_output), cache, record)
    return trace


def run_numpy_cache(
    weights: Mapping[str, Array], inputs: Mapping[str, Array], d_output: Array, config: AttentionConfig
) -> Trace:
    """The NumPy page's forward with a key/value cache; every observed value is kept, the pieces of a stage joined."""
    from impls import numpy_cache

    pieces: list[Trace] = [{}]
    with rounding_to(d_output.dtype) as (given, rounded):

        def record(name: str, value: Array) -> Array:
            if name in pieces[-1]:
                pieces.append({})
            pieces[-1][name] = rounded(value)
            return given(pieces[-1][name])

        weights, inputs = ({name: given(value) for name, value in each.items()} for each in (weights, inputs))
        numpy_cache.decode(weights, inputs, config, record)
    return joined(pieces)


@contextlib.contextmanager
def rounding_to(dtype: np.dtype) -> Iterator[tuple[Convert, Convert]]:
    """How NumPy computes in a dtype: what turns an array into one to compute with, and a result into what is kept.

    bfloat16 and float16 are float32 arithmetic of which every observed value is rounded, as where Hugging Face rounds.
    """
    if dtype.itemsize > 2:
        yield (lambda x: x), (lambda x: x)
        return
    with np.errstate(over="ignore", invalid="ignore"):  # float16's largest number
        yield (lambda x: x.astype(np.float32)), (lambda x: x.astype(dtype))


def decoding(decode: Callable[..., Iterable[Trace]], place: str) -> Run:
    """A `run` from what yields the stages of each step: forward alone."""

    def run(weights: Mapping[str, Array], inputs: Mapping[str, Array], _: Array, config: AttentionConfig) -> Trace:
        return joined(decode(weights, inputs, config, place))

    return run


def joined(pieces: Iterable[Mapping[str, Array]]) -> Trace:
    """The stages of all tokens from those of each step: keys that came later have no weight in its rows."""
    steps = list(pieces)
    S = sum(step["output"].shape[1] for step in steps)

    def whole(name: str, value: Array) -> Array:
        room = np.full((*value.shape[:-1], S - value.shape[-1]), -np.inf if name == "masked_scores" else 0, value.dtype)
        return np.concatenate([value, room], axis=-1)

    trace = {}
    for name in steps[0]:
        rows = letters(name).endswith("TS")
        values = [whole(name, step[name]) if rows else step[name] for step in steps]
        trace[name] = np.concatenate(values, axis=2 if rows else 1)
    return trace


def matmul_numpy(a: Array, b: Array) -> Array:
    """A product as `run_numpy` computes it."""
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype) if a.dtype.itemsize == 2 else a @ b


def _load_jax(name: str, device: str) -> Loaded:
    import jax

    from impls import jax_attention, jax_cache, jax_dpa, jax_tiled

    device = _device(name, device, any(each.platform == "gpu" for each in jax.devices()))
    place = jax.devices(device)[0]

    def matmul(a: Array, b: Array) -> Array:
        with jax.enable_x64(True):
            return np.asarray(jax_attention.matmul(*jax.device_put((a, b), place)))

    page = {"jax-dpa": jax_dpa, "jax-tiled": jax_tiled}.get(name, jax_attention)
    run = decoding(jax_cache.decode, device) if name == "jax-cache" else functools.partial(page.run, device=device)
    return Loaded(run, matmul, device, place.device_kind if device == "gpu" else None)


def _load_torch(name: str, device: str) -> Loaded:
    """A PyTorch implementation, or Hugging Face's layer."""
    import torch

    from impls import torch_attention, torch_cache, torch_sdpa

    device = _device(name, device, torch.cuda.is_available())
    place = "cuda" if device == "gpu" else "cpu"

    def matmul(a: Array, b: Array) -> Array:
        return torch_attention.array(torch_attention.tensor(a, place) @ torch_attention.tensor(b, place))

    if name.startswith("torch"):
        whole = functools.partial((torch_sdpa if name == "torch-sdpa" else torch_attention).run, device=place)
        run = decoding(torch_cache.decode, place) if name == "torch-cache" else whole
    else:
        from harness import reference

        kind = name.removeprefix("hf-")
        layer = functools.partial(reference.run, attn_implementation=kind, device=place)
        run = decoding(reference.decode, place) if kind == "cache" else layer
    return Loaded(run, matmul, device, torch.cuda.get_device_name(0) if device == "gpu" else None)


def _load_spread(name: str, device: str) -> Loaded:
    """A JAX or PyTorch implementation that is spread over several devices, joined with its other processes."""
    from harness import mesh

    group, whole = mesh.load(name, device), load(name.partition("@")[0], device)
    return whole._replace(run=group.run, exchanged=group.exchanged, accelerator=group.accelerator)


def _device(framework: str, asked: str, has_gpu: bool) -> str:
    if asked == "gpu" and not has_gpu:
        raise Unusable(f"--device gpu: {framework} sees no GPU on this machine; use --device cpu or auto")
    return "gpu" if has_gpu and asked != "cpu" else "cpu"


# ----------------------------------------------------------------------------------------------------- traces as files


SPARE = 4 * 2**30
"""Bytes of memory that traces leave free."""


def room(memory: Path) -> int:
    """The bytes that traces may take in a file system that lies in memory."""
    return min(shutil.disk_usage(memory).free, psutil.virtual_memory().available) - SPARE


def delete(folder: Path) -> None:
    """Delete a folder, in which others may be about to write: by another name first, under which none does."""
    gone = folder.with_name(f"{folder.name}-gone")
    with contextlib.suppress(OSError):
        folder.rename(gone)
    for each in (gone, folder):  # it may have been renamed by who was killed then, and cannot everywhere be
        shutil.rmtree(each, ignore_errors=True)


def store(trace: Trace, path: Path, scratch: Path | None) -> dict[str, str]:
    """Write a trace to `path`; its weight gradients, which are large, to `scratch` if given. Returns where they are."""
    large = {name: trace[name] for name in GRADIENTS if name in trace and name.endswith("proj.weight") and scratch}
    files = {"": str(path)}
    for name, value in large.items():
        files[name] = str(Path(str(scratch)) / f"{path.stem}.{name}.npy")
        np.save(files[name], value)
    save_file({name: np.ascontiguousarray(value) for name, value in trace.items() if name not in large}, path)
    return files


def fetch(files: Mapping[str, str], read: Callable[[str], Trace] = load_file) -> Trace:
    """The trace that `store` wrote; weight gradients in `scratch` are mapped and not read."""
    trace = read(files[""])
    large = {name: np.load(file, mmap_mode="r") for name, file in files.items() if name}
    return trace | {name: value.view("bfloat16") if value.dtype.kind == "V" else value for name, value in large.items()}


# -------------------------------------------------------------------------------------------- in a process of its own


class Worker:
    """A process that runs one or several implementations; its events arrive in a queue as (worker, event).

    Events, by their key "event": ready (device, accelerator, seconds), running (name, setting), trace (name, setting,
    files), written (name, entries: what it was given and changed), refused (name, setting, error: no float64),
    exchanged (name, sent: `mesh.Exchanged`), done (seconds, matmul_bits, printed), unusable (message), failed (error,
    perhaps a name), exit (error: why it ended).
    """

    def __init__(
        self,
        names: Sequence[str],
        device: str,
        events: "queue.SimpleQueue[tuple[Worker, dict[str, Any]]]",
        module: str = "harness.runners",
        variables: Mapping[str, str] | None = None,
    ):
        """`module` is what it runs; its environment's `variables` are those of `environment` by default."""
        self.names, self.events = tuple(names), events
        self.log = unnamed_file()
        root = Path(__file__).resolve().parent.parent
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, device, *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment(root, device) if variables is None else dict(variables),
            start_new_session=True,  # Ctrl-C reaches the command alone, which then ends its workers
        )
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def job(self, **fields: Any) -> None:
        """Send a job: the case's files and hashes, the settings, the folders for what is kept and what is not.

        Or the folder, `passing`, that it is to delete should this process be killed.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its exit event says so
            print(json.dumps(fields), file=self.process.stdin, flush=True)

    def end(self) -> None:
        """End the process and all that it started, now; once it has ended, nothing."""
        if self.log.closed:
            return
        self.kill()
        self.listener.join(timeout=2)
        if self.listener.is_alive():  # what it started has left its group, and holds its output open
            return
        with contextlib.suppress(BrokenPipeError), self.log, self.process:
            pass  # closes its pipes; what it was not there to read is lost

    def kill(self) -> None:
        """Kill it, and whatever it started that is still there when it has ended itself."""
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for child in children:  # that has left the group
            with contextlib.suppress(psutil.Error):
                child.kill()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.events.put((self, dict(json.loads(line))))
            except (TypeError, ValueError):  # not from us: it wrote to a descriptor that is not its own
                self.kill()
        how = ended(self.process.wait(), self.log)
        self.events.put((self, {"event": "exit", "error": f"its process {how}"}))


def ended(code: int, log: BinaryIO) -> str:
    """How a process ended, in words, with the last line of what it wrote."""
    log.seek(0)
    last = (log.read().decode(errors="replace").strip().splitlines() or [""])[-1][:500]
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
    return f"{how}{': ' * bool(last)}{last}"


def unnamed_file() -> BinaryIO:
    """A file to be written and read again, gone when it is closed or its process ends."""
    return cast(BinaryIO, tempfile.TemporaryFile())


def environment(root: Path, device: str) -> dict[str, str]:
    """The worker's environment: one thread each while several run, no network, a compilation cache beside the code."""
    ours = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "4294967296",  # glibc: keep freed memory, so that large arrays are not paged in anew
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "JAX_COMPILATION_CACHE_DIR": str(root / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    if device == "cpu":
        ours["JAX_PLATFORMS"] = "cpu"
    return {**ours, **os.environ, "PYTHONPATH": ours["PYTHONPATH"]}


def main(arguments: Sequence[str]) -> int:
    """The worker's process: import, answer jobs until standard input ends."""
    started = time.perf_counter()
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM}
    )  # the command started it with both blocked
    device, *names = arguments
    say, printed = speaker()
    jobs = jobs_asked()
    if names[0] not in REFERENCES:
        give_way()
    try:
        with without_collecting():
            loaded = {name: load(name, device) for name in names}
        first = loaded[names[0]]
        bits: dict[str, int] = {}
        ready = time.perf_counter() - started
        say("ready", device=first.device, accelerator=first.accelerator, seconds=ready)
        for line in iter(jobs.get, ""):
            job = json.loads(line)
            asked = dict.fromkeys(dtype for _, _, dtype in job["settings"])
            before, seconds, after = precision(first, asked), work(job, loaded, say), precision(first, asked)
            for dtype, read in (*before.items(), *after.items()):
                bits[dtype] = min(read, bits.get(dtype, read))
            loaded = {name: each._replace(exchanged=None) for name, each in loaded.items()}  # of one layer as of all
            seconds = {name: ready + spent for name, spent in seconds.items()}
            say("done", seconds=seconds, matmul_bits=bits, printed=_lines(printed))
    except (BadInput, Unusable) as error:
        say("unusable", message=str(error))
    except Exception as error:
        traceback.print_exc()
        say("failed", error=one_line(error))
        return 1
    return 0


def precision(loaded: Loaded, dtypes: Iterable[str] = tuple(SIGNIFICAND)) -> dict[str, int]:
    """The bits that a matrix product reads of its operands, for each dtype: measured, whatever was asked for."""
    return {} if loaded.matmul is None else {dtype: matmul_bits(loaded.matmul, dtype) for dtype in dtypes}


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Import without looking for garbage, of which there is none: half a million objects come, to stay."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def give_way() -> None:
    """Let this thread run after others: transformers takes longest to import, and all wait for the reference."""
    with contextlib.suppress(AttributeError, OSError):  # where threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def work(job: Mapping[str, Any], loaded: Mapping[str, Loaded], say: Callable[..., None]) -> dict[str, float]:
    """Run every setting of a job; one that raises is reported and left out. Returns the seconds spent by each."""
    case = read_case(Path(job["weights"]), {name: Path(path) for name, path in job["inputs"].items()})
    if case.sha256 != job["sha256"]:
        raise Unusable(f"{job['weights']}: the case's files changed while they were being compared; run again")
    case = case.rounded(job["given"])
    seconds = dict.fromkeys(loaded, 0.0)
    for setting, name in itertools.product((Setting(*each) for each in job["settings"]), loaded):
        if name not in seconds or (name == "hf-sdpa" and job["rows"] is not None):  # the layer itself, there
            continue
        start = time.perf_counter()
        say("running", name=name, setting=setting)
        run: Callable[..., Trace] = loaded[name].run
        if job["rows"] is not None and setting not in PROBES:
            from harness import long

            run = long.runner(name, loaded[name], job["rows"])
        try:
            trace, written = _run(name, run, given(case, setting, Path(job["memory"])), case.config)
        except Exception as error:
            if setting.dtype == "float64" and not ours(name):  # it need not
                say("refused", name=name, setting=setting, error=one_line(error))
                continue
            traceback.print_exc()
            say("failed", name=name, error=one_line(error))
            del seconds[name]
            continue
        if written:
            say("written", name=name, entries=written)
        try:
            files = _keep(trace, name, setting, case.layer, job)
        except (OSError, SafetensorError) as error:
            if not ours(name):  # it may have lowered its own limits
                say("failed", name=name, error=f"its trace cannot be written ({one_line(error)})")
                del seconds[name]
                continue
            raise Unusable(f"--out: a trace cannot be written ({error}); make room or choose another") from error
        say("trace", name=name, setting=setting, files=files)
        seconds[name] += time.perf_counter() - start
    for name, each in loaded.items():
        if each.exchanged is not None and name in seconds:
            setting = next(s for s in map(Setting._make, job["settings"][::-1]) if s not in PROBES)
            say("exchanged", name=name, sent=each.exchanged(*given(case, setting, Path(job["memory"])), case.config))
    return seconds


def _run(
    name: str, run: Callable[..., Trace], arrays: tuple[Trace, Trace, Array], config: AttentionConfig
) -> tuple[Trace, list[str]]:
    """The trace, and the names of what it was given and has changed; what is not ours gets copies."""
    weights, inputs, d_output = arrays
    if ours(name):
        trace, written = run(weights, inputs, d_output, config), []
    else:
        copies = {key: value.copy() for key, value in {**weights, **inputs, "d_output": d_output}.items()}
        own = {key: copies[key] for key in weights}, {key: copies[key] for key in inputs}, copies["d_output"]
        process = os.getpid()
        try:
            trace = run(*own, config)
        finally:
            if os.getpid() != process:  # a child that it forked has come back from it
                os._exit(0)
        originals = {**weights, **inputs, "d_output": d_output}
        written = [key for key, value in originals.items() if copies[key].tobytes() != value.tobytes()]
    for entry, value in trace.items():
        if value.dtype.name not in SIGNIFICAND:
            raise TypeError(f"{entry} holds {value.dtype} numbers")
    return trace, written


def _keep(trace: Trace, name: str, setting: Setting, layer: int, job: Mapping[str, Any]) -> dict[str, str]:
    """Store a trace: with those that stay (all but float64 ones that are not the truth), or to be judged and go.

    What goes, over a gigabyte in a default run, is kept from the disk while memory has room.
    """
    memory = Path(job["memory"])
    scratch = memory if sum(value.nbytes for value in trace.values()) < room(memory) else Path(job["scratch"])
    stays = job["keep_all"] or (setting not in PROBES and (setting.dtype != "float64" or name == "hf-eager"))
    path = (Path(job["traces"]) if stays else scratch) / trace_file(name, layer, setting)
    return store(trace, path, None if job["keep_all"] else scratch)


def trace_file(name: str, layer: int, setting: Setting) -> str:
    """The name of a trace's file."""
    return re.sub(r"[^\w.-]+", "-", f"{name}.layer{layer}.{setting.label}.safetensors")


def one_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:500]}"


def jobs_asked() -> "queue.SimpleQueue[str]":
    """The jobs of standard input, a line each. When it ends, the command is gone, and so is this process, whatever it
    is doing, and the folder that a line named as "passing". What else reads standard input finds it empty."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    own = os.fdopen(os.dup(0))  # not sys.stdin, whose lock a forked child would find taken
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def read() -> None:
        passing = []
        for line in own:
            if folder := json.loads(line).get("passing"):
                passing.append(folder)
            else:
                lines.put(line)
        for folder in passing:
            delete(Path(folder))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _lines(file: BinaryIO) -> list[str]:
    """The first line that was printed, and how many there were; nothing where none was."""
    sys.stdout.flush()
    file.seek(0)
    lines = file.read().decode(errors="replace").splitlines()
    return [lines[0], str(len(lines))] if lines else []


def speaker() -> tuple[Callable[..., None], BinaryIO]:
    """Events go to what was standard output; whatever else is printed there, to a file."""
    events, printed = os.fdopen(os.dup(1), "w"), unnamed_file()
    os.dup2(printed.fileno(), 1)

    def say(event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=events, flush=True)

    return say, printed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
