"""Runs an implementation on a case: in this process, or in one of its own that leaves its traces as files.

    load(name).run(weights, inputs, d_output, config) -> trace     here
    Worker(names, device, events)                                  there

An implementation never shares a process with another one or with the judges: none can read, or write into, what
another computed, and one that crashes takes nobody with it. `python -m harness.runners DEVICE NAME …` is that process.
It reads jobs from standard input and writes events to standard output, one line of JSON each.
"""

import contextlib
import functools
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from harness.case import Case, read_case, write_tensors
from harness.environment import SIGNIFICAND, matmul_bits
from harness.gates import probes
from impls.spec import GRADIENTS, STAGES, WEIGHTS, AttentionConfig, Observe, keep

Array = np.ndarray
Trace = dict[str, Array]
Run = Callable[[Mapping[str, Array], Mapping[str, Array], Array, AttentionConfig], Trace]

IMPLEMENTATIONS = ("numpy", "jax", "torch")
"""The three that recompute the layer from the equations."""
REFERENCES = ("hf-eager", "hf-sdpa")
"""Hugging Face's own layer: eager, the truth in float64, and with PyTorch's fused attention."""

_FUSED = {"scores", "masked_scores", "probs", "d_scores", "d_masked_scores", "d_probs"}


def shown(name: str) -> list[str]:
    """The entries that an implementation's trace must have: all, less what a fused kernel never holds."""
    hidden = _FUSED if name == "hf-sdpa" else set()
    return [entry for entry in [*(stage.name for stage in STAGES), *GRADIENTS] if entry not in hidden]


class Setting(NamedTuple):
    """One run of a case: which input, RoPE "neutral" or "model", and the dtype of all arrays."""

    input: str
    rope: str
    dtype: str


PROBES = tuple(Setting(f"probe {name}", "model", "float32") for name in probes.NAMES)
"""Runs of gate P: inputs and weights of their own, for the case's geometry."""


def probe_cases(config: AttentionConfig, folder: Path) -> tuple[dict[str, probes.Probe], dict[str, str]]:
    """The probes for a layer's geometry, their answers by the input of a setting, and why some could not be built.

    B = 2 and T = 12, or as many tokens as the hidden size tells apart. What implementations are given is written to
    `folder`, not kept.
    """
    tokens = max(1, min(12, (config.hidden_size - 1) // 2))
    answers, reasons = {}, {}
    for name in (setting.input for setting in PROBES):
        try:
            made = probes.build(name.removeprefix("probe "), config, tokens, batch=2)
        except ValueError as error:
            reasons[name] = str(error)
            continue
        write_tensors(_probe_file(folder, name), {**made.weights, **made.inputs, "d_output": made.d_output}, {})
        answers[name] = made._replace(weights={}, inputs={})
    return answers, reasons


def _probe_file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-')}.safetensors"


def given(case: Case, setting: Setting, folder: Path) -> tuple[Trace, Trace, Array]:
    """What an implementation is given: weights, inputs and d_output of the case, or of a probe in `folder`."""
    if setting not in PROBES:
        return case.arrays(*setting)
    arrays = load_file(_probe_file(folder, setting.input))
    d_output = arrays.pop("d_output")
    return {name: arrays.pop(name) for name in WEIGHTS}, arrays, d_output


class Unusable(Exception):
    """What was asked for cannot be had on this machine; the message is the one line that the user gets."""


# ------------------------------------------------------------------------------------------------------ in this process


class Loaded(NamedTuple):
    """An implementation whose framework is imported and whose device is chosen."""

    run: Run
    matmul: Callable[[Array, Array], Array]
    device: str
    accelerator: str | None


def load(name: str, device: str = "cpu") -> Loaded:
    """Import an implementation, with its bug planted if it names one ("numpy:norm_after_rope").

    Raises Unusable where a GPU is asked for and its framework sees none.
    """
    framework, _, bug = name.partition(":")
    if bug:
        from harness import bugs

        bugs.plant(framework, bug)
    if framework == "numpy":
        return Loaded(run_numpy, matmul_numpy, "cpu", None)
    return _load_jax(device) if framework == "jax" else _load_torch(framework, device)


def run_numpy(
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    d_output: Array,
    config: AttentionConfig,
    observe: Observe = keep,
) -> Trace:
    """The NumPy page's forward and backward, with every observed value kept.

    bfloat16 and float16 are float32 arithmetic of which every observed value is rounded, as where Hugging Face rounds.
    """
    from impls import numpy_attention

    short = d_output.dtype if d_output.dtype.itemsize == 2 else None
    if short:
        weights, inputs = (
            {name: value.astype(np.float32) for name, value in each.items()} for each in (weights, inputs)
        )
    trace: Trace = {}

    def record(name: str, value: Array) -> Array:
        trace[name] = observe(name, value) if short is None else observe(name, value).astype(short)
        return trace[name] if short is None else trace[name].astype(np.float32)

    with np.errstate(over="ignore" if short else "warn", invalid="ignore" if short else "warn"):  # beyond float16
        _, cache = numpy_attention.forward(weights, inputs, config, record)
        numpy_attention.backward(d_output.astype(np.float32) if short else d_output, cache, record)
    return trace


def matmul_numpy(a: Array, b: Array) -> Array:
    """A product as `run_numpy` computes it."""
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype) if a.dtype.itemsize == 2 else a @ b


def _load_jax(device: str) -> Loaded:
    import jax

    from impls import jax_attention

    device = _device("jax", device, any(each.platform == "gpu" for each in jax.devices()))
    place = jax.devices(device)[0]

    def matmul(a: Array, b: Array) -> Array:
        with jax.enable_x64(True):
            return np.asarray(jax_attention.matmul(*jax.device_put((a, b), place)))

    run = functools.partial(jax_attention.run, device=device)
    return Loaded(run, matmul, device, place.device_kind if device == "gpu" else None)


def _load_torch(name: str, device: str) -> Loaded:
    """The PyTorch implementation, or Hugging Face's layer."""
    import torch

    from impls import torch_attention

    device = _device(name, device, torch.cuda.is_available())
    place = "cuda" if device == "gpu" else "cpu"

    def matmul(a: Array, b: Array) -> Array:
        return torch_attention.array(torch_attention.tensor(a, place) @ torch_attention.tensor(b, place))

    run: Run
    if name == "torch":
        run = functools.partial(torch_attention.run, device=place)
    else:
        from harness import reference

        run = functools.partial(reference.run, attn_implementation=name.removeprefix("hf-"), device=place)
    return Loaded(run, matmul, device, torch.cuda.get_device_name(0) if device == "gpu" else None)


def _device(framework: str, asked: str, has_gpu: bool) -> str:
    if asked == "gpu" and not has_gpu:
        raise Unusable(f"--device gpu: {framework} sees no GPU on this machine; use --device cpu or auto")
    return "gpu" if has_gpu and asked != "cpu" else "cpu"


# ----------------------------------------------------------------------------------------------------- traces as files


def store(trace: Trace, path: Path, scratch: Path | None) -> dict[str, str]:
    """Write a trace to `path`; its weight gradients, which are large, to `scratch` if given. Returns where they are."""
    large = {name: value for name, value in trace.items() if name.endswith("proj.weight") and scratch is not None}
    files = {"": str(path)}
    for name, value in large.items():
        files[name] = str(Path(str(scratch)) / f"{path.stem}.{name}.npy")
        np.save(files[name], value)
    save_file({name: np.ascontiguousarray(value) for name, value in trace.items() if name not in large}, path)
    return files


def fetch(files: Mapping[str, str]) -> Trace:
    """The trace that `store` wrote; weight gradients in `scratch` are mapped and not read."""
    trace: Trace = load_file(files[""])
    large = {name: np.load(file, mmap_mode="r") for name, file in files.items() if name}
    return trace | {name: value.view("bfloat16") if value.dtype.kind == "V" else value for name, value in large.items()}


# -------------------------------------------------------------------------------------------- in a process of its own


class Worker:
    """A process that runs one or several implementations; its events arrive in a queue as (worker, event).

    Events, by their key "event": ready (device, accelerator, seconds), running (name, setting), trace (name, setting,
    files), done (seconds, matmul_bits), unusable (message), failed (error, perhaps a name), exit (error: why it ended).
    """

    def __init__(self, names: Sequence[str], device: str, events: "queue.SimpleQueue[tuple[Worker, dict[str, Any]]]"):
        self.names, self.events = tuple(names), events
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the worker)
        root = Path(__file__).resolve().parent.parent
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.runners", device, *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment(root, device),
            start_new_session=True,  # Ctrl-C reaches the command alone, which then ends its workers
        )
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def job(self, **fields: Any) -> None:
        """Send a job: the case's files and hashes, the settings, the folders for what is kept and what is not."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its exit event says so
            print(json.dumps(fields), file=self.process.stdin, flush=True)

    def end(self) -> None:
        """End the process and all that it started, now."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.listener.join()
        with self.process, self.log, contextlib.suppress(BrokenPipeError):
            pass  # closes its pipes

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put((self, json.loads(line)))
        code = self.process.wait()
        self.log.seek(0)
        last = (self.log.read().decode(errors="replace").strip().splitlines() or [""])[-1]
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
        self.events.put((self, {"event": "exit", "error": f"its process {how}{': ' * bool(last)}{last}"}))


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
    device, *names = arguments
    say, jobs = _speaker(), _jobs()
    if names[0] not in REFERENCES:
        give_way()
    try:
        loaded = {name: load(name, device) for name in names}
        first = loaded[names[0]]
        bits = precision(first)
        ready = time.perf_counter() - started
        say("ready", device=first.device, accelerator=first.accelerator, seconds=ready)
        for line in iter(jobs.get, ""):
            seconds = _work(json.loads(line), loaded, say)
            bits = {dtype: min(read, bits[dtype]) for dtype, read in precision(first).items()}  # before and after
            say("done", seconds={name: ready + spent for name, spent in seconds.items()}, matmul_bits=bits)
    except Unusable as error:
        say("unusable", message=str(error))
    except Exception as error:
        traceback.print_exc()
        say("failed", error=_line(error))
        return 1
    return 0


def precision(loaded: Loaded) -> dict[str, int]:
    """The bits that a matrix product reads of its operands, for each dtype: measured, whatever was asked for."""
    return {dtype: matmul_bits(loaded.matmul, dtype) for dtype in SIGNIFICAND}


def give_way() -> None:
    """Let this thread run after others: transformers takes longest to import, and all wait for the reference."""
    with contextlib.suppress(AttributeError, OSError):  # where threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def _work(job: Mapping[str, Any], loaded: Mapping[str, Loaded], say: Callable[..., None]) -> dict[str, float]:
    """Run every setting of a job; one that raises is reported and left out. Returns the seconds spent by each."""
    case = read_case(Path(job["weights"]), {name: Path(path) for name, path in job["inputs"].items()})
    if case.sha256 != job["sha256"]:
        raise Unusable(f"{job['weights']}: the case's files changed while they were being compared; run again")
    case = case.rounded(job["given"])
    seconds = dict.fromkeys(loaded, 0.0)
    for setting, name in itertools.product((Setting(*each) for each in job["settings"]), loaded):
        if name not in seconds:
            continue
        start = time.perf_counter()
        say("running", name=name, setting=setting)
        try:
            trace = loaded[name].run(*given(case, setting, Path(job["scratch"])), case.config)
            for entry, value in trace.items():
                if value.dtype.name not in SIGNIFICAND:
                    raise TypeError(f"{entry} holds {value.dtype} numbers")
        except Exception as error:
            traceback.print_exc()
            say("failed", name=name, error=_line(error))
            del seconds[name]
            continue
        try:
            files = _keep(trace, name, setting, case.layer, job)
        except (OSError, SafetensorError) as error:
            raise Unusable(f"--out: a trace cannot be written ({error}); make room or choose another") from error
        say("trace", name=name, setting=setting, files=files)
        seconds[name] += time.perf_counter() - start
    return seconds


def _keep(trace: Trace, name: str, setting: Setting, layer: int, job: Mapping[str, Any]) -> dict[str, str]:
    """Store a trace: with those that stay (all but float64 ones that are not the truth), or to be judged and go."""
    stays = job["keep_all"] or (setting not in PROBES and (setting.dtype != "float64" or name == "hf-eager"))
    stem = f"{name}.layer{layer}.{setting.input}.{setting.rope}.{setting.dtype}".replace(":", "-").replace(" ", "-")
    path = Path(job["traces"] if stays else job["scratch"]) / f"{stem}.safetensors"
    return store(trace, path, None if job["keep_all"] else Path(job["scratch"]))


def _line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _jobs() -> "queue.SimpleQueue[str]":
    """The lines of standard input. When it ends, the command is gone, and so is this process, whatever it is doing."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _speaker() -> Callable[..., None]:
    """Events go to what was standard output; whatever else prints goes to standard error."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=events, flush=True)

    return say


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
