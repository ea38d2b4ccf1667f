"""Gate T, tolerance: what rounding can make of a run in its dtype, end to end, derived from the case and not guessed.

The float64 reference is run K times with zero-mean noise injected at every observed stage, forward and backward, of the
variance that rounding has there. The spread of what comes out is σ, for every element of every stage and gradient.
A correct implementation stays within a few σ; which few follows from the number of elements and from δ.

The variances follow from one model: each operation rounds by a relative error uniform in ±u, of variance h = u²/3, and
in a sum of n terms the k-th partial sum is rounded too, so that a product y = Σ a b has, with Q = Σ a² b²,

    Var(y) = h [(n/3 + 1) y² + (n/6 + 1) Q]

In bfloat16 and float16, h is float32's, and what is kept between operations is rounded besides, of variance u_o² y²/3.

Notation: i = keys that a query sees (row + 1), j = G (T − column) terms that reach a key, δ = Σ p dp, x̂ = x/rms(x).
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.gates import ROUNDING, Array, Finding, Rounding, Trace, compared, errors, seen_by, usable
from impls.spec import BIAS_GRADIENTS, BIASES, AttentionConfig, Observe

DELTA = 1e-6
"""The chance, by the model, that one tensor of a correct run has an element beyond its limit."""
TAIL = 1.75
"""Errors are products and sums of few terms: their tails fall as exp(−1.75 |e|/σ), not as a Gaussian's.
Seen: at most 0.82 of the limit that follows, in single seeds up to T = 512; never above it in the campaign."""
QUANTILES = {8: (14.24, 0.0177), 32: (5.83, 0.2202)}
"""At 1e-6, as DELTA, for σ known from 8 and from 32 samples: of Student's t with K − 1 degrees of freedom, one-sided,
for κ; of χ²_K / K from below, by which an element's own σ² may be too small. Seen with the normal distribution's 4.75
and σ² as it is, in 3,936 correct runs: two alarms, 1.01 (rms) and 1.03 (maximum) of the limit, both where K = 8."""
BYTES = 64 * 2**20
"""Memory for the samples of one chunk; long sequences are sampled in several."""

Forward = Callable[..., tuple[Array, dict]]
Backward = Callable[..., dict[str, Array]]
PARAMETER = (".weight", ".bias")
"""How the name of a gradient ends that is a sum over batch and positions."""

Part = tuple[Array, tuple[int, ...]]  # standard deviation, and the shape in which its noise is drawn (1: shared)


@dataclass(frozen=True)
class Spread:
    """The spread of one stage or gradient: σ for each element; mean and variance of the samples' mean squares."""

    sigma: Array
    mean: float
    variance: float
    samples: int = 32

    @cached_property
    def rms(self) -> float:
        """rms(σ)."""
        return math.sqrt(float(np.mean(np.square(self.sigma, dtype=np.float64))))

    @property
    def kappa(self) -> float:
        """How far a correct rms may lie above rms(σ): far where few degrees of freedom carry it (one large token).

        ν = 2 mean² / variance of the samples' mean squares. The cube root of χ²_ν / ν is nearly normal (Wilson and
        Hilferty); one more sample of what is known from K stays within t √(1 + 1/K) of its deviations.
        """
        if self.mean == 0:
            return 1.0
        spread = self.variance / (9 * self.mean**2)  # 2 / 9ν
        return (1 - spread + QUANTILES[self.samples][0] * math.sqrt(spread * (1 + 1 / self.samples))) ** 1.5

    @property
    def lam(self) -> float:
        """λ, how many σ the largest of N errors may be: tails of exp(−1.75 |e|/σ), where half of an element's σ² is its
        row's, and its own half (see `_smooth`) may be too small by chance."""
        return math.log(self.sigma.size / DELTA) / TAIL / math.sqrt((1 + QUANTILES[self.samples][1]) / 2)

    def __add__(self, other: "Spread") -> "Spread":
        """The spread of the sum of two independent errors."""
        sigma = np.hypot(self.sigma, other.sigma)
        samples = min(self.samples, other.samples)
        return Spread(sigma, self.mean + other.mean, self.variance + other.variance, samples)


@dataclass(frozen=True)
class Tolerance:
    """The spread of every stage and gradient of a case, for one way of rounding.

    `recomputed` is what a fused kernel adds to the gradients by computing the probabilities anew for its backward;
    `clean`, the page's own stages and gradients: all of it is trusted only if they are the layer's.
    """

    spreads: dict[str, Spread]
    recomputed: dict[str, Spread]
    clean: dict[str, Array]
    rounding: Rounding
    samples: int
    seed: int
    seen: Array | None = None  # see `gates.seen_by`

    def spread(self, name: str, fused: bool = False) -> Spread:
        """The spread of one entry, of a fused kernel or not."""
        return self.spreads[name] + self.recomputed[name] if fused and name in self.recomputed else self.spreads[name]

    def limits(self, name: str, rounded: bool, fused: bool = False) -> tuple[float, float]:
        """Limits of rms(error) and of max |error|/σ; an error between two rounded results has twice the variance."""
        spread = self.spread(name, fused)
        rms = spread.kappa * spread.rms
        return (math.sqrt(2) * rms, 2 * spread.lam) if rounded else (rms, spread.lam)


# ------------------------------------------------------------------------------------------------------------- judging


def judge(
    trace: Trace,
    other: Trace,
    tolerance: Tolerance,
    expected: Collection[str],
    rounded: bool,
    fused: bool = False,
    dtype: str | None = None,
) -> list[Finding]:
    """Two findings for each stage and gradient: rms(error) and max |error|/σ, each against its derived limit.

    Args: `other` is the float64 truth, or (with `rounded`) the Hugging Face layer or another implementation in the same
    dtype as `trace`; `fused` where one of the two recomputes the probabilities for its backward; `dtype` that the trace
    must have. Entries that only one of them has are an error only where they are `expected`.
    """
    names, findings = usable(trace, other, expected, dtype, tolerance.seen)
    for name in names:
        sigma = tolerance.spread(name, fused).sigma
        rms, ratio, where = errors(name, trace[name], other[name], sigma, tolerance.seen)
        rms_limit, max_limit = tolerance.limits(name, rounded, fused)
        findings.append(Finding(name, "rms", rms, rms_limit, where))
        findings.append(Finding(name, "max/sigma", ratio, max_limit, where))
    return findings


# ------------------------------------------------------------------------------------------------------------ sampling


def sample(
    forward: Forward,
    backward: Backward,
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    d_output: Array,
    config: AttentionConfig,
    rounding: Rounding = ROUNDING["float32"],
    seed: int = 0,
    fused: bool = False,
) -> Tolerance:
    """Run the reference K times in float64 with rounding noise and measure the spread of every stage and gradient.

    Args: the reference's two functions, unpatched; a case's arrays in float64; `fused` to know also what a fused kernel
    adds. K = 32, or 8 where B·T ≥ 128 (each row of a tensor is then a sample too) and for that addition.
    """
    rng = np.random.default_rng(seed)
    clean: dict[str, Array] = {}
    cache = forward(weights, inputs, config, _recording(clean))[1]
    backward(d_output, cache, _recording(clean))
    clean |= weight_gradients(clean, inputs["hidden_states"], d_output, config)
    noise = Noise(clean, weights, inputs, d_output, config, rounding)
    B, T = d_output.shape[:2]
    samples = 32 if B * T < 128 else 8
    size = max(1, BYTES // (4 * 8 * sum(value.size for name, value in clean.items() if not name.endswith(PARAMETER))))

    tally = _Tally(clean, noise, samples)
    for count in _chunks(samples, size):
        seen: dict[str, Array] = {}
        observe = _injecting(noise, count, rng, clean, seen)
        tables = {name: _tile(value, count) for name, value in inputs.items() if name != "hidden_states"}
        noisy = forward(weights, {**inputs, **tables}, config, observe)[1]
        with contextlib.suppress(_Enough):
            backward(d_output, noisy, observe)
        tally.add(seen)

    recomputed = _Tally(clean, noise, 8)
    stages = {name: value for name, value in clean.items() if not name.endswith(PARAMETER)}
    for count in _chunks(8 * fused, size):
        seen = {name: np.broadcast_to(value, (count, *value.shape)) for name, value in stages.items()}
        noisy = {name: _tile(value, count) if isinstance(value, np.ndarray) else value for name, value in cache.items()}
        noisy["a"] = noise.add("recomputed probs", noisy["a"], count, rng)
        with contextlib.suppress(_Enough):
            backward(_tile(d_output, count), noisy, _recomputing(noise, count, rng, seen))
        recomputed.add(seen)
    spreads, more = tally.spreads(), recomputed.spreads(local=False) if fused else {}
    return Tolerance(spreads, more, stages, rounding, samples, seed, noise.given)


def _injecting(noise: "Noise", count: int, rng: np.random.Generator, clean: Trace, seen: dict[str, Array]) -> Observe:
    """An `observe` that adds a fresh draw of noise to `count` samples of each value, and keeps them, [count, …]."""

    def observe(name: str, value: Array) -> Array:
        if len(value) < count * len(clean[name]):  # what depends on no sample was computed once
            value = _tile(value, count)
        return _recording(seen, count)(name, noise.add(name, value, count, rng))

    return observe


def _recomputing(noise: "Noise", count: int, rng: np.random.Generator, seen: dict[str, Array]) -> Observe:
    """An `observe` of a backward that adds what a fused kernel's differs by."""
    return lambda name, value: _recording(seen, count)(name, noise.add(f"recomputed {name}", value, count, rng))


def _recording(seen: dict[str, Array], count: int | None = None) -> Observe:
    """An `observe` that keeps every value as it is; those of samples as [count, …], up to the last of one each."""

    def observe(name: str, value: Array) -> Array:
        seen[name] = value if count is None else value.reshape(count, -1, *value.shape[1:])
        if count is not None and name == "d_hidden_states":
            raise _Enough  # the weights' gradients would be summed over all samples; the tally forms each one's own
        return value

    return observe


def spread(name: str, deviations: Array) -> Spread:
    """The spread of a stage from K deviations from its clean value, [K, …], float64."""
    flat = deviations.reshape(len(deviations), -1)
    means = np.mean(flat**2, axis=1)
    variance = np.mean(deviations**2, axis=0)
    sigma = np.sqrt(_smooth(name, variance, np.ones((1, 1), bool))).astype(np.float32)
    return Spread(sigma, float(np.mean(means)), float(np.var(means, ddof=1)), len(deviations))


def weight_gradients(clean: Trace, x: Array, d_output: Array, config: AttentionConfig) -> dict[str, Array]:
    """The weights' gradients from the stages' own, so that an error of the page in them widens no tolerance."""
    rows = {
        name: value.reshape(x.shape[0] * x.shape[1], -1)
        for name, value in {**clean, "x": x, "d_o_proj": d_output}.items()
        if value.ndim > 2
    }
    gradients = {f"d_{name}.weight": rows[f"d_{name}"].T @ rows["x"] for name in ("q_proj", "k_proj", "v_proj")}
    gradients["d_o_proj.weight"] = rows["d_o_proj"].T @ rows["heads"]
    if config.attention_bias:
        gradients |= {name: rows[name.removesuffix(".bias")].sum(axis=0) for name in BIAS_GRADIENTS}
    for path in ("q", "k"):
        y = clean[f"{path}_proj"]
        x_hat = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + config.rms_norm_eps)
        gradients[f"d_{path}_norm.weight"] = np.sum(clean[f"d_{path}_norm"] * x_hat, axis=(0, 1, 2))
    return gradients


class _Enough(Exception):
    """Ends a backward whose remaining gradients are not wanted."""


def _tile(value: Array, count: int) -> Array:
    """[B, …] -> [count·B, …], the samples as one larger batch."""
    return np.tile(value, (count,) + (1,) * (value.ndim - 1))


def _chunks(total: int, size: int) -> Iterator[int]:
    while total > 0:
        yield min(size, total)
        total -= size


class _Tally:
    """Gathers the samples' deviations from the clean run: Σ e² for each element, and each sample's mean square."""

    def __init__(self, clean: dict[str, Array], noise: "Noise", samples: int):
        self.clean, self.noise, self.samples = clean, noise, samples
        self.keep = noise.d_output.shape[0] * noise.d_output.shape[1] <= 4 * samples
        self.square: dict[str, Array] = {}
        self.means: dict[str, list[float]] = {name: [] for name in clean}
        self.kept: dict[str, list[Array]] = {name: [] for name in noise.weight_factors}

    def add(self, seen: dict[str, Array]) -> None:
        """A chunk of samples, each entry [count, …]."""
        for name, values in seen.items():
            exact = compared(name, self.clean[name], self.noise.given)
            self._add(name, compared(name, values, self.noise.given) - exact)
        for path in ("q", "k"):
            x = seen[f"{path}_proj"]
            x_hat = x * self.noise.inverse_rms(x)
            total = np.sum(seen[f"d_{path}_norm"] * x_hat, axis=(1, 2, 3))
            self._add(f"d_{path}_norm.weight", total - self.clean[f"d_{path}_norm.weight"])
        for name in self.noise.biases:
            d_y = seen.get(name.removesuffix(".bias"), self.noise.d_output + np.zeros((len(seen["output"]), 1, 1, 1)))
            self._add(name, np.sum(d_y, axis=(1, 2)).reshape(len(d_y), -1) - self.clean[name])
        for name, (left, right, noisy) in self.noise.weight_factors.items():
            rows = seen[noisy].reshape(len(seen[noisy]), len(left), -1)
            if self.keep:
                self.kept[name].append(rows - (left if noisy != "heads" else right))
                continue
            for row in rows:
                error = (row - left).T @ right if noisy != "heads" else left.T @ (row - right)
                self._add(name, error[None])

    def _add(self, name: str, errors: Array) -> None:
        flat = errors.reshape(len(errors), -1)
        square = np.einsum("ke,ke->e", flat, flat).reshape(self.clean[name].shape)
        if name in self.square:
            self.square[name] += square
        else:
            self.square[name] = square
        self.means[name] += (np.einsum("ke,ke->k", flat, flat) / flat.shape[1]).tolist()

    def spreads(self, local: bool = True) -> dict[str, Spread]:
        """σ² = the samples' mean square, smoothed half by its row's mean; `local` adds what the last sum rounds."""
        return {name: self._spread(name, local) for name in self.clean}

    def _spread(self, name: str, local: bool) -> Spread:
        """By rows that stay in the cache: the gradients of weights have millions of elements."""
        variances, means = self._covariance(name) if self.kept.get(name) else self._mean_square(name)
        own = self.noise.own_variance(name) if local else None
        sigma, mean, more = np.empty(self.clean[name].shape, np.float32), float(np.mean(means)), 0.0
        blocks = [slice(at, at + 64) for at in range(0, len(sigma), 64)] if name in self.kept else [slice(None)]
        for rows in blocks:
            variance = variances(rows)
            if own is not None:  # independent from element to element
                added = own(rows)
                variance = variance + added
                mean += float(np.sum(added)) / sigma.size
                more += 2 * float(np.sum(added**2)) / sigma.size**2
            sigma[rows] = np.sqrt(_smooth(name, variance, self.noise.seen))
        spread = float(np.var(means)) * len(means) / (len(means) - 1)
        return Spread(sigma, mean, spread + more, self.samples)

    def _mean_square(self, name: str) -> tuple[Callable[[slice], Array], Array]:
        """The samples' mean square, by rows, and each sample's."""
        return lambda rows: self.square[name][rows] / self.samples, np.array(self.means[name])

    def _covariance(self, name: str) -> tuple[Callable[[slice], Array], Array]:
        """The samples' variance of a weight's gradient without forming any: Var_ab = Σ_tt' X_ta X_t'a C_b[tt'].

        C_b is the samples' covariance over tokens of the noisy factor's column b. And the samples' mean squares.
        """
        left, right, noisy = self.noise.weight_factors[name]
        exact = left if noisy == "heads" else right
        errors = np.concatenate(self.kept[name])  # [K, BT, columns]
        tokens = len(exact)
        covariance = np.einsum("ktb,kub->tub", errors, errors, optimize=True) / len(errors)
        pairs = exact[:, None, :] * exact[None, :, :]
        factors = [x.reshape(tokens**2, -1) for x in ((pairs, covariance) if noisy == "heads" else (covariance, pairs))]
        gram = exact @ exact.T
        means = np.einsum("ktb,tu,kub->k", errors, gram, errors, optimize=True) / self.clean[name].size
        return (lambda rows: factors[0][:, rows].T @ factors[1]), means


def _smooth(name: str, variance: Array, seen: Array) -> Array:
    """½ σ² + ½ its row's mean, over the visible keys where the future is exactly 0 or −∞ (it is not in `scores`)."""
    if name in ("masked_scores", "probs", "d_masked_scores", "d_scores"):
        mean = np.sum(variance * seen, axis=-1, keepdims=True) / np.maximum(seen.sum(axis=-1, keepdims=True), 1)
        return np.where(seen, (variance + mean) / 2, variance)
    return (variance + np.mean(variance, axis=-1, keepdims=True)) / 2


# ----------------------------------------------------------------------------------------------- the noise of rounding


class Noise:
    """The rounding noise of every stage and gradient, from the clean float64 values around it.

    A stage's noise is a sum of parts: a standard deviation for each element, times normal numbers of a shape in which
    an axis of 1 is shared (all of a head's elements move together when their rms was rounded).
    """

    def __init__(
        self,
        clean: Mapping[str, Array],
        weights: Mapping[str, Array],
        inputs: Mapping[str, Array],
        d_output: Array | None,
        config: AttentionConfig,
        rounding: Rounding,
        asked: Array | slice = slice(None),
    ):
        """Without `d_output`, of the forward alone; `asked` are the positions of its queries, [R] of the T keys'."""
        self.h, self.rounding = rounding.unit**2 / 3, rounding
        self.t, self.w, self.config = clean, weights, config
        self.x = inputs["hidden_states"]
        self.asked = {name: inputs[name][:, asked] for name in ("hidden_states", "cos", "sin")}
        self.biases = BIAS_GRADIENTS if config.attention_bias else {}
        self.inputs, self.cos, self.sin = inputs, inputs["cos"][:, :, None], inputs["sin"][:, :, None]
        self.T = self.x.shape[1]
        self.given = seen_by(inputs)
        self.i = np.arange(1, self.T + 1)[asked, None]  # [T, 1]: keys that a query sees
        self.seen = np.arange(self.T) < self.i if self.given is None else self.given
        self.j = config.num_key_value_groups * np.arange(self.T, 0, -1)[:, None, None]  # [S, 1, 1]: terms of a key
        self.parts: dict[str, list[Part]] = {}
        self.stored: dict[str, Array] = {}
        self.equal_rows = False
        if d_output is None:
            self._forward()
            return
        self.d_output = d_output
        self.weight_factors = self._weight_factors()
        self.weight_variance = {
            name: self._weight_variance(name)
            for name in clean
            if name.endswith(PARAMETER) and name not in self.weight_factors
        }
        self._forward()
        self._backward()
        self._recomputed()
        if rounding.stored:
            self._keep_short()
        rows, self.distinct = np.unique(self.x.reshape(-1, self.x.shape[-1]), axis=0, return_inverse=True)
        self.equal_rows = len(rows) < len(self.distinct)

    def add(self, name: str, value: Array, count: int, rng: np.random.Generator) -> Array:
        """The value [count·B, …] with a fresh draw of its noise for each of the count samples."""
        noisy = value
        for deviation, shape in self.parts.get(name, []):
            z = self._draw(name, (count, *shape), rng)
            noise = deviation * z
            if name == "probs":  # noise before the normaliser: what all share, it takes out again
                noise -= self.t["probs"] * np.sum(noise, axis=-1, keepdims=True)
            noisy = noisy + noise.reshape(-1, *noise.shape[2:])
        if name == "probs":
            for deviation, shape in self.parts["probs normalised"]:
                noise = deviation * self._draw(name, (count, *shape), rng)
                noisy = noisy + noise.reshape(-1, *noise.shape[2:])
        if name in self.stored:
            noise = self.stored[name] * self._draw(name, (count, *self.stored[name].shape), rng)
            noisy = noisy + noise.reshape(-1, *noise.shape[2:])
        return noisy

    def _draw(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Normal numbers; for projections and norms once per distinct row of the input: equal rows round equally."""
        if self.equal_rows and name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"):
            z = rng.standard_normal((shape[0], int(self.distinct.max()) + 1, *shape[3:]), dtype=np.float32)
            return z[:, self.distinct.reshape(-1)].reshape(shape)
        return rng.standard_normal(shape, dtype=np.float32)

    def product(self, y: Array, Q: Array, n: Array | float) -> Array:
        """P(y, Q; n), see `product`."""
        return product(self.rounding, y, Q, n)

    def _affine(self, name: str, x: Array, n: int) -> Array:
        """Of a projection x W^T + b: a product of one term more, where there is a bias."""
        weight = "o_proj" if name == "output" else name
        Q = _squares(x, self.w[f"{weight}.weight"])
        if self.biases:
            Q, n = Q + self.w[f"{weight}.bias"] ** 2, n + 1
        return self.product(self.t[name], Q.reshape(self.t[name].shape), n)

    def inverse_rms(self, x: Array) -> Array:
        """1/rms over the last axis, keeping it."""
        return 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.config.rms_norm_eps)

    def _set(self, name: str, *variances: Array) -> None:
        """Independent noise in every element."""
        deviation = np.sqrt(np.sum(variances, axis=0))
        self.parts[name] = [(deviation, deviation.shape)]

    def _forward(self) -> None:
        t, h, D, H = self.t, self.h, self.config.hidden_size, self.config.head_dim
        for name in ("q_proj", "k_proj", "v_proj"):
            self._set(name, self._affine(name, self.asked["hidden_states"] if name == "q_proj" else self.x, D))
        for path in ("q", "k"):
            y, row = t[f"{path}_norm"], (*t[f"{path}_norm"].shape[:3], 1)
            self.parts[f"{path}_norm"] = [
                (np.sqrt((H / 12 + 2.75) * h) * np.abs(y), row),
                (np.sqrt(2 * h) * np.abs(y), y.shape),
            ]
            tables = self.asked if path == "q" else self.inputs
            cos, sin = (tables[each][:, :, None] for each in ("cos", "sin"))
            self._set(f"{path}_rope", self._rotation(y * cos, sin * _rotate(y)))

        s, p, o = t["scores"], t["probs"], t["heads"]
        qk = _by_head(t["q_rope"]) ** 2 @ self._shared("k_rope").swapaxes(-1, -2) ** 2 / H
        self.var_scores = self.product(s, qk, H) + 3 * h * s**2
        self._set("scores", self.var_scores)
        m = self._largest(s)
        exp = np.sqrt(h * (2 * (m - s) ** 2 + 6.75))
        self.parts["probs"] = [(p * exp, p.shape)]
        self.parts["probs normalised"] = [
            (p * np.sqrt(h * ((self.i + 1) / 3 + 1)), (*p.shape[:-1], 1)),
            (p * np.sqrt(h), p.shape),
        ]
        pv = _by_head(p**2 @ self._shared("v_proj") ** 2)
        self.var_heads = self.product(o, pv, self.i[:, :, None])
        self._set("heads", self.var_heads)
        if "output" in t:
            self._set("output", self._affine("output", o.reshape(*o.shape[:2], -1), H * o.shape[2]))

    def _backward(self) -> None:
        t, w, h, H, D = self.t, self.w, self.h, self.config.head_dim, self.config.hidden_size
        N, K = self.config.num_attention_heads, self.config.num_key_value_heads
        p, o, d_o, dp, ds = t["probs"], t["heads"], t["d_heads"], t["d_probs"], t["d_masked_scores"]
        i, j = self.i, self.j
        self._set(
            "d_heads",
            self.product(d_o, (self.d_output**2 @ w["o_proj.weight"] ** 2).reshape(d_o.shape), D),
        )
        var_dp = self.product(dp, _by_head(d_o) ** 2 @ self._shared("v_proj").swapaxes(-1, -2) ** 2, H)
        self._set("d_probs", var_dp)
        pd = self._summed(p.swapaxes(-1, -2) ** 2 @ _by_head(d_o) ** 2)
        self._set("d_v_proj", self.product(t["d_v_proj"], pd, j))

        terms = p * dp
        delta, terms2 = np.sum(terms, axis=-1, keepdims=True), np.sum(terms**2, axis=-1, keepdims=True)
        do2, do_var = (np.sum(_by_head(x), axis=-1, keepdims=True) for x in ((d_o * o) ** 2, d_o**2 * self.var_heads))
        var_delta = np.sum(p**2 * var_dp, axis=-1, keepdims=True) + do_var
        var_delta = var_delta + h * ((H / 3 + 1) * delta**2 + (H / 6 + 1) * do2)
        row = np.sqrt(h * ((i / 3 + 1) * delta**2 + (i / 6 + 2) * terms2) + var_delta)
        element = np.sqrt(h * (2 * terms**2 + 2 * p**2 * delta**2 + ds**2))
        self.parts["d_masked_scores"] = [(p * row, row.shape), (element, p.shape)]

        y = {path: t[f"d_{path}_rope"] for path in ("q", "k")}
        q2 = _by_head(ds**2 @ self._shared("k_rope") ** 2) / H
        k2 = self._summed(ds.swapaxes(-1, -2) ** 2 @ _by_head(t["q_rope"]) ** 2) / H
        self._set("d_q_rope", self.product(y["q"], q2, i[:, :, None]), 3 * h * y["q"] ** 2)
        self._set("d_k_rope", self.product(y["k"], k2, j), 3 * h * y["k"] ** 2)
        for path in ("q", "k"):
            d = y[path]
            self._set(f"d_{path}_norm", self._rotation(d * self.cos, _rotate(d * self.sin)))
            self._rms_norm_backward(path)
        Q = sum(
            t[f"d_{name}"].reshape(*self.x.shape[:2], -1) ** 2 @ w[f"{name}.weight"] ** 2
            for name in ("q_proj", "k_proj", "v_proj")
        )
        self._set("d_hidden_states", self.product(t["d_hidden_states"], np.asarray(Q), (N + 2 * K) * H))

    def _rms_norm_backward(self, path: str) -> None:
        """d_x = r (g − x̂ b), b = mean(g x̂): noise of r, shared, of b, shared, and of each element."""
        h, H, x = self.h, self.config.head_dim, self.t[f"{path}_proj"]
        r = self.inverse_rms(x)
        x_hat, g = x * r, self.t[f"d_{path}_norm"] * self.w[f"{path}_norm.weight"]
        b = np.mean(g * x_hat, axis=-1, keepdims=True)
        t1, t2, y = r * g, r * x_hat * b, self.t[f"d_{path}_proj"]
        s = np.sqrt(h * ((H / 3 + 1) * b**2 + (H / 6 + 3) * np.sum((g * x_hat / H) ** 2, axis=-1, keepdims=True)))
        self.parts[f"d_{path}_proj"] = [
            (np.sqrt((H / 12 + 2.75) * h) * (t1 - 3 * t2), b.shape),
            (r * x_hat * s, b.shape),
            (np.sqrt(h * (3 * t1**2 + 4 * t2**2 + y**2)), y.shape),
        ]

    def _rotation(self, kept: Array, turned: Array) -> Array:
        """RoPE's variance, of x cos and rot(x) sin, or transposed of x cos and rot^T(x sin)."""
        return 2 * self.h * (0.7 * (np.abs(kept) + np.abs(turned))) ** 2

    def _recomputed(self) -> None:
        """A fused kernel recomputes p = exp(s − lse) before its backward, and takes δ = Σ dO O from what it stored."""
        t, h = self.t, self.h
        s, seen = t["scores"], self.seen
        m = self._largest(s)
        lse = m + np.log(np.maximum(np.sum(np.exp(np.where(seen, s - m, -np.inf)), axis=-1, keepdims=True), 1))
        p, own = t["probs"], np.sqrt(2 * self.var_scores + h * (s**2 + 6.75))
        self.parts["recomputed probs"] = [
            (p * own, s.shape),
            (p * np.sqrt(h) * np.abs(lse), lse.shape),
        ]  # lse is shared
        dp, stored2 = t["d_probs"], self.rounding.stored**2 / 3 * _by_head(t["d_heads"] * t["heads"]) ** 2
        delta = np.sum(stored2, axis=-1, keepdims=True)  # of O as it was kept, and of the p that made it
        errs = p * (dp - np.sum(p * dp, axis=-1, keepdims=True))
        errs = errs * np.sqrt(self.var_scores + h * (2 * (m - np.where(seen, s, m)) ** 2 + 6.75))
        delta = delta + np.sum(errs**2, axis=-1, keepdims=True)
        self.parts["recomputed d_masked_scores"] = [(p * np.sqrt(delta), delta.shape)]

    def _keep_short(self) -> None:
        """What keeping values in a shorter dtype adds: each rounding's variance, as the layer's code rounds."""
        t, w, H = self.t, self.w, self.config.head_dim
        shorter, least = self.rounding.stored**2 / 3, self.rounding.least**2 / 3

        def kept(name: str, *squares: Array, small: Array | float = 0.0) -> None:
            """Rounded itself, and on the way in parts, whose squares are given; `small` as in gate L, squared."""
            variance = shorter * np.sum([t[name] ** 2, *squares], axis=0) + least * (1 + small)
            if name in self.weight_variance:
                self.weight_variance[name] = self.weight_variance[name] + variance
            else:
                self.stored[name] = np.sqrt(variance)

        for name in ("probs", "heads", "d_heads", "d_probs", "d_masked_scores", *self.biases):
            kept(name)
        for name, bias in zip(("q_proj", "k_proj", "v_proj", "output"), BIASES, strict=True):
            product = [(t[name] - w[bias].reshape(t[name].shape[2:])) ** 2] if self.biases else []
            kept(name, *product, small=len(product))
        kept("scores", 2 * t["scores"] ** 2, small=1)
        p2, ds2 = t["probs"] ** 2, t["d_masked_scores"] ** 2
        d_o2, q2, k2 = _by_head(t["d_heads"]) ** 2, _by_head(t["q_rope"]) ** 2 / H, self._shared("k_rope") ** 2 / H
        kept("d_v_proj", self._summed(p2.swapaxes(-1, -2) @ d_o2))
        kept("d_q_rope", _by_head(ds2 @ k2), small=H * _by_head(np.sum(k2, axis=-2, keepdims=True)))
        small = H * self._summed(np.broadcast_to(np.sum(q2, axis=-2, keepdims=True), q2.shape))
        kept("d_k_rope", 2 * self._summed(ds2.swapaxes(-1, -2) @ q2), small=small)
        hidden2 = np.zeros_like(self.x)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = t[f"d_{name}"].reshape(*self.x.shape[:2], -1)
            hidden2 += 2 * (rows @ w[f"{name}.weight"]) ** 2
        kept("d_hidden_states", hidden2, small=4)
        for path in ("q", "k"):
            x, y, d = (t[name] for name in (f"{path}_proj", f"{path}_norm", f"d_{path}_rope"))
            weight = w[f"{path}_norm.weight"]
            kept(f"{path}_norm", y**2, small=weight**2)
            kept(f"{path}_rope", (y * self.cos) ** 2, (self.sin * _rotate(y)) ** 2, small=2)
            kept(f"d_{path}_norm", (d * self.cos) ** 2, _rotate(d * self.sin) ** 2, small=2)
            r = self.inverse_rms(x)
            x_hat, d = x * r, t[f"d_{path}_norm"]
            inner = np.sum((weight * d * x_hat / H) ** 2, axis=-1, keepdims=True)
            kept(f"d_{path}_proj", (r * weight * d) ** 2, (r * x_hat) ** 2 * inner, small=r**2)
            terms = d * x_hat
            kept(f"d_{path}_norm.weight", 2 * np.sum(terms**2, (0, 1, 2)), small=np.sum(1 + d**2, (0, 1, 2)))

    def _weight_factors(self) -> dict[str, tuple[Array, Array, str]]:
        """A weight's gradient is left^T right, [BT, out] and [BT, in]; and which of the two is noisy."""
        t, rows = self.t, self.x.shape[0] * self.x.shape[1]
        x = self.x.reshape(rows, -1)
        factors = {
            f"d_{name}.weight": (t[f"d_{name}"].reshape(rows, -1), x, f"d_{name}")
            for name in ("q_proj", "k_proj", "v_proj")
        }
        return factors | {"d_o_proj.weight": (self.d_output.reshape(rows, -1), t["heads"].reshape(rows, -1), "heads")}

    def own_variance(self, name: str) -> Callable[[slice], Array] | None:
        """What the sum over batch and positions adds of its own to rows of a parameter's gradient; None of others."""
        if name in self.weight_variance:
            return lambda rows: self.weight_variance[name][rows]
        if name not in self.weight_factors:
            return None
        left, right, _ = self.weight_factors[name]
        right2, shorter, least = right**2, self.rounding.stored**2 / 3, self.rounding.least**2 / 3

        def own(rows: slice) -> Array:
            y = self.t[name][rows]
            variance = self.product(y, left[:, rows].T ** 2 @ right2, len(left))
            return variance + shorter * y**2 + least if shorter else variance

        return own

    def _weight_variance(self, name: str) -> Array:
        """What the sums over batch and positions add of their own, of norms' weights and of biases."""
        y = self.t[name]
        if name in self.biases:
            d_y, n = self.t.get(name.removesuffix(".bias"), self.d_output), self.d_output.shape[0] * self.T
            return self.h * ((n / 3 + 1) * y**2 + n / 6 * np.sum(d_y**2, axis=(0, 1)).ravel())
        path = name[2]
        x = self.t[f"{path}_proj"]
        terms2 = np.sum((self.t[f"d_{path}_norm"] * x * self.inverse_rms(x)) ** 2, axis=(0, 1, 2))
        n, H = x.shape[0] * x.shape[1] * x.shape[2], self.config.head_dim
        return self.h * ((n / 3 + 1) * y**2 + (n / 6 + 3 + H / 12 + 2.75) * terms2)

    def _largest(self, scores: Array) -> Array:
        """The largest score that each query sees, keeping the axis; 0 for one that sees none."""
        m = np.max(np.where(self.seen, scores, -np.inf), axis=-1, keepdims=True)
        return np.where(np.isfinite(m), m, 0)

    def _shared(self, name: str) -> Array:
        """A key/value stage as every query head reads it, [B, N, S, H]."""
        return _by_head(np.repeat(self.t[name], self.config.num_key_value_groups, axis=2))

    def _summed(self, x_BNSH: Array) -> Array:
        """Summed over the query heads that share a key/value head, [B, S, K, H]."""
        B, N, S, H = x_BNSH.shape
        G = self.config.num_key_value_groups
        return _by_head(x_BNSH.reshape(B, N // G, G, S, H).sum(axis=2))


def product(rounding: Rounding, y: Array, Q: Array, n: Array | float) -> Array:
    """P(y, Q; n) = h [(n/3 + 1) y² + (n/6 + 1) Q], the variance of a product y of inner length n; Q = Σ a² b²."""
    return rounding.unit**2 / 3 * ((n / 3 + 1) * y**2 + (n / 6 + 1) * Q)


def _squares(x: Array, w: Array, tokens: int = 1024) -> Array:
    """x² (w²)^T, [B, T, D] and [O, D] -> [B, T, O], in float64, so many tokens at a time."""
    blocks = (x[:, start : start + tokens].astype(np.float64) for start in range(0, x.shape[1], tokens))
    return np.concatenate([block**2 @ w.T**2 for block in blocks], axis=1)


def _by_head(x: Array) -> Array:
    """[B, T, N, H] <-> [B, N, T, H]."""
    return x.transpose(0, 2, 1, 3)


def _rotate(x: Array) -> Array:
    """|rot(x)|: the halves exchanged; signs play no part in a variance."""
    return np.roll(x, x.shape[-1] // 2, axis=-1)
