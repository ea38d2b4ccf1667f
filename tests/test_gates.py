"""The gates: what they pass, what they must not, and that their limits were derived and not guessed."""

import math

import numpy as np
import pytest
from conftest import make_case, numpy_run

from harness.gates import NAMES, Rounding, structure, tolerance, usable
from impls import numpy_attention
from impls.spec import AttentionConfig

CONFIG = AttentionConfig(hidden_size=40, num_attention_heads=6, num_key_value_heads=3, head_dim=16, rms_norm_eps=1e-6)


def rounded(case, B=2, T=5):
    """A case as implementations get it: float64 arrays that hold float32 numbers."""
    return case.astype(np.float32).astype(np.float64)


def sample(case, **more):
    weights, inputs, d_output, config = case
    functions = numpy_attention.forward, numpy_attention.backward
    return tolerance.sample(*functions, weights, inputs, d_output, config, **more)


def by_stage(findings, measure):
    return {finding.stage: finding for finding in findings if finding.measure == measure}


@pytest.fixture(scope="module")
def case():
    return rounded(make_case(CONFIG, 2, 5))


@pytest.fixture(scope="module")
def truth(case):
    return numpy_run(*case)


@pytest.fixture(scope="module")
def noise(case):
    return sample(case)


# ------------------------------------------------------------------------------------------------- what can be compared


@pytest.mark.parametrize(
    ("fault", "damage"),
    [
        ("missing", lambda trace: trace.pop("q_norm")),
        ("unknown", lambda trace: trace.update(q_magic=np.zeros(3))),
        ("shape", lambda trace: trace.update(q_norm=trace["q_norm"][:1])),
        ("shape", lambda trace: trace.update({"d_q_norm.weight": trace["d_q_norm.weight"][:, None]})),
        ("not finite", lambda trace: trace.update(output=np.where(trace["output"] > 1, np.nan, trace["output"]))),
        ("not finite", lambda trace: trace.update(d_probs=trace["d_probs"] + np.inf)),
    ],
)
def test_what_cannot_be_compared_fails(truth, noise, case, fault, damage):
    trace = dict(truth)
    damage(trace)
    weights, inputs, _, config = case
    for findings in (
        structure.judge(trace, truth, weights, inputs, config, NAMES),
        tolerance.judge(trace, truth, noise, NAMES, rounded=False),
    ):
        failed = [finding for finding in findings if not finding.match]
        assert [finding.measure for finding in failed] == [fault]
        assert failed[0].stage not in {finding.stage for finding in findings if finding.match}


def test_another_dtype_than_the_runs_fails(truth, noise, case):
    """float64 in a float32 run claims an accuracy that it did not earn."""
    trace = {name: value.astype(np.float32) for name, value in truth.items()} | {"heads": truth["heads"]}
    findings = tolerance.judge(trace, truth, noise, NAMES, rounded=False, dtype="float32")
    assert [(f.stage, f.measure) for f in findings if not f.match] == [("heads", "dtype")]
    weights, inputs, _, config = case
    single = dict(truth, q_norm=truth["q_norm"].astype(np.float32))
    findings = structure.judge(single, truth, weights, inputs, config, NAMES)
    assert [(f.stage, f.measure) for f in findings if not f.match] == [("q_norm", "dtype")]


def test_stage_that_need_not_be_there_may_be_absent(truth):
    names, findings = usable({"output": truth["output"]}, truth, ["output"])
    assert names == ["output"] and not findings


def test_nothing_at_all_is_not_a_match(truth):
    _, findings = usable({}, truth, ["output"])
    assert [finding.match for finding in findings] == [False]


def test_masked_scores_of_the_future_are_not_compared(truth, noise):
    finite = dict(truth, masked_scores=np.where(np.isinf(truth["masked_scores"]), -1e4, truth["masked_scores"]))
    findings = tolerance.judge(finite, truth, noise, NAMES, rounded=False)
    assert all(finding.match for finding in findings)


def test_probability_of_the_future_is_compared(truth, noise, case):
    weak = dict(truth, probs=truth["probs"] + 1e-9 * np.isinf(truth["masked_scores"]))
    weights, inputs, _, config = case
    assert not by_stage(structure.judge(weak, truth, weights, inputs, config, NAMES), "relative")["probs"].match
    assert not by_stage(tolerance.judge(weak, truth, noise, NAMES, rounded=False), "max/sigma")["probs"].match


# ------------------------------------------------------------------------------------------------------------ structure


def test_structure_sees_each_stage_and_gradient(truth, case):
    """A change of 1e-10 in any one of them fails, in that one alone."""
    weights, inputs, _, config = case
    for name in NAMES:
        changed = dict(truth)
        changed[name] = np.where(np.isfinite(truth[name]), truth[name] * (1 + 1e-10), truth[name])
        findings = structure.judge(changed, truth, weights, inputs, config, NAMES)
        assert [finding.stage for finding in findings if not finding.match] == [name]
        assert len(findings) == len(NAMES)


def test_structure_is_relative_to_the_token():
    """What a token of 1e-4 loses is not hidden by one of 1e2."""
    case = make_case(CONFIG, 2, 5)
    case.inputs["hidden_states"][:, 0] *= 1e-6
    case.inputs["hidden_states"][:, 1] *= 1e6
    truth = numpy_run(*case)
    changed = dict(truth, v_proj=truth["v_proj"].copy())
    changed["v_proj"][:, 0] *= 1 + 1e-9
    findings = structure.judge(changed, truth, case.weights, case.inputs, CONFIG, NAMES)
    finding = by_stage(findings, "relative")["v_proj"]
    assert finding.value == pytest.approx(1e-9, rel=0.01)
    assert finding.where is not None and finding.where[1] == 0
    assert np.abs(changed["v_proj"] - truth["v_proj"]).max() / np.abs(truth["v_proj"]).max() < 1e-18


@pytest.mark.parametrize("T", [1, 2])
def test_structure_where_the_truth_is_zero(T):
    """A softmax over one key does not move: d_q is 0, and what rounding leaves is measured on the path's scale."""
    case = make_case(CONFIG, 2, T)
    truth = numpy_run(*case)
    assert not truth["d_q_rope"][:, 0].any()
    weights, inputs, _, config = case
    for amount, match in ((1e-15, True), (1e-9, False)):
        names = ("d_masked_scores", "d_q_rope", "d_q_norm", "d_q_proj")
        trace = dict(truth) | {name: truth[name] + amount for name in names}
        findings = by_stage(structure.judge(trace, truth, weights, inputs, config, NAMES), "relative")
        assert all(findings[name].match is match for name in names)


def test_jacobian_row(truth):
    """3.9 against 3.7 and 3.8: right to rounding; without the rank-one term, wrong."""
    assert structure.judge_jacobian(truth, numpy_attention.softmax_jacobian).value < 1e-15
    lost = dict(truth, d_masked_scores=truth["probs"] * truth["d_probs"])
    assert structure.judge_jacobian(lost, numpy_attention.softmax_jacobian).value > 0.1


def test_jacobian_of_a_long_sequence_is_sampled():
    T = 200
    p = np.tril(np.ones((1, 4, T, T))) / np.arange(1, T + 1)[:, None]
    g = np.random.default_rng(0).standard_normal(p.shape)
    trace = {"probs": p, "d_probs": g, "d_masked_scores": numpy_attention.softmax_backward(g, p)}
    sizes = []

    def jacobian(a):
        sizes.append(a.size * a.shape[-1])
        return numpy_attention.softmax_jacobian(a)

    assert structure.judge_jacobian(trace, jacobian).match
    assert 1e6 < sizes[0] < 4.3e6


# ------------------------------------------------------------------------------------------------------------ tolerance


@pytest.mark.parametrize(("B", "T"), [(1, 1), (2, 5), (3, 4), (4, 33), (1, 130)])
def test_correct_float32_passes_and_uses_a_fair_share(B, T):
    """NumPy in float32 is inside, and not by orders of magnitude: a bound that nothing reaches proves nothing."""
    case = rounded(make_case(CONFIG, B, T))
    truth, trace = numpy_run(*case), numpy_run(*case.astype(np.float32))
    findings = tolerance.judge(trace, truth, sample(case), NAMES, rounded=False)
    assert {finding.stage for finding in findings} == set(NAMES)
    assert all(finding.match for finding in findings)
    shares = [finding.value / finding.limit for finding in findings if finding.measure == "rms"]
    assert 0.2 < max(shares) < 0.95
    if T > 1:
        assert np.median(shares) > 0.1


@pytest.mark.parametrize("name", [name for name in NAMES if name != "masked_scores"])
def test_tolerance_sees_an_error_in_any_one_place(truth, noise, name):
    """Twenty σ in one element fails by its maximum; three σ in all of them by their rms."""
    sigma = noise.spreads[name].sigma
    index = np.unravel_index(np.argmax(sigma), sigma.shape)
    one = truth[name].copy()
    one[index] += 20 * sigma[index]
    findings = by_stage(tolerance.judge(truth | {name: one}, truth, noise, NAMES, rounded=False), "max/sigma")
    assert [finding.stage for finding in findings.values() if not finding.match] == [name]
    assert findings[name].where == tuple(index)
    everywhere = truth[name] + 3 * sigma
    findings = by_stage(tolerance.judge(truth | {name: everywhere}, truth, noise, NAMES, rounded=False), "rms")
    assert not findings[name].match


def test_tolerance_sees_operands_rounded_to_tf32(case, truth, noise):
    """Ten bits of mantissa in every projection: an error of 1e-3 that max_abs < 1e-2 would pass."""

    def tf32(x):
        return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    weights = {name: tf32(value) if "proj" in name else value for name, value in case.weights.items()}
    trace = numpy_run(*case._replace(weights=weights).astype(np.float32))
    failed = {
        finding.stage for finding in tolerance.judge(trace, truth, noise, NAMES, rounded=False) if not finding.match
    }
    assert {"q_proj", "k_proj", "v_proj", "output", "d_hidden_states"} <= failed


def test_limits_between_two_rounded_results(noise):
    for name in NAMES:
        (rms, lam), (rms2, lam2) = noise.limits(name, rounded=False), noise.limits(name, rounded=True)
        assert (rms2, lam2) == pytest.approx((math.sqrt(2) * rms, 2 * lam))


def test_tolerance_does_not_depend_on_the_machine_but_on_the_seed(case, noise):
    again, other = sample(case), sample(case, seed=1)
    for name in NAMES:
        np.testing.assert_array_equal(again.spreads[name].sigma, noise.spreads[name].sigma)
    assert not np.array_equal(other.spreads["output"].sigma, noise.spreads["output"].sigma)
    ratio = other.spreads["output"].sigma / noise.spreads["output"].sigma
    assert 0.6 < ratio.min() < ratio.max() < 1.6


def test_tolerance_is_proportional_to_the_unit_roundoff(case, noise):
    half = sample(case, rounding=Rounding(2.0**-25))
    for name in ("q_proj", "output", "d_hidden_states", "d_o_proj.weight"):
        np.testing.assert_allclose(half.spreads[name].sigma * 2, noise.spreads[name].sigma, rtol=1e-4)


def test_chunks_draw_the_same_spread(case, noise, monkeypatch):
    """Long sequences are sampled in several chunks: other draws of the same noise."""
    monkeypatch.setattr(tolerance, "BYTES", 1)
    one_by_one = sample(case)
    for name in NAMES:
        mine, theirs = (np.sqrt(np.mean(each.spreads[name].sigma ** 2)) for each in (one_by_one, noise))
        assert mine == pytest.approx(theirs, rel=0.35), name


def test_weight_gradients_spread_by_covariance_as_by_samples(case):
    """Two ways to the spread of a weight's gradient: a product with the covariance, or each sample's gradient."""
    covariance = sample(case)
    tally = tolerance._Tally.__init__

    def streaming(self, *arguments):
        tally(self, *arguments)
        self.keep = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tolerance._Tally, "__init__", streaming)
        samples = sample(case)
    for name in (name for name in NAMES if name.endswith("proj.weight")):
        np.testing.assert_allclose(samples.spreads[name].sigma, covariance.spreads[name].sigma, rtol=1e-5)
        assert samples.spreads[name].kappa == pytest.approx(covariance.spreads[name].kappa, rel=1e-6)


def test_equal_tokens_round_equally():
    """Where all tokens are one, their errors do not average out, and the tolerance knows it."""
    case = rounded(make_case(CONFIG, 1, 12, rope="neutral"))
    same = case.inputs["hidden_states"].copy()
    same[:] = same[:, :1]
    constant = case._replace(inputs={**case.inputs, "hidden_states": same})
    truth, trace = numpy_run(*constant), numpy_run(*constant.astype(np.float32))
    assert all(finding.match for finding in tolerance.judge(trace, truth, sample(constant), NAMES, rounded=False))
    spreads = sample(constant).spreads["q_proj"].sigma
    np.testing.assert_allclose(spreads, np.broadcast_to(spreads[:, :1], spreads.shape), rtol=1e-6)


def test_few_degrees_of_freedom_widen_kappa():
    """ν = 2: with K samples, F of 2 and 2K degrees has K (1e6^(1/K) − 1) once in a million; ν is estimated, too."""
    assert tolerance.Spread(np.ones(1), 2.0, 0.0).kappa == 1.0
    for samples, most in ((32, 1.2), (8, 2.5)):
        least = math.sqrt(samples * (1e6 ** (1 / samples) - 1))
        assert least < tolerance.Spread(np.ones(1), 1.0, 1.0, samples).kappa < most * least
    assert tolerance.Spread(np.ones(1), 1.0, 1e-4).kappa == pytest.approx(1.03, rel=0.01)


def test_sigma_of_few_samples_widens_lambda():
    """Half of σ² is an element's own: of K normal errors, the smallest in a million has this share of its variance."""
    few, many = (tolerance.Spread(np.ones(1000), 1.0, 0.0, samples).lam for samples in (8, 32))
    assert math.log(1e9) / 1.75 < many < few < math.sqrt(2) * math.log(1e9) / 1.75
    draws = np.random.default_rng(0).standard_normal((10**6, 8), dtype=np.float32)
    assert np.mean(draws**2, axis=1).min() == pytest.approx(tolerance.QUANTILES[8][1], rel=0.5)


def test_quantiles_are_students_and_chi_squared():
    stats = pytest.importorskip("scipy.stats")  # it comes with JAX
    for samples, (student, chi2) in tolerance.QUANTILES.items():
        assert student == pytest.approx(stats.t.ppf(1 - 1e-6, samples - 1), rel=1e-3)
        assert chi2 == pytest.approx(stats.chi2.ppf(1e-6, samples) / samples, rel=5e-3)


def test_fused_kernel_may_err_more_in_its_gradients_alone(case):
    both = sample(case, fused=True)
    for name in NAMES:
        plain, fused = both.spread(name), both.spread(name, fused=True)
        wider = name.startswith("d_") and name not in ("d_heads", "d_probs", "d_o_proj.weight")
        assert bool(np.mean(fused.sigma) > np.mean(plain.sigma) * 1.001) is wider, name
