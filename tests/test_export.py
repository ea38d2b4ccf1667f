"""Whatever form a checkpoint has, the exported layer is the model's own. What is refused: test_bad_input.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from harness.case import INPUTS, QWEN3_0_6B, BadInput, read_case, rope_tables, seeded_case
from harness.export import main, open_case, qwen3_config
from impls.spec import WEIGHTS, AttentionConfig

SMALL = AttentionConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5)
FIELDS: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "rms_norm_eps": 1e-5, "num_hidden_layers": 3, "rope_theta": 5e4,
}  # fmt: skip


def write_checkpoint(directory: Path, **fields: Any) -> Path:
    """A checkpoint of three layers written by hand, every number of layer i being i + 1."""
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
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({k: v for k, v in (FIELDS | fields).items() if v is not ...}))
    return directory


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
