"""Implementations spread over several devices: `jax@heads=4,sequence=2`, `torch@heads=2`.

The name says the framework and how many devices cut each axis (`MESH` in `impls/spec.py`: which letters an axis cuts).
JAX has its devices in one process, or in several (`processes=2`); PyTorch has one in each. The first process is the
worker that every implementation has; it starts the others, or waits for those that somebody started on other hosts, by
the frameworks' own variables (MASTER_ADDR, MASTER_PORT, RANK; JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID):

    MASTER_ADDR=host0 MASTER_PORT=4000 RANK=1 python -m harness.mesh torch@heads=2 --device gpu          on host 1
    MASTER_ADDR=host0 MASTER_PORT=4000 python -m harness.compare --world-size 2 --device gpu             on host 0

    JAX_COORDINATOR_ADDRESS=host0:4000 JAX_PROCESS_ID=1 python -m harness.mesh jax@heads=2,processes=2 --device gpu
    JAX_COORDINATOR_ADDRESS=host0:4000 python -m harness.compare --mesh heads=2,processes=2 --device gpu

Tried: two processes on the loopback of one host, on its CPU (tests/test_mesh.py). Not tried: two hosts, and GPUs.

All of them compute every run together; what it is given, the first one sends through the framework's own collectives.
"""

import functools
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save

from harness.case import BadInput
from harness.environment import nvidia
from harness.export import Arguments, command
from harness.runners import ended, jobs_asked, unnamed_file
from impls.spec import AttentionConfig

Array = np.ndarray
Trace = dict[str, Array]
AXES = {"jax": ("heads", "sequence", "batch"), "torch": ("heads",)}
"""The axes of a mesh that each framework's implementation has."""
MOST = 64
"""Devices of a mesh: a CPU can pose as so many in seconds (a process for each is started, or a thread)."""
Exchanged = dict[str, dict[str, float]]
"""Bytes that all devices together send, by pass and collective."""
PASSES = ("forward, a token", "hidden states' gradient, a token", "weights' gradients, a step")
"""What they send for each token of the batch, and for each batch, however long."""


class Plan(NamedTuple):
    """How an implementation is spread: devices along each axis, in how many processes; perhaps with a planted bug."""

    framework: str
    axes: dict[str, int]
    processes: int = 1
    bug: str = ""

    @property
    def devices(self) -> int:
        """How many devices there are, in all processes."""
        return math.prod(self.axes.values())


def spread(name: str) -> bool:
    """Whether a name is of an implementation spread over devices."""
    return name.partition("@")[0] in AXES and "@" in name


def parse(name: str) -> Plan:
    """The plan that a name says. Raises BadInput where it says none."""
    framework, _, rest = name.partition("@")
    said, _, bug = rest.partition(":")
    flag = "--world-size" if framework == "torch" else "--mesh"
    if framework not in AXES:
        raise BadInput(f"--impl {name}: only {' and '.join(AXES)} can be spread over devices")
    numbers: dict[str, int] = {}
    for part in said.split(","):
        key, _, value = part.partition("=")
        if key not in (*AXES[framework], *(["processes"] if framework == "jax" else [])) or key in numbers:
            known = ", ".join(AXES[framework])
            raise BadInput(
                f"{flag} {said}: {part!r} is no axis of {framework}'s mesh, or a second one; there are {known}"
            )
        if not re.fullmatch(r"[1-9][0-9]{0,3}", value):
            raise BadInput(f"{flag} {said}: {part!r} needs a whole number of devices, as in {key}=2")
        numbers[key] = int(value)
    processes = numbers.pop("processes", 1)
    plan = Plan(framework, numbers, processes, bug)
    if plan.devices > MOST:
        raise BadInput(f"{flag} {said}: {plan.devices:,} devices; at most {MOST} are spread over")
    if framework == "torch":
        return plan._replace(processes=plan.devices)
    if plan.devices % processes:
        raise BadInput(f"{flag} {said}: {plan.devices} devices cannot be divided among {processes} processes")
    return plan


def check(name: str, config: AttentionConfig, dtype: str | None = None) -> None:
    """Raises BadInput where a layer's heads cannot be divided among the devices, or its dtype is a shorter one.

    Batch and tokens need not divide. In a shorter dtype, each device rounds its part of a sum before they are added,
    and how large the parts are, no trace shows (seen in float16: 1.7 of gate T's limit, 27 of gate L's bound).

    With fewer key/value heads than devices, a head would be on several, and each apply the backward of RoPE and RMSNorm
    to its part of the head's gradient. A trace holds the sum, which certifies none of them (seen: 93 times the bound).
    """
    if dtype in ("bfloat16", "float16"):
        raise BadInput(
            f"--dtype {dtype}: {name} is judged in float64 and float32 only, since each device rounds its part of a "
            "sum to the shorter dtype before they are added, and a trace does not show the parts"
        )
    heads, N, K = parse(name).axes.get("heads", 1), config.num_attention_heads, config.num_key_value_heads
    if N % heads:
        raise BadInput(f"{name}: {N} query heads cannot be divided among {heads} devices; choose a divisor of {N}")
    if K % heads:
        raise BadInput(
            f"{name}: {K} key/value heads cannot be divided among {heads} devices; choose a divisor of {K} (a head on "
            "several devices has its gradient in parts, which a trace does not show)"
        )


# ----------------------------------------------------------------------------------------------------- the processes


class Joined(NamedTuple):
    """An implementation as one process of its group has it."""

    run: Callable[..., Trace]
    exchanged: Callable[..., Exchanged]
    tell: Callable[[bytes], bytes]  # what the first process gives it, in every one
    accelerator: str | None = None


def load(name: str, device: str) -> Joined:
    """Join a group as its first process, which starts the others if they are not to come from elsewhere.

    Every process runs what this one runs. Raises BadInput where there are too few devices.
    """
    plan = parse(name)
    if device == "auto":
        device = "gpu" if nvidia()[0] else "cpu"
    address, rank = VARIABLES[plan.framework][:2]
    if plan.processes > 1 and address not in os.environ:
        start(name, plan, device)
    os.environ[rank] = "0"
    group = join(plan, device)

    def everywhere(what: str, *given: Any) -> Any:
        if plan.processes > 1:
            group.tell(packed(what, *given))
        return getattr(group, what)(*given)

    return group._replace(
        run=functools.partial(everywhere, "run"), exchanged=functools.partial(everywhere, "exchanged")
    )


VARIABLES = {
    "jax": ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"),
    "torch": ("MASTER_ADDR", "RANK", "MASTER_PORT"),
}
"""Where each framework looks for the first process, and for the number of this one."""


def start(name: str, plan: Plan, device: str) -> None:
    """Start the other processes on this machine: they end with this one, and it with any of them, saying why."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    if plan.framework == "jax":
        os.environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
    else:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": loopback}
    for rank in range(1, plan.processes):
        log = unnamed_file()
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.mesh", name, "--device", device, "--until-eof"],
            stdin=subprocess.PIPE,  # closed when this process is gone
            stdout=log,
            stderr=log,
            env={**os.environ, VARIABLES[plan.framework][1]: str(rank)},
        )
        threading.Thread(target=_watch, args=(process, log, f"process {rank} of {plan.processes}"), daemon=True).start()


def _watch(process: subprocess.Popen[bytes], log: BinaryIO, which: str) -> None:
    """End this process when another one of its group has ended: it would wait for it."""
    how = ended(process.wait(), log)
    print(f"{which} {how}", file=sys.stderr, flush=True)
    os._exit(1)


def join(plan: Plan, device: str) -> Joined:
    """This process's part of an implementation, with its planted bug."""
    if plan.bug:
        from harness import bugs

        bugs.plant(f"{plan.framework}-mesh", plan.bug)
    return (_join_jax if plan.framework == "jax" else _join_torch)(plan, device)


def _join_jax(plan: Plan, device: str) -> Joined:
    import jax
    from jax.experimental import multihost_utils

    from impls import jax_mesh

    if device == "cpu":
        jax.config.update("jax_num_cpu_devices", plan.devices // plan.processes)
    if plan.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            num_processes=plan.processes,
            process_id=int(os.environ["JAX_PROCESS_ID"]),
        )
    devices = [each for each in jax.devices() if (each.platform == "cpu") is (device == "cpu")]
    enough(plan, len(devices), device)
    mesh = jax_mesh.make_mesh(devices, **plan.axes)

    def tell(message: bytes) -> bytes:
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
        return bytes(multihost_utils.broadcast_one_to_all(np.resize(np.frombuffer(message, np.uint8), size)).tobytes())

    def exchanged(weights: Trace, inputs: Trace, d_output: Array, config: AttentionConfig) -> Exchanged:
        B, T = d_output.shape[:2]
        programs = jax_mesh.programs(weights, inputs, d_output, config, mesh)
        return by_pass((sent(text, plan.devices) for text in programs), B * T)

    kind = None if device == "cpu" else devices[0].device_kind
    return Joined(functools.partial(jax_mesh.run, mesh=mesh), exchanged, tell, kind)


def _join_torch(plan: Plan, device: str) -> Joined:
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    from impls import torch_mesh

    place, rank = "cpu" if device == "cpu" else "cuda", int(os.environ["RANK"])
    if place == "cuda":
        enough(plan._replace(axes={"heads": 1}), torch.cuda.device_count(), device)
        torch.cuda.set_device(rank % torch.cuda.device_count())
    met = {} if plan.processes > 1 else {"store": distributed.HashStore()}
    given = {"rank": rank, "world_size": plan.processes, "timeout": timedelta(days=1)}  # --time-limit is shorter
    distributed.init_process_group("nccl" if place == "cuda" else "gloo", **given, **met)
    mesh = init_device_mesh(place, (plan.processes,), mesh_dim_names=("heads",))
    words = distributed.new_group(backend="gloo")

    def tell(message: bytes) -> bytes:
        size = torch.tensor(len(message))
        distributed.broadcast(size, src=0, group=words)
        data = torch.from_numpy(np.resize(np.frombuffer(message, np.uint8), int(size)))
        distributed.broadcast(data, src=0, group=words)
        return bytes(data.numpy().tobytes())

    kind = torch.cuda.get_device_name() if place == "cuda" else None
    run = functools.partial(torch_mesh.run, mesh=mesh)
    return Joined(run, functools.partial(_exchanged_torch, mesh=mesh), tell, kind)


def enough(plan: Plan, found: int, device: str) -> None:
    """Raises BadInput where there are too few devices."""
    if found < plan.devices:
        raise BadInput(f"--device {device}: {plan.framework} sees {found} of the {plan.devices} devices of its mesh")


def main(argv: Sequence[str] | None = None) -> int:
    """A process of a group that is not the first: it runs what that one runs, until that has ended."""
    parser = Arguments(prog="python -m harness.mesh", description="One more process of a spread implementation.")
    parser.add_argument("name", help="as the first process has it, such as torch@heads=2")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--until-eof", action="store_true", help="end with standard input")
    options = parser.parse_args(argv)
    if options.until_eof:
        jobs_asked()
    try:
        group = join(parse(options.name), options.device)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    while True:
        what, given = unpacked(group.tell(b""))
        getattr(group, what)(*given)


def packed(what: str, weights: Trace, inputs: Trace, d_output: Array, config: AttentionConfig) -> bytes:
    """What the first process runs, as the bytes of a safetensors file."""
    named = {f"weights {name}": value for name, value in weights.items()}
    named |= {f"inputs {name}": value for name, value in inputs.items()} | {"d_output": d_output}
    arrays = {name: np.ascontiguousarray(value) for name, value in named.items()}
    return save(arrays, {"what": what, "config": json.dumps(asdict(config))})


def unpacked(message: bytes) -> tuple[str, tuple[Trace, Trace, Array, AttentionConfig]]:
    """What `packed` has packed."""
    arrays = load_tensors(message)
    size = int.from_bytes(message[:8], "little")
    metadata = json.loads(message[8 : 8 + size])["__metadata__"]
    weights, inputs = (
        {name.removeprefix(kind): value for name, value in arrays.items() if name.startswith(kind)}
        for kind in ("weights ", "inputs ")
    )
    config = AttentionConfig(**json.loads(metadata["config"]))
    return metadata["what"], (weights, inputs, arrays["d_output"], config)


# ------------------------------------------------------------------------------------------------- what they exchange


def sent(program: str, devices: int) -> dict[str, float]:
    """Bytes that all devices together send in one run of a compiled program (HLO text of XLA), by collective.

    In a group of g, each as a ring does it: an all-reduce of n bytes sends 2 (g − 1)/g n from each device, an
    all-gather, a reduce-scatter and an all-to-all (g − 1)/g of the larger side; a permutation sends all.
    """
    total: dict[str, float] = {}
    for result, what, start, rest in COLLECTIVE.findall(program):
        g, shapes = _group_size(rest, devices), SHAPE.findall(result)
        if start and what != "all-reduce":  # asynchronous, as on a GPU: its result is (operands, results, …)
            shapes = shapes[1:2] if what == "collective-permute" else shapes[len(shapes) // 2 :]
        n = sum(_bytes(*shape) for shape in shapes)
        total[what] = total.get(what, 0.0) + devices * share(what, g) * n
    return {what: bytes for what, bytes in total.items() if bytes}


COLLECTIVE = re.compile(
    r"= (\(?\w+\[.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\((.*)"
)
SHAPE = re.compile(r"(\w+?)(\d+)\[([\d,]*)\]")


def share(what: str, g: int) -> float:
    """What a device sends in a collective of g devices, as a part of its result's bytes."""
    return {"all-reduce": 2 * (g - 1) / g, "reduce-scatter": g - 1, "collective-permute": 1}.get(what, (g - 1) / g)


def _group_size(rest: str, devices: int) -> int:
    """Of `replica_groups={{0,1},{2,3}}` or `[2,2]<=[4]`; of `{}`, all devices."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    if listed:
        return len(listed[1].split(","))
    folded = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    return int(folded[1]) if folded else devices


def _bytes(_: str, bits: str, dims: str) -> float:
    return int(bits) / 8 * math.prod(int(each) for each in dims.split(",") if each)


def by_pass(programs: Iterable[Mapping[str, float]], tokens: int) -> Exchanged:
    """What each pass adds: of programs that compute the first, the first two, and all three."""
    found: Exchanged = {}
    before: Mapping[str, float] = {}
    for name, program in zip(PASSES, programs, strict=True):
        per = tokens if name.endswith("token") else 1
        more = {what: n - before.get(what, 0) for what, n in program.items()}
        found[name], before = {what: round(n / per, 3) for what, n in more.items() if n}, program
    return found


def _exchanged_torch(
    weights: Mapping[str, Array], inputs: Mapping[str, Array], d_output: Array, config: AttentionConfig, mesh: Any
) -> Exchanged:
    """The same of PyTorch, which compiles nothing: its collectives as it comes to them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from impls import torch_mesh

    totals: list[dict[str, float]] = [{}]

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            result = function(*arguments, **(keywords or {}))
            name = str(function).removeprefix("_c10d_functional.").partition(".")[0]
            if what := {"all_reduce": "all-reduce", "all_gather_into_tensor": "all-gather"}.get(name):
                bytes = mesh.size() * share(what, mesh.size()) * result.numel() * result.element_size()
                totals[-1][what] = totals[-1].get(what, 0.0) + bytes
            elif "c10d" in str(function) and name not in ("wait_tensor", "_wrap_tensor_autograd"):
                raise RuntimeError(f"{function}: a collective whose bytes are not counted")
            return result

    with Count():
        for _ in torch_mesh.passes(weights, inputs, d_output, config, mesh):
            totals.append(dict(totals[-1]))
    B, T = d_output.shape[:2]
    return by_pass(totals[:-1], B * T)


if __name__ == "__main__":
    command(main)
