"""What people really get wrong in an attention layer, each as an edit of an implementation's source.

`--impl numpy:norm_after_rope` runs the NumPy page with that bug in it; `harness.planted` has each before every gate.
"""

import __future__

import functools
import importlib
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

import ml_dtypes
import numpy as np

from harness.gates import Array, direction
from impls.spec import AttentionConfig


class Bug(NamedTuple):
    """One bug: in the source of each of `frameworks`, `old` (which stands there once) becomes `new`."""

    name: str
    kind: str
    says: str  # completes "agrees with …"
    stage: (
        str | tuple[str, ...]
    )  # the first stage or gradient that it makes wrong; several where they are equally first
    old: str
    new: str
    frameworks: tuple[str, ...] = ("numpy",)

    @property
    def stages(self) -> tuple[str, ...]:
        """`stage` as a tuple."""
        return (self.stage,) if isinstance(self.stage, str) else self.stage

    @property
    def forward(self) -> bool:
        """Whether it is in the forward pass."""
        return direction(self.stages[0]) == "forward"

    def possible(self, config: AttentionConfig) -> bool:
        """Whether a layer can have it: none without biases can lack one, one head is not spread."""
        if self.kind == "devices":
            return config.num_key_value_heads > 1
        return self.kind != "biases" or config.attention_bias


ALL = ("numpy", "jax", "torch")

# fmt: off
_NORM_LINES = """
    qn_BTNH = observe("q_norm", rms_norm(q_BTNH, weights["q_norm.weight"], eps))
    kn_BSKH = observe("k_norm", rms_norm(k_BSKH, weights["k_norm.weight"], eps))
"""
_ROPE_LINES = """\
    qr_BTNH = observe("q_rope", rope(qn_BTNH, cos_BTH, sin_BTH))
    kr_BSKH = observe("k_rope", rope(kn_BSKH, cos_BTH, sin_BTH))
"""
_NORMS_SKIPPED = """
    qn_BTNH = observe("q_norm", q_BTNH)
    kn_BSKH = observe("k_norm", k_BSKH)
"""
_NORMS_SWAPPED = """
    qn_BTNH = observe("q_norm", rms_norm(q_BTNH, weights["k_norm.weight"], eps))
    kn_BSKH = observe("k_norm", rms_norm(k_BSKH, weights["q_norm.weight"], eps))
"""
_NORMS_AFTER_ROPE = """
    qn_BTNH = observe("q_norm", rope(q_BTNH, cos_BTH, sin_BTH))
    kn_BSKH = observe("k_norm", rope(k_BSKH, cos_BTH, sin_BTH))
    qr_BTNH = observe("q_rope", rms_norm(qn_BTNH, weights["q_norm.weight"], eps))
    kr_BSKH = observe("k_rope", rms_norm(kn_BSKH, weights["k_norm.weight"], eps))
"""
_KV_LINES = """
    k_BSKH = observe("k_proj", project(x_BTD, weights["k_proj.weight"], K, weights.get("k_proj.bias", 0)))  # 3.1
    v_BSKH = observe("v_proj", project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0)))  # 3.1
"""
_KV_SWAPPED = """
    k_BSKH = observe("k_proj", project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0)))
    v_BSKH = observe("v_proj", project(x_BTD, weights["k_proj.weight"], K, weights.get("k_proj.bias", 0)))
"""
_MASK_LINES = """
    mask_TS = inputs.get("attention_mask", causal_mask(s_BNTS))
    m_BNTS = observe("masked_scores", s_BNTS + mask_TS)  # 3.10
    a_BNTS = observe("probs", softmax(m_BNTS))  # 3.6
"""
_MASK_AFTER_SOFTMAX = """
    m_BNTS = observe("masked_scores", s_BNTS)
    a_BNTS = observe("probs", np.tril(softmax(m_BNTS)))
"""
_TABLES = 'x_BTD, cos_BTH, sin_BTH = inputs["hidden_states"], inputs["cos"], inputs["sin"]'
_ROPE = "return x * cos_BTH[:, :, None] + rotate_half(x) * sin_BTH[:, :, None]"
_HALVES = "x1, x2 = np.split(x, 2, axis=-1)\n    return np.concatenate([-x2, x1], axis=-1)"
_MASK = "np.where(np.tri(T, S, dtype=bool), 0, -np.inf)"
_MIX = "return (a_BNTS @ v_BSNH.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)"
_SOFTMAX = "e_BNTS = np.exp(z_BNTS - z_BNTS.max(axis=-1, keepdims=True))\n    return e_BNTS / e_BNTS.sum(axis=-1, keepdims=True)"
_JACOBIAN = "a * (d_a - np.sum(a * d_a, axis=-1, keepdims=True))"

BUGS: tuple[Bug, ...] = (
    # ------------------------------------------------------------------------------------------------ projections, 3.1
    Bug("kernels_not_transposed", "projections", "W_Q, W_K and W_V read without their transposition (eq. 3.1)", "q_proj", "(x_BTD @ w_ND.T", "(x_BTD @ w_ND.reshape(w_ND.shape[::-1])"),
    Bug("k_kernel_not_transposed", "projections", "W_K read without its transposition (eq. 3.1)", "k_proj", 'project(x_BTD, weights["k_proj.weight"], K, weights.get("k_proj.bias", 0))', 'project(x_BTD, weights["k_proj.weight"].T.reshape(-1, x_BTD.shape[-1]), K, weights.get("k_proj.bias", 0))'),
    Bug("v_kernel_not_transposed", "projections", "W_V read without its transposition (eq. 3.1)", "v_proj", 'project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0))', 'project(x_BTD, weights["v_proj.weight"].T.reshape(-1, x_BTD.shape[-1]), K, weights.get("v_proj.bias", 0))'),
    Bug("o_kernel_not_transposed", "projections", "W_O read without its transposition (eq. 3.12)", "output", "@ w_DN.T", "@ w_DN.reshape(w_DN.shape[::-1])"),
    Bug("k_projected_with_v", "projections", "K computed with W_V (eq. 3.1)", "k_proj", 'project(x_BTD, weights["k_proj.weight"], K, weights.get("k_proj.bias", 0))', 'project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0))'),
    Bug("k_and_v_swapped", "projections", "W_K and W_V exchanged (eq. 3.1)", "k_proj", _KV_LINES, _KV_SWAPPED),
    Bug("kernel_rows_shifted", "projections", "W_K taken one row off, as from a fused QKV file (eq. 3.1)", "k_proj", 'project(x_BTD, weights["k_proj.weight"], K, weights.get("k_proj.bias", 0))', 'project(x_BTD, np.roll(weights["k_proj.weight"], 1, axis=0), K, weights.get("k_proj.bias", 0))'),
    Bug("bias_on_q", "projections", "a bias added to Q, as Qwen2 has one (eq. 3.1)", "q_proj", 'project(x_BTD, weights["q_proj.weight"], N, weights.get("q_proj.bias", 0))', 'project(x_BTD, weights["q_proj.weight"], N, weights.get("q_proj.bias", 0)) + 0.02'),
    Bug("bias_on_output", "projections", "a bias added to the output (eq. 3.12)", "output", "reshape(B, T, N * H) @ w_DN.T", "reshape(B, T, N * H) @ w_DN.T + 0.02"),
    Bug("input_normalised_again", "projections", "the hidden states normalised once more (eq. 3.1)", "q_proj", _TABLES, _TABLES + '\n    x_BTD = x_BTD / np.sqrt(np.mean(x_BTD**2, axis=-1, keepdims=True) + 1e-6)'),
    Bug("residual_added", "projections", "the hidden states added to the output, as the whole block does (eq. 3.12)", "output", 'observe("output", merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0)))', 'observe("output", merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0)) + x_BTD)'),
    Bug("v_projected_with_k", "projections", "V computed with W_K (eq. 3.1)", "v_proj", 'project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0))', 'project(x_BTD, weights["k_proj.weight"], K, weights.get("k_proj.bias", 0))'),

    # ------------------------------------------------------------------------ biases, 3.1 and 3.12, where there are any
    Bug("q_bias_left_out", "biases", "Q without its bias (eq. 3.1)", "q_proj", ', weights.get("q_proj.bias", 0)', ""),
    Bug("k_bias_left_out", "biases", "K without its bias (eq. 3.1)", "k_proj", ', weights.get("k_proj.bias", 0)', ""),
    Bug("v_bias_left_out", "biases", "V without its bias (eq. 3.1)", "v_proj", ', weights.get("v_proj.bias", 0)', ""),
    Bug("o_bias_left_out", "biases", "the output without its bias (eq. 3.12)", "output", ', weights.get("o_proj.bias", 0)', ""),
    Bug("biases_left_out", "biases", "the four projections without their biases (eq. 3.1)", "q_proj", _TABLES, _TABLES + '\n    weights = {name: value for name, value in weights.items() if "bias" not in name}'),
    Bug("bias_gradients_averaged", "biases", "the biases' gradients averaged over tokens instead of summed (eq. 3.1, backward)", "d_q_proj.bias", "np.sum(d_y, axis=(0, 1))", "np.mean(d_y, axis=(0, 1))"),

    # --------------------------------------------------------------------------------------- heads, 3.1, 3.11 and 3.12
    Bug("heads_interleaved", "heads", "Q, K and V cut into heads with the head as the fast index (eq. 3.1)", "q_proj", "+ b_N).reshape(B, T, heads, -1)", "+ b_N).reshape(B, T, -1, heads).swapaxes(2, 3)"),
    Bug("heads_split_without_swap", "heads", "Q, K and V reshaped to heads where a transposition was needed (eq. 3.1)", "q_proj", "+ b_N).reshape(B, T, heads, -1)", "+ b_N).reshape(B, heads, T, -1).swapaxes(1, 2)"),
    Bug("kv_heads_tiled", "heads", "key/value heads tiled instead of repeated (eq. 3.11)", "scores", "np.repeat(x_BSKH, G, axis=2)", "np.tile(x_BSKH, (1, 1, G, 1))"),
    Bug("k_heads_tiled", "heads", "key heads tiled instead of repeated (eq. 3.5)", "scores", "scores(qr_BTNH, share(kr_BSKH, G))", "scores(qr_BTNH, np.tile(kr_BSKH, (1, 1, G, 1)))"),
    Bug("v_heads_tiled", "heads", "value heads tiled instead of repeated (eq. 3.11)", "heads", "mix(a_BNTS, share(v_BSKH, G))", "mix(a_BNTS, np.tile(v_BSKH, (1, 1, G, 1)))"),
    Bug("first_kv_head_for_all", "heads", "every query head reading the first key/value head (eq. 3.11)", "scores", "np.repeat(x_BSKH, G, axis=2)", "np.repeat(x_BSKH[:, :, :1], G * x_BSKH.shape[2], axis=2)"),
    Bug("kv_heads_off_by_one", "heads", "each query head reading its neighbour's key/value head (eq. 3.11)", "scores", "np.repeat(x_BSKH, G, axis=2)", "np.roll(np.repeat(x_BSKH, G, axis=2), 1, axis=2)"),
    Bug("one_head_zero", "heads", "the last head left zero (eq. 3.11)", "heads", _MIX, _MIX.replace("return ", "o_BTNH = ") + "\n    o_BTNH[:, :, -1] = 0\n    return o_BTNH"),
    Bug("one_head_slightly_off", "heads", "the last head 0.01 % too large (eq. 3.11)", "heads", _MIX, _MIX.replace("return ", "o_BTNH = ") + "\n    o_BTNH[:, :, -1] *= 1.0001\n    return o_BTNH"),
    Bug("two_heads_exchanged", "heads", "the first two heads exchanged in the concatenation (eq. 3.12)", "output", "o_BTNH.reshape(B, T, N * H)", "o_BTNH[:, :, [*range(N)[1::-1], *range(2, N)]].reshape(B, T, N * H)"),
    Bug("heads_reversed", "heads", "the heads concatenated in reverse order (eq. 3.12)", "output", "o_BTNH.reshape(B, T, N * H)", "o_BTNH[:, :, ::-1].reshape(B, T, N * H)"),
    Bug("heads_merged_interleaved", "heads", "the heads interleaved instead of concatenated (eq. 3.12)", "output", "o_BTNH.reshape(B, T, N * H)", "o_BTNH.swapaxes(2, 3).reshape(B, T, N * H)"),
    Bug("heads_merged_without_swap", "heads", "heads merged without swapping axes (eq. 3.12)", "output", "o_BTNH.reshape(B, T, N * H)", "o_BTNH.transpose(0, 2, 1, 3).reshape(B, T, N * H)", ("numpy", "jax")),

    # ------------------------------------------------------------------------------------------------ RMSNorm of Q, K
    Bug("norms_skipped", "norm", "Q and K not normalised (RMSNorm)", "q_norm", _NORM_LINES, _NORMS_SKIPPED),
    Bug("norm_weights_ignored", "norm", "Q and K normalised without their weights (RMSNorm)", "q_norm", "return w_H * (x", "return (x"),
    Bug("norms_swapped", "norm", "the norms of Q and K exchanged (RMSNorm)", "q_norm", _NORM_LINES, _NORMS_SWAPPED),
    Bug("q_normalised_with_k", "norm", "Q normalised with K's weights (RMSNorm)", "q_norm", 'rms_norm(q_BTNH, weights["q_norm.weight"], eps)', 'rms_norm(q_BTNH, weights["k_norm.weight"], eps)'),
    Bug("norm_after_rope", "norm", "RMSNorm applied after RoPE (eq. 3.1 → 3.2)", "q_norm", _NORM_LINES + _ROPE_LINES, _NORMS_AFTER_ROPE),
    Bug("norm_one_plus_weight", "norm", "RMSNorm scaled by 1 + w, as Gemma does (RMSNorm)", "q_norm", "return w_H * (x", "return (1 + w_H) * (x"),
    Bug("norm_weight_inside", "norm", "RMSNorm's weight applied before the normalisation (RMSNorm)", "q_norm", "return w_H * (x * inverse_rms(x, eps))", "x = w_H * x\n    return x * inverse_rms(x, eps)"),
    Bug("eps_1e-5", "norm", "RMSNorm with eps 1e-5 (RMSNorm)", "q_norm", "eps = config.rms_norm_eps", "eps = 1e-5"),
    Bug("eps_1e-8", "norm", "RMSNorm with eps 1e-8 (RMSNorm)", "q_norm", "eps = config.rms_norm_eps", "eps = 1e-8"),
    Bug("eps_left_out", "norm", "RMSNorm without eps (RMSNorm)", "q_norm", "eps = config.rms_norm_eps", "eps = 0.0"),
    Bug("eps_outside_root", "norm", "RMSNorm with eps added to the root (RMSNorm)", "q_norm", "np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)", "(np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + eps)"),
    Bug("norm_over_projection", "norm", "RMSNorm over all heads together (RMSNorm)", "q_norm", "np.mean(x * x, axis=-1, keepdims=True)", "np.mean(x * x, axis=(-2, -1), keepdims=True)"),
    Bug("norm_sum_for_mean", "norm", "RMSNorm with the sum for the mean (RMSNorm)", "q_norm", "np.mean(x * x, axis=-1, keepdims=True)", "np.sum(x * x, axis=-1, keepdims=True)"),
    Bug("norm_n_minus_1", "norm", "RMSNorm divided by n − 1 (RMSNorm)", "q_norm", "np.mean(x * x, axis=-1, keepdims=True)", "np.sum(x * x, axis=-1, keepdims=True) / (x.shape[-1] - 1)"),
    Bug("layer_norm", "norm", "LayerNorm in place of RMSNorm (RMSNorm)", "q_norm", "return w_H * (x * inverse_rms(x, eps))", "x = x - np.mean(x, axis=-1, keepdims=True)\n    return w_H * (x * inverse_rms(x, eps))"),
    Bug("v_normalised", "norm", "V normalised like K (RMSNorm)", "v_proj", 'project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0))', 'rms_norm(project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0)), weights["k_norm.weight"], eps)'),
    Bug("norm_skipped", "norm", "Q not normalised (RMSNorm)", "q_norm", 'rms_norm(q_BTNH, weights["q_norm.weight"], eps)', "q_BTNH"),

    # ------------------------------------------------------------------------------------------------------------ RoPE
    Bug("rope_left_out", "rope", "RoPE left out (RoPE)", "q_rope", _ROPE, "return x"),
    Bug("rope_left_out_for_k", "rope", "RoPE applied to Q only (RoPE)", "k_rope", "rope(kn_BSKH, cos_BTH, sin_BTH)", "kn_BSKH", ALL),
    Bug("rope_negative_sine", "rope", "RoPE turning backwards (RoPE)", "q_rope", "+ rotate_half(x) * sin", "- rotate_half(x) * sin", ALL),
    Bug("rope_k_negative_sine", "rope", "RoPE turning K backwards (RoPE)", "k_rope", "rope(kn_BSKH, cos_BTH, sin_BTH)", "rope(kn_BSKH, cos_BTH, -sin_BTH)"),
    Bug("rope_cos_sin_exchanged", "rope", "RoPE with cos and sin exchanged (RoPE)", "q_rope", _TABLES, _TABLES.replace('["cos"], inputs["sin"]', '["sin"], inputs["cos"]')),
    Bug("rope_interleaved", "rope", "RoPE over interleaved pairs (RoPE)", "q_rope", _HALVES, "return np.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)"),
    Bug("rope_theta_default", "rope", "RoPE with theta 10,000 in place of the model's (RoPE)", "q_rope", _TABLES, _TABLES + '\n    H = config.head_dim\n    angles = np.arange(x_BTD.shape[1])[None, :, None] * np.tile(1e4 ** -(np.arange(0, H, 2) / H), 2)\n    cos_BTH, sin_BTH = np.cos(angles).astype(x_BTD.dtype), np.sin(angles).astype(x_BTD.dtype)'),
    Bug("rope_along_heads", "rope", "RoPE along the head axis (RoPE)", "q_rope", _ROPE, "along = np.arange(x.shape[2]) % x.shape[1]\n    return x * cos_BTH[:, None, along] + rotate_half(x) * sin_BTH[:, None, along]"),
    Bug("rope_half_of_head", "rope", "RoPE on the first half of each head (RoPE)", "q_rope", _ROPE, _ROPE.replace("return ", "turned = ") + "\n    return np.concatenate([turned[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]], axis=-1)"),
    Bug("rope_q_one_position_off", "rope", "the queries' positions off by one (RoPE)", "q_rope", "rope(qn_BTNH, cos_BTH, sin_BTH)", "rope(qn_BTNH, np.roll(cos_BTH, 1, axis=1), np.roll(sin_BTH, 1, axis=1))"),
    Bug("rope_on_v", "rope", "RoPE applied to V as well (RoPE)", "v_proj", 'project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0))', 'rope(project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0)), cos_BTH, sin_BTH)'),
    Bug("rope_twice_on_q", "rope", "RoPE applied to Q twice (RoPE)", "q_rope", "rope(qn_BTNH, cos_BTH, sin_BTH)", "rope(rope(qn_BTNH, cos_BTH, sin_BTH), cos_BTH, sin_BTH)"),

    # ------------------------------------------------------------------------------------------- scale, 3.3, 3.4, 3.5
    Bug("scale_left_out", "scale", "scores not divided by √d_k (eq. 3.5)", "scores", "(q_BNTH @ k_BNHS) * q_BTNH.shape[-1] ** -0.5", "q_BNTH @ k_BNHS"),
    Bug("scale_d", "scale", "scores divided by d_k instead of √d_k (eq. 3.5)", "scores", "(q_BNTH @ k_BNHS) * q_BTNH.shape[-1] ** -0.5", "(q_BNTH @ k_BNHS) / q_BTNH.shape[-1]"),
    Bug("scale_three_digits", "scale", "1/√d_k rounded to three digits (eq. 3.5)", "scores", "(q_BNTH @ k_BNHS) * q_BTNH.shape[-1] ** -0.5", '(q_BNTH @ k_BNHS) * float(f"{q_BTNH.shape[-1] ** -0.5:.3g}")'),
    Bug("scale_twice", "scale", "scores divided by √d_k twice (eq. 3.10)", "masked_scores", 'observe("masked_scores", s_BNTS + mask_TS)', 'observe("masked_scores", s_BNTS * qr_BTNH.shape[-1] ** -0.5 + mask_TS)'),
    Bug("scale_on_one_side", "scale", "only one of Q and K divided by d_k^(1/4) (eq. 3.5)", "scores", "(q_BNTH @ k_BNHS) * q_BTNH.shape[-1] ** -0.5", "(q_BNTH @ k_BNHS) * q_BTNH.shape[-1] ** -0.25"),
    Bug("scale_sqrt_64", "scale", "d_k taken as half of what it is, as where hidden size / heads is 64 and not 128 (eq. 3.5)", "scores", "(q_BNTH @ k_BNHS) * q_BTNH.shape[-1] ** -0.5", "(q_BNTH @ k_BNHS) * (q_BTNH.shape[-1] / 2) ** -0.5"),

    # ------------------------------------------------------------------------------------------------------ mask, 3.10
    Bug("mask_left_out", "mask", "no mask (eq. 3.10)", "masked_scores", _MASK, "np.zeros((T, S))"),
    Bug("mask_off_by_one", "mask", "a mask whose diagonal is off by one: each query sees one future key (eq. 3.10)", "masked_scores", ".tri(T, S, dtype=bool)", ".tri(T, S, 1, dtype=bool)", ("numpy", "jax")),
    Bug("mask_without_diagonal", "mask", "a mask that hides each token from itself (eq. 3.10)", "masked_scores", ".tri(T, S, dtype=bool)", ".tri(T, S, -1, dtype=bool)"),
    Bug("mask_inverted", "mask", "the mask inverted (eq. 3.10)", "masked_scores", _MASK, "np.where(np.tri(T, S, dtype=bool), -np.inf, 0)"),
    Bug("mask_transposed", "mask", "the mask transposed: the future seen and the past hidden (eq. 3.10)", "masked_scores", _MASK, "np.where(np.tri(T, S, dtype=bool).T, 0, -np.inf)"),
    Bug("mask_of_ones_added", "mask", "a mask of ones and zeros added to the scores (eq. 3.10)", "masked_scores", _MASK, "np.tri(T, S)"),
    Bug("mask_zero_times_infinity", "mask", "a mask of 0 · ∞ = NaN (eq. 3.10)", "masked_scores", _MASK, "((1 - np.tri(T, S)) * -np.inf)"),
    Bug("mask_scores_set_to_zero", "mask", "masked scores set to 0 instead of −∞ (eq. 3.10)", "masked_scores", "s_BNTS + mask_TS", "np.tril(s_BNTS)"),
    Bug("mask_after_softmax", "mask", "the mask applied after the softmax (eq. 3.6)", "masked_scores", _MASK_LINES, _MASK_AFTER_SOFTMAX),
    Bug("mask_one_head_unmasked", "mask", "one head left unmasked (eq. 3.10)", "masked_scores", "s_BNTS + mask_TS", "np.concatenate([(s_BNTS + mask_TS)[:, :-1], s_BNTS[:, -1:]], axis=1)"),
    Bug("mask_sliding_window", "mask", "a sliding window of half the sequence (eq. 3.10)", "masked_scores", _MASK, "np.where(np.tri(T, S, dtype=bool) & ~np.tri(T, S, -((T + 1) // 2), dtype=bool), 0, -np.inf)"),
    Bug("mask_minus_30", "mask", "a mask of −30 (eq. 3.10)", "masked_scores", "0, -np.inf)", "0, -30.0)"),
    Bug("mask_too_weak", "mask", "a mask of −10 (eq. 3.10)", "masked_scores", "0, -np.inf)", "0, -10.0)"),

    # ---------------------------------------------------------------------------------------------------- softmax, 3.6
    Bug("softmax_without_max", "softmax", "a softmax that does not take the maximum off (eq. 3.6)", "probs", "np.exp(z_BNTS - z_BNTS.max(axis=-1, keepdims=True))", "np.exp(z_BNTS)"),
    Bug("softmax_plus_1e-6", "softmax", "1e-6 added to the softmax's denominator (eq. 3.6)", "probs", "e_BNTS.sum(axis=-1, keepdims=True)", "(e_BNTS.sum(axis=-1, keepdims=True) + 1e-6)"),
    Bug("softmax_plus_one", "softmax", "1 added to the softmax's denominator (eq. 3.6)", "probs", "e_BNTS.sum(axis=-1, keepdims=True)", "(e_BNTS.sum(axis=-1, keepdims=True) + 1)"),
    Bug("softmax_base_2", "softmax", "a softmax with 2 in place of e (eq. 3.6)", "probs", "np.exp(z_BNTS", "np.exp2(z_BNTS"),
    Bug("softmax_over_heads", "softmax", "a softmax over the heads (eq. 3.6)", "probs", _SOFTMAX, _SOFTMAX.replace("axis=-1", "axis=1")),
    Bug("softmax_not_normalised", "softmax", "a softmax without its denominator (eq. 3.6)", "probs", "return e_BNTS / e_BNTS.sum(axis=-1, keepdims=True)", "return e_BNTS"),
    Bug("scores_soft_capped", "softmax", "scores capped by 50 tanh(s / 50), as Gemma 2 does (eq. 3.5)", "scores", 'observe("scores", scores(qr_BTNH, share(kr_BSKH, G)))', 'observe("scores", 50 * np.tanh(scores(qr_BTNH, share(kr_BSKH, G)) / 50))'),
    Bug("softmax_over_queries", "softmax", "a softmax over the query axis (eq. 3.6)", "probs", _SOFTMAX, _SOFTMAX.replace("axis=-1", "axis=-2")),

    # ------------------------------------------------------------------------------------------------------- positions
    Bug("last_key_stale", "positions", "the last key replaced by the one before, as from a stale cache (eq. 3.2)", "k_rope", "rope(kn_BSKH, cos_BTH, sin_BTH)", "last_repeated(rope(kn_BSKH, cos_BTH, sin_BTH))"),
    Bug("last_value_stale", "positions", "the last value replaced by the one before, as from a stale cache (eq. 3.2)", "v_proj", 'project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0))', 'last_repeated(project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0)))'),
    Bug("last_position_repeated_in_one_head", "positions", "one head's last position replaced by the one before (eq. 3.11)", "heads", _MIX, _MIX.replace("return ", "o_BTNH = ") + "\n    o_BTNH[:, :, 0] = last_repeated(o_BTNH[:, :, 0])\n    return o_BTNH"),
    Bug("output_shifted", "positions", "the output shifted by one position (eq. 3.12)", "output", 'observe("output", merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0)))', 'observe("output", np.roll(merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0)), 1, axis=1))'),
    Bug("last_position_repeated", "positions", "the last position's output replaced by the one before (eq. 3.12)", "output", 'observe("output", merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0)))', 'observe("output", last_repeated(merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0))))'),

    # ------------------------------------------------------------------- precision: bf16, fp16 and tf32 round and return
    Bug("projections_tf32", "precision", "projections in TF32 (eq. 3.1)", "q_proj", "(x_BTD @ w_ND.T", "(tf32(x_BTD) @ tf32(w_ND).T"),
    Bug("scores_tf32", "precision", "Q K^T in TF32 (eq. 3.5)", "scores", "(q_BNTH @ k_BNHS)", "(tf32(q_BNTH) @ tf32(k_BNHS))"),
    Bug("values_tf32", "precision", "A V in TF32 (eq. 3.11)", "heads", "(a_BNTS @ v_BSNH.transpose(0, 2, 1, 3))", "(tf32(a_BNTS) @ tf32(v_BSNH).transpose(0, 2, 1, 3))"),
    Bug("output_tf32", "precision", "the output's projection in TF32 (eq. 3.12)", "output", "o_BTNH.reshape(B, T, N * H) @ w_DN.T", "tf32(o_BTNH).reshape(B, T, N * H) @ tf32(w_DN).T"),
    Bug("k_weights_float16", "precision", "W_K held in float16 (eq. 3.1)", "k_proj", 'project(x_BTD, weights["k_proj.weight"], K, weights.get("k_proj.bias", 0))', 'project(x_BTD, fp16(weights["k_proj.weight"]), K, weights.get("k_proj.bias", 0))'),
    Bug("norm_bfloat16", "precision", "Q and K normalised in bfloat16 (RMSNorm)", "q_norm", "return w_H * (x * inverse_rms(x, eps))", "return bf16(w_H * (x * inverse_rms(x, eps)))"),
    Bug("rope_tables_bfloat16", "precision", "RoPE tables held in bfloat16 (RoPE)", "q_rope", _TABLES, _TABLES.replace('inputs["cos"], inputs["sin"]', 'bf16(inputs["cos"]), bf16(inputs["sin"])')),
    Bug("scores_bfloat16", "precision", "scores held in bfloat16 (eq. 3.5)", "scores", 'observe("scores", scores(qr_BTNH, share(kr_BSKH, G)))', 'observe("scores", bf16(scores(qr_BTNH, share(kr_BSKH, G))))'),
    Bug("scores_float16", "precision", "scores held in float16 (eq. 3.5)", "scores", 'observe("scores", scores(qr_BTNH, share(kr_BSKH, G)))', 'observe("scores", fp16(scores(qr_BTNH, share(kr_BSKH, G))))'),
    Bug("probs_bfloat16", "precision", "probabilities held in bfloat16 (eq. 3.6)", "probs", 'observe("probs", softmax(m_BNTS))', 'observe("probs", bf16(softmax(m_BNTS)))'),
    Bug("values_bfloat16", "precision", "values held in bfloat16, as in a cache (eq. 3.1)", "v_proj", 'project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0))', 'bf16(project(x_BTD, weights["v_proj.weight"], K, weights.get("v_proj.bias", 0)))'),
    Bug("output_bfloat16", "precision", "the output rounded to bfloat16 (eq. 3.12)", "output", 'observe("output", merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0)))', 'observe("output", bf16(merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0))))'),
    Bug("gradient_bfloat16", "precision", "the gradient rounded to bfloat16 (eq. 3.12)", "d_heads", "(d_y_BTD @ w_DN)", "bf16(d_y_BTD @ w_DN)"),
    Bug("input_bfloat16", "precision", "hidden states rounded to bfloat16 (eq. 3.1)", "q_proj", "(x_BTD @ w_ND.T", "(bf16(x_BTD) @ w_ND.T"),

    # -------------------------------------------------------------------------- dtype: not what the run has declared
    Bug("float64_scale", "dtype", "scores in float64 by a NumPy scalar, whatever was asked for (eq. 3.5)", "scores", "(q_BNTH @ k_BNHS) * q_BTNH.shape[-1] ** -0.5", "(q_BNTH @ k_BNHS) * np.float64(q_BTNH.shape[-1]) ** -0.5"),
    Bug("softmax_float32", "dtype", "a softmax in float32, whatever was asked for (eq. 3.6)", "probs", 'observe("probs", softmax(m_BNTS))', 'observe("probs", softmax(m_BNTS.astype(np.float32)).astype(m_BNTS.dtype))'),
    Bug("norm_float32", "dtype", "an RMSNorm in float32, whatever was asked for (RMSNorm)", "q_norm", "np.mean(x * x, axis=-1, keepdims=True)", "np.mean(np.float32(x) * np.float32(x), axis=-1, keepdims=True)"),

    # -------------------------------------------------------------------------------------------------------- backward
    Bug("d_heads_split_without_swap", "backward", "d_heads reshaped where a transposition was needed (eq. 3.12, backward)", "d_heads", "(d_y_BTD @ w_DN).reshape(B, T, heads, -1)", "(d_y_BTD @ w_DN).reshape(B, heads, T, -1).swapaxes(1, 2)"),
    Bug("jacobian_without_rank_one_term", "backward", "the softmax's Jacobian without its rank-one term (eq. 3.9)", "d_masked_scores", _JACOBIAN, "a * d_a"),
    Bug("jacobian_diagonal_only", "backward", "only the diagonal of the softmax's Jacobian (eq. 3.9)", "d_masked_scores", _JACOBIAN, "a * (1 - a) * d_a"),
    Bug("jacobian_over_queries", "backward", "the softmax's Jacobian summed over the query axis (eq. 3.9)", "d_masked_scores", _JACOBIAN, "a * (d_a - np.sum(a * d_a, axis=-2, keepdims=True))"),
    Bug("jacobian_left_out", "backward", "no softmax in the backward (eq. 3.9)", "d_masked_scores", _JACOBIAN, "d_a"),
    Bug("scale_backward_left_out", "backward", "√d_k left out of the backward (eq. 3.5, backward)", ("d_q_rope", "d_k_rope"), "scale = q_BTNH.shape[-1] ** -0.5", "scale = 1"),
    Bug("scale_backward_in_scores", "backward", "the gradient divided by √d_k twice (eq. 3.5, backward)", "d_scores", 'observe("d_scores", d_m)', 'observe("d_scores", d_m * x.shape[-1] ** -0.5)'),
    Bug("d_k_not_transposed", "backward", "d_K computed with dS where its transpose was needed (eq. 3.5, backward)", "d_k_rope", "d_s_BNTS.transpose(0, 1, 3, 2) @ q", "d_s_BNTS @ q"),
    Bug("d_v_not_transposed", "backward", "d_V computed with A where its transpose was needed (eq. 3.11, backward)", "d_v_proj", "a_BNTS.transpose(0, 1, 3, 2) @ d_o", "a_BNTS @ d_o"),
    Bug("k_detached", "backward", "no gradient passed to K (eq. 3.5, backward)", "d_k_rope", 'observe("d_k_rope", share_backward(d_kr, G))', 'observe("d_k_rope", 0 * share_backward(d_kr, G))'),
    Bug("group_gradient_not_summed", "backward", "grouped-query gradients of one head instead of the group's sum (eq. 3.11, backward)", "d_v_proj", ".sum(axis=3)", "[:, :, :, 0]"),
    Bug("group_gradient_averaged", "backward", "grouped-query gradients averaged instead of summed (eq. 3.11, backward)", "d_v_proj", ".sum(axis=3)", ".mean(axis=3)"),
    Bug("group_gradient_tiled", "backward", "grouped-query gradients summed as if heads were tiled (eq. 3.11, backward)", "d_v_proj", "reshape(B, S, N // G, G, H).sum(axis=3)", "reshape(B, S, G, N // G, H).sum(axis=2)"),
    Bug("rope_backward_not_transposed", "backward", "RoPE's backward turning forwards (RoPE, backward)", ("d_q_norm", "d_k_norm"), "- rotate_half(d * sin", "+ rotate_half(d * sin"),
    Bug("rope_backward_left_out", "backward", "RoPE left out of the backward (RoPE, backward)", ("d_q_norm", "d_k_norm"), "return d * cos_BTH[:, :, None] - rotate_half(d * sin_BTH[:, :, None])", "return d"),
    Bug("norm_backward_without_mean", "backward", "RMSNorm's backward without its mean term (RMSNorm, backward)", ("d_q_proj", "d_k_proj"), "r * (g - x_hat * np.mean(g * x_hat, axis=-1, keepdims=True))", "r * g"),
    Bug("norm_backward_sum_for_mean", "backward", "RMSNorm's backward with the sum for the mean (RMSNorm, backward)", ("d_q_proj", "d_k_proj"), "np.mean(g * x_hat, axis=-1, keepdims=True)", "np.sum(g * x_hat, axis=-1, keepdims=True)"),
    Bug("norm_backward_without_weight", "backward", "RMSNorm's backward without its weight (RMSNorm, backward)", ("d_q_proj", "d_k_proj"), "x * r, w_H * d_y", "x * r, d_y"),
    Bug("norm_backward_without_eps", "backward", "RMSNorm's backward without eps (RMSNorm, backward)", ("d_q_proj", "d_k_proj"), "    r = inverse_rms(x, eps)", "    r = inverse_rms(x, 0.0)"),
    Bug("d_x_without_k", "backward", "the hidden states' gradient without K's part (eq. 3.1, backward)", "d_hidden_states", ' + project_backward(d_k, weights["k_proj.weight"])', ""),
    Bug("d_x_v_twice", "backward", "the hidden states' gradient with V's part twice (eq. 3.1, backward)", "d_hidden_states", 'project_backward(d_v, weights["v_proj.weight"])', '2 * project_backward(d_v, weights["v_proj.weight"])'),
    Bug("weight_gradients_averaged", "backward", "weight gradients averaged over tokens instead of summed (eq. 3.1, backward)", "d_q_proj.weight", "return d_y.reshape(B * T, -1).T @ x.reshape(B * T, -1)", "return d_y.reshape(B * T, -1).T @ x.reshape(B * T, -1) / (B * T)"),
    Bug("weight_gradients_of_last_token", "backward", "weight gradients of the last token alone (eq. 3.1, backward)", "d_q_proj.weight", "return d_y.reshape(B * T, -1).T @ x.reshape(B * T, -1)", "return d_y.reshape(B * T, -1)[-1:].T @ x.reshape(B * T, -1)[-1:]"),
    Bug("weight_gradients_not_transposed", "backward", "weight gradients written without their transposition (eq. 3.1, backward)", "d_q_proj.weight", "return d_y.reshape(B * T, -1).T @ x.reshape(B * T, -1)", "return (x.reshape(B * T, -1).T @ d_y.reshape(B * T, -1)).reshape(-1, x[0, 0].size)"),
    Bug("q_weight_gradient_before_norm", "backward", "W_Q's gradient taken behind the norm (RMSNorm, backward)", "d_q_proj.weight", "weight_gradient(d_q, x)", "weight_gradient(d_qn, x)"),
    Bug("norm_weight_gradient_of_one_head", "backward", "the norms' weight gradients of one head instead of all (RMSNorm, backward)", ("d_q_norm.weight", "d_k_norm.weight"), "np.sum(d_y * (x * inverse_rms(x, eps)), axis=(0, 1, 2))", "np.sum(d_y * (x * inverse_rms(x, eps)), axis=(0, 1))[0]"),
    Bug("norm_weight_gradient_not_normalised", "backward", "the norms' weight gradients without the normalisation (RMSNorm, backward)", ("d_q_norm.weight", "d_k_norm.weight"), "np.sum(d_y * (x * inverse_rms(x, eps)), axis=(0, 1, 2))", "np.sum(d_y * x, axis=(0, 1, 2))"),
    Bug("o_weight_gradient_reversed", "backward", "W_O's gradient with the heads in reverse order (eq. 3.12, backward)", "d_o_proj.weight", "weight_gradient(d_y_BTD, o)", "weight_gradient(d_y_BTD, np.ascontiguousarray(o[:, :, ::-1]))"),

    # --------------------------------------------------------------------------------------------------- what runs them
    Bug("inputs_stale", "runner", "the inputs of an earlier run", "q_proj", _TABLES, _TABLES.replace("= inputs", '= forward.__dict__.setdefault(inputs["cos"].dtype.name, (inputs').replace('"sin"]', '"sin"]))')),
    Bug("output_stale", "runner", "the output of an earlier run", "output", 'observe("output", merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0)))', 'observe("output", forward.__dict__.setdefault(x_BTD.dtype.name, merge(o_BTNH, weights["o_proj.weight"], weights.get("o_proj.bias", 0))))'),
    Bug("gradients_stale", "runner", "the gradients of an earlier run", "d_probs", '    weights, eps, G = cache["weights"]', '    cache = backward.__dict__.setdefault(d_y_BTD.dtype.name, cache)\n    weights, eps, G = cache["weights"]'),
    Bug("scores_recorded_from_earlier_run", "runner", "scores recorded from an earlier run", "scores", 's_BNTS = observe("scores", scores(qr_BTNH, share(kr_BSKH, G)))', 's_BNTS = scores(qr_BTNH, share(kr_BSKH, G))\n    observe("scores", forward.__dict__.setdefault(x_BTD.dtype.name, s_BNTS))'),
    Bug("probs_recorded_before_mask", "runner", "probabilities recorded before the mask", "probs", 'a_BNTS = observe("probs", softmax(m_BNTS))', 'a_BNTS = softmax(m_BNTS)\n    observe("probs", softmax(s_BNTS))'),
    Bug("cotangent_of_ones", "runner", "the gradient of the output's sum: a cotangent of ones", "d_heads", 'observe("d_heads", merge_backward(d_y_BTD', 'observe("d_heads", merge_backward(np.ones_like(d_y_BTD)'),
    Bug("gradient_of_another_weight", "runner", "V's weight gradient returned for K's", "d_k_proj.weight", "weight_gradient(d_k, x)", "weight_gradient(d_v, x)"),
    Bug("norm_gradients_exchanged", "runner", "K's norm's weight gradient returned for Q's", "d_q_norm.weight", "norm_weight_gradient(d_qn, q, eps)", "norm_weight_gradient(d_kn, k, eps)"),
    Bug("gradient_of_last_position_repeated", "runner", "the last position's gradient replaced by the one before", "d_hidden_states", 'observe("d_hidden_states", d_x)', 'observe("d_hidden_states", last_repeated(d_x))'),
    Bug("gradient_of_zeros", "runner", "a gradient of zeros", "d_hidden_states", 'observe("d_hidden_states", d_x)', 'observe("d_hidden_states", 0 * d_x)'),
)


def _port(framework: str, name: str, old: str, new: str) -> Bug:
    """A bug of the NumPy page in a framework whose source spells it otherwise."""
    (bug,) = (bug for bug in BUGS if bug.name == name)
    return bug._replace(old=old, new=new, frameworks=(framework,))


def _spread(framework: str, name: str, says: str, stage: str, old: str, new: str) -> Bug:
    """A bug of a layer that is spread over devices."""
    return Bug(name, "devices", says, stage, old, new, (framework,))


def _of_first(axis: str, what: str) -> str:
    """Source that lets a gradient through on the first device of an axis alone."""
    first = f'jax.lax.axis_index("{axis}") == 0'
    return f"\n        {what} = jnp.where({first}, {what}, jax.lax.stop_gradient({what}))"


_PSUM = 'jax.lax.psum(value, "heads")'
_SUPER = "return super().__call__(x_BTD, cos_BTH, sin_BTH, mask_B1TS, summed)"
_KEYS = 'jax.lax.all_gather(kr_BTKH, "sequence", axis=1, tiled=True)'
_VALUES = 'jax.lax.all_gather(v_BTKH, "sequence", axis=1, tiled=True)'
_X = 'jax.lax.pcast(x_BTD, "heads", to="varying")'
_B_O = "b_D, self.o_bias = self.o_bias, None"
_REDUCED = "value.redistribute(placements=[Replicate()])"

BUGS += (
    # ------------------------------------------------------------------------------------------------------------- JAX
    _port("jax", "kernels_not_transposed", "weights[name].T for", "weights[name].reshape(weights[name].shape[::-1]) for"),
    _port("jax", "v_projected_with_k", "self.v_proj[...]", "self.k_proj[...]"),
    _port("jax", "v_bias_left_out", "self.v_proj[...], K, self.v_bias", "self.v_proj[...], K"),
    _port("jax", "kv_heads_tiled", "jnp.repeat(x_BSKH, G, axis=2)", "jnp.tile(x_BSKH, (1, 1, G, 1))"),
    _port("jax", "two_heads_exchanged", "o_BTNH.reshape(B, T, N * H)", "o_BTNH[:, :, jnp.array([*range(N)[1::-1], *range(2, N)])].reshape(B, T, N * H)"),
    _port("jax", "q_normalised_with_k", "self.q_norm[...], eps", "self.k_norm[...], eps"),
    _port("jax", "norm_one_plus_weight", "(at_least_float32(w_H) * x_hat)", "((1 + at_least_float32(w_H)) * x_hat)"),
    _port("jax", "eps_1e-5", "self.config.num_key_value_heads, self.config.rms_norm_eps", "self.config.num_key_value_heads, 1e-5"),
    _port("jax", "rope_interleaved", "x1, x2 = jnp.split(x, 2, axis=-1)\n    return jnp.concatenate([-x2, x1], axis=-1)", "return jnp.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)"),
    _port("jax", "mask_too_weak", "0, -jnp.inf)", "0, -10.0)"),
    _port("jax", "softmax_over_queries", "x_BNTS.max(axis=-1, keepdims=True)))\n    return (e_BNTS / e_BNTS.sum(axis=-1, keepdims=True))", "x_BNTS.max(axis=-2, keepdims=True)))\n    return (e_BNTS / e_BNTS.sum(axis=-2, keepdims=True))"),
    _port("jax", "softmax_without_max", "jnp.exp(x_BNTS - jax.lax.stop_gradient(x_BNTS.max(axis=-1, keepdims=True)))", "jnp.exp(x_BNTS)"),
    _port("jax", "scores_bfloat16", 'observe("scores", scores(qr_BTNH, share(kr_BSKH, G)))', 'observe("scores", scores(qr_BTNH, share(kr_BSKH, G)).astype(jnp.bfloat16).astype(qr_BTNH.dtype))'),
    _port("jax", "jacobian_without_rank_one_term", "/ e_BNTS.sum(axis=-1, keepdims=True)", "/ jax.lax.stop_gradient(e_BNTS.sum(axis=-1, keepdims=True))"),
    _port("jax", "norm_backward_without_mean", "jnp.mean(jnp.square(z), axis=-1, keepdims=True)", "jax.lax.stop_gradient(jnp.mean(jnp.square(z), axis=-1, keepdims=True))"),
    _port("jax", "inputs_stale", 'inputs["hidden_states"], inputs["cos"], inputs["sin"]', 'run.__dict__.setdefault(d_output.dtype.name, (inputs["hidden_states"], inputs["cos"], inputs["sin"]))'),
    _port("jax", "cotangent_of_ones", "backward(d_output)", "backward(jnp.ones_like(d_output))"),

    # --------------------------------------------------------------------------------------------------------- PyTorch
    _port("torch", "v_projected_with_k", "self.v_proj.weight", "self.k_proj.weight + 0 * self.v_proj.weight"),
    _port("torch", "heads_split_without_swap", ".unflatten(-1, (heads, -1))", ".reshape(x_BTD.shape[0], heads, x_BTD.shape[1], -1).transpose(1, 2)"),
    _port("torch", "o_bias_left_out", "merge(o_BTNH, self.o_proj.weight, self.o_proj.bias)", "merge(o_BTNH, self.o_proj.weight, 0 * self.o_proj.bias)"),
    _port("torch", "kv_heads_tiled", "x_BSKH.repeat_interleave(G, dim=2)", "x_BSKH.repeat(1, 1, G, 1)"),
    _port("torch", "q_normalised_with_k", "self.q_norm.weight, eps", "self.k_norm.weight + 0 * self.q_norm.weight, eps"),
    _port("torch", "norm_one_plus_weight", "return w_H * (z", "return (1 + w_H) * (z"),
    _port("torch", "norm_over_projection", "mean(dim=-1, keepdim=True)", "mean(dim=(-2, -1), keepdim=True)"),
    _port("torch", "scale_left_out", "torch.matmul(q_BNTH, k_BNHS) * q_BTNH.shape[-1] ** -0.5", "torch.matmul(q_BNTH, k_BNHS)"),
    _port("torch", "mask_off_by_one", "triu(diagonal=1)", "triu(diagonal=2)"),
    _port("torch", "softmax_plus_1e-6", "e_BNTS.sum(dim=-1, keepdim=True)", "(e_BNTS.sum(dim=-1, keepdim=True) + 1e-6)"),
    _port("torch", "last_position_repeated", 'observe("output", merge(o_BTNH, self.o_proj.weight, self.o_proj.bias))', 'observe("output", merge(o_BTNH[:, [*range(o_BTNH.shape[1] - 1), max(o_BTNH.shape[1] - 2, 0)]], self.o_proj.weight, self.o_proj.bias))'),
    _port("torch", "probs_bfloat16", 'observe("probs", softmax(m_BNTS))', 'observe("probs", softmax(m_BNTS).bfloat16().to(m_BNTS.dtype))'),
    _port("torch", "jacobian_without_rank_one_term", "/ e_BNTS.sum(dim=-1, keepdim=True)", "/ e_BNTS.sum(dim=-1, keepdim=True).detach()"),
    _port("torch", "k_detached", "scores(qr_BTNH, share(kr_BSKH, G))", "scores(qr_BTNH, share(kr_BSKH.detach() + 0 * kr_BSKH, G))"),
    _port("torch", "inputs_stale", '(tensor(inputs[name], device) for name in ("hidden_states", "cos", "sin"))', 'run.__dict__.setdefault(d_output.dtype.name, [tensor(inputs[name], device) for name in ("hidden_states", "cos", "sin")])'),
    _port("torch", "cotangent_of_ones", "torch.sum(y_BTD * d_output)", "torch.sum(y_BTD)"),

    # --------------------------------------------------------------------- a layer spread over devices (harness/mesh.py)
    _spread("jax-mesh", "heads_on_wrong_device", "W_Q's heads each on its neighbour's device (eq. 3.1)", "q_proj", "put(weights[name], key)", 'put(np.roll(weights[name], (name == "q_proj.weight") * (len(weights[name]) // mesh.shape["heads"]), axis=0), key)'),
    _spread("jax-mesh", "o_rows_on_wrong_device", "W_O's rows each on its neighbour's device (eq. 3.12)", "output", "put(weights[name], key)", 'put(np.roll(weights[name], (name == "o_proj.weight") * (weights[name].shape[-1] // mesh.shape["heads"]), axis=-1), key)'),
    _spread("jax-mesh", "all_reduce_missing", "the output of the first device's heads alone, without the all-reduce (eq. 3.12)", "output", _PSUM, 'jax.lax.psum(jnp.where(jax.lax.axis_index("heads") == 0, value, 0), "heads")'),
    _spread("jax-mesh", "all_reduce_twice", "the output added up over the devices twice (eq. 3.12)", "output", _PSUM, f'jax.lax.psum(jax.lax.pcast({_PSUM}, "heads", to="varying"), "heads")'),
    _spread("jax-mesh", "all_reduce_averages", "the devices' parts of the output averaged instead of summed (eq. 3.12)", "output", _PSUM, 'jax.lax.pmean(value, "heads")'),
    _spread("jax-mesh", "mask_without_offset", "the mask of the first tokens on every device (eq. 3.10)", "masked_scores", 'jax.lax.axis_index("sequence") * qr_BTNH.shape[1]', "jnp.int32(0)"),
    _spread("jax-mesh", "rope_without_offset", "RoPE's tables of the first tokens on every device (RoPE)", "q_rope", _SUPER, f'cos_BTH, sin_BTH = (jax.lax.all_gather(t, "sequence", axis=1, tiled=True)[:, : x_BTD.shape[1]] for t in (cos_BTH, sin_BTH))\n        {_SUPER}'),
    _spread("jax-mesh", "keys_gathered_one_device_off", "the keys of all devices gathered one device off (eq. 3.5)", "scores", _KEYS, f"jnp.roll({_KEYS}, kr_BTKH.shape[1], axis=1)"),
    _spread("jax-mesh", "values_gathered_one_device_off", "the values of all devices gathered one device off (eq. 3.11)", "heads", _VALUES, f"jnp.roll({_VALUES}, v_BTKH.shape[1], axis=1)"),
    _spread("jax-mesh", "weight_gradient_of_first_tokens", "W_Q's gradient of the first device's tokens alone, without the all-reduce (eq. 3.1, backward)", "d_q_proj.weight", _B_O, _B_O + _of_first("sequence", "self.q_proj[...]")),
    _spread("jax-mesh", "norm_gradient_of_first_heads", "the gradient of K's norm of the first device's heads alone, without the all-reduce (RMSNorm, backward)", "d_k_norm.weight", _B_O, _B_O + _of_first("heads", "self.k_norm[...]")),
    _spread("jax-mesh", "hidden_gradient_of_first_heads", "the hidden states' gradient of the first device's heads alone, without the all-reduce (eq. 3.1, backward)", "d_hidden_states", _X, f'jnp.where(jax.lax.axis_index("heads") == 0, {_X}, jax.lax.stop_gradient({_X}))'),
    Bug("o_bias_on_every_device", "biases", "b_O added on every device, before the all-reduce (eq. 3.12)", "output", f"plus({_PSUM}, b_D)", 'jax.lax.psum(plus(value, b_D), "heads")', ("jax-mesh",)),
    _spread("torch-mesh", "heads_on_wrong_device", "W_Q's heads each on its neighbour's device (eq. 3.1)", "q_proj", "distribute_tensor(value, mesh,", 'distribute_tensor(value.detach().roll((self.name == "q_proj") * (len(value) // mesh.size()), 0), mesh,'),
    _spread("torch-mesh", "all_reduce_missing", "the output of the first device's heads alone, without the all-reduce (eq. 3.12)", "output", _REDUCED, "DTensor.from_local(value.to_local(), value.device_mesh, [Replicate()])"),
    _spread("torch-mesh", "reduced_to_first_device", "the output added up on the first device alone, not on all (eq. 3.12)", "output", _REDUCED, f"(lambda whole: DTensor.from_local(whole if value.device_mesh.get_rank() == 0 else value.to_local(), value.device_mesh, [Replicate()]))({_REDUCED}.to_local())"),
    _spread("torch-mesh", "all_reduce_twice", "the output added up over the devices twice (eq. 3.12)", "output", _REDUCED, f"DTensor.from_local({_REDUCED}.to_local(), value.device_mesh, value.placements).redistribute(placements=[Replicate()])"),
)
# fmt: on


def names(framework: str) -> list[str]:
    """The bugs that can be planted in a framework's implementation."""
    return [bug.name for bug in BUGS if framework in bug.frameworks]


def find(framework: str, name: str) -> Bug:
    """The bug of this name as that framework spells it."""
    (bug,) = (bug for bug in BUGS if bug.name == name and framework in bug.frameworks)
    return bug


# ------------------------------------------------------------------------------------------------------------ planting


def bf16(x: Array) -> Array:
    """Rounded to bfloat16, in the dtype it came in."""
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


def fp16(x: Array) -> Array:
    """Rounded to float16, in the dtype it came in."""
    return x.astype(np.float16).astype(x.dtype)


def tf32(x: Array) -> Array:
    """Rounded to the 11 significant bits of TF32, in the dtype it came in."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 2**11), exponent - 11).astype(x.dtype)


def last_repeated(x: Array) -> Array:
    """[B, T, …] with the last position replaced by the one before."""
    return x[:, [*range(x.shape[1] - 1), max(x.shape[1] - 2, 0)]]


HELPERS = {function.__name__: function for function in (bf16, fp16, tf32, last_repeated)}
"""What an edit may call besides what its module has."""


def plant(framework: str, name: str) -> None:
    """Run an implementation's module anew, in place, with the bug in its source. For this process, without return.

    Everything is made anew, so that nothing that JAX compiled before remains.
    """
    module = importlib.import_module(f"impls.{path(framework).stem}")
    source, bug = _source(framework), find(framework, name)
    _only_place(source, bug)
    module.__dict__.update(HELPERS)
    exec(compile(source.replace(bug.old, bug.new), str(module.__file__), "exec"), module.__dict__)


def variant(framework: str, bug: Bug | None = None) -> ModuleType:
    """A module of its own with the bug (None: as it is); the implementation itself stays untouched.

    The source is compiled once, and for each bug only the definition that it edits.
    """
    module = ModuleType(f"{path(framework).stem} with {bug.name if bug else 'no bug'}")
    module.__dict__.update(HELPERS, __file__=str(path(framework)))
    exec(compiled(framework), module.__dict__)
    if bug:
        exec(_edit(framework, bug), module.__dict__)
    return module


def path(framework: str) -> Path:
    """The source of an implementation: impls/numpy_attention.py of "numpy", impls/jax_mesh.py of "jax-mesh"."""
    name = framework.replace("-", "_") if "-" in framework else f"{framework}_attention"
    return Path(__file__).resolve().parent.parent / "impls" / f"{name}.py"


@functools.cache
def _source(framework: str) -> str:
    return path(framework).read_text(encoding="utf-8")


@functools.cache
def compiled(framework: str) -> CodeType:
    """An implementation's source, compiled."""
    return compile(_source(framework), str(path(framework)), "exec", flags=_LAZY, dont_inherit=True)


@functools.cache
def _edit(framework: str, bug: Bug) -> CodeType:
    """The definition that a bug edits, from one empty pair of lines to the next."""
    source = _source(framework)
    at = _only_place(source, bug)
    start, end = source.rfind("\n\n\n", 0, at), source.find("\n\n\n", at + len(bug.old))
    definition = source[start + 3 : end].replace(bug.old, bug.new)
    return compile(definition, f"{framework}:{bug.name}", "exec", flags=_LAZY, dont_inherit=True)


_LAZY = __future__.annotations.compiler_flag
"""Annotations stay unevaluated: they are most of what running a module costs."""


def stands(framework: str, bug: Bug) -> bool:
    """Whether the line that a bug edits stands once in an implementation's source; somebody may have changed it."""
    return _source(framework).count(bug.old) == 1


def _only_place(source: str, bug: Bug) -> int:
    if source.count(bug.old) != 1:
        raise RuntimeError(f"planted bug {bug.name}: its line stands {source.count(bug.old)} times in the source")
    return source.index(bug.old)
