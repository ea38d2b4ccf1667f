"""Attention as equations, forward and backward, in plain NumPy: the page to read.

Each token asks with a query, offers a key and carries a value (3.1). How well query t fits key s is a dot product,
divided by √d_k so that its variance does not grow with the head (3.3 to 3.5). The future is masked (3.10), a softmax
turns each row of fits into weights that sum to one (3.6), and a head's answer is the weighted mean of the values
(3.2, 3.11). The heads are concatenated and mixed by W_O (3.12).

Between 3.1 and 3.2, Qwen3 normalises every head of Q and K (RMSNorm), rotates it by its position (RoPE), and lets
G query heads share one key/value head. Everything is computed in the dtype of the arrays that are passed in.

    B batch   T query position   S key position   D hidden size   N query heads   K key/value heads   G N/K   H head
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from impls.spec import AttentionConfig, Observe, keep

Array = np.ndarray
Cache = dict[str, Any]

# ------------------------------------------------------------------------------------------------------------ forward


def forward(
    weights: Mapping[str, Array], inputs: Mapping[str, Array], config: AttentionConfig, observe: Observe = keep
) -> tuple[Float[Array, "B T D"], Cache]:
    """Hidden states [B,T,D], cos and sin [B,T,H]  ->  output [B,T,D], and what the backward needs.

    Where a batch is padded, its mask [B,1,T,S] is among the inputs, additive as in Hugging Face.
    """
    x_BTD, cos_BTH, sin_BTH = inputs["hidden_states"], inputs["cos"], inputs["sin"]
    N, K, G = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_groups
    eps = config.rms_norm_eps

    q_BTNH = observe("q_proj", project(x_BTD, weights["q_proj.weight"], N, weights.get("q_proj.bias", 0)))  # 3.1
    k_BSKH = observe("k_proj", project(x_BTD, weights["k_proj.weight"], K, weights.get("k_proj.bias", 0)))  # 3.1
    v_BSKH = observe("v_proj", project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0)))  # 3.1
    qn_BTNH = observe("q_norm", rms_norm(q_BTNH, weights["q_norm.weight"], eps))
    kn_BSKH = observe("k_norm", rms_norm(k_BSKH, weights["k_norm.weight"], eps))
    qr_BTNH = observe("q_rope", rope(qn_BTNH, cos_BTH, sin_BTH))
    kr_BSKH = observe("k_rope", rope(kn_BSKH, cos_BTH, sin_BTH))
    s_BNTS = observe("scores", scores(qr_BTNH, share(kr_BSKH, G)))  # 3.5
    mask_TS = inputs.get("attention_mask", causal_mask(s_BNTS))
    m_BNTS = observe("masked_scores", s_BNTS + mask_TS)  # 3.10
    a_BNTS = observe("probs", softmax(m_BNTS))  # 3.6
    o_BTNH = observe("heads", mix(a_BNTS, share(v_BSKH, G)))  # 3.2, 3.11
    y_BTD = observe("output", merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0)))  # 3.12

    cache = {"weights": weights, "eps": eps, "G": G, "x": x_BTD, "cos": cos_BTH, "sin": sin_BTH, "q": q_BTNH}
    cache |= {"k": k_BSKH, "v": v_BSKH, "qr": qr_BTNH, "kr": kr_BSKH, "a": a_BNTS, "o": o_BTNH}
    return y_BTD, cache


def project(
    x_BTD: Float[Array, "B T D"], w_ND: Float[Array, "NH D"], heads: int, b_N: Float[Array, "NH"] | int = 0
) -> Float[Array, "B T N H"]:
    """3.1: Q = X W_Q + b_Q, cut into heads; without biases, b_Q = 0. Hugging Face stores W_Q^T, [out, in]."""
    B, T, _ = x_BTD.shape
    return (x_BTD @ w_ND.T + b_N).reshape(B, T, heads, -1)


def rms_norm(x: Float[Array, "B T N H"], w_H: Float[Array, "H"], eps: float) -> Float[Array, "B T N H"]:
    """y = w ⊙ x / rms(x), over each head by itself; rms(x) = √(mean(x²) + eps)."""
    return w_H * (x * inverse_rms(x, eps))


def inverse_rms(x: Float[Array, "B T N H"], eps: float) -> Float[Array, "B T N 1"]:
    """1 / √(mean(x²) + eps) over the last axis. Hugging Face computes it in float32 whatever the dtype."""
    return 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def rope(
    x: Float[Array, "B T N H"], cos_BTH: Float[Array, "B T H"], sin_BTH: Float[Array, "B T H"]
) -> Float[Array, "B T N H"]:
    """Turn each pair (x_i, x_{i+H/2}) by its position's angle: x cos + rot(x) sin, alike for every head."""
    return x * cos_BTH[:, :, None] + rotate_half(x) * sin_BTH[:, :, None]


def rotate_half(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """rot([x₁, x₂]) = [−x₂, x₁], a quarter turn of every pair."""
    x1, x2 = np.split(x, 2, axis=-1)
    return np.concatenate([-x2, x1], axis=-1)


def share(x_BSKH: Float[Array, "B S K H"], G: int) -> Float[Array, "B S N H"]:
    """Grouped queries: query head n reads key/value head n // G."""
    return np.repeat(x_BSKH, G, axis=2)


def scores(q_BTNH: Float[Array, "B T N H"], k_BSNH: Float[Array, "B S N H"]) -> Float[Array, "B N T S"]:
    """3.5: S = Q K^T / √d_k, which keeps the variance of a score at 1 (3.3, 3.4)."""
    q_BNTH, k_BNHS = q_BTNH.transpose(0, 2, 1, 3), k_BSNH.transpose(0, 2, 3, 1)
    return (q_BNTH @ k_BNHS) * q_BTNH.shape[-1] ** -0.5


def causal_mask(s_BNTS: Float[Array, "B N T S"]) -> Float[Array, "T S"]:
    """3.10: M_ij = 0 for j ≤ i, −∞ for j > i. Hugging Face adds the most negative finite number instead of −∞."""
    T, S = s_BNTS.shape[-2:]
    return np.where(np.tri(T, S, dtype=bool), 0, -np.inf).astype(s_BNTS.dtype)


def softmax(z_BNTS: Float[Array, "B N T S"]) -> Float[Array, "B N T S"]:
    """3.6: a_i = exp(z_i) / Σ_j exp(z_j). Taking the maximum off every z changes nothing and prevents overflow."""
    e_BNTS = np.exp(z_BNTS - z_BNTS.max(axis=-1, keepdims=True))
    return e_BNTS / e_BNTS.sum(axis=-1, keepdims=True)


def mix(a_BNTS: Float[Array, "B N T S"], v_BSNH: Float[Array, "B S N H"]) -> Float[Array, "B T N H"]:
    """3.2, 3.11: head = A V, for each query the mean of the values under its weights."""
    return (a_BNTS @ v_BSNH.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def merge(
    o_BTNH: Float[Array, "B T N H"], w_DN: Float[Array, "D NH"], b_D: Float[Array, "D"] | int = 0
) -> Float[Array, "B T D"]:
    """3.12: MHA(X) = [head_1 ‖ … ‖ head_h] W_O + b_O. Hugging Face stores W_O^T, [out, in]."""
    B, T, N, H = o_BTNH.shape
    return o_BTNH.reshape(B, T, N * H) @ w_DN.T + b_D


# ----------------------------------------------------------------------------------------------------------- backward


def backward(d_y_BTD: Float[Array, "B T D"], cache: Cache, observe: Observe = keep) -> dict[str, Array]:
    """d_output [B,T,D]  ->  d_hidden_states and the gradient of every weight: the forward's steps undone in reverse."""
    weights, eps, G = cache["weights"], cache["eps"], cache["G"]
    x, q, k, v, qr, kr, a, o, cos, sin = (cache[name] for name in "x q k v qr kr a o cos sin".split())

    d_o = observe("d_heads", merge_backward(d_y_BTD, weights["o_proj.weight"], o.shape[2]))  # undoes 3.12
    d_a, d_v = mix_backward(d_o, a, share(v, G))  # undoes 3.11
    d_a, d_v = observe("d_probs", d_a), observe("d_v_proj", share_backward(d_v, G))
    d_m = observe("d_masked_scores", softmax_backward(d_a, a))  # 3.9, undoes 3.6
    d_s = observe("d_scores", d_m)  # undoes 3.10: a constant was added
    d_qr, d_kr = scores_backward(d_s, qr, share(kr, G))  # undoes 3.5
    d_qr, d_kr = observe("d_q_rope", d_qr), observe("d_k_rope", share_backward(d_kr, G))
    d_qn = observe("d_q_norm", rope_backward(d_qr, cos, sin))
    d_kn = observe("d_k_norm", rope_backward(d_kr, cos, sin))
    d_q = observe("d_q_proj", rms_norm_backward(d_qn, q, weights["q_norm.weight"], eps))
    d_k = observe("d_k_proj", rms_norm_backward(d_kn, k, weights["k_norm.weight"], eps))
    d_x = project_backward(d_q, weights["q_proj.weight"])  # undoes 3.1; X was used three times
    d_x = d_x + project_backward(d_k, weights["k_proj.weight"]) + project_backward(d_v, weights["v_proj.weight"])

    gradients = {
        "d_hidden_states": observe("d_hidden_states", d_x),
        "d_q_proj.weight": observe("d_q_proj.weight", weight_gradient(d_q, x)),
        "d_k_proj.weight": observe("d_k_proj.weight", weight_gradient(d_k, x)),
        "d_v_proj.weight": observe("d_v_proj.weight", weight_gradient(d_v, x)),
        "d_q_norm.weight": observe("d_q_norm.weight", norm_weight_gradient(d_qn, q, eps)),
        "d_k_norm.weight": observe("d_k_norm.weight", norm_weight_gradient(d_kn, k, eps)),
        "d_o_proj.weight": observe("d_o_proj.weight", weight_gradient(d_y_BTD, o)),
    }
    if "q_proj.bias" in weights:
        gradients |= {
            "d_q_proj.bias": observe("d_q_proj.bias", bias_gradient(d_q)),
            "d_k_proj.bias": observe("d_k_proj.bias", bias_gradient(d_k)),
            "d_v_proj.bias": observe("d_v_proj.bias", bias_gradient(d_v)),
            "d_o_proj.bias": observe("d_o_proj.bias", bias_gradient(d_y_BTD)),
        }
    return gradients


def merge_backward(d_y_BTD: Float[Array, "B T D"], w_DN: Float[Array, "D NH"], heads: int) -> Float[Array, "B T N H"]:
    """y = o W^T:  d_o = d_y W, cut into heads."""
    B, T, _ = d_y_BTD.shape
    return (d_y_BTD @ w_DN).reshape(B, T, heads, -1)


def mix_backward(
    d_o_BTNH: Float[Array, "B T N H"], a_BNTS: Float[Array, "B N T S"], v_BSNH: Float[Array, "B S N H"]
) -> tuple[Float[Array, "B N T S"], Float[Array, "B S N H"]]:
    """o = A V:  d_A = d_o V^T,  d_V = A^T d_o."""
    d_o_BNTH = d_o_BTNH.transpose(0, 2, 1, 3)
    d_a_BNTS = d_o_BNTH @ v_BSNH.transpose(0, 2, 3, 1)
    d_v_BNSH = a_BNTS.transpose(0, 1, 3, 2) @ d_o_BNTH
    return d_a_BNTS, d_v_BNSH.transpose(0, 2, 1, 3)


def softmax_jacobian(a: Float[Array, "*rows S"]) -> Float[Array, "*rows S S"]:
    """3.7, 3.8: ∂a_i/∂z_j = a_i (δ_ij − a_j), that is J = diag(a) − a a^T.

    J is symmetric, its rows sum to zero (shifting every z changes nothing), and it vanishes as one a_i nears 1:
    a saturated softmax passes no gradient on.
    """
    return a[..., :, None] * (np.eye(a.shape[-1], dtype=a.dtype) - a[..., None, :])


def softmax_backward(d_a: Float[Array, "B N T S"], a: Float[Array, "B N T S"]) -> Float[Array, "B N T S"]:
    """3.9: d_z = J^T d_a = a ⊙ (d_a − (a · d_a) 1), the Jacobian applied without being built."""
    return a * (d_a - np.sum(a * d_a, axis=-1, keepdims=True))


def scores_backward(
    d_s_BNTS: Float[Array, "B N T S"], q_BTNH: Float[Array, "B T N H"], k_BSNH: Float[Array, "B S N H"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S N H"]]:
    """S = Q K^T / √d_k:  d_Q = d_S K / √d_k,  d_K = d_S^T Q / √d_k."""
    scale = q_BTNH.shape[-1] ** -0.5
    d_q_BNTH = (d_s_BNTS @ k_BSNH.transpose(0, 2, 1, 3)) * scale
    d_k_BNSH = (d_s_BNTS.transpose(0, 1, 3, 2) @ q_BTNH.transpose(0, 2, 1, 3)) * scale
    return d_q_BNTH.transpose(0, 2, 1, 3), d_k_BNSH.transpose(0, 2, 1, 3)


def share_backward(d_BSNH: Float[Array, "B S N H"], G: int) -> Float[Array, "B S K H"]:
    """A key/value head was read by G query heads: their gradients add up."""
    B, S, N, H = d_BSNH.shape
    return d_BSNH.reshape(B, S, N // G, G, H).sum(axis=3)


def rope_backward(
    d: Float[Array, "B T N H"], cos_BTH: Float[Array, "B T H"], sin_BTH: Float[Array, "B T H"]
) -> Float[Array, "B T N H"]:
    """The transposed rotation: d cos + rot^T(d sin), and rot^T = −rot."""
    return d * cos_BTH[:, :, None] - rotate_half(d * sin_BTH[:, :, None])


def rms_norm_backward(
    d_y: Float[Array, "B T N H"], x: Float[Array, "B T N H"], w_H: Float[Array, "H"], eps: float
) -> Float[Array, "B T N H"]:
    """With x̂ = x r, r = 1/rms(x) and g = w ⊙ d_y:  d_x = r (g − x̂ mean(g ⊙ x̂)).

    The mean appears because every entry of a head moves the rms of that head.
    """
    r = inverse_rms(x, eps)
    x_hat, g = x * r, w_H * d_y
    return r * (g - x_hat * np.mean(g * x_hat, axis=-1, keepdims=True))


def norm_weight_gradient(d_y: Float[Array, "B T N H"], x: Float[Array, "B T N H"], eps: float) -> Float[Array, "H"]:
    """y = w ⊙ x̂:  d_w = Σ d_y ⊙ x̂ over batch, positions and heads, which share w."""
    return np.sum(d_y * (x * inverse_rms(x, eps)), axis=(0, 1, 2))


def project_backward(d_BTNH: Float[Array, "B T N H"], w_ND: Float[Array, "NH D"]) -> Float[Array, "B T D"]:
    """q = x W^T:  d_x = d_q W."""
    B, T, _, _ = d_BTNH.shape
    return d_BTNH.reshape(B, T, -1) @ w_ND


def weight_gradient(d_y: Float[Array, "B T *out"], x: Float[Array, "B T *in_"]) -> Float[Array, "out in_"]:
    """y = x W^T:  d_W = Σ d_y x^T over batch and positions, an outer product for each token."""
    B, T = x.shape[:2]
    return d_y.reshape(B * T, -1).T @ x.reshape(B * T, -1)


def bias_gradient(d_y: Float[Array, "B T *out"]) -> Float[Array, "out"]:
    """y = x W^T + b:  d_b = Σ d_y over batch and positions."""
    return np.sum(d_y, axis=(0, 1)).reshape(-1)
