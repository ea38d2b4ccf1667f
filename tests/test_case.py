"""A case's numbers are the same everywhere, lifelike, and never half-written. Bad files: test_bad_input.py."""

import json
import math
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from harness.case import (
    INPUTS,
    QWEN3_0_6B,
    THETA,
    Array,
    BadInput,
    Case,
    exp,
    make_inputs,
    normal,
    read_case,
    rope_tables,
    seeded_case,
    seeded_weights,
    write_inputs,
    write_tensors,
)
from impls.numpy_attention import forward
from impls.spec import AttentionConfig, weight_shapes

SMALL = AttentionConfig(
    hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5
)  # G = 3, and 60 rows, not 48

PINNED = {
    "weights": "c6b82eedc226f6bca903f0e8b115d791c0f794591987caae13d99cae6750dde8",
    "chapter": "b82a6e81e5a672af3220bcf50c4da45dbadf086596547418509f467d1de24044",
    "stress": "773e25ffd4c594083221105accdb6136e1d9eabfd336706b089f9f17074dd390",
}


def small_case(directory: Path, seed: int = 0) -> Case:
    return seeded_case(directory, seed, batch=2, seq_len=5, config=SMALL, theta=5e4)


# ------------------------------------------------------------------------------------------------------------- numbers


def test_the_default_case_has_these_bytes_everywhere(tmp_path: Path) -> None:
    case = seeded_case(tmp_path)
    assert case.sha256 == PINNED
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "seeded-0.chapter.safetensors",
        "seeded-0.safetensors",
        "seeded-0.stress.safetensors",
    ]
    assert (case.name, case.layer, case.config, case.theta) == ("seeded-0", 0, QWEN3_0_6B, THETA)
    assert case.inputs["chapter"]["hidden_states"].shape == (1, 12, 1024)
    assert "seed 0" in case.describe() and "not Qwen's trained weights" in case.describe()


def test_the_last_bit_of_float64_cos_and_sin_does_not_show() -> None:
    """A math library two units in the last place off gives the same tables, so that the pinned bytes hold there too."""
    frequencies = THETA ** (-np.arange(0, 128, 2) / 128)
    angles = np.arange(12)[:, None] * np.concatenate([frequencies, frequencies])
    for function, table in zip((np.cos, np.sin), rope_tables(128, THETA, 1, 12), strict=True):
        for error in (-4e-16, 0, 4e-16):
            value = function(angles * (1 + error)) * (1 + error)
            np.testing.assert_array_equal(value.astype(np.float32), table[0])


def test_normal_is_the_sum_of_twelve_integers() -> None:
    words = [int(word) for word in np.random.PCG64([7, *b"x"]).random_raw(18)]
    for i, number in enumerate(normal(7, "x", 3)):
        twelve = [half for word in words[6 * i : 6 * i + 6] for half in (word >> 32, word % 2**32)]
        assert number == np.float32((sum(twelve) - 6 * (2**32 - 1)) / 2**32)


def test_normal_is_normal_with_full_mantissas() -> None:
    x = normal(3, "moments", 5, 40_009).astype(np.float64)  # more than one chunk
    n = x.size
    assert abs(x.mean()) < 4 / math.sqrt(n)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 2.9) < 4 * math.sqrt(96 / n)
    assert abs(np.mean(np.abs(x) < 1) - 0.683) < 0.01
    assert np.mean(x.astype(np.float32) != x.astype(ml_dtypes.bfloat16)) > 0.99
    bits = x.astype(np.float32).view(np.uint32)
    assert 0.45 < np.mean(bits & 1) < 0.55  # down to the last bit of the mantissa


def test_each_name_and_seed_has_numbers_of_its_own() -> None:
    draws = [normal(seed, name, 1000) for seed in (0, 1, 2**70) for name in ("q_proj.weight", "k_proj.weight")]
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlation).max() < 0.15
    np.testing.assert_array_equal(draws[0], normal(0, "q_proj.weight", 1000))


def test_exp_is_right_to_the_last_bit() -> None:
    x = np.linspace(-20, 5, 101)
    np.testing.assert_allclose(exp(x), np.exp(x), rtol=3e-16)


def test_seeded_weights_are_lifelike() -> None:
    weights = seeded_weights(QWEN3_0_6B, 1)
    assert {name: weight.shape for name, weight in weights.items()} == weight_shapes(QWEN3_0_6B)
    for name, weight in weights.items():
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, weight.astype(ml_dtypes.bfloat16).astype(np.float32), err_msg=name)
    assert abs(weights["q_proj.weight"].std() - 0.02) < 1e-4
    q, k = weights["q_norm.weight"], weights["k_norm.weight"]
    for norm in (q, k):
        assert norm.min() > 0.2 and 0.8 < np.median(norm) < 1.25
        assert norm.max() > 3 and np.mean(norm == 1) < 0.05
    assert np.mean(q == k) < 0.05 and abs(np.corrcoef(np.log(q), np.log(k))[0, 1]) < 0.4


@pytest.mark.parametrize("seed", [0, 1])
def test_attention_is_neither_flat_nor_saturated(seed: int) -> None:
    probs: dict[str, Array] = {}
    inputs = make_inputs(QWEN3_0_6B, THETA, 1, 12, seed)["chapter"]
    forward(seeded_weights(QWEN3_0_6B, seed), inputs, QWEN3_0_6B, lambda name, value: probs.setdefault(name, value))
    p = probs["probs"][0, :, 1:].astype(np.float64)
    entropy = -np.sum(p * np.log(np.maximum(p, 1e-300)), axis=-1) / np.log(np.arange(2, 13))
    assert 0.4 < entropy.mean() < 0.75
    assert 0.4 < probs["output"].std() / 0.5 < 1.5


@pytest.mark.parametrize(("batch", "seq_len"), [(3, 7), (2, 2), (1, 64)])
def test_inputs(batch: int, seq_len: int) -> None:
    inputs = make_inputs(SMALL, 5e4, batch, seq_len, 4)
    assert tuple(inputs) == INPUTS
    for arrays in inputs.values():
        assert {name: array.shape for name, array in arrays.items()} == {
            "hidden_states": (batch, seq_len, 48),
            "cos": (batch, seq_len, 10),
            "sin": (batch, seq_len, 10),
            "d_output": (batch, seq_len, 48),
        }
        assert all(array.dtype == np.float32 for array in arrays.values())
        assert 0.8 < arrays["d_output"].std() < 1.2
    chapter, stress = inputs["chapter"], inputs["stress"]
    assert np.abs(np.corrcoef([x[name].ravel() for x in (chapter, stress) for name in x if "_" in name])).min() < 0.5
    assert not np.array_equal(chapter["d_output"], stress["d_output"])

    assert np.sqrt(np.mean(chapter["hidden_states"] ** 2, axis=-1)).min() > 0.7
    size = np.sqrt(np.mean(stress["hidden_states"].astype(np.float64) ** 2, axis=-1))
    np.testing.assert_allclose(np.log10(np.sort(size)), np.linspace(-4, 2, seq_len)[None].repeat(batch, 0), atol=0.2)
    if seq_len > 2:  # in an order of its own, other than by size
        assert all((np.diff(row) < 0).any() for row in size)
    if batch > 1 and seq_len > 2:
        assert not np.array_equal(size[0].argsort(), size[1].argsort())


def test_a_row_of_one_token_has_one_magnitude() -> None:
    hidden_states = make_inputs(SMALL, 5e4, 2, 1, 0)["stress"]["hidden_states"]
    assert hidden_states.shape == (2, 1, 48) and 5e-5 < hidden_states.std() < 2e-4


# --------------------------------------------------------------------------------------------------------------- files


def test_a_case_is_what_its_files_hold(tmp_path: Path) -> None:
    case = small_case(tmp_path, seed=9)
    again = read_case(case.paths["weights"], {name: case.paths[name] for name in INPUTS})
    assert again.sha256 == case.sha256 and again.config == SMALL and again.theta == 5e4
    for name, weight in seeded_weights(SMALL, 9).items():
        np.testing.assert_array_equal(again.weights[name], weight)
    for name, arrays in make_inputs(SMALL, 5e4, 2, 5, 9).items():
        assert again.made[name] == {"kind": name, "seed": 9, "batch": 2, "seq_len": 5, "theta": 5e4}
        for key, array in arrays.items():
            np.testing.assert_array_equal(again.inputs[name][key], array)
    with safe_open(case.paths["weights"], framework="numpy") as file:
        config, source = (json.loads(file.metadata()[key]) for key in ("config", "source"))
    assert config["head_dim"] == 10 and config["rope_theta"] == 5e4 and config["model_type"] == "qwen3"
    assert source["kind"] == "seeded" and source["seed"] == 9 and source["layer"] == 0
    assert "Qwen3-0.6B" not in case.describe()  # another geometry


def test_a_name_means_one_content(tmp_path: Path) -> None:
    case = seeded_case(tmp_path, 3, config=SMALL)
    plain = {path.name: path.read_bytes() for path in case.paths.values()}
    for batch, seq_len, seed, label in ((2, 12, 3, "b2t12"), (1, 7, 3, "b1t7"), (1, 12, 5, "b1t12s5")):
        other = write_inputs(tmp_path, case, batch, seq_len, seed)
        assert other.paths["chapter"].name == f"seeded-3.{label}.chapter.safetensors"
        assert other.made["stress"]["seed"] == seed
    assert plain == {path.name: path.read_bytes() for path in case.paths.values()}
    assert read_case(case.paths["weights"]).sha256 == case.sha256  # those beside it, without a label


def test_arrays_are_what_an_implementation_is_given(tmp_path: Path) -> None:
    case = small_case(tmp_path)
    for dtype in ("float32", "float64"):
        weights, inputs, d_output = case.arrays("stress", "model", dtype)
        assert set(inputs) == {"hidden_states", "cos", "sin"}
        for array in (*weights.values(), *inputs.values(), d_output):
            assert array.dtype == dtype and array.flags.c_contiguous
        np.testing.assert_array_equal(inputs["sin"], case.inputs["stress"]["sin"])
        neutral = case.arrays("stress", "neutral", dtype)[1]
        assert (neutral["cos"] == 1).all() and (neutral["sin"] == 0).all() and neutral["cos"].shape == (2, 5, 10)
    assert case.arrays("chapter", "model", "float32")[0]["q_proj.weight"] is case.weights["q_proj.weight"]
    assert "d_output" in case.inputs["stress"]
    with pytest.raises(ValueError, match="neutral"):
        case.arrays("chapter", "none", "float32")


def test_float64_stays_and_bfloat16_is_widened(tmp_path: Path) -> None:
    case = small_case(tmp_path)
    stored = metadata(case.paths["weights"])
    third = {name: np.full(value.shape, 1 / 3) for name, value in case.weights.items()}
    third["q_norm.weight"] = third["q_norm.weight"].astype(np.float32)
    write_tensors(tmp_path / "wide.safetensors", third, stored)
    wide = read_case(tmp_path / "wide.safetensors", {}).weights
    assert wide["q_proj.weight"].dtype == np.float64 and wide["q_proj.weight"][0, 0] == 1 / 3
    assert wide["q_norm.weight"].dtype == np.float32
    for dtype in (ml_dtypes.bfloat16, np.float16):
        path = tmp_path / "narrow.safetensors"
        save_file(
            {name: value.astype(dtype) for name, value in case.weights.items()},
            path,
            {key: json.dumps(value) for key, value in stored.items()},
        )
        weight = read_case(path, {}).weights["q_proj.weight"]
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, case.weights["q_proj.weight"].astype(dtype).astype(np.float32))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": np.ones(3, np.float32)}, {})
    before = path.read_bytes()

    def broken(*_: object) -> None:
        assert len(list(tmp_path.iterdir())) == 2  # the temporary file, in the same directory
        raise error

    monkeypatch.setattr(np, "ascontiguousarray", broken)
    with pytest.raises((BadInput, KeyboardInterrupt)) as raised:
        write_tensors(path, {"x": np.zeros(3, np.float32)}, {})
    assert "No space left" in str(raised.value) or isinstance(error, KeyboardInterrupt)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(BadInput, match="cannot be written"):
        small_case(tmp_path / "weights")


def metadata(path: Path) -> dict[str, object]:
    with safe_open(path, framework="numpy") as file:
        return {key: json.loads(value) for key, value in file.metadata().items()}


def test_the_message_is_one_line() -> None:
    """Also where a file's own words, which may be bytes for a terminal, or megabytes, stand in it."""
    assert str(BadInput("a\nb\n  c")) == "a b c"
    assert str(BadInput("a\x1b[2J\u202e\udcffb\u2028c\x00")) == "a\\x1b[2J\\u202e\\udcffb c\\x00"
    assert str(BadInput(f"file: {'x' * 10**7}")).startswith("file: xx") and len(str(BadInput("x" * 10**7))) < 1500


def test_no_framework_is_imported() -> None:
    code = "import sys, harness.export; print([m for m in ('torch', 'jax', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
