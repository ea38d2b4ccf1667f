"""The adapter around Hugging Face's layer: it records without changing anything, and its float64 is float64."""

import numpy as np
import pytest
import torch
from conftest import make_case, numpy_run

from harness import reference
from harness.case import QWEN3_0_6B, rope_tables
from harness.gates import NAMES, structure
from harness.runners import shown
from impls.spec import AttentionConfig

CONFIG = AttentionConfig(hidden_size=40, num_attention_heads=6, num_key_value_heads=3, head_dim=16, rms_norm_eps=1e-6)
both = pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("T", [1, 5])
def test_recorder_changes_no_bit_of_the_float32_output(attn_implementation, dtype, T):
    case = make_case(CONFIG, 2, T).astype(np.float32)
    trace = reference.run(*case, attn_implementation)
    layer = reference.attention(case.weights, CONFIG, attn_implementation)
    x, cos, sin = (torch.from_numpy(case.inputs[name]) for name in ("hidden_states", "cos", "sin"))
    with torch.no_grad():
        plain = reference.call(layer, x, cos, sin).numpy()
    assert trace["output"].dtype == np.float32
    np.testing.assert_array_equal(trace["output"], plain)


@both
@pytest.mark.parametrize("T", [1, 2, 5, 33])
def test_float64_agrees_with_the_equations_to_rounding(attn_implementation, T):
    case = make_case(CONFIG, 2, T)
    trace, truth = reference.run(*case, attn_implementation), numpy_run(*case)
    assert sorted(trace) == sorted(shown(f"hf-{attn_implementation}"))
    assert all(value.dtype == np.float64 for value in trace.values())
    findings = structure.judge(trace, truth, case.weights, case.inputs, CONFIG, trace)
    assert len(findings) == len(trace)
    assert max(finding.value for finding in findings) < 3e-14


def test_eager_shows_every_stage_and_gradient():
    assert set(reference.run(*make_case(CONFIG, 2, 5))) == set(NAMES)


@both
def test_layer_in_double_alone_is_not_float64(attn_implementation):
    """The trap that the recorder removes: Hugging Face's norms and softmax cast to float32."""
    case = make_case(CONFIG, 2, 5)
    layer = reference.attention(case.weights, CONFIG, attn_implementation)
    x, cos, sin = (torch.from_numpy(case.inputs[name]) for name in ("hidden_states", "cos", "sin"))
    with torch.no_grad():
        plain = reference.call(layer, x, cos, sin).numpy()
    error = np.abs(plain - numpy_run(*case)["output"]).max()
    assert 1e-9 < error < 1e-5


@both
def test_release_that_casts_otherwise_is_refused(attn_implementation, monkeypatch):
    monkeypatch.setitem(reference.CASTS_TO_FLOAT32, attn_implementation, 4)
    with pytest.raises(RuntimeError, match="cannot be trusted"):
        reference.run(*make_case(CONFIG, 2, 5), attn_implementation)


@both
def test_layer_sees_no_future(attn_implementation):
    case = make_case(CONFIG, 2, 5).astype(np.float32)
    changed = {**case.inputs, "hidden_states": case.inputs["hidden_states"].copy()}
    changed["hidden_states"][:, 3:] += 1
    before, after = (
        reference.run(case.weights, inputs, case.d_output, CONFIG, attn_implementation)["output"]
        for inputs in (case.inputs, changed)
    )
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.abs(before[:, 3:] - after[:, 3:]).max() > 1e-3


def test_inputs_and_weights_are_left_as_they_were():
    case = make_case(CONFIG, 2, 5)
    before = make_case(CONFIG, 2, 5)
    reference.run(*case)
    for mine, theirs in ((case.weights, before.weights), (case.inputs, before.inputs)):
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name])


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rope_tables_of_the_case_are_the_layers(theta):
    """Within the rounding of Hugging Face's float32 angles: t · inv_freq errs by three roundings of the angle."""
    T, H = 64, CONFIG.head_dim
    theirs = reference.rope_tables(CONFIG, theta, 2, T)
    angles = np.arange(T)[:, None] * theta ** -(np.arange(H) % (H // 2) * 2 / H)
    bound = 2.0**-24 * (3 * angles + 1)
    for mine, name in zip(rope_tables(H, theta, 2, T), ("cos", "sin"), strict=True):
        assert mine.shape == theirs[name].shape == (2, T, H)
        assert np.all(np.abs(mine.astype(np.float64) - theirs[name]) <= bound)


def test_rope_tables_at_the_end_of_the_context():
    """The case's are float64, rounded once. Hugging Face's angles are float32, t of them off by t 2^(−24): 3.2e-3 here.

    It is no bug of anybody's port, which is given the tables, and a reason to give it the case's.
    """
    T, H = 40_960, QWEN3_0_6B.head_dim
    theirs = reference.rope_tables(QWEN3_0_6B, 1e6, 1, T)
    frequencies = np.longdouble(1e6) ** -(np.arange(0, H, 2) / np.longdouble(H))
    angles = np.arange(T)[:, None] * np.tile(frequencies, 2)
    for mine, name, function in zip(rope_tables(H, 1e6, 1, T), ("cos", "sin"), (np.cos, np.sin), strict=True):
        exact = function(angles)
        assert np.max(np.abs(mine[0] - exact)) < 2.0**-24
        assert np.max(np.abs(theirs[name][0] - exact)) == pytest.approx(3.2e-3, rel=0.1)
