"""The variance argument (3.3 to 3.5), why keys can be cached (3.10) and the parameter count (3.12), measured in NumPy.

Dot products of d_k independent entries have variance d_k; left unscaled, they saturate the softmax as heads grow, and a
saturated softmax has a vanishing Jacobian: nothing is learned.
"""

import math
from typing import Any

import numpy as np

from impls import numpy_cache
from impls.numpy_attention import forward, softmax, softmax_jacobian
from impls.spec import WEIGHTS, AttentionConfig, weight_shapes

HEAD_SIZES = tuple(2**n for n in range(4, 11))
ROWS, KEYS = 48, 64
NOTE = (
    "The chapter names equations 3.3 to 3.5 without printing them; their numbers are reconstructed from its argument. "
    "Entries of q and k are independent standard normal (float32); standard errors are over independent queries; "
    "entropy is in bits, 6 for a uniform softmax over 64 keys; the Jacobian (3.8) is measured by its Frobenius norm, "
    "0.12 for a uniform softmax; a few queries with two equally good keys carry its mean, hence also the median."
)


def measure(seed: int = 0) -> dict[str, Any]:
    """Variance of scores, entropy of their softmax and norm of its Jacobian, for d_k from 16 to 1024, deterministic.

    ROWS independent queries, each against KEYS keys of its own; the first d_k entries of the same vectors serve every
    head size. Averages over all ROWS x KEYS scores, in float64.
    """
    random = np.random.default_rng(seed)
    q_RH = random.standard_normal((ROWS, max(HEAD_SIZES)), np.float32)
    k_RSH = random.standard_normal((ROWS, KEYS, max(HEAD_SIZES)), np.float32)
    head_sizes = []
    for d_k in HEAD_SIZES:
        qk_RS = (k_RSH[:, :, :d_k] @ q_RH[:, :d_k, None])[:, :, 0].astype(np.float64)
        head_sizes.append({"d_k": d_k, "unscaled": spread(qk_RS), "scaled": spread(qk_RS / math.sqrt(d_k))})
    equations = {
        "unscaled.variance": "3.3: Var[q·k] = d_k",
        "scaled.variance": "3.4: Var[q·k / √d_k] = 1",
        "scaled": "3.5: S = Q K^T / √d_k",
        "entropy_bits": "3.6",
        "jacobian_norm": "3.7, 3.8",
        "jacobian_norm_median": "3.7, 3.8",
    }
    return {"note": NOTE, "equations": equations, "seed": seed, "queries": ROWS, "keys": KEYS, "head_sizes": head_sizes}


def spread(s_RS: np.ndarray) -> dict[str, float]:
    """Scores [rows, keys] of expectation 0 -> mean and variance, each with its standard error; entropy; Jacobian norm.

    Scores of one row share its query and are not independent; rows are, so the errors are taken over row means.
    """
    a_RS = softmax(s_RS[None, None])[0, 0]
    logs = np.log2(a_RS, out=np.zeros_like(a_RS), where=a_RS > 0)  # 0 log 0 = 0
    norms_R = np.linalg.norm(softmax_jacobian(a_RS), axis=(1, 2))
    return {
        "mean": float(s_RS.mean()),
        "mean_standard_error": standard_error(s_RS.mean(axis=1)),
        "variance": float(np.mean(s_RS**2)),
        "variance_standard_error": standard_error(np.mean(s_RS**2, axis=1)),
        "entropy_bits": float(-np.sum(a_RS * logs, axis=1).mean()),
        "jacobian_norm": float(norms_R.mean()),
        "jacobian_norm_median": float(np.median(norms_R)),
    }


def standard_error(x: np.ndarray) -> float:
    """Of the mean of independent values."""
    return float(x.std(ddof=1) / math.sqrt(len(x)))


def caching(seed: int = 0) -> dict[str, int | float | str]:
    """3.10: whose answers move when a token changes, with the triangle and without it; and decoding with a cache.

    A small layer in float64, of random weights. `later_moved`, `earlier_moved`: of the pairs of a changed token and an
    answer from it on, or before it, those in which any bit moved; `earlier_moved_unmasked`: without the mask. `apart`:
    max |decoded token by token − all together|, over the largest answer.
    """
    config, T, random = AttentionConfig(24, 4, 2, 8, 1e-6), 12, np.random.default_rng(seed)
    weights = {name: random.standard_normal(shape) / shape[-1] ** 0.5 for name, shape in weight_shapes(config).items()}
    x_BTD, angle = random.standard_normal((1, T, config.hidden_size)), random.uniform(0, 6, (1, T, config.head_dim))
    given = {"cos": np.cos(angle), "sin": np.sin(angle)}

    def moved(more: dict[str, np.ndarray]) -> np.ndarray:
        """[T, T]: whether changing the token of a row moves the answer of a column."""
        before, _ = forward(weights, {"hidden_states": x_BTD, **given, **more}, config)
        after = [forward(weights, {"hidden_states": x_BTD + one, **given, **more}, config)[0] for one in changes]
        return np.any(np.concatenate(after) != before, axis=-1)

    changes = np.eye(T)[:, None, :, None]
    masked, unmasked = moved({}), moved({"attention_mask": np.zeros((1, 1, T, T))})
    whole, _ = forward(weights, {"hidden_states": x_BTD, **given}, config)
    apart = np.abs(numpy_cache.decode(weights, {"hidden_states": x_BTD, **given}, config) - whole).max()
    return {
        "equation": "3.10",
        "tokens": T,
        "later_moved": int(np.triu(masked).sum()),
        "earlier_moved": int(np.tril(masked, -1).sum()),
        "earlier_moved_unmasked": int(np.tril(unmasked, -1).sum()),
        "earlier": T * (T - 1) // 2,
        "apart": float(apart / np.abs(whole).max()),
    }


def parameters(config: AttentionConfig) -> dict[str, int | str]:
    """3.12: h heads of size d_k cost what one head of size h·d_k costs. Counted from arrays of those shapes.

    `grouped_query` is the layer as configured: K key/value heads, each read by G query heads; norm weights are apart.
    """
    D, h, d_k = config.hidden_size, config.num_attention_heads, config.head_dim
    W_O = np.empty((h * d_k, D))
    many = [np.empty((D, d_k)) for _ in range(h) for _ in ("W_Q", "W_K", "W_V")] + [W_O]
    wide = [np.empty((D, h * d_k)) for _ in ("W_Q", "W_K", "W_V")] + [W_O]
    layer = {name: math.prod(shape) for name, shape in weight_shapes(config).items() if name in WEIGHTS}
    norms = sum(count for name, count in layer.items() if "norm" in name)
    return {
        "equation": "3.12",
        "d_model": D,
        "heads": h,
        "key_value_heads": config.num_key_value_heads,
        "d_k": d_k,
        "many_heads": sum(w.size for w in many),
        "one_wide_head": sum(w.size for w in wide),
        "grouped_query": sum(layer.values()) - norms,
        "norm_weights": norms,
    }
