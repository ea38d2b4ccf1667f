"""Gate P: every correct implementation is exact on every probe, and wrong ones are not.

Wrong ones are edits of the NumPy page's source. Each must fail; what P cannot see in principle is listed with the
reason, and must pass: a list of blind spots that nobody checks is a guess.
"""

import functools
import types
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from harness import runners
from harness.gates import NAMES as STAGES
from harness.gates.probes import GAP, NAMES, build, judge, leads, product
from impls import numpy_attention, numpy_tiled
from impls.spec import GRADIENTS, AttentionConfig, weight_shapes

QWEN = AttentionConfig(1024, 16, 8, 128, 1e-6)
SMALL = AttentionConfig(40, 6, 3, 16, 1e-6)
SHAPES = {  # configuration, T, B
    "Qwen3-0.6B": (QWEN, 12, 1),
    "small": (SMALL, 5, 2),
    "long": (SMALL, 33, 1),
    "two positions": (AttentionConfig(56, 6, 3, 32, 1e-6), 2, 3),
    "multi-head": (AttentionConfig(96, 4, 4, 32, 1e-6), 33, 2),
    "multi-query, one position": (AttentionConfig(48, 5, 1, 64, 1e-6), 1, 2),
    "long heads": (AttentionConfig(64, 4, 2, 256, 1e-5), 12, 1),
    "short heads": (AttentionConfig(20, 6, 3, 8, 1e-6), 5, 2),
    "a mean over 96": (AttentionConfig(64, 2, 1, 96, 1e-6), 12, 2),
    "a mean that rounds": (AttentionConfig(64, 2, 1, 82, 1e-6), 5, 1),
    "large eps": (AttentionConfig(40, 6, 3, 16, 0.9), 7, 1),
}
every_probe = pytest.mark.parametrize("name", NAMES)

probe = functools.cache(build)


def failed(trace, given, expected=STAGES):
    return [finding for finding in judge(trace, given, expected) if not finding.match]


# ------------------------------------------------------------------------------------------------------ what must pass


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", [*runners.IMPLEMENTATIONS, *runners.REFERENCES])
def test_correct_implementations_are_exact(implementation, shape):
    config, T, B = SHAPES[shape]
    for name in NAMES:
        given = probe(name, config, T, B)
        trace = runners.load(implementation).run(given.weights, given.inputs, given.d_output, config)
        findings = judge(trace, given, runners.shown(implementation))
        assert {finding.stage for finding in findings} == set(runners.shown(implementation))
        assert not [finding for finding in findings if not finding.match], name


@pytest.mark.parametrize("T", [1, 2, 5, 12, 33])
@every_probe
def test_every_length(name, T):
    for config in (SMALL, AttentionConfig(64, 4, 2, 256, 1e-6), AttentionConfig(48, 5, 1, 64, 1e-6)):
        given = probe(name, config, T)
        assert not failed(run(numpy_attention, given, config), given)


# ------------------------------------------------------------------------------------------------------ what must fail


def tf32(x):
    """To the nearest number of 11 significant bits."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


FORMATS = {
    "tf32": tf32,
    "bf16": lambda x: x.astype(bfloat16).astype("f4"),
    "fp16": lambda x: x.astype("f2").astype("f4"),
}


def edited(*edits):
    """The NumPy page with (old, new) edits of its source, as a module; each `old` stands there once."""
    source = Path(numpy_attention.__file__).read_text(encoding="utf-8")
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    module = types.ModuleType("edited")
    module.__dict__.update(FORMATS)
    exec(compile(source, "edited", "exec"), module.__dict__)
    return module


def run(module, given, config):
    trace = {}

    def record(name, value):
        trace[name] = value
        return value

    with np.errstate(all="ignore"):
        _, cache = module.forward(given.weights, given.inputs, config, record)
        module.backward(given.d_output, cache, record)
    return trace


def seen(*edits):
    """Probe and stage of all that fails with these edits."""
    module, given = edited(*edits), [probe(name, SMALL, 12, 2) for name in NAMES]
    return {(each.name, finding.stage) for each in given for finding in failed(run(module, each, SMALL), each)}


# fmt: off
NORM_Q, NORM_K = (f'rms_norm({x}, weights["{x[0]}_norm.weight"], eps)' for x in ("q_BTNH", "k_BSKH"))
ROPE_Q, ROPE_K = "rope(qn_BTNH, cos_BTH, sin_BTH)", "rope(kn_BSKH, cos_BTH, sin_BTH)"
MEAN, SCALING = "np.mean(x * x, axis=-1, keepdims=True)", "return w_H * (x"
SCORES, SCORE = "(q_BNTH @ k_BNHS) * q_BTNH.shape[-1] ** -0.5", "scores(qr_BTNH, share(kr_BSKH, G))"
MASK, SUM = "np.tri(T, S, dtype=bool)", "e_BNTS.sum(axis=-1, keepdims=True)"
HEADS, MERGE = "mix(a_BNTS, share(v_BSKH, G))", 'merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0))'
JACOBIAN = "a * (d_a - np.sum(a * d_a, axis=-1, keepdims=True))"
NORM_BACKWARD = "r * (g - x_hat * np.mean(g * x_hat, axis=-1, keepdims=True))"

WRONG = {
    "norms swapped": [(NORM_Q, NORM_Q.replace("q_n", "k_n")), (NORM_K, NORM_K.replace("k_n", "q_n"))],
    "norm of k with q's weight": [(NORM_K, NORM_K.replace("k_n", "q_n"))],
    "norm skipped": [(NORM_Q, "q_BTNH")],
    "norm weight ignored": [(SCALING, "return (x")],
    "norm with 1 + w": [(SCALING, "return (1 + w_H) * (x")],
    "norm over the whole projection": [(MEAN, "np.mean(x * x, axis=(-2, -1), keepdims=True)")],
    "norm by the sum": [(MEAN, "np.sum(x * x, axis=-1, keepdims=True)")],
    "norm by n - 1": [(MEAN, "np.sum(x * x, axis=-1, keepdims=True) / (x.shape[-1] - 1)")],
    "layer norm": [(MEAN, "np.var(x, axis=-1, keepdims=True)")],
    "norms after rope": [
        (NORM_Q, ROPE_Q.replace("qn", "q")), (ROPE_Q, NORM_Q.replace("q_B", "qn_B")),
        (NORM_K, ROPE_K.replace("kn", "k")), (ROPE_K, NORM_K.replace("k_B", "kn_B")),
    ],
    "rope with negative sine": [("+ rotate_half(x) * sin", "- rotate_half(x) * sin")],
    "rope left out": [(ROPE_Q, "qn_BTNH"), (ROPE_K, "kn_BSKH")],
    "rope left out for k": [(ROPE_K, "kn_BSKH")],
    "rope in interleaved pairs": [
        ("x1, x2 = np.split(x, 2, axis=-1)", "return np.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)"),
    ],
    "rope one position late": [(ROPE_Q, "rope(qn_BTNH, np.roll(cos_BTH, 1, 1), np.roll(sin_BTH, 1, 1))")],
    "kv heads tiled": [("np.repeat(x_BSKH, G, axis=2)", "np.tile(x_BSKH, (1, 1, G, 1))")],
    "k heads tiled": [(SCORE, "scores(qr_BTNH, np.tile(kr_BSKH, (1, 1, G, 1)))")],
    "heads exchanged": [(HEADS, f"{HEADS}[:, :, [1, 0, *range(2, N)]]")],
    "heads reversed": [(HEADS, f"{HEADS}[:, :, ::-1]")],
    "heads split without swap": [("b_N).reshape(B, T, heads, -1)", "b_N).reshape(B, heads, T, -1).swapaxes(1, 2)")],
    "heads merged without swap": [("o_BTNH.reshape(B, T, N * H)", "o_BTNH.swapaxes(1, 2).reshape(B, T, N * H)")],
    "v projected with k's weight": [('(x_BTD, weights["v_proj.weight"], K,', '(x_BTD, weights["k_proj.weight"], K,')],
    "scale 1/8": [(SCORES, "(q_BNTH @ k_BNHS) * 64**-0.5")],
    "scale twice": [(SCORES, f"{SCORES} * q_BTNH.shape[-1] ** -0.5")],
    "scale off by 1e-6": [(SCORES, f"{SCORES} * (1 + 1e-6)")],
    "no mask": [(MASK, "np.ones((T, S), bool)")],
    "next key visible": [(MASK, "np.tri(T, S, 1, dtype=bool)")],
    "own key hidden": [(MASK, "(np.tri(T, S, -1, dtype=bool) | (np.arange(S) == 0))")],
    "mask inverted": [(MASK, "np.tri(T, S, dtype=bool).T")],
    "mask of 0 and 1": [("0, -np.inf)", "1, 0)")],
    "mask -10": [("0, -np.inf)", "0, -10)")],
    "mask -30": [("0, -np.inf)", "0, -30)")],
    "mask -1e4": [("0, -np.inf)", "0, -1e4)")],
    "future scores set to 0": [("s_BNTS + mask_TS", "np.where(mask_TS == 0, s_BNTS, 0)")],
    "softmax over queries": [(SUM, SUM.replace("-1", "-2"))],
    "softmax without its maximum": [("np.exp(z_BNTS - z_BNTS.max(axis=-1, keepdims=True))", "np.exp(z_BNTS)")],
    "softmax + 1": [(SUM, f"(1 + {SUM})")],
    "softmax + 1e-6": [(SUM, f"(1e-6 + {SUM})")],
    "scores in fp16": [(SCORE, f"fp16({SCORE})")],
    "scores in bf16": [(SCORE, f"bf16({SCORE})")],
    "heads in bf16": [(HEADS, f"bf16({HEADS})")],
    "output in fp16": [(MERGE, f"fp16({MERGE})")],
    "last position as the one before": [(MERGE, f"{MERGE}[:, [*range(x_BTD.shape[1] - 1), -2]]")],
    "batch rows exchanged": [(MERGE, f"{MERGE}[::-1]")],
    "jacobian without its rank-one term": [(JACOBIAN, "a * d_a")],
    "jacobian over queries": [(JACOBIAN, JACOBIAN.replace("-1", "-2"))],
    "group's gradient not summed": [(".sum(axis=3)", "[:, :, :, 0]")],
    "group's gradient averaged": [(".sum(axis=3)", ".mean(axis=3)")],
    "group's gradient of tiled heads": [("N // G, G, H).sum(axis=3)", "G, N // G, H).sum(axis=2)")],
    "gradient of V from a row of P": [("a_BNTS.transpose(0, 1, 3, 2) @ d_o_BNTH", "a_BNTS @ d_o_BNTH")],
    "W_V's path lost": [('project_backward(d_v, weights["v_proj.weight"])', "0")],
    "gradient of zeros": [('observe("d_hidden_states", d_x)', 'observe("d_hidden_states", 0 * d_x)')],
    "weights' gradients of the batch's first row": [
        ("d_y.reshape(B * T, -1).T @ x.reshape(B * T, -1)", "d_y[0].reshape(T, -1).T @ x[0].reshape(T, -1)"),
    ],
}
OPERANDS = {
    "X in X W": ("x_BTD @ w_ND.T", "?(x_BTD) @ w_ND.T"),
    "W in X W": ("x_BTD @ w_ND.T", "x_BTD @ ?(w_ND).T"),
    "Q in Q K": ("(q_BNTH @ k_BNHS)", "(?(q_BNTH) @ k_BNHS)"),
    "K in Q K": ("(q_BNTH @ k_BNHS)", "(q_BNTH @ ?(k_BNHS))"),
    "V in A V": ("(a_BNTS @ v_BSNH", "(a_BNTS @ ?(v_BSNH)"),
    "O in O W_O": ("o_BTNH.reshape(B, T, N * H) @ w_DN.T", "?(o_BTNH).reshape(B, T, N * H) @ w_DN.T"),
    "W_O in O W_O": ("reshape(B, T, N * H) @ w_DN.T", "reshape(B, T, N * H) @ ?(w_DN).T"),
    "dY in dY W_O": ("(d_y_BTD @ w_DN)", "(?(d_y_BTD) @ w_DN)"),
    "W_O in dY W_O": ("(d_y_BTD @ w_DN)", "(d_y_BTD @ ?(w_DN))"),
    "dO in dO V": ("d_o_BNTH @ v_BSNH", "?(d_o_BNTH) @ v_BSNH"),
    "V in dO V": ("d_o_BNTH @ v_BSNH", "d_o_BNTH @ ?(v_BSNH)"),
    "dO in A dO": ("(0, 1, 3, 2) @ d_o_BNTH", "(0, 1, 3, 2) @ ?(d_o_BNTH)"),
    "dV in dV W_V": ("d_BTNH.reshape(B, T, -1) @ w_ND", "?(d_BTNH).reshape(B, T, -1) @ w_ND"),
    "W_V in dV W_V": ("d_BTNH.reshape(B, T, -1) @ w_ND", "d_BTNH.reshape(B, T, -1) @ ?(w_ND)"),
    "dY in a weight's gradient": ("d_y.reshape(B * T, -1).T @ x", "?(d_y).reshape(B * T, -1).T @ x"),
    "X in a weight's gradient": ("-1).T @ x.reshape(B * T, -1)", "-1).T @ ?(x).reshape(B * T, -1)"),
}
UNSEEN = {  # edits, and why an exact layer gives the same
    "softmax not normalised": [(f"e_BNTS / {SUM}", "e_BNTS")],  # the sum is 1
    "eps 1e-5": [("eps = config.rms_norm_eps", "eps = 1e-5")],  # less than half an ulp of the mean square
    "no eps": [("eps = config.rms_norm_eps", "eps = 0")],
    "mask -1e7": [("0, -np.inf)", "0, -1e7)")],  # no score comes near: not a bug here
    "probs in bf16": [('observe("probs", softmax(m_BNTS))', 'observe("probs", bf16(softmax(m_BNTS)))')],  # 0 and 1
    "rope tables in bf16": [(ROPE_Q, "rope(qn_BTNH, bf16(cos_BTH), bf16(sin_BTH))")],  # 0 and ±1
    "jacobian's diagonal alone": [(JACOBIAN, "a * (1 - a) * d_a")],  # 0 as a whole, 0 as its diagonal
    "norm's backward without its mean": [(NORM_BACKWARD, "r * g")],  # from here on, zeros go in
    "norm's backward without its weight": [("w_H * d_y", "d_y")],
    "rope's backward not transposed": [("- rotate_half(d * sin", "+ rotate_half(d * sin")],
    "scores' backward without scale": [("scale = q_BTNH.shape[-1] ** -0.5", "scale = 1")],
    "q's path lost": [('d_x = project_backward(d_q, weights["q_proj.weight"])', "d_x = 0")],
    "norm weight's gradient over one head": [("axis=(0, 1, 2))", "axis=(0, 1))[0]")],
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_fail(name):
    assert seen(*WRONG[name])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("operand", OPERANDS)
def test_rounded_operands_fail(operand, name):
    old, new = OPERANDS[operand]
    assert seen((old, new.replace("?", name)))


@pytest.mark.parametrize("name", UNSEEN)
def test_what_probes_cannot_see(name):
    assert not seen(*UNSEEN[name])


def test_each_probe_sees_what_it_is_for():
    old, new = OPERANDS["dY in dY W_O"]
    assert {name for name, _ in seen((old, new.replace("?", "tf32")))} == {"cotangent"}
    old, new = OPERANDS["V in A V"]
    assert {name for name, _ in seen((old, new.replace("?", "tf32")))} == {"significand"}
    assert "lookup" not in {name for name, _ in seen(*WRONG["mask -1e4"])}
    assert ("strong", "output") in seen(*WRONG["mask -1e4"]) & seen(*WRONG["scores in fp16"])
    assert ("lookup", "output") in seen(*WRONG["mask -30"])


# ------------------------------------------------------------------------------------------------------------ the judge


@pytest.mark.parametrize("fault", ["missing", "shape", "not finite", "unknown"])
def test_what_cannot_be_compared_fails(fault):
    given = probe("lookup", SMALL, 5, 2)
    trace = dict(given.expected)
    value = trace.pop("heads")
    if fault == "unknown":
        trace |= {"heads": value, "tails": value}
    elif fault != "missing":
        trace["heads"] = value[:1] if fault == "shape" else np.where(value == value.max(), np.nan, value)
    assert [finding.measure for finding in failed(trace, given)] == [fault]


@every_probe
@pytest.mark.parametrize("stage", STAGES)
def test_last_bit_of_any_one_element_fails(stage, name):
    given = probe(name, SMALL, 5, 2)
    trace = {key: value.astype(np.float32) for key, value in given.expected.items()}
    assert not failed(trace, given)
    index = tuple(size - 1 for size in trace[stage].shape)
    trace[stage][index] = np.nextafter(trace[stage][index], np.float32(np.inf)) if stage != "masked_scores" else 0
    (finding,) = failed(trace, given)
    assert (finding.stage, finding.where) == (stage, index) and finding.value > finding.limit == 0


def test_an_output_alone_is_judged():
    given = probe("lookup", SMALL, 5, 2)
    assert [finding.stage for finding in judge({"output": given.expected["output"]}, given, ["output"])] == ["output"]
    assert failed({"output": -given.expected["output"]}, given, ["output"])


def late(given, tile, monkeypatch):
    """The trace of a tiled kernel of which e^0 is 1 − 2^(−24), as XLA's is, so that it does not divide by one."""
    exp_minus = numpy_tiled.exp_minus
    monkeypatch.setattr(numpy_tiled, "exp_minus", lambda s, m: exp_minus(s, m) * np.float32(1 - 2**-24))
    monkeypatch.setattr(numpy_tiled, "KEYS", tile)
    monkeypatch.setattr(numpy_tiled, "scratch_for", lambda q: np.empty(128 * q.shape[1] * tile, q.dtype))
    weights, inputs = given.weights, given.inputs
    return runners.run_numpy(weights, inputs, given.d_output, config_of(given), page=numpy_tiled)


def config_of(given):
    (NH, D), KH = given.weights["q_proj.weight"].shape, len(given.weights["k_proj.weight"])
    H = len(given.weights["q_norm.weight"])
    return AttentionConfig(D, NH // H, KH // H, H, 1e-6)


@pytest.mark.parametrize("tile", [1, 4, 256])
@pytest.mark.parametrize("shape", ["Qwen3-0.6B", "small", "a mean over 96"])
@every_probe
def test_a_kernel_may_divide_by_the_sum_at_the_end(name, shape, tile, monkeypatch):
    """Seen in JAX: heads 7.9e-8 off, and gradients of 1e-3 to 0.5 where 0 is due; with `probs`, 0 is due."""
    given = probe(name, *SHAPES[shape])
    trace = late(given, tile, monkeypatch)
    assert not failed(trace, given, ["output"])
    assert max(used(trace, given)) < 0.25 and failed({**trace, "probs": given.expected["probs"]}, given)


def used(trace, given):
    return [finding.value / finding.limit for finding in judge(trace, given, []) if finding.value]


@pytest.mark.parametrize("name, operand", [("significand", "v_proj.weight"), ("cotangent", "d_output")])
def test_rounded_operands_fail_there_too(name, operand):
    """Of an output, or a gradient, alone: TF32 keeps 11 bits, and 20 are seen."""
    given = probe(name, QWEN, 12)
    entry = "output" if name == "significand" else "d_o_proj.weight"
    trace = {entry: given.expected[entry] * (1 + 2.0**-17)}
    assert failed(trace, given, []) and given.fused[entry] < 2**-17 < 2**-12, operand


@every_probe
def test_only_a_kernel_without_probabilities_may(name):
    given = probe(name, QWEN, 12)
    assert set(given.fused) == {"heads", "output", *GRADIENTS} - {
        "d_heads", "d_probs", "d_masked_scores", "d_scores"
    }  # fmt: skip
    assert given.fused["heads"] < 2e-6
    trace = dict(given.expected, d_v_proj=given.expected["d_v_proj"] * (1 + 1e-7))
    assert [finding.stage for finding in failed(trace, given)] == ["d_v_proj"]
    del trace["probs"]
    assert not failed(trace, given, ["d_v_proj"])


# ---------------------------------------------------------------------------------------------------------- the builder


@pytest.mark.parametrize("shape", SHAPES)
@every_probe
def test_scores_lead_by_the_gap(name, shape):
    """From the expected q_rope and k_rope, in a loop of its own."""
    config, T, B = SHAPES[shape]
    given = probe(name, config, T, B)
    q, k = given.expected["q_rope"], np.repeat(given.expected["k_rope"], config.num_key_value_groups, axis=2)
    for b, n, t in np.ndindex(given.target.shape):
        scores = k[b, :, n] @ q[b, t, n] / np.sqrt(config.head_dim)
        best = scores[given.target[b, n, t]]
        assert given.target[b, n, t] <= t
        assert np.sum(scores[: t + 1] > best - GAP) == 1
        if t + 1 < T:
            assert scores[t + 1 :].max() > best + (1e4 if name == "strong" else 0) + GAP


def test_leads():
    scores = np.array([[5.0, 9.0, 0.0], [1.0, 4.0, 10.0], [3.0, 2.0, 7.0]])[None, None]
    target, lead, future = (x[0, 0].tolist() for x in leads(scores))
    assert (target, lead, future) == ([0, 1, 2], [np.inf, 3.0, 4.0], [4.0, 6.0, np.inf])


@every_probe
def test_nothing_depends_on_the_order_of_summation(name):
    """One term after the other, in random orders, in float32."""
    given = probe(name, SMALL, 12, 2)
    random = np.random.default_rng(0)
    x, d_y, answer = given.inputs["hidden_states"], given.d_output, given.expected
    products = {
        **{f"{path}_proj": (x, given.weights[f"{path}_proj.weight"].T) for path in "qkv"},
        "output": (answer["heads"], given.weights["o_proj.weight"].T),
        "d_heads": (d_y, given.weights["o_proj.weight"]),
        "d_hidden_states": (answer["d_v_proj"], given.weights["v_proj.weight"]),
        "d_v_proj.weight": (answer["d_v_proj"].reshape(24, -1).T[None], x.reshape(24, -1)),
        "d_o_proj.weight": (d_y.reshape(24, -1).T[None], answer["heads"].reshape(24, -1)),
    }
    for stage, (a, b) in products.items():
        a = a.reshape(*a.shape[:2], -1).astype(np.float32)
        for _ in range(3):
            order = random.permutation(len(b))
            total = np.zeros((*a.shape[:2], b.shape[1]), np.float32)
            for i in order:
                total += a[..., i, None] * b[i]
            np.testing.assert_array_equal(total.ravel(), answer[stage].ravel(), stage)


def test_a_sum_that_could_round_is_refused():
    big, bit = np.array([[2.0**24 - 1, 1]]), 1 + 2.0**-23
    assert product(big, np.ones((2, 1))) == 2**24
    for a, b in (
        (big, [[1], [2]]),
        (big, [[-1], [2]]),  # itself exact, but not in every order of more terms
        ([[bit]], [[bit]]),
        ([[1.0, 2.0**-24]], [[1], [1]]),
    ):
        with pytest.raises(ValueError, match="would round"):
            product(np.array(a), np.array(b, float))
    assert product(np.array([[bit, 0]]), np.array([[4.0], [bit]])) == 4 * bit


@every_probe
def test_what_is_given_hides_nothing(name):
    given = probe(name, QWEN, 12)
    assert {key: value.shape for key, value in given.weights.items()} == weight_shapes(QWEN)
    arrays = [*given.weights.values(), *given.inputs.values(), given.d_output]
    assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in arrays)
    q, k, cos = given.weights["q_norm.weight"], given.weights["k_norm.weight"], given.inputs["cos"][0]
    assert len(set(q)) > 5 and len(set(k)) > 5 and np.mean(q == k) < 0.2
    assert len(np.unique(cos, axis=0)) == 12 and len(np.unique(cos[:, :64], axis=1).T) > 50
    for stage in ("d_heads", "d_probs", "d_v_proj", "d_hidden_states", "d_v_proj.weight", "d_o_proj.weight"):
        assert given.expected[stage].any()
    if name in ("lookup", "strong"):
        assert given.expected["output"].any(axis=0).mean() > 0.9
        assert (np.unique(given.target) == np.arange(12)).all()


def test_significands_are_full():
    def bits(x):
        mantissa = np.frexp(x[x != 0])[0]
        return next(b for b in range(60) if not (mantissa * 2.0**b % 1).any())

    given = probe("significand", QWEN, 12)
    assert {bits(given.weights[f"{each}_proj.weight"]) for each in "qkvo"} == {24}
    assert bits(given.inputs["hidden_states"]) == bits(given.expected["v_proj"]) == 24
    assert bits(given.expected["q_norm"]) == bits(given.expected["k_norm"]) == 12
    assert bits(probe("cotangent", QWEN, 12).d_output) == 24


@every_probe
def test_the_same_probe_every_time(name):
    one, two = build(name, SMALL, 5), build(name, SMALL, 5)
    for mine, theirs in zip(
        (one.weights, one.inputs, one.expected), (two.weights, two.inputs, two.expected), strict=True
    ):
        for key in mine:
            np.testing.assert_array_equal(mine[key], theirs[key])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("look", SMALL, 5), "unknown"),
        (("lookup", SMALL, 20, 2), "hidden size above 40"),
        (("lookup", AttentionConfig(64, 2, 1, 2, 1e-6), 33), "take fewer positions"),
    ],
)
def test_what_cannot_be_built(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments)
