"""Left-padded batches: a sequence answers as it would alone, and what padding answers is nobody's business."""

import numpy as np
import pytest
from conftest import Case, numpy_run

from harness import bugs
from harness.case import BadInput, additive_mask, check_padding, make_inputs, seeded_case
from harness.compare import main
from harness.export import open_case
from harness.gates import NAMES, ROUNDING, local, seen_by, structure, tolerance
from harness.runners import CACHED, FUSED, IMPLEMENTATIONS, load, shown
from impls import numpy_attention
from impls.spec import AttentionConfig

CONFIG = AttentionConfig(40, 6, 3, 16, 1e-6)
PADDING, T = (0, 3, 6), 7
EVERY = [*IMPLEMENTATIONS, *FUSED, *CACHED]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Three sequences of seven, four and one tokens, in one batch of seven."""
    return seeded_case(tmp_path_factory.mktemp("weights"), config=CONFIG, seq_len=T, batch=3, left_pad=PADDING)


@pytest.fixture(scope="module")
def padded(case):
    return Case(*case.arrays("stress", "model", "float64"), CONFIG)


@pytest.fixture(scope="module")
def truth(padded):
    return load("hf-eager").run(*padded)


def test_mask_is_the_one_that_hugging_face_adds():
    low = np.finfo(np.float32).min
    (mask,) = additive_mask(np.array([[0, 1, 1]], np.float32))
    assert mask.tolist() == [[[low, low, low], [low, 0, low], [low, 0, 0]]]
    assert additive_mask(np.zeros((1, 2), np.float16)).min() == np.finfo(np.float16).min
    assert additive_mask(np.zeros((1, 2))).min() == low  # what computes in float32 inside can hold it


def test_inputs_count_positions_from_the_first_token_and_take_no_gradient_from_padding():
    alone, among = (make_inputs(CONFIG, 1e6, 3, T, 0, padding)["chapter"] for padding in ((), PADDING))
    for sequence, padding in enumerate(PADDING):
        for table in ("cos", "sin"):
            assert np.array_equal(among[table][sequence, padding:], alone[table][0, : T - padding])
        assert not among["d_output"][sequence, :padding].any() and among["d_output"][sequence, padding:].all()
        assert among["attention_mask"][sequence].tolist() == [0] * padding + [1] * (T - padding)
    assert "attention_mask" not in alone


@pytest.mark.parametrize("name", ["hf-eager", *sorted({*EVERY} - {"jax-dpa"})])  # which computes in float32 alone
def test_a_sequence_answers_as_it_would_alone(name, padded):
    run = load(name).run
    trace = run(*padded)
    for sequence, padding in enumerate(PADDING):
        one = slice(sequence, sequence + 1)
        inputs = {key: value[one, padding:] for key, value in padded.inputs.items() if key != "attention_mask"}
        alone = run(padded.weights, inputs, padded.d_output[one, padding:], CONFIG)
        for entry in {"output", "heads", "d_hidden_states"} & trace.keys():
            np.testing.assert_allclose(
                trace[entry][one, padding:], alone[entry], rtol=0, atol=1e-12 * np.max(alone[entry])
            )


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, dtype) for n in EVERY for dtype in ROUNDING if n != "jax-dpa" or dtype == "float32"]
)
def test_every_gate_holds(name, dtype, case, padded, truth):
    if dtype == "float64":
        trace = load(name).run(*padded)
        findings = structure.judge(trace, truth, padded.weights, padded.inputs, CONFIG, shown(name))
    else:
        short = Case(*case.rounded(dtype).arrays("stress", "model", dtype), CONFIG)
        exact = Case(*case.rounded(dtype).arrays("stress", "model", "float64"), CONFIG)
        page = numpy_attention.forward, numpy_attention.backward
        noise = tolerance.sample(*page, *exact, ROUNDING[dtype], fused=True)
        layer, trace = load("hf-eager").run(*exact), load(name).run(*short)
        lost = local.beyond(layer, dtype, seen_by(exact.inputs))
        trace = {entry: value for entry, value in trace.items() if entry not in lost}
        factors = {key: local.factor(value) for key, value in exact.weights.items()}
        findings = local.judge(trace, factors, exact.inputs, exact.d_output, CONFIG, ROUNDING[dtype])
        due = set(shown(name)) - set(lost)
        findings += tolerance.judge(trace, layer, noise, due, False, name in FUSED, dtype)
    assert [finding for finding in findings if not finding.match] == []
    assert {finding.stage for finding in findings} >= {"output", "v_proj"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('mask_TS = inputs.get("attention_mask", causal_mask(s_BNTS))', "mask_TS = causal_mask(s_BNTS)"),
        ("s_BNTS + mask_TS", "s_BNTS + np.where(mask_TS < 0, -30, 0)"),
        ("s_BNTS + mask_TS", "s_BNTS + (mask_TS == 0)"),
        ("s_BNTS + mask_TS", "s_BNTS + np.maximum(mask_TS, causal_mask(s_BNTS)) * 0 + mask_TS[:1]"),
    ],
    ids=["padding not masked", "too weak a mask", "boolean mask added", "the first sequence's mask for all"],
)
def test_mistakes_with_a_mask_are_named_where_they_are(old, new, padded, truth):
    bug = bugs.Bug("padding", "mask", "padding", "masked_scores", old, new)
    module, trace = bugs.variant("numpy", bug), {}

    def record(name, value):
        trace[name] = value
        return value

    with np.errstate(all="ignore"):
        module.backward(padded.d_output, module.forward(padded.weights, padded.inputs, CONFIG, record)[1], record)
    findings = structure.judge(trace, truth, padded.weights, padded.inputs, CONFIG, NAMES)
    failed = {finding.stage for finding in findings if not finding.match}
    assert min(failed, key=NAMES.index) == "masked_scores"
    factors = {key: local.factor(value) for key, value in padded.weights.items()}
    found = local.judge(trace, factors, padded.inputs, padded.d_output, CONFIG, ROUNDING["float64"])
    assert "masked_scores" in {finding.stage for finding in found if not finding.match}


def test_padding_may_answer_what_it_likes(padded, truth):
    """NaN, as of a softmax over −∞ alone; but a gradient may not come from it."""
    trace = numpy_run(*padded)
    hidden = ~seen_by(padded.inputs).any(axis=-1)[:, 0]  # [B,T]
    assert hidden.sum() == sum(PADDING)
    for name in ("heads", "output"):
        trace[name][hidden] = np.nan
    for name in ("masked_scores", "probs"):
        trace[name].swapaxes(1, 2)[hidden] = np.nan

    def failed():
        findings = structure.judge(trace, truth, padded.weights, padded.inputs, CONFIG, NAMES)
        return [finding.stage for finding in findings if not finding.match]

    assert not failed()
    trace["heads"][0, 0, 0, 0] += 1e-9
    assert failed() == ["heads"]


def test_unusable_masks():
    inputs = make_inputs(CONFIG, 1e6, 3, T, 0, PADDING)["chapter"]
    check_padding(inputs, "here")
    for mask, message in (
        (inputs["attention_mask"] * 2, "1 for a token"),
        (inputs["attention_mask"] * 0, "a token in"),
    ):
        with pytest.raises(BadInput, match=message):
            check_padding({**inputs, "attention_mask": mask}, "here")
    with pytest.raises(BadInput, match="d_output is not 0 at padding"):
        check_padding({**inputs, "d_output": np.ones_like(inputs["d_output"])}, "here")


def test_files_hold_it(tmp_path):
    made = open_case(directory=tmp_path, seq_len=5, left_pad=[2, 0])
    assert made.paths["chapter"].name == "seeded-0.b2t5p2-0.chapter.safetensors"
    assert made.made["stress"]["left_pad"] == [2, 0] and made.seen("stress").shape == (2, 1, 5, 5)
    assert open_case(directory=tmp_path, seq_len=5, left_pad=[0, 0]).seen("chapter") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--left-pad", "0", "12"], "--left-pad is 0 12; of 12 tokens 0 to 11 can be padding"),
        (["--left-pad", "-1"], "--left-pad is -1; of 12 tokens 0 to 11 can be padding"),
        (
            ["--left-pad", "1", "2", "--batch", "3"],
            "--left-pad has 2 numbers and --batch is 3; give one for each sequence",
        ),
    ],
)
def test_what_the_command_refuses(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
