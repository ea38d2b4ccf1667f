"""Correct implementations before the gates, over many seeds and shapes: how much of each limit do they ever use?"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from harness.case import make_inputs, seeded_weights
from harness.gates import Finding, direction, local, structure, tolerance
from harness.runners import load, shown
from impls import numpy_attention
from impls.spec import AttentionConfig

FRAMEWORKS = ("numpy", "jax", "torch", "hf-sdpa")
THETA = 1e6


class Shape(NamedTuple):
    """A layer's sizes, and the batch and length of its input."""

    B: int
    T: int
    D: int
    N: int
    K: int
    H: int


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


def used(finding: Finding) -> float:
    """The share of its limit that a finding used; of bits, 1 less the bits to spare."""
    return 1 + finding.excess if finding.measure.startswith("bits") else finding.excess


class Share(NamedTuple):
    """How much of a limit one stage of one correct run used, for bits 1 − those to spare; above 1 is a false alarm."""

    value: float
    framework: str
    against: str
    gate: str
    measure: str
    finding: Finding
    run: tuple[int, Shape, str, str]


def shares(seed: int, shape: Shape) -> Iterator[Share]:
    """Every share of one seed and shape: both inputs, both RoPE modes, all frameworks, both gates."""
    B, T, *sizes = shape
    config = AttentionConfig(*sizes, rms_norm_eps=1e-6)
    weights = seeded_weights(config, seed)
    runs = {name: load(name).run for name in ("hf-eager", *FRAMEWORKS)}
    for kind, arrays in make_inputs(config, THETA, B, T, seed).items():
        for rope in ("neutral", "model"):
            tables = (
                {"cos": np.ones_like(arrays["cos"]), "sin": np.zeros_like(arrays["sin"])} if rope == "neutral" else {}
            )
            single = {**arrays, **tables}
            d_single = single.pop("d_output")
            double, w64 = ({k: v.astype(np.float64) for k, v in each.items()} for each in (single, weights))
            d_double = d_single.astype(np.float64)
            run = (seed, shape, kind, rope)

            truth = runs["hf-eager"](w64, double, d_double, config)
            for name in FRAMEWORKS:
                trace = runs[name](w64, double, d_double, config)
                for finding in structure.judge(trace, truth, w64, double, config, shown(name)):
                    yield Share(
                        finding.value / finding.limit, name, "truth", "structure", finding.measure, finding, run
                    )

            noise = tolerance.sample(
                numpy_attention.forward, numpy_attention.backward, w64, double, d_double, config, seed=seed, fused=True
            )
            traces = {name: runs[name](weights, single, d_single, config) for name in runs}
            factors = {key: local.factor(value) for key, value in w64.items()}
            for name in traces:
                for finding in local.judge(traces[name], factors, double, d_double, config):
                    yield Share(used(finding), name, "own inputs", "local", finding.measure, finding, run)
            pairs = [(name, "truth") for name in traces] + list(itertools.combinations(traces, 2))
            for name, against in pairs:
                other = truth if against == "truth" else traces[against]
                both = [entry for entry in shown(name) if entry in other]
                fused = "hf-sdpa" in (name, against)
                for finding in tolerance.judge(traces[name], other, noise, both, against != "truth", fused):
                    yield Share(
                        finding.value / finding.limit, name, against, "tolerance", finding.measure, finding, run
                    )


def summary(found: Iterable[Share]) -> str:
    """The largest share of each framework, gate, measure and direction, and where it was."""
    worst: dict[tuple[str, ...], Share] = {}
    for share in found:
        other = share.against if share.against in ("truth", "own inputs") else "another"
        key = (share.gate, share.measure, share.framework, other, direction(share.finding.stage))
        if key not in worst or share.value > worst[key].value:
            worst[key] = share
    lines = [
        f"{gate:10} {measure:18} {name:9} against {against:8} {way:9} {share.value:6.3f}  {share.finding.stage}  "
        f"seed {share.run[0]} {' '.join(map(str, share.run[1]))} {share.run[2]} {share.run[3]}"
        for (gate, measure, name, against, way), share in sorted(worst.items())
    ]
    return "\n".join(lines)
