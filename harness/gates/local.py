"""Gate L, the local certificate: each stage recomputed in float64 from the implementation's own inputs to it.

What an implementation got wrong before does not count against a stage, so errors do not accumulate: a stage that fails
is the cause and not a victim. It needs no reference run and works on a trace from anywhere. Two figures for each stage:

*bound*  max of |error| / bound, the bound of Higham's analysis for any order of summation. Above 1: proved wrong.
*bits*   −log2 of rms(|error| / c), c the scale on which a correct stage errs: how many bits it really computed with.
         A product of length 1,024 in TF32 stays within its bound; its 11 bits show. Taken over the whole stage, and
         over each head and position by itself, so that one wrong head or dropped token in a perfect tensor fails.

The equations are written here once more, straight from the table of equations, and share no code with `impls`; the test
of this gate is Hugging Face's float64 trace, which must be inside the bounds of float64.

Notation: A(y) sum of absolute terms, Q(y) root of the sum of squared terms, γ_n = n u / (1 − n u), i keys that a query
sees, j = G (T − column) terms that reach a key, δ = Σ p dp, r = 1/rms(x), x̂ = x r.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from harness.gates import Array, Finding, Trace, compared, letters, shape, visible
from impls.spec import STAGES, AttentionConfig

MARGIN = {"bits": 1.0, "bits of a head": 2.0, "bits of a position": 2.0}
"""Bits that a correct stage may fall short of p − ½ log2(n). Seen on 13 shapes, 2 inputs, 5 implementations: none
but a score at T = 1, 0.4 short in one head. The campaign of 880 cases holds them."""
TINY = 2.0**-126
"""float32's smallest normal number: below it, rounding is absolute."""


class Local(NamedTuple):
    """A stage as it should be: its value, the bound of a correct one's error, its scale c, and its inner length n."""

    value: Array
    bound: Array
    scale: Array
    n: float


class Factor(NamedTuple):
    """A matrix as the products, the bounds and the scales need it: w, |w| and w². Made once for many traces."""

    value: Array
    absolute: Array
    square: Array

    @property
    def T(self) -> "Factor":
        """Transposed."""
        return Factor(*(part.T for part in self))


def factor(value: Array) -> Factor:
    """A matrix and its absolute values and squares."""
    return Factor(value, np.abs(value), value**2)


def judge(
    trace: Trace,
    weights: Mapping[str, Factor],
    inputs: Mapping[str, Array],
    d_output: Array,
    config: AttentionConfig,
    unit_roundoff: float = 2.0**-24,
) -> list[Finding]:
    """Findings for every stage and gradient that the trace holds together with what it is computed from.

    Args: a trace of one dtype with this unit roundoff; what the implementation was given, in float64. A stage that the
    trace lacks (or has in another shape) cannot be certified, nor can those computed from it: see `uncertified`.
    """
    B, T = d_output.shape[:2]
    trace = {
        name: value for name, value in trace.items() if name in EQUATIONS and value.shape == shape(name, config, B, T)
    }
    stages = Stages(trace, weights, inputs, d_output, config, unit_roundoff)
    findings = []
    for name in EQUATIONS:
        if name not in uncertified(trace):
            judge_entry = _judge_weight if name in FACTORS else _judge
            findings += judge_entry(name, trace[name], stages, -math.log2(unit_roundoff))
    return findings


def uncertified(trace: Trace) -> list[str]:
    """The entries of a whole trace that this one cannot certify: missing themselves, or what they are computed from."""
    return [name for name in EQUATIONS if not ({name, *NEEDS[name]} <= trace.keys())]


def _judge_weight(name: str, value: Array, stages: "Stages", precision: float) -> list[Finding]:
    """The gradient of a projection's weight, by rows that stay in the cache: it has millions of elements."""
    left, right = FACTORS[name]
    worst, where, total = -1.0, (0, 0), 0.0
    for start in range(0, len(value), 64):
        local = stages.d_weight(left, right, slice(start, start + 64))
        error = np.abs(value[start : start + 64] - local.value)
        ratio = error / (local.bound + TINY)
        row, column = _at(ratio)
        if not ratio[row, column] <= worst:  # also NaN
            worst, where = float(ratio[row, column]), (start + row, column)
        error /= local.scale + TINY / 2**-precision
        total += float(np.vdot(error, error))
    bits = min(-math.log2(total / value.size + 2.0**-106) / 2, 53.0) if math.isfinite(total) else math.nan
    limit = precision - math.log2(local.n) / 2 - MARGIN["bits"]
    return [Finding(name, "bound", worst, 1.0, where), Finding(name, "bits", bits, limit, where)]


def _judge(name: str, value: Array, stages: "Stages", precision: float) -> list[Finding]:
    local = EQUATIONS[name](stages)
    error = np.abs(compared(name, np.asarray(value, np.float64)) - compared(name, local.value))
    ratio = error / (local.bound + TINY)
    where = _at(ratio)
    findings = [Finding(name, "bound", float(ratio[where]), 1.0, where)]
    relative = (error / (local.scale + TINY / 2**-precision)) ** 2
    counted = np.broadcast_to(visible(value.shape), value.shape) if letters(name).endswith("TS") else None
    floor = precision - math.log2(max(local.n, 1)) / 2
    parts = []
    for measure, letter in (("bits", ""), ("bits of a head", "NK"), ("bits of a position", "TS")):
        axis = [axis for axis, each in enumerate(letters(name)) if each in letter][:1]
        if letter and not axis:
            continue
        others = tuple(each for each in range(value.ndim) if each not in axis)
        mean = np.mean(relative, axis=others, where=True if counted is None else counted)
        bits = np.minimum(-np.log2(mean + 2.0**-106) / 2, 53.0)
        worst = int(np.argmin(bits))
        place = _within(relative, axis[0], worst) if axis else where
        parts.append(Finding(name, measure, float(np.ravel(bits)[worst]), floor - MARGIN[measure], place))
    whole, *parts = parts
    return [*findings, whole, *sorted(parts, key=lambda part: part.value - part.limit)[:1]]


def _at(values: Array) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(int(np.argmax(values)), values.shape)))


def _within(values: Array, axis: int, index: int) -> tuple[int, ...]:
    """Where the largest value stands whose place on `axis` is `index`."""
    place = _at(np.take(values, [index], axis=axis))
    return (*place[:axis], index, *place[axis + 1 :])


# ----------------------------------------------------------------------------------------------------------- equations


class Stages:
    """The implementation's own values in float64, [B,T,N,H] as [B,N,T,H], from which each stage is computed anew."""

    def __init__(
        self,
        trace: Trace,
        weights: Mapping[str, Factor],
        inputs: Mapping[str, Array],
        d_output: Array,
        config: AttentionConfig,
        unit_roundoff: float,
    ):
        self.trace, self.w, self.u, self.config = trace, weights, unit_roundoff, config
        self.given = {"hidden_states": inputs["hidden_states"], "d_output": d_output}
        self.cos, self.sin = inputs["cos"][:, :, None], inputs["sin"][:, :, None]
        self.B, self.T = d_output.shape[:2]
        self.D, self.H, self.G = config.hidden_size, config.head_dim, config.num_key_value_groups
        self.N, self.K = config.num_attention_heads, config.num_key_value_heads
        self.seen = np.tri(self.T, dtype=bool)
        self.i = np.arange(1, self.T + 1)[:, None]
        self.j = self.G * np.arange(self.T, 0, -1)[:, None, None]

    def __getitem__(self, name: str) -> Array:
        """An entry of the trace, or what was given, in float64."""
        value = self.given[name] if name in self.given else self.trace[name]
        return np.asarray(value, np.float64)

    def gamma(self, n: Array | float) -> Array:
        """γ_n = n u / (1 − n u)."""
        return np.asarray(n * self.u / (1 - n * self.u))

    def heads(self, name: str) -> Array:
        """[B,T,N,H] -> [B,N,T,H]; key/value heads as each query head reads them."""
        value = self[name]
        return np.repeat(value, self.N // value.shape[2], axis=2).transpose(0, 2, 1, 3)

    def rows(self, name: str) -> Array:
        """One row for each token, [B·T, …]."""
        return self[name].reshape(self.B * self.T, -1)

    def product(self, a: Array, b: Array | Factor, n: Array | float, shape: tuple[int, ...], more: float = 0) -> Local:
        """y = a b, of inner length n, with `more` roundings besides: bound γ |a| |b|, scale √(a² b²)."""
        b = b if isinstance(b, Factor) else factor(b)
        bound = self.gamma(n + more) * (np.abs(a) @ b.absolute)
        parts = (a @ b.value, bound, np.sqrt(a**2 @ b.square))
        value, bound, scale = (part.reshape(shape) for part in parts)
        return Local(value, bound, scale, float(np.max(n)))

    # 3.1, RMSNorm, RoPE, 3.5 to 3.12

    def project(self, name: str) -> Local:
        return self.product(self.rows("hidden_states"), self.w[f"{name}.weight"].T, self.D, self._per_head(name))

    def norm(self, path: str) -> Local:
        x, w = self[f"{path}_proj"], self.w[f"{path}_norm.weight"].value
        y = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.config.rms_norm_eps) * w
        return Local(y, np.abs(y) * (self.gamma(self.H) / 2 + 7.5 * self.u), np.abs(y), self.H)

    def rope(self, path: str) -> Local:
        x = self[f"{path}_norm"]
        first, second = np.split(x, 2, axis=-1)
        return self._sum(x * self.cos, np.concatenate([-second, first], axis=-1) * self.sin)

    def scores(self) -> Local:
        q, k = self.heads("q_rope"), self.heads("k_rope").swapaxes(-1, -2)
        return self.product(q / math.sqrt(self.H), k, self.H, (self.B, self.N, self.T, self.T), more=3)

    def masked_scores(self) -> Local:
        s = self["scores"]
        return Local(np.where(self.seen, s, -np.inf), np.zeros_like(s), np.abs(np.where(self.seen, s, 0)), 1)

    def probs(self) -> Local:
        s = np.where(self.seen, self["masked_scores"], -np.inf)
        m = s.max(axis=-1, keepdims=True)
        e = np.exp(s - m)
        p = e / e.sum(axis=-1, keepdims=True)
        s = np.where(self.seen, s, 0)
        theta = self.seen * (self.u * (3 * (m - s) + np.abs(s) + np.abs(m) + 8))
        bound = 1.01 * p * (theta + np.sum(p * theta, axis=-1, keepdims=True) + self.gamma(self.i + 1))
        scale = p * np.sqrt(1 + (m - s) ** 2 + s**2 + m**2)
        return Local(p, bound, scale, self.T)

    def mix(self) -> Local:
        local = self.product(self["probs"], self.heads("v_proj"), self.i + 1, (self.B, self.N, self.T, self.H))
        return self._by_token(local)

    def merge(self) -> Local:
        shape = (self.B, self.T, self.D)
        return self.product(self.rows("heads"), self.w["o_proj.weight"].T, self.N * self.H, shape)

    # backward

    def d_heads(self) -> Local:
        return self.product(self.rows("d_output"), self.w["o_proj.weight"], self.D, self._per_head("q_proj"))

    def d_probs(self) -> Local:
        v = self.heads("v_proj").swapaxes(-1, -2)
        return self.product(self.heads("d_heads"), v, self.H, (self.B, self.N, self.T, self.T))

    def d_v(self) -> Local:
        return self._grouped(self["probs"].swapaxes(-1, -2), self.heads("d_heads"), 0)

    def d_masked_scores(self) -> Local:
        p, dp = self["probs"], self["d_probs"]
        terms = p * dp
        delta = np.sum(terms, axis=-1, keepdims=True)
        total = np.sum(np.abs(terms), axis=-1, keepdims=True)
        bound = p * (self.gamma(self.i + 1) * total + 3 * self.u * (np.abs(dp) + np.abs(delta)))
        scale = p * np.sqrt(dp**2 + delta**2 + np.sum(terms**2, axis=-1, keepdims=True))
        return Local(p * (dp - delta), bound, scale, self.T)

    def d_scores(self) -> Local:
        ds = np.where(self.seen, self["d_masked_scores"], 0)
        return Local(ds, np.zeros_like(ds), np.abs(ds), 1)

    def d_q_rope(self) -> Local:
        k, shape = self.heads("k_rope") / math.sqrt(self.H), (self.B, self.N, self.T, self.H)
        return self._by_token(self.product(self["d_scores"], k, self.i, shape, more=3))

    def d_k_rope(self) -> Local:
        return self._grouped(self["d_scores"].swapaxes(-1, -2), self.heads("q_rope") / math.sqrt(self.H), 3)

    def d_norm(self, path: str) -> Local:
        d = self[f"d_{path}_rope"]
        first, second = np.split(d * self.sin, 2, axis=-1)
        return self._sum(d * self.cos, np.concatenate([second, -first], axis=-1))

    def d_proj(self, path: str) -> Local:
        x_hat, r, d = self._normalised(path)
        g = d * self.w[f"{path}_norm.weight"].value
        b = np.mean(g * x_hat, axis=-1, keepdims=True)
        rho = float(self.gamma(self.H)) / 2 + 5.5 * self.u
        total = np.mean(np.abs(g * x_hat), axis=-1, keepdims=True)
        inner = (3 * rho + 10 * self.u + self.gamma(self.H)) * np.abs(r * x_hat) * total
        bound = 1.01 * ((rho + 4 * self.u) * np.abs(r * g) + inner)
        scale = np.hypot(r * g, r * x_hat * np.sqrt(np.mean((g * x_hat) ** 2, axis=-1, keepdims=True)))
        return Local(r * (g - x_hat * b), bound, scale, self.H)

    def d_hidden_states(self) -> Local:
        n, shape = (self.N + 2 * self.K) * self.H, (self.B, self.T, self.D)
        names = ("q_proj", "k_proj", "v_proj")
        parts = [self.product(self.rows(f"d_{name}"), self.w[f"{name}.weight"], n, shape) for name in names]
        value, bound = sum(part.value for part in parts), sum(part.bound for part in parts)
        return Local(np.asarray(value), np.asarray(bound), np.sqrt(sum(part.scale**2 for part in parts)), n)

    def d_weight(self, left: str, right: str, rows: slice = slice(None)) -> Local:
        d, x = self.rows(left).T[rows], self.rows(right)
        return self.product(d, x, self.B * self.T, (len(d), x.shape[1]))

    def d_norm_weight(self, path: str) -> Local:
        x_hat, _, d = self._normalised(path)
        terms = (d * x_hat).reshape(-1, self.H)
        rho = float(self.gamma(self.H)) / 2 + 5.5 * self.u
        bound = (self.gamma(len(terms)) + rho + 3 * self.u) * np.sum(np.abs(terms), axis=0)
        return Local(np.sum(terms, axis=0), bound, np.sqrt(np.sum(terms**2, axis=0)), len(terms))

    # shapes

    def _per_head(self, name: str) -> tuple[int, ...]:
        return (self.B, self.T, self.N if name == "q_proj" else self.K, self.H)

    def _by_token(self, local: Local) -> Local:
        """[B,N,T,H] -> [B,T,N,H]."""
        value, bound, scale = (part.transpose(0, 2, 1, 3) for part in local[:3])
        return Local(value, bound, scale, local.n)

    def _grouped(self, a: Array, b: Array, more: float) -> Local:
        """Σ over the query heads of a group of a b, [B,N,S,T] [B,N,T,H] -> [B,S,K,H]."""

        def grouped(y: Array) -> Array:
            return y.reshape(self.B, self.K, self.G, self.T, self.H).sum(axis=2).transpose(0, 2, 1, 3)

        bound = self.gamma(self.j + more) * grouped(np.abs(a) @ np.abs(b))
        return Local(grouped(a @ b), bound, np.sqrt(grouped(a**2 @ b**2)), self.G * self.T)

    def _sum(self, a: Array, b: Array) -> Local:
        """a + b, two rounded products."""
        return Local(a + b, self.gamma(2) * (np.abs(a) + np.abs(b)), np.hypot(a, b), 2)

    def _normalised(self, path: str) -> tuple[Array, Array, Array]:
        """x̂, r, and the gradient at the norm's result."""
        x = self[f"{path}_proj"]
        r = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return x * r, r, self[f"d_{path}_norm"]


FACTORS: dict[str, tuple[str, str]] = {
    "d_q_proj.weight": ("d_q_proj", "hidden_states"),
    "d_k_proj.weight": ("d_k_proj", "hidden_states"),
    "d_v_proj.weight": ("d_v_proj", "hidden_states"),
    "d_o_proj.weight": ("d_output", "heads"),
}
"""A weight's gradient is the sum over tokens of an outer product: of what went back and what came in."""

EQUATIONS: dict[str, Callable[[Stages], Local]] = {
    "q_proj": lambda t: t.project("q_proj"),
    "k_proj": lambda t: t.project("k_proj"),
    "v_proj": lambda t: t.project("v_proj"),
    "q_norm": lambda t: t.norm("q"),
    "k_norm": lambda t: t.norm("k"),
    "q_rope": lambda t: t.rope("q"),
    "k_rope": lambda t: t.rope("k"),
    "scores": Stages.scores,
    "masked_scores": Stages.masked_scores,
    "probs": Stages.probs,
    "heads": Stages.mix,
    "output": Stages.merge,
    "d_heads": Stages.d_heads,
    "d_probs": Stages.d_probs,
    "d_v_proj": Stages.d_v,
    "d_masked_scores": Stages.d_masked_scores,
    "d_scores": Stages.d_scores,
    "d_q_rope": Stages.d_q_rope,
    "d_k_rope": Stages.d_k_rope,
    "d_q_norm": lambda t: t.d_norm("q"),
    "d_k_norm": lambda t: t.d_norm("k"),
    "d_q_proj": lambda t: t.d_proj("q"),
    "d_k_proj": lambda t: t.d_proj("k"),
    "d_hidden_states": Stages.d_hidden_states,
    "d_q_proj.weight": lambda t: t.d_weight(*FACTORS["d_q_proj.weight"]),
    "d_k_proj.weight": lambda t: t.d_weight(*FACTORS["d_k_proj.weight"]),
    "d_v_proj.weight": lambda t: t.d_weight(*FACTORS["d_v_proj.weight"]),
    "d_q_norm.weight": lambda t: t.d_norm_weight("q"),
    "d_k_norm.weight": lambda t: t.d_norm_weight("k"),
    "d_o_proj.weight": lambda t: t.d_weight(*FACTORS["d_o_proj.weight"]),
}
"""How each entry is computed from the entries before it, in the order of `NAMES`."""

NEEDS: dict[str, tuple[str, ...]] = {
    **{stage.name: tuple(each for each in stage.inputs if each in EQUATIONS) for stage in STAGES},
    "d_heads": (),
    "d_probs": ("d_heads", "v_proj"),
    "d_v_proj": ("d_heads", "probs"),
    "d_masked_scores": ("d_probs", "probs"),
    "d_scores": ("d_masked_scores",),
    "d_q_rope": ("d_scores", "k_rope"),
    "d_k_rope": ("d_scores", "q_rope"),
    "d_q_norm": ("d_q_rope",),
    "d_k_norm": ("d_k_rope",),
    "d_q_proj": ("d_q_norm", "q_proj"),
    "d_k_proj": ("d_k_norm", "k_proj"),
    "d_hidden_states": ("d_q_proj", "d_k_proj", "d_v_proj"),
    "d_q_proj.weight": ("d_q_proj",),
    "d_k_proj.weight": ("d_k_proj",),
    "d_v_proj.weight": ("d_v_proj",),
    "d_q_norm.weight": ("d_q_norm", "q_proj"),
    "d_k_norm.weight": ("d_k_norm", "k_proj"),
    "d_o_proj.weight": ("heads",),
}
"""The entries of the trace that each is computed from."""
