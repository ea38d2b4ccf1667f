"""The layer with PyTorch's own fused attention, as one would write it today. Read it beside `torch_attention.py`."""

from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from impls import torch_attention
from impls.spec import Observe


class Attention(torch_attention.Attention):
    """The layer whose scores and probabilities are never held."""

    def attend(
        self,
        qr_BTNH: Float[Tensor, "B T N H"],
        kr_BSKH: Float[Tensor, "B S K H"],
        v_BSKH: Float[Tensor, "B S K H"],
        mask_B1TS: Float[Tensor, "B 1 T S"] | None,
        observe: Observe,
    ) -> Float[Tensor, "B T N H"]:
        """3.2, 3.11 in one call; it divides by √d_k and shares key/value heads itself."""
        q, k, v = (x.transpose(1, 2) for x in (qr_BTNH, kr_BSKH, v_BSKH))
        masked = {"is_causal": True} if mask_B1TS is None else {"attn_mask": mask_B1TS}
        attended = nn.functional.scaled_dot_product_attention(q, k, v, **masked, enable_gqa=True)
        return attended.transpose(1, 2)


run = partial(torch_attention.run, layer=Attention)
