"""A case: one layer's weights and configuration, and the inputs that every implementation is given.

It lives in files, each with one writer, so that any step can be repeated alone:

    <name>.safetensors            the weights of `impls.spec.weight_shapes`; metadata `config` and `source` (JSON)
    <name>.<input>.safetensors    hidden_states [B,T,D], cos and sin [B,T,H], d_output [B,T,D]; of a padded batch also
                                  attention_mask [B,T], 1 for a token and 0 for padding; metadata `source` (JSON)

The same seed gives the same bytes on every platform: integer arithmetic, IEEE's basic operations and Python's
`decimal` make the numbers, not a math library, whose last bit varies. (The exception, cos and sin, are float64 rounded
to float32, which hides that bit.)
"""

import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # also teaches safetensors' NumPy reader bfloat16
import numpy as np
from safetensors import SafetensorError, safe_open

from harness.files import header_length, is_number, is_whole, nearest, parse, read_header
from impls.spec import BIASES, WEIGHTS, AttentionConfig, weight_shapes

Array = np.ndarray
Arrays = dict[str, Array]

QWEN3_0_6B = AttentionConfig(
    hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6
)
THETA = 1e6  # Qwen3-0.6B's
BATCH, SEQ_LEN = 1, 12
INPUTS = ("chapter", "stress")
FLOATS = ("float16", "bfloat16", "float32", "float64")


class BadInput(ValueError):
    """Unusable input. The message is the one line that the user gets: where, what is wrong, what to do.

    A command prints it as `error: <message>` and exits with status 2.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message[:100_000].split())
        line = line if len(line) < 1500 else f"{line[:1000]} … {line[-400:]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


@dataclass(frozen=True, eq=False)
class Case:
    """Weights (float32; float64 where the file is) under their names relative to `self_attn`, and inputs by name.

    `source` says where the weights come from, `made` how each input was made; both as in the files' metadata.
    `sha256` and `paths` have the key "weights" and one for each input.
    """

    name: str
    config: AttentionConfig
    theta: float
    layer: int
    source: dict[str, Any]
    weights: Arrays
    sha256: dict[str, str]
    paths: dict[str, Path]
    inputs: dict[str, Arrays] = field(default_factory=dict)
    made: dict[str, dict[str, Any]] = field(default_factory=dict)

    def describe(self) -> str:
        """Which weights these are, in plain words."""
        model, revision, dtype = (self.source.get(key) for key in ("model", "revision", "dtype"))
        if self.source["kind"] == "seeded":
            whose = f" with {model}'s geometry" if model else ""
            return f"seeded weights{whose} (seed {self.source.get('seed')}); these are not Qwen's trained weights"
        at = f" at revision {revision}" if revision else ""
        return f"layer {self.layer} of the checkpoint {model}{at} ({dtype} on disk)"

    def rounded(self, dtype: str) -> "Case":
        """The case whose weights and inputs are rounded to bfloat16 or float16; for a longer dtype, the case itself.

        Raises BadInput where a value is beyond float16.
        """
        if np.dtype(dtype).itemsize > 2:
            return self

        def short(arrays: Arrays, where: Path) -> Arrays:
            with np.errstate(over="ignore"):
                result = {name: value.astype(dtype).astype(np.float32) for name, value in arrays.items()}
            for name, value in result.items():
                if not np.isfinite(value).all():
                    raise BadInput(f"{where}: {name} has values beyond {dtype}; use --dtype bfloat16 or float32")
            return result

        inputs = {name: short(arrays, self.paths[name]) for name, arrays in self.inputs.items()}
        return replace(self, weights=short(self.weights, self.paths["weights"]), inputs=inputs)

    def arrays(self, input: str, rope: str, dtype: str) -> tuple[Arrays, Arrays, Array]:
        """What an implementation is given: weights, inputs (hidden_states, cos, sin) and d_output of this input.

        Contiguous, converted once to `dtype`, one of FLOATS; what is already so is not copied. A float64 run that is
        the truth of a shorter one starts from the same values: see `rounded`. Where the batch is padded, the inputs
        have attention_mask, too: see `additive_mask`.
        `rope` is "model" (the tables) or "neutral" (cos = 1, sin = 0: the rotation that turns nothing).
        """
        if rope not in ("model", "neutral"):
            raise ValueError(f"rope is {rope!r}; it must be 'model' or 'neutral'")
        given = {key: np.ascontiguousarray(value, dtype) for key, value in self.inputs[input].items()}
        if rope == "neutral":
            given |= {"cos": np.ones_like(given["cos"]), "sin": np.zeros_like(given["sin"])}
        if "attention_mask" in given:
            given["attention_mask"] = additive_mask(given["attention_mask"])
        d_output = given.pop("d_output")
        return {key: np.ascontiguousarray(value, dtype) for key, value in self.weights.items()}, given, d_output

    def seen(self, input: str) -> Array | None:
        """Which keys each query of this input may see, [B,1,T,S], where its batch is padded; else None."""
        mask = self.inputs.get(input, {}).get("attention_mask")
        return None if mask is None else additive_mask(mask) == 0


# ------------------------------------------------------------------------------------------------------ seeded numbers


def stream(seed: int, name: str) -> np.random.PCG64:
    """A stream of random 64-bit words for each seed and name.

    NumPy promises that the raw stream of a bit generator never changes; what `Generator` makes of it may.
    """
    return np.random.PCG64([seed, *name.encode()])


def normal(seed: int, name: str, *shape: int) -> Array:
    """Normal numbers, mean 0 and variance 1, float32 with full mantissas, the same on every platform.

    Each is the sum of twelve uniform 32-bit integers less its mean, divided by 2^32 (the Irwin-Hall distribution):
    exact integer arithmetic, rounded once, to float32. Variance 1 − 2^(−64), kurtosis 2.9, range ±6.
    """
    n, chunk = math.prod(shape), 2**14  # a chunk stays in the cache; the numbers do not depend on its size
    random, numbers = stream(seed, name), np.empty(n, np.float32)
    for start in range(0, n, chunk):
        words = random.random_raw(6 * min(chunk, n - start))
        pairs = ((words & np.uint64(2**32 - 1)) + (words >> np.uint64(32))).reshape(-1, 6)
        total = pairs[:, 0] + pairs[:, 1] + pairs[:, 2] + pairs[:, 3] + pairs[:, 4] + pairs[:, 5]
        numbers[start : start + chunk] = (total.astype(np.int64) - 6 * (2**32 - 1)) * 2.0**-32
    return numbers.reshape(shape)


def order(seed: int, name: str, *shape: int) -> Array:
    """A random order of the numbers 0 .. shape[-1] − 1 in each row, integers."""
    return stream(seed, name).random_raw(math.prod(shape)).reshape(shape).argsort(axis=-1, kind="stable")


def exp(x: Array) -> Array:
    """e^x, float64, by `decimal`, whose exp is correctly rounded; a math library's differs in its last bit."""
    return np.array([float(Decimal(value).exp()) for value in x.ravel().tolist()]).reshape(x.shape)


def bfloat16(x: Array) -> Array:
    """Rounded to bfloat16, as weights are on disk, and held in float32."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def seeded_weights(config: AttentionConfig, seed: int) -> Arrays:
    """Lifelike weights, behind which no bug hides: bfloat16 numbers in float32 arrays, shapes of `weight_shapes`.

    Projections are normal with standard deviation 0.64 / √inputs, which is 0.02 for Qwen3-0.6B's q, k and v; biases,
    where there are any, with 0.64, as what they are added to for plain normal inputs. The norms' weights are
    log-normal, e^(0.4 z), with one channel in 32 four times larger; q's and k's differ.
    Measured for Qwen3-0.6B, 20 seeds, `chapter` at T = 12: scores have standard deviation 1.5 to 3.0, and the
    softmax's entropy is 0.60 of ln(visible keys) on average (5 % of its rows below 0.2, 5 % above 0.9), so that
    attention is neither flat nor saturated.
    """
    weights = {}
    for name, shape in weight_shapes(config).items():
        weight = normal(seed, name, *shape)
        if len(shape) == 2:
            weight *= np.float32(0.64 / math.sqrt(shape[1]))
        elif name in BIASES:
            weight *= np.float32(0.64)
        else:
            weight = exp(0.4 * weight.astype(np.float64))
            weight[order(seed, f"{name} large", *shape) < max(1, shape[0] // 32)] *= 4
        weights[name] = bfloat16(weight)
    return weights


def rope_tables(head_dim: int, theta: float, batch: int, seq_len: int) -> tuple[Array, Array]:
    """cos and sin [B,T,H] of the angles t θ^(−2i/H), float32; the H/2 angles stand twice, as in Hugging Face.

    Computed in float64 and rounded once. Hugging Face's angles are float32, so its tables are up to t · 2^(−24) off.
    """
    log_theta = float(Decimal(theta).ln())
    frequencies = exp(np.arange(0, head_dim, 2) / head_dim * -log_theta)
    angles = np.arange(seq_len)[:, None] * np.tile(frequencies, 2)
    cos, sin = (np.tile(table.astype(np.float32), (batch, 1, 1)) for table in (np.cos(angles), np.sin(angles)))
    return cos, sin


def additive_mask(attention_mask: Array) -> Array:
    """3.10 for a padded batch: of [B,T] ones and zeros, [B,1,T,S] to be added to the scores, in the same dtype.

    As in Hugging Face: 0 where key s is a token and no later than query t, else the dtype's most negative number
    (of float64, float32's: what computes in float32 inside can hold it).
    """
    T = attention_mask.shape[1]
    seen = np.tri(T, dtype=bool) & (attention_mask[:, None, :] > 0)
    lowest = max(float(ml_dtypes.finfo(attention_mask.dtype).min), float(np.finfo(np.float32).min))
    return np.where(seen, 0, lowest).astype(attention_mask.dtype)[:, None]


def make_inputs(
    config: AttentionConfig, theta: float, batch: int, seq_len: int, seed: int, left_pad: Sequence[int] = ()
) -> dict[str, Arrays]:
    """The inputs `chapter` and `stress`: hidden_states [B,T,D], cos and sin [B,T,H], d_output [B,T,D], float32.

    `chapter` is plain normal. `stress` is normal times a magnitude for each token, from 10^(−4) to 10^2 in equal
    ratios within a row, in random order (a row of one token has 10^(−4)). d_output is random, never ones: the
    rows of a softmax's Jacobian sum to zero, so that a backward that returns nothing would pass.

    With `left_pad`, so many tokens at the start of each of the B sequences are padding: attention_mask [B,T] is 0
    there, positions are counted from the first token, and no gradient comes from padding's output.
    """
    cos, sin = rope_tables(config.head_dim, theta, batch, seq_len)
    padding = np.array(left_pad or [0] * batch)[:, None]
    position = np.arange(seq_len) - padding
    rows = np.arange(batch)[:, None], np.maximum(position, 0)
    cos, sin = cos[rows], sin[rows]
    inputs = {}
    for name in INPUTS:
        hidden_states, d_output = (
            normal(seed, f"{name} {array}", batch, seq_len, config.hidden_size)
            for array in ("hidden_states", "d_output")
        )
        if name == "stress":
            magnitudes = exp(np.linspace(-4, 2, seq_len) * float(Decimal(10).ln())).astype(np.float32)
            hidden_states *= magnitudes[order(seed, "stress order", batch, seq_len)][:, :, None]
        inputs[name] = {"hidden_states": hidden_states, "cos": cos, "sin": sin, "d_output": d_output}
        if padding.any():
            mask = (position >= 0).astype(np.float32)
            inputs[name] |= {"attention_mask": mask, "d_output": d_output * mask[:, :, None]}
    return inputs


# ------------------------------------------------------------------------------------------------------------- writing


def write_weights(
    directory: Path,
    name: str,
    weights: Mapping[str, Array],
    config: AttentionConfig,
    theta: float,
    source: dict[str, Any],
) -> Path:
    """Writes `<name>.safetensors` into `directory`, made if need be. Raises BadInput where it cannot."""
    path = directory / f"{name}.safetensors"
    stored = {"model_type": "qwen3", **asdict(config), "rope_theta": theta}
    if not config.attention_bias:  # a file that does not say has none, as Hugging Face reads it
        del stored["attention_bias"]
    write_tensors(path, weights, {"config": stored, "source": source})
    return path


def write_inputs(
    directory: Path,
    case: Case,
    batch: int = BATCH,
    seq_len: int = SEQ_LEN,
    seed: int | None = None,
    left_pad: Sequence[int] = (),
) -> Case:
    """Makes the inputs of `case`, writes them into `directory`, and returns the case with them, as read back.

    `seed` is the case's own unless given. What is not usual stands in the files' names (`<name>.b2t64s5.chapter`),
    so that a name always means one content. Raises BadInput where it cannot write.
    """
    usual = case.source.get("seed", 0)
    seed = usual if seed is None else seed
    left_pad = left_pad if any(left_pad) else ()
    label = f".b{batch}t{seq_len}" if (batch, seq_len, seed) != (BATCH, SEQ_LEN, usual) or left_pad else ""
    label += f"p{'-'.join(map(str, left_pad))}" if left_pad else ""
    label += f"s{seed}" if seed != usual else ""
    made = {"seed": seed, "batch": batch, "seq_len": seq_len, "theta": case.theta}
    made |= {"left_pad": list(left_pad)} if left_pad else {}
    paths = {}
    for name, arrays in make_inputs(case.config, case.theta, batch, seq_len, seed, left_pad).items():
        paths[name] = directory / f"{case.name}{label}.{name}.safetensors"
        write_tensors(paths[name], arrays, {"source": {"kind": name, **made}})
    return read_inputs(case, paths)


def write_tensors(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    """A safetensors file of floating tensors, whole or not at all; each item of metadata becomes JSON.

    The same values give the same bytes, which the library does not promise: it writes metadata in a random order.
    Raises BadInput where it cannot write.
    """
    header: dict[str, Any] = {"__metadata__": {key: json.dumps(value) for key, value in sorted(metadata.items())}}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # the wider first: aligned
    end = 0
    for name, value in ordered:
        start, end = end, end + value.nbytes
        dtype = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16"}[value.dtype.name]
        header[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for _, value in ordered:
                    bits = value.view(np.uint16) if value.dtype.name == "bfloat16" else value
                    file.write(np.ascontiguousarray(bits, bits.dtype.newbyteorder("<")).data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror}); choose another directory") from error


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A folder for files that are to lie in `directory`: they move there at the end, or are gone where it raises.

    So that of several files, all are written or none; it is made when the first of them is. Raises BadInput.
    """
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    stage = directory / f".new-{os.getpid()}-{threading.get_native_id()}"
    for left in directory.glob(".new-*"):  # by a process that was killed, or was of our number
        if left == stage or not alive(left.name.split("-")[1]):
            shutil.rmtree(left, ignore_errors=True)
    try:
        yield stage
        files = sorted(stage.iterdir()) if stage.exists() else []
        for path in files:
            if (directory / path.name).is_dir():
                raise BadInput(f"{directory / path.name}: cannot be written (it is a folder); choose another directory")
        for path in files:
            path.replace(directory / path.name)
        made = []
    except BadInput as error:
        raise BadInput(str(error).replace(f"{stage}", f"{directory}")) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        for each in made:
            with suppress(OSError):  # not there, or not empty
                each.rmdir()


def alive(process: str) -> bool:
    """Whether a process of this number runs (or cannot be asked)."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError, ValueError):
        pass
    return True


def seeded_case(
    directory: Path,
    seed: int = 0,
    batch: int = BATCH,
    seq_len: int = SEQ_LEN,
    config: AttentionConfig = QWEN3_0_6B,
    theta: float = THETA,
    left_pad: Sequence[int] = (),
) -> Case:
    """The case `seeded-<seed>`, written to `directory` and read from it; give another geometry its own directory."""
    model = "Qwen3-0.6B" if (config, theta) == (QWEN3_0_6B, THETA) else None
    source = {"kind": "seeded", "model": model, "revision": None, "layer": 0, "dtype": "bfloat16", "seed": seed}
    path = write_weights(directory, f"seeded-{seed}", seeded_weights(config, seed), config, theta, source)
    return write_inputs(directory, read_case(path, {}), batch, seq_len, left_pad=left_pad)


# ------------------------------------------------------------------------------------------------------------- reading


def read_case(weights: Path, inputs: Mapping[str, Path] | None = None) -> Case:
    """The case in these files, checked; without `inputs`, those that lie beside the weights. Raises BadInput."""
    tensors, metadata = read_tensors(weights, WEIGHTS, optional=BIASES)
    stored, source = (read_json(metadata.get(key), f"{weights}: metadata {key!r}") for key in ("config", "source"))
    config, theta = layer_config(stored, str(weights))
    if wrong := weight_shapes(config).keys() ^ tensors.keys():
        verb, says = ("lacks", "true") if config.attention_bias else ("also holds", "false")
        raise BadInput(
            f"{weights}: {verb} {', '.join(sorted(wrong))}, while its attention_bias is {says}; export it again"
        )
    for key, least in (("layer", 0), ("seed", 0)):
        if not is_whole(source.get(key, least), least):
            raise BadInput(
                f"{weights}: metadata 'source' has {key} {source[key]!r}, not a whole number; export it again"
            )
    if source.get("kind") not in ("seeded", "checkpoint", "hub") or "layer" not in source:
        raise BadInput(
            f"{weights}: metadata 'source' does not say kind (seeded, checkpoint, hub) and layer; export it again"
        )
    for key in ("model", "revision", "dtype"):
        if not isinstance(source.get(key), str | None):
            raise BadInput(f"{weights}: metadata 'source' has {key} {source[key]!r}, not a text; export it again")
    case = Case(
        name=weights.stem,
        config=config,
        theta=theta,
        layer=source["layer"],
        source=source,
        weights=check_weights(tensors, config, str(weights)),
        sha256={"weights": sha256(weights)},
        paths={"weights": weights},
    )
    return read_inputs(case, inputs_beside(weights) if inputs is None else inputs)


def inputs_beside(weights: Path) -> dict[str, Path]:
    """The files of the usual inputs that lie beside a file of weights: all of them or none, else BadInput."""
    paths = {name: weights.with_name(f"{weights.stem}.{name}.safetensors") for name in INPUTS}
    missing = [str(path) for path in paths.values() if not path.exists()]
    if missing and len(missing) < len(paths):
        raise BadInput(f"{missing[0]}: missing, though the other input is there; --seed 0 makes both anew")
    return {} if missing else paths


def read_inputs(case: Case, paths: Mapping[str, Path]) -> Case:
    """The case with the inputs in these files, checked to fit it. Raises BadInput."""
    inputs, made = {}, {}
    for name, path in paths.items():
        arrays, metadata = read_tensors(path, ("hidden_states", "cos", "sin", "d_output"), optional=["attention_mask"])
        made[name] = read_json(metadata.get("source"), f"{path}: metadata 'source'")
        if made[name].get("theta") != case.theta:
            raise BadInput(
                f"{path}: made for theta {made[name].get('theta')}, the layer has {case.theta}; export it again"
            )
        B, T = (*arrays["hidden_states"].shape, 0, 0)[:2]
        if arrays["hidden_states"].ndim != 3 or B < 1 or T < 1:
            raise BadInput(f"{path}: hidden_states has shape {list(arrays['hidden_states'].shape)}; expected [B, T, D]")
        D, H = case.config.hidden_size, case.config.head_dim
        sizes = {"hidden_states": (B, T, D), "cos": (B, T, H), "sin": (B, T, H), "d_output": (B, T, D)}
        inputs[name] = {
            key: check_tensor(array, key, sizes.get(key, (B, T)), str(path)) for key, array in arrays.items()
        }
        check_padding(inputs[name], str(path))
        check_made(made[name], inputs[name], str(path))
    digests = {name: sha256(path) for name, path in paths.items()}
    return replace(case, inputs=inputs, made=made, sha256=case.sha256 | digests, paths={**case.paths, **paths})


def check_made(made: Mapping[str, Any], inputs: Arrays, where: str) -> None:
    """Raises BadInput where an input's metadata say what it cannot be; the report shows them beside it."""
    B, T, _ = inputs["hidden_states"].shape
    seed, tokens = made.get("seed", 0), made.get("tokens", [""] * T)
    if not is_whole(seed, 0):
        raise BadInput(f"{where}: made from the seed {seed!r}, which is none; export it again")
    if not isinstance(tokens, list) or len(tokens) != T or not all(isinstance(token, str) for token in tokens):
        raise BadInput(f"{where}: metadata 'source' has other tokens than one text for each position; export it again")
    absent = 1 - inputs.get("attention_mask", np.ones((B, T)))
    if "left_pad" in made and (made["left_pad"] != absent.sum(axis=1).tolist() or made.get("seq_len") != T):
        raise BadInput(f"{where}: metadata 'source' has another left_pad than attention_mask; export it again")


def check_padding(inputs: Arrays, where: str) -> None:
    """Raises BadInput where a mask is not of zeros and ones, or a gradient comes from a query that sees no token."""
    if "attention_mask" not in inputs:
        return
    mask = inputs["attention_mask"]
    if not np.isin(mask, (0, 1)).all() or not mask.any(axis=1).all():
        raise BadInput(
            f"{where}: attention_mask must be 1 for a token and 0 for padding, with a token in each sequence"
        )
    if inputs["d_output"][np.cumsum(mask, axis=1) == 0].any():
        raise BadInput(f"{where}: d_output is not 0 at padding that sees no token; its output means nothing")


@contextmanager
def open_tensors(path: Path, way_out: str = "export it again") -> Iterator[Any]:
    """A safetensors file to read from; whatever makes it unreadable becomes a BadInput."""
    try:
        if path.exists() and not path.is_file():  # to open a pipe is to wait
            raise BadInput(f"{path}: a folder or a device, where a file should be; {way_out}")
        with path.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(0)
            header = read_header(opened.read(header_length(opened.read(8), size)), size)
        for name, tensor in header.tensors.items():
            if tensor.dtype is None:
                raise BadInput(f"{path}: {name} holds numbers of a kind that NumPy lacks; {way_out}")
            if tensor.dtype.name not in FLOATS:
                raise BadInput(f"{path}: {name} holds {tensor.dtype.name} numbers; expected one of {', '.join(FLOATS)}")
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); make it readable, or give another") from error
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"{path}: not a readable safetensors file ({error}); {way_out}") from error
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, SafetensorError, TypeError) as error:
        raise BadInput(f"{path}: not a readable safetensors file ({error}); {way_out}") from error


def read_tensors(path: Path, names: Iterable[str], optional: Collection[str] = ()) -> tuple[Arrays, dict[str, str]]:
    """Exactly these tensors, as on disk, and the metadata. Raises BadInput, before reading any tensor.

    The `optional` ones are read where the file has them.
    """
    with open_tensors(path) as file:
        found, expected = set(file.keys()), set(names)
        if any(".self_attn." in name for name in found):
            raise BadInput(f"{path}: a checkpoint's file; give the checkpoint's directory")
        for what, wrong in (("lacks", expected - found), ("also holds", found - expected - set(optional))):
            if wrong:
                some, all_ = ", ".join(sorted(wrong)[:6]), ", ".join(sorted(expected))
                near = nearest(min(wrong), found - expected) if what == "lacks" else None
                hint = f" (it holds {near})" if near else ""
                raise BadInput(f"{path}: {what} {some}{hint}; expected exactly {all_}; export it again")
        wanted = [name for name in (*names, *optional) if name in found]
        return {name: file.get_tensor(name) for name in wanted}, file.metadata() or {}


def check_weights(tensors: Mapping[str, Array], config: AttentionConfig, where: str) -> Arrays:
    """The layer's weights, each as `check_tensor` gives it."""
    return {name: check_tensor(tensors[name], name, shape, where) for name, shape in weight_shapes(config).items()}


def check_tensor(value: Array, name: str, shape: tuple[int, ...], where: str) -> Array:
    """The tensor, widened exactly to float32 (float64 stays): floating, of this shape and finite, else BadInput."""
    if value.dtype.name not in FLOATS:
        raise BadInput(f"{where}: {name} holds {value.dtype.name} numbers; expected one of {', '.join(FLOATS)}")
    if value.shape != shape:
        key = (WEIGHTS | BIASES).get(name)
        letters = f" = [{', '.join(key)}]" if key else ""
        hint = "; head_dim (H) is a size of its own, not hidden_size / num_attention_heads" if "proj" in name else ""
        raise BadInput(f"{where}: {name} has shape {list(value.shape)}, expected {list(shape)}{letters}{hint}")
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(value.astype(np.float32, copy=False))
    if bad.any():
        first = [int(i) for i in np.argwhere(bad)[0]]
        raise BadInput(
            f"{where}: {name} has {bad.sum()} of {bad.size} values that are NaN, infinite or beyond float32, "
            f"the first ({value[tuple(first)]}) at {first}; repair the file"
        )
    return value if value.dtype == np.float64 else value.astype(np.float32, copy=False)


FIELD: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (partial(is_whole, least=1), "a whole number of at least 1"),
    float: (is_number, "a number"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
}
"""What a field of this type of a configuration must be; true and false are no numbers, though Python takes them for 1
and 0."""


def layer_config(given: Mapping[str, Any], where: str) -> tuple[AttentionConfig, float]:
    """The configuration and theta in Hugging Face's fields. Raises BadInput where one is missing or impossible."""
    if given.get("model_type") != "qwen3":
        raise BadInput(f"{where}: model_type is {given.get('model_type')!r}; only 'qwen3' layers can be compared")
    kinds = {field.name: field.type for field in fields(AttentionConfig)}
    known = {field.name: field.default for field in fields(AttentionConfig) if field.default is not MISSING} | {**given}
    for name, kind in {**kinds, "rope_theta": float}.items():
        if name not in known:
            raise BadInput(f"{where}: the configuration lacks {name}")
        fits, what = FIELD[kind]
        if not fits(known[name]):
            raise BadInput(f"{where}: the configuration is unusable: {name} is {known[name]!r}; it must be {what}")
    try:
        config = AttentionConfig(**{name: known[name] for name in kinds})
    except ValueError as error:
        raise BadInput(f"{where}: the configuration is unusable: {error}") from error
    theta = given["rope_theta"]
    if theta < 1:
        raise BadInput(f"{where}: rope_theta is {theta}; it must be a number of at least 1")
    return config, float(theta)


def read_json(text: str | bytes | None, where: str, way_out: str = "export it again") -> dict[str, Any]:
    """A JSON object, else BadInput."""
    if text is None:
        raise BadInput(f"{where} is missing; write the file with python -m harness.export")
    try:
        value = parse(text)
    except ValueError as error:
        raise BadInput(f"{where} cannot be read as JSON: {error}; {way_out}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{where} is not a JSON object; {way_out}")
    return value


def sha256(path: Path) -> str:
    """The file's SHA-256, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
