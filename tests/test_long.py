"""Sequences too long for a score matrix: judged by rows, with the same verdict."""

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from harness import compare, document, judging, long
from harness.case import BadInput, seeded_case
from harness.files import mapped
from harness.gates import tolerance
from harness.judging import LAYER, OWN, TRUTH
from harness.report import console
from harness.runners import PROBES, Loaded, Setting, given, load, run_numpy, shown, store
from harness.workers import Ran
from impls import numpy_attention, numpy_tiled
from impls.spec import AttentionConfig, weight_shapes

CONFIG = AttentionConfig(40, 6, 3, 16, 1e-6)
T = 300
SETTING = Setting("chapter", "model", "float32")
EXACT = SETTING._replace(dtype="float64")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return long.shortened(seeded_case(tmp_path_factory.mktemp("weights"), config=CONFIG, seq_len=T))


def run(case, settings):
    """The trace of every implementation in these settings, by name and setting."""
    names = [LAYER, *(name for name in long.CAN if name != "hf-sdpa")]
    chosen = [(name, setting) for setting in settings for name in names]
    at = long.rows(T)
    return {
        (name, setting): long.runner(name, load(name), at)(*case.arrays(*setting), CONFIG) for name, setting in chosen
    }


@pytest.fixture(scope="module")
def traces(case):
    """As beyond `BACKWARD` tokens: of the forward alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long, "BACKWARD", T - 1)
        all_traces = run(case, [EXACT, SETTING])
    return {key: trace for key, trace in all_traces.items() if key[0] == LAYER or key[1] == SETTING}


@pytest.fixture(scope="module")
def both(case):
    """Forward and backward, in both dtypes."""
    return run(case, [EXACT, SETTING])


def judged(case, traces, tmp_path, names, settings=(SETTING,)):
    """What the judge finds, by name and what was held against what (in float64: "exact")."""
    with ThreadPoolExecutor(1) as pool:
        judge = long.RowJudging(case, names, settings, pool, pool, tmp_path)
        for index, ((name, setting), trace) in enumerate(traces.items()):
            judge.land(name, setting, store(trace, tmp_path / f"{index}.safetensors", None))
        results = judge.finish()
    first = {}
    for each in results:
        name, against, setting = each.comparison
        if against in (OWN, TRUTH, LAYER):
            exact = setting == EXACT and name != LAYER
            first.setdefault((name, "exact" if exact else against), each)
    return first


def failed(result):
    return [(finding.stage, finding.measure) for finding in result.findings if not finding.match]


def test_sampled_positions():
    at = long.rows(40_960)
    assert at[0] == 0 and at[-1] == 40_959 and len(at) > 50 and np.all(np.diff(at) > 0)
    assert np.sum(at < 1000) > 15 and np.sum(at > 10_000) > 15
    assert long.rows(1).tolist() == [0]


def test_groups_of_heads_add_up_to_the_layer(case):
    weights, inputs, d_output = case.arrays(*EXACT)
    whole = load("hf-eager").run(weights, inputs, d_output, CONFIG)["output"]
    parts = [
        load("hf-eager").run(own, inputs, d_output, group)["output"] for own, group in long.groups(weights, CONFIG)
    ]
    assert len(parts) == 3
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=0, atol=1e-13)


def test_the_truth_is_the_explicit_layer_at_every_position(case, traces):
    whole = load("hf-eager").run(*case.arrays(*EXACT), CONFIG)
    truth = traces[LAYER, EXACT]
    np.testing.assert_allclose(truth["output"], whole["output"], rtol=0, atol=1e-13)
    np.testing.assert_allclose(truth["rows.q_rope"], whole["q_rope"][:, long.rows(T)], rtol=0, atol=1e-13)
    assert truth["eager.output"].shape == (1, long.PREFIX, 40)


def test_traces_are_mapped_and_not_read(case, traces, tmp_path):
    trace = traces["jax-tiled", SETTING]
    read = mapped(store(trace, tmp_path / "trace.safetensors", None)[""])
    assert read.keys() == trace.keys()
    for name, value in read.items():
        assert isinstance(value.base, np.memmap) and not value.flags.writeable
        np.testing.assert_array_equal(value, trace[name])


def test_little_is_held_while_rows_are_sampled():
    """Beside what it is given: less than one float64 copy of the hidden states."""
    T, config = 8192, AttentionConfig(512, 2, 2, 2, 1e-6)
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape) for name, shape in weight_shapes(config).items()}
    tables = dict.fromkeys(("cos", "sin"), np.ones((1, T, 2)))
    inputs = {"hidden_states": rng.standard_normal((1, T, 512), np.float32), **tables}
    tracemalloc.start()
    long.sampled(weights, inputs, config, long.rows(T)[:4])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < T * 512 * 8


def test_sigma_is_the_whole_noise_models(case):
    at = long.rows(T)
    weights, inputs, d_output = case.arrays(*EXACT)
    page = numpy_attention.forward, numpy_attention.backward
    whole = tolerance.sample(*page, weights, inputs, d_output, CONFIG)
    sampled = long.sampled(weights, inputs, CONFIG, at)
    for name in ("heads", "output"):
        mine, theirs = sampled.spreads[name].sigma, whole.spreads[name].sigma[:, at]
        assert np.sqrt(np.mean(mine**2) / np.mean(theirs**2)) == pytest.approx(1, abs=0.05)
    assert sampled.spreads["output"].samples == 8


def test_correct_implementations_hold(case, traces, tmp_path):
    results = judged(case, traces, tmp_path, long.CAN)
    assert sum(bool(result.findings) for result in results.values()) == 1 + 3 * len(long.CAN)
    assert not [(key, failed(result), result.not_checked) for key, result in results.items() if failed(result)]
    assert {finding.stage for finding in results["jax-tiled", OWN].findings} == set(long.FORWARD)
    assert {finding.measure for finding in results["torch-sdpa", LAYER].findings} == {
        "rms",
        "max/sigma",
        "max/sigma of a position",
    }
    assert [finding.measure for finding in results[LAYER, TRUTH].findings] == ["relative"] * 3


def changed(traces, name, entry, index, factor):
    trace = {key: value.copy() for key, value in traces[name, SETTING].items()}
    trace[entry][index] *= factor
    return {**traces, (name, SETTING): trace}


def test_one_wrong_token_that_was_not_sampled_is_found(case, traces, tmp_path):
    hidden = next(t for t in range(100, T) if t not in long.rows(T))
    wrong = changed(traces, "numpy-tiled", "output", (0, hidden), 1 + 1e-4)
    result = judged(case, wrong, tmp_path, ["numpy-tiled"])["numpy-tiled", TRUTH]
    assert failed(result) == [("output", "max/sigma of a position")]
    assert result.findings[-1].where == (0, hidden)


def test_a_wrong_stage_at_a_sampled_position_is_certified_so(case, traces, tmp_path):
    for entry, factor in (("rows.heads", 1 + 1e-3), ("rows.k_norm", 1 + 1e-5), ("rows.q_rope", 1 + 2e-5)):
        wrong = changed(traces, "jax-tiled", entry, (0, 20), factor)
        result = judged(case, wrong, tmp_path, ["jax-tiled"])["jax-tiled", OWN]
        assert entry.removeprefix("rows.") in {stage for stage, _ in failed(result)}


def test_a_key_that_is_lost_in_the_middle_is_found(case, traces, tmp_path):
    """The heads are certified from all of its own keys."""
    wrong = changed(traces, "torch-sdpa", "v_proj", (0, 57), 0)
    assert ("heads", "bound") in failed(judged(case, wrong, tmp_path, ["torch-sdpa"])["torch-sdpa", OWN])


def test_a_truth_that_is_not_explicit_judges_nobody(case, traces, tmp_path):
    truth = {key: value.copy() for key, value in traces[LAYER, EXACT].items()}
    truth["rows.output"][0, 30] *= 1 + 1e-9
    results = judged(case, {**traces, (LAYER, EXACT): truth}, tmp_path, ["torch-sdpa"])
    assert failed(results[LAYER, TRUTH]) == [("output", "relative")]
    assert results["torch-sdpa", TRUTH].not_checked == "the float64 truth is not what the explicit equations give"


ENDS = {"output", "d_hidden_states", *(f"d_{name}" for name in weight_shapes(CONFIG))}


def test_correct_implementations_hold_backward(case, both, tmp_path):
    results = judged(case, both, tmp_path, long.CAN, [EXACT, SETTING])
    assert not [(key, failed(result)) for key, result in results.items() if failed(result)]
    for name in ("numpy-tiled", "jax-tiled", "torch-sdpa"):
        assert {finding.stage for finding in results[name, "exact"].findings} == ENDS
        assert {finding.stage for finding in results[name, OWN].findings} == set(shown(name))
    assert {finding.stage for finding in results["hf-sdpa", OWN].findings} == set(shown("hf-sdpa"))
    assert {finding.stage for finding in results[LAYER, TRUTH].findings} == {"heads", *ENDS}


BUGS = {  # what the first wrong gradient is, and a line of numpy_tiled.py with the mistake that makes it so
    "d_heads": ("partial(merge_backward, w_DN=w_o,", "partial(merge_backward, w_DN=np.roll(w_o, 1, axis=1),"),
    "d_v_proj": ("d_v_SH[keys] += p_RC.T", "d_v_SH[keys] = p_RC.T"),
    "d_q_rope": ("d_p_RC -= delta_R1", "d_p_RC -= 0.999 * delta_R1"),
    "d_k_rope": ("+= d_s_RC.T @ q_RH ", "+= d_s_RC.T @ q_RH * scale(q_TGH) "),
    "d_q_norm": ("rope_backward, (N, H), d_qr, cos, sin", "rope_backward, (N, H), d_qr, cos, -sin"),
    "d_k_norm": ("rope_backward, (K, H), d_kr, cos, sin", "rope_backward, (K, H), d_kr, sin, cos"),
    "d_q_proj": ("w_H=w_qn, eps=eps), (N, H), d_qn", "w_H=w_qn, eps=1e-3), (N, H), d_qn"),
    "d_k_proj": ("w_H=w_kn, eps=eps), (K, H), d_kn", "w_H=w_qn, eps=eps), (K, H), d_kn"),
    "d_hidden_states": (" + project_backward(d_v, w_v)", ""),
    "d_v_proj.weight": ('"v_proj": (d_v, x)', '"v_proj": (d_v, np.roll(x, 1, axis=1))'),
    "d_q_norm.weight": ('("d_q_norm.weight", d_w_qn)', '("d_q_norm.weight", d_w_qn / 2)'),
    "d_o_proj.weight": ('"o_proj": (d_y_BTD, o)', '"o_proj": (d_y_BTD, 1.001 * o)'),
}


@pytest.mark.parametrize("stage", BUGS)
def test_a_wrong_gradient_is_named(case, both, tmp_path, stage):
    source, (right, wrong) = Path(numpy_tiled.__file__).read_text(), BUGS[stage]
    assert source.count(right) == 1
    module = ModuleType("numpy_tiled with a bug")
    exec(source.replace(right, wrong), module.__dict__)
    page = Loaded(partial(run_numpy, page=module), None)
    planted = {
        ("numpy-tiled", setting): long.runner("numpy-tiled", page, long.rows(T))(*case.arrays(*setting), CONFIG)
        for setting in (EXACT, SETTING)
    }
    results = judged(case, both | planted, tmp_path, ["numpy-tiled"], [EXACT, SETTING])
    verdict = judging.verdict("numpy-tiled", list(results.values()), SETTING, None, CONFIG.head_dim)
    assert verdict["first_divergence"]["stage"] == stage
    assert stage in {name for name, _ in failed(results["numpy-tiled", OWN])}  # from its own inputs
    assert failed(results["numpy-tiled", "exact"])  # and end to end


def test_a_wrong_place_is_said_as_one_of_the_layer(case, both, tmp_path):
    """Not as one among the sampled positions, or of a group of heads."""
    row = 40
    at = (0, int(long.rows(T)[row]), 5, 3)
    wrong = changed(both, "numpy-tiled", "d_q_rope", at[:3], 1.5)
    findings = judged(case, wrong, tmp_path, ["numpy-tiled"], [EXACT, SETTING])["numpy-tiled", OWN].findings
    assert {finding.where[:3] for finding in findings if not finding.match and finding.stage == "d_q_rope"} == {at[:3]}


def test_command(tmp_path, monkeypatch, capsys):
    seeded_case(tmp_path / "case", config=CONFIG)
    monkeypatch.setattr(long, "LONGEST_SQUARE", 6 * 256**2)
    monkeypatch.chdir(tmp_path)
    chosen = ["--weights", "case/seeded-0.safetensors", "--seq-len", "260"]
    names = ["numpy-tiled", "jax-tiled", "torch-sdpa"]
    assert compare.main([*chosen, "--impl", *names]) == 0
    written = json.loads((tmp_path / "artifacts" / "attention_check.json").read_text())
    assert written["match"] and list(written["frameworks"]) == ["hf-sdpa", *names]
    assert {row["gate"] for row in written["checks"]} >= {"structure", "local", "tolerance", "probes"}
    said = " ".join(capsys.readouterr().out.split())
    assert "hf-sdpa, numpy-tiled, jax-tiled and torch-sdpa: only rounding differs, forward and backward (" in said
    assert "numpy-tiled, jax-tiled and torch-sdpa: local: stages and their gradients away from the" in said
    assert "hf-sdpa: structure: in float64 it is what the others are held to" in said
    assert "was not asked for" not in said
    assert (tmp_path / "artifacts" / "report.html").stat().st_size > 10_000
    for arguments, message in {
        ("--impl", "numpy"): "error: --impl numpy: it holds 0 GB of scores at --seq-len 260; these do not:",
        ("--impl", "jax-tiled", "--dtype", "bfloat16"): "error: --dtype bfloat16: at --seq-len 260 a run is judged in",
        ("--impl", "jax-tiled", "--left-pad", "3"): "error: --left-pad: a padded batch is judged up to 256 tokens",
    }.items():
        assert compare.main([*chosen, *arguments]) == 2
        assert capsys.readouterr().err.startswith(message)


def test_what_a_forward_alone_leaves_open_is_said(case, traces, tmp_path, monkeypatch):
    """Beyond `BACKWARD` tokens."""
    monkeypatch.setattr(long, "BACKWARD", T - 1)
    with ThreadPoolExecutor(1) as pool:
        judge = long.RowJudging(case, ["hf-sdpa", "torch-sdpa"], [SETTING], pool, pool, tmp_path)
        for index, ((name, setting), trace) in enumerate(traces.items()):
            judge.land(name, setting, store(trace, tmp_path / f"{index}.safetensors", None))
        for setting in PROBES:
            trace = load("torch-sdpa").run(*given(case, setting, tmp_path), CONFIG)
            judge.land("torch-sdpa", setting, store(trace, tmp_path / f"{setting.label}.safetensors", None))
        layer = document.conclude(judge, ["hf-sdpa", "torch-sdpa"])
    made = document.assemble([layer], ["hf-sdpa", "torch-sdpa"], Ran(), "", "")
    said = " ".join(f"{word} {sentence}" for word, sentence in console.sentences(made))
    assert "MATCH hf-sdpa: only rounding differs, forward; no gradient was shown" in said
    assert "MATCH torch-sdpa: only rounding differs, forward, and backward on the probes alone" in said
    for name, structure in {
        "hf-sdpa": "in float64 it is what the others are held to",
        "torch-sdpa": "beyond 299 tokens none but Hugging Face's layer runs in float64",
    }.items():
        left = made["frameworks"][name]["not_checked"]
        assert [each for each in left if each.startswith("structure")] == [f"structure: {structure}"]
        assert any(each.startswith("local: all gradients (beyond 299 tokens nothing runs backward)") for each in left)


def test_a_candidate_is_refused(case):
    with pytest.raises(BadInput, match="--candidate and --trace are judged up to"):
        long.check(case, ["numpy-tiled"], None, True)
