"""What attention promises, whoever computes it: each framework and Hugging Face's layer, each by itself."""

import numpy as np
import pytest
from conftest import Case, Trace, make_case

from harness.case import rope_tables
from harness.runners import load
from impls.spec import WEIGHTS, AttentionConfig

CONFIG = AttentionConfig(hidden_size=40, num_attention_heads=6, num_key_value_heads=3, head_dim=16, rms_norm_eps=1e-6)
B, T, D, N, K, G, H = 2, 7, 40, 6, 3, 2, 16
every = pytest.mark.parametrize("name", ["numpy", "jax", "torch", "hf-eager"])


def run(name: str, case: Case) -> Trace:
    return load(name).run(*case)


def with_inputs(case: Case, **inputs: np.ndarray) -> Case:
    return case._replace(inputs={**case.inputs, **inputs})


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(CONFIG, B, T, rope="model").astype(np.float32)


@pytest.fixture(scope="module")
def double() -> Case:
    return make_case(CONFIG, B, T, rope="model")


@every
def test_causality_bit_for_bit(name: str, case: Case) -> None:
    """A changed future token leaves every earlier output as it was."""
    later = case.inputs["hidden_states"].copy()
    later[:, 4:] = 3 - later[:, 4:]
    before, after = run(name, case), run(name, with_inputs(case, hidden_states=later))
    for stage in ("output", "heads", "q_rope", "v_proj"):
        np.testing.assert_array_equal(before[stage][:, :4], after[stage][:, :4])
        assert np.abs(before[stage][:, 4:] - after[stage][:, 4:]).max() > 1e-3
    early = case.d_output.copy()
    early[:, 4:] = 0
    trace = run(name, case._replace(d_output=early))
    assert not trace["d_hidden_states"][:, 4:].any() and trace["d_hidden_states"][:, :4].any()


@every
def test_attention_weights_are_a_distribution(name: str, case: Case) -> None:
    """Rows sum to one within the rounding of i terms and a quotient; none is negative; the future has none."""
    probs = run(name, case)["probs"].astype(np.float64)
    visible = np.arange(1, T + 1)
    assert np.all(np.abs(probs.sum(axis=-1) - 1) <= (visible + 3) * 2.0**-24)
    assert np.all(probs >= 0) and not probs[..., ~np.tri(T, dtype=bool)].any()


@every
def test_heads_may_be_permuted_with_their_weights(name: str, double: Case) -> None:
    """Key/value heads, with the query heads that read them and W_O's columns, in another order: the same output."""
    order = np.array([2, 0, 1])
    queries = (order[:, None] * G + np.arange(G)).ravel()
    w = {key: value.copy() for key, value in double.weights.items()}
    w["q_proj.weight"] = w["q_proj.weight"].reshape(N, H, D)[queries].reshape(N * H, D)
    w["k_proj.weight"] = w["k_proj.weight"].reshape(K, H, D)[order].reshape(K * H, D)
    w["v_proj.weight"] = w["v_proj.weight"].reshape(K, H, D)[order].reshape(K * H, D)
    w["o_proj.weight"] = w["o_proj.weight"].reshape(D, N, H)[:, queries].reshape(D, N * H)
    before, after = run(name, double), run(name, double._replace(weights=w))
    np.testing.assert_allclose(after["output"], before["output"], rtol=0, atol=1e-14)
    np.testing.assert_allclose(after["probs"], before["probs"][:, queries], rtol=0, atol=1e-15)
    np.testing.assert_allclose(after["d_hidden_states"], before["d_hidden_states"], rtol=0, atol=1e-13)


@every
def test_only_distances_between_positions_matter(name: str, double: Case) -> None:
    """Rotary embedding: a common shift of all positions changes no score. The tables are float32 numbers."""
    cos, sin = (table.astype(np.float64) for table in rope_tables(H, 1e4, B, T + 5))
    now, shifted = (
        run(name, with_inputs(double, cos=cos[:, start : start + T], sin=sin[:, start : start + T])) for start in (0, 5)
    )
    seen = np.tri(T, dtype=bool)
    scale = np.abs(now["scores"][..., seen]).max()
    assert np.abs(now["scores"] - shifted["scores"])[..., seen].max() < 1e-6 * scale
    assert np.abs(now["q_rope"] - shifted["q_rope"]).max() > 0.1
    np.testing.assert_allclose(shifted["output"], now["output"], rtol=0, atol=1e-6)


@every
@pytest.mark.parametrize("length", [1, 3, 6])
def test_prefix_of_a_sequence_gives_the_prefix_of_its_output(name: str, double: Case, length: int) -> None:
    whole = run(name, double)
    part = double._replace(
        inputs={key: value[:, :length] for key, value in double.inputs.items()}, d_output=double.d_output[:, :length]
    )
    for stage in ("output", "heads", "k_rope"):
        np.testing.assert_allclose(run(name, part)[stage], whole[stage][:, :length], rtol=0, atol=1e-14)


@every
@pytest.mark.parametrize("what", [*WEIGHTS, "hidden_states"])
def test_backward_against_central_differences(name: str, double: Case, what: str) -> None:
    """⟨gradient, v⟩ = (L(x + hv) − L(x − hv)) / 2h up to h² and rounding, with L = ⟨output, d_output⟩."""
    arrays = {**double.weights, **double.inputs}
    v, h = np.random.default_rng(1).standard_normal(arrays[what].shape), 1e-6

    def loss(amount: float) -> float:
        moved = {**arrays, what: arrays[what] + amount * v}
        case = double._replace(
            weights={key: moved[key] for key in double.weights}, inputs={key: moved[key] for key in double.inputs}
        )
        return float(np.sum(run(name, case)["output"] * double.d_output))

    slope = (loss(h) - loss(-h)) / (2 * h)
    assert slope == pytest.approx(float(np.sum(run(name, double)[f"d_{what}"] * v)), rel=1e-7)
