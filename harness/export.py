"""Case files from a local Hugging Face checkpoint or from a seed:  python -m harness.export

Reads `config.json` and the tensors of the layer asked for, never the model, without transformers.
"""

import argparse
import hashlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

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
    layer_config,
    normal,
    read_case,
    read_inputs,
    rope_tables,
    seeded_case,
    staged,
    write_inputs,
    write_tensors,
    write_weights,
)
from harness.files import is_whole, nearest
from impls.spec import AttentionConfig, weight_shapes

if TYPE_CHECKING:
    from harness.checkpoint import Checkpoint

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

MOST_LAYERS = 10_000
MOST_TOKENS = 2**20  # 4 GiB of hidden states for Qwen3-0.6B; the scores of one row of them are far beyond any memory


def open_case(
    weights: Path | None = None,
    layer: int | None = None,
    batch: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    directory: Path = Path("weights"),
    model: "Checkpoint | None" = None,
    text: str | None = None,
    left_pad: Sequence[int] = (),
) -> Case:
    """The case that the command line chooses, with its inputs, written to `directory` where it is made anew.

    `weights` is a checkpoint directory, an exported file, or None for the seeded case. An exported file comes with
    the inputs beside it, unless batch, seq_len or seed asks for others. None elsewhere means layer 0 (or the file's),
    batch 1, 12 positions, and the seed of the case, else 0. `left_pad`, one number for each sequence, sets the batch.
    Raises BadInput.
    """
    if left_pad and batch not in (None, len(left_pad)):
        raise BadInput(f"--left-pad has {len(left_pad)} numbers and --batch is {batch}; give one for each sequence")
    batch = len(left_pad) or batch
    for flag, value, least in (("--batch", batch, 1), ("--seq-len", seq_len, 1), ("--seed", seed, 0)):
        if value is not None and value < least:
            raise BadInput(f"{flag} is {value}; it must be at least {least}")
    B, T = batch or BATCH, seq_len or SEQ_LEN
    if B * T > MOST_TOKENS:
        raise BadInput(f"--batch {B} and --seq-len {T} make {B * T} tokens; an input holds at most {MOST_TOKENS}")

    if any(not 0 <= padding < T for padding in left_pad):
        raise BadInput(f"--left-pad is {' '.join(map(str, left_pad))}; of {T} tokens 0 to {T - 1} can be padding")

    model = model or checkpoint_in(weights)
    if model is not None:
        case = read_case(export_layer(model, layer or 0, directory), {})
        case = write_inputs(directory, case, B, T, seed, left_pad)
        return case if text is None or layer else write_text(directory, case, text, model)
    if text is not None:
        raise BadInput("--text needs a model's tokenizer; give --model, or a checkpoint directory by --weights")
    if weights is None:
        if layer:
            raise BadInput(
                f"--layer {layer}: the seeded weights are one layer, number 0; --weights chooses a checkpoint"
            )
        return seeded_case(directory, seed or 0, B, T, left_pad=left_pad)
    if weights.exists() and not (weights.is_dir() or weights.is_file()):
        raise BadInput(
            f"{weights}: neither a folder nor a file; give a checkpoint folder or an exported .safetensors file"
        )
    case = read_case(weights, {})
    if layer not in (None, case.layer):
        raise BadInput(f"--layer {layer}: {weights} holds layer {case.layer}; leave --layer out or give the checkpoint")
    beside = inputs_beside(weights) if batch is seq_len is seed is None else {}
    return read_inputs(case, beside) if beside else write_inputs(directory, case, B, T, seed, left_pad)


def export_layer(checkpoint: "Checkpoint", layer: int, directory: Path) -> Path:
    """Writes one layer of a checkpoint as `<directory>/<its name>-layer<N>.safetensors`. Raises BadInput.

    The name of a model of the hub is its id and commit: `Qwen--Qwen3-0.6B-c1899de289a0-layer0`.
    """
    config, _ = qwen3_config(checkpoint.fields, layer, f"{checkpoint.where}/config.json")  # refuses before it fetches
    names = weight_shapes(config)
    checkpoint.prefetch(f"{base}layers.{layer}.self_attn.{name}" for base in ("model.", "") for name in names)
    given = checkpoint.fields, checkpoint.get, layer, checkpoint.where, checkpoint.files
    weights, config, theta, dtype = extract_layer(*given)
    checkpoint.prefetch(())  # memory holds no layer twice
    if checkpoint.commit:
        model, name = checkpoint.where, f"{checkpoint.where.replace('/', '--')}-{checkpoint.commit[:12]}"
    else:
        model = name = Path(checkpoint.where).resolve().name
    kind = "hub" if checkpoint.commit else "checkpoint"
    source = {"kind": kind, "model": model, "revision": checkpoint.commit, "layer": layer, "dtype": dtype}
    return write_weights(directory, f"{name}-layer{layer}", weights, config, theta, source)


def write_text(directory: Path, case: Case, text: str, checkpoint: "Checkpoint") -> Case:
    """The case with one more input, `text`: what layer 0 is fed when the model reads it. Raises BadInput."""
    from harness.text import embedded

    hidden_states, tokens = embedded(text, checkpoint, case.config.rms_norm_eps)
    _, T, D = hidden_states.shape
    seed = case.source.get("seed", 0)
    cos, sin = rope_tables(case.config.head_dim, case.theta, 1, T)
    arrays = {
        "hidden_states": hidden_states,
        "cos": cos,
        "sin": sin,
        "d_output": normal(seed, "text d_output", 1, T, D),
    }
    made = {"kind": "text", "text": text, "tokens": tokens, "seed": seed, "batch": 1, "seq_len": T, "theta": case.theta}
    path = directory / f"{case.name}.{hashlib.sha256(text.encode()).hexdigest()[:8]}.text.safetensors"
    write_tensors(path, arrays, {"source": made})
    read = read_inputs(replace(case, inputs={}, made={}), {"text": path})
    return replace(
        read,
        inputs=case.inputs | read.inputs,
        made=case.made | read.made,
        sha256=case.sha256 | read.sha256,
        paths=case.paths | read.paths,
    )


def extract_layer(
    fields: Mapping[str, Any], get: Callable[[str], Array | None], layer: int, where: str, names: Iterable[str] = ()
) -> tuple[Arrays, AttentionConfig, float, str]:
    """Weights, configuration, theta and dtype on disk of one layer, wherever its model is kept.

    `fields` is the model's config.json; `get(name)` gives a tensor as on disk, None where there is none; `names` are
    those that there are. Raises BadInput, which begins with `where`.
    """
    config, theta = qwen3_config(fields, layer, f"{where}/config.json")
    tensors = {}
    for name in weight_shapes(config):
        key = f"layers.{layer}.self_attn.{name}"
        tensor = get(f"model.{key}")
        tensor = get(key) if tensor is None else tensor  # a checkpoint of the base model has no "model."
        if tensor is None:
            near = nearest(f"model.{key}", beside(names, layer, config))
            hint = f"it has {near}, which is another name" if near else "is the checkpoint complete?"
            raise BadInput(f"{where}: has no tensor model.{key}; {hint}")
        tensors[name] = tensor
    if more := beside(names, layer, config):
        raise BadInput(
            f"{where}: also has {more[0]}, which a layer of this config.json has not, and Hugging Face would leave "
            "out; is config.json this model's?"
        )
    dtypes = sorted({tensor.dtype.name for tensor in tensors.values()})
    default = "" if "head_dim" in fields else " (config.json has no head_dim, which is then 128)"
    where = f"{where}, layer {layer}{default}"
    return check_weights(tensors, config, where), config, theta, " and ".join(dtypes)


def beside(names: Iterable[str], layer: int, config: AttentionConfig) -> list[str]:
    """The tensors of a layer's attention other than its weights; the frequencies of RoPE are no weights."""
    known = {*weight_shapes(config), "rotary_emb.inv_freq"}
    of = re.compile(rf"(?:model\.)?layers\.{layer}\.self_attn\.(.+)", re.DOTALL)
    return sorted(name for name in names if (found := of.fullmatch(name)) and found[1] not in known)


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
    if not is_whole(layers, 1) or layers > MOST_LAYERS:
        raise BadInput(f"{where}: num_hidden_layers is {layers!r}; it must be a whole number from 1 to {MOST_LAYERS:,}")
    if not 0 <= layer < layers:
        raise BadInput(f"{where}: the model has layers 0 to {layers - 1}; --layer {layer} is not among them")
    if reason := not_plain(known, rope, layer):
        raise BadInput(f"{where}: {reason}, which is not supported yet; choose another layer or model")
    return config, theta


def not_plain(known: Mapping[str, Any], rope: Mapping[str, Any], layer: int) -> str | None:
    """Why this layer is more than causal attention with plain RoPE, if it is."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or any(isinstance(value, dict) for value in rope.values()):
        return f"RoPE of the type {kind!r}" if kind != "default" else "RoPE that differs from layer to layer"
    if rope.get("partial_rotary_factor", known.get("partial_rotary_factor")) not in (None, 1):
        return "RoPE on a part of each head (partial_rotary_factor)"
    if known.get("quantization_config"):
        return "quantised weights (quantization_config)"
    if types := known.get("layer_types"):
        if not isinstance(types, list) or len(types) != known["num_hidden_layers"]:
            return "layer_types without one entry for each layer"
        return None if types[layer] == "full_attention" else f"layer {layer} of the type {types[layer]!r}"
    windowed = known.get("use_sliding_window") and known["sliding_window"] is not None
    if windowed and not is_whole(known["max_window_layers"], layer + 1):  # the layers below it see everything
        return f"layer {layer} with a sliding window"
    return None


# ------------------------------------------------------------------------------------------------------------- command


class Arguments(argparse.ArgumentParser):
    """A parser whose errors are a BadInput: one line, like every other unusable input."""

    def error(self, message: str) -> NoReturn:
        flag = message.removeprefix("unrecognized arguments: ").partition(" ")[0]
        near = nearest(flag, self._option_string_actions) if message.startswith("unrecognized") else None
        raise BadInput(f"{message}; {f'did you mean {near}? ' if near else ''}--help lists the arguments")


def whole_number(text: str) -> int:
    """A number on the command line. Raises what the parser makes a line of."""
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from error


def layer_number(text: str) -> int | str:
    """A layer as it is named on the command line: a number, or "all". Raises what the parser makes a line of."""
    return text if text == "all" else whole_number(text)


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
        "--model",
        metavar="ID",
        help="a Qwen3 model of the hub, such as Qwen/Qwen3-0.6B: of its weights only the asked layers are fetched",
    )
    choice.add_argument("--revision", metavar="REV", help="branch, tag or commit of --model (default: main)")
    choice.add_argument(
        "--text",
        metavar="TEXT",
        help="one more input: what layer 0 is fed when the model reads this (needs --model or a checkpoint directory)",
    )
    choice.add_argument(
        "--layer",
        type=layer_number,
        nargs="+",
        metavar="N",
        help='layers of the model, from 0, or "all" (default: 0, or the file\'s)',
    )
    choice.add_argument("--batch", type=whole_number, metavar="B", help=f"sequences in an input (default: {BATCH})")
    choice.add_argument("--seq-len", type=whole_number, metavar="T", help=f"tokens in a sequence (default: {SEQ_LEN})")
    choice.add_argument(
        "--seed",
        type=whole_number,
        metavar="I",
        help="seed of the inputs, and of the weights where they are seeded (default: 0)",
    )
    choice.add_argument(
        "--left-pad",
        type=whole_number,
        nargs="+",
        default=[],
        metavar="P",
        help="a padded batch: so many of its T tokens are padding, at the start, one number for each sequence",
    )


def open_cases(arguments: argparse.Namespace, directory: Path) -> Iterator[Case]:
    """A case for each layer asked for by `add_case_arguments`, one after the other.

    Raises BadInput, whatever is wrong with the files; for a layer that there is not, before the first.
    """
    if arguments.model is not None and arguments.weights is not None:
        raise BadInput("--model and --weights: both choose the weights; give one of them")
    if arguments.revision is not None and arguments.model is None:
        raise BadInput("--revision is one of --model; give that too")
    check_layers(arguments.layer or [])
    try:
        model = checkpoint_in(arguments.weights) if arguments.model is None else hub_model(arguments)
        layers = layers_of(model, arguments.layer or [None])
        if arguments.text is not None and not {0, None} & {*layers}:
            raise BadInput("--text is what layer 0 is fed; give --layer 0, too")
        shape = arguments.batch, arguments.seq_len, arguments.seed
        for layer in layers:
            with staged(directory) as stage:
                given = (*shape, stage, model, arguments.text, arguments.left_pad)
                case = open_case(arguments.weights, layer, *given)
            lie = {name: directory / path.name if path.parent == stage else path for name, path in case.paths.items()}
            yield replace(case, paths=lie)
    except OSError as error:
        raise BadInput(f"{error.filename or arguments.weights}: {error.strerror or error}") from error


def check_layers(layers: Sequence[int | str]) -> None:
    """Raises BadInput for a layer that is named twice, or beside all of them."""
    if "all" in layers and len(layers) > 1:
        raise BadInput("--layer all: names every layer; leave out the others")
    for layer in layers:
        if layers.count(layer) > 1:
            raise BadInput(f"--layer {layer}: named twice")


def checkpoint_in(weights: Path | None) -> "Checkpoint | None":
    """The checkpoint, where that is a directory. Raises BadInput where there is none in it."""
    if weights is None or not weights.is_dir():
        return None
    from harness.checkpoint import Checkpoint

    return Checkpoint(weights)


def hub_model(arguments: argparse.Namespace) -> "Checkpoint":
    """The model of the hub that --model and --revision name. Raises BadInput."""
    try:
        from harness.hub import open_hub  # its client takes a while to import
    except ImportError as error:  # transformers 4 brings one that lacks what this needs
        raise BadInput("--model needs huggingface_hub 1.31 or newer; update it, or give --weights DIR") from error
    return open_hub(arguments.model, arguments.revision)


def layers_of(model: "Checkpoint | None", asked: Sequence[int | str | None]) -> list[int | None]:
    """The layers that were asked for, "all" of them by number. Raises BadInput where the model has not all of them."""
    if model is None:
        return [None if layer == "all" else int(layer) if layer is not None else None for layer in asked]
    count = model.fields.get("num_hidden_layers", QWEN3_DEFAULTS["num_hidden_layers"])
    layers = range(count if is_whole(count, 1) else 1) if "all" in asked else [int(layer or 0) for layer in asked]
    for layer in layers:
        qwen3_config(model.fields, layer, f"{model.where}/config.json")
    return [*layers]


def print_any_text() -> None:
    """From now on: standard output also takes what is no text, as the name of a file may be."""
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="backslashreplace")


def command(main: Callable[[], int]) -> NoReturn:
    """A main() as a process: SIGTERM ends it as Ctrl-C does, and threads that still compute are not waited for."""
    signals = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

    def interrupt(*_: object) -> None:
        for each in signals:  # what it cleans up now is not broken off
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in signals:  # SIGINT also where a shell's background job ignores it
        signal.signal(each, interrupt)
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
    print_any_text()
    try:
        arguments = parser.parse_args(argv)
        if arguments.dtype and not arguments.case:
            raise BadInput("--dtype is one of --case; give that too")
        for case in open_cases(arguments, arguments.out):
            kit: list[Path] = []
            if arguments.case:
                from harness import exchange

                kit = exchange.write(
                    case, [arguments.dtype] if arguments.dtype else ["float32", "float64"], arguments.case
                )
            print(case.describe())
            for name, path in case.paths.items():
                print(f"  {path}  {path.stat().st_size:,} bytes  sha256 {case.sha256[name]}")
            for path in kit:
                print(f"  {path}")
    except OSError as error:
        print(f"error: {error.filename or 'this machine'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    command(main)
