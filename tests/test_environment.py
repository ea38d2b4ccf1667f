"""What is recorded about the machine, and that the measured precision of a product is the true one."""

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness import environment

Product = Callable[[np.ndarray, np.ndarray], np.ndarray]


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """x to so many significand bits, to nearest."""
    significand, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.round(significand * 2.0**bits), exponent - bits).astype(x.dtype)


def truncated(x: np.ndarray, bits: int) -> np.ndarray:
    significand, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.trunc(significand * 2.0**bits), exponent - bits).astype(x.dtype)


@pytest.mark.parametrize(("dtype", "bits"), environment.SIGNIFICAND.items())
def test_numpy_reads_every_bit(dtype: str, bits: int) -> None:
    size = 256 if dtype in ("float32", "float64") else 32  # the short formats have no BLAS
    assert environment.matmul_bits(np.matmul, dtype, size) == bits


@pytest.mark.parametrize("bits", [8, 10, 11, 16, 23])
@pytest.mark.parametrize("how", [rounded, truncated])
def test_rounding_of_either_operand_shows(bits: int, how: Callable[[np.ndarray, int], np.ndarray]) -> None:
    products: list[Product] = [
        lambda a, b: how(a, bits) @ how(b, bits),
        lambda a, b: how(a, bits) @ b,
        lambda a, b: a @ how(b, bits),
        lambda a, b: how(a @ b, bits),
    ]
    assert [environment.matmul_bits(product) for product in products] == [bits] * 4


def test_float32_product_is_not_float64() -> None:
    assert environment.matmul_bits(lambda a, b: a.astype(np.float32) @ b.astype(np.float32), "float64") == 24


def test_operands_split_into_bfloat16_do_not_pass_for_float32() -> None:
    def split(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # bf16 x 3: what XLA calls "high"
        a1, b1 = rounded(a, 8), rounded(b, 8)
        return a1 @ b1 + a1 @ rounded(b - b1, 8) + rounded(a - a1, 8) @ b1

    assert environment.matmul_bits(split) == 17


def test_nonsense_has_no_precision() -> None:
    assert environment.matmul_bits(lambda a, b: np.full_like(a, np.nan)) == 0


def test_torch_under_each_setting() -> None:
    import torch

    before = torch.get_float32_matmul_precision()
    try:
        bits = {}
        for setting in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(setting)
            bits[setting] = environment.matmul_bits(lambda a, b: (torch.from_numpy(a) @ torch.from_numpy(b)).numpy())
    finally:
        torch.set_float32_matmul_precision(before)
    assert bits["highest"] == 24
    assert bits["high"] in (11, 16, 24) and bits["medium"] in (8, 11, 16, 24), bits  # as this CPU has it


def test_describe() -> None:
    here = environment.describe()
    assert set(here) == {"python", "platform", "cpu", "cores", "accelerator", "driver"}
    assert here["cpu"] and isinstance(here["cores"], int) and here["cores"] >= 1
    node = platform.node()
    assert len(node) < 4 or node not in " ".join(map(str, here.values()))


def test_accelerator_is_what_the_process_used() -> None:
    here = environment.describe("NVIDIA H200", "570.1")
    assert (here["accelerator"], here["driver"]) == ("NVIDIA H200", "570.1")


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("echo 'NVIDIA H200, 570.86'", ("NVIDIA H200", "570.86")),
        ("echo broken; exit 9", (None, None)),
        ("echo 'No devices were found'", (None, None)),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="plays nvidia-smi with a shell script")
def test_nvidia(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, answer: tuple[str | None, str | None]
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.nvidia() == answer
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert environment.nvidia() == (None, None)


def test_versions() -> None:
    found = environment.versions(("numpy", "no-such-package-here"))
    assert found == {"numpy": np.__version__, "no-such-package-here": None}


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, harness.artifact, harness.environment, harness.scaling, harness.report.console as _;"
        "harness.environment.versions();"
        "print({'torch', 'jax', 'flax', 'transformers', 'jsonschema'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
