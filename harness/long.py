"""A layer at the length of the model's context, where nobody can hold its scores: judged by rows.

One output, of Hugging Face's own layer in float64 under sdpa, is the truth for every position. It is computed one group
of heads after the other, and is itself held to what both can compute: to the eager layer on the first `PREFIX` tokens,
whose output no later token changes (3.10), and to the explicit equations at the sampled positions `rows`. There, gates
L and T look at every stage; everywhere else, at the output.

A sampled token is decoded, as with a cache, against all keys up to it: its row of scores is all that it takes.

Up to `BACKWARD` tokens every implementation runs backward, too, and in float64: gate S then holds its output and every
gradient of the layer's inputs and weights to the truth, and gate L looks at each stage's gradient at the sampled
positions, and at all of each weight's.
"""

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harness.case import BadInput, Case
from harness.files import mapped
from harness.gates import (
    EQUATION,
    ROUNDING,
    Array,
    Finding,
    Rounding,
    Trace,
    errors,
    letters,
    local,
    probes,
    structure,
    tolerance,
)
from harness.judging import EXACT, LAYER, OWN, TRUTH, Comparison, Judged, Judging, Key, NotChecked
from harness.runners import PROBES, REFERENCES, Loaded, Run, Setting, fetch
from impls import numpy_attention as page
from impls.spec import AttentionConfig, Observe

LONGEST_SQUARE = 2**27
"""Scores, of all heads and sequences: 1 GiB in float64. A run whose scores are more is judged by rows."""
ROWS, PREFIX, SAMPLES = 64, 256, 8
BACKWARD = 8192
"""The most tokens that are judged backward, too, since the time of it grows with the square of them: 250 s at this
length, on two busy cores, and at 40,960 tokens 25 times as much."""
CAN = ("numpy-tiled", "jax-tiled", "torch-sdpa", "hf-sdpa")
"""The implementations that hold no score matrix."""
WHOLE = ("k_rope", "v_proj", "output")
"""What is kept of every token; of the others, what is at the sampled positions."""
FORWARD = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_rope", "k_rope", "heads", "output")
ATTENDED = ("d_v_proj", "d_q_rope", "d_k_rope")
"""The gradients that a fused kernel computes by itself, from all keys or from all queries."""


def is_long(case: Case) -> bool:
    """Whether the scores of an input are too many to be judged one by one."""
    B, T, _ = case.inputs["chapter"]["hidden_states"].shape
    return B * case.config.num_attention_heads * T**2 > LONGEST_SQUARE


def dtypes(case: Case) -> tuple[str, ...]:
    """The dtypes in which implementations run a long case: in float64, only one of at most `BACKWARD` tokens."""
    _, T, _ = case.inputs["chapter"]["hidden_states"].shape
    return ("float64", "float32") if T <= BACKWARD else ("float32",)


def is_end(name: str) -> bool:
    """Whether an entry is the output, or a gradient of the layer's input or of one of its weights."""
    return name in ("output", "d_hidden_states") or (name in EQUATION and not letters(name))


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


def runner(name: str, loaded: Loaded, at: Sequence[int]) -> Run:
    """A `run` whose trace is judged by rows, "rows.<stage>" being a stage at the positions `at`.

    Beyond `BACKWARD` tokens it is the forward alone, with `WHOLE` of every token and all stages at these positions.
    Else it has everything, or in float64 the ends, and of the forward all stages at these positions.
    """
    chosen, framework = np.asarray(at), name.split("-")[0]
    place = "cuda" if loaded.device == "gpu" and framework != "jax" else loaded.device
    give_memory_back()

    def picked(name: str, value: Any) -> dict[str, Any]:
        kept = {f"rows.{name}": value[:, chosen]} if name in FORWARD else {}
        return kept | ({name: value} if name in WHOLE else {})

    def run(weights: Trace, inputs: Trace, d_output: Array, config: AttentionConfig) -> dict[str, Array]:
        exact = d_output.dtype == np.float64
        if name in REFERENCES and exact:
            return _truth(weights, inputs, d_output, config, place, chosen)
        if d_output.shape[1] > BACKWARD:
            forward = {"numpy": _numpy, "jax": _jax, "torch": _torch, "hf": _hugging_face}[framework]
            return forward(weights, inputs, config, place, picked)
        if name in REFERENCES:
            from harness import reference

            return reference.run(weights, inputs, d_output, config, "sdpa", place, masked=False)
        trace = loaded.run(weights, inputs, d_output, config)
        return ends(trace, chosen) if exact else trace

    return run


def ends(trace: Trace, at: Array) -> dict[str, Array]:
    """The output and the gradients of inputs and weights, and "rows.<stage>" of the forward at the positions `at`."""
    kept = {name: value for name, value in trace.items() if is_end(name)}
    return kept | {f"rows.{name}": trace[name][:, at] for name in FORWARD}


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
    """Hugging Face's layer under sdpa, without a mask as the model calls it."""
    from harness import reference

    return reference.forward(weights, inputs, config, pick, device)


def _truth(
    weights: Trace, inputs: Trace, d_output: Array, config: AttentionConfig, device: str, at: Array
) -> dict[str, Array]:
    """Hugging Face's layer in float64, group by group. On the first `PREFIX` tokens, "first.<name>" is what this gives
    and "eager.<name>" what the eager layer does."""
    from harness import reference

    def forward(at: Array, weights: Trace, inputs: Trace, d_output: Array, config: AttentionConfig) -> dict[str, Array]:
        def pick(name: str, value: Any) -> dict[str, Any]:
            return {f"rows.{name}": value[:, at]} | ({name: value} if is_end(name) else {})

        return reference.forward(weights, inputs, config, pick, device)

    def both(at: Array, weights: Trace, inputs: Trace, d_output: Array, config: AttentionConfig) -> dict[str, Array]:
        return ends(reference.run(weights, inputs, d_output, config, "sdpa", device, masked=False), at)

    run = both if d_output.shape[1] <= BACKWARD else forward
    trace = by_group(partial(run, at), weights, inputs, d_output, config)
    first = {name: value[:, :PREFIX] for name, value in inputs.items()}, d_output[:, :PREFIX]
    eager, again = reference.run(weights, *first, config), by_group(partial(run, at[:1]), weights, *first, config)
    again["output"] = trace["output"][:, :PREFIX]
    for name in filter(is_end, again):
        trace |= {f"eager.{name}": eager[name], f"first.{name}": again[name]}
    return trace


def by_group(run: Run, weights: Trace, inputs: Trace, d_output: Array, config: AttentionConfig) -> dict[str, Array]:
    """The trace of a layer from those of its groups of heads, run one after the other, each as a layer of its own."""
    trace: dict[str, Array] = {}
    for own, group in groups(weights, config):
        for name, value in run(own, inputs, d_output, group).items():
            if name not in trace:
                trace[name] = value
            elif name in SUMS:
                trace[name] += value
            elif name != "d_o_proj.bias":  # which each has whole
                axis = 1 if name == "d_o_proj.weight" else 2 if letters(name.removeprefix("rows.")) else 0
                trace[name] = np.concatenate([trace[name], value], axis=axis)
    return trace


SUMS = ("output", "rows.output", "d_hidden_states", "d_q_norm.weight", "d_k_norm.weight")
"""What the groups of heads add up to; of the rest, each has a part."""


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
        self.at, self.names, self.backward = rows(T), names, T <= BACKWARD
        self.rows = self.at.tolist()
        super().__init__(case, names, settings, *rest)

    def comparisons(self, names: Sequence[str], settings: Sequence[Setting]) -> Iterator[Comparison]:
        """Of every implementation, and of the truth itself, which is held to what is explicit."""
        for setting in settings:
            if setting.dtype == "float64":
                yield from (Comparison(name, TRUTH, setting) for name in names if name not in REFERENCES)
                continue
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
        single = [setting for setting in self.settings if setting.dtype != "float64"]
        skipped = [
            Judged(self.case.layer, Comparison(name, against, setting), [], math.inf, math.inf, why)
            for name in self.names
            for each in single
            for against, setting, why in self._left_out(name, each)
        ]
        return [*super().finish(), *skipped]

    def _left_out(self, name: str, setting: Setting) -> Iterator[tuple[str, Setting, str]]:
        """What is not looked at, and why."""
        exact, away = setting._replace(dtype="float64"), f"away from the {len(self.at)} positions that were looked at"
        if name in REFERENCES:
            yield TRUTH, exact, "in float64 it is what the others are held to"
        elif not self.backward:
            yield TRUTH, exact, f"beyond {BACKWARD:,} tokens none but Hugging Face's layer runs in float64"
        if self.backward:
            yield OWN, setting, f"stages and their gradients {away} (of the weights' gradients, everything was)"
            yield (
                TRUTH,
                setting,
                "all but the heads and the output; no tolerance of a gradient is derived at this length",
            )
        else:
            yield OWN, setting, f"all gradients (beyond {BACKWARD:,} tokens nothing runs backward), and stages {away}"
            yield TRUTH, setting, "all but the heads and the output"

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
        if not all(finding.match for finding in self._explicit(truth, setting._replace(dtype="float32"))):
            raise NotChecked("the float64 truth is not what the explicit equations give")
        if setting.dtype == "float64":
            own, due = ({key: value for key, value in each.items() if is_end(key)} for each in (trace, truth))
            return structure.judge(own, due, self.case.weights, {}, self.case.config, expected)
        return self._end_to_end(trace, other, setting, against)

    def _certificate(self, trace: Trace, setting: Setting) -> list[Finding]:
        """Gate L at the sampled positions: a token's own stages, the heads from all keys, the output from the heads.

        Where it ran backward, the same of the gradients; those of the weights, which are sums over all tokens, whole.
        """
        config, at, rounding = self.case.config, self.at, ROUNDING[setting.dtype]
        _, inputs, d_output = self.case.arrays(setting.input, setting.rope, setting.dtype)
        own = {name: value[:, at] for name, value in trace.items() if letters(name)}
        own |= {name: trace[f"rows.{name}"] for name in FORWARD if f"rows.{name}" in trace}
        given = {name: value[:, at].astype(np.float64) for name, value in inputs.items()}
        by_token = [name for name in local.EQUATIONS if name in own and name not in ("heads", *ATTENDED)]
        d_rows = d_output[:, at].astype(np.float64)
        findings = local.judge(own, self.factors, given, d_rows, config, rounding, by_token)
        findings = [self._placed(finding) for finding in findings]
        of_groups = [self._attended(trace, own, k, rounding) for k in range(config.num_key_value_heads)]
        findings += [max(each, key=lambda finding: finding.excess) for each in zip(*of_groups, strict=True)]
        if "d_hidden_states" in trace:
            whole = {name: value.astype(np.float64) for name, value in inputs.items()}
            sums = [name for name in local.EQUATIONS if name in trace and not letters(name)]
            findings += local.judge(trace, self.factors, whole, d_output.astype(np.float64), config, rounding, sums)
        return findings

    def _attended(self, trace: Trace, own: Trace, k: int, rounding: Rounding) -> list[Finding]:
        """Gate L of what one group of heads attends to, and of its gradients: from all keys, and all queries."""
        G, seen = self.case.config.num_key_value_groups, self._seen(trace["k_rope"].shape[1])
        place = {"N": slice(k * G, (k + 1) * G), "K": slice(k, k + 1)}

        def part(name: str, of: Trace) -> Array:
            return of[name][:, :, place[letters(name)[2]]].astype(np.float64)

        q, keys, values = (
            local.by_head(part(*each)) for each in (("q_rope", own), ("k_rope", trace), ("v_proj", trace))
        )
        due = {"heads": local.attended(q, keys, values, seen, rounding).rearranged(local.by_head)}
        if "d_hidden_states" in trace:
            group = {name: part(name, trace) for name in ("q_rope", "k_rope", "v_proj", "heads", "d_heads")}
            due |= local.attended_backward(group, self.at, rounding)
        findings = [local.measured(name, part(name, own), each, rounding) for name, each in due.items()]
        return [self._placed(each, place[letters(each.stage)[2]].start) for each in itertools.chain(*findings)]

    def _placed(self, finding: Finding, head: int = 0) -> Finding:
        """With its place in the layer, from that among the sampled positions of a group whose first head is `head`."""
        assert finding.where is not None
        batch, row, *rest = finding.where
        rest[0] += head
        return finding._replace(where=(batch, int(self.at[row]), *rest))

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
        for name in (key.removeprefix("eager.") for key in truth if key.startswith("eager.")):
            value, due = truth[f"first.{name}"], truth[f"eager.{name}"]
            relative, where = errors(name, value, due, structure.per_token(name, due))[1:]
            findings.append(Finding(name, "relative", relative, structure.LIMIT, where))
        return findings

    def _noise(self, setting: Setting) -> tolerance.Tolerance:
        try:
            return self.tolerances[setting].result()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise NotChecked(f"the explicit rows fail: {type(error).__name__}: {error}") from error

    def _end_to_end(self, trace: Trace, other: Trace, setting: Setting, against: str) -> list[Finding]:
        """Gate T: element by element at the sampled positions; everywhere, the rms of each token's error."""
        noise, rounded = self._noise(setting), against != TRUTH
        shown, held = (
            {
                name: each[f"rows.{name}"] if f"rows.{name}" in each else each[name][:, self.at]
                for name in ("heads", "output")
            }
            for each in (trace, other)
        )
        findings = tolerance.judge(shown, held, noise, shown, rounded, False, setting.dtype)
        findings = [self._placed(finding) for finding in findings]
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
