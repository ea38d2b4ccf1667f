"""Gate S, structure: float64 end to end against Hugging Face's own layer in float64, every stage and gradient.

What remains of a correct implementation in float64 is rounding of about 1e-14. Any error of the mathematics, however
small it would be in float32, stands far above that (eps 1e-5 for 1e-6: 1e-4).
"""

from collections.abc import Callable, Collection

import numpy as np

from harness.gates import Array, Finding, Trace, compared, errors, letters, seen_by, usable
from impls.spec import AttentionConfig

LIMIT = 1e-12
"""Relative. Seen in correct implementations: 4e-15 on the default case, 7e-15 in tests/test_campaign.py's sample,
9e-14 at a hidden size of 1."""


def judge(
    trace: Trace, truth: Trace, weights: Trace, inputs: Trace, config: AttentionConfig, expected: Collection[str]
) -> list[Finding]:
    """One finding for each stage and gradient: the worst difference relative to the largest magnitude of its token.

    Args: float64 traces; `weights` and `inputs` as the implementation was given them; the names that are `expected` in
    the trace.
    The scale is per token, since relative to a whole tensor a lost path hides behind a token a million times larger;
    for the gradient of a weight it is the tensor's. Where the truth is exactly 0 (the first token's d_q: a softmax over
    one key does not move), the scale is floored by what a correct backward rounds against, if the truth shows it.
    """
    seen = seen_by(inputs)
    names, findings = usable(trace, truth, expected, "float64", seen)
    floors = score_gradient_scales(truth, weights, inputs, config) if "probs" in truth else {}
    for name in names:
        scale = per_token(name, truth[name], seen)
        if name in floors:
            scale = np.maximum(scale, per_token(name, floors[name]))
        _, relative, where = errors(name, trace[name], truth[name], scale, seen)
        findings.append(Finding(name, "relative", relative, LIMIT, where))
    return findings


def per_token(name: str, value: Array, seen: Array | None = None) -> Array:
    """The largest magnitude of each token, broadcastable to the array; of the whole tensor for a weight's gradient."""
    token = "BTS" if "NTS" not in letters(name) else "BT"
    axes = tuple(axis for axis, letter in enumerate(letters(name)) if letter not in token)
    over, value = axes if letters(name) else None, compared(name, value, seen)
    return np.maximum(np.max(value, axis=over, keepdims=True), -np.min(value, axis=over, keepdims=True))


def score_gradient_scales(truth: Trace, weights: Trace, inputs: Trace, config: AttentionConfig) -> dict[str, Array]:
    """Scales on which a correct backward errs between 3.9 and d_q_proj, d_k_proj: gate L's c, carried along the path.

    3.9 takes a difference, p (dp − δ), so its rounding is of the size of p dp and p δ even where the result is 0.
    """
    p, dp = truth["probs"], truth["d_probs"]
    G, H = config.num_key_value_groups, config.head_dim
    delta = np.sum(p * dp, axis=-1, keepdims=True)
    ds2 = p**2 * (dp**2 + delta**2 + np.sum((p * dp) ** 2, axis=-1, keepdims=True))
    q2 = truth["q_rope"].transpose(0, 2, 1, 3) ** 2
    k2 = np.repeat(truth["k_rope"], G, axis=2).transpose(0, 2, 1, 3) ** 2
    d2 = {"q": (ds2 @ k2).transpose(0, 2, 1, 3) / H, "k": (ds2.swapaxes(-1, -2) @ q2).transpose(0, 2, 1, 3) / H}
    B, S, N, _ = d2["k"].shape
    d2["k"] = d2["k"].reshape(B, S, N // G, G, H).sum(axis=3)

    scales = {"d_masked_scores": np.sqrt(ds2), "d_scores": np.sqrt(ds2)}
    hidden2 = np.zeros_like(inputs["hidden_states"])
    cos2, sin2 = inputs["cos"][:, :, None] ** 2, inputs["sin"][:, :, None] ** 2
    for path in ("q", "k"):
        rope2 = d2[path]
        norm2 = rope2 * cos2 + np.roll(rope2 * sin2, H // 2, axis=-1)
        x = truth[f"{path}_proj"]
        r2 = 1 / (np.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps)
        g2 = norm2 * weights[f"{path}_norm.weight"] ** 2
        proj2 = r2 * (g2 + x**2 * r2 * np.mean(g2 * x**2 * r2, axis=-1, keepdims=True))
        weight2 = np.sum(norm2 * x**2 * r2, axis=(0, 1, 2))
        scales |= {f"d_{path}_rope": np.sqrt(rope2), f"d_{path}_norm": np.sqrt(norm2), f"d_{path}_proj": np.sqrt(proj2)}
        scales[f"d_{path}_norm.weight"] = np.sqrt(weight2)
        largest2 = np.max(proj2, axis=(2, 3)) * np.max(inputs["hidden_states"] ** 2, axis=2)
        scales[f"d_{path}_proj.weight"] = np.sqrt(np.sum(largest2))
        scales[f"d_{path}_proj.bias"] = np.sqrt(np.sum(proj2, axis=(0, 1))).ravel()
        w = weights[f"{path}_proj.weight"].ravel()
        hidden2 += np.sum(proj2, axis=(2, 3))[:, :, None] * (np.vdot(w, w) / w.size)
    scales["d_hidden_states"] = np.sqrt(hidden2)
    return scales


def judge_jacobian(trace: Trace, softmax_jacobian: Callable[[Array], Array]) -> Finding:
    """3.9 through 3.7 and 3.8: the contraction that the backward used, against the Jacobian built in full, J^T g.

    Args: a float64 trace with probs, d_probs and d_masked_scores [B,N,T,S]; the function that builds J, [...,S] ->
    [...,S,S]. At most about four million entries of J are built: for long sequences every n-th query row.
    """
    p, g, contraction = (trace[name] for name in ("probs", "d_probs", "d_masked_scores"))
    step = -(-p.size * p.shape[-1] // 4_194_304)
    rows, g_rows, c_rows = (x.reshape(-1, p.shape[-1])[::step] for x in (p, g, contraction))
    product = (softmax_jacobian(rows).swapaxes(-1, -2) @ g_rows[..., None])[..., 0]
    scale = np.max(rows * np.abs(g_rows), axis=-1, keepdims=True) + np.finfo(np.float64).tiny
    return Finding("d_masked_scores", "jacobian", float(np.max(np.abs(c_rows - product) / scale)), LIMIT)
