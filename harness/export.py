"""Case files from a local Hugging Face checkpoint or from a seed:  python -m harness.export

Reads `config.json` and the six tensors of the layer asked for, never the model, without transformers.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.case import (
    BATCH,
    FLOATS,
    SEQ_LEN,
    Array,
    Arrays,
    BadInput,
    Case,
    check_weights,
    inputs_beside,
    is_whole,
    layer_config,
    open_tensors,
    read_case,
    read_inputs,
    read_json,
    seeded_case,
    write_inputs,
    write_weights,
)
from impls.spec import WEIGHTS, AttentionConfig

QWEN3_DEFAULTS = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""What Hugging Face's Qwen3Config takes for a field that config.json does not have."""

MOST_TOKENS = 2**20  # 4 GiB of hidden states for Qwen3-0.6B; the scores of one row of them are far beyond any memory


def open_case(
    weights: Path | None = None,
    layer: int | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    directory: Path = Path("weights"),
) -> Case:
    """The case that the command line chooses, with its inputs, written to `directory` where it is made anew.

    `weights` is a checkpoint directory, an exported file, or None for the seeded case. An exported file comes with
    the inputs beside it, unless batch, seq_len or seed asks for others. None elsewhere means layer 0 (or the file's),
    batch 1, 12 positions, and the seed of the case, else 0. Raises BadInput.
    """
    for flag, value, least in (("--batch", batch, 1), ("--seq-len", seq_len, 1), ("--seed", seed, 0)):
        if value is not None and value < least:
            raise BadInput(f"{flag} is {value}; it must be at least {least}")
    B, T = batch or BATCH, seq_len or SEQ_LEN
    if B * T > MOST_TOKENS:
        raise BadInput(f"--batch {B} and --seq-len {T} make {B * T} tokens; an input holds at most {MOST_TOKENS}")

    if weights is None:
        if layer:
            raise BadInput(
                f"--layer {layer}: the seeded weights are one layer, number 0; --weights chooses a checkpoint"
            )
        return seeded_case(directory, seed or 0, B, T)
    if weights.exists() and not (weights.is_dir() or weights.is_file()):
        raise BadInput(
            f"{weights}: neither a folder nor a file; give a checkpoint folder or an exported .safetensors file"
        )
    if weights.is_dir():
        return write_inputs(directory, read_case(export_layer(weights, layer or 0, directory), {}), B, T, seed)

    case = read_case(weights, {})
    if layer not in (None, case.layer):
        raise BadInput(f"--layer {layer}: {weights} holds layer {case.layer}; leave --layer out or give the checkpoint")
    beside = inputs_beside(weights) if batch is seq_len is seed is None else {}
    return read_inputs(case, beside) if beside else write_inputs(directory, case, B, T, seed)


def export_layer(checkpoint: Path, layer: int, directory: Path) -> Path:
    """Writes one layer of a checkpoint directory as `<directory>/<its name>-layer<N>.safetensors`. Raises BadInput."""
    try:
        text = (checkpoint / "config.json").read_bytes()
    except OSError as error:
        raise BadInput(f"{checkpoint}: no Hugging Face checkpoint, config.json: {error.strerror}") from error
    fields = read_json(text, str(checkpoint / "config.json"))
    weights, config, theta, dtype = extract_layer(fields, tensor_getter(checkpoint), layer, str(checkpoint))
    model = checkpoint.resolve().name
    source = {"kind": "checkpoint", "model": model, "revision": None, "layer": layer, "dtype": dtype}
    return write_weights(directory, f"{model}-layer{layer}", weights, config, theta, source)


def extract_layer(
    fields: Mapping[str, Any], get: Callable[[str], Array | None], layer: int, where: str
) -> tuple[Arrays, AttentionConfig, float, str]:
    """Weights, configuration, theta and dtype on disk of one layer, wherever its model is kept.

    `fields` is the model's config.json; `get(name)` gives a tensor as on disk, None where there is none.
    Raises BadInput, which begins with `where`.
    """
    config, theta = qwen3_config(fields, layer, f"{where}/config.json")
    tensors = {}
    for name in WEIGHTS:
        key = f"layers.{layer}.self_attn.{name}"
        tensor = get(f"model.{key}")
        tensor = get(key) if tensor is None else tensor  # a checkpoint of the base model has no "model."
        if tensor is None:
            raise BadInput(f"{where}: has no tensor model.{key}; is the checkpoint complete?")
        tensors[name] = tensor
    dtypes = sorted({tensor.dtype.name for tensor in tensors.values()})
    return check_weights(tensors, config, f"{where}, layer {layer}"), config, theta, " and ".join(dtypes)


def qwen3_config(fields: Mapping[str, Any], layer: int, where: str) -> tuple[AttentionConfig, float]:
    """Configuration and theta of this layer as Hugging Face reads config.json, of transformers 4 or 5.

    Raises BadInput where the layer does not exist or is not plain causal attention with plain RoPE.
    """
    known = {**QWEN3_DEFAULTS, **fields}
    if known["num_key_value_heads"] is None:
        known["num_key_value_heads"] = known["num_attention_heads"]
    rope = known.get("rope_scaling") or known.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise BadInput(f"{where}: the RoPE parameters are {rope!r}; expected an object")
    known["rope_theta"] = rope.get("rope_theta", known.get("rope_theta", 10000.0))
    config, theta = layer_config(known, where)

    layers = known["num_hidden_layers"]
    if not is_whole(layers, 1):
        raise BadInput(f"{where}: num_hidden_layers is {layers!r}; it must be a whole number of at least 1")
    if not 0 <= layer < layers:
        raise BadInput(f"{where}: the model has layers 0 to {layers - 1}; --layer {layer} is not among them")
    if reason := not_plain(known, rope, layer):
        raise BadInput(f"{where}: {reason}, which is not supported yet; choose another layer or model")
    return config, theta


def not_plain(known: Mapping[str, Any], rope: Mapping[str, Any], layer: int) -> str | None:
    """Why this layer is more than causal attention with plain RoPE and no biases, if it is."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or any(isinstance(value, dict) for value in rope.values()):
        return f"RoPE of the type {kind!r}" if kind != "default" else "RoPE that differs from layer to layer"
    if rope.get("partial_rotary_factor", known.get("partial_rotary_factor")) not in (None, 1):
        return "RoPE on a part of each head (partial_rotary_factor)"
    if known.get("quantization_config"):
        return "quantised weights (quantization_config)"
    if known.get("attention_bias"):
        return "projections with biases (attention_bias)"
    if types := known.get("layer_types"):
        if not isinstance(types, list) or len(types) != known["num_hidden_layers"]:
            return "layer_types without one entry for each layer"
        return None if types[layer] == "full_attention" else f"layer {layer} of the type {types[layer]!r}"
    windowed = known.get("use_sliding_window") and known["sliding_window"] is not None
    if windowed and not is_whole(known["max_window_layers"], layer + 1):  # the layers below it see everything
        return f"layer {layer} with a sliding window"
    return None


def tensor_getter(checkpoint: Path) -> Callable[[str], Array | None]:
    """`get(name)`: a tensor of a checkpoint directory as on disk, read alone; None where there is none.

    The files are model.safetensors, or those of model.safetensors.index.json, or the only *.safetensors there is.
    Raises BadInput.
    """
    index, single = checkpoint / "model.safetensors.index.json", checkpoint / "model.safetensors"
    files = [single] if single.exists() else sorted(checkpoint.glob("*.safetensors"))
    if not single.exists() and index.exists():
        shards = read_json(index.read_bytes(), str(index)).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise BadInput(f"{index}: has no weight_map from tensors to files; download the checkpoint again")
    elif len(files) == 1:
        with open_tensors(files[0]) as file:
            shards = dict.fromkeys(file.keys(), files[0].name)
    else:
        raise BadInput(
            f"{checkpoint}: {len(files)} files of safetensors and neither model.safetensors nor {index.name}; "
            f"save the model again with save_pretrained(..., safe_serialization=True)"
        )

    def get(name: str) -> Array | None:
        if name not in shards:
            return None
        if not (checkpoint / shards[name]).exists():
            raise BadInput(
                f"{checkpoint / shards[name]}: missing, it should hold {name}; download the checkpoint again"
            )
        with open_tensors(checkpoint / shards[name]) as file:
            tensor: Array = file.get_tensor(name)
            return tensor

    return get


# ------------------------------------------------------------------------------------------------------------- command


class Arguments(argparse.ArgumentParser):
    """A parser whose errors are a BadInput: one line, like every other unusable input."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; --help lists the arguments")


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that choose a case, alike in every command; they are `open_case`'s."""
    choice = parser.add_argument_group("case")
    choice.add_argument(
        "--weights",
        type=Path,
        metavar="DIR|FILE",
        help="a Hugging Face checkpoint directory or an exported .safetensors file (default: seeded weights with "
        "Qwen3-0.6B's geometry, the same everywhere, offline)",
    )
    choice.add_argument(
        "--layer", type=int, nargs="+", metavar="N", help="layers of the checkpoint, from 0 (default: 0, or the file's)"
    )
    choice.add_argument("--batch", type=int, metavar="B", help=f"sequences in an input (default: {BATCH})")
    choice.add_argument("--seq-len", type=int, metavar="T", help=f"tokens in a sequence (default: {SEQ_LEN})")
    choice.add_argument(
        "--seed",
        type=int,
        metavar="I",
        help="seed of the inputs, and of the weights where they are seeded (default: 0)",
    )


def open_cases(arguments: argparse.Namespace, directory: Path) -> list[Case]:
    """A case for each layer asked for by `add_case_arguments`. Raises BadInput, whatever is wrong with the files."""
    try:
        return [
            open_case(arguments.weights, layer, arguments.batch, arguments.seq_len, arguments.seed, directory)
            for layer in arguments.layer or [None]
        ]
    except OSError as error:
        raise BadInput(f"{error.filename or arguments.weights}: {error.strerror or error}") from error
    except (OverflowError, RecursionError, UnicodeError) as error:
        raise BadInput(f"{arguments.weights}: unusable ({type(error).__name__}: {error})") from error


def command(main: Callable[[], int]) -> NoReturn:
    """A main() as a process: SIGTERM ends it as Ctrl-C does, and threads that still compute are not waited for."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # SIGINT also where a shell's background job ignores it
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), interrupt)
    try:
        status = main()
        sys.stdout.flush()
    except SystemExit as end:
        status = int(end.code or 0)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # nobody reads on
        status = 141
    except OSError as error:  # nothing can be printed
        print(f"error: standard output: {error.strerror}", file=sys.stderr)
        status = 2
    sys.stderr.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files, says which they are, and returns the exit status: 0, or 2 for unusable input."""
    parser = Arguments(
        prog="python -m harness.export",
        description="Write one attention layer's weights, and the inputs it is compared on, as safetensors files.",
    )
    add_case_arguments(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("weights"), metavar="DIR", help="where the files go (default: weights/)"
    )
    parser.add_argument(
        "--case",
        type=Path,
        metavar="DIR",
        help="write there what a port in any language needs to be judged by harness.compare --trace: every run's "
        "weights and inputs, the probes, and case.json with the names and shapes of all stages",
    )
    parser.add_argument(
        "--dtype", choices=FLOATS, help="with --case: the runs in this dtype only (default: float32 and float64)"
    )
    try:
        arguments = parser.parse_args(argv)
        for case in open_cases(arguments, arguments.out):
            print(case.describe())
            for name, path in case.paths.items():
                print(f"  {path}  {path.stat().st_size:,} bytes  sha256 {case.sha256[name]}")
            if arguments.case:
                from harness import exchange

                dtypes = [arguments.dtype] if arguments.dtype else ["float32", "float64"]
                for path in exchange.write(case, dtypes, arguments.case):
                    print(f"  {path}")
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    command(main)
