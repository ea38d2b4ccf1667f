"""The tiled implementations: the explicit ones' mathematics, in memory that grows with T and not with T²."""

import math
import tracemalloc
from collections.abc import Callable
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import Case, Trace, make_case, numpy_run

from harness.gates import ROUNDING, Finding, local, structure, tolerance
from harness.runners import run_numpy, shown
from impls import jax_attention, jax_tiled, numpy_attention, numpy_tiled
from impls.spec import AttentionConfig, keep

jax.config.update("jax_numpy_dtype_promotion", "strict")

SHOWN = shown("numpy-tiled")
MULTI_HEAD, GROUPED, MULTI_QUERY = (AttentionConfig(20, 6, K, 8, 1e-6) for K in (6, 3, 1))
QUERIES, KEYS = 4, 6
"""Small tiles, neither a multiple of the other, so that a few tokens make many, cut by the diagonal in every way."""

numpy_tiled_run = partial(run_numpy, page=numpy_tiled)
RUNS: dict[str, Callable[..., Trace]] = {"numpy-tiled": numpy_tiled_run, "jax-tiled": jax_tiled.run}
MODULES = {module: (module.QUERIES, module.KEYS) for module in (numpy_tiled, jax_tiled)}
TOKENS = numpy_tiled.TOKENS
every_implementation = pytest.mark.parametrize("name", RUNS)


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Once for all, since what JAX has compiled keeps the tiles that it was compiled with."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "QUERIES", QUERIES)
            patch.setattr(module, "KEYS", KEYS)
        patch.setattr(numpy_tiled, "TOKENS", 5)
        yield
    jax.clear_caches()


@pytest.fixture
def own_tiles(monkeypatch):
    """The tiles as they are; for JAX in shapes that no other test here has."""
    for module, (queries, keys) in MODULES.items():
        monkeypatch.setattr(module, "QUERIES", queries)
        monkeypatch.setattr(module, "KEYS", keys)
    monkeypatch.setattr(numpy_tiled, "TOKENS", TOKENS)


def worst(findings: list[Finding]) -> dict[str, Finding]:
    """The findings that do not match, by their stage."""
    return {finding.stage: finding for finding in findings if not finding.match}


def judged(trace: Trace, case: Case) -> dict[str, Finding]:
    return worst(structure.judge(trace, numpy_run(*case), case.weights, case.inputs, case.config, SHOWN))


# ---------------------------------------------------------------------------------------------------- the mathematics


@pytest.mark.parametrize("T", [1, 2, QUERIES - 1, QUERIES, QUERIES + 1, 2 * QUERIES + 3, 2 * KEYS, 3 * KEYS + 1])
@every_implementation
def test_every_stage_and_gradient_is_the_explicit_one(name, T):
    case = make_case(GROUPED, 2, T, seed=T)
    assert not judged(RUNS[name](*case), case)


@pytest.mark.parametrize("config", [MULTI_HEAD, MULTI_QUERY], ids=["multi-head", "multi-query"])
@every_implementation
def test_also_where_every_query_head_has_its_own_keys_or_all_share_them(name, config):
    case = make_case(config, 2, 15)
    trace = RUNS[name](*case)
    assert not judged(trace, case)


@pytest.mark.parametrize("T", [300])
@every_implementation
def test_also_with_the_tiles_as_they_are(name, T, own_tiles):
    case = make_case(AttentionConfig(24, 4, 2, 16, 1e-6), 2, T)
    assert not judged(RUNS[name](*case), case)


@every_implementation
def test_a_mask_is_added_to_the_scores(name):
    """Of each sequence other keys are hidden, in every tile, from all queries but one that may see itself alone."""
    case = make_case(GROUPED, 2, 15)
    hidden = np.add.outer(np.arange(2), np.arange(15)) % 3 == 0
    mask = np.where(hidden[:, None, None] & ~np.eye(15, dtype=bool) | ~np.tri(15, dtype=bool), -3e38, 0.0)
    case = case._replace(inputs={**case.inputs, "attention_mask": mask})
    trace = RUNS[name](*case)
    assert not judged(trace, case)
    assert judged(RUNS[name](*make_case(GROUPED, 2, 15)), case)


def test_stages_come_in_the_order_and_by_the_names_of_the_contract(case):
    assert list(numpy_tiled_run(*case)) == SHOWN
    assert set(jax_tiled.run(*case)) == set(SHOWN)


def test_what_observe_returns_is_what_is_used(case):
    """As the page does: a stage that is replaced moves everything after it, in the backward too."""
    for stage in ("q_proj", "k_norm", "q_rope", "v_proj", "heads", "d_heads", "d_v_proj", "d_k_rope", "d_q_norm"):

        def observe(name, value, stage=stage):
            return value * 1.5 if name == stage else value

        expected: Trace = {}

        def record(name, value, observe=observe, expected=expected):
            expected[name] = observe(name, value)
            return expected[name]

        _, cache = numpy_attention.forward(case.weights, case.inputs, case.config, record)
        numpy_attention.backward(case.d_output, cache, record)
        trace = numpy_tiled_run(*case, observe=observe)
        for name in ("output", "d_hidden_states", "d_q_proj.weight", "d_o_proj.weight"):
            # δ from O is the page's only where O is what 3.11 says it is
            if stage != "heads" or name in ("output", "d_o_proj.weight"):
                np.testing.assert_allclose(
                    trace[name], expected[name], rtol=1e-9, atol=1e-11, err_msg=f"{stage} {name}"
                )


@pytest.mark.parametrize("scale", [1e2, 1e4])
@every_implementation
def test_large_scores_leave_nothing_that_is_not_a_number(name, scale):
    """Scores of ±scale, so that m jumps between tiles and most probabilities are 0."""
    case = make_case(GROUPED, 2, 15)
    case.weights["q_norm.weight"][:] = scale / 8**0.5
    case.weights["k_norm.weight"][:] = 1
    assert np.abs(numpy_run(*case)["scores"]).max() > 0.5 * scale
    trace = RUNS[name](*case)
    assert all(np.isfinite(value).all() for value in trace.values())
    if scale == 1e2:  # beyond, a score of 1e4 with its rounding of 1e-12 is no longer known to 1e-12
        assert not judged(trace, case)
    np.testing.assert_allclose(trace["output"], numpy_run(*case)["output"], rtol=0, atol=1e-10)
    single = RUNS[name](*case.astype(np.float32))
    assert all(np.isfinite(value).all() for value in single.values())


@every_implementation
def test_no_token_sees_a_later_one(name):
    case = make_case(GROUPED, 2, 15)
    before = RUNS[name](*case)
    for first in (1, 6, 14):
        inputs = {**case.inputs, "hidden_states": case.inputs["hidden_states"].copy()}
        inputs["hidden_states"][:, first:] = 1e3
        after = RUNS[name](*case._replace(inputs=inputs))
        assert np.array_equal(before["output"][:, :first], after["output"][:, :first])
        assert not np.array_equal(before["output"][:, first:], after["output"][:, first:])
        d_output = case.d_output.copy()
        d_output[:, :first] = 0  # and the gradient does not flow forward in time
        assert np.array_equal(
            RUNS[name](*case._replace(d_output=d_output))["d_k_rope"][:, first:], before["d_k_rope"][:, first:]
        )


# ------------------------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@every_implementation
def test_computes_in_the_dtype_that_it_is_given(name, dtype, case):
    trace = RUNS[name](*case.astype(dtype))
    assert {key: value.dtype.name for key, value in trace.items()} == dict.fromkeys(trace, dtype)


def test_numpy_holds_nothing_in_float64(monkeypatch):
    """Within a group too: no scalar of NumPy's widens what is float32."""
    case, seen = make_case(GROUPED, 2, 15).astype(np.float32), set()

    def spy(function):
        def spied(*arguments, **more):
            result = function(*arguments, **more)
            for value in [*arguments, *(result if isinstance(result, tuple) else [result])]:
                seen.update([value.dtype.name] if isinstance(value, np.ndarray) else [])
            return result

        return spied

    for function in ("attend_group", "attend_group_backward", "scores", "exp_minus", "rows", "by_tokens"):
        monkeypatch.setattr(numpy_tiled, function, spy(getattr(numpy_tiled, function)))
    numpy_tiled_run(*case)
    assert seen == {"float32"}


def test_jax_computes_bfloat16_with_sums_in_float32():
    case = make_case(GROUPED, 2, 15).astype(np.float32).astype(ml_dtypes.bfloat16)
    exact = case.astype(np.float64)
    trace = jax_tiled.run(*case)
    assert {value.dtype.name for value in trace.values()} == {"bfloat16"}
    noise = gate(exact, "bfloat16")
    assert not worst(tolerance.judge(trace, numpy_run(*exact), noise, SHOWN, False, True, "bfloat16"))


def gate(exact: Case, dtype: str) -> tolerance.Tolerance:
    """Gate T with what a kernel that recomputes the probabilities is allowed."""
    page = numpy_attention.forward, numpy_attention.backward
    return tolerance.sample(*page, *exact, ROUNDING[dtype], fused=True)


@pytest.mark.parametrize(("config", "B", "T"), [(GROUPED, 2, 15), (AttentionConfig(40, 4, 2, 16, 1e-6), 2, 65)])
def test_float32_differs_by_what_rounding_allows(config, B, T):
    case = make_case(config, B, T, rope="model").astype(np.float32)
    exact = case.astype(np.float64)
    truth, noise = numpy_run(*exact), gate(exact, "float32")
    for run in RUNS.values():
        assert not worst(tolerance.judge(run(*case), truth, noise, SHOWN, False, True, "float32"))


@pytest.mark.parametrize(("config", "B", "T"), [(GROUPED, 2, 15), (MULTI_QUERY, 1, 3), (MULTI_HEAD, 1, 9)])
@every_implementation
def test_a_value_that_is_shown_is_the_one_that_is_used(name, config, B, T):
    """XLA moves a factor to where it has less to multiply, here 1/√8 from d_K, that is shown, to RoPE's cos and sin."""
    for seed in range(5):
        case = make_case(config, B, T, seed=seed, rope="model").astype(np.float32)
        weights = {key: local.factor(value.astype(np.float64)) for key, value in case.weights.items()}
        exact = case.astype(np.float64)
        assert not worst(local.judge(RUNS[name](*case), weights, exact.inputs, exact.d_output, config))


# ------------------------------------------------------------------------------------------------- memory and manners


@every_implementation
def test_inputs_are_not_written_into(name, case):
    """The case is read-only, so that writing into it is an error; and JAX is given copies."""
    copies = [array.copy() for array in (*case.weights.values(), *case.inputs.values(), case.d_output)]
    RUNS[name](*case)
    for array, copy in zip((*case.weights.values(), *case.inputs.values(), case.d_output), copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_numpy_is_the_same_on_any_number_of_threads(monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    case = make_case(GROUPED, 2, 15).astype(np.float32)
    before = numpy_tiled_run(*case)
    with ThreadPoolExecutor(1) as one:
        monkeypatch.setattr(numpy_tiled, "THREADS", one)
        after = numpy_tiled_run(*case)
    assert all(np.array_equal(before[name], after[name]) for name in SHOWN)


def test_error_state_reaches_the_threads(monkeypatch):
    case = make_case(GROUPED, 2, 15).astype(np.float32)
    case.inputs["hidden_states"][:] = 1e38
    with np.errstate(all="ignore"):
        numpy_tiled_run(*case)  # a warning would be an error
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        numpy_tiled_run(*case)


def peak(function: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_of_numpy_grows_with_the_sequence_and_not_with_its_square(own_tiles):
    """At 2,048 tokens one head's scores in float32 are 16 MiB, more than all that the layer holds."""
    peaks = []
    for T in (1024, 2048):
        case = make_case(AttentionConfig(16, 2, 1, 8, 1e-6), 1, T).astype(np.float32)
        peaks.append(peak(partial(numpy_tiled_run, *case)))
        assert peaks[-1] < T * T * 4
    assert math.log2(peaks[1] / peaks[0]) <= 1.1


def test_memory_of_jax_grows_with_the_sequence_and_not_with_its_square(own_tiles):
    """As XLA plans it, forward and backward, beside the explicit layer's."""

    def planned(T: int, layer: type[jax_attention.Attention] | None) -> int:
        case = make_case(AttentionConfig(16, 2, 1, 8, 1e-6), 1, T).astype(np.float32)
        x_cos_sin = (case.inputs[name] for name in ("hidden_states", "cos", "sin"))
        lowered = jax_attention.trace.lower(case.weights, *x_cos_sin, None, case.d_output, case.config, keep, layer)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = (planned(T, jax_tiled.Attention) for T in (1024, 2048))
    assert math.log2(large / small) <= 1.1
    assert large < planned(2048, None) / 4
