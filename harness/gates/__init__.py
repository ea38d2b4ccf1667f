"""The gates: each judges a trace against the truth and returns findings. NumPy only; nothing here runs a framework.

    structure   float64, end to end: is it the same mathematics?
    local       stage by stage, from its own inputs: which stage does not compute its equation?
    tolerance   in the run's dtype, end to end: is the difference what rounding makes it, and no more?
    probes      inputs on which a correct layer does not round

A trace is a flat dict of arrays: stages by the names of `impls.spec.STAGES`, gradients by those of `GRADIENTS`,
and of `BIAS_GRADIENTS` where the layer has biases.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from impls.spec import BIAS_GRADIENTS, GRADIENTS, STAGES, AttentionConfig, weight_shapes

Array = np.ndarray
Trace = Mapping[str, Array]

EQUATION = {stage.name: stage.equation for stage in STAGES} | GRADIENTS | BIAS_GRADIENTS
"""Of every name that a trace may hold, in the order in which it is computed."""
NAMES = tuple(name for name in EQUATION if name not in BIAS_GRADIENTS)
"""Those of a whole trace of a layer without biases; of any layer: see `whole`."""

_LETTERS = {stage.name: stage.shape for stage in STAGES}


class Rounding(NamedTuple):
    """How a run rounds: by at most `unit` relative in its arithmetic, and in a dtype shorter than float32 by `stored`
    wherever a value is kept between operations, or by `least` absolute where it is too small for that."""

    unit: float
    stored: float = 0.0
    least: float = 0.0

    @property
    def bits(self) -> float:
        """The significand's bits of what a run keeps."""
        return -math.log2(self.stored or self.unit)


ROUNDING = {
    "float64": Rounding(2.0**-53),
    "float32": Rounding(2.0**-24),
    "bfloat16": Rounding(2.0**-24, 2.0**-8),
    "float16": Rounding(2.0**-24, 2.0**-11, 2.0**-25),
}
"""Sums of bfloat16 and float16 numbers are taken in float32: by Hugging Face's layer, and by hardware made for them."""


class Finding(NamedTuple):
    """What a gate saw at one stage or gradient: a measured value against its limit."""

    stage: str
    measure: str
    value: float
    limit: float
    where: tuple[int, ...] | None = None  # index of the worst element

    @property
    def excess(self) -> float:
        """How many times the limit is exceeded; for bits, how many are lacking."""
        if self.measure.startswith("bits"):
            return self.limit - self.value
        if self.limit:
            return self.value / self.limit
        return 0.0 if self.value == 0 else math.inf

    @property
    def match(self) -> bool:
        """Whether the value keeps the limit, an upper one except for bits; NaN does not."""
        return bool(self.value >= self.limit if self.measure.startswith("bits") else self.value <= self.limit)


def letters(name: str) -> str:
    """The dimension key of a trace's entry: "BTNH" for q_proj and d_q_proj, "" for the gradient of a weight."""
    if name == "d_hidden_states":
        return "BTD"
    return _LETTERS.get(name.removeprefix("d_"), "")


def shape(name: str, config: AttentionConfig, B: int, T: int) -> tuple[int, ...]:
    """The shape of a trace's entry for an input of B sequences of T tokens."""
    if name.removeprefix("d_") in (weights := weight_shapes(config)):
        return weights[name.removeprefix("d_")]
    sizes = config.sizes() | {"B": B, "T": T, "S": T}
    return tuple(sizes[letter] for letter in letters(name))


def whole(config: AttentionConfig) -> tuple[str, ...]:
    """Every name of a whole trace of this layer, in the order in which it is computed."""
    return (*NAMES, *(BIAS_GRADIENTS if config.attention_bias else ()))


def direction(name: str) -> str:
    """Whether the entry arises going forward or backward."""
    return "backward" if name in GRADIENTS or name in BIAS_GRADIENTS else "forward"


def usable(
    trace: Trace, truth: Trace, expected: Collection[str], dtype: str | None = None, seen: Array | None = None
) -> tuple[list[str], list[Finding]]:
    """The names that can be compared, and a finding for each that cannot: missing, unknown, misshapen or not finite.

    Without this a missing stage, a broadcast shape or a NaN would pass in silence; and so would, where the run's
    `dtype` is given, float64 that claims an accuracy which float32 has not.
    """
    names, findings = [], []
    for name in [*EQUATION, *(name for name in trace if name not in EQUATION)]:
        if name not in trace:
            fault = "missing" if name in expected else None
        elif name not in EQUATION or (name in BIAS_GRADIENTS and name not in truth and "d_hidden_states" in truth):
            fault = "unknown"
        elif name not in truth:
            continue
        elif trace[name].shape != truth[name].shape:
            fault = "shape"
        elif trace[name].dtype.name not in (ROUNDING if dtype is None else (dtype,)):
            fault = "dtype"
        elif not np.isfinite(compared(name, trace[name], seen)).all():
            fault = "not finite"
        else:
            names.append(name)
            continue
        if fault:
            findings.append(Finding(name, fault, np.inf, 0.0))
    return names, findings


def visible(shape: tuple[int, ...]) -> Array:
    """3.10: which keys a query may see, [T, S], for an array [..., T, S] whose last query stands at the last key."""
    T, S = shape[-2:]
    return np.tri(T, S, S - T, dtype=bool)


def seen_by(inputs: Trace) -> Array | None:
    """Which keys a query may see, [B,1,T,S], where the inputs have a mask; None where they have not: see `visible`."""
    return inputs["attention_mask"] == 0 if "attention_mask" in inputs else None


def compared(name: str, value: Array, seen: Array | None = None) -> Array:
    """What is compared of a value: all of it, but of masked_scores' hidden keys only what the softmax would leave.

    That may be −∞ or any mask that no score comes near; its weight against the row's largest, exp(m − max), is then 0.
    A query that sees no key, `seen` [B,1,T,S], has no answer: what is computed for it is a convention, and taken as 0.
    """
    if seen is not None and name in ("masked_scores", "probs", "heads", "output"):
        answered = np.any(seen, axis=-1, keepdims=True)  # [B,1,T,1]
        by_token = answered[:, 0] if name == "output" else answered.swapaxes(1, 2)  # [B,T,1], [B,T,1,1]
        value = np.where(answered if letters(name).endswith("TS") else by_token, value, 0)
    if name != "masked_scores":
        return value
    seen = visible(value.shape) if seen is None else seen
    largest = np.max(value, axis=-1, keepdims=True, where=seen, initial=-np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        hidden = np.exp(value - np.where(np.isfinite(largest), largest, np.inf))
    return np.where(seen, value, hidden)


def errors(
    name: str, value: Array, truth: Array, scale: Array, seen: Array | None = None
) -> tuple[float, float, tuple[int, ...]]:
    """rms(value − truth), and the largest |value − truth| / scale and where it is; scale broadcasts to the value.

    Taken in float64, in blocks that stay in the cache: the gradients of weights have millions of elements.
    """
    tiny = np.finfo(np.float32).tiny  # below the normal numbers, rounding is absolute
    value, truth = (x if x.dtype.kind == "f" else x.astype(np.float32) for x in (value, truth))  # bfloat16
    value, truth = compared(name, value, seen), compared(name, truth, seen)
    flat = [np.ascontiguousarray(x).reshape(-1) for x in (value, truth)]
    scales = (
        scale.reshape(1) if scale.size == 1 else np.ascontiguousarray(np.broadcast_to(scale, value.shape)).reshape(-1)
    )
    square, worst, at = 0.0, -1.0, 0
    for start in range(0, value.size, 32768):
        v, t = (x[start : start + 32768] for x in flat)
        error = np.subtract(v, t, dtype=np.float64)
        square += float(error @ error)
        ratio = np.abs(error, out=error)
        ratio /= (scales if scales.size == 1 else scales[start : start + 32768]) + tiny
        index = int(np.argmax(ratio))
        if ratio[index] > worst:
            worst, at = float(ratio[index]), start + index
    return math.sqrt(square / value.size), worst, tuple(map(int, np.unravel_index(at, value.shape)))


def difference(name: str, value: Array, truth: Array, seen: Array | None = None) -> Array:
    """value − truth in float64 where the two are compared."""
    return compared(name, value, seen).astype(np.float64) - compared(name, truth, seen)
