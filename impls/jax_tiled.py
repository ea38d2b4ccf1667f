"""Attention tile by tile in JAX: exact, compiled once for all tiles, in memory that grows with T and not with T².

Read it beside `numpy_tiled.py`, whose equations these are (FlashAttention: Dao et al. 2022, arXiv:2205.14135, in the
order of Dao 2023, arXiv:2307.08691), and beside `jax_attention.py`, whose layer this is but for 3.5 to 3.11.

    B batch   T query position   S key position   N query heads   K key/value heads   G N/K   H head
    X tiles of queries   R rows of one: its queries, times the G heads that read the same keys
    Y tiles of keys      C columns of one: its keys
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from impls import jax_attention
from impls.jax_attention import at_least_float32, matmul
from impls.spec import Observe

QUERIES, KEYS = 256, 256
"""Of a tile. Measured with K = 8, G = 2, H = 128 and T = 4,096 on two cores: the fastest backward of those from
(64, 256) to (256, 512), and a forward within 3 % of the fastest, (512, 256); (128, 256) takes a sixth longer."""

Tiles = Float[Array, "Y B K C H"]
Saved = tuple[Array, Array, Array, Array | None, Array, Array]


class Attention(jax_attention.Attention):
    """The layer whose scores and probabilities exist one tile at a time."""

    def attend(
        self,
        qr_BTNH: Float[Array, "B T N H"],
        kr_BSKH: Float[Array, "B S K H"],
        v_BSKH: Float[Array, "B S K H"],
        mask_B1TS: Float[Array, "B 1 T S"] | None,
        observe: Observe,
    ) -> Float[Array, "B T N H"]:
        """3.2, 3.11: softmax(Q K^T / √d_k + M) V."""
        return differentiable(qr_BTNH, kr_BSKH, v_BSKH, mask_B1TS)


run = partial(jax_attention.run, layer=Attention)

# ------------------------------------------------------------------------------------------------------------ forward


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_B1TS: Float[Array, "B 1 T S"] | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N 1"]]:
    """3.5 to 3.11: softmax(Q K^T / √d_k + M) V, and L = ln Σ exp(s) of every row."""
    k_YBKCH, v_YBKCH = by_keys(k_BSKH), by_keys(v_BSKH)
    q_XBKRH, mask = by_queries(q_BTNH, k_BSKH), mask_by_tiles(mask_B1TS, q_BTNH, k_BSKH)

    def of_queries(each: tuple[Int[Array, ""], Float[Array, "B K R H"]]) -> tuple[Array, Array]:
        """m, l and o of a tile of rows, corrected whenever m grows."""
        x, q_BKRH = each

        def of_keys(y: Int[Array, ""], former: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            m_BKR1, l_BKR1, o_BKRH = former
            s_BKRC = scores(q_BKRH, k_YBKCH[y], mask(x, y))  # 3.5, 3.10
            larger_BKR1 = jnp.maximum(m_BKR1, s_BKRC.max(axis=-1, keepdims=True))
            p_BKRC = jnp.exp(s_BKRC - larger_BKR1)  # 3.6, up to the division
            shrink_BKR1 = jnp.exp(m_BKR1 - larger_BKR1)
            l_BKR1 = l_BKR1 * shrink_BKR1 + p_BKRC.sum(axis=-1, keepdims=True)
            o_BKRH = o_BKRH * shrink_BKR1 + product(p_BKRC.astype(v_BSKH.dtype), v_YBKCH[y])  # 3.11
            return larger_BKR1, l_BKR1, o_BKRH

        o_BKRH = jnp.zeros_like(at_least_float32(q_BKRH))
        l_BKR1 = o_BKRH[..., :1]
        seen = tiles_seen(x, q_BTNH, k_BSKH)
        m_BKR1, l_BKR1, o_BKRH = jax.lax.fori_loop(0, seen, of_keys, (l_BKR1 - jnp.inf, l_BKR1, o_BKRH))
        return (o_BKRH / l_BKR1).astype(q_BTNH.dtype), m_BKR1 + jnp.log(l_BKR1)

    o_XBKRH, lse_XBKR1 = jax.lax.map(of_queries, (jnp.arange(len(q_XBKRH)), q_XBKRH))
    return by_token(o_XBKRH, q_BTNH), by_token(lse_XBKR1, q_BTNH)


def scores(
    q_BKRH: Float[Array, "B K R H"], k_BKCH: Float[Array, "B K C H"], mask: Float[Array, "#B 1 R C"]
) -> Float[Array, "B K R C"]:
    """3.5, 3.10: a tile of Q K^T / √d_k + M."""
    return product(q_BKRH, k_BKCH.swapaxes(2, 3)) * q_BKRH.shape[-1] ** -0.5 + mask


def product(a: Float[Array, "B K P Q"], b: Float[Array, "B K Q O"]) -> Float[Array, "B K P O"]:
    """a b, summed and returned in float32 where their dtype is shorter."""
    return matmul(a, b, preferred_element_type=jnp.float32 if jnp.finfo(a.dtype).bits < 32 else a.dtype)


# ----------------------------------------------------------------------------------------------------------- backward


def attend_saving(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask_B1TS: Array | None) -> tuple[Array, Saved]:
    """The forward, and what its backward needs."""
    o_BTNH, lse_BTN1 = attend(q_BTNH, k_BSKH, v_BSKH, mask_B1TS)
    return o_BTNH, (q_BTNH, k_BSKH, v_BSKH, mask_B1TS, o_BTNH, lse_BTN1)


def attend_backward(saved: Saved, d_o_BTNH: Float[Array, "B T N H"]) -> tuple[Array, Array, Array, None]:
    """With P = exp(S − L) and δ = Σ dO ⊙ O, which is the a · d_a of 3.9:

    d_V = P^T dO,   d_S = P ⊙ (dO V^T − δ) / √d_k,   d_Q = d_S K,   d_K = d_S^T Q

    Divided any later, XLA would multiply RoPE's cos and sin by 1/√d_k instead: it would not use the d_K that it shows.
    """
    q_BTNH, k_BSKH, v_BSKH, mask_B1TS, o_BTNH, lse_BTN1 = saved
    k_YBKCH, v_YBKCH, mask = by_keys(k_BSKH), by_keys(v_BSKH), mask_by_tiles(mask_B1TS, q_BTNH, k_BSKH)
    short, scale = q_BTNH.dtype, q_BTNH.shape[-1] ** -0.5
    delta_BTN1 = jnp.sum(at_least_float32(d_o_BTNH) * at_least_float32(o_BTNH), axis=-1, keepdims=True)

    def of_queries(d_kv: tuple[Tiles, Tiles], each: tuple[Array, ...]) -> tuple[tuple[Tiles, Tiles], Array]:
        x, q_BKRH, d_o_BKRH, lse_BKR1, delta_BKR1 = each

        def of_keys(y: Int[Array, ""], former: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q_BKRH, d_k_YBKCH, d_v_YBKCH = former
            p_BKRC = jnp.exp(scores(q_BKRH, k_YBKCH[y], mask(x, y)) - lse_BKR1)  # 3.5 to 3.6
            d_v_YBKCH = d_v_YBKCH.at[y].add(product(p_BKRC.astype(short).swapaxes(2, 3), d_o_BKRH))  # undoes 3.11
            d_p_BKRC = product(d_o_BKRH, v_YBKCH[y].swapaxes(2, 3))
            d_s_BKRC = (p_BKRC * (d_p_BKRC - delta_BKR1) * scale).astype(short)  # 3.9, undoes 3.6
            d_q_BKRH = d_q_BKRH + product(d_s_BKRC, k_YBKCH[y])  # undoes 3.5
            d_k_YBKCH = d_k_YBKCH.at[y].add(product(d_s_BKRC.swapaxes(2, 3), q_BKRH))
            return d_q_BKRH, d_k_YBKCH, d_v_YBKCH

        start = (jnp.zeros_like(at_least_float32(q_BKRH)), *d_kv)
        d_q_BKRH, *d_kv_after = jax.lax.fori_loop(0, tiles_seen(x, q_BTNH, k_BSKH), of_keys, start)
        return tuple(d_kv_after), d_q_BKRH.astype(short)

    by_row = [by_queries(each, k_BSKH) for each in (q_BTNH, d_o_BTNH, lse_BTN1, delta_BTN1)]
    zero_YBKCH = jnp.zeros_like(at_least_float32(k_YBKCH))
    d_kv, d_q_XBKRH = jax.lax.scan(of_queries, (zero_YBKCH, zero_YBKCH), (jnp.arange(len(by_row[0])), *by_row))
    d_k_BSKH, d_v_BSKH = (by_position(each.astype(short), k_BSKH) for each in d_kv)
    return by_token(d_q_XBKRH, q_BTNH), d_k_BSKH, d_v_BSKH, None


differentiable = jax.custom_vjp(lambda *q_k_v_mask: attend(*q_k_v_mask)[0])
differentiable.defvjp(attend_saving, attend_backward)

# -------------------------------------------------------------------------------------------------------------- tiles


def by_queries(x_BTNH: Float[Array, "B T N _"], k_BSKH: Float[Array, "B S K H"]) -> Float[Array, "X B K R _"]:
    """Cut into tiles; the G heads of each token one below the other, to the keys that they share so many queries more.

    The last tile is filled up with zeros: queries after the last key, which no one asks for.
    """
    B, T, N, H = x_BTNH.shape
    K, size = k_BSKH.shape[2], min(QUERIES, T)
    x_BXQKGH = fill(x_BTNH, size).reshape(B, -1, size, K, N // K, H)
    return x_BXQKGH.transpose(1, 0, 3, 2, 4, 5).reshape(-1, B, K, size * N // K, H)


def by_token(x_XBKRH: Float[Array, "X B K R _"], q_BTNH: Float[Array, "B T N H"]) -> Float[Array, "B T N _"]:
    """What `by_queries` did, undone."""
    X, B, K, _, H = x_XBKRH.shape
    T, N = q_BTNH.shape[1:3]
    x_XBKQGH = x_XBKRH.reshape(X, B, K, -1, N // K, H)
    return x_XBKQGH.transpose(1, 0, 3, 2, 4, 5).reshape(B, -1, N, H)[:, :T]


def by_keys(x_BSKH: Float[Array, "B S K H"]) -> Float[Array, "Y B K C H"]:
    """Cut into tiles, the last filled up with zeros: keys in the future of every query."""
    B, S, K, H = x_BSKH.shape
    x_BYCKH = fill(x_BSKH, min(KEYS, S)).reshape(B, -1, min(KEYS, S), K, H)
    return x_BYCKH.transpose(1, 0, 3, 2, 4)


def by_position(x_YBKCH: Float[Array, "Y B K C H"], k_BSKH: Float[Array, "B S K H"]) -> Float[Array, "B S K H"]:
    """What `by_keys` did, undone."""
    B, S, K, H = k_BSKH.shape
    return x_YBKCH.transpose(1, 0, 3, 2, 4).reshape(B, -1, K, H)[:, :S]


def fill(x_BTNH: Float[Array, "B T N _"], size: int) -> Float[Array, "B F N _"]:
    """Zeros after the last position, up to a multiple of the size."""
    return jnp.pad(x_BTNH, [(0, 0), (0, -x_BTNH.shape[1] % size), (0, 0), (0, 0)])


def mask_by_tiles(
    mask_B1TS: Float[Array, "B 1 T S"] | None, q_BTNH: Float[Array, "B T N H"], k_BSKH: Float[Array, "B S K H"]
) -> Callable[[Int[Array, ""], Int[Array, ""]], Float[Array, "#B 1 R C"]]:
    """3.10: M between the rows of tile x and the keys of tile y: −∞ at later keys, else what the mask adds, or 0."""
    (T, N), (S, K) = q_BTNH.shape[1:3], k_BSKH.shape[1:3]
    Q, C = min(QUERIES, T), min(KEYS, S)
    if mask_B1TS is not None:
        mask_B1TS = jnp.pad(at_least_float32(mask_B1TS), [(0, 0), (0, 0), (0, -T % Q), (0, -S % C)])

    def tile(x: Int[Array, ""], y: Int[Array, ""]) -> Float[Array, "#B 1 R C"]:
        later_QC = y * C + jnp.arange(C) > (x * Q + jnp.arange(Q))[:, None]
        m_B1QC = jnp.zeros((1, 1, Q, C), at_least_float32(q_BTNH).dtype)
        if mask_B1TS is not None:
            m_B1QC = jax.lax.dynamic_slice(mask_B1TS, (0, 0, x * Q, y * C), (len(mask_B1TS), 1, Q, C))
        return jnp.repeat(jnp.where(later_QC, -jnp.inf, m_B1QC), N // K, axis=2)

    return tile


def tiles_seen(x: Int[Array, ""], q_BTNH: Array, k_BSKH: Array) -> Int[Array, ""]:
    """3.10: how many tiles of keys begin no later than the last query of tile x."""
    S = k_BSKH.shape[1]
    Q, C = min(QUERIES, q_BTNH.shape[1]), min(KEYS, S)
    return jnp.minimum((x * Q + Q - 1) // C, (S - 1) // C) + 1
