"""Attention as equations in PyTorch: an `nn.Module` that autograd differentiates. Read it beside `numpy_attention.py`.

B batch   T query position   S key position   D hidden size   N query heads   K key/value heads   G = N/K   H head size
"""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from impls.spec import BIAS_GRADIENTS, GRADIENTS, AttentionConfig, Observe, keep, weight_shapes

# ------------------------------------------------------------------------------------------------------------ forward


def tensor(array: np.ndarray, device: str) -> Tensor:
    """A copy, so that nothing done to it reaches the array. NumPy's bfloat16 is handed over as its bits."""
    bits = array.view(np.int16) if array.dtype.name == "bfloat16" else array
    return torch.tensor(bits, device="cuda" if device == "gpu" else device).view(getattr(torch, array.dtype.name))


def array(tensor: Tensor) -> np.ndarray:
    """The tensor as an array of its own dtype."""
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.contiguous().numpy(force=True).view(str(tensor.dtype).removeprefix("torch."))


class Weight(nn.Module):
    """One tensor `weight`, perhaps with a `bias`, without storage until `load_state_dict` assigns it."""

    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))
        self.bias = nn.Parameter(torch.empty(shape[:1], device="meta")) if bias else None


class Attention(nn.Module):
    """The layer, holding weights [out, in]: its `state_dict` is Hugging Face's."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        shapes, bias = weight_shapes(config), config.attention_bias
        self.q_proj = Weight(*shapes["q_proj.weight"], bias=bias)
        self.k_proj = Weight(*shapes["k_proj.weight"], bias=bias)
        self.v_proj = Weight(*shapes["v_proj.weight"], bias=bias)
        self.q_norm = Weight(*shapes["q_norm.weight"])
        self.k_norm = Weight(*shapes["k_norm.weight"])
        self.o_proj = Weight(*shapes["o_proj.weight"], bias=bias)

    def forward(
        self,
        x_BTD: Float[Tensor, "B T D"],
        cos_BTH: Float[Tensor, "B T H"],
        sin_BTH: Float[Tensor, "B T H"],
        mask_B1TS: Float[Tensor, "B 1 T S"] | None = None,
        observe: Observe = keep,
    ) -> Float[Tensor, "B T D"]:
        """Hidden states [B,T,D], cos and sin [B,T,H]  ->  output [B,T,D]; the mask where a batch is padded."""
        N, K, eps = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.rms_norm_eps

        q_BTNH = observe("q_proj", project(x_BTD, self.q_proj.weight, N, self.q_proj.bias))  # 3.1
        k_BSKH = observe("k_proj", project(x_BTD, self.k_proj.weight, K, self.k_proj.bias))  # 3.1
        v_BSKH = observe("v_proj", project(x_BTD, self.v_proj.weight, K, self.v_proj.bias))  # 3.1
        qn_BTNH = observe("q_norm", rms_norm(q_BTNH, self.q_norm.weight, eps))
        kn_BSKH = observe("k_norm", rms_norm(k_BSKH, self.k_norm.weight, eps))
        qr_BTNH = observe("q_rope", rope(qn_BTNH, cos_BTH, sin_BTH))
        kr_BSKH = observe("k_rope", rope(kn_BSKH, cos_BTH, sin_BTH))
        o_BTNH = observe("heads", self.attend(qr_BTNH, kr_BSKH, v_BSKH, mask_B1TS, observe))  # 3.2, 3.11
        return observe("output", merge(o_BTNH, self.o_proj.weight, self.o_proj.bias))  # 3.12

    def attend(
        self,
        qr_BTNH: Float[Tensor, "B T N H"],
        kr_BSKH: Float[Tensor, "B S K H"],
        v_BSKH: Float[Tensor, "B S K H"],
        mask_B1TS: Float[Tensor, "B 1 T S"] | None,
        observe: Observe,
    ) -> Float[Tensor, "B T N H"]:
        """3.2, 3.11: softmax(Q K^T / √d_k + M) V, which a fused kernel computes without showing what is between."""
        G = self.config.num_key_value_groups
        s_BNTS = observe("scores", scores(qr_BTNH, share(kr_BSKH, G)))  # 3.5
        m_BNTS = observe("masked_scores", s_BNTS + (causal_mask(s_BNTS) if mask_B1TS is None else mask_B1TS))  # 3.10
        a_BNTS = observe("probs", softmax(m_BNTS))  # 3.6
        return mix(a_BNTS, share(v_BSKH, G))


def attention(
    weights: Mapping[str, np.ndarray],
    config: AttentionConfig,
    device: str = "cpu",
    layer: type[Attention] | None = None,
) -> Attention:
    """The layer from Hugging Face's weights."""
    module = (layer or Attention)(config)
    module.load_state_dict({name: tensor(array, device) for name, array in weights.items()}, strict=True, assign=True)
    return module


def project(
    x_BTD: Float[Tensor, "B T D"], w_ND: Float[Tensor, "NH D"], heads: int, b_N: Float[Tensor, "NH"] | None = None
) -> Float[Tensor, "B T N H"]:
    """3.1: Q = X W_Q + b_Q, cut into heads. The weight is W_Q^T, [out, in]."""
    return nn.functional.linear(x_BTD, w_ND, b_N).unflatten(-1, (heads, -1))


def rms_norm(x: Float[Tensor, "B T N H"], w_H: Float[Tensor, "H"], eps: float) -> Float[Tensor, "B T N H"]:
    """y = w ⊙ x / rms(x), over each head by itself; rms(x) = √(mean(x²) + eps)."""
    z = at_least_float32(x)
    return w_H * (z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def rope(
    x: Float[Tensor, "B T N H"], cos_BTH: Float[Tensor, "B T H"], sin_BTH: Float[Tensor, "B T H"]
) -> Float[Tensor, "B T N H"]:
    """Turn each pair (x_i, x_{i+H/2}) by its position's angle: x cos + rot(x) sin, alike for every head."""
    return x * cos_BTH[:, :, None] + rotate_half(x) * sin_BTH[:, :, None]


def rotate_half(x: Float[Tensor, "B T N H"]) -> Float[Tensor, "B T N H"]:
    """rot([x₁, x₂]) = [−x₂, x₁], a quarter turn of every pair."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([-x2, x1], dim=-1)


def share(x_BSKH: Float[Tensor, "B S K H"], G: int) -> Float[Tensor, "B S N H"]:
    """Grouped queries: query head n reads key/value head n // G."""
    return x_BSKH.repeat_interleave(G, dim=2)


def scores(q_BTNH: Float[Tensor, "B T N H"], k_BSNH: Float[Tensor, "B S N H"]) -> Float[Tensor, "B N T S"]:
    """3.5: S = Q K^T / √d_k."""
    q_BNTH, k_BNHS = q_BTNH.permute(0, 2, 1, 3), k_BSNH.permute(0, 2, 3, 1)
    return torch.matmul(q_BNTH, k_BNHS) * q_BTNH.shape[-1] ** -0.5


def causal_mask(s_BNTS: Float[Tensor, "B N T S"]) -> Float[Tensor, "T S"]:
    """3.10: M_ij = 0 for j ≤ i, −∞ for j > i. Hugging Face adds the most negative finite number instead of −∞."""
    return torch.full_like(s_BNTS[0, 0], -torch.inf).triu(diagonal=1)


def softmax(z_BNTS: Float[Tensor, "B N T S"]) -> Float[Tensor, "B N T S"]:
    """3.6: a_i = exp(z_i) / Σ_j exp(z_j). Taking the maximum off changes nothing, so no gradient goes through it."""
    x_BNTS = at_least_float32(z_BNTS)
    e_BNTS = torch.exp(x_BNTS - x_BNTS.amax(dim=-1, keepdim=True).detach())
    return (e_BNTS / e_BNTS.sum(dim=-1, keepdim=True)).to(z_BNTS.dtype)


def mix(a_BNTS: Float[Tensor, "B N T S"], v_BSNH: Float[Tensor, "B S N H"]) -> Float[Tensor, "B T N H"]:
    """3.2, 3.11: head = A V."""
    return torch.matmul(a_BNTS, v_BSNH.transpose(1, 2)).transpose(1, 2)


def merge(
    o_BTNH: Float[Tensor, "B T N H"], w_DN: Float[Tensor, "D NH"], b_D: Float[Tensor, "D"] | None = None
) -> Float[Tensor, "B T D"]:
    """3.12: MHA(X) = [head_1 ‖ … ‖ head_h] W_O + b_O. The weight is W_O^T, [out, in]."""
    return nn.functional.linear(o_BTNH.flatten(-2), w_DN, b_D)


def at_least_float32(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """A norm and a softmax are computed in float32 where the layer's dtype is shorter. Hugging Face: always."""
    return x.float() if torch.finfo(x.dtype).bits < 32 else x


# ----------------------------------------------------------------------------------------------------------- backward


def run(
    weights: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    d_output: Float[np.ndarray, "B T D"],
    config: AttentionConfig,
    device: str = "cpu",
    observe: Observe = keep,
    layer: type[Attention] | None = None,
) -> dict[str, np.ndarray]:
    """d_output [B,T,D]  ->  every stage, and the gradient of every stage, of every weight and of the hidden states."""
    module = attention(weights, config, device, layer)
    x_BTD, cos_BTH, sin_BTH = (tensor(inputs[name], device) for name in ("hidden_states", "cos", "sin"))
    mask_B1TS = tensor(inputs["attention_mask"], device) if "attention_mask" in inputs else None
    traced = differentiate(module, x_BTD, cos_BTH, sin_BTH, mask_B1TS, tensor(d_output, device), observe)
    return {name: array(value) for name, value in traced.items()}


def differentiate(
    module: Attention,
    x_BTD: Float[Tensor, "B T D"],
    cos_BTH: Float[Tensor, "B T H"],
    sin_BTH: Float[Tensor, "B T H"],
    mask_B1TS: Float[Tensor, "B 1 T S"] | None,
    d_output: Float[Tensor, "B T D"],
    observe: Observe = keep,
) -> dict[str, Tensor]:
    """The stages of a layer, and the gradient of every stage, of every weight and of the hidden states."""
    stages: dict[str, Tensor] = {}

    def record(name: str, value: Tensor) -> Tensor:
        stages[name] = observe(name, value)
        return stages[name]

    y_BTD = module(x_BTD.requires_grad_(), cos_BTH, sin_BTH, mask_B1TS, record)
    tensors = {**module.state_dict(keep_vars=True), "hidden_states": x_BTD, **stages}
    names = [name for name in (*GRADIENTS, *BIAS_GRADIENTS) if name.removeprefix("d_") in tensors]
    sources = {name: tensors[name.removeprefix("d_")] for name in names}
    loss = torch.sum(y_BTD * d_output)  # its gradient at the output is d_output
    gradients = torch.autograd.grad(loss, list(sources.values()))
    return stages | dict(zip(sources, gradients, strict=True))
