"""The implementations against each other, against finite differences, and against what attention promises."""

import hashlib
import importlib
from collections.abc import Iterable
from dataclasses import fields, replace

import jax
import numpy as np
import pytest
import torch
from conftest import Case, Run, Trace, make_case, numpy_run

from impls import jax_attention, numpy_attention, torch_attention
from impls.spec import GRADIENTS, STAGES, WEIGHTS, AttentionConfig, Observe, keep, weight_shapes

jax.config.update("jax_numpy_dtype_promotion", "strict")

RUNS: dict[str, Run] = {"numpy": numpy_run, "jax": jax_attention.run, "torch": torch_attention.run}
every_implementation = pytest.mark.parametrize("name", RUNS)
other_implementations = pytest.mark.parametrize("name", ["jax", "torch"])
FUNCTIONS = "project rms_norm rope rotate_half share scores causal_mask softmax mix merge".split()


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over largest expected magnitude (absolute where all is 0); equal infinities do not differ."""
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    scale = np.abs(expected[finite]).max() or 1.0
    return float(np.abs(actual[finite] - expected[finite]).max() / scale)


def assert_close(actual: Trace, expected: Trace, limit: float) -> None:
    """Every stage and gradient is there and within `limit`."""
    assert set(actual) == set(expected)
    worst = {name: relative(actual[name], expected[name]) for name in expected}
    assert all(difference <= limit for difference in worst.values()), worst


def perturb(stage: str, amount: float = 0.1) -> Observe:
    """An `observe` that adds fixed noise to one stage, in any framework."""

    def observe(name: str, value):
        if name != stage:
            return value
        noise = amount * np.random.default_rng(7).standard_normal(value.shape)
        return value + (torch.from_numpy(noise) if isinstance(value, torch.Tensor) else noise)

    return observe


# ------------------------------------------------------------------------------------------------- one with another

SHAPES = {  # B, T, and D, N, K, H
    "small": (4, 5, (20, 6, 3, 8)),
    "one token": (2, 1, (24, 6, 3, 32)),
    "two tokens, multi-query": (4, 2, (40, 5, 1, 256)),
    "multi-head": (1, 7, (48, 4, 4, 64)),
    "long, grouped": (3, 33, (96, 8, 2, 128)),
}


@pytest.mark.parametrize("rope", ["random", "model", "neutral"])
@pytest.mark.parametrize("shape", SHAPES)
@other_implementations
def test_agrees_with_numpy(name: str, shape: str, rope: str) -> None:
    B, T, sizes = SHAPES[shape]
    case = make_case(AttentionConfig(*sizes, 1e-6), B, T, rope=rope)
    assert_close(RUNS[name](*case), numpy_run(*case), 1e-12)


@every_implementation
def test_trace_has_the_shapes_of_the_contract(name: str, case: Case) -> None:
    trace = RUNS[name](*case)
    B, T, _ = case.d_output.shape
    sizes = case.config.sizes() | {"B": B, "T": T, "S": T}
    shapes = {stage.name: tuple(sizes[letter] for letter in stage.shape) for stage in STAGES}
    shapes |= weight_shapes(case.config) | {"hidden_states": (B, T, sizes["D"])}
    assert set(trace) == {stage.name for stage in STAGES} | set(GRADIENTS)
    assert {key: array.shape for key, array in trace.items()} == {key: shapes[key.removeprefix("d_")] for key in trace}


@pytest.mark.parametrize("eps", [1e-6, np.float64(1e-6)], ids=["float", "np.float64"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_implementation
def test_computes_in_the_dtype_it_is_given(name: str, dtype: type, eps: float, case: Case) -> None:
    trace = RUNS[name](*case.astype(dtype)._replace(config=replace(case.config, rms_norm_eps=eps)))
    assert {key: array.dtype for key, array in trace.items()} == dict.fromkeys(trace, np.dtype(dtype))


@every_implementation
def test_float32_is_near_float64(name: str, case: Case) -> None:
    single = case.astype(np.float32)
    trace = RUNS[name](*single)
    assert_close(trace, numpy_run(*single.astype(np.float64)), 1e-5)
    assert any(relative(trace[key], numpy_run(*case)[key]) > 1e-9 for key in trace)  # and it is not float64


# ------------------------------------------------------------------------------------------------- NumPy's backward

SOURCES = ["hidden_states", *WEIGHTS, *(stage.name for stage in STAGES[:-1])]


@pytest.mark.parametrize("source", SOURCES)
def test_gradient_is_the_slope(source: str, case: Case) -> None:
    """The directional derivative of L = ⟨d_output, output⟩ by central differences of fourth order."""
    weights, inputs, d_output, config = case
    gradient = numpy_run(*case)[f"d_{source}"]
    random = np.random.default_rng(1)

    def loss(step: np.ndarray) -> float:
        def moved(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: value + step if name == source else value for name, value in tensors.items()}

        def observe(name: str, value: np.ndarray) -> np.ndarray:
            return value + step if name == source else value

        return float(np.sum(d_output * numpy_attention.forward(moved(weights), moved(inputs), config, observe)[0]))

    for _ in range(8):
        v, h = random.standard_normal(gradient.shape), 1e-3
        v /= np.linalg.norm(v)
        slope = (8 * (loss(h * v) - loss(-h * v)) - (loss(2 * h * v) - loss(-2 * h * v))) / (12 * h)
        assert abs(slope - np.sum(gradient * v)) <= 1e-10 * np.linalg.norm(gradient)


def test_softmax_jacobian_is_the_slope_of_softmax() -> None:
    z, h = np.random.default_rng(2).standard_normal((2, 3, 4, 6)), 1e-3
    steps = h * np.eye(6)

    def slope(step: np.ndarray) -> np.ndarray:
        softmax = numpy_attention.softmax
        return (8 * (softmax(z + step) - softmax(z - step)) - (softmax(z + 2 * step) - softmax(z - 2 * step))) / (
            12 * h
        )

    differences = np.stack([slope(step) for step in steps], axis=-1)
    np.testing.assert_allclose(numpy_attention.softmax_jacobian(numpy_attention.softmax(z)), differences, atol=1e-11)


def test_softmax_jacobian_as_the_chapter_says() -> None:
    z = np.random.default_rng(3).standard_normal((4, 5, 7))
    jacobian = numpy_attention.softmax_jacobian(numpy_attention.softmax(z[None])[0])
    np.testing.assert_array_equal(jacobian, jacobian.swapaxes(-1, -2))
    np.testing.assert_allclose(jacobian.sum(axis=-1), 0, atol=1e-16)
    norms = [
        np.abs(numpy_attention.softmax_jacobian(numpy_attention.softmax(scale * z[None]))).max(axis=(1, 2, 3, 4))[0]
        for scale in (1, 30, 1000, 1e6)
    ]
    assert sorted(norms, reverse=True) == norms and norms[-1] == 0  # a saturated softmax passes no gradient on


def test_softmax_backward_is_the_jacobian_applied() -> None:
    random = np.random.default_rng(4)
    a, g = numpy_attention.softmax(random.standard_normal((2, 3, 5, 5))), random.standard_normal((2, 3, 5, 5))
    expected = np.einsum("bntij,bnti->bntj", numpy_attention.softmax_jacobian(a), g)  # J^T g
    np.testing.assert_allclose(numpy_attention.softmax_backward(g, a), expected, atol=1e-15)


# ------------------------------------------------------------------------------------------- what attention promises


@every_implementation
def test_the_future_is_unreachable(name: str, case: Case) -> None:
    """Bit for bit: no earlier output sees a changed token, and no gradient reaches a token from earlier outputs."""
    t, x_BTD, d_output = 3, case.inputs["hidden_states"].copy(), case.d_output.copy()
    x_BTD[:, t:] *= -3
    d_output[:, t:] = 0
    before = RUNS[name](*case)
    after = RUNS[name](*case._replace(inputs=case.inputs | {"hidden_states": x_BTD}))
    np.testing.assert_array_equal(after["output"][:, :t], before["output"][:, :t])
    assert np.all(after["output"][:, t:] != before["output"][:, t:])
    d_x = RUNS[name](*case._replace(d_output=d_output))["d_hidden_states"]
    assert np.all(d_x[:, t:] == 0) and np.all(d_x[:, :t] != 0)
    assert np.all(before["probs"][..., ~np.tri(5, dtype=bool)] == 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_implementation
def test_saturated_scores_leave_no_nan(name: str, dtype: type, case: Case) -> None:
    sharp = case.weights | {"q_norm.weight": 1e3 * case.weights["q_norm.weight"]}
    trace = RUNS[name](*case._replace(weights=sharp).astype(dtype))
    assert np.abs(trace["scores"]).max() > 1000
    forbidden = trace.pop("masked_scores")[..., ~np.tri(5, dtype=bool)]
    assert np.all(forbidden == -np.inf) and all(np.isfinite(array).all() for array in trace.values())


CHANGES = {
    "hidden_size": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
READ_OFF_THE_WEIGHTS = {("numpy", field) for field in ("hidden_size", "head_dim", "attention_bias")}
"""Whoever makes a case checks that they fit its configuration."""


@pytest.mark.parametrize(
    ("name", "field"),
    [(name, field) for name in RUNS for field in CHANGES if (name, field) not in READ_OFF_THE_WEIGHTS],
)
def test_every_field_of_the_configuration_matters(name: str, field: str, case: Case) -> None:
    """The output moves, or it is an error."""
    changed = replace(case.config, **{field: CHANGES[field]})
    try:
        output = RUNS[name](*case._replace(config=changed))["output"]
    except (KeyError, ValueError, TypeError, RuntimeError):
        return
    assert relative(output, RUNS[name](*case)["output"]) > 1e-9


def test_no_field_of_the_configuration_is_forgotten(config: AttentionConfig) -> None:
    assert set(CHANGES) == {field.name for field in fields(config)}


def digests(arrays: Iterable[np.ndarray]) -> list[str]:
    return [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_implementation
def test_inputs_stay_untouched(name: str, dtype: type, case: Case) -> None:
    given = case.astype(dtype)
    arrays = [*given.weights.values(), *given.inputs.values(), given.d_output]
    before = digests(arrays)
    trace = RUNS[name](*given)
    assert digests(arrays) == before
    assert not any(np.shares_memory(result, array) for result in trace.values() for array in arrays)


# ------------------------------------------------------------------------------------------------------ the one seam


BEFORE_THE_SOFTMAX = {"d_heads", "d_probs", "d_v_proj", "d_v_proj.weight", "d_o_proj.weight"}  # on the way back


def test_stages_stand_in_the_order_of_the_dataflow() -> None:
    known = {"hidden_states", "cos", "sin", *WEIGHTS}
    for stage in STAGES:
        assert set(stage.inputs) <= known
        known.add(stage.name)
    assert known - {name for stage in STAGES for name in stage.inputs} == {"output"}  # nothing is computed in vain


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES])
@every_implementation
def test_observe_replaces_a_stage(name: str, stage: str, case: Case) -> None:
    """What depends on the stage moves, nothing else does; gradients are those at the replaced value.

    Behind the softmax they are not one thing: the page differentiates it at the replaced probabilities, autograd at
    the true ones.
    """
    plain, moved, expected = RUNS[name](*case), *(run(*case, observe=perturb(stage)) for run in (RUNS[name], numpy_run))
    downstream = {stage}
    for later in STAGES:
        downstream |= {later.name} if downstream & set(later.inputs) else set()
    assert {s.name for s in STAGES if not np.array_equal(plain[s.name], moved[s.name])} == downstream
    behind = (
        {key for key in expected if key.startswith("d_") and key not in BEFORE_THE_SOFTMAX} if stage == "probs" else ()
    )
    assert_close(*({key: trace[key] for key in trace if key not in behind} for trace in (moved, expected)), 1e-12)


@pytest.mark.parametrize("stage", ["v_proj", "scores"])
@other_implementations
def test_gradient_at_a_stage_is_that_of_the_replaced_value(name: str, stage: str, case: Case) -> None:
    """Not that of the value before: `observe` doubles it here, and the two differ by that factor."""

    def double(name: str, value):
        return 2 * value if name == stage else value

    traces = [run(*case, observe=double) for run in (RUNS[name], numpy_run)]
    assert relative(*(trace[f"d_{stage}"] for trace in traces)) <= 1e-12


@every_implementation
def test_every_stage_is_observed_once_and_in_order(name: str, case: Case) -> None:
    seen = []
    RUNS[name](*case, observe=lambda stage, value: seen.append(stage) or value)
    assert seen == [stage.name for stage in STAGES]


@pytest.mark.parametrize("function", FUNCTIONS)
@every_implementation
def test_every_function_can_be_replaced(name: str, function: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug replaces a function of the module, and is what then runs."""

    class Planted(Exception):
        pass

    def planted(*arguments):
        raise Planted

    monkeypatch.setattr(importlib.import_module(f"impls.{name}_attention"), function, planted)
    with pytest.raises(Planted):
        RUNS[name](*case, observe=lambda stage, value: value)  # a new function, so that JAX traces anew


@every_implementation
def test_shapes_are_enforced_under_test(name: str, case: Case) -> None:
    module = importlib.import_module(f"impls.{name}_attention")
    array = {"numpy": np.ones, "jax": jax.numpy.ones, "torch": torch.ones}[name]
    with pytest.raises(TypeError):
        module.rope(array((4, 5, 6, 8)), array((4, 5, 8)), array((4, 6, 8)))


# -------------------------------------------------------------------------------------------------- each framework's


def test_torch_names_are_those_of_hugging_face(case: Case) -> None:
    layer = torch_attention.attention(case.weights, case.config)
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == weight_shapes(case.config)
    layer.load_state_dict(layer.state_dict(), strict=True)
    missing = {name: array for name, array in case.weights.items() if name != "k_norm.weight"}
    misshaped = case.weights | {"q_proj.weight": case.weights["q_proj.weight"].T}
    for weights in (missing, misshaped, case.weights | {"q_proj.bias": np.zeros(48)}):
        with pytest.raises(RuntimeError):
            torch_attention.attention(weights, case.config)


def test_jax_holds_transposed_kernels(case: Case) -> None:
    weights = {name: jax.numpy.asarray(array.astype(np.float32)) for name, array in case.weights.items()}
    layer = jax_attention.attention(weights, case.config)
    for name, shape in weight_shapes(case.config).items():
        assert getattr(layer, name.removesuffix(".weight"))[...].shape == shape[::-1]


def test_modules_are_layers_of_their_frameworks(case: Case) -> None:
    """Called as one calls a layer, without `run`."""
    single = case.astype(np.float32)
    tables = [single.inputs[name] for name in ("hidden_states", "cos", "sin")]
    layer = jax_attention.attention({n: jax.numpy.asarray(w) for n, w in single.weights.items()}, case.config)
    outputs = [
        np.asarray(jax_attention.nnx.jit(lambda layer, *tables: layer(*tables))(layer, *tables)),
        torch_attention.attention(single.weights, case.config)(*map(torch.tensor, tables)).numpy(force=True),
    ]
    for output in outputs:
        assert relative(output, numpy_run(*case)["output"]) < 1e-5


def test_jax_compiles_once_for_each_dtype(config: AttentionConfig) -> None:
    traced = []

    def observe(name: str, value):
        traced.append(name)
        return value

    cases = [make_case(config, 4, 5, seed, rope) for seed in (0, 1) for rope in ("neutral", "model")]
    for dtype, times in ((np.float32, 1), (np.float64, 2)):
        outputs = [jax_attention.run(*case.astype(dtype), observe=observe)["output"] for case in cases]
        assert len(traced) == times * len(STAGES)
        assert len({output.tobytes() for output in outputs}) == 4
    assert not jax.config.jax_enable_x64  # 64 bits were for that call only
    assert jax_attention.run(*cases[0].astype(np.float32), observe=keep)["output"].dtype == np.float32
