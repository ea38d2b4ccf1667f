"""Attention as equations in JAX: a Flax NNX module that JAX differentiates. Read it beside `numpy_attention.py`.

B batch   T query position   S key position   D hidden size   N query heads   K key/value heads   G = N/K   H head size
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from impls.spec import BIAS_GRADIENTS, BIASES, GRADIENTS, STAGES, AttentionConfig, Observe, keep, weight_shapes

matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
"""A product in the full precision of its dtype; by default an accelerator may round the factors to TF32 or bfloat16."""

# ------------------------------------------------------------------------------------------------------------ forward


class Attention(nnx.Module):
    """The layer, holding kernels [in, out] as Flax does: x W. Hugging Face holds [out, in]."""

    def __init__(self, kernels: Mapping[str, Array], config: AttentionConfig) -> None:
        self.config = config
        self.q_proj = nnx.Param(kernels["q_proj.weight"])
        self.k_proj = nnx.Param(kernels["k_proj.weight"])
        self.v_proj = nnx.Param(kernels["v_proj.weight"])
        self.q_norm = nnx.Param(kernels["q_norm.weight"])
        self.k_norm = nnx.Param(kernels["k_norm.weight"])
        self.o_proj = nnx.Param(kernels["o_proj.weight"])
        biases = (nnx.Param(kernels[name]) if config.attention_bias else None for name in BIASES)
        self.q_bias, self.k_bias, self.v_bias, self.o_bias = biases

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        cos_BTH: Float[Array, "B T H"],
        sin_BTH: Float[Array, "B T H"],
        mask_B1TS: Float[Array, "B 1 T S"] | None = None,
        observe: Observe = keep,
    ) -> Float[Array, "B T D"]:
        """Hidden states [B,T,D], cos and sin [B,T,H]  ->  output [B,T,D]; the mask where a batch is padded."""
        N, K, eps = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.rms_norm_eps

        q_BTNH = observe("q_proj", project(x_BTD, self.q_proj[...], N, self.q_bias))  # 3.1
        k_BSKH = observe("k_proj", project(x_BTD, self.k_proj[...], K, self.k_bias))  # 3.1
        v_BSKH = observe("v_proj", project(x_BTD, self.v_proj[...], K, self.v_bias))  # 3.1
        qn_BTNH = observe("q_norm", rms_norm(q_BTNH, self.q_norm[...], eps))
        kn_BSKH = observe("k_norm", rms_norm(k_BSKH, self.k_norm[...], eps))
        qr_BTNH = observe("q_rope", rope(qn_BTNH, cos_BTH, sin_BTH))
        kr_BSKH = observe("k_rope", rope(kn_BSKH, cos_BTH, sin_BTH))
        o_BTNH = observe("heads", self.attend(qr_BTNH, kr_BSKH, v_BSKH, mask_B1TS, observe))  # 3.2, 3.11
        return observe("output", merge(o_BTNH, self.o_proj[...], self.o_bias))  # 3.12

    def attend(
        self,
        qr_BTNH: Float[Array, "B T N H"],
        kr_BSKH: Float[Array, "B S K H"],
        v_BSKH: Float[Array, "B S K H"],
        mask_B1TS: Float[Array, "B 1 T S"] | None,
        observe: Observe,
    ) -> Float[Array, "B T N H"]:
        """3.2, 3.11: softmax(Q K^T / √d_k + M) V, which a fused kernel computes without showing what is between."""
        G = self.config.num_key_value_groups
        s_BNTS = observe("scores", scores(qr_BTNH, share(kr_BSKH, G)))  # 3.5
        m_BNTS = observe("masked_scores", s_BNTS + (causal_mask(s_BNTS) if mask_B1TS is None else mask_B1TS))  # 3.10
        a_BNTS = observe("probs", softmax(m_BNTS))  # 3.6
        return mix(a_BNTS, share(v_BSKH, G))


def attention(weights: Mapping[str, Array], config: AttentionConfig, layer: type[Attention] | None = None) -> Attention:
    """The layer from Hugging Face's weights. The only transposition: [out, in] -> [in, out]; vectors stay."""
    return (layer or Attention)({name: weights[name].T for name in weight_shapes(config)}, config)


def project(
    x_BTD: Float[Array, "B T D"], w_DN: Float[Array, "D NH"], heads: int, bias: nnx.Param | None = None
) -> Float[Array, "B T N H"]:
    """3.1: Q = X W_Q + b_Q, cut into heads."""
    B, T, _ = x_BTD.shape
    return plus(matmul(x_BTD, w_DN), bias).reshape(B, T, heads, -1)


def rms_norm(x: Float[Array, "B T N H"], w_H: Float[Array, "H"], eps: float) -> Float[Array, "B T N H"]:
    """y = w ⊙ x / rms(x), over each head by itself; rms(x) = √(mean(x²) + eps). Hugging Face rounds also before w."""
    z = at_least_float32(x)
    x_hat = z / jnp.sqrt(jnp.mean(jnp.square(z), axis=-1, keepdims=True) + eps)
    return (at_least_float32(w_H) * x_hat).astype(x.dtype)


def rope(
    x: Float[Array, "B T N H"], cos_BTH: Float[Array, "B T H"], sin_BTH: Float[Array, "B T H"]
) -> Float[Array, "B T N H"]:
    """Turn each pair (x_i, x_{i+H/2}) by its position's angle: x cos + rot(x) sin, alike for every head."""
    return x * cos_BTH[:, :, None] + rotate_half(x) * sin_BTH[:, :, None]


def rotate_half(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """rot([x₁, x₂]) = [−x₂, x₁], a quarter turn of every pair."""
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-x2, x1], axis=-1)


def share(x_BSKH: Float[Array, "B S K H"], G: int) -> Float[Array, "B S N H"]:
    """Grouped queries: query head n reads key/value head n // G."""
    return jnp.repeat(x_BSKH, G, axis=2)


def scores(q_BTNH: Float[Array, "B T N H"], k_BSNH: Float[Array, "B S N H"]) -> Float[Array, "B N T S"]:
    """3.5: S = Q K^T / √d_k."""
    q_BNTH, k_BNHS = q_BTNH.transpose(0, 2, 1, 3), k_BSNH.transpose(0, 2, 3, 1)
    return matmul(q_BNTH, k_BNHS) * q_BTNH.shape[-1] ** -0.5


def causal_mask(s_BNTS: Float[Array, "B N T S"]) -> Float[Array, "T S"]:
    """3.10: M_ij = 0 for j ≤ i, −∞ for j > i. Hugging Face adds the most negative finite number instead of −∞."""
    T, S = s_BNTS.shape[-2:]
    return jnp.where(jnp.tri(T, S, dtype=bool), 0, -jnp.inf).astype(s_BNTS.dtype)


def softmax(z_BNTS: Float[Array, "B N T S"]) -> Float[Array, "B N T S"]:
    """3.6: a_i = exp(z_i) / Σ_j exp(z_j). Taking the maximum off changes nothing, so no gradient goes through it."""
    x_BNTS = at_least_float32(z_BNTS)
    e_BNTS = jnp.exp(x_BNTS - jax.lax.stop_gradient(x_BNTS.max(axis=-1, keepdims=True)))
    return (e_BNTS / e_BNTS.sum(axis=-1, keepdims=True)).astype(z_BNTS.dtype)


def mix(a_BNTS: Float[Array, "B N T S"], v_BSNH: Float[Array, "B S N H"]) -> Float[Array, "B T N H"]:
    """3.2, 3.11: head = A V."""
    return matmul(a_BNTS, v_BSNH.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def merge(
    o_BTNH: Float[Array, "B T N H"], w_ND: Float[Array, "NH D"], bias: nnx.Param | None = None
) -> Float[Array, "B T D"]:
    """3.12: MHA(X) = [head_1 ‖ … ‖ head_h] W_O + b_O."""
    B, T, N, H = o_BTNH.shape
    return plus(matmul(o_BTNH.reshape(B, T, N * H), w_ND), bias)


def plus(y_BTD: Float[Array, "B T D"], bias: nnx.Param | None) -> Float[Array, "B T D"]:
    """y + b, where the layer has biases, in float32 if its dtype is shorter: so then is the sum, b's gradient."""
    return y_BTD if bias is None else (at_least_float32(y_BTD) + at_least_float32(bias[...])).astype(y_BTD.dtype)


def at_least_float32(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """A norm and a softmax are computed in float32 where the layer's dtype is shorter. Hugging Face: always."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


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
    x_BTD, cos_BTH, sin_BTH = inputs["hidden_states"], inputs["cos"], inputs["sin"]
    given = dict(weights), x_BTD, cos_BTH, sin_BTH, inputs.get("attention_mask"), d_output
    with jax.enable_x64(True):  # float64 is let in; which dtype it is, the arrays decide
        tensors = jax.device_put(given, jax.devices(device)[0])
        return {name: np.asarray(value) for name, value in trace(*tensors, config, observe, layer).items()}


@partial(jax.jit, static_argnames=("config", "observe", "layer"))
def trace(
    weights: Mapping[str, Array],
    x_BTD: Float[Array, "B T D"],
    cos_BTH: Float[Array, "B T H"],
    sin_BTH: Float[Array, "B T H"],
    mask_B1TS: Float[Array, "B 1 T S"] | None,
    d_output: Float[Array, "B T D"],
    config: AttentionConfig,
    observe: Observe = keep,
    layer: type[Attention] | None = None,
) -> dict[str, Array]:
    """Every stage, and the gradient of every stage, of every weight and of the hidden states, in one program."""
    forward = partial(tapped, config=config, observe=observe, layer=layer)
    return differentiate(forward, weights, x_BTD, cos_BTH, sin_BTH, mask_B1TS, d_output, config.sizes())


def tapped(
    tensors: Mapping[str, Array],
    cos_BTH: Float[Array, "B T H"],
    sin_BTH: Float[Array, "B T H"],
    mask_B1TS: Float[Array, "B 1 T S"] | None,
    config: AttentionConfig,
    observe: Observe = keep,
    layer: type[Attention] | None = None,
) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
    """The output and every stage, a zero added to each, as a tap: the gradient of that zero is the stage's gradient."""
    stages = {}

    def tap(name: str, value: Array) -> Array:
        stages[name] = observe(name, value) + tensors[name]
        return stages[name]

    return attention(tensors, config, layer)(tensors["hidden_states"], cos_BTH, sin_BTH, mask_B1TS, tap), stages


def differentiate(
    forward: Callable[..., tuple[Array, dict[str, Array]]],
    weights: Mapping[str, Array],
    x_BTD: Float[Array, "B T D"],
    cos_BTH: Float[Array, "B T H"],
    sin_BTH: Float[Array, "B T H"],
    mask_B1TS: Float[Array, "B 1 T S"] | None,
    d_output: Float[Array, "B T D"],
    sizes: Mapping[str, int],
) -> dict[str, Array]:
    """The stages of `forward`, which adds taps, and its gradients; `sizes` are those of the letters but B, T and S."""
    sizes = {**sizes, "B": x_BTD.shape[0], "T": x_BTD.shape[1], "S": x_BTD.shape[1]}
    taps = {stage.name: jnp.zeros([sizes[letter] for letter in stage.shape], x_BTD.dtype) for stage in STAGES}
    tensors = {**weights, "hidden_states": x_BTD, **taps}
    _, backward, stages = jax.vjp(lambda tensors: forward(tensors, cos_BTH, sin_BTH, mask_B1TS), tensors, has_aux=True)
    (gradients,) = backward(d_output)
    hidden = taps.keys() - stages.keys()  # what a fused kernel does not show
    sources = {name: name.removeprefix("d_") for name in (*GRADIENTS, *BIAS_GRADIENTS)}
    seen = {name: source for name, source in sources.items() if source in gradients and source not in hidden}
    return stages | {name: gradients[source] for name, source in seen.items()}
