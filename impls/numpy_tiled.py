"""Attention tile by tile, exact, in memory that grows with T and not with T². Read it beside `numpy_attention.py`.

The page's 3.5 to 3.11 need a row of scores only for its softmax, and a softmax can be taken in pieces: a running
maximum m, the sum l of exp(s − m) and the sum o of exp(s − m) v are all that the next keys need to know of the former
ones. At the end o / l is the head. What is stored is L = m + ln l, since with it the backward recomputes any tile of
probabilities as exp(s − L). Tiles in the future of their queries are never touched.

The equations are FlashAttention's: Dao et al. 2022, arXiv:2205.14135; in the order of Dao 2023, arXiv:2307.08691.

    B batch   T query position   S key position   D hidden size   N query heads   K key/value heads   G N/K   H head
    R rows of a tile: its queries, times the G heads that read the same keys   C columns of a tile: its keys
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float

from impls.numpy_attention import (
    bias_gradient,
    merge,
    merge_backward,
    norm_weight_gradient,
    project,
    project_backward,
    rms_norm,
    rms_norm_backward,
    rope,
    rope_backward,
    weight_gradient,
)
from impls.spec import BIASES, WEIGHTS, AttentionConfig, Observe, keep

Array = np.ndarray
Cache = dict[str, Any]

QUERIES, KEYS = 256, 512
"""Of a tile, whose scores then stay in a core's cache: 1 MiB with G = 2. Measured with that, H = 128 and T = 4,096: a
fifth faster than (128, 256), and within a tenth of the fastest of those up to (512, 512) and (256, 1024)."""
TOKENS = 512
"""Of a block where tokens do not see each other: enough for a product to reach its rate."""
THREADS = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="numpy_tiled")
"""NumPy lets go of the interpreter lock, so that heads and blocks of tokens are computed side by side.

A product by itself is best given one thread (OPENBLAS_NUM_THREADS=1)."""

# ------------------------------------------------------------------------------------------------------------ forward


def forward(
    weights: Mapping[str, Array], inputs: Mapping[str, Array], config: AttentionConfig, observe: Observe = keep
) -> tuple[Float[Array, "B T D"], Cache]:
    """Hidden states [B,T,D], cos and sin [B,T,H]  ->  output [B,T,D], and what the backward needs."""
    x_BTD, cos_BTH, sin_BTH = inputs["hidden_states"], inputs["cos"], inputs["sin"]
    N, K, H, eps = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
    w_q, w_k, w_v, w_qn, w_kn, w_o = (weights[name] for name in WEIGHTS)
    b_q, b_k, b_v, b_o = (weights.get(name, 0) for name in BIASES)

    q_BTNH = observe("q_proj", by_tokens(partial(project, w_ND=w_q, heads=N, b_N=b_q), (N, H), x_BTD))  # 3.1
    k_BSKH = observe("k_proj", by_tokens(partial(project, w_ND=w_k, heads=K, b_N=b_k), (K, H), x_BTD))  # 3.1
    v_BSKH = observe("v_proj", by_tokens(partial(project, w_ND=w_v, heads=K, b_N=b_v), (K, H), x_BTD))  # 3.1
    qn_BTNH = observe("q_norm", by_tokens(partial(rms_norm, w_H=w_qn, eps=eps), (N, H), q_BTNH))
    kn_BSKH = observe("k_norm", by_tokens(partial(rms_norm, w_H=w_kn, eps=eps), (K, H), k_BSKH))
    qr_BTNH = observe("q_rope", by_tokens(rope, (N, H), qn_BTNH, cos_BTH, sin_BTH))
    kr_BSKH = observe("k_rope", by_tokens(rope, (K, H), kn_BSKH, cos_BTH, sin_BTH))
    del qn_BTNH, kn_BSKH  # the backward does not need them
    mask_B1TS = inputs.get("attention_mask")
    o_BTNH, lse_BTN = attend(qr_BTNH, kr_BSKH, v_BSKH, mask_B1TS)
    o_BTNH = observe("heads", o_BTNH)  # 3.2, 3.11
    y_BTD = observe("output", by_tokens(partial(merge, w_DN=w_o, b_D=b_o), (config.hidden_size,), o_BTNH))  # 3.12

    cache = {"weights": weights, "config": config, "x": x_BTD, "cos": cos_BTH, "sin": sin_BTH, "q": q_BTNH}
    cache |= {"k": k_BSKH, "v": v_BSKH, "qr": qr_BTNH, "kr": kr_BSKH, "o": o_BTNH, "lse": lse_BTN, "mask": mask_B1TS}
    return y_BTD, cache


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_B1TS: Float[Array, "B 1 T S"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """3.5 to 3.11: softmax(Q K^T / √d_k + M) V, and L = ln Σ exp(s) of every row; the heads on threads."""
    o_BTNH, lse_BTN = np.empty_like(q_BTNH), np.empty(q_BTNH.shape[:3], q_BTNH.dtype)

    def one(b: int, k: int, heads: slice) -> None:
        o_BTNH[b, :, heads], lse_BTN[b, :, heads] = attend_group(
            q_BTNH[b, :, heads], k_BSKH[b, :, k], v_BSKH[b, :, k], None if mask_B1TS is None else mask_B1TS[b, 0]
        )

    on_threads(one, groups(q_BTNH, k_BSKH))
    return o_BTNH, lse_BTN


def attend_group(
    q_TGH: Float[Array, "T G H"],
    k_SH: Float[Array, "S H"],
    v_SH: Float[Array, "S H"],
    mask_TS: Float[Array, "T S"] | None = None,
) -> tuple[Float[Array, "T G H"], Float[Array, "T G"]]:
    """The G query heads that read one key/value head: m, l and o of a tile of rows, corrected whenever m grows."""
    o_TGH, lse_TG = np.empty_like(q_TGH), np.empty(q_TGH.shape[:2], q_TGH.dtype)
    scratch = scratch_for(q_TGH)
    for queries in tiles(len(q_TGH), QUERIES):
        q_RH = rows(q_TGH[queries]) * scale(q_TGH)
        o_RH = np.zeros_like(q_RH)
        l_R1 = np.zeros_like(q_RH[:, :1])
        m_R1 = np.full_like(l_R1, -np.inf)
        for keys in tiles(queries.stop, KEYS):  # 3.10: none later than the last query
            s_RC = scores(q_RH, k_SH[keys], queries, keys, mask_TS, scratch)  # 3.5
            m_R1, former_R1 = np.maximum(m_R1, s_RC.max(axis=-1, keepdims=True)), m_R1
            p_RC = exp_minus(s_RC, m_R1)  # 3.6, up to the division
            shrink_R1 = np.exp(former_R1 - m_R1)
            l_R1 = l_R1 * shrink_R1 + p_RC.sum(axis=-1, keepdims=True)
            o_RH *= shrink_R1
            o_RH += p_RC @ v_SH[keys]  # 3.11
        o_TGH[queries] = (o_RH / l_R1).reshape(q_TGH[queries].shape)
        lse_TG[queries] = (m_R1 + np.log(l_R1)).reshape(lse_TG[queries].shape)
    return o_TGH, lse_TG


def scores(
    q_RH: Float[Array, "R H"],
    k_CH: Float[Array, "C H"],
    queries: slice,
    keys: slice,
    mask_TS: Float[Array, "T S"] | None,
    scratch: Float[Array, "_"],
) -> Float[Array, "R C"]:
    """3.5, 3.10: a tile of Q K^T, of which Q is already divided by √d_k, with −∞ at keys later than the query."""
    R, C = len(q_RH), len(k_CH)
    s_RC = np.matmul(q_RH, k_CH.T, out=scratch[: R * C].reshape(R, C))
    if mask_TS is not None:
        s_RC += mask_TS[queries, keys].repeat(R // (queries.stop - queries.start), axis=0)
    if keys.stop > queries.start + 1:  # the diagonal goes through it
        t = np.arange(queries.start, queries.stop).repeat(R // (queries.stop - queries.start))
        np.copyto(s_RC, -np.inf, where=np.arange(keys.start, keys.stop) > t[:, None])
    return s_RC


def exp_minus(s_RC: Float[Array, "R C"], m_R1: Float[Array, "R 1"]) -> Float[Array, "R C"]:
    """exp(s − m), in the place of s."""
    return np.exp(np.subtract(s_RC, m_R1, out=s_RC), out=s_RC)


# ----------------------------------------------------------------------------------------------------------- backward


def backward(d_y_BTD: Float[Array, "B T D"], cache: Cache, observe: Observe = keep) -> dict[str, Array]:
    """d_output [B,T,D]  ->  d_hidden_states and the gradient of every weight: the forward's steps undone in reverse."""
    N, K, H = (getattr(cache["config"], name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    D, eps = cache["config"].hidden_size, cache["config"].rms_norm_eps
    w_q, w_k, w_v, w_qn, w_kn, w_o = (cache["weights"][name] for name in WEIGHTS)
    x, q, k, v, qr, kr, o, lse, cos, sin, mask = (cache[name] for name in "x q k v qr kr o lse cos sin mask".split())

    d_o = observe("d_heads", by_tokens(partial(merge_backward, w_DN=w_o, heads=N), (N, H), d_y_BTD))  # undoes 3.12
    d_qr, d_kr, d_v = attend_backward(d_o, qr, kr, v, o, lse, mask)  # undoes 3.11, 3.6, 3.10, 3.5
    d_v, d_qr, d_kr = observe("d_v_proj", d_v), observe("d_q_rope", d_qr), observe("d_k_rope", d_kr)
    d_qn = observe("d_q_norm", by_tokens(rope_backward, (N, H), d_qr, cos, sin))
    d_kn = observe("d_k_norm", by_tokens(rope_backward, (K, H), d_kr, cos, sin))
    d_q = observe("d_q_proj", by_tokens(partial(rms_norm_backward, w_H=w_qn, eps=eps), (N, H), d_qn, q))
    d_k = observe("d_k_proj", by_tokens(partial(rms_norm_backward, w_H=w_kn, eps=eps), (K, H), d_kn, k))

    def undo_projections(d_q: Array, d_k: Array, d_v: Array) -> Array:
        """X was used three times."""
        return project_backward(d_q, w_q) + project_backward(d_k, w_k) + project_backward(d_v, w_v)

    d_x = observe("d_hidden_states", by_tokens(undo_projections, (D,), d_q, d_k, d_v))  # undoes 3.1
    d_w_qn, d_w_kn = (summed(partial(norm_weight_gradient, eps=eps), d, x) for d, x in ((d_qn, q), (d_kn, k)))
    factors = {"q_proj": (d_q, x), "k_proj": (d_k, x), "v_proj": (d_v, x), "o_proj": (d_y_BTD, o)}
    products = dict(zip(factors, on_threads(weight_gradient, factors.values()), strict=True))
    biased = {f"{name}.bias": d for name, (d, _) in factors.items() if f"{name}.bias" in cache["weights"]}
    return {
        "d_hidden_states": d_x,
        "d_q_proj.weight": observe("d_q_proj.weight", products["q_proj"]),
        "d_k_proj.weight": observe("d_k_proj.weight", products["k_proj"]),
        "d_v_proj.weight": observe("d_v_proj.weight", products["v_proj"]),
        "d_q_norm.weight": observe("d_q_norm.weight", d_w_qn),
        "d_k_norm.weight": observe("d_k_norm.weight", d_w_kn),
        "d_o_proj.weight": observe("d_o_proj.weight", products["o_proj"]),
        **{f"d_{name}": observe(f"d_{name}", bias_gradient(d)) for name, d in biased.items()},
    }


def attend_backward(
    d_o_BTNH: Float[Array, "B T N H"],
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    o_BTNH: Float[Array, "B T N H"],
    lse_BTN: Float[Array, "B T N"],
    mask_B1TS: Float[Array, "B 1 T S"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """d_Q, d_K and d_V of `attend`; the heads on threads."""
    d_q_BTNH, d_k_BSKH, d_v_BSKH = np.empty_like(q_BTNH), np.empty_like(k_BSKH), np.empty_like(v_BSKH)

    def one(b: int, k: int, heads: slice) -> None:
        d_q_BTNH[b, :, heads], d_k_BSKH[b, :, k], d_v_BSKH[b, :, k] = attend_group_backward(
            d_o_BTNH[b, :, heads],
            q_BTNH[b, :, heads],
            o_BTNH[b, :, heads],
            lse_BTN[b, :, heads],
            k_BSKH[b, :, k],
            v_BSKH[b, :, k],
            None if mask_B1TS is None else mask_B1TS[b, 0],
        )

    on_threads(one, groups(q_BTNH, k_BSKH))
    return d_q_BTNH, d_k_BSKH, d_v_BSKH


def attend_group_backward(
    d_o_TGH: Float[Array, "T G H"],
    q_TGH: Float[Array, "T G H"],
    o_TGH: Float[Array, "T G H"],
    lse_TG: Float[Array, "T G"],
    k_SH: Float[Array, "S H"],
    v_SH: Float[Array, "S H"],
    mask_TS: Float[Array, "T S"] | None = None,
) -> tuple[Float[Array, "T G H"], Float[Array, "S H"], Float[Array, "S H"]]:
    """With P = exp(S − L) and δ = Σ dO ⊙ O, which is the a · d_a of 3.9:

    d_V = P^T dO,   d_S = P ⊙ (dO V^T − δ),   d_Q = d_S K / √d_k,   d_K = d_S^T Q / √d_k
    """
    d_q_TGH, d_k_SH, d_v_SH = np.empty_like(q_TGH), np.zeros_like(k_SH), np.zeros_like(v_SH)
    scratch, another = scratch_for(q_TGH), scratch_for(q_TGH)
    for queries in tiles(len(q_TGH), QUERIES):
        q_RH, d_o_RH, lse_R1 = (
            rows(q_TGH[queries]) * scale(q_TGH),
            rows(d_o_TGH[queries]),
            rows(lse_TG[queries, :, None]),
        )
        delta_R1 = np.sum(d_o_RH * rows(o_TGH[queries]), axis=-1, keepdims=True)
        d_q_RH = np.zeros_like(q_RH)
        for keys in tiles(queries.stop, KEYS):
            p_RC = exp_minus(scores(q_RH, k_SH[keys], queries, keys, mask_TS, scratch), lse_R1)  # 3.5, 3.6
            d_v_SH[keys] += p_RC.T @ d_o_RH  # undoes 3.11
            d_p_RC = np.matmul(d_o_RH, v_SH[keys].T, out=another[: p_RC.size].reshape(p_RC.shape))
            d_p_RC -= delta_R1
            d_s_RC = np.multiply(p_RC, d_p_RC, out=p_RC)  # 3.9, undoes 3.6
            d_q_RH += d_s_RC @ k_SH[keys]  # undoes 3.5
            d_k_SH[keys] += d_s_RC.T @ q_RH  # this Q is already divided by √d_k
        d_q_TGH[queries] = (d_q_RH * scale(q_TGH)).reshape(q_TGH[queries].shape)
    return d_q_TGH, d_k_SH, d_v_SH


# -------------------------------------------------------------------------------------------------- tiles and threads


def tiles(stop: int, size: int) -> Iterator[slice]:
    """0 … stop in slices of `size`, the last as short as what is left."""
    return (slice(at, min(at + size, stop)) for at in range(0, stop, size))


def rows(x_TGH: Float[Array, "T G X"]) -> Float[Array, "R X"]:
    """The G heads of each token one below the other: to the keys that they share they are so many queries more."""
    return x_TGH.reshape(-1, x_TGH.shape[-1])


def scale(q_TGH: Float[Array, "T G H"]) -> float:
    """1 / √d_k. It multiplies the queries, of which there are fewer than scores."""
    return float(q_TGH.shape[-1] ** -0.5)


def scratch_for(q_TGH: Float[Array, "T G H"]) -> Float[Array, "_"]:
    """The one place for every tile of scores of a group."""
    return np.empty(QUERIES * q_TGH.shape[1] * KEYS, q_TGH.dtype)


def groups(q_BTNH: Float[Array, "B T N H"], k_BSKH: Float[Array, "B S K H"]) -> list[tuple[int, int, slice]]:
    """Grouped queries: (sequence, key/value head, its query heads). K and V are read where they are, not repeated."""
    (B, _, N, _), K = q_BTNH.shape, k_BSKH.shape[2]
    G = N // K
    return [(b, k, slice(k * G, (k + 1) * G)) for b, k in product(range(B), range(K))]


def on_threads(function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The function of each tuple of arguments, on the pool, in order; NumPy's error state goes along."""
    context = copy_context()
    return list(THREADS.map(lambda each: context.copy().run(function, *each), arguments))


def by_tokens(function: Callable[..., Array], shape: tuple[int, ...], *arrays: Array) -> Float[Array, "B T *shape"]:
    """The function of arrays [B,T,…] that treats every token alike, block by block of tokens: [B,T,*shape]."""
    B, T = arrays[0].shape[:2]
    result = np.empty((B, T, *shape), arrays[0].dtype)

    def block(tokens: slice) -> None:
        result[:, tokens] = function(*(array[:, tokens] for array in arrays))

    on_threads(block, ((tokens,) for tokens in tiles(T, TOKENS)))
    return result


def summed(function: Callable[..., Array], *arrays: Array) -> Array:
    """The function of arrays [B,T,…] that sums over tokens, block by block of tokens."""
    blocks = (tuple(array[:, tokens] for array in arrays) for tokens in tiles(arrays[0].shape[1], TOKENS))
    return np.sum(on_threads(function, blocks), axis=0)
