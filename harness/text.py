"""What layer 0 of a Qwen3 model is fed when the model reads a text: normed embeddings, reading only the rows needed."""

import numpy as np
from tokenizers import Tokenizer

from harness.case import Array, BadInput, check_tensor
from harness.checkpoint import Checkpoint


def embedded(text: str, model: Checkpoint, eps: float) -> tuple[Array, list[str]]:
    """hidden_states [1,T,D], float32, and T tokens as one reads them.

    They are the embedding's rows after layer 0's input norm with `rms_norm_eps` eps, as in the model in float32:
    computed in float64 and rounded once, so that they are the same everywhere and within rounding of Hugging Face's.
    `model` is a checkpoint directory or a model of the hub. Raises BadInput.
    """
    ids, tokens = tokenize(text, model)
    rows = model.rows("model.embed_tokens.weight", ids)
    rows = model.rows("embed_tokens.weight", ids) if rows is None else rows  # a checkpoint of the base model
    norm = model.get("model.layers.0.input_layernorm.weight")
    norm = model.get("layers.0.input_layernorm.weight") if norm is None else norm
    if rows is None or norm is None:
        raise model.bad("lacks the embedding (model.embed_tokens.weight) or layer 0's input_layernorm.weight")
    T, D = rows.shape
    x_TD = check_tensor(rows, "embed_tokens.weight at the text's tokens", (T, D), model.where).astype(np.float64)
    weight = check_tensor(norm, "input_layernorm.weight", (D,), model.where)
    x_TD *= weight / np.sqrt((x_TD**2).mean(axis=1, keepdims=True) + eps)
    return x_TD.astype(np.float32)[None], tokens


def tokenize(text: str, model: Checkpoint) -> tuple[list[int], list[str]]:
    """Ids of the text's tokens, by the model's tokenizer.json, and each as one reads it. Raises BadInput."""
    data = model.whole("tokenizer.json")
    if data is None:
        raise model.bad("has no tokenizer.json, which --text needs")
    try:
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        encoding = tokenizer.encode(text)
    except Exception as error:  # the library raises no narrower one
        raise model.bad(f"tokenizer.json cannot read --text {text!r} ({error})") from error
    if not encoding.ids:
        raise BadInput(f"--text {text!r}: no tokens; give some words")
    decoded = [tokenizer.decode([id], skip_special_tokens=False) for id in encoding.ids]
    # a token that is a part of a character has no text of its own
    tokens = [raw if "\ufffd" in read else read for raw, read in zip(encoding.tokens, decoded, strict=True)]
    return encoding.ids, tokens
