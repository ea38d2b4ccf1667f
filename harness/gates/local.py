"""Gate L, the local certificate: each stage recomputed in float64 from the implementation's own inputs to it.

What an implementation got wrong before does not count against a stage, so errors do not accumulate: a stage that fails
is the cause and not a victim. It needs no reference run and works on a trace from anywhere. Two figures for each stage:

*bound*  max of |error| / bound, the bound of Higham's analysis for any order of summation. Above 1: proved wrong.
*bits*   −log2 of rms(|error| / c), c the scale on which a correct stage errs: how many bits it really computed with.
         A product of length 1,024 in TF32 stays within its bound; its 11 bits show. Taken over the whole stage, and
         over each head and position by itself, so that one wrong head or dropped token in a perfect tensor fails.

The equations are written here once more, straight from the table of equations, and share no code with `impls`; the test
of this gate is Hugging Face's float64 trace, which must be inside the bounds of float64.

In bfloat16 and float16 a stage is computed in float32 and rounded where it is kept: by u_o of what was rounded, or, in
float16, by 2^(−25) where that is too small. What was rounded on the way counts with all that it is multiplied by.

Notation: A(y) sum of absolute terms, Q(y) root of the sum of squared terms, γ_n = n u / (1 − n u), i keys that a query
sees, j = G (T − column) terms that reach a key, δ = Σ p dp, r = 1/rms(x), x̂ = x r.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.gates import NAMES, ROUNDING, Array, Finding, Rounding, Trace, compared, letters, seen_by, shape, visible
from impls.spec import STAGES, AttentionConfig

MARGIN = {"bits": 1.0, "bits of a head": 2.0, "bits of a position": 2.0}
"""Bits that a correct stage may fall short of p − ½ log2(n). Seen in 1,426 runs of the campaign: 0.1 at most over a
stage (the gradient of a norm's weight, in float32); artifacts/evidence/campaign.txt has them all."""
TINY = 2.0**-126
"""float32's smallest normal number: below it, rounding is absolute."""


LARGEST_TILE = 2**19
"""Scores of a head that are held at once, 4 MiB of each of some ten arrays."""


class Local(NamedTuple):
    """A stage as it should be: its value, the bound of a correct one's error, its scale c, and its inner length n.

    A shorter dtype adds u_o |stored| to the bound, by default one rounding of the value; `small` times what is too
    small to be kept is added in any: 2^(−126) or, in float16, 2^(−25).
    """

    value: Array
    bound: Array
    scale: Array
    n: float
    stored: Array | None = None
    small: Array | float = 1.0

    def rearranged(self, change: Callable[[Array], Array]) -> "Local":
        """With every array in another shape or order."""
        small = change(self.small) if isinstance(self.small, np.ndarray) else self.small
        stored = None if self.stored is None else change(self.stored)
        return Local(change(self.value), change(self.bound), change(self.scale), self.n, stored, small)

    def allowed(self, rounding: Rounding) -> tuple[Array, Array | float]:
        """The bound with what the dtype adds, and below which size a result has no relative accuracy."""
        small = self.small * max(rounding.least, TINY) + TINY
        if not rounding.stored:
            return self.bound + small, small / rounding.unit
        stored = np.abs(self.value) if self.stored is None else self.stored
        # 1 − 5 u_o: no value here is rounded more than five times on its way, or the errors of errors would count
        return self.bound + rounding.stored / (1 - 5 * rounding.stored) * stored + small, small / rounding.stored


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
    rounding: Rounding = ROUNDING["float32"],
    names: Collection[str] | None = None,
) -> list[Finding]:
    """Findings for every stage and gradient that the trace holds together with what it is computed from.

    Args: a trace of one dtype, which rounds so; what the implementation was given, in float64; `names`, which to judge
    if not all. A stage that the trace lacks (or has in another shape) cannot be certified, nor can those computed from
    it: see `uncertified`.
    """
    B, T = d_output.shape[:2]
    seen = seen_by(inputs)
    trace = {
        name: value if name == "masked_scores" else compared(name, value, seen)
        for name, value in trace.items()
        if name in EQUATIONS and value.shape == shape(name, config, B, T)
    }
    stages = Stages(trace, weights, inputs, d_output, config, rounding)
    findings = []
    for name in EQUATIONS if names is None else names:
        if name not in uncertified(trace, EQUATIONS):
            judge_entry = _judge_weight if name in FACTORS else _judge
            findings += judge_entry(name, trace[name], stages)
    return findings


def beyond(truth: Trace, dtype: str, seen: Array | None = None) -> list[str]:
    """The entries of the truth that are too large for a dtype, themselves or on the way, with those computed from them.

    Seen: float16 ends at 65,504, and the backward of a norm divides by the rms of a token of magnitude 1e-4. A norm
    weight's gradient of 25,087 was a sum of one term of 88,515 and others: infinite in PyTorch.
    """
    if dtype != "float16":
        return []
    large: list[str] = []
    for name in EQUATIONS:
        if name in truth and (
            not set(large).isdisjoint(NEEDS[name])
            or _largest(name, truth, seen) > 0.9 * float(np.finfo(np.float16).max)
        ):
            large.append(name)
    return large


def _largest(name: str, truth: Trace, seen: Array | None) -> float:
    """The largest number on the way to an entry: of scores, q·k before the scale; of a norm's weight, d x̂ ≤ d √H."""
    root = math.sqrt(truth["v_proj"].shape[-1]) if "v_proj" in truth else 1.0
    term = name.removesuffix(".weight")
    if not name.endswith("_norm.weight") or term not in truth:
        term = name
    factor = root if name == "scores" or term != name else 1.0
    return factor * float(np.max(np.abs(compared(term, truth[term], seen))))


def uncertified(trace: Trace, entries: Iterable[str] = NAMES) -> list[str]:
    """The entries of a whole trace that this one cannot certify: missing themselves, or what they are computed from."""
    return [name for name in entries if not ({name, *needs(name, trace)} <= trace.keys())]


def needs(name: str, trace: Trace) -> tuple[str, ...]:
    """What an entry is computed from, in this trace: the heads of a fused kernel from queries, keys and values."""
    return ("q_rope", "k_rope", "v_proj") if name == "heads" and "probs" not in trace else NEEDS[name]


def _judge_weight(name: str, value: Array, stages: "Stages") -> list[Finding]:
    """The gradient of a projection's weight, by rows that stay in the cache: it has millions of elements."""
    left, right = stages.factors(name)
    worst, where, total = -1.0, (0, 0), 0.0
    for start in range(0, len(value), 64):
        local = stages.d_weight(left[start : start + 64], right)
        error = np.abs(np.asarray(value[start : start + 64], np.float64) - local.value)
        bound, floor = local.allowed(stages.rounding)
        ratio = error / bound
        row, column = _at(ratio)
        if not ratio[row, column] <= worst:  # also NaN
            worst, where = float(ratio[row, column]), (start + row, column)
        error /= local.scale + floor
        total += float(np.vdot(error, error))
    bits = min(-math.log2(total / value.size + 2.0**-106) / 2, 53.0) if math.isfinite(total) else math.nan
    limit = stages.rounding.bits - math.log2(local.n) / 2 - MARGIN["bits"]
    return [Finding(name, "bound", worst, 1.0, where), Finding(name, "bits", bits, limit, where)]


def _judge(name: str, value: Array, stages: "Stages") -> list[Finding]:
    return measured(name, value, EQUATIONS[name](stages), stages.rounding, stages.seen)


def measured(name: str, value: Array, local: Local, rounding: Rounding, seen: Array | None = None) -> list[Finding]:
    """A stage's value against what it should be: its bound; its bits; the fewest of a head or a position."""
    own, due = (compared(name, np.asarray(each, np.float64), seen) for each in (value, local.value))
    error = np.abs(own - due)
    bound, near = local.allowed(rounding)
    ratio = error / bound
    where = _at(ratio)
    findings = [Finding(name, "bound", float(ratio[where]), 1.0, where)]
    relative = (error / (local.scale + near)) ** 2
    counted = _counted(name, value.shape, seen)
    floor = rounding.bits - math.log2(max(local.n, 1)) / 2
    parts = []
    for measure, letter in (("bits", ""), ("bits of a head", "NK"), ("bits of a position", "TS")):
        axis = [axis for axis, each in enumerate(letters(name)) if each in letter][:1]
        if letter and not axis:
            continue
        others = tuple(each for each in range(value.ndim) if each not in axis)
        mean = np.sum(relative, axis=others, where=counted) / np.maximum(np.sum(counted, axis=others), 1)
        bits = np.minimum(-np.log2(mean + 2.0**-106) / 2, 53.0)
        worst = int(np.argmin(bits))
        place = _within(relative, axis[0], worst) if axis else where
        parts.append(Finding(name, measure, float(np.ravel(bits)[worst]), floor - MARGIN[measure], place))
    whole, *parts = parts
    return [*findings, whole, *sorted(parts, key=lambda part: part.value - part.limit)[:1]]


def added_up(terms: Array) -> Array:
    """The scale c of sums over the first axis, one term after the other: √Σ t², or more where terms have one sign.

    Each of the n partial sums S_k is rounded, so that the error is √Σ S_k² u/√3, and c √n u stands for it. Seen with
    √Σ t² alone: 0.04 bits too few, in a bias's gradient of 512 tokens.
    """
    return np.sqrt(np.maximum(np.sum(terms**2, axis=0), np.mean(np.cumsum(terms, axis=0) ** 2, axis=0)))


def _counted(name: str, shape: tuple[int, ...], seen: Array | None) -> Array:
    """Which elements of a stage count for its bits: scores of keys that are seen, answers of queries that see."""
    if seen is None or not (letters(name).endswith("TS") or name in ("heads", "output")):
        return np.broadcast_to(True, shape)
    if letters(name).endswith("TS"):
        return np.broadcast_to(seen, shape)
    answered = np.any(seen, axis=-1, keepdims=True)  # [B or 1,1,T,1]
    return np.broadcast_to(answered[:, 0] if name == "output" else answered.swapaxes(1, 2), shape)


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
        rounding: Rounding,
    ):
        self.trace, self.w, self.rounding, self.config = trace, weights, rounding, config
        self.u = rounding.unit
        self.given = {"hidden_states": inputs["hidden_states"], "d_output": d_output}
        self.cos, self.sin = inputs["cos"][:, :, None], inputs["sin"][:, :, None]
        self.B, self.T = d_output.shape[:2]
        self.D, self.H, self.G = config.hidden_size, config.head_dim, config.num_key_value_groups
        self.N, self.K = config.num_attention_heads, config.num_key_value_heads
        given = seen_by(inputs)
        self.seen = visible((self.T, self.T))[None, None] if given is None else given  # [B or 1,1,T,S]
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
        return by_head(np.repeat(value, self.N // value.shape[2], axis=2))

    def rows(self, name: str) -> Array:
        """One row for each token, [B·T, …]."""
        return self[name].reshape(self.B * self.T, -1)

    def product(self, a: Array, b: Array | Factor, n: Array | float, more: float = 0, first: float = 0) -> Local:
        """y = a b, of inner length n, with `more` roundings besides: bound γ |a| |b|, scale √(a² b²).

        With `first`, a shorter dtype rounds a times this factor before it is multiplied, and the factor.
        """
        b = b if isinstance(b, Factor) else factor(b)
        terms, value = np.abs(a) @ b.absolute, a @ b.value
        bound = self.gamma(n + more) * terms + self.flushed(np.abs(a), b.absolute)
        local = Local(value, bound, np.sqrt(a**2 @ b.square), float(np.max(n)))
        if not first:
            return local
        small = 1 + np.sum(b.absolute, axis=-2, keepdims=True) / first + np.zeros_like(terms)
        return local._replace(stored=np.abs(value) + 2 * terms, small=small)

    def flushed(self, a: Array, b: Array) -> Array | float:
        """Σ |a| |b| over operands below the normal numbers of float16, of which XLA takes some as 0, on a CPU."""
        smallest = self.rounding.least * 2**11
        return np.where(a < smallest, a, 0) @ b + a @ np.where(b < smallest, b, 0) if smallest else 0.0

    def affine(self, x: Array, name: str) -> Local:
        """y = x W^T + b, where there is a bias, which may be added before the product is rounded to a shorter dtype."""
        w, n = self.w[f"{name}.weight"].T, x.shape[-1]
        if not self.config.attention_bias:
            return self.product(x, w, n)
        b, local = self.w[f"{name}.bias"].value, self.product(x, w, n, more=1)
        value, bound, scale = local.value + b, local.bound + self.gamma(n + 1) * np.abs(b), np.hypot(local.scale, b)
        return Local(value, bound, scale, n, np.abs(value) + np.abs(local.value), 2)

    # 3.1, RMSNorm, RoPE, 3.5 to 3.12

    def project(self, name: str) -> Local:
        return self._per_head(name, self.affine(self.rows("hidden_states"), name))

    def norm(self, path: str) -> Local:
        x, w = self[f"{path}_proj"], self.w[f"{path}_norm.weight"].value
        y = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.config.rms_norm_eps) * w
        size = np.abs(y)
        return Local(y, size * (self.gamma(self.H) / 2 + 7.5 * self.u), size, self.H, 2 * size, 1 + np.abs(w))

    def rope(self, path: str) -> Local:
        x = self[f"{path}_norm"]
        first, second = np.split(x, 2, axis=-1)
        return self._sum(x * self.cos, np.concatenate([-second, first], axis=-1) * self.sin)

    def scores(self) -> Local:
        q, k = self.heads("q_rope"), self.heads("k_rope").swapaxes(-1, -2)
        local = self.product(q / math.sqrt(self.H), k, self.H, more=3)
        return local._replace(stored=3 * np.abs(local.value), small=2)  # product, scale, and 1/√H where it is stored

    def masked_scores(self) -> Local:
        s = self["scores"]
        return self._copy(np.where(self.seen, s, -np.inf), np.abs(np.where(self.seen, s, 0)))

    def probs(self) -> Local:
        s = np.where(self.seen, self["masked_scores"], -np.inf)
        m = np.maximum(s.max(axis=-1, keepdims=True), np.finfo(np.float64).min)  # of a query that sees nothing, too
        e = np.exp(s - m)
        p = e / np.maximum(e.sum(axis=-1, keepdims=True), 1)
        s, m = np.where(self.seen, s, 0), np.where(self.seen.any(axis=-1, keepdims=True), m, 0)
        theta = self.seen * (self.u * (3 * (m - s) + np.abs(s) + np.abs(m) + 8))
        bound = 1.01 * p * (theta + np.sum(p * theta, axis=-1, keepdims=True) + self.gamma(self.i + 1))
        scale = p * np.sqrt(1 + (m - s) ** 2 + s**2 + m**2)
        return Local(p, bound, scale, self.T)

    def mix(self) -> Local:
        if "probs" not in self.trace:
            q, k, v = (self.heads(name) for name in ("q_rope", "k_rope", "v_proj"))
            return attended(q, k, v, self.seen, self.rounding).rearranged(by_head)
        return self.product(self["probs"], self.heads("v_proj"), self.i + 1).rearranged(by_head)

    def merge(self) -> Local:
        return self._tokens(self.affine(self.rows("heads"), "o_proj"))

    # backward

    def d_heads(self) -> Local:
        return self._per_head("q_proj", self.product(self.rows("d_output"), self.w["o_proj.weight"], self.D))

    def d_probs(self) -> Local:
        v = self.heads("v_proj").swapaxes(-1, -2)
        return self.product(self.heads("d_heads"), v, self.H)

    def d_v(self) -> Local:
        return self._grouped(self["probs"].swapaxes(-1, -2), self.heads("d_heads"))

    def d_masked_scores(self) -> Local:
        p, dp = self["probs"], self["d_probs"]
        terms = p * dp
        delta = np.sum(terms, axis=-1, keepdims=True)
        total = np.sum(np.abs(terms), axis=-1, keepdims=True)
        # 6u: an automatic derivative of e / Σe rounds so often besides. Seen with 3u: 1.04 of the bound, in PyTorch,
        # on the campaign's peaked softmax at T = 128
        bound = p * (self.gamma(self.i + 1) * total + 6 * self.u * (np.abs(dp) + np.abs(delta)))
        scale = p * np.sqrt(dp**2 + delta**2 + np.sum(terms**2, axis=-1, keepdims=True))
        value = p * (dp - delta)
        # p and dp may be taken as they were before they were rounded: the layer keeps its p, XLA excess precision
        stored = np.abs(value) + p * (2 * np.abs(dp) + np.abs(delta) + 2 * total)
        small = 1 + np.abs(dp) + np.abs(delta) + p * np.sum(np.abs(dp) * self.seen, axis=-1, keepdims=True)
        return Local(value, bound, scale, self.T, stored, small)

    def d_scores(self) -> Local:
        ds = np.where(self.seen, self["d_masked_scores"], 0)
        return self._copy(ds, np.abs(ds))

    def d_q_rope(self) -> Local:
        k = self.heads("k_rope") / math.sqrt(self.H)
        return self.product(self["d_scores"], k, self.i, more=3, first=self.H**-0.5).rearranged(by_head)

    def d_k_rope(self) -> Local:
        q = self.heads("q_rope") / math.sqrt(self.H)
        return self._grouped(self["d_scores"].swapaxes(-1, -2), q, more=3, first=self.H**-0.5)

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
        value = r * (g - x_hat * b)
        stored = np.abs(value) + np.abs(r * g) + np.abs(r * x_hat) * total  # g is rounded, too
        small = 1 + r + np.abs(r * x_hat) * np.mean(np.abs(x_hat), axis=-1, keepdims=True)
        return Local(value, bound, scale, self.H, stored, small)

    def d_hidden_states(self) -> Local:
        n, names = (self.N + 2 * self.K) * self.H, ("q_proj", "k_proj", "v_proj")
        parts = [self.product(self.rows(f"d_{name}"), self.w[f"{name}.weight"], n) for name in names]
        value, bound = np.sum([part.value for part in parts], axis=0), np.sum([part.bound for part in parts], axis=0)
        scale = np.sqrt(np.sum([part.scale**2 for part in parts], axis=0))
        stored = 3 * np.sum(np.abs([part.value for part in parts]), axis=0)  # each part, and two sums of them
        return self._tokens(Local(value, bound, scale, n, stored, 5))

    def factors(self, name: str) -> tuple[Array, Factor]:
        """What the gradient of a projection's weight is the product of: [out, B·T], [B·T, in]."""
        left, right = FACTORS[name]
        return self.rows(left).T, factor(self.rows(right))

    def d_weight(self, left: Array, right: Factor) -> Local:
        local = self.product(left, right, self.B * self.T)
        # XLA may compute a factor once more for this product, and round an entry of it the other way than the one that
        # is shown: one term is then off by 2 u_o. Seen without this: 1.1 of the bound, in 12 of 12,288 elements
        return local._replace(stored=np.abs(local.value) + 2 * local.scale)

    def d_bias(self, name: str) -> Local:
        rows = self.rows(name)
        total = np.sum(np.abs(rows), axis=0)
        value, scale = np.sum(rows, axis=0), added_up(rows)
        # the terms may be taken as they were before they were rounded: XLA's excess precision
        return Local(value, self.gamma(len(rows)) * total, scale, len(rows), np.abs(value) + total, 1 + len(rows))

    def d_norm_weight(self, path: str) -> Local:
        x_hat, _, d = self._normalised(path)
        terms = (d * x_hat).reshape(-1, self.H)
        rho = float(self.gamma(self.H)) / 2 + 5.5 * self.u
        bound = (self.gamma(len(terms)) + rho + 3 * self.u) * np.sum(np.abs(terms), axis=0)
        value, scale = np.sum(terms, axis=0), added_up(terms)
        stored = np.abs(value) + 2 * np.sum(np.abs(terms), axis=0)  # x̂ is rounded, and each term
        small = 1 + len(terms) + np.sum(np.abs(d), axis=(0, 1, 2))
        return Local(value, bound, scale, len(terms), stored, small)

    # shapes

    def _per_head(self, name: str, rows: Local) -> Local:
        """[B·T, N·H] -> [B,T,N,H]."""
        heads = self.N if name == "q_proj" else self.K
        return rows.rearranged(lambda y: y.reshape(self.B, self.T, heads, self.H))

    def _tokens(self, rows: Local) -> Local:
        """[B·T, D] -> [B,T,D]."""
        return rows.rearranged(lambda y: y.reshape(self.B, self.T, self.D))

    def _copy(self, value: Array, size: Array) -> Local:
        """Nothing is computed, so nothing is rounded."""
        nothing = np.zeros_like(size)
        return Local(value, nothing, size, 1, nothing, 0)

    def _grouped(self, a: Array, b: Array, more: float = 0, first: float = 0) -> Local:
        """Σ over the query heads of a group of a b, [B,N,S,T] [B,N,T,H] -> [B,S,K,H]; `first` as in `product`."""

        def grouped(y: Array) -> Array:
            return y.reshape(self.B, self.K, self.G, self.T, self.H).sum(axis=2).transpose(0, 2, 1, 3)

        terms, product = grouped(np.abs(a) @ np.abs(b)), a @ b
        lost = grouped(np.zeros_like(product) + self.flushed(np.abs(a), np.abs(b)))
        stored = (self.G + 1) * grouped(np.abs(product))  # each head's product, and G sums of them
        small: Array | float = 2 * self.G
        if first:
            stored += 2 * terms
            small = small + grouped(np.broadcast_to(np.abs(b).sum(axis=-2, keepdims=True), b.shape)) / first
        scale = np.sqrt(grouped(a**2 @ b**2))
        bound = self.gamma(self.j + more) * terms + lost
        return Local(grouped(product), bound, scale, self.G * self.T, stored, small)

    def _sum(self, a: Array, b: Array) -> Local:
        """a + b, two rounded products."""
        size = np.abs(a) + np.abs(b)
        return Local(a + b, self.gamma(2) * size, np.hypot(a, b), 2, size + np.abs(a + b), 3)

    def _normalised(self, path: str) -> tuple[Array, Array, Array]:
        """x̂, r, and the gradient at the norm's result."""
        x = self[f"{path}_proj"]
        r = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return x * r, r, self[f"d_{path}_norm"]


def attended(q: Array, k: Array, v: Array, seen: Array, rounding: Rounding) -> Local:
    """3.5 to 3.11 in one, of a fused kernel that shows nothing between: what its scores and exponentials err by reaches
    the heads as p |v| of it, and its sums are corrected from tile to tile, two roundings each.

    Args: [B,N,T,H], [B,N or 1,S,H] twice, [B or 1,1,T,S]; so many queries at a time that few scores are held.
    """
    size = max(1, LARGEST_TILE // k.shape[-2])
    pieces = [slice(start, start + size) for start in range(0, q.shape[2], size)]
    return joined([_attended(q[:, :, each], k, v, seen[:, :, each], rounding) for each in pieces], axis=2)


def joined(pieces: Sequence[Local], axis: int) -> Local:
    """One stage of several parts of it."""

    def whole(parts: tuple[Any, ...]) -> Any:
        return np.concatenate(parts, axis=axis) if isinstance(parts[0], np.ndarray) else parts[0]

    return Local._make(map(whole, zip(*pieces, strict=True)))


def _attended(q: Array, k: Array, v: Array, seen: Array, rounding: Rounding) -> Local:
    u, H = rounding.unit, q.shape[-1]
    s = np.where(seen, q @ k.swapaxes(-1, -2) / math.sqrt(H), -np.inf)
    m = np.maximum(s.max(axis=-1, keepdims=True), np.finfo(np.float64).min)
    p = np.exp(s - m)
    total = np.maximum(p.sum(axis=-1, keepdims=True), 1)
    p /= total
    m = np.where(seen.any(axis=-1, keepdims=True), m, 0)
    s = np.where(seen, s, m)
    s_error = (H + 3) * u * (np.abs(q) @ np.abs(k).swapaxes(-1, -2)) / math.sqrt(H)
    theta = seen * (s_error + u * (3 * (m - s) + np.abs(s) + np.abs(m) + 8))
    i = np.sum(seen, axis=-1, keepdims=True)
    size = p @ np.abs(v)
    bound = 1.01 * ((p * theta) @ np.abs(v) + (np.sum(p * theta, axis=-1, keepdims=True) + 2 * (i + 2) * u) * size)
    spread = p**2 * (1 + (m - s) ** 2 + s**2 + m**2)
    value, small = p @ v, 1 + (seen + 0 * p) @ np.abs(v)  # a shorter dtype keeps p, too
    return Local(value, bound, np.sqrt(spread @ v**2), k.shape[-2], np.abs(value) + size, small)


class Tile(NamedTuple):
    """Probabilities or d_scores [..., R, C] as a fused kernel computes them anew: what they should be, the bound of
    their error, and the square of the scale on which a correct kernel errs."""

    value: Array
    bound: Array
    square: Array

    def times(self, y: Array, n: Array | float, rounding: Rounding) -> Local:
        """x y of inner length n, with what x errs by: [..., R, C] [..., C, H]."""
        gamma = n * rounding.unit / (1 - n * rounding.unit)
        bound = (self.bound + gamma * np.abs(self.value)) @ np.abs(y)
        return Local(self.value @ y, bound, np.sqrt(self.square @ y**2), float(np.max(n)))

    def by_key(self) -> "Tile":
        """[B,G,T,C] -> [B,C,G·T]: all queries of a group that see a key, in one row."""
        B, G, T, C = self.value.shape
        return Tile(*(part.transpose(0, 3, 1, 2).reshape(B, C, G * T) for part in self))


def attended_backward(group: Trace, at: Array, rounding: Rounding) -> dict[str, Local]:
    """d_q_rope, d_k_rope and d_v_proj of a fused kernel at the positions `at` [R], [B,R,G or 1,H]: 3.11 to 3.5 undone.

    It kept its heads o and L = ln Σ exp(s) of its forward, and in its backward computes anew

        p = exp(s − L),   d_s = p (dp − δ) / √d_k,   dp = d_o v^T,   δ = Σ d_o o

    Args: of one group of a causal layer its own q_rope, heads and d_heads [B,T,G,H], k_rope and v_proj [B,T,1,H], whole
    and in float64. A query's gradient comes from all keys up to it, a key's from all queries from it on.
    Seen, in float32, of four kernels in 32 cases of 1 to 513 tokens, half of them with peaked softmaxes: at most 0.06
    of the bound, at least 1.1 bits above the limit; at 8,192 tokens 0.01 and 6.1.
    """
    q, k, v, o, d_o = (by_head(group[name]) for name in ("q_rope", "k_rope", "v_proj", "heads", "d_heads"))
    B, G, T, H = q.shape
    lse, lse_error = log_sum_exp(q, k, rounding)
    position, q_of_keys, d_o_of_keys = np.arange(T), q.reshape(B, G * T, H), d_o.reshape(B, G * T, H)
    queries = q[:, :, at], k, v, o[:, :, at], d_o[:, :, at], lse[:, :, at], lse_error[:, :, at]
    keys = q, k[:, :, at], v[:, :, at], o, d_o, lse, lse_error
    _, d_s = recomputed(*queries, position <= at[:, None], rounding)
    p_of_keys, d_s_of_keys = recomputed(*keys, at <= position[:, None], rounding)
    i, j = at[:, None] + 1, G * (T - at[:, None])
    return {
        "d_v_proj": p_of_keys.by_key().times(d_o_of_keys, j, rounding).rearranged(lambda y: y[:, :, None]),
        "d_q_rope": d_s.times(k, i + 3, rounding).rearranged(by_head),
        "d_k_rope": d_s_of_keys.by_key().times(q_of_keys, j + 3, rounding).rearranged(lambda y: y[:, :, None]),
    }


def log_sum_exp(q: Array, k: Array, rounding: Rounding) -> tuple[Array, Array]:
    """L of every query [B,N,T,1] of a causal layer, and the bound of a kernel's error of it: Σ p θ, as in `attended`.

    In that, Σ p (m − s) ≤ ln i and |m| ≤ |L| + ln i; and no |q| |k| is larger than the longest key's.
    """
    (T, H), u = q.shape[-2:], rounding.unit
    size, pieces = max(1, LARGEST_TILE // T), []
    for start in range(0, T, size):
        rows = np.arange(start, min(start + size, T))[:, None]
        s = q[:, :, start : start + size] @ k[:, :, : rows[-1, 0] + 1].swapaxes(-1, -2) / math.sqrt(H)
        s = np.where(np.arange(s.shape[-1]) <= rows, s, -np.inf)
        m = s.max(axis=-1, keepdims=True)
        pieces.append(m + np.log(np.exp(s - m).sum(axis=-1, keepdims=True)))
    lse, i = np.concatenate(pieces, axis=2), np.arange(1, T + 1)[:, None]
    longest = np.linalg.norm(k, axis=-1, keepdims=True).max(axis=2, keepdims=True)
    s_error = (H + 3) * u * np.linalg.norm(q, axis=-1, keepdims=True) * longest / math.sqrt(H)
    return lse, s_error + u * (6 * np.log(i) + 3 * np.abs(lse) + 8 + 2 * (i + 2))


def recomputed(
    q: Array, k: Array, v: Array, o: Array, d_o: Array, lse: Array, lse_error: Array, seen: Array, rounding: Rounding
) -> tuple[Tile, Tile]:
    """p and d_s of `attended_backward` between some queries [B,N,R,·] and some keys [B,N or 1,C,H] that they see."""
    u, H = rounding.unit, q.shape[-1]
    k_T, v_T = k.swapaxes(-1, -2), v.swapaxes(-1, -2)
    s = np.where(seen, q @ k_T / math.sqrt(H), lse)
    p = seen * np.exp(s - lse)
    s_error = (H + 3) * u * (np.abs(q) @ np.abs(k_T)) / math.sqrt(H)
    error = s_error + u * (3 * np.abs(lse - s) + np.abs(s) + np.abs(lse) + 8) + lse_error
    spread = 1 + (lse - s) ** 2 + s**2 + lse**2
    dp, terms = d_o @ v_T, d_o * o
    delta = terms.sum(axis=-1, keepdims=True)
    dp_error = H * u * (np.abs(d_o) @ np.abs(v_T) + np.abs(terms).sum(axis=-1, keepdims=True))
    dp_square = dp**2 + delta**2 + d_o**2 @ v_T**2 + (terms**2).sum(axis=-1, keepdims=True)
    difference = dp - delta
    bound = 1.01 * p * (error * np.abs(difference) + dp_error + 6 * u * (np.abs(dp) + np.abs(delta)))
    square = p**2 * (difference**2 * spread + dp_square)
    d_s = Tile(p * difference / math.sqrt(H), bound / math.sqrt(H), square / H)
    return Tile(p, 1.01 * p * error, p**2 * spread), d_s


def by_head(x: Array) -> Array:
    """[B,T,N,H] <-> [B,N,T,H]."""
    return x.transpose(0, 2, 1, 3)


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
    "d_q_proj.weight": lambda t: t.d_weight(*t.factors("d_q_proj.weight")),
    "d_k_proj.weight": lambda t: t.d_weight(*t.factors("d_k_proj.weight")),
    "d_v_proj.weight": lambda t: t.d_weight(*t.factors("d_v_proj.weight")),
    "d_q_norm.weight": lambda t: t.d_norm_weight("q"),
    "d_k_norm.weight": lambda t: t.d_norm_weight("k"),
    "d_o_proj.weight": lambda t: t.d_weight(*t.factors("d_o_proj.weight")),
    "d_q_proj.bias": lambda t: t.d_bias("d_q_proj"),
    "d_k_proj.bias": lambda t: t.d_bias("d_k_proj"),
    "d_v_proj.bias": lambda t: t.d_bias("d_v_proj"),
    "d_o_proj.bias": lambda t: t.d_bias("d_output"),
}
"""How each entry is computed from the entries before it, in their order."""

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
    "d_q_proj.bias": ("d_q_proj",),
    "d_k_proj.bias": ("d_k_proj",),
    "d_v_proj.bias": ("d_v_proj",),
    "d_o_proj.bias": (),
}
"""The entries of the trace that each is computed from."""
