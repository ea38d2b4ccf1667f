"""Decoding with a key/value cache, in plain NumPy: what the triangle of 3.10 is good for. Read it beside
`numpy_attention.py`, whose equations these are.

Row t of the masked scores ends at its diagonal. What token t answers hangs on the keys and values up to t alone, and no
later token changes any of them: so those of the past are computed once, kept, and read again. A prompt is read in one
go (the prefill); from then on each token asks with one query, adds one key and one value, and computes one row.

    B batch   T new tokens   S all tokens so far   D hidden size   N query heads   K key/value heads   H head size
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from impls.numpy_attention import merge, mix, project, rms_norm, rope, scores, share, softmax
from impls.spec import AttentionConfig, Observe, keep, steps

Array = np.ndarray
Cache = dict[str, Array]


def decode(
    weights: Mapping[str, Array], inputs: Mapping[str, Array], config: AttentionConfig, observe: Observe = keep
) -> Float[Array, "B T D"]:
    """The layer's output, computed piece by piece: the first half of the tokens together, then one after the other."""
    x_BTD = inputs["hidden_states"]
    B, T, _ = x_BTD.shape
    K, H = config.num_key_value_heads, config.head_dim
    cache = {name: np.empty((B, 0, K, H), x_BTD.dtype) for name in ("k", "v")}
    pieces = []
    for new in steps(T):
        given = {name: inputs[name][:, new] for name in ("hidden_states", "cos", "sin")}
        if "attention_mask" in inputs:
            given["attention_mask"] = inputs["attention_mask"][:, :, new, : new.stop]
        y_BTD, cache = step(weights, given, cache, config, observe)
        pieces.append(y_BTD)
    return np.concatenate(pieces, axis=1)


def step(
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    cache: Cache,
    config: AttentionConfig,
    observe: Observe = keep,
) -> tuple[Float[Array, "B T D"], Cache]:
    """T new tokens [B,T,D], their cos and sin [B,T,H]  ->  their output, and the cache with their keys and values."""
    x_BTD, cos_BTH, sin_BTH = inputs["hidden_states"], inputs["cos"], inputs["sin"]
    N, K, G = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_groups
    eps = config.rms_norm_eps

    q_BTNH = observe("q_proj", project(x_BTD, weights["q_proj.weight"], N, weights.get("q_proj.bias", 0)))  # 3.1
    k_BTKH = observe("k_proj", project(x_BTD, weights["k_proj.weight"], K, weights.get("k_proj.bias", 0)))  # 3.1
    v_BTKH = observe("v_proj", project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0)))  # 3.1
    qn_BTNH = observe("q_norm", rms_norm(q_BTNH, weights["q_norm.weight"], eps))
    kn_BTKH = observe("k_norm", rms_norm(k_BTKH, weights["k_norm.weight"], eps))
    qr_BTNH = observe("q_rope", rope(qn_BTNH, cos_BTH, sin_BTH))  # by its own position, whatever else is cached
    kr_BTKH = observe("k_rope", rope(kn_BTKH, cos_BTH, sin_BTH))

    k_BSKH = np.concatenate([cache["k"], kr_BTKH], axis=1)
    v_BSKH = np.concatenate([cache["v"], v_BTKH], axis=1)
    s_BNTS = scores(qr_BTNH, share(k_BSKH, G))  # 3.5: T rows of the square, and none of the others
    mask_TS = inputs.get("attention_mask", causal_mask(s_BNTS))
    m_BNTS = observe("masked_scores", s_BNTS + mask_TS)  # 3.10
    a_BNTS = observe("probs", softmax(m_BNTS))  # 3.6
    o_BTNH = observe("heads", mix(a_BNTS, share(v_BSKH, G)))  # 3.2, 3.11
    y_BTD = observe("output", merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0)))  # 3.12
    return y_BTD, {"k": k_BSKH, "v": v_BSKH}


def causal_mask(s_BNTS: Float[Array, "B N T S"]) -> Float[Array, "T S"]:
    """3.10: the last T rows of the triangle. Of a single token it is a row of zeros: all that is cached is its past."""
    T, S = s_BNTS.shape[-2:]
    return np.where(np.tri(T, S, S - T, dtype=bool), 0, -np.inf).astype(s_BNTS.dtype)
