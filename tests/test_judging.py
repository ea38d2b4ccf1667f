"""What findings amount to: which failure comes first, and what a person is told."""

import math

import numpy as np
import pytest

from harness import judging
from harness.gates import Finding
from harness.judging import LAYER, OWN, TRUTH, Comparison, Judged
from harness.runners import Setting

SINGLE, DOUBLE = Setting("chapter", "model", "float32"), Setting("chapter", "model", "float64")


def result(against, setting, *findings):
    return Judged(0, Comparison("jax", against, setting), list(findings), 0.0, 0.0)


def verdict(*results):
    return judging.verdict("jax", results, DOUBLE, None, head_dim=16)


GOOD = result(TRUTH, DOUBLE, Finding("q_norm", "relative", 1e-15, 1e-12, (0, 0, 0, 0)))


def test_first_divergence_is_the_earliest_of_structure_and_local():
    first = verdict(
        result(TRUTH, SINGLE, Finding("q_proj", "rms", 2.0, 1.0, (0, 0, 0, 0))),
        result(TRUTH, DOUBLE, Finding("scores", "relative", 0.1, 1e-12, (0, 3, 2, 1))),
        result(OWN, SINGLE, Finding("q_norm", "bits", 11.0, 18.0, (0, 5, 2, 1))),
    )["first_divergence"]
    assert (first["stage"], first["head"], first["position"]) == ("q_norm", 2, 5)
    assert "computed with 11.0 bits, at least 18.0 are due" in first["explanation"]


def test_what_only_the_tolerance_sees_is_named_too():
    first = verdict(GOOD, result(LAYER, SINGLE, Finding("heads", "max/sigma", 40.0, 20.0, (0, 6, 1, 0))))[
        "first_divergence"
    ]
    assert (first["stage"], first["head"], first["position"]) == ("heads", 1, 6)
    assert "4.0e+01 σ" in first["explanation"]


def test_precision_that_is_not_in_effect_is_the_reason():
    """TF32, or bfloat16 products under PyTorch's "medium": whatever else fails, this is named first."""
    results = [
        *judging.precision(0, "jax", {"float32": 11, "float64": 53}, ["float64", "float32"]),
        result(OWN, SINGLE, Finding("q_proj", "bits", 11.2, 18.0, (0, 0, 0, 0))),
    ]
    entry = verdict(GOOD, *results)
    assert not entry["match"] and entry["first_divergence"]["stage"] == "matmul"
    assert "read 11 bits of their operands, float32 has 24" in entry["first_divergence"]["explanation"]


def test_full_precision_holds():
    results = judging.precision(0, "jax", {"float32": 24, "float64": 53}, ["float64", "float32"])
    assert verdict(GOOD, *results)["match"]


@pytest.mark.parametrize("measure", ["missing", "unknown", "shape", "dtype", "not finite"])
def test_what_cannot_be_compared_is_said(measure):
    first = verdict(result(TRUTH, DOUBLE, Finding("q_norm", measure, math.inf, 0.0)))["first_divergence"]
    assert first["stage"] == "q_norm" and first["explanation"].startswith("It ")
    assert first["head"] is first["position"] is None


def test_nothing_judged_is_no_match():
    assert not verdict()["match"]


@pytest.mark.parametrize(
    ("name", "index", "head", "position"),
    [
        ("q_norm", (0, 5, 3, 1), 3, 5),
        ("d_k_rope", (1, 4, 2, 0), 2, 4),
        ("probs", (0, 7, 2, 1), 7, 2),
        ("output", (0, 9, 100), None, 9),
        ("d_hidden_states", (0, 9, 100), None, 9),
        ("d_q_proj.weight", (33, 2), 2, None),
        ("d_o_proj.weight", (2, 33), 2, None),
        ("d_q_norm.weight", (3,), None, None),
    ],
)
def test_place_of_an_element(name, index, head, position):
    assert judging.where(name, index, head_dim=16) == (head, position)


@pytest.mark.parametrize("tokens", [1, 4, 100])
def test_outputs_are_compared_piece_by_piece(tokens):
    value, other = np.random.default_rng(0).standard_normal((2, 3, 11, 5)).astype(np.float32)
    seen = np.tri(11, dtype=bool) & (np.arange(11) >= [[[[0]]], [[[2]]], [[[0]]]])
    error = np.abs(value.astype(np.float64) - other)
    error[1, :2] = 0  # queries that see nothing
    assert judging.apart(value, other, seen, tokens) == pytest.approx((error.max(), error.mean()), rel=1e-14)
    value[2, 10, 4] = math.nan
    assert np.isnan(judging.apart(value, other, seen, tokens)).all()
