"""The layer with JAX's own `dot_product_attention`, as one would write it today. Read it beside `jax_attention.py`."""

from functools import partial

import jax
from jax import Array
from jaxtyping import Float

from impls import jax_attention
from impls.spec import Observe


class Attention(jax_attention.Attention):
    """The layer whose scores and probabilities stay inside one call."""

    def attend(
        self,
        qr_BTNH: Float[Array, "B T N H"],
        kr_BSKH: Float[Array, "B S K H"],
        v_BSKH: Float[Array, "B S K H"],
        mask_B1TS: Float[Array, "B 1 T S"] | None,
        observe: Observe,
    ) -> Float[Array, "B T N H"]:
        """3.2, 3.11 in one call; it divides by √d_k and shares key/value heads itself."""
        with jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(qr_BTNH, kr_BSKH, v_BSKH, mask_B1TS, is_causal=mask_B1TS is None)


run = partial(jax_attention.run, layer=Attention)
