"""Where a run took place: versions, machine, driver, and the precision that matrix products really have there."""

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import ml_dtypes
import numpy as np

PACKAGES = ("numpy", "jax", "jaxlib", "flax", "torch", "transformers", "safetensors", "ml_dtypes", "jaxtyping")

SIGNIFICAND = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of a significand, the leading one included. TF32 is a float32 of which a product reads 11."""


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """The installed version of each package, None where it is not installed. Imports none of them."""
    return {name: version(name) for name in packages}


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe(accelerator: str | None = None, driver: str | None = None) -> dict[str, str | int | None]:
    """Python, platform, CPU and accelerator; never the host's name.

    A process that used an accelerator passes its name and driver; otherwise nvidia-smi is asked. None: there is none.
    """
    if accelerator is None:
        accelerator, driver = nvidia()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu(),
        "cores": os.cpu_count() or 1,
        "accelerator": accelerator,
        "driver": driver,
    }


def cpu() -> str:
    """The processor's name: /proc/cpuinfo on Linux, sysctl on macOS, else what `platform` knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin" and (name := ask("sysctl", "-n", "machdep.cpu.brand_string")):
        return name
    return platform.processor() or platform.machine() or "unknown"


def nvidia() -> tuple[str | None, str | None]:
    """Name and driver of the first NVIDIA GPU, by nvidia-smi."""
    answer = ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, comma, driver = (answer.splitlines() or [""])[0].partition(", ")
    return (name, driver) if comma else (None, None)


def ask(*command: str) -> str:
    """What a command prints, or "" where it is missing, fails or takes longer than ten seconds."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def matmul_bits(matmul: Callable[[np.ndarray, np.ndarray], np.ndarray], dtype: str = "float32", size: int = 256) -> int:
    """The precision in effect, measured: how many bits of either operand's significand a matrix product reads.

    matmul: two NumPy arrays [size, size] of `dtype` -> their product, computed by whatever is being asked about.
    dtype: a key of SIGNIFICAND.
    Returns 53 for true float64, 24 for true float32, 11 for TF32 and float16, 8 for bfloat16; 0 where nothing is right.

    An odd number / 2^(b-1) in [1, 2) needs exactly b bits, so its product with the identity returns it unchanged if
    and only if b bits are read. Each b is tried with hundreds of odd numbers (fixed seed): operands that a library
    splits in two (bf16 x 3) give 17 and do not pass for float32, as they would with 1 + 2^(1-b), a sum of two powers.
    At 256 x 256 a library uses the kernel that it uses for large matrices. Not seen: the precision of long sums.
    """
    digits, kind = SIGNIFICAND[dtype], np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    b = 1 + np.add.outer(np.arange(size), np.arange(size)) % digits
    one_to_two = 1 + np.random.default_rng(0).random((size, size))
    x = ((one_to_two * 2.0 ** (b - 1)) // 2 * 2 + 1) / 2.0 ** (b - 1)
    x, one = x.astype(kind), np.eye(size, dtype=kind)
    wrong = np.concatenate([b[matmul(x, one) != x], b[matmul(one, x) != x]])
    return int(wrong.min()) - 1 if wrong.size else digits


def keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next array: a system clears every page that it gives out.

    That was a second of a default run's processor time. In one arena for all threads, and below 1 GiB an array.
    """
    with suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((-8, 1), (-3, 2**30), (-1, 2**31 - 1)):  # arenas, mmap and trim thresholds
            mallopt(parameter, value)
