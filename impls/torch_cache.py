"""Decoding with a key/value cache in PyTorch. Read it beside `numpy_cache.py`, and `torch_attention.py`, whose layer
this is.

    B batch   T new tokens   S all tokens so far   N query heads   K key/value heads   H head size
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from impls import torch_attention
from impls.spec import AttentionConfig, Observe, steps
from impls.torch_attention import array, attention, mix, scores, share, softmax, tensor


class Attention(torch_attention.Attention):
    """The layer of T new tokens, which come after those that it keeps the keys and values of, [B,S,K,H] each."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.past: list[tuple[Tensor, Tensor]] = []  # keys and values of each step

    def attend(
        self,
        qr_BTNH: Float[Tensor, "B T N H"],
        kr_BSKH: Float[Tensor, "B T K H"],
        v_BSKH: Float[Tensor, "B T K H"],
        mask_B1TS: Float[Tensor, "B 1 T S"] | None,
        observe: Observe,
    ) -> Float[Tensor, "B T N H"]:
        """3.2, 3.11: softmax(Q K^T / √d_k + M) V, for T rows of the square, and none of the others."""
        self.past.append((kr_BSKH, v_BSKH))
        k_BSKH, v_BSKH = (torch.cat(each, dim=1) for each in zip(*self.past, strict=True))
        G = self.config.num_key_value_groups
        s_BNTS = scores(qr_BTNH, share(k_BSKH, G))  # 3.5
        mask_TS = causal_mask(s_BNTS) if mask_B1TS is None else mask_B1TS
        a_BNTS = observe("probs", softmax(observe("masked_scores", s_BNTS + mask_TS)))  # 3.10, 3.6
        return mix(a_BNTS, share(v_BSKH, G))


def causal_mask(s_BNTS: Float[Tensor, "B N T S"]) -> Float[Tensor, "T S"]:
    """3.10: the last T rows of the triangle."""
    T, S = s_BNTS.shape[-2:]
    return torch.full_like(s_BNTS[0, 0], -torch.inf).triu(diagonal=S - T + 1)


@torch.no_grad()
def decode(
    weights: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], config: AttentionConfig, device: str = "cpu"
) -> Iterator[dict[str, np.ndarray]]:
    """The stages of each step: of the first half of the tokens together, then of one after the other."""
    layer = attention(weights, config, device, Attention)
    x_BTD, cos_BTH, sin_BTH = (tensor(inputs[name], device) for name in ("hidden_states", "cos", "sin"))
    mask_B1TS = tensor(inputs["attention_mask"], device) if "attention_mask" in inputs else None
    for new in steps(x_BTD.shape[1]):
        stages: dict[str, np.ndarray] = {}

        def record(name: str, value: Tensor, stages: dict[str, np.ndarray] = stages) -> Tensor:
            stages[name] = array(value)
            return value

        mask = None if mask_B1TS is None else mask_B1TS[:, :, new, : new.stop]
        layer(x_BTD[:, new], cos_BTH[:, new], sin_BTH[:, new], mask, record)
        yield stages
