"""One implementation, timed as a user calls it: nothing is recorded, observed or kept.

    prepare(name, direction, weights, inputs, d_output, config, device) -> Timed      here
    python -m harness.timed DEVICE NAME                                               in a process of its own

That process is one of `harness.bench`. It reads jobs from standard input and writes events to standard output, one line
of JSON each, and computes only while it is asked to, so that several of them can take turns.
"""

import ctypes
import gc
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from harness.case import additive_mask, read_case
from harness.runners import Unusable, jobs_asked, load, one_line, precision, speaker
from impls.spec import AttentionConfig

Array = np.ndarray
Arrays = Mapping[str, Array]
DIRECTIONS = ("forward", "forward+backward")
"""The second gives the gradients of the hidden states and of every weight and bias."""
MATMUL = "matmul"
"""Not an implementation: one large product of two square matrices, by which the machine's own rate is known."""
MATMUL_SIZE = {"cpu": 2048, "gpu": 8192}
SHORTEST = 0.1
"""Seconds: what takes less is called again and again until they are over, and its mean is taken."""


class Memory(NamedTuple):
    """Bytes at the highest point of a call: all that the process (on a GPU, the framework) held, and what it held more
    than before."""

    peak: int
    working: int


class Timed(NamedTuple):
    """A call that returns when its result is there, the seconds of one, its memory, and what compiling it took."""

    call: Callable[[], Any]
    seconds: Callable[[Callable[[], Any]], float]
    memory: Callable[[Callable[[], Any]], Memory | None]
    compile_seconds: float | None = None


def prepare(
    name: str, direction: str, weights: Arrays, inputs: Arrays, d_output: Array, config: AttentionConfig, device: str
) -> Timed:
    """The forward of an implementation, or that and its backward; the call returns the output, or it and the gradients.

    Args: a name of `harness.bench.NAMES` or MATMUL, one of DIRECTIONS, arrays of one dtype, "cpu" or "gpu".
    """
    if name == MATMUL:
        return prepare_matmul(d_output.dtype.name, device)
    given = weights, inputs, d_output, config
    if name.startswith("numpy"):
        return Timed(numpy_call(name, direction, *given), wall_clock, resident)
    if name.startswith("jax"):
        return prepare_jax(name, direction, *given, device)
    call = torch_call(name, direction, *given, "cuda" if device == "gpu" else "cpu")
    return Timed(call, cuda_clock, cuda_memory) if device == "gpu" else Timed(call, wall_clock, resident)


def numpy_call(
    name: str, direction: str, weights: Arrays, inputs: Arrays, d_output: Array, config: AttentionConfig
) -> Callable[[], Any]:
    from impls import numpy_attention, numpy_tiled

    page = numpy_tiled if name == "numpy-tiled" else numpy_attention

    def both() -> Any:
        output, cache = page.forward(weights, inputs, config)
        return output, page.backward(d_output, cache)

    return both if direction == "forward+backward" else lambda: page.forward(weights, inputs, config)[0]


def prepare_jax(
    name: str, direction: str, weights: Arrays, inputs: Arrays, d_output: Array, config: AttentionConfig, device: str
) -> Timed:
    import jax

    from impls import jax_attention, jax_dpa, jax_tiled

    layer = {"jax-dpa": jax_dpa.Attention, "jax-tiled": jax_tiled.Attention}.get(name, jax_attention.Attention)
    x_cos_sin = (inputs[each] for each in ("hidden_states", "cos", "sin"))
    arrays = jax.device_put((dict(weights), *x_cos_sin, d_output), jax.devices(device)[0])

    def forward(weights: Any, x: Any, cos: Any, sin: Any, d_output: Any) -> Any:
        return jax_attention.attention(weights, config, layer)(x, cos, sin)

    def both(weights: Any, x: Any, cos: Any, sin: Any, d_output: Any) -> Any:
        output, backward = jax.vjp(lambda weights, x: forward(weights, x, cos, sin, None), weights, x)
        gradients, d_x = backward(d_output)
        return output, {"d_hidden_states": d_x} | {f"d_{each}": gradients[each] for each in weights}

    start = time.perf_counter()
    compiled = jax.jit(both if direction == "forward+backward" else forward).lower(*arrays).compile()
    compile_seconds = time.perf_counter() - start

    def planned(call: Callable[[], Any]) -> Memory:
        """On a GPU JAX takes most of the memory at its start: what XLA has planned stands for what is used."""
        call()
        plan = compiled.memory_analysis()
        working = plan.temp_size_in_bytes + plan.output_size_in_bytes
        return Memory(plan.argument_size_in_bytes + working, working)

    memory = planned if device == "gpu" else resident
    return Timed(lambda: jax.block_until_ready(compiled(*arrays)), wall_clock, memory, compile_seconds)


def torch_call(
    name: str, direction: str, weights: Arrays, inputs: Arrays, d_output: Array, config: AttentionConfig, place: str
) -> Callable[[], Any]:
    """One of ours, or Hugging Face's layer: sdpa without a mask, as the model calls it on a batch without padding and
    as it is causal by itself; "hf-sdpa+mask" and eager with the mask that it makes else, once for all of its layers."""
    import torch

    from impls import torch_attention, torch_sdpa

    tensor = torch_attention.tensor
    x, cos, sin = (tensor(inputs[each], place) for each in ("hidden_states", "cos", "sin"))
    d_y = tensor(d_output, place)
    if name.startswith("torch"):
        page = torch_sdpa if name == "torch-sdpa" else torch_attention
        layer = torch_attention.attention(weights, config, place, page.Attention)

        def forward() -> Any:
            return layer(x, cos, sin)

    else:
        from harness import reference

        implementation = name.removeprefix("hf-").removesuffix("+mask")
        layer = reference.attention(weights, config, implementation).to(place)
        tokens = np.ones(inputs["hidden_states"].shape[:2], d_output.dtype)
        mask = None if name == "hf-sdpa" else tensor(additive_mask(tokens), place)

        def forward() -> Any:
            return layer(hidden_states=x, position_embeddings=(cos, sin), attention_mask=mask)[0]

    if direction == "forward":
        return torch.no_grad()(forward)
    leaves = {"d_hidden_states": x.requires_grad_()} | {f"d_{each}": layer.get_parameter(each) for each in weights}

    def both() -> Any:
        output = forward()
        return output, dict(zip(leaves, torch.autograd.grad(output, [*leaves.values()], d_y), strict=True))

    return both


def prepare_matmul(dtype: str, device: str) -> Timed:
    """By NumPy's BLAS in float32, whatever the run's dtype, since it has no shorter; on a GPU by PyTorch in that."""
    n = MATMUL_SIZE[device]
    a, b = np.random.default_rng(0).standard_normal((2, n, n), np.float32)
    if device == "cpu":
        return Timed(lambda: a @ b, wall_clock, resident)
    import torch

    x, y = (torch.from_numpy(each).to("cuda", getattr(torch, dtype)) for each in (a, b))
    return Timed(lambda: x @ y, cuda_clock, cuda_memory)


# ----------------------------------------------------------------------------------------------------- clocks, memory


def sample(timed: Timed) -> float:
    """Seconds of one call: a long one is called once, a short one many times, of which the first is not counted."""
    first = timed.seconds(timed.call)
    if first >= SHORTEST:
        return first
    seconds: list[float] = []
    while sum(seconds) < SHORTEST:
        seconds.append(timed.seconds(timed.call))
    return sum(seconds) / len(seconds)


def wall_clock(call: Callable[[], Any]) -> float:
    """Seconds until the call returns."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cuda_clock(call: Callable[[], Any]) -> float:
    """Seconds between two events on the GPU's own clock, before and after what the call asks of it."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000


def resident(call: Callable[[], Any]) -> Memory | None:
    """What the process holds in memory at most, as Linux counts it; None on other systems, which forget no maximum."""
    gc.collect()
    with suppress(OSError, AttributeError):  # what glibc keeps of what was freed is nobody's
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the maximum begins anew
        before = psutil.Process().memory_info().rss
        call()
        status = Path("/proc/self/status").read_text()
    except OSError:
        call()
        return None
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return Memory(peak, max(peak - before, 0))


def cuda_memory(call: Callable[[], Any]) -> Memory:
    """What PyTorch has allocated on the GPU at most."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return Memory(peak, peak - before)


# -------------------------------------------------------------------------------------------- in a process of its own


def main(arguments: Sequence[str]) -> int:
    """The process: import, then answer jobs until standard input ends.

    A job prepares a run ({weights, input, dtype, direction}; answered by `prepared`, after the first call, whose memory
    is taken), or asks for one more sample of the one prepared ({}; answered by `timed`). What fails is `failed`.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    device, name = arguments
    say, _ = speaker()
    jobs = jobs_asked()
    try:
        loaded = load("numpy" if name == MATMUL and device == "cpu" else framework(name), device)
        say("ready", device=loaded.device, accelerator=loaded.accelerator, matmul_bits=precision(loaded))
    except Unusable as error:
        say("unusable", message=str(error).removesuffix(" or auto"))
        return 0
    except Exception as error:
        traceback.print_exc()
        say("failed", error=one_line(error))
        return 1
    timed: Timed | None = None
    for line in iter(jobs.get, ""):
        job = json.loads(line)
        try:
            if job:
                timed = None  # its arrays go before the next ones come
                gc.collect()
                case = read_case(Path(job["weights"]), {"chapter": Path(job["input"])})
                arrays = case.arrays("chapter", "model", job["dtype"])
                timed = prepare(name, job["direction"], *arrays, case.config, device)
                memory = timed.memory(timed.call)
                say("prepared", compile_seconds=timed.compile_seconds, memory=memory and memory._asdict())
            elif timed:
                say("timed", seconds=sample(timed))
        except Exception as error:
            traceback.print_exc()
            say("failed", error=one_line(error))
    return 0


def framework(name: str) -> str:
    """The name by which `harness.runners` knows an implementation."""
    return "torch" if name == MATMUL else name.removesuffix("+mask")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
