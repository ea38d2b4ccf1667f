"""Puts traces before the gates as they land, and makes rows of evidence and verdicts of what the gates find.

The truth is Hugging Face's eager layer in float64. An implementation is compared

    in float64 with the truth                      gate S, and 3.9 with the Jacobian built in full
    in float32 with exact answers, on probes       gate P, where a correct layer does not round
    in float32 with each stage's own inputs        gate L, which needs no other trace
    in float32 with the truth                      gate T: its own rounding
    in float32 with the layer, and each other      gate T: the rounding of two

A run in bfloat16 or float16 is put before L and T in that dtype, and before the truth of the same short values.
"""

import itertools
import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from harness import planted
from harness.artifact import Row, judged
from harness.case import Case
from harness.environment import SIGNIFICAND
from harness.gates import (
    EQUATION,
    ROUNDING,
    Array,
    Finding,
    Trace,
    compared,
    difference,
    direction,
    letters,
    local,
    probes,
    structure,
    tolerance,
    whole,
)
from harness.runners import (
    CACHED,
    FUSED,
    LIBRARIES,
    PROBES,
    REFERENCES,
    Setting,
    fetch,
    ours,
    probe_cases,
    shown,
)
from impls import numpy_attention

LAYER = "hf-eager"
"""Hugging Face's layer: in a row's `against`, in the row's own dtype."""
TRUTH, JACOBIAN, OWN = "truth", "jacobian", "own inputs"
"""In a row's `against`: the layer in float64; for 3.9, the Jacobian built in full; for gate L, its own values."""
OPERANDS, EXACT, GIVEN = "operands", "exact", "given"
"""In a row's `against`: the operands of a matrix product, of which so many bits are read; the answer of a probe; what
it was given, which it must leave as it was."""

RULE = (
    "rounding noise injected at every stage of the float64 reference gives σ for each element; "
    "rms(error) ≤ κ rms(σ) and |error| ≤ λ σ with λ = ln(N/δ)/1.75/√(½ + ½ q), q the δ-quantile of χ²_K/K, against the "
    "truth; √2 κ and 2 λ between two rounded results"
)


class Key(NamedTuple):
    """One trace of a case."""

    name: str
    setting: Setting


class Comparison(NamedTuple):
    """One trace before one gate: against the truth, the layer, or another implementation, in the same setting."""

    name: str
    against: str
    setting: Setting

    @property
    def gate(self) -> str:
        """Which gate: in float64 nothing but structure is left to see."""
        if self.against in (OPERANDS, EXACT, GIVEN):
            return {OPERANDS: "precision", EXACT: "probes", GIVEN: "contract"}[self.against]
        if self.setting.dtype == "float64":
            return "structure"
        return "local" if self.against == OWN else "tolerance"

    def traces(self) -> tuple[Key, ...]:
        """The traces that it needs: its own; what that is held against; last the truth, on which a tolerance rests."""
        own, truth = Key(self.name, self.setting), Key(LAYER, self.setting._replace(dtype="float64"))
        if self.against == EXACT or (self.against == OWN and self.setting.dtype != "float16"):
            return (own,)
        return (own, truth) if self.against in (TRUTH, OWN) else (own, Key(self.against, self.setting), truth)


class Judged(NamedTuple):
    """What a gate found in a layer, and the largest and the mean absolute difference of the outputs, in their unit."""

    layer: int
    comparison: Comparison
    findings: list[Finding]
    max_abs: float
    mean_abs: float
    not_checked: str | None = None  # why there are no findings


ERRORS = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""What a broken NumPy page may raise, or a planted bug whose line no longer stands in it."""
UNREADABLE = (AttributeError, LookupError, OSError, SafetensorError, TypeError, ValueError)
"""What reading a trace raises that is no file of tensors, or of a kind that NumPy lacks."""


class NotChecked(Exception):
    """A comparison that cannot be made, and why: no fault of the implementation."""


def comparisons(names: Sequence[str], settings: Sequence[Setting]) -> Iterator[Comparison]:
    """Every comparison to make between implementations and the layer, itself not among `names`."""
    for setting in settings:
        if setting.dtype == "float64":
            yield from (Comparison(name, TRUTH, setting) for name in names)
        else:
            if setting.rope == "model" or setting._replace(rope="model") not in settings:
                yield from (Comparison(name, OWN, setting) for name in names)  # neutral RoPE has no stage of its own
            yield from (Comparison(name, TRUTH, setting) for name in [LAYER, *names])
            yield from (Comparison(name, LAYER, setting) for name in names)
            peers = [name for name in names if ours(name) and (name not in REFERENCES or name in CACHED)]
            pairs = itertools.combinations(peers, 2)
            yield from (Comparison(name, other, setting) for name, other in pairs)
    if any(setting.dtype == "float32" for setting in settings):
        probed = [name for name in names if name not in REFERENCES]
        yield from (Comparison(name, EXACT, setting) for setting in PROBES for name in probed)


class Judging:
    """The comparisons of one case, each made as soon as its two traces have landed.

    names: the implementations, without the layer itself. pool and sampler: where comparisons and gate T's noise run.
    folder: receives the probes.
    """

    rows: list[int] | None = None
    """The positions that a run keeps the stages of; None for all of them, forward and backward."""

    def __init__(
        self,
        case: Case,
        names: Sequence[str],
        settings: Sequence[Setting],
        pool: Executor,
        sampler: Executor,
        folder: Path,
    ):
        self.case, self.settings, self.pool, self.folder = case, list(settings), pool, folder
        self.fused = any(name in FUSED or not ours(name) for name in names)
        self.waiting = list(self.comparisons(names, settings))
        self.uses = Counter(key for comparison in self.waiting for key in comparison.traces())
        self.files: dict[Key, Mapping[str, str]] = {}
        self.traces: dict[Key, Trace] = {}
        self.trusted: dict[Setting, bool] = {}
        self.lock = threading.Lock()
        self.results: list[Future[Judged]] = []
        self.skipped: list[Judged] = []
        self.tolerances = {
            setting: sampler.submit(self._sample, setting) for setting in settings if setting.dtype != "float64"
        }
        self.blind = sampler.submit(self._blind_to)
        self.answers, reasons = probe_cases(case.config, folder, self.fused) if self.tolerances else ({}, {})
        for comparison in [each for each in self.waiting if each.setting.input in reasons]:
            self.skip(comparison, reasons[comparison.setting.input])

    def comparisons(self, names: Sequence[str], settings: Sequence[Setting]) -> Iterator[Comparison]:
        """Every comparison to make."""
        return comparisons(names, settings)

    def land(self, name: str, setting: Setting, files: Mapping[str, str]) -> None:
        """A trace has been written."""
        self.files[Key(name, setting)] = files
        ready = [comparison for comparison in self.waiting if self.files.keys() >= set(comparison.traces())]
        self.waiting = [comparison for comparison in self.waiting if comparison not in ready]
        self.results += [self.pool.submit(self._judge, comparison) for comparison in ready]

    def refuse(self, name: str, setting: Setting, reason: str) -> None:
        """An implementation has no trace of this setting, and need not."""
        for comparison in [each for each in self.waiting if (each.name, each.setting) == (name, setting)]:
            self.skip(comparison, reason)

    def skip(self, comparison: Comparison, reason: str) -> None:
        """A comparison that cannot be made, through no fault of the implementation."""
        self.waiting.remove(comparison)
        self.skipped.append(Judged(self.case.layer, comparison, [], math.inf, math.inf, reason))

    def finish(self) -> list[Judged]:
        """Wait for all that could be compared; what never landed stays in `waiting`."""
        return [*self.skipped, *(result.result() for result in self.results)]

    @cached_property
    def factors(self) -> dict[str, local.Factor]:
        """The weights in float64 as gate L needs them, made once for all traces."""
        with self.lock:
            return {name: local.factor(value.astype(np.float64)) for name, value in self.case.weights.items()}

    def _given(self, setting: Setting) -> tuple[Trace, Array]:
        """What an implementation is given in a setting besides the weights, in float64."""
        return replace(self.case, weights={}).arrays(setting.input, setting.rope, "float64")[1:]

    def _sample(self, setting: Setting) -> tolerance.Tolerance:
        """Gate T's noise, from the NumPy reference in float64 as this process has it: unpatched."""
        weights = {name: each.value for name, each in self.factors.items()}
        inputs, d_output = self._given(setting)
        page = numpy_attention.forward, numpy_attention.backward
        rounding = ROUNDING[setting.dtype]
        return tolerance.sample(*page, weights, inputs, d_output, self.case.config, rounding, fused=self.fused)

    def _blind_to(self) -> list[dict[str, str]]:
        """What no input of this case can show; nothing where the page from which that is found cannot be run."""
        try:
            noise = {setting: future.result() for setting, future in self.tolerances.items()}
            return planted.blind_to(self.case, noise)
        except ERRORS:
            return []

    def diagnosis(self, name: str) -> str | None:
        """What a failing implementation did, in words, where one of the planted bugs does the same down to rounding."""
        mine = {key.setting: files for key, files in self.files.items() if key.name == name}
        try:
            shown_by_case = {s: load_file(files[""]) for s, files in mine.items() if s not in PROBES}
            noise = {setting: future.result() for setting, future in self.tolerances.items()}
            return planted.diagnose(self.case, shown_by_case, noise)
        except (*ERRORS, *UNREADABLE):
            return None

    def _structure(self, trace: Trace, truth: Trace, setting: Setting, expected: Collection[str]) -> list[Finding]:
        inputs, _ = self._given(setting)
        return structure.judge(trace, truth, self.case.weights, inputs, self.case.config, expected)

    def _tolerance(self, setting: Setting, truth: Trace) -> tolerance.Tolerance:
        """The tolerance of a setting, once the page that it was drawn from is seen to be the layer, in float64.

        Raises NotChecked where it is not: what a wrong page calls noise would excuse, or blame, the others.
        """
        try:
            noise = self.tolerances[setting].result()
        except ERRORS as error:
            raise NotChecked(f"the NumPy page fails: {type(error).__name__}: {error}") from error
        if setting not in self.trusted:
            findings = self._structure(noise.clean, truth, setting, noise.clean)
            self.trusted[setting] = all(finding.match for finding in findings)
        if not self.trusted[setting]:
            raise NotChecked("the NumPy page, from which rounding noise is drawn, is not the layer in float64")
        return noise

    def _judge(self, comparison: Comparison) -> Judged:
        keys, reason = comparison.traces(), None
        judged_as = partial(Judged, self.case.layer, comparison)
        try:
            own = self._fetch(keys[0])
        except UNREADABLE:
            return judged_as([Finding("output", "unreadable", math.inf, 0)], math.inf, math.inf)
        try:
            others = [self._fetch(key) for key in keys[1:]]
        except UNREADABLE:
            return judged_as([], math.inf, math.inf, "a trace that it is held against cannot be read")
        other = others[0] if others else own
        truth = others[-1] if others else own
        seen = self.case.seen(comparison.setting.input)
        if large := local.beyond(truth, comparison.setting.dtype, seen):
            own = {name: value for name, value in own.items() if name not in large}
            reason = f"{', '.join(large)} of the {comparison.setting.input} input are beyond float16, in the layer, too"
        try:
            expected = set(shown(comparison.name, whole(self.case.config))) - set(large)
            if others:  # saved traces lack the large gradients, the layer's own, too
                expected &= truth.keys()
            findings = self._findings(comparison, own, other, truth, expected)
        except NotChecked as why:
            findings, reason = [], str(why)
        largest = mean = math.inf
        output = own.get("output", np.empty(0))
        if output.ndim == 3 and output.size and output.shape == other["output"].shape:
            largest, mean = apart(output, other["output"], seen)
        for key in keys:
            self._release(key)
        return judged_as(findings, largest, mean, reason)

    def _findings(
        self, comparison: Comparison, trace: Trace, other: Trace, truth: Trace, expected: Collection[str]
    ) -> list[Finding]:
        name, against, setting = comparison
        hidden = "probs" not in trace
        if comparison.gate == "probes":
            return probes.judge(trace, self.answers[setting.input], expected)
        if comparison.gate == "local":
            inputs, d_output = self._given(setting)
            return local.judge(trace, self.factors, inputs, d_output, self.case.config, ROUNDING[setting.dtype])
        if comparison.gate == "structure":
            findings = self._structure(trace, truth, setting, expected)
            if name in LIBRARIES or not ours(name):
                self._tell_float32(trace, truth, setting, findings, hidden)
            if {"probs", "d_probs", "d_masked_scores"} <= trace.keys() and all(finding.where for finding in findings):
                findings.append(structure.judge_jacobian(trace, numpy_attention.softmax_jacobian))
            return findings
        noise, fused = self._tolerance(setting, truth), hidden or "probs" not in other
        return tolerance.judge(trace, other, noise, expected, against != TRUTH, fused, setting.dtype)

    def _tell_float32(
        self, trace: Trace, truth: Trace, setting: Setting, findings: Sequence[Finding], hidden: bool
    ) -> None:
        """Raises NotChecked for what may compute in float32 inside, though float64 goes in and comes out.

        Such is a norm or a softmax "always in float32": beyond gate S, and everywhere within float32's own tolerance.
        """
        single = setting._replace(dtype="float32")
        off = [finding for finding in findings if not finding.match]
        if not off or single not in self.tolerances or any(finding.measure != "relative" for finding in off):
            return
        if off[0].stage == "output" and self._kept_float64(trace, truth, setting):
            return
        noise = self._tolerance(single, truth)
        if all(each.match for each in tolerance.judge(trace, truth, noise, [], False, hidden, setting.dtype)):
            raise NotChecked(
                f"given float64, it differs from {off[0].stage} on ({max(each.value for each in off):.0e} of a token's "
                "largest value), though by no more than float32 rounding, as what computes in float32 inside does; a "
                "mistake of that size would not be seen"
            )

    def _kept_float64(self, trace: Trace, truth: Trace, setting: Setting) -> bool:
        """Whether an output is right in float64 at a token that attends to several keys: float32 inside spares none.

        Seen: norms, softmax or both in float32, at 12 and at 2 × 64 tokens, spared none whose largest p is below 0.999.
        """
        seen = self.case.seen(setting.input)
        largest = np.max(compared("probs", truth["probs"], seen), axis=-1)  # [B,N,T]; 0 for padding
        several = np.any((largest > 0) & (largest < 0.999), axis=1)  # [B,T]
        apart = np.max(np.abs(difference("output", trace["output"], truth["output"], seen)), axis=-1)
        scale = structure.per_token("output", truth["output"], seen)[..., 0]
        return bool(np.any(several & (apart <= structure.LIMIT * scale)))

    def _fetch(self, key: Key) -> Trace:
        with self.lock:
            if key not in self.traces:
                self.traces[key] = fetch(self.files[key])
            return self.traces[key]

    def _release(self, key: Key) -> None:
        """Let a trace go, and its large files, once every comparison has seen it."""
        with self.lock:
            self.uses[key] -= 1
            if not self.uses[key]:
                del self.traces[key]
                for entry, file in self.files[key].items():
                    if entry:
                        Path(file).unlink()


def apart(value: Array, other: Array, seen: Array | None = None, tokens: int = 1024) -> tuple[float, float]:
    """The largest and the mean |value − other| of two outputs [B,T,D], in float64; so many tokens at a time."""
    largest, total = [], 0.0
    for start in range(0, value.shape[1], tokens):
        at = slice(start, start + tokens)
        with np.errstate(invalid="ignore"):
            error = np.abs(difference("output", value[:, at], other[:, at], None if seen is None else seen[:, :, at]))
        largest.append(np.max(error))
        total += float(np.sum(error))
    return float(np.max(largest)), total / value.size


def precision(layer: int, name: str, bits: Mapping[str, int], dtypes: Iterable[str]) -> Iterator[Judged]:
    """Whether an implementation's matrix products read all the bits of the dtype that a run declares."""
    for dtype in dtypes:
        finding = Finding("matmul", "bits", bits[dtype], SIGNIFICAND[dtype])
        yield Judged(layer, Comparison(name, OPERANDS, Setting("any", "any", dtype)), [finding], math.nan, math.nan)


def contract(layer: int, name: str, written: Collection[str]) -> Judged:
    """Whether an implementation left what it was given as it was."""
    finding = Finding(", ".join(sorted(written)), "written", len(written), 0)
    return Judged(layer, Comparison(name, GIVEN, Setting("any", "any", "float32")), [finding], math.nan, math.nan)


# ------------------------------------------------------------------------------------------------------- rows, verdicts


def rows(result: Judged) -> Iterator[Row]:
    """A row of evidence for each finding."""
    name, against, setting = result.comparison
    for finding in result.findings:
        yield judged(
            finding.value,
            finding.limit,
            finding.match,
            layer=result.layer,
            **setting._asdict(),
            framework=name,
            against=JACOBIAN if finding.measure == JACOBIAN else against,
            gate=result.comparison.gate,
            stage=finding.stage,
            equation=EQUATION.get(finding.stage, "none"),
            direction=direction(finding.stage),
            measure=finding.measure,
        )


def verdict(
    name: str, results: Sequence[Judged], headline: Setting, limits: dict[str, Any] | None, head_dim: int
) -> dict[str, Any]:
    """An implementation's entry in the artifact's `frameworks`, from all its comparisons with the layer.

    Args: `headline`, the setting of the figures; `limits`, the tolerance there (None where only float64 was run).
    """
    own = [
        result
        for result in results
        if result.comparison.name == name and result.comparison.against in (TRUTH, LAYER, OWN, OPERANDS, EXACT, GIVEN)
    ]
    findings = [(result, finding) for result in own for finding in result.findings]
    excused = any(each.comparison.gate == "structure" and each.not_checked for each in own)
    relative = [] if excused else [finding.value for _, finding in findings if finding.measure == "relative"]
    against = TRUTH if headline.dtype == "float64" else LAYER
    heads = [each for each in own if each.comparison == Comparison(name, against, headline)]  # one for each layer
    shares = [finding.excess for each, finding in findings if each.comparison.gate == "tolerance"]
    return {
        "match": bool(findings) and all(finding.match for _, finding in findings),
        "max_abs_diff": _number(max((each.max_abs for each in heads), default=None)),
        "mean_abs_diff": _number(max((each.mean_abs for each in heads), default=None)),
        "tolerance": limits and limits | {"largest_share": _number(max(shares, default=None))},
        "structure": _number(max(relative, default=None)),
        "structure_limit": structure.LIMIT if relative else None,
        "first_divergence": first_divergence(findings, head_dim),
        "not_checked": [],
        "seconds": None,
        "error": None,
    }


def bounds(noise: tolerance.Tolerance) -> dict[str, Any]:
    """The tolerance of the output between two rounded results, and all that it was derived from."""
    sigma = noise.spreads["output"].sigma
    rms, lam = noise.limits("output", rounded=True)
    return {
        "max_abs": float(lam * np.max(sigma)),
        "rms": rms,
        "rule": RULE,
        "unit_roundoff": noise.rounding.stored or noise.rounding.unit,
        "samples": noise.samples,
        "seed": noise.seed,
        "kappa": noise.spreads["output"].kappa,
        "lambda": lam / 2,
        "delta": tolerance.DELTA,
    }


def first_divergence(findings: Sequence[tuple[Judged, Finding]], head_dim: int) -> dict[str, Any] | None:
    """The failure that comes first: a precision that is not in effect; then as the layer computes, by structure and the
    local certificate, else by tolerance."""
    failed = [each for each in findings if not each[1].match]
    if not failed:
        return None
    seen = {finding.stage for _, finding in findings}
    gates = ("precision", "structure", "local", "probes", "tolerance", "contract")
    order = {name: index for index, name in enumerate(EQUATION)}

    def place(each: tuple[Judged, Finding]) -> tuple[bool, int, int, float]:
        gate, finding = each[0].comparison.gate, each[1]
        stage = order.get(finding.stage, -1 if gate == "precision" else len(order))
        return gate in ("tolerance", "probes"), stage, gates.index(gate), -finding.excess

    result, finding = min(failed, key=place)
    name = finding.stage
    head, position = where(name, finding.where, head_dim)
    return {
        "stage": name,
        "equation": EQUATION.get(name, "none"),
        "direction": direction(name),
        "head": head,
        "position": position,
        "explanation": explanation(result, finding, before(name) <= seen),
    }


def where(name: str, index: tuple[int, ...] | None, head_dim: int) -> tuple[int | None, int | None]:
    """Head and position of an element: a key/value head for k and v, a query head elsewhere."""
    if index is None:
        return None, None
    at = dict(zip(letters(name), index, strict=False))
    if name in (f"d_{path}_proj.{kind}" for path in "qkv" for kind in ("weight", "bias")):
        return index[0] // head_dim, None
    if name == "d_o_proj.weight":
        return index[1] // head_dim, None
    return at.get("N", at.get("K")), at.get("T", at.get("S"))


def before(name: str) -> set[str]:
    """All that an entry is computed from, directly or not."""
    needs = set(local.NEEDS.get(name, ()))
    return needs.union(*(before(each) for each in needs))


def explanation(result: Judged, finding: Finding, known: bool = True) -> str:
    """What failed and what that means, for a person; `known` where all that is computed before it was shown."""
    name, setting, value, limit = finding.stage, result.comparison.setting, finding.value, finding.limit
    at = (
        f"({result.comparison.gate}, layer {result.layer}, {setting.input} input, {setting.rope} RoPE, {setting.dtype})"
    )
    if finding.measure in ("missing", "unreadable", "unknown", "shape", "dtype", "not finite"):
        fault = {
            "unreadable": "lies in a file that cannot be read",
            "missing": "was not returned",
            "unknown": "is no stage of the layer",
            "shape": "has another shape",
        }
        fault["dtype"] = f"is not {setting.dtype}"
        return f"It {fault.get(finding.measure, 'holds NaN or infinity')} {at}."
    if finding.measure == "written":
        return f"It writes into what it is given: {name}."
    if finding.measure == JACOBIAN:
        return f"It is not J^T times the gradient of the probabilities (3.7 to 3.9): off by {value:.1e} {at}."
    if finding.measure == "relative":
        text = f"It is off by {value:.2g} of its token's largest value; rounding stays below {limit:.0e} {at}."
        return f"{text} It computes something else{', while all that comes before it agrees' if known else ''}."
    if finding.measure == "exact":
        text = f"It is off by {value:.1e} of its largest value on the {setting.input} (layer {result.layer})"
        return f"{text}, where a correct layer does not round."
    if finding.measure == "bound":
        return f"From its own inputs it errs {value:.2g} times as much as any order of summation can {at}."
    if result.comparison.gate == "precision":
        return (
            f"Its matrix products read {value:.0f} bits of their operands, {setting.dtype} has {limit:.0f}: "
            "a setting or a device lowers the precision."
        )
    if finding.measure.startswith("bits"):
        part = finding.measure.removeprefix("bits")
        return f"From its own inputs it was computed with {value:.1f} bits{part}, at least {limit:.1f} are due {at}."
    unit = "σ" if finding.measure == "max/sigma" else "rms"
    return f"It errs by {value:.1e} {unit}, rounding by less than {limit:.1e} {at}."


def pairwise(
    results: Iterable[Judged], headline: Setting, names: Sequence[str], tolerance: float | None
) -> dict[str, dict[str, Any]]:
    """How far the implementations' outputs are apart at the headline setting, and whether all they share agrees."""
    pairs: dict[str, dict[str, Any]] = {}
    for result in results:
        name, against, setting = result.comparison
        if against not in names:
            continue
        pair = pairs.setdefault(f"{name}/{against}", {"max_abs_diff": None, "tolerance": tolerance, "match": True})
        pair["match"] &= all(finding.match for finding in result.findings)
        if setting == headline:
            pair["max_abs_diff"] = _number(max(result.max_abs, pair["max_abs_diff"] or 0.0))
    return pairs


def not_checked(
    name: str, runs: Sequence[tuple[int, Setting]], results: Iterable[Judged], entries: Sequence[str]
) -> list[str]:
    """What no gate saw of an implementation, in words; `runs` are the layers and settings that were asked for,
    `entries` those of a whole trace."""
    said = [] if (words := _unseen(name, results, entries)) is None else [words]
    if not ours(name) and (alone := _alone(name, results)):
        said.append(f"local: {', '.join(alone)}: what they are computed from was not returned")
    made = {(result.layer, result.comparison) for result in results}
    mine = [each for each in results if each.comparison.name == name and each.not_checked]
    gates = {"structure": {"float64"}, "local, tolerance": ROUNDING.keys() - {"float64"}, "probes": {"float32"}}
    for gate, dtypes in gates.items():
        wanted = [(layer, setting) for layer, setting in runs if setting.dtype in dtypes]
        if gate == "probes" and name in REFERENCES:
            continue
        if gate == "probes" and wanted:
            missing = sum((wanted[0][0], Comparison(name, EXACT, setting)) not in made for setting in PROBES)
            said += [f"probes: no trace of {missing} of {len(PROBES)}"] if missing else []
        elif not wanted and all(each.comparison.gate != gate for each in mine):
            said.append(f"{gate}: {'float64' if gate == 'structure' else 'float32'} was not asked for")
        elif lost := [each for each in wanted if (each[0], Comparison(name, TRUTH, each[1])) not in made]:
            said.append(f"{gate}: no trace of {len(lost)} of {len(wanted)} runs in {wanted[0][1].dtype}")
    if name in REFERENCES:
        said.append("probes: they are for what is compared with Hugging Face's layer")
    return [*said, *dict.fromkeys(f"{each.comparison.gate}: {each.not_checked}" for each in mine)]


def _alone(name: str, results: Iterable[Judged]) -> list[str]:
    """The stages and gradients that somebody's own implementation returned, but not with what gate L needs for them."""
    stages: dict[str, set[str]] = {"local": set(), "tolerance": set()}
    for result in results:
        if result.comparison.name == name and result.comparison.gate in stages:
            stages[result.comparison.gate] |= {finding.stage for finding in result.findings}
    returned = stages["tolerance"] - stages["local"]
    return [stage for stage in EQUATION if stage in returned and stages["tolerance"] != {"output"}]


def _unseen(name: str, results: Iterable[Judged], entries: Sequence[str]) -> str | None:
    """Which stages and gradients an implementation did not show."""
    if ours(name):
        missing = [entry for entry in entries if entry not in shown(name, entries)]
        if name in CACHED:
            return "scores, all gradients: decoding computes no score of a later key, and goes forward alone"
        return f"{', '.join(missing)}: a fused kernel does not show them" if missing else None
    seen = {each.stage for result in results if result.comparison.name == name for each in result.findings}
    if not seen:
        return None
    if not seen & set(entries) - {"output"}:
        return "all but the output, which is all that it returned: stages and gradients"
    missing = [entry for entry in entries if entry not in seen]
    gradients = {entry for entry in entries if direction(entry) == "backward"}
    if gradients <= set(missing):
        missing = [*(entry for entry in missing if entry not in gradients), "all gradients"]
    return f"{', '.join(missing)}: not returned" if missing else None


def _number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
