"""Layers whose projections have biases (`attention_bias`): every implementation, every gate, and what forgets one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Case as Arrays
from conftest import make_case, numpy_run
from safetensors.numpy import load_file, save_file

from harness import compare, exchange, planted
from harness.bugs import BUGS, Bug
from harness.case import BadInput, Case, read_case, seeded_case
from harness.export import open_case
from harness.gates import EQUATION, NAMES, ROUNDING, local, probes, structure, tolerance, usable, whole
from harness.judging import where
from harness.report.html import render_html
from harness.runners import CACHED, FUSED, IMPLEMENTATIONS, LIBRARIES, REFERENCES, TILED, Setting, load, shown
from impls import numpy_attention
from impls.spec import BIAS_GRADIENTS, BIASES, STAGES, AttentionConfig, weight_shapes

CONFIG = AttentionConfig(40, 6, 3, 16, 1e-6, attention_bias=True)
EVERY = (*IMPLEMENTATIONS, *LIBRARIES, *TILED, *dict.fromkeys((*CACHED, *REFERENCES)))
PLANTED = [bug for bug in BUGS if bug.kind == "biases"]


def biased(B: int, T: int, config: AttentionConfig = CONFIG) -> Arrays:
    """A case in float64 whose biases are as large as what they are added to."""
    case = make_case(config, B, T)
    for name in BIASES:
        case.weights[name] *= case.weights[name].size ** 0.5
    return case


def failed(findings: list[Any]) -> list[Any]:
    return [finding for finding in findings if not finding.match]


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return seeded_case(tmp_path_factory.mktemp("seeded"), batch=2, seq_len=7, config=replace(CONFIG, head_dim=24))


# -------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize(("B", "T"), [(1, 1), (2, 7)])
def test_the_layer_in_float64(B: int, T: int) -> None:
    case = biased(B, T)
    truth = load("hf-eager").run(*case)
    assert set(truth) == set(whole(CONFIG)) == {*NAMES, *BIAS_GRADIENTS}
    for name in EVERY:
        if name.startswith("jax-") or (name == "jax" and T == 1):  # a second to compile each; in float32 they are seen
            continue
        trace, due = load(name).run(*case), shown(name, whole(CONFIG))
        assert set(trace) == set(due), name
        findings = structure.judge(trace, truth, case.weights, case.inputs, CONFIG, due)
        assert len(findings) == len(due) and not failed(findings), name


@pytest.mark.parametrize("source", BIASES)
def test_gradient_is_the_slope(source: str) -> None:
    weights, inputs, d_output, config = biased(2, 5)
    gradient = numpy_run(weights, inputs, d_output, config)[f"d_{source}"]
    v, h = np.random.default_rng(1).standard_normal(gradient.shape), 1e-3

    def loss(step: float) -> float:
        moved = weights | {source: weights[source] + step * v}
        return float(np.sum(d_output * numpy_attention.forward(moved, inputs, config)[0]))

    slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
    assert slope == pytest.approx(np.sum(gradient * v), rel=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_implementation(dtype: str) -> None:
    """From its own inputs, against the truth and the layer, and in float32 on the probes."""
    case = biased(2, 7).astype(dtype).astype(np.float64)
    given, rounding = case.astype(dtype), ROUNDING[dtype]
    truth, layer = load("hf-eager").run(*case), load("hf-eager").run(*given)
    noise = tolerance.sample(numpy_attention.forward, numpy_attention.backward, *case, rounding, fused=True)
    factors = {name: local.factor(value) for name, value in case.weights.items()}
    exact = [probes.build(name, CONFIG, 7, 2) for name in probes.NAMES]
    for name in EVERY:
        if dtype == "bfloat16" and name.startswith("jax-"):  # a second to compile each
            continue
        run, due = load(name).run, shown(name, whole(CONFIG))
        trace = run(*given)
        found = local.judge(trace, factors, case.inputs, case.d_output, CONFIG, rounding)
        assert {each.stage for each in found} == set(due) - set(local.uncertified(trace, due))
        for other in (truth, layer):
            found += tolerance.judge(trace, other, noise, due, other is layer, name in FUSED, dtype)
        for probe in exact if dtype == "float32" and name not in REFERENCES else ():
            found += probes.judge(run(probe.weights, probe.inputs, probe.d_output, CONFIG), probe, due)
        assert not failed(found), name


def test_probes_have_biases() -> None:
    large_eps = AttentionConfig(64, 4, 2, 64, 0.9, attention_bias=True)
    for name, config in ((name, config) for name in probes.NAMES for config in (CONFIG, large_eps)):
        given = probes.build(name, config, 12)
        assert {key: value.shape for key, value in given.weights.items()} == weight_shapes(config)
        assert all(given.weights[key].any() for key in BIASES) is (name in ("lookup", "strong"))
        trace = numpy_run(given.weights, given.inputs, given.d_output, config)
        assert set(trace) == set(given.expected) and not failed(probes.judge(trace, given, whole(config)))


@pytest.mark.parametrize("name", BIAS_GRADIENTS)
def test_an_error_in_a_bias_s_gradient_is_seen(name: str) -> None:
    """By each gate, in that gradient alone; structure sees 1e-10 of it, tolerance twenty σ in one place."""
    case = biased(2, 5).astype(np.float32).astype(np.float64)
    truth = numpy_run(*case)
    changed = truth | {name: truth[name] * (1 + 1e-10)}
    findings = structure.judge(changed, truth, case.weights, case.inputs, CONFIG, whole(CONFIG))
    assert [finding.stage for finding in failed(findings)] == [name]
    noise = tolerance.sample(numpy_attention.forward, numpy_attention.backward, *case)
    changed[name] = truth[name].copy()
    changed[name][3] += 20 * noise.spreads[name].sigma[3]
    assert {finding.stage for finding in failed(tolerance.judge(changed, truth, noise, whole(CONFIG), False))} == {name}
    single = {key: value.astype(np.float32) for key, value in truth.items()}
    single[name][3] *= np.float32(1.001)
    factors = {key: local.factor(value) for key, value in case.weights.items()}
    findings = failed(local.judge(single, factors, *case[1:]))
    assert {finding.stage for finding in findings} == {name} and findings[0].where == (3,)


def test_a_gradient_of_a_bias_that_there_is_not_is_unknown() -> None:
    case = make_case(replace(CONFIG, attention_bias=False), 2, 5)
    truth = numpy_run(*case)
    more = truth | {"d_v_proj.bias": np.zeros(48)}
    findings = failed(structure.judge(more, truth, case.weights, case.inputs, case.config, NAMES))
    assert [(finding.stage, finding.measure) for finding in findings] == [("d_v_proj.bias", "unknown")]
    forward = {stage.name: truth[stage.name] for stage in STAGES}  # as decoding shows it, which has no gradients
    assert usable(more, forward, ["output"]) == (list(forward), [])


def test_the_place_of_a_bias_s_gradient_is_its_head() -> None:
    assert where("d_k_proj.bias", (37,), 16) == (2, None) and where("d_o_proj.bias", (37,), 16) == (None, None)


def test_sums_of_bfloat16_that_are_taken_in_bfloat16_are_seen() -> None:
    case = biased(1, 33).astype("bfloat16").astype(np.float64)
    trace = load("torch").run(*case.astype("bfloat16"))
    total = np.zeros_like(trace["d_v_proj.bias"])
    for row in trace["d_v_proj"].reshape(33, -1):
        total = (total.astype(np.float32) + row.astype(np.float32)).astype(total.dtype)
    factors = {name: local.factor(value) for name, value in case.weights.items()}
    findings = local.judge(trace | {"d_v_proj.bias": total}, factors, *case[1:], ROUNDING["bfloat16"])
    assert {finding.stage for finding in failed(findings)} == {"d_v_proj.bias"}


def test_a_padded_batch(tmp_path: Path) -> None:
    case = seeded_case(tmp_path, batch=2, seq_len=5, config=CONFIG, left_pad=[0, 3])
    given = case.arrays("stress", "model", "float64")
    truth = load("hf-eager").run(*given, CONFIG)
    for name in (*IMPLEMENTATIONS, "numpy-tiled"):
        trace, due = load(name).run(*given, CONFIG), shown(name, whole(CONFIG))
        assert not failed(structure.judge(trace, truth, *given[:2], CONFIG, due)), name


# ------------------------------------------------------------------------------------------------------------ the case


def test_a_case_s_files_say_whether_there_are_biases(seeded: Case, tmp_path: Path) -> None:
    file = seeded.paths["weights"]
    assert read_case(file).config == seeded.config and set(seeded.weights) == set(weight_shapes(seeded.config))
    spread = np.concatenate([seeded.weights[name] for name in BIASES]).std()
    assert 0.5 < spread < 0.8
    plain = seeded_case(tmp_path, config=replace(seeded.config, attention_bias=False))
    assert all(np.array_equal(value, seeded.weights[name]) for name, value in plain.weights.items())
    assert b"attention_bias" in file.read_bytes() and b"attention_bias" not in plain.paths["weights"].read_bytes()
    assert not read_case(plain.paths["weights"]).config.attention_bias


@pytest.mark.parametrize(
    ("says", "lacks", "message"),
    [
        (True, ["k_proj.bias"], "lacks k_proj.bias, while its attention_bias is true"),
        (False, ["k_proj.bias"], "also holds o_proj.bias, q_proj.bias, v_proj.bias, while its attention_bias is false"),
        (1, [], "attention_bias is 1; it must be true or false"),
        (None, [], "attention_bias is None; it must be true or false"),
    ],
)
def test_files_that_contradict_themselves(seeded: Case, tmp_path: Path, says: Any, lacks: list[str], message: str):
    stored = {"model_type": "qwen3", **vars(seeded.config), "attention_bias": says, "rope_theta": seeded.theta}
    tensors = {name: value for name, value in seeded.weights.items() if name not in lacks}
    metadata = {"config": json.dumps(stored), "source": json.dumps(seeded.source)}
    save_file(tensors, tmp_path / "wrong.safetensors", metadata)
    with pytest.raises(BadInput, match=message):
        read_case(tmp_path / "wrong.safetensors", {})


def test_a_case_for_other_languages_has_the_biases(seeded: Case, tmp_path: Path) -> None:
    exchange.write(seeded, ["float32"], tmp_path)
    told = json.loads((tmp_path / "case.json").read_text())
    assert told["config"]["attention_bias"] is True
    assert told["weights"]["o_proj.bias"] == {"letters": ["D"], "shape": [40]}
    assert [stage["name"] for stage in told["stages"]] == list(EQUATION)
    assert told["stages"][-2]["letters"] == "KH" and told["stages"][-2]["direction"] == "backward"
    for name in ("weights.float32", "weights.probe-lookup.model.float32"):
        assert set(load_file(tmp_path / f"{name}.safetensors")) == set(weight_shapes(CONFIG))


# ------------------------------------------------------------------------------------------- a model of Hugging Face's


@pytest.fixture(scope="module")
def model() -> Any:
    """Two layers, with biases and norms as training leaves them, not as they are initialised."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    config = transformers.Qwen3Config(
        **sizes, num_hidden_layers=2, intermediate_size=24, vocab_size=50, attention_bias=True
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name:
                parameter.normal_(1.5 if "norm" in name else 0, 0.3)
    return model


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "biased"
    model.save_pretrained(folder)
    return folder


def test_the_exported_layer_does_what_it_does_in_its_model(model: Any, checkpoint: Path, tmp_path: Path) -> None:
    import torch

    case = open_case(checkpoint, 1, directory=tmp_path)
    attention, seen = model.model.layers[1].self_attn, {}
    assert case.config.attention_bias
    assert {name: tuple(value.shape) for name, value in attention.state_dict().items()} == weight_shapes(case.config)
    for name, value in attention.state_dict().items():
        np.testing.assert_array_equal(case.weights[name], value.numpy())

    def keep(_: Any, args: Any, given: Any, output: Any) -> None:
        cos, sin = given["position_embeddings"]
        tensors = {"hidden_states": given["hidden_states"], "cos": cos, "sin": sin, "output": output[0]}
        seen.update({name: value.numpy().astype(np.float64) for name, value in tensors.items()})

    with attention.register_forward_hook(keep, with_kwargs=True), torch.no_grad():
        model(torch.tensor([[3, 1, 4, 1, 5, 9, 2]]))
    weights = {name: value.astype(np.float64) for name, value in case.weights.items()}
    output, _ = numpy_attention.forward(weights, seen, case.config)
    np.testing.assert_allclose(output, seen["output"], atol=2e-6 * np.abs(output).max())
    without = {name: value for name, value in weights.items() if "bias" not in name}
    assert np.abs(numpy_attention.forward(without, seen, case.config)[0] - output).max() > 0.1


PORT = """
import numpy as np
from impls import numpy_attention

def attention(weights, inputs, config):
    weights = {name: value for name, value in weights.items() if "bias" not in name}
    return numpy_attention.forward(weights, inputs, config)[0]
"""


def test_compare(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the checkpoint: what is right matches, and what forgets a bias is told so."""
    (tmp_path / "port.py").write_text(PORT)
    monkeypatch.chdir(tmp_path)
    words = ["--weights", str(checkpoint), "--layer", "1", "--seq-len", "5", "--out", str(tmp_path / "out")]
    words += ["--impl", "numpy", "jax", "torch", "numpy:v_bias_left_out", "--candidate", "port.py:attention"]
    document = compare.compare(compare.make_parser().parse_args([*words, "--quiet"]), "", None, tmp_path)
    found = document["frameworks"]
    assert [found[name]["match"] for name in IMPLEMENTATIONS] == [True] * 3
    rows = {(row["framework"], row["gate"], row["stage"]) for row in document["checks"]}
    for gate in ("structure", "local", "tolerance", "probes"):
        assert {(name, gate, entry) for name in IMPLEMENTATIONS for entry in BIAS_GRADIENTS} <= rows
    assert found["numpy:v_bias_left_out"]["first_divergence"]["stage"] == "v_proj"
    for name, cause in (
        ("numpy:v_bias_left_out", "V without its bias"),
        ("port.py:attention", "the four projections without their biases"),
    ):
        assert f"Likely cause: {cause} (eq. 3.1);" in found[name]["first_divergence"]["explanation"]
    assert not {bug["name"] for bug in document["blind_to"]} & {bug.name for bug in PLANTED}
    page = render_html(document, tmp_path / "out" / "traces")
    assert "d_v_proj.weight, d_q_proj.bias, d_k_proj.bias, d_v_proj.bias</span>" in page and "each add a bias" in page


# ---------------------------------------------------------------------------------------------------- what forgets one


def test_every_planted_bug_is_caught_and_named(seeded: Case) -> None:
    bugs = [each for each in planted.choose(None, seeded.config) if each[1].kind == "biases"]
    found = planted.matrix(seeded, bugs)
    assert [row["name"] for row in found["bugs"]] == [bug.name for bug in PLANTED]
    assert all(row["caught"] and row["localised"] for row in found["bugs"]), found["bugs"]
    assert not {bug["name"] for bug in found["blind_to"]} & {bug.name for bug in PLANTED}
    assert not set(planted.choose(None)) & set(bugs)  # a layer without biases cannot lack them


@pytest.mark.parametrize("bug", [bug for bug in PLANTED if "numpy" in bug.frameworks], ids=lambda bug: bug.name)
def test_diagnosis(seeded: Case, bug: Bug) -> None:
    """From the output alone, or from the gradients where the output is right."""
    setting = Setting("chapter", "model", "float64")
    trace = planted.run(planted.variant("numpy", bug), *seeded.arrays(*setting), seeded.config)
    shown = trace if not bug.forward else {"output": trace["output"]}
    assert planted.diagnose(seeded, {setting: shown}) == bug.says
