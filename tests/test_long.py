"""Sequences too long for a score matrix: judged by rows, with the same verdict."""

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness import compare, long
from harness.case import BadInput, seeded_case
from harness.files import mapped
from harness.gates import tolerance
from harness.judging import LAYER, OWN, TRUTH
from harness.runners import Setting, load, store
from impls import numpy_attention
from impls.spec import AttentionConfig, weight_shapes

CONFIG = AttentionConfig(40, 6, 3, 16, 1e-6)
T = 300
SETTING = Setting("chapter", "model", "float32")
EXACT = SETTING._replace(dtype="float64")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return long.shortened(seeded_case(tmp_path_factory.mktemp("weights"), config=CONFIG, seq_len=T))


@pytest.fixture(scope="module")
def traces(case):
    at = long.rows(T)
    runs = {(LAYER, EXACT), (LAYER, SETTING), *((name, SETTING) for name in long.CAN if name != "hf-sdpa")}
    return {
        (name, setting): long.runner(name, "cpu", at)(*case.arrays(*setting), CONFIG) for name, setting in sorted(runs)
    }


def judged(case, traces, tmp_path, names):
    """What the judge finds, by name and what was held against what."""
    with ThreadPoolExecutor(1) as pool:
        judge = long.RowJudging(case, names, [SETTING], pool, pool, tmp_path)
        for index, ((name, setting), trace) in enumerate(traces.items()):
            judge.land(name, setting, store(trace, tmp_path / f"{index}.safetensors", None))
        results = judge.finish()
    first = {}
    for each in results:
        if each.comparison.against in (OWN, TRUTH, LAYER):
            first.setdefault((each.comparison.name, each.comparison.against), each)
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
    assert truth["prefix"].shape == (1, long.PREFIX, 40)


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
    assert len(results) == 1 + 3 * len(long.CAN)
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


def test_command(tmp_path, monkeypatch, capsys):
    seeded_case(tmp_path / "case", config=CONFIG)
    monkeypatch.setattr(long, "LONGEST_SQUARE", 6 * 256**2)
    monkeypatch.chdir(tmp_path)
    chosen = ["--weights", "case/seeded-0.safetensors", "--seq-len", "260"]
    names = ["numpy-tiled", "jax-tiled", "torch-sdpa"]
    assert compare.main([*chosen, "--impl", *names]) == 0
    document = json.loads((tmp_path / "artifacts" / "attention_check.json").read_text())
    assert document["match"] and list(document["frameworks"]) == ["hf-sdpa", *names]
    assert {row["gate"] for row in document["checks"]} >= {"structure", "local", "tolerance", "probes"}
    said = capsys.readouterr().out
    assert "positions that were looked at" in " ".join(said.split())
    assert (tmp_path / "artifacts" / "report.html").stat().st_size > 10_000
    for arguments, message in {
        ("--impl", "numpy"): "error: --impl numpy: it holds 0 GB of scores at --seq-len 260; these do not:",
        ("--impl", "jax-tiled", "--dtype", "bfloat16"): "error: --dtype bfloat16: at --seq-len 260 a run is judged in",
        ("--impl", "jax-tiled", "--left-pad", "3"): "error: --left-pad: a padded batch is judged up to 256 tokens",
    }.items():
        assert compare.main([*chosen, *arguments]) == 2
        assert capsys.readouterr().err.startswith(message)


def test_a_candidate_is_refused(case):
    with pytest.raises(BadInput, match="--candidate and --trace are judged up to"):
        long.check(case, ["numpy-tiled"], None, True)
