"""Gate L: held to Hugging Face's float64 trace before it judges anybody; then what it passes and what it must not."""

import math

import numpy as np
import pytest
from conftest import make_case, numpy_run

from harness.gates import NAMES, ROUNDING, local
from harness.runners import load, shown
from impls import numpy_attention
from impls.spec import AttentionConfig

CONFIG = AttentionConfig(hidden_size=40, num_attention_heads=6, num_key_value_heads=3, head_dim=16, rms_norm_eps=1e-6)


def rounded(B=2, T=7, config=CONFIG, seed=0):
    return make_case(config, B, T, seed).astype(np.float32)


def judge(trace, case, rounding=ROUNDING["float32"]):
    weights, inputs, d_output, config = case.astype(np.float64)
    factors = {name: local.factor(value) for name, value in weights.items()}
    return local.judge(trace, factors, inputs, d_output, config, rounding)


def failed(findings):
    return {finding.stage for finding in findings if not finding.match}


@pytest.fixture(scope="module")
def case():
    return rounded()


@pytest.fixture(scope="module")
def trace(case):
    return numpy_run(*case)


@pytest.mark.parametrize(("B", "T"), [(1, 1), (2, 5), (1, 33)])
def test_equations_of_the_gate_are_the_layers(B, T):
    """Hugging Face's float64 trace, recomputed stage by stage in float64: both round, so twice the bound of one."""
    case = make_case(CONFIG, B, T)
    truth = load("hf-eager").run(*case)
    findings = judge(truth, case, ROUNDING["float64"])
    assert {finding.stage for finding in findings} == set(NAMES)
    assert max(finding.value for finding in findings if finding.measure == "bound") <= 2
    bits = {finding.stage: finding.value for finding in findings if finding.measure == "bits"}
    assert min(bits.values()) > 47


@pytest.mark.parametrize("name", ["numpy", "jax", "torch", "hf-eager", "hf-sdpa"])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (4, 2), (2, 7), (1, 33)])
def test_correct_implementations_are_certified(name, B, T):
    case = rounded(B, T)
    trace = load(name).run(*case)
    findings = judge(trace, case)
    assert not failed(findings)
    certified = {finding.stage for finding in findings}
    assert certified == set(shown(name)) - set(local.uncertified(trace))
    if name != "hf-sdpa":
        assert certified == set(NAMES)


@pytest.mark.parametrize("stage", NAMES)
def test_error_in_one_stage_is_found_there_and_not_behind_it(case, trace, stage):
    """All that comes after computes rightly from the wrong value, and is certified."""
    seen = {}

    def observe(at, value):
        seen[at] = value * np.float32(1.001) if at == stage else value
        return seen[at]

    weights, inputs, d_output, config = case
    _, cache = numpy_attention.forward(weights, inputs, config, observe)
    numpy_attention.backward(d_output, cache, observe)
    assert failed(judge(seen, case)) == {stage}


def test_bits_show_a_product_in_tf32_that_its_bound_lets_pass():
    """Ten bits of mantissa in a long product: within γ_n, and far from the 24 bits of float32."""
    config = AttentionConfig(512, 2, 1, 16, 1e-6)
    case = rounded(2, 7, config)

    def tf32(x):
        return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    trace = numpy_run(*case)
    x, w = tf32(case.inputs["hidden_states"]), tf32(case.weights["v_proj.weight"])
    trace["v_proj"] = (x @ w.T).reshape(trace["v_proj"].shape)
    findings = [finding for finding in judge(trace, case) if finding.stage == "v_proj"]
    by_measure = {finding.measure.split(" of")[0]: finding for finding in findings}
    assert 9 < by_measure["bits"].value < 13 and not by_measure["bits"].match


@pytest.mark.parametrize(("axis", "measure"), [(1, "bits of a position"), (2, "bits of a head")])
def test_one_wrong_part_of_a_perfect_tensor_fails(axis, measure):
    """A head, or a position, that was computed with fewer bits than the rest, within every bound."""
    config = AttentionConfig(512, 8, 8, 16, 1e-6)
    case = rounded(1, 64, config)
    trace = numpy_run(*case)
    part = [slice(None)] * 4
    part[axis] = slice(3, 4)
    noise = np.random.default_rng(0).standard_normal(trace["q_proj"].shape).astype(np.float32)
    trace["q_proj"][tuple(part)] += (noise * 2e-5)[tuple(part)]
    findings = [finding for finding in judge(trace, case) if finding.stage == "q_proj" and not finding.match]
    assert measure in {finding.measure for finding in findings}
    assert all(finding.where[axis] == 3 for finding in findings if finding.measure == measure)


def test_what_is_missing_is_not_certified_and_said(case, trace):
    part = {name: value for name, value in trace.items() if name not in ("scores", "d_probs")}
    missing = local.uncertified(part)
    assert {"scores", "masked_scores", "d_probs", "d_masked_scores"} == set(missing)
    assert {finding.stage for finding in judge(part, case)} == set(NAMES) - set(missing)
    assert set(local.uncertified({"output": trace["output"]})) == set(NAMES)


def test_misshapen_stage_is_left_out_with_what_it_leads_to(case, trace):
    """Gates S and T report it; here nothing can be computed from it."""
    findings = judge(dict(trace, heads=trace["heads"][:, :1], q_magic=trace["heads"]), case)
    assert not failed(findings)
    assert {finding.stage for finding in findings} == set(NAMES) - {"heads", "output", "d_o_proj.weight"}


def test_nan_fails(case, trace):
    broken = dict(trace, q_norm=np.where(trace["q_norm"] > 1, np.nan, trace["q_norm"]))
    assert "q_norm" in failed(judge(broken, case))


def test_finite_mask_is_certified(case, trace):
    finite = dict(trace, masked_scores=np.where(np.isinf(trace["masked_scores"]), -1e4, trace["masked_scores"]))
    assert not failed(judge(finite, case))


@pytest.mark.parametrize("mask", [0.0, -10.0, -30.0])
def test_mask_that_leaves_the_future_a_weight_is_named(case, trace, mask):
    weak = dict(trace, masked_scores=np.where(np.isinf(trace["masked_scores"]), mask, trace["masked_scores"]))
    assert "masked_scores" in failed(judge(weak, case))


def test_exact_stage_reads_as_all_bits(case, trace):
    (finding,) = [f for f in judge(trace, case) if (f.stage, f.measure) == ("d_scores", "bits")]
    assert finding.value == 53 and math.isfinite(finding.limit)
