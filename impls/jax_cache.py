"""Decoding with a key/value cache in JAX. Read it beside `numpy_cache.py`, and `jax_attention.py`, whose layer this is.

The cache has its full length from the start, so that one program computes every token: new keys are written into their
places, and the places that are still empty lie right of the diagonal, where 3.10 hides them.

    B batch   T new tokens   S places of the cache   N query heads   K key/value heads   H head size
"""

from collections.abc import Iterator, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from impls import jax_attention
from impls.jax_attention import attention, mix, scores, share, softmax
from impls.spec import AttentionConfig, Observe, steps


class Attention(jax_attention.Attention):
    """The layer of T new tokens, which stand at `start` and after it; it keeps keys and values, [B,S,K,H] each."""

    k: nnx.Cache
    v: nnx.Cache
    start: nnx.Cache

    def attend(
        self,
        qr_BTNH: Float[Array, "B T N H"],
        kr_BSKH: Float[Array, "B T K H"],
        v_BSKH: Float[Array, "B T K H"],
        mask_B1TS: Float[Array, "B 1 T S"] | None,
        observe: Observe,
    ) -> Float[Array, "B T N H"]:
        """3.2, 3.11: softmax(Q K^T / √d_k + M) V, for T rows of the square, and none of the others."""
        start, G = self.start[...], self.config.num_key_value_groups
        self.k[...] = jax.lax.dynamic_update_slice_in_dim(self.k[...], kr_BSKH, start, axis=1)
        self.v[...] = jax.lax.dynamic_update_slice_in_dim(self.v[...], v_BSKH, start, axis=1)
        s_BNTS = scores(qr_BTNH, share(self.k[...], G))  # 3.5
        mask_TS = causal_mask(s_BNTS, start) if mask_B1TS is None else mask_B1TS
        a_BNTS = observe("probs", softmax(observe("masked_scores", s_BNTS + mask_TS)))  # 3.10, 3.6
        return mix(a_BNTS, share(self.v[...], G))


def causal_mask(s_BNTS: Float[Array, "B N T S"], start: Int[Array, ""]) -> Float[Array, "T S"]:
    """3.10: rows `start` and after of the triangle."""
    T, S = s_BNTS.shape[-2:]
    t, s = (jnp.arange(size, dtype=start.dtype) for size in (T, S))
    return jnp.where(s <= start + t[:, None], 0, -jnp.inf).astype(s_BNTS.dtype)


def decode(
    weights: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], config: AttentionConfig, device: str = "cpu"
) -> Iterator[dict[str, np.ndarray]]:
    """The stages of each step: of the first half of the tokens together, then of one after the other."""
    B, T, _ = inputs["hidden_states"].shape
    dtype = inputs["hidden_states"].dtype
    with jax.enable_x64(True):  # float64 is let in; which dtype it is, the arrays decide
        place = jax.devices(device)[0]
        w = jax.device_put(dict(weights), place)
        empty = np.zeros((B, T, config.num_key_value_heads, config.head_dim), dtype)
        cache = jax.device_put((empty, empty), place)
        for new in steps(T):
            mask_B1TS = inputs["attention_mask"][:, :, new] if "attention_mask" in inputs else None
            given = *(inputs[name][:, new] for name in ("hidden_states", "cos", "sin")), mask_B1TS, np.int32(new.start)
            stages, cache = step(w, *jax.device_put(given, place), cache, config)
            yield {name: np.asarray(value) for name, value in stages.items()}


@partial(jax.jit, static_argnames="config")
def step(
    weights: Mapping[str, Array],
    x_BTD: Float[Array, "B T D"],
    cos_BTH: Float[Array, "B T H"],
    sin_BTH: Float[Array, "B T H"],
    mask_B1TS: Float[Array, "B 1 T S"] | None,
    start: Int[Array, ""],
    cache: tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]],
    config: AttentionConfig,
) -> tuple[dict[str, Array], tuple[Array, Array]]:
    """T new tokens  ->  their stages, and the cache with their keys and values."""
    layer = attention(weights, config, Attention)
    layer.k, layer.v, layer.start = nnx.Cache(cache[0]), nnx.Cache(cache[1]), nnx.Cache(start)
    stages: dict[str, Array] = {}

    def record(name: str, value: Array) -> Array:
        stages[name] = value
        return value

    layer(x_BTD, cos_BTH, sin_BTH, mask_B1TS, record)
    return stages, (layer.k[...], layer.v[...])
