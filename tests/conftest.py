"""What the tests share: shapes enforced in `impls`, small cases in float64, and one way to run each implementation."""
# ruff: noqa: E402  (threads, flags and the import hook come before what they govern)

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each worker, set before any library starts its own
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
# XLA compiles one of these layers in a sixth of the time with its older fusion and unoptimised element-wise loops.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0")
# For a layer spread over devices; what asks for none of them uses the first.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "10")

from jaxtyping import install_import_hook

install_import_hook("impls", "beartype.beartype")  # before the first import of impls

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from impls import numpy_attention
from impls.spec import AttentionConfig, Observe, keep, weight_shapes

Trace = dict[str, np.ndarray]
Run = Callable[..., Trace]


class Case(NamedTuple):
    """Weights, inputs and cotangent of one layer: the leading arguments of every `run`."""

    weights: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]
    d_output: np.ndarray
    config: AttentionConfig

    def astype(self, dtype: Any) -> "Case":
        """The same case, every array converted to `dtype`."""
        weights = {name: array.astype(dtype) for name, array in self.weights.items()}
        inputs = {name: array.astype(dtype) for name, array in self.inputs.items()}
        return Case(weights, inputs, self.d_output.astype(dtype), self.config)


def rope_angles(rope: str, B: int, T: int, H: int, random: np.random.Generator) -> np.ndarray:
    """Angles [B,T,H]: `neutral` all 0; `model` as in Qwen3, theta 1e6; `random` in each place."""
    if rope == "random":
        return random.uniform(0, 2 * np.pi, (B, T, H))
    frequencies = 1e6 ** -(np.arange(0, H, 2) / H) * (rope == "model")
    return np.broadcast_to(np.tile(np.arange(T)[:, None] * frequencies, 2), (B, T, H))


def make_case(config: AttentionConfig, B: int, T: int, seed: int = 0, rope: str = "random") -> Case:
    """A case in float64; norm weights are not one and q's are not k's."""
    random = np.random.default_rng(seed)
    weights = {name: random.normal(0, shape[-1] ** -0.5, shape) for name, shape in weight_shapes(config).items()}
    weights["q_norm.weight"] = random.lognormal(0.3, 0.5, config.head_dim)
    weights["k_norm.weight"] = random.lognormal(-0.2, 0.7, config.head_dim)
    angles = rope_angles(rope, B, T, config.head_dim, random)
    x_BTD, d_output = random.standard_normal((2, B, T, config.hidden_size))
    return Case(weights, {"hidden_states": x_BTD, "cos": np.cos(angles), "sin": np.sin(angles)}, d_output, config)


def numpy_run(
    weights: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    d_output: np.ndarray,
    config: AttentionConfig,
    device: str = "cpu",
    observe: Observe = keep,
) -> Trace:
    """The NumPy page as the other implementations' `run`; in float64 it is the tests' oracle."""
    trace: Trace = {}

    def record(name: str, value: np.ndarray) -> np.ndarray:
        trace[name] = value if name.startswith("d_") else observe(name, value)
        return trace[name]

    _, cache = numpy_attention.forward(weights, inputs, config, record)
    numpy_attention.backward(d_output, cache, record)
    return trace


@pytest.fixture(scope="session")
def config() -> AttentionConfig:
    """Sizes that are pairwise distinct, also with B = 4 and T = 5: D 20, N 6, K 3, G 2, H 8."""
    return AttentionConfig(20, 6, 3, 8, 1e-6)


@pytest.fixture(scope="session")
def case(config: AttentionConfig) -> Case:
    """The small case, B = 4 and T = 5, with random RoPE angles; read-only, so that writing into it is an error."""
    small = make_case(config, B=4, T=5)
    for array in (*small.weights.values(), *small.inputs.values(), small.d_output):
        array.setflags(write=False)
    return small
