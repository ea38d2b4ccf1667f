"""A layer at the length of the model's context, where nobody can hold its scores: judged by rows.

One output, of Hugging Face's own layer in float64 under sdpa, is the truth for every position. It is computed one group
of heads after the other, and is itself held to what both can compute: to the eager layer on the first `PREFIX` tokens,
whose output no later token changes (3.10), and to the explicit equations at the sampled positions `rows`. There, gates
L and T look at every stage; everywhere else, at the output.

A sampled token is decoded, as with a cache, against all keys up to it: its row of scores is all that it takes.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harness.case import BadInput, Case
from harness.files import mapped
from harness.gates import ROUNDING, Array, Finding, Trace, errors, local, probes, structure, tolerance
from harness.judging import EXACT, LAYER, OWN, TRUTH, Comparison, Judged, Judging, Key, NotChecked
from harness.runners import PROBES, REFERENCES, Setting, fetch
from impls import numpy_attention as page
from impls.spec import AttentionConfig, Observe

LONGEST_SQUARE = 2**27
"""Scores, of all heads and sequences: 1 GiB in float64. A run whose scores are more is judged by rows."""
ROWS, PREFIX, SAMPLES = 64, 256, 8
CAN = ("numpy-tiled", "jax-tiled", "torch-sdpa", "hf-sdpa")
"""The implementations that hold no score matrix."""
WHOLE = ("k_rope", "v_proj", "output")
"""What is kept of every token; of the others, what is at the sampled positions."""
FORWARD = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_rope", "k_rope", "heads", "output")


def is_long(case: Case) -> bool:
    """Whether the scores of an input are too many to be judged one by one."""
    B, T, _ = case.inputs["chapter"]["hidden_states"].shape
    return B * case.config.num_attention_heads * T**2 > LONGEST_SQUARE


def rows(seq_len: int) -> Array:
    """The sampled positions, in order: the first and the last, half of them in equal ratios, half at random."""
    ratios = np.geomspace(1, seq_len, ROWS // 2).astype(int) - 1
    return np.unique([*ratios, *np.random.default_rng(seq_len).integers(0, seq_len, ROWS // 2)])


def check(case: Case, names: Sequence[str], dtype: str | None, own: bool) -> None:
    """Raises BadInput where this length cannot be judged as it was asked for."""
    _, T, _ = case.inputs["chapter"]["hidden_states"].shape
    if own:
        raise BadInput(f"--seq-len {T}: --candidate and --trace are judged up to {_longest(case.config)} tokens")
    if dtype not in (None, "float32"):
        raise BadInput(f"--dtype {dtype}: at --seq-len {T} a run is judged in float32, against float64; leave it out")
    if "attention_mask" in case.inputs["chapter"]:
        raise BadInput(f"--left-pad: a padded batch is judged up to {_longest(case.config)} tokens")
    for name in names:
        if name not in CAN:
            size = f"{case.config.num_attention_heads * T**2 * 4 / 1e9:.0f} GB"
            raise BadInput(f"--impl {name}: it holds {size} of scores at --seq-len {T}; these do not: {' '.join(CAN)}")


def _longest(config: AttentionConfig) -> int:
    return math.isqrt(LONGEST_SQUARE // config.num_attention_heads)


def shortened(case: Case) -> Case:
    """The case with its input `chapter` alone."""
    kept = {"chapter", "weights"}
    return replace(
        case,
        inputs={"chapter": case.inputs["chapter"]},
        made={"chapter": case.made["chapter"]},
        sha256={name: value for name, value in case.sha256.items() if name in kept},
        paths={name: value for name, value in case.paths.items() if name in kept},
    )


# --------------------------------------------------------------------------------------------- in the worker's process


def runner(name: str, device: str, at: Sequence[int]) -> Callable[..., dict[str, Array]]:
    """A `run` of the forward alone that keeps `WHOLE` of every token, and "rows.<stage>" of those at positions `at`."""
    chosen = np.asarray(at)
    give_memory_back()

    def picked(name: str, value: Any) -> dict[str, Any]:
        kept = {f"rows.{name}": value[:, chosen]} if name in FORWARD else {}
        return kept | ({name: value} if name in WHOLE else {})

    def run(weights: Trace, inputs: Trace, d_output: Array, config: AttentionConfig) -> dict[str, Array]:
        return {"numpy": _numpy, "jax": _jax, "torch": _torch, "hf": _hugging_face}[name.split("-")[0]](
            weights, inputs, config, device, picked
        )

    return run


def give_memory_back() -> None:
    """Have glibc return what is freed, which `runners.environment` has it keep: short runs are faster so."""
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: what is larger is mapped by itself
        libc.mallopt(-1, 2**27)  # M_TRIM_THRESHOLD


Pick = Callable[[str, Any], dict[str, Any]]


def _numpy(weights: Trace, inputs: Trace, config: AttentionConfig, device: str, pick: Pick) -> dict[str, Array]:
    from impls import numpy_tiled

    trace: dict[str, Array] = {}

    def observe(name: str, value: Array) -> Array:
        trace.update(pick(name, value))
        return value

    numpy_tiled.forward(weights, inputs, config, observe)
    return trace


def _jax(weights: Trace, inputs: Trace, config: AttentionConfig, device: str, pick: Pick) -> dict[str, Array]:
    import jax

    from impls import jax_attention, jax_tiled

    @jax.jit
    def forward(weights: Any, x: Any, cos: Any, sin: Any) -> dict[str, Any]:
        trace: dict[str, Any] = {}

        def observe(name: str, value: Any) -> Any:
            trace.update(pick(name, value))
            return value

        jax_attention.attention(weights, config, jax_tiled.Attention)(x, cos, sin, None, observe)
        return trace

    given = dict(weights), inputs["hidden_states"], inputs["cos"], inputs["sin"]
    return {name: np.asarray(value) for name, value in forward(*jax.device_put(given, jax.devices(device)[0])).items()}


def _torch(weights: Trace, inputs: Trace, config: AttentionConfig, device: str, pick: Pick) -> dict[str, Array]:
    import torch

    from impls.torch_attention import array, attention, tensor
    from impls.torch_sdpa import Attention

    trace: dict[str, Array] = {}

    def observe(name: str, value: Any) -> Any:
        trace.update({key: array(each) for key, each in pick(name, value).items()})
        return value

    layer = attention(weights, config, device, Attention)
    with torch.no_grad():
        layer(*(tensor(inputs[name], device) for name in ("hidden_states", "cos", "sin")), None, observe)
    return trace


def _hugging_face(weights: Trace, inputs: Trace, config: AttentionConfig, device: str, pick: Pick) -> dict[str, Array]:
    """Hugging Face's layer under sdpa, without a mask as the model calls it; in float64, the truth: see the module."""
    from harness import reference

    if inputs["hidden_states"].dtype != np.float64:
        return reference.forward(weights, inputs, config, pick, device)
    trace: dict[str, Array] = {}
    for own, group in groups(weights, config):
        for name, value in reference.forward(own, inputs, group, pick, device).items():
            if name in ("k_rope", "v_proj"):  # the truth is asked for its outputs
                continue
            if name not in trace:
                trace[name] = value
            elif name.endswith("output"):
                trace[name] += value
            else:
                trace[name] = np.concatenate([trace[name], value], axis=2)
    prefix = {name: value[:, :PREFIX] for name, value in inputs.items()}
    trace["prefix"] = reference.run(weights, prefix, np.zeros_like(prefix["hidden_states"]), config)["output"]
    return trace


def groups(weights: Mapping[str, Array], config: AttentionConfig) -> Iterator[tuple[dict[str, Array], AttentionConfig]]:
    """The layer cut into its key/value heads, each with the query heads that read it; their outputs add up (3.12)."""
    G, H = config.num_key_value_groups, config.head_dim
    for k in range(config.num_key_value_heads):
        q_rows, k_rows = slice(k * G * H, (k + 1) * G * H), slice(k * H, (k + 1) * H)
        cut = {"q_proj": q_rows, "k_proj": k_rows, "v_proj": k_rows}
        own = {name: value[cut.get(name.partition(".")[0], slice(None))] for name, value in weights.items()}
        own["o_proj.weight"] = np.ascontiguousarray(weights["o_proj.weight"][:, q_rows])
        if "o_proj.bias" in own and k:  # which is added once
            own["o_proj.bias"] = np.zeros_like(own["o_proj.bias"])
        yield own, replace(config, num_attention_heads=G, num_key_value_heads=1)


# ---------------------------------------------------------------------------------------------------------- the judges


class RowJudging(Judging):
    """The comparisons of a long case: with the layer in float64 and in float32, and gates L and P."""

    def __init__(self, case: Case, names: Sequence[str], settings: Sequence[Setting], *rest: Any):
        _, T, _ = case.inputs["chapter"]["hidden_states"].shape
        self.at, self.names = rows(T), names
        self.rows = self.at.tolist()
        super().__init__(case, names, settings, *rest)

    def comparisons(self, names: Sequence[str], settings: Sequence[Setting]) -> Iterator[Comparison]:
        """Of every implementation, and of the truth itself, which is held to what is explicit."""
        for setting in settings:
            yield Comparison(LAYER, TRUTH, setting._replace(dtype="float64"))
            for name in names:
                yield from (Comparison(name, against, setting) for against in (OWN, TRUTH, LAYER))
        yield from (Comparison(name, EXACT, probe) for probe in PROBES for name in names if name not in REFERENCES)

    def land(self, name: str, setting: Setting, files: Mapping[str, str]) -> None:
        """A trace has been written. Hugging Face's layer in float32 is "hf-sdpa" here."""
        super().land(name, setting, files)
        if name == LAYER and setting.dtype == "float32":
            super().land("hf-sdpa", setting, files)

    def _fetch(self, key: Key) -> Trace:
        """Mapped, and anew for each comparison, so that none holds what another has read."""
        return fetch(self.files[key], mapped)

    def _release(self, key: Key) -> None:
        pass

    def finish(self) -> list[Judged]:
        """What could be compared, and that the rest was not."""
        rest = f"all gradients, and stages away from the {len(self.at)} positions that were looked at"
        skipped = [
            Judged(self.case.layer, Comparison(name, OWN, setting), [], math.inf, math.inf, rest)
            for name in self.names
            for setting in self.settings
        ]
        return [*super().finish(), *skipped]

    def _sample(self, setting: Setting) -> tolerance.Tolerance:
        weights = {name: value.astype(np.float64) for name, value in self.case.weights.items()}
        _, inputs, _ = self.case.arrays(setting.input, setting.rope, "float32")
        tables = {name: inputs[name].astype(np.float64) for name in ("cos", "sin")}
        return sampled(weights, inputs | tables, self.case.config, self.at)

    def _blind_to(self) -> list[dict[str, str]]:
        return []

    def diagnosis(self, name: str) -> str | None:
        """Nothing: the planted bugs are tried on shorter sequences."""
        return None

    def _findings(
        self, comparison: Comparison, trace: Trace, other: Trace, truth: Trace, expected: Any
    ) -> list[Finding]:
        name, against, setting = comparison
        if against == EXACT:
            return probes.judge(trace, self.answers[setting.input], expected)
        if against == OWN:
            return self._certificate(trace, setting)
        if name == LAYER:
            return self._explicit(truth, setting._replace(dtype="float32"))
        return self._end_to_end(trace, other, truth, setting, against)

    def _certificate(self, trace: Trace, setting: Setting) -> list[Finding]:
        """Gate L at the sampled positions: a token's own stages, the heads from all keys, the output from the heads."""
        config, at, rounding = self.case.config, self.at, ROUNDING[setting.dtype]
        _, inputs, d_output = self.case.arrays(setting.input, setting.rope, "float32")
        given = {name: value[:, at].astype(np.float64) for name, value in inputs.items()}
        own = {name: trace[f"rows.{name}"] for name in FORWARD}
        d_rows = d_output[:, at].astype(np.float64)
        before = {name: value for name, value in own.items() if name not in ("heads", "output")}
        after = {name: own[name] for name in ("heads", "output")}
        findings = local.judge(before, self.factors, given, d_rows, config, rounding)
        findings += local.judge(after, self.factors, given, d_rows, config, rounding)
        G, seen = config.num_key_value_groups, self._seen(trace["k_rope"].shape[1])
        of_groups: list[list[Finding]] = []
        for k in range(config.num_key_value_heads):
            q, heads = (own[name][:, :, k * G : (k + 1) * G].astype(np.float64) for name in ("q_rope", "heads"))
            keys, values = (trace[name][:, None, :, k].astype(np.float64) for name in ("k_rope", "v_proj"))
            due = local.attended(q.swapaxes(1, 2), keys, values, seen, rounding).rearranged(local.by_head)
            of_groups.append(local.measured("heads", heads, due, rounding))
        return findings + [max(each, key=lambda finding: finding.excess) for each in zip(*of_groups, strict=True)]

    def _seen(self, T: int) -> Array:
        return (np.arange(T) <= self.at[:, None])[None, None]

    def _explicit(self, truth: Trace, setting: Setting) -> list[Finding]:
        """Gate S of the truth itself: against the eager layer where that can run, and the explicit equations."""
        noise = self._noise(setting)
        findings = []
        for name in ("heads", "output"):
            value, due = truth[f"rows.{name}"], noise.clean[name]
            relative, where = errors(name, value, due, structure.per_token(name, due))[1:]
            findings.append(Finding(name, "relative", relative, structure.LIMIT, where))
        due, value = truth["prefix"], truth["output"][:, : truth["prefix"].shape[1]]
        relative, where = errors("output", value, due, structure.per_token("output", due))[1:]
        return [*findings, Finding("output", "relative", relative, structure.LIMIT, where)]

    def _noise(self, setting: Setting) -> tolerance.Tolerance:
        try:
            return self.tolerances[setting].result()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise NotChecked(f"the explicit rows fail: {type(error).__name__}: {error}") from error

    def _end_to_end(self, trace: Trace, other: Trace, truth: Trace, setting: Setting, against: str) -> list[Finding]:
        """Gate T: element by element at the sampled positions; everywhere, the rms of each token's error."""
        if not all(finding.match for finding in self._explicit(truth, setting)):
            raise NotChecked("the float64 truth is not what the explicit equations give")
        noise, rounded = self._noise(setting), against != TRUTH
        shown = {name: trace[f"rows.{name}"] for name in ("heads", "output")}
        held = {name: other[f"rows.{name}"] for name in shown}
        findings = tolerance.judge(shown, held, noise, shown, rounded, False, setting.dtype)
        sigma = np.sqrt(np.mean(np.square(noise.spread("output").sigma, dtype=np.float64), axis=-1))  # [B, rows]
        B, T, _ = trace["output"].shape
        place = np.log1p(np.arange(T))
        due = np.exp([np.interp(place, place[self.at], np.log(each)) for each in sigma])
        share = np.sqrt(mean_squares(trace["output"], other["output"])) / due
        limit = tolerance.Spread(np.zeros(B * T), 1.0, 0.0, noise.samples).lam * (2 if rounded else 1)
        where = np.unravel_index(int(np.argmax(share)), share.shape)
        worst = float(share[where])
        return [*findings, Finding("output", "max/sigma of a position", worst, limit, tuple(map(int, where)))]


def mean_squares(value: Array, other: Array) -> Array:
    """Of each token's difference between two outputs [B,T,D]: [B,T], in float64."""
    pairs = ((value[:, block], other[:, block]) for block in blocks(value.shape[1]))
    return np.concatenate([np.mean(np.subtract(*pair, dtype=np.float64) ** 2, axis=-1) for pair in pairs], axis=1)


def blocks(tokens: int) -> Iterator[slice]:
    """All of them in pieces whose float64 copies are small."""
    return (slice(start, start + 1024) for start in range(0, tokens, 1024))


def sampled(
    weights: Mapping[str, Array], inputs: Mapping[str, Array], config: AttentionConfig, at: Array, seed: int = 0
) -> tolerance.Tolerance:
    """Gate T's σ of heads and output at the positions `at`, from 8 samples of one group of heads after the other.

    Args: a case's weights and tables in float64; its hidden states in any dtype. Each position is decoded by the
    explicit equations against all keys up to it; queries, keys and values have the noise of their own rounding. `clean`
    has the heads and output without any.
    """
    rng, rounding, w_o = np.random.default_rng(seed), ROUNDING["float32"], weights["o_proj.weight"]
    parts = [_of_group(own, inputs, group, at, rng) for own, group in groups(weights, config)]
    heads = np.concatenate([clean for clean, _ in parts], axis=2)
    deviations = np.concatenate([noisy for _, noisy in parts], axis=3) - heads
    B, R = heads.shape[:2]
    flat = heads.reshape(B, R, -1)
    output = flat @ w_o.T + weights.get("o_proj.bias", 0)
    variance = tolerance.product(rounding, output, flat**2 @ w_o.T**2, w_o.shape[1])
    rounded = np.sqrt(variance) * rng.standard_normal((SAMPLES, *output.shape))
    spreads = {
        "heads": tolerance.spread("heads", deviations),
        "output": tolerance.spread("output", deviations.reshape(SAMPLES, B, R, -1) @ w_o.T + rounded),
    }
    return tolerance.Tolerance(spreads, {}, {"heads": heads, "output": output}, rounding, SAMPLES, seed)


def _of_group(
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    config: AttentionConfig,
    at: Array,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """The heads [B,R,G,H] of one group at the sampled positions, and [8,B,R,G,H] with the noise of rounding."""
    own, clean = projected(weights, inputs, config, at), dict[str, Array]()
    heads = decoded(own, weights, inputs, config, at, clean.setdefault)
    noise = tolerance.Noise(clean, weights, inputs, None, config, ROUNDING["float32"], at)
    observe = partial(drawn, noise, rng)
    return heads, np.stack([decoded(own, weights, inputs, config, at, observe) for _ in range(SAMPLES)])


def drawn(noise: tolerance.Noise, rng: np.random.Generator, name: str, value: Array) -> Array:
    """A stage's value with one draw of its noise."""
    return noise.add(name, value, 1, rng)


def projected(
    weights: Mapping[str, Array], inputs: Mapping[str, Array], config: AttentionConfig, at: Array
) -> dict[str, Array]:
    """3.1 in float64: q_proj [B,R,N,H] of the tokens at R positions; k_proj and v_proj [B,T,K,H] of all."""
    x = inputs["hidden_states"]

    def project(x: Array, name: str, heads: int) -> Array:
        w, b = weights[f"{name}.weight"], weights.get(f"{name}.bias", 0)
        pieces = (x[:, block].astype(np.float64) for block in blocks(x.shape[1]))
        return np.concatenate([page.project(piece, w, heads, b) for piece in pieces], axis=1)

    asked, shared = config.num_attention_heads, config.num_key_value_heads
    return {
        "k_proj": project(x, "k_proj", shared),
        "v_proj": project(x, "v_proj", shared),
        "q_proj": project(x[:, at], "q_proj", asked),
    }


def decoded(
    projections: Mapping[str, Array],
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    config: AttentionConfig,
    at: Array,
    observe: Observe,
) -> Array:
    """The heads [B,R,N,H] of the tokens at R positions, by the page's equations, each from all keys up to it."""
    cos, sin, eps, G = inputs["cos"], inputs["sin"], config.rms_norm_eps, config.num_key_value_groups
    k, v, q = (observe(name, value) for name, value in projections.items())
    k = observe("k_norm", page.rms_norm(k, weights["k_norm.weight"], eps))
    k = observe("k_rope", page.rope(k, cos, sin))
    q = observe("q_norm", page.rms_norm(q, weights["q_norm.weight"], eps))
    q = observe("q_rope", page.rope(q, cos[:, at], sin[:, at]))
    s = observe("scores", page.scores(q, page.share(k, G)))
    a = observe("probs", page.softmax(np.where(np.arange(k.shape[1]) <= at[:, None], s, -np.inf)))
    return observe("heads", page.mix(a, page.share(v, G)))
