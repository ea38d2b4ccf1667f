"""Whatever form a checkpoint has, the exported layer is the model's own; what cannot be used is refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from harness.case import INPUTS, QWEN3_0_6B, Arrays, BadInput, read_case, rope_tables, seeded_case
from harness.export import main, open_case, qwen3_config
from impls.spec import WEIGHTS, AttentionConfig

SMALL = AttentionConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5)
FIELDS: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "rms_norm_eps": 1e-5, "num_hidden_layers": 3, "rope_theta": 5e4,
}  # fmt: skip


def write_checkpoint(directory: Path, change: Arrays | None = None, **fields: Any) -> Path:
    """A checkpoint of three layers written by hand, every number of layer i being i + 1, some tensors changed."""
    directory.mkdir(parents=True)
    shapes = {
        "q_proj": (60, 48),
        "k_proj": (20, 48),
        "v_proj": (20, 48),
        "o_proj": (48, 60),
        "q_norm": (10,),
        "k_norm": (10,),
    }
    tensors = {
        f"model.layers.{i}.self_attn.{name}.weight": np.full(shape, i + 1, np.float32)
        for i in range(3)
        for name, shape in shapes.items()
    }
    save_file(tensors | (change or {}), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({k: v for k, v in (FIELDS | fields).items() if v is not ...}))
    return directory


def q_proj(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.q_proj.weight"


# --------------------------------------------------------------------------------------- checkpoints by Hugging Face


@pytest.fixture(scope="module")
def model() -> Any:
    """Eleven layers, so that layers.1 is not layers.10; norm weights are not one."""
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.Qwen3Config(
        vocab_size=31, hidden_size=48, intermediate_size=20, num_hidden_layers=11, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5, rope_theta=5e4, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


@pytest.mark.parametrize("shard", ["1GB", "40KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_layer_is_the_model_s_own(tmp_path: Path, model: Any, dtype: str, shard: str) -> None:
    import torch

    saved = type(model)(model.config).to(getattr(torch, dtype))
    saved.load_state_dict(model.state_dict())
    saved.save_pretrained(tmp_path / "tiny.1", max_shard_size=shard)
    assert (tmp_path / "tiny.1/model.safetensors.index.json").exists() == (shard == "40KB")
    for layer in (0, 1, 10):
        case = open_case(tmp_path / "tiny.1", layer, batch=2, seq_len=5, directory=tmp_path / "out")
        assert case.name == f"tiny.1-layer{layer}" and case.config == SMALL and case.theta == 5e4
        assert case.describe() == f"layer {layer} of the checkpoint tiny.1 ({dtype} on disk)"
        assert case.inputs["chapter"]["hidden_states"].shape == (2, 5, 48)
        expected = saved.model.layers[layer].self_attn.state_dict()
        assert set(expected) == set(case.weights) == set(WEIGHTS)
        for name, weight in case.weights.items():
            assert weight.dtype == np.float32
            np.testing.assert_array_equal(weight, expected[name].float().numpy())
    assert len(list((tmp_path / "out").iterdir())) == 9


def test_only_the_layer_s_own_files_are_read(tmp_path: Path, model: Any) -> None:
    model.save_pretrained(tmp_path / "m", max_shard_size="40KB")
    shards = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())["weight_map"]
    needed = {shards[f"model.layers.1.self_attn.{name}"] for name in WEIGHTS}
    for file in set(shards.values()) - needed:
        (tmp_path / "m" / file).write_bytes(b"damaged")
    assert len(needed) < len(set(shards.values()))
    assert open_case(tmp_path / "m", 1, directory=tmp_path).layer == 1
    (tmp_path / "m" / min(needed)).unlink()
    with pytest.raises(BadInput, match=r"model-0.*missing.*download"):
        open_case(tmp_path / "m", 1, directory=tmp_path)


def test_a_base_model_has_no_prefix(tmp_path: Path, model: Any) -> None:
    model.model.save_pretrained(tmp_path / "base")
    assert f"layers.1.self_attn.{'q_proj.weight'}" in load_file(tmp_path / "base/model.safetensors")
    case = open_case(tmp_path / "base", 1, directory=tmp_path)
    expected = model.model.layers[1].self_attn.k_norm.weight.detach().numpy()
    np.testing.assert_array_equal(case.weights["k_norm.weight"], expected)


def test_the_tables_are_hugging_face_s(model: Any) -> None:
    import torch

    cos, sin = rope_tables(10, 5e4, 2, 64)
    theirs = model.model.rotary_emb(torch.zeros(2, 64, 48), torch.arange(64).expand(2, 64))
    for table, expected in zip((cos, sin), theirs, strict=True):
        assert table.shape == (2, 64, 10) and table.dtype == np.float32
        np.testing.assert_allclose(table, expected.numpy(), rtol=0, atol=64 * 2.0**-24)  # float32 angles up to 64


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        {"rope_scaling": {"type": "default"}},
        {"head_dim": ...},
        {"num_key_value_heads": ..., "num_attention_heads": ...},
        {"num_key_value_heads": None},
        {"rope_theta": ...},
        {"rms_norm_eps": ...},
        {"hidden_size": ...},
    ],
)
def test_a_config_is_read_as_hugging_face_reads_it(fields: dict[str, Any], model: Any) -> None:
    import transformers

    config = {key: value for key, value in (FIELDS | fields).items() if value is not ...}
    ours, theta = qwen3_config(config, 0, "config.json")
    theirs = transformers.Qwen3Config(**{key: value for key, value in config.items() if key != "model_type"})
    attention = transformers.models.qwen3.modeling_qwen3.Qwen3Attention(theirs, 0)
    assert ours.head_dim == attention.head_dim
    assert (ours.hidden_size, ours.num_attention_heads) == (theirs.hidden_size, theirs.num_attention_heads)
    assert (ours.num_key_value_heads, ours.rms_norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert theta == theirs.rope_parameters["rope_theta"]


# ------------------------------------------------------------------------------------------------------ what is chosen


def test_the_seeded_case_is_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    case = read_case(tmp_path / "seeded-0.safetensors")
    assert case.config == QWEN3_0_6B and set(case.inputs) == set(INPUTS) and printed.err == ""
    assert printed.out.startswith(
        "seeded weights with Qwen3-0.6B's geometry (seed 0); these are not Qwen's trained weights\n"
    )
    for name, path in case.paths.items():
        assert f"{path}  {path.stat().st_size:,} bytes  sha256 {case.sha256[name]}" in printed.out


def test_layers_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "hand")
    arguments = ["--weights", str(checkpoint), "--layer", "0", "2", "--batch", "2", "--seq-len", "7", "--seed", "4"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "layer 2 of the checkpoint hand (float32 on disk)" in capsys.readouterr().out
    for layer in (0, 2):
        path = tmp_path / f"out/hand-layer{layer}.safetensors"
        case = read_case(path, {"chapter": tmp_path / f"out/hand-layer{layer}.b2t7s4.chapter.safetensors"})
        assert (case.weights["q_proj.weight"] == layer + 1).all() and case.made["chapter"]["seed"] == 4


def test_the_only_file_may_have_any_name(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "hand")
    (checkpoint / "adapter.safetensors").write_bytes(b"not this one")
    assert (open_case(checkpoint, 1, directory=tmp_path).weights["k_norm.weight"] == 2).all()
    (checkpoint / "model.safetensors").rename(checkpoint / "adapter.safetensors")
    assert (open_case(checkpoint, 1, directory=tmp_path).weights["k_norm.weight"] == 2).all()


def test_an_exported_file_comes_with_its_inputs(tmp_path: Path) -> None:
    case = seeded_case(tmp_path / "given", 5, config=SMALL)
    file = case.paths["weights"]
    assert open_case(file, directory=tmp_path / "out").paths == case.paths
    assert open_case(file, layer=0, directory=tmp_path / "out").sha256 == case.sha256
    assert not (tmp_path / "out").exists()
    other = open_case(file, seq_len=7, directory=tmp_path / "out")  # asked for others
    assert other.inputs["stress"]["d_output"].shape == (1, 7, 48) and other.made["stress"]["seed"] == 5
    assert other.paths["stress"] == tmp_path / "out/seeded-5.b1t7.stress.safetensors"
    for name in INPUTS:
        case.paths[name].unlink()
    assert open_case(file, directory=tmp_path / "out").sha256 == case.sha256  # made anew, the same


# ----------------------------------------------------------------------------------------------------------- bad input


def change_config(**fields: Any) -> Callable[[Path], list[str]]:
    return lambda tmp: ["--weights", str(write_checkpoint(tmp / "m", **fields)), "--layer", "1"]


def change_tensor(name: str, value: Any) -> Callable[[Path], list[str]]:
    return lambda tmp: ["--weights", str(write_checkpoint(tmp / "m", {name: value})), "--layer", "1"]


def change_file(name: str, content: bytes | None) -> Callable[[Path], list[str]]:
    def arguments(tmp: Path) -> list[str]:
        checkpoint = write_checkpoint(tmp / "m")
        (checkpoint / name).unlink(missing_ok=True)
        if content is not None:
            (checkpoint / name).write_bytes(content)
        return ["--weights", str(checkpoint)]

    return arguments


def index_only(content: bytes) -> Callable[[Path], list[str]]:
    def arguments(tmp: Path) -> list[str]:
        checkpoint = write_checkpoint(tmp / "m")
        (checkpoint / "model.safetensors").rename(checkpoint / "shard.safetensors")
        (checkpoint / "model.safetensors.index.json").write_bytes(content)
        return ["--weights", str(checkpoint)]

    return arguments


def without_tensor(tmp: Path) -> list[str]:
    path = write_checkpoint(tmp / "m") / "model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if name != q_proj(1)}, path)
    return ["--weights", str(path.parent), "--layer", "1"]


def exported(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda tmp: ["--weights", str(seeded_case(tmp / "given", config=SMALL).paths["weights"]), *arguments]


def plain(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda _: list(arguments)


def checkpoint(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda tmp: ["--weights", str(write_checkpoint(tmp / "m")), *arguments]


def weights_of_a_checkpoint(tmp: Path) -> list[str]:
    return ["--weights", str(write_checkpoint(tmp / "m") / "model.safetensors")]


NAN = np.zeros((60, 48), np.float32)
NAN[3, 4] = np.nan

BAD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no such path": (plain("--weights", "/nowhere/at-all"), "/nowhere/at-all: no such file"),
    "not a checkpoint": (lambda tmp: ["--weights", str(tmp)], "config.json"),
    "a file of a checkpoint": (weights_of_a_checkpoint, "a checkpoint is given by its directory"),
    "config.json is not JSON": (change_file("config.json", b"{"), "is not JSON"),
    "config.json is not text": (change_file("config.json", b"\xff\xfe{}"), "is not JSON"),
    "config.json is a list": (change_file("config.json", b"[]"), "not a JSON object"),
    "no weights": (
        change_file("model.safetensors", None),
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "weights are garbage": (change_file("model.safetensors", b"garbage!" * 9), "not a readable safetensors file"),
    "index is not JSON": (index_only(b"?"), "index.json is not JSON"),
    "index without a map": (index_only(b"{}"), "has no weight_map"),
    "index with numbers": (index_only(b'{"weight_map": {"a": 1}}'), "has no weight_map"),
    "index lacks the layer": (index_only(b'{"weight_map": {}}'), f"has no tensor {q_proj(0)}"),
    "a shard is missing": (
        index_only(json.dumps({"weight_map": {q_proj(0): "gone.safetensors"}}).encode()),
        "gone.safetensors: missing",
    ),
    "a shard lacks it": (
        index_only(b'{"weight_map": {"layers.0.self_attn.q_proj.weight": "shard.safetensors"}}'),
        "not a readable",
    ),
    "tensor missing": (without_tensor, f"has no tensor {q_proj(1)}"),
    "head_dim from the width": (
        change_config(head_dim=8),
        "[60, 48], expected [48, 48] = [NH, D]; head_dim (H) is a size of its own",
    ),
    "head_dim left out": (change_config(head_dim=...), "expected [768, 48] = [NH, D]"),
    "norm of a wrong size": (
        change_tensor("model.layers.1.self_attn.k_norm.weight", np.ones(60, np.float32)),
        "k_norm.weight has shape [60], expected [10]",
    ),
    "NaN": (change_tensor(q_proj(1), NAN), "q_proj.weight has 1 of 2880 values that are NaN"),
    "quantised": (change_tensor(q_proj(1), np.ones((60, 48), np.int8)), "q_proj.weight holds int8"),
    "layer too large": (checkpoint("--layer", "3"), "layers 0 to 2; --layer 3"),
    "layer below zero": (checkpoint("--layer", "-1"), "layers 0 to 2; --layer -1"),
    "another model": (change_config(model_type="llama"), "model_type is 'llama'"),
    "no model type": (change_config(model_type=...), "model_type is None"),
    "sizes are text": (change_config(hidden_size="48"), "config.json: the configuration is unusable"),
    "no heads": (change_config(num_attention_heads=0), "num_attention_heads is 0"),
    "head_dim is null": (change_config(head_dim=None), "config.json: the configuration is unusable"),
    "layers are text": (change_config(num_hidden_layers="3"), "num_hidden_layers is '3'"),
    "theta is nothing": (change_config(rope_theta=None), "unusable"),
    "theta is negative": (change_config(rope_theta=-1), "rope_theta is -1"),
    "RoPE of another type": (
        change_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "RoPE of the type 'yarn'",
    ),
    "RoPE of another type, new": (
        change_config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        "RoPE of the type 'linear'",
    ),
    "RoPE for each type of layer": (
        change_config(rope_parameters={"full_attention": {"rope_theta": 1e4}}),
        "RoPE that differs",
    ),
    "RoPE is text": (change_config(rope_scaling="default"), "expected an object"),
    "RoPE on a part": (change_config(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "biases": (change_config(attention_bias=True), "attention_bias"),
    "fp8": (change_config(quantization_config={"quant_method": "fp8"}), "quantised weights"),
    "window by layer_types": (
        change_config(use_sliding_window=True, layer_types=["full_attention", "sliding_attention", "full_attention"]),
        "'sliding_attention'",
    ),
    "window by number": (change_config(use_sliding_window=True, max_window_layers=1), "layer 1 with a sliding window"),
    "layer_types too short": (change_config(layer_types=["full_attention"]), "without one entry for each layer"),
    "batch 0": (plain("--batch", "0"), "--batch is 0"),
    "no tokens": (plain("--seq-len", "0"), "--seq-len is 0"),
    "negative seed": (plain("--seed", "-1"), "--seed is -1"),
    "batch is text": (plain("--batch", "two"), "--batch: invalid int value"),
    "unknown flag": (plain("--wieghts", "x"), "--wieghts"),
    "layer of the seeded case": (plain("--layer", "1"), "--weights chooses a checkpoint"),
    "another layer than the file's": (exported("--layer", "1"), "holds layer 0"),
    "more tokens than memory": (exported("--batch", "2", "--seq-len", str(10**19)), "20000000000000000000 tokens"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str) -> None:
    arguments, message = BAD[bad]
    out = tmp_path / "out"
    assert main([*arguments(tmp_path), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and message in printed.err
    assert not out.exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "use_sliding_window": True},
    ],
)
def test_a_layer_without_a_window_is_not_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert open_case(write_checkpoint(tmp_path / "m", **fields), 1, directory=tmp_path).layer == 1


def test_a_good_file_survives_a_bad_run(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "m")
    path = open_case(checkpoint, 1, directory=tmp_path / "out").paths["weights"]
    before = path.read_bytes()
    shutil.rmtree(checkpoint)
    write_checkpoint(checkpoint, {q_proj(1): NAN})
    with pytest.raises(BadInput, match="NaN"):
        open_case(checkpoint, 1, directory=tmp_path / "out")
    assert path.read_bytes() == before and len(list((tmp_path / "out").iterdir())) == 3
