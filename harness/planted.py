"""Planted bugs: what people really get wrong in an attention layer, each as an edit of an implementation's source.

`--impl numpy:norm_after_rope` runs the NumPy page with that bug in it. A gate that was never seen to fail proves nothing.
"""

import importlib
from pathlib import Path
from typing import NamedTuple


class Bug(NamedTuple):
    """One bug: in the source of each of `frameworks`, `old` (which stands there once) becomes `new`."""

    name: str
    kind: str
    stage: str  # the first stage or gradient that it makes wrong
    old: str
    new: str
    frameworks: tuple[str, ...] = ("numpy",)


ALL = ("numpy", "jax", "torch")

_NORMS = """
    qn_BTNH = observe("q_norm", rms_norm(q_BTNH, weights["q_norm.weight"], eps))
    kn_BSKH = observe("k_norm", rms_norm(k_BSKH, weights["k_norm.weight"], eps))
    qr_BTNH = observe("q_rope", rope(qn_BTNH, cos_BTH, sin_BTH))
    kr_BSKH = observe("k_rope", rope(kn_BSKH, cos_BTH, sin_BTH))
"""
_NORMS_AFTER_ROPE = """
    qn_BTNH = observe("q_norm", rope(q_BTNH, cos_BTH, sin_BTH))
    kn_BSKH = observe("k_norm", rope(k_BSKH, cos_BTH, sin_BTH))
    qr_BTNH = observe("q_rope", rms_norm(qn_BTNH, weights["q_norm.weight"], eps))
    kr_BSKH = observe("k_rope", rms_norm(kn_BSKH, weights["k_norm.weight"], eps))
"""

# fmt: off
BUGS: tuple[Bug, ...] = (
    Bug("kv_heads_tiled", "grouped heads", "scores", "np.repeat(x_BSKH, G, axis=2)", "np.tile(x_BSKH, (1, 1, G, 1))"),
    Bug("heads_split_without_swap", "geometry", "q_proj", "w_ND.T).reshape(B, T, heads, -1)", "w_ND.T).reshape(B, heads, T, -1).swapaxes(1, 2)"),
    Bug("v_projected_with_k", "weights", "v_proj", 'project(x_BTD, weights["v_proj.weight"], K)', 'project(x_BTD, weights["k_proj.weight"], K)'),
    Bug("norm_skipped", "norm", "q_norm", 'rms_norm(q_BTNH, weights["q_norm.weight"], eps)', "q_BTNH"),
    Bug("norms_swapped", "norm", "q_norm", 'rms_norm(q_BTNH, weights["q_norm.weight"], eps)', 'rms_norm(q_BTNH, weights["k_norm.weight"], eps)'),
    Bug("norm_one_plus_weight", "norm", "q_norm", "return w_H * (x", "return (1 + w_H) * (x", ALL),
    Bug("eps_1e-5", "norm", "q_norm", "eps = config.rms_norm_eps", "eps = 1e-5"),
    Bug("norm_after_rope", "norm", "q_norm", _NORMS, _NORMS_AFTER_ROPE),
    Bug("rope_negative_sine", "rope", "q_rope", "+ rotate_half(x) * sin", "- rotate_half(x) * sin", ALL),
    Bug("rope_left_out_for_k", "rope", "k_rope", "rope(kn_BSKH, cos_BTH, sin_BTH)", "kn_BSKH", ALL),
    Bug("scale_sqrt_64", "scale", "scores", "(q_BNTH @ k_BNHS) * q_BTNH.shape[-1] ** -0.5", "(q_BNTH @ k_BNHS) * 64**-0.5"),
    Bug("mask_off_by_one", "mask", "probs", ".tri(T, S, dtype=bool)", ".tri(T, S, 1, dtype=bool)", ("numpy", "jax")),
    Bug("mask_too_weak", "mask", "probs", "0, -np.inf)", "0, -10.0)"),
    Bug("softmax_over_queries", "softmax", "probs", "e_BNTS.sum(axis=-1, keepdims=True)", "e_BNTS.sum(axis=-2, keepdims=True)", ("numpy", "jax")),
    Bug("heads_merged_without_swap", "geometry", "output", "o_BTNH.reshape(B, T, N * H)", "o_BTNH.transpose(0, 2, 1, 3).reshape(B, T, N * H)", ("numpy", "jax")),
    Bug("jacobian_without_rank_one_term", "backward", "d_masked_scores", "a * (d_a - np.sum(a * d_a, axis=-1, keepdims=True))", "a * d_a"),
    Bug("norm_backward_without_mean", "backward", "d_q_proj", "r * (g - x_hat * np.mean(g * x_hat, axis=-1, keepdims=True))", "r * g"),
    Bug("group_gradient_not_summed", "backward", "d_v_proj", ".sum(axis=3)", "[:, :, :, 0]"),
    Bug("rope_backward_not_transposed", "backward", "d_k_norm", "- rotate_half(d * sin", "+ rotate_half(d * sin"),
    Bug("gradient_of_zeros", "runner", "d_hidden_states", 'observe("d_hidden_states", d_x)', 'observe("d_hidden_states", 0 * d_x)'),
    Bug("output_bfloat16", "precision", "q_proj", "return (x_BTD @ w_ND.T)", 'import ml_dtypes\n    x_BTD = x_BTD.astype(ml_dtypes.bfloat16).astype(x_BTD.dtype)\n    return (x_BTD @ w_ND.T)'),
)
# fmt: on


def names(framework: str) -> list[str]:
    """The bugs that can be planted in a framework's implementation."""
    return [bug.name for bug in BUGS if framework in bug.frameworks]


def plant(framework: str, name: str) -> None:
    """Run an implementation's module anew, in place, with the bug in its source. For this process, without return."""
    (bug,) = (bug for bug in BUGS if bug.name == name and framework in bug.frameworks)
    module = importlib.import_module(f"impls.{framework}_attention")
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    if source.count(bug.old) != 1:
        raise RuntimeError(f"planted bug {name}: its line stands {source.count(bug.old)} times in {module.__name__}")
    exec(compile(source.replace(bug.old, bug.new), str(module.__file__), "exec"), module.__dict__)
