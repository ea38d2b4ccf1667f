"""bfloat16 and float16: every implementation rounds as the layer does, and gates L and T know what that costs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import ml_dtypes
import numpy as np
import pytest
from conftest import make_case

from harness import artifact, bugs, judging
from harness.case import BadInput, seeded_case
from harness.gates import NAMES, ROUNDING, local, tolerance
from harness.runners import fetch, load, precision, shown, store
from impls import numpy_attention
from impls.spec import AttentionConfig

ROOT = Path(__file__).resolve().parent.parent
SHORT = ("bfloat16", "float16")
EVERY = ("hf-eager", "hf-sdpa", "numpy", "jax", "torch")
CONFIGS = (AttentionConfig(40, 6, 3, 16, 1e-6), AttentionConfig(56, 5, 1, 32, 1e-6))


def rounded(config, B, T, dtype):
    return make_case(config, B, T, rope="model").astype(np.float32).astype(dtype)


def certify(trace, case, dtype):
    weights, inputs, d_output, config = case.astype(np.float64)
    factors = {name: local.factor(value) for name, value in weights.items()}
    return local.judge(trace, factors, inputs, d_output, config, ROUNDING[dtype])


def failed(findings):
    return {finding.stage for finding in findings if not finding.match}


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(("B", "T"), [(1, 1), (4, 2), (2, 7), (1, 33)])
@pytest.mark.parametrize("config", CONFIGS, ids=["grouped", "multi-query"])
def test_correct_implementations_keep_every_limit(config, B, T, dtype):
    case = rounded(config, B, T, dtype)
    exact = case.astype(np.float64)
    truth = load("hf-eager").run(*exact)
    page = numpy_attention.forward, numpy_attention.backward
    noise = tolerance.sample(*page, *exact, ROUNDING[dtype], fused=True)
    layer = load("hf-eager").run(*case)
    for name in EVERY:
        trace = load(name).run(*case)
        assert {entry: value.dtype.name for entry, value in trace.items()} == dict.fromkeys(shown(name), dtype)
        assert not failed(certify(trace, case, dtype)), name
        fused = name == "hf-sdpa"
        assert not failed(tolerance.judge(trace, truth, noise, shown(name), False, fused, dtype)), name
        assert not failed(tolerance.judge(trace, layer, noise, shown(name), True, fused, dtype)), name


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("bug", ["norm_after_rope", "scale_left_out", "kv_heads_tiled", "norm_backward_without_mean"])
def test_bug_is_named_at_its_stage(dtype, bug):
    case = rounded(CONFIGS[0], 2, 7, dtype)
    weights, inputs, d_output, config = case.astype(np.float32)
    module, trace = bugs.variant("numpy", bugs.find("numpy", bug)), {}

    def observe(name, value):
        trace[name] = value.astype(dtype)
        return trace[name].astype(np.float32)

    cache = module.forward(weights, inputs, config, observe)[1]
    module.backward(d_output, cache, observe)
    broken = failed(certify(trace, case, dtype))
    assert min(broken, key=NAMES.index) in bugs.find("numpy", bug).stages


@pytest.mark.parametrize(
    "stage", [name for name in NAMES if "norm.weight" not in name]
)  # of which each term is rounded
def test_stage_that_kept_three_bits_less_fails(stage):
    case = rounded(CONFIGS[0], 2, 7, "float16")
    trace = load("numpy").run(*case)
    coarse = trace[stage].astype(ml_dtypes.bfloat16).astype(np.float16)
    assert stage in failed(certify({**trace, stage: coarse}, case, "float16"))


def test_one_factor_may_be_rounded_the_other_way():
    """As XLA does where it computes a factor once more for this product than for what is shown."""
    case = rounded(CONFIGS[0], 2, 7, "float16")
    trace = load("numpy").run(*case)
    for ulps, stages in ((1, set()), (64, {"d_k_proj.weight"})):
        d, x = (value.astype(np.float32).reshape(14, -1) for value in (trace["d_k_proj"], case.inputs["hidden_states"]))
        d[3] *= 1 + ulps * 2.0**-10
        assert failed(certify({**trace, "d_k_proj.weight": (d.T @ x).astype(np.float16)}, case, "float16")) == stages


def test_sum_taken_in_bfloat16_fails():
    """Rounding after each of 56 additions, instead of once."""
    case = rounded(CONFIGS[1], 2, 7, "bfloat16")
    trace = load("numpy").run(*case)
    total = np.zeros(trace["q_proj"].shape, ml_dtypes.bfloat16)
    x, w = case.inputs["hidden_states"], case.weights["q_proj.weight"].reshape(*total.shape[2:], -1)
    for column in range(w.shape[-1]):
        total += x[:, :, None, None, column] * w[..., column]
    assert failed(certify({**trace, "q_proj": total}, case, "bfloat16")) >= {"q_proj"}


@pytest.mark.parametrize("name", EVERY)
def test_products_read_all_the_bits_that_the_dtype_has(name):
    assert precision(load(name)) == {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
    assert precision(load(name), ["bfloat16"]) == {"bfloat16": 8}  # of a run, only its own are measured


def test_trace_is_read_as_it_was_written(tmp_path):
    trace = load("torch").run(*rounded(CONFIGS[0], 1, 3, "bfloat16"))
    again = fetch(store(trace, tmp_path / "trace.safetensors", tmp_path))
    assert again.keys() == trace.keys()
    assert all(again[name].dtype == trace[name].dtype and np.array_equal(again[name], trace[name]) for name in trace)


def test_case_is_rounded_for_the_truth_and_for_the_run_alike(tmp_path):
    case = seeded_case(tmp_path, config=CONFIGS[0])
    assert case.rounded("float32") is case
    short = case.rounded("bfloat16")
    _, exact, _ = short.arrays("chapter", "model", "float64")
    _, given, _ = short.arrays("chapter", "model", "bfloat16")
    assert given["hidden_states"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(exact["hidden_states"], given["hidden_states"].astype(np.float64))
    assert not np.array_equal(exact["hidden_states"], case.arrays("chapter", "model", "float64")[1]["hidden_states"])
    case.inputs["chapter"]["hidden_states"][0, 0, 0] = 1e5
    with pytest.raises(BadInput, match="hidden_states has values beyond float16; use --dtype bfloat16 or float32"):
        case.rounded("float16")


def test_what_is_beyond_float16_is_known_with_what_follows_from_it():
    truth = load("hf-eager").run(*make_case(CONFIGS[0], 1, 3))
    assert not local.beyond(truth, "float16")
    truth["d_k_proj"] = truth["d_k_proj"] * 1e6
    assert local.beyond(truth, "float16") == ["d_k_proj", "d_hidden_states", "d_k_proj.weight"]
    assert not local.beyond(truth, "bfloat16")


@pytest.mark.parametrize(("name", "lost"), [("scores", "scores"), ("d_k_norm", "d_k_norm.weight")])
def test_what_is_too_large_on_the_way_only_is_beyond_float16(name, lost):
    """q·k before it is scaled, a norm weight's gradient with one large term: seen as an infinity in PyTorch."""
    truth = load("hf-eager").run(*make_case(CONFIGS[0], 1, 3))
    truth[name] = truth[name] * (30_000 / np.abs(truth[name]).max())
    large = local.beyond(truth, "float16")
    assert lost in large and (name == lost or name not in large)


# ---------------------------------------------------------------------------------------------------------- the command


def run(folder, *arguments, path=""):
    folders = os.pathsep.join(filter(None, [path, str(ROOT)]))
    command = [sys.executable, "-m", "harness.compare", *arguments]
    environment = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    document = artifact.read(folder / "artifacts" / "attention_check.json")
    jsonschema.validate(document, artifact.SCHEMA)
    return done, document


@pytest.mark.parametrize("dtype", SHORT)
def test_run_of_the_command(tmp_path, dtype):
    case = seeded_case(tmp_path / "weights", config=CONFIGS[0])
    names = ["numpy", "jax", "torch", "hf-sdpa", "numpy:mask_off_by_one"]
    done, document = run(tmp_path, "--weights", str(case.paths["weights"]), "--dtype", dtype, "--impl", *names)
    assert done.returncode == 1, done.stdout + done.stderr
    assert {name: each["match"] for name, each in document["frameworks"].items()} == {
        name: name != names[-1] for name in names
    }
    assert document["setting"]["dtype"] == dtype
    assert set(document["environment"]["matmul_bits"].values()) == {11 if dtype == "float16" else 8}
    first = document["frameworks"][names[-1]]["first_divergence"]
    assert first["stage"] == "masked_scores" and "diagonal is off by one" in first["explanation"]
    said = " ".join(done.stdout.split())
    assert "numpy, jax, torch, hf-sdpa and numpy:mask_off_by_one: structure: float64 was not asked for" in said
    for name in names[:4]:
        gates = {row["gate"] for row in document["checks"] if row["framework"] == name}
        assert gates == {"local", "tolerance", "precision"}


MEDIUM = """
import sys
if sys.orig_argv[-1] == "torch":
    import torch
    torch.set_float32_matmul_precision("medium")
    whole = torch.Tensor.__matmul__
    one = torch.full((256, 256), 1 + 2.0 ** -20)
    if bool((one @ torch.eye(256) == one).all()):  # this CPU has no bfloat16 products: what "medium" does with them
        torch.Tensor.__matmul__ = lambda a, b: whole(a.bfloat16().to(a.dtype), b.bfloat16().to(b.dtype))
"""


def test_run_at_a_lower_precision_than_declared_fails_for_that_reason(tmp_path):
    """PyTorch's "medium", as a CPU with bfloat16 products has it."""
    (tmp_path / "sitecustomize.py").write_text(MEDIUM)
    case = seeded_case(tmp_path / "weights", config=CONFIGS[0])
    weights = ["--weights", str(case.paths["weights"]), "--dtype", "float32", "--impl", "torch", "numpy"]
    done, document = run(tmp_path, *weights, path=str(tmp_path))
    assert done.returncode == 1 and document["frameworks"]["numpy"]["match"]
    assert document["environment"]["matmul_bits"]["torch"] in (8, 11, 16)
    said = document["frameworks"]["torch"]["first_divergence"]["explanation"]
    assert re.search(r"matrix products read (8|11|16) bits of their operands, float32 has 24", said)
    assert judging.OPERANDS in {row["against"] for row in document["checks"] if not row["match"]}
