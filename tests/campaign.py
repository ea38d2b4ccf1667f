"""Correct implementations before the gates, over many seeds, shapes and weights: how much of each limit do they use?

python tests/campaign.py    all of it; `make campaign` runs it
"""

import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness import planted
from harness.case import make_inputs, normal, seeded_weights
from harness.gates import ROUNDING, Array, Finding, Trace, direction, local, probes, structure, tolerance
from harness.runners import IMPLEMENTATIONS, Run, environment, load, shown
from impls import numpy_attention
from impls.spec import AttentionConfig

SPREAD = "jax@mesh"
"""JAX's layer over two devices or more for the heads, and two for the tokens; not in the short dtypes."""
FRAMEWORKS = (*IMPLEMENTATIONS, "hf-sdpa", SPREAD)
THETA = 1e6
ROOT = Path(__file__).resolve().parent.parent


class Shape(NamedTuple):
    """A layer's sizes, and the batch and length of its input."""

    B: int
    T: int
    D: int
    N: int
    K: int
    H: int

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(self.D, self.N, self.K, self.H, rms_norm_eps=1e-6)


REDUCED = (  # MHA, GQA and MQA; head sizes 32 to 256
    Shape(1, 1, 96, 4, 2, 64),
    Shape(4, 2, 80, 6, 3, 32),
    Shape(2, 7, 64, 5, 1, 128),
    Shape(1, 12, 128, 4, 4, 64),
    Shape(3, 16, 48, 2, 1, 256),
    Shape(2, 33, 96, 8, 2, 32),
    Shape(1, 64, 128, 6, 3, 64),
    Shape(4, 128, 64, 4, 2, 32),
    Shape(1, 257, 96, 3, 3, 128),
    Shape(1, 512, 64, 4, 1, 64),
)
FULL = tuple(Shape(B, T, 1024, 16, 8, 128) for B, T in ((1, 12), (1, 1), (2, 5), (4, 3), (1, 64)))


def initialised(weights: dict[str, Array], seed: int) -> dict[str, Array]:
    """As Hugging Face initialises: normal of 0.02, norms of one; full mantissas."""
    return {
        name: normal(seed, name, *value.shape) * np.float32(0.02) if value.ndim == 2 else np.ones_like(value)
        for name, value in weights.items()
    }


def peaked(weights: dict[str, Array], seed: int) -> dict[str, Array]:
    """Scores four times larger: a softmax that is nearly one-hot."""
    return {**weights, "q_norm.weight": weights["q_norm.weight"] * 4}


def outliers(weights: dict[str, Array], seed: int) -> dict[str, Array]:
    """A few rows of each projection, and columns of W_O, twenty times larger."""
    large = {name: value.copy() for name, value in weights.items()}
    for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        large[name][seed % 7 :: 31] *= 20
    large["o_proj.weight"][:, seed % 5 :: 29] *= 20
    return large


def small(weights: dict[str, Array], seed: int) -> dict[str, Array]:
    """Projections a thousand times smaller, so that eps counts."""
    return {name: value * np.float32(1e-3) if value.ndim == 2 else value for name, value in weights.items()}


REGIMES = {  # "biases": seeded, in a layer that has biases
    "seeded": lambda weights, seed: weights,
    "biases": lambda weights, seed: weights,
    "initialised": initialised,
    "peaked": peaked,
    "outliers": outliers,
    "small": small,
}


class Stratum(NamedTuple):
    """One seed of one shape and kind of weights; which is put before the gates in float64, float32 and `short`."""

    seed: int
    shape: Shape
    regime: str
    short: str

    @property
    def config(self) -> AttentionConfig:
        return replace(self.shape.config, attention_bias=self.regime == "biases")


def strata() -> list[Stratum]:
    """200 of reduced width, every shape with every regime, and 20 at the full geometry."""
    shapes = [*(REDUCED[i % 10] for i in range(200)), *(FULL[i % 5] for i in range(20))]
    regimes = list(REGIMES)
    return [
        Stratum(i, shape, regimes[i // 10 % 6], ("bfloat16", "float16")[i // 60 % 2]) for i, shape in enumerate(shapes)
    ]


class Share(NamedTuple):
    """How much of a limit one stage of one correct run used, for bits 1 − those to spare; above 1 is a false alarm."""

    value: float
    framework: str
    against: str
    gate: str
    dtype: str
    finding: Finding
    run: tuple[Stratum, str, str]

    @property
    def kind(self) -> tuple[str, ...]:
        """What its like are counted together by."""
        other = self.against if self.against in ("truth", "own inputs", "answer") else "another"
        return (self.gate, self.finding.measure, self.dtype, self.framework, other, direction(self.finding.stage))


def used(finding: Finding) -> float:
    """The share of its limit that a finding used; of bits, 1 less the bits to spare; of an exact answer, 0 or 2."""
    if finding.measure.startswith("bits"):
        return 1 + finding.excess
    return finding.excess if finding.limit else 2.0 * (not finding.match)


def spread(config: AttentionConfig) -> Run:
    """`SPREAD`, for a layer."""
    import jax

    from impls import jax_mesh

    return partial(jax_mesh.run, mesh=jax_mesh.make_mesh(jax.devices("cpu"), **planted.devices(config)))


def shares(stratum: Stratum) -> Iterator[Share]:
    """Every share of one stratum: both inputs, both RoPE modes, all implementations, gates S, L and T."""
    seed, shape, regime, short = stratum
    config = stratum.config
    weights = REGIMES[regime](seeded_weights(config, seed), seed)
    runs = {name: load(name).run for name in ("hf-eager", *FRAMEWORKS) if name != SPREAD} | {SPREAD: spread(config)}
    for kind, arrays in make_inputs(config, THETA, shape.B, shape.T, seed).items():
        for rope, dtype in (("neutral", "float32"), ("model", "float32"), ("model", short)):
            tables = (
                {"cos": np.ones_like(arrays["cos"]), "sin": np.zeros_like(arrays["sin"])} if rope == "neutral" else {}
            )
            given = {name: value.astype(dtype) for name, value in {**arrays, **tables}.items()}
            own = {name: value.astype(dtype) for name, value in weights.items()}
            double, exact = ({k: v.astype(np.float64) for k, v in each.items()} for each in (given, own))
            d_given, d_double = given.pop("d_output"), double.pop("d_output")
            run = (stratum, kind, rope)

            truth = runs["hf-eager"](exact, double, d_double, config)
            for name in FRAMEWORKS if dtype == "float32" else ():
                trace = runs[name](exact, double, d_double, config)
                for finding in structure.judge(trace, truth, exact, double, config, shown(name)):
                    yield Share(used(finding), name, "truth", "structure", "float64", finding, run)

            page = numpy_attention.forward, numpy_attention.backward
            noise = tolerance.sample(*page, exact, double, d_double, config, ROUNDING[dtype], seed, fused=True)
            large = local.beyond(truth, dtype)
            traces = {
                name: {k: v for k, v in runs[name](own, given, d_given, config).items() if k not in large}
                for name in runs
                if name != SPREAD or dtype == "float32"
            }
            factors = {key: local.factor(value) for key, value in exact.items()}
            for name, trace in traces.items():
                for finding in local.judge(trace, factors, double, d_double, config, ROUNDING[dtype]):
                    yield Share(used(finding), name, "own inputs", "local", dtype, finding, run)
            for name, against in [(name, "truth") for name in traces] + list(itertools.combinations(traces, 2)):
                other: Trace = truth if against == "truth" else traces[against]
                both = [entry for entry in shown(name) if entry in other and entry not in large]
                fused = "hf-sdpa" in (name, against)
                for finding in tolerance.judge(traces[name], other, noise, both, against != "truth", fused, dtype):
                    yield Share(used(finding), name, against, "tolerance", dtype, finding, run)


def probe_shares(shape: Shape) -> Iterator[Share]:
    """Gate P on the three implementations, for one geometry."""
    tokens = max(1, min(12, (shape.D - 1) // 2))
    for name in probes.NAMES:
        probe = probes.build(name, shape.config, tokens, batch=2)
        for framework in IMPLEMENTATIONS:
            trace = load(framework).run(probe.weights, probe.inputs, probe.d_output, shape.config)
            for finding in probes.judge(trace, probe, shown(framework)):
                run = (Stratum(0, shape, f"probe {name}", "-"), "probe", "model")
                yield Share(used(finding), framework, "answer", "probes", "float32", finding, run)


class Tally:
    """Counts checks, runs and alarms, and keeps the largest share of each kind."""

    def __init__(self) -> None:
        self.checks, self.runs, self.alarms = 0, set[tuple[object, ...]](), list[Share]()
        self.largest: dict[tuple[str, ...], Share] = {}

    def add(self, share: Share) -> None:
        """One more check."""
        self.checks += 1
        self.runs.add((share.run, share.dtype, share.framework))
        if not share.value <= 1:
            self.alarms.append(share)
        if share.kind not in self.largest or not share.value <= self.largest[share.kind].value:
            self.largest[share.kind] = share

    def merge(self, other: "Tally") -> None:
        """The same of two."""
        self.checks += other.checks
        self.runs |= other.runs
        self.alarms += other.alarms
        for kind, share in other.largest.items():
            if kind not in self.largest or not share.value <= self.largest[kind].value:
                self.largest[kind] = share

    def summary(self) -> str:
        """What was run, and the largest share of each limit and where it was."""
        lines = [f"{self.checks:,} checks in {len(self.runs):,} runs; {len(self.alarms)} alarms; the largest shares:"]
        for (gate, measure, dtype, name, against, way), share in sorted(self.largest.items()):
            (seed, shape, regime, _), kind, rope = share.run
            where = f"{share.finding.stage}  seed {seed} {' '.join(map(str, shape))} {regime} {kind} {rope}"
            lines.append(f"{gate:10} {measure:18} {dtype:8} {name:8} {against:10} {way:8} {share.value:7.3f}  {where}")
        return "\n".join(lines)


def tally(job: Stratum | Shape) -> Tally:
    """All shares of a stratum, or of a geometry's probes."""
    result = Tally()
    for share in shares(job) if isinstance(job, Stratum) else probe_shares(job):
        result.add(share)
    return result


def campaign() -> Tally:
    """Everything, on two processes; says how far it is on standard error."""
    jobs: list[Stratum | Shape] = [*REDUCED, FULL[0], *strata()]
    random.Random(0).shuffle(jobs)  # so that what is done so far is of every kind
    jobs.sort(key=lambda job: isinstance(job, Stratum) and job.shape not in FULL)  # what takes longest comes first
    os.environ |= environment(ROOT, "cpu")  # as the command's own processes have it
    os.environ["JAX_NUM_CPU_DEVICES"] = "10"
    whole, start = Tally(), time.monotonic()
    with get_context("spawn").Pool(2, maxtasksperchild=40) as pool:
        for done, part in enumerate(pool.imap_unordered(tally, jobs), 1):
            whole.merge(part)
            for alarm in part.alarms:
                print("ALARM", alarm, file=sys.stderr)
            if done % 10 == 0:
                minutes = (time.monotonic() - start) / 60
                print(f"{done} of {len(jobs)} in {minutes:.0f} min: {whole.summary().splitlines()[0]}", file=sys.stderr)
    return whole


if __name__ == "__main__":
    found = campaign()
    print(found.summary())
    sys.exit(bool(found.alarms))
