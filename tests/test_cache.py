"""Decoding with a key/value cache: the full forward, row by row, and nothing of the past computed twice."""

import numpy as np
import pytest
from conftest import make_case, numpy_run

from harness.gates import NAMES, ROUNDING, local, structure
from harness.runners import CACHED, load, shown
from impls import numpy_cache
from impls.spec import AttentionConfig, steps

CONFIG = AttentionConfig(40, 6, 3, 16, 1e-6)


@pytest.fixture(scope="module")
def case():
    return make_case(CONFIG, 2, 7)


def test_half_comes_first_and_then_one_by_one():
    assert list(steps(7)) == [slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6), slice(6, 7)]
    assert list(steps(1)) == [slice(0, 1)]


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("T", [1, 2, 7])
def test_every_stage_is_the_full_forwards(name, T):
    case = make_case(CONFIG, 2, T)
    trace, whole = load(name).run(*case), numpy_run(*case)
    assert set(trace) == set(shown(name)) == {entry for entry in NAMES if entry[:2] != "d_"} - {"scores"}
    findings = structure.judge(trace, load("hf-eager").run(*case), case.weights, case.inputs, CONFIG, shown(name))
    assert len(findings) == 11 and all(finding.match for finding in findings)
    assert np.array_equal(trace["probs"] == 0, whole["probs"] == 0)  # the triangle, of which only rows were computed


@pytest.mark.parametrize("name", CACHED)
def test_a_later_token_changes_nothing_before_it(name, case):
    """The lower triangle: bit for bit, whatever comes."""
    run, changed = load(name).run, {**case.inputs, "hidden_states": case.inputs["hidden_states"].copy()}
    changed["hidden_states"][:, 5] += 1
    before, after = (run(case.weights, inputs, case.d_output, CONFIG) for inputs in (case.inputs, changed))
    assert np.array_equal(before["output"][:, :5], after["output"][:, :5])
    assert np.array_equal(before["k_rope"][:, :5], after["k_rope"][:, :5])
    assert not np.isclose(before["output"][:, 5:], after["output"][:, 5:]).all()


def test_a_step_computes_one_row(case):
    shapes = []
    numpy_cache.decode(
        case.weights, case.inputs, CONFIG, lambda name, value: shapes.append((name, value.shape)) or value
    )
    rows = [shape for name, shape in shapes if name == "masked_scores"]
    assert rows == [(2, 6, 3, 3), *((2, 6, 1, S) for S in (4, 5, 6, 7))]
    assert [shape for name, shape in shapes if name == "k_proj"] == [(2, 3, 3, 16), *[(2, 1, 3, 16)] * 4]


def test_jax_compiles_the_prompt_and_one_step():
    from impls import jax_cache

    before = jax_cache.step._cache_size()
    load("jax-cache").run(*make_case(AttentionConfig(24, 2, 1, 8, 1e-6), 1, 9))
    assert jax_cache.step._cache_size() == before + 2


MISTAKES = {  # what is done wrong, and the stage where it shows
    "the oldest key is dropped": ('cache["k"], kr_BTKH', 'np.roll(cache["k"], 1, axis=1), kr_BTKH', "masked_scores"),
    "keys are kept before RoPE": ('cache["k"], kr_BTKH', 'cache["k"], kn_BTKH', "masked_scores"),
    "keys lose bits in the cache": (
        'cache["k"], kr_BTKH',
        'cache["k"].astype(np.float16).astype(kr_BTKH.dtype), kr_BTKH',
        "masked_scores",
    ),
    "a new token sees all of the prompt's future": ("S - T, dtype=bool", "S, dtype=bool", "masked_scores"),
    "a new token does not see itself": (
        "S - T, dtype=bool",
        "S - T - 1, dtype=bool) | (np.arange(S) == 0",
        "masked_scores",
    ),
    "every new token stands at position 0": (
        'qr_BTNH = observe("q_rope", rope(qn_BTNH, cos_BTH, sin_BTH))',
        'qr_BTNH = observe("q_rope", rope(qn_BTNH, cos_BTH * 0 + 1, sin_BTH * 0))',
        "q_rope",
    ),
    "values of the past are shifted": ('cache["v"], v_BTKH', 'np.roll(cache["v"], 1, axis=1), v_BTKH', "heads"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_where_they_are(mistake, case, monkeypatch):
    old, new, stage = MISTAKES[mistake]
    with open(numpy_cache.__file__, encoding="utf-8") as file:
        source = file.read()
    assert source.count(old) == 1
    scope = {"__name__": "numpy_cache"}
    exec(compile(source.replace(old, new), "numpy_cache.py", "exec"), scope)
    monkeypatch.setattr(numpy_cache, "step", scope["step"])
    trace, truth = load("numpy-cache").run(*case), load("hf-eager").run(*case)
    findings = structure.judge(trace, truth, case.weights, case.inputs, CONFIG, shown("numpy-cache"))
    failed = [finding.stage for finding in findings if not finding.match]
    assert failed[0] == stage


def test_local_certificate_of_a_float32_run(case):
    single = case.astype(np.float32)
    exact = single.astype(np.float64)
    factors = {key: local.factor(value) for key, value in exact.weights.items()}
    for name in CACHED:
        trace = load(name).run(*single)
        findings = local.judge(trace, factors, exact.inputs, exact.d_output, CONFIG, ROUNDING["float32"])
        assert {finding.stage for finding in findings} == set(shown(name)) - {"masked_scores"}
        assert all(finding.match for finding in findings)
