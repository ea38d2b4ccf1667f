"""Gate P, probes: inputs on which a correct layer does not round, so that a single wrong bit is an error.

A probe is built backwards, from which key each query is to attend to; its answer is that selection, and integers.

* Tokens are one-hot: a projection is a look-up, and W_Q and W_K hold the queries and keys that are wanted.
* The entries of a query or key have one magnitude, a power of two so large that eps is below half an ulp of the mean
  square: RMSNorm leaves ±w exactly. The weights w are integers that differ between q and k and between channels.
* RoPE turns by quarters (cos, sin in {0, ±1}), another number of them at each position and pair.
* The best visible score leads the others by more than GAP, so the softmax is one-hot. A *future* key would beat it.
* Then p (dp − δ) is 0, nothing flows back to q and k, and the other gradients are as exact as the values.

The builder proves every sum exact in any order (`product`). What this gate cannot see is what an exact layer does not
depend on: eps; how cos, sin and probabilities are rounded, being 0 and ±1; the backward of norms, RoPE and scores,
through which zeros flow.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from harness.gates import Array, Finding, Trace, compared, errors, usable, visible, whole
from impls.spec import BIASES, AttentionConfig, weight_shapes

NAMES = ("lookup", "significand", "cotangent", "strong")
"""lookup: small integers; every head, channel and position takes part in the output and in every gradient.
significand: operands of all 24 bits wherever the partner leaves a product exact: TF32 and bfloat16 would drop some.
cotangent: the same for d_output, and so for all that flows back.
strong: norm weights STRONG times larger: a mask of −1e4 is too weak for them, and float16 cannot hold the scores."""

GAP = 120.0
"""By which the winning score leads the visible ones and a future one leads it; e^(−104) is 0 in float32."""
STRONG = 12
U = 2.0**-24

Random = np.random.Generator


class Probe(NamedTuple):
    """What an implementation is given, float32, and what it must return, exactly, by the names of a trace.

    `allowance`: by how much an entry may differ, in units of its largest magnitude; 0 where it is not named.
    `fused`: the same for a kernel that keeps no probabilities, divides by their sum at the end and computes them anew;
    empty where no such kernel is to be judged.
    `target` [B,N,T]: the key that each query attends to.
    """

    name: str
    weights: dict[str, Array]
    inputs: dict[str, Array]
    d_output: Array
    expected: dict[str, Array]
    allowance: dict[str, float]
    fused: dict[str, float]
    target: Array


def judge(trace: Trace, probe: Probe, expected: Collection[str]) -> list[Finding]:
    """One finding for each entry: its largest difference in units of its largest magnitude (of 1 where all is 0).

    Args: a trace of any dtype; the names that are `expected` in it.
    """
    names, findings = usable(trace, probe.expected, expected)
    allowance = probe.allowance | ({} if "probs" in trace else probe.fused)
    for name in names:
        value, truth, worst, where = trace[name], probe.expected[name], 0.0, None
        if not np.array_equal(compared(name, value), compared(name, truth)):
            _, worst, where = errors(name, value, truth, _size(compared(name, truth)))
        findings.append(Finding(name, "exact", worst, allowance.get(name, 0.0), where))
    return findings


def _size(x: Array) -> Array:
    """The largest magnitude, or 1 where all is 0."""
    return np.array(max(x.max(), -x.min()) or 1.0)


def build(name: str, config: AttentionConfig, seq_len: int, batch: int = 1, fused: bool = True) -> Probe:
    """The probe of this name for a layer's geometry, always the same one (with one release of NumPy).

    `fused`: whether a kernel that keeps no probabilities is to be judged by it.

    Raises ValueError where there is none: each token takes a hidden dimension for itself, one is kept in reserve, and
    very short heads have too few patterns for many positions.
    """
    if name not in NAMES:
        raise ValueError(f"probe {name!r} is unknown; there are {', '.join(NAMES)}")
    if batch * seq_len >= config.hidden_size:
        raise ValueError(f"a probe of {batch} × {seq_len} tokens needs a hidden size above {batch * seq_len}")
    for seed in range(8):
        random = np.random.default_rng([NAMES.index(name), seed])
        attention = _attention(name, config, batch, seq_len, random)
        if attention:
            return _layer(name, config, attention, random, fused)
    raise ValueError(f"no probe {name!r} of {seq_len} positions for heads of {config.head_dim}; take fewer positions")


# ---------------------------------------------------------------------------------------- from the norms to the softmax


class _Attention(NamedTuple):
    """A choice of queries and keys that leaves the softmax one-hot; arrays as in `impls.spec`, turns [B,T,H/2]."""

    turns: Array
    q_weight: Array
    k_weight: Array
    q_norm: Array
    k_norm: Array
    q_rope: Array
    k_rope: Array
    scores: Array
    target: Array


def _attention(name: str, config: AttentionConfig, B: int, T: int, random: Random) -> _Attention | None:
    """Draw keys, and queries until each has one best visible key and a future one that beats it; None if some never do.

    A query has the signs of the future key in half of the channels, of the target in most others, else random ones.
    """
    N, K, G, H = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_groups, config.head_dim
    turns = random.integers(4, size=(B, T, H // 2))
    q_weight, k_weight = _norm_weights(name, H, random)
    k_norm = _signs(random, B, T, K, H) * k_weight
    k_rope = _rotate(k_norm, turns)
    k_BNSH = np.repeat(k_rope, G, axis=2).transpose(0, 2, 1, 3)

    position = np.arange(T)
    following = np.minimum(position + 1, T - 1)
    q_norm, done = np.zeros((B, T, N, H)), np.zeros((B, N, T), bool)
    for _ in range(64):
        target = random.integers(0, position + 1, (B, N, T))
        future = np.where(random.random((B, N, T)) < 0.5, following, random.integers(following, T, (B, N, T)))
        bait, aim = (np.sign(np.take_along_axis(k_BNSH, key[..., None], axis=2)) for key in (future, target))
        which = random.random((B, N, T, H))
        signs = np.select([which < 0.5, which < 0.9], [bait, aim], _signs(random, B, N, T, H)).transpose(0, 2, 1, 3)
        new = np.sign(_rotate(signs, -turns % 4)) * q_weight
        q_norm = np.where(done.swapaxes(1, 2)[..., None], q_norm, new)
        q_rope = _rotate(q_norm, turns)
        scores = product(q_rope.transpose(0, 2, 1, 3), k_BNSH.swapaxes(2, 3)) * H**-0.5
        target, lead, bait_lead = leads(scores)
        done = (lead > GAP) & (bait_lead > (1e4 + GAP if name == "strong" else GAP))
        if done.all():
            return _Attention(turns, q_weight, k_weight, q_norm, k_norm, q_rope, k_rope, scores, target)
    return None


def leads(scores: Array) -> tuple[Array, Array, Array]:
    """Of [B,N,T,S]: the best visible key, by how much it leads the others, and the best future key leads it; [B,N,T].

    Infinite where there is no other one.
    """
    seen = np.where(visible(scores.shape), scores, -np.inf)
    target = seen.argmax(axis=-1)
    best = seen.max(axis=-1)
    others = np.where(np.arange(scores.shape[-1]) == target[..., None], -np.inf, seen).max(axis=-1)
    future = np.where(visible(scores.shape), -np.inf, scores).max(axis=-1)
    return target, best - others, np.where(np.isfinite(future), future - best, np.inf)


def _norm_weights(name: str, H: int, random: Random) -> tuple[Array, Array]:
    """Integers, so small that H products of two stay within 2^24; strong's are STRONG times lookup's.

    For significands the pairs of channels take turns: 12 bits for q and few for k, then the other way round.
    """
    if name != "significand":
        top = math.isqrt(min(2048, 2**24 // (STRONG**2 * H)))
        q, k = random.integers(top // 3 + 1, top + 1, (2, H)) * float(STRONG if name == "strong" else 1)
        return q, k
    long = random.integers(2**10, 2**11, (2, H)) * 2.0 + 1
    short = 1.0 + random.integers(min(31, max(1, 2**12 // H - 1)), size=(2, H))
    q_long = np.tile(np.arange(H // 2) % 2 == 0, 2)
    return np.where(q_long, long, short)[0], np.where(q_long, short, long)[1]


def _rotate(x: Array, turns: Array) -> Array:
    """[B,T,·,H] by quarter turns [B,T,H/2] of the pairs (x_i, x_{i+H/2})."""
    turns = turns[:, :, None]
    first, second = np.split(x, 2, axis=-1)
    odd, sign = turns % 2 == 1, np.where(turns > 1, -1, 1)
    return np.concatenate([np.where(odd, -second, first) * sign, np.where(odd, first, second) * sign], axis=-1)


# ------------------------------------------------------------------------------------------- tokens, weights, cotangent


class _Tokens(NamedTuple):
    """Token i is size[i], ±1, ±2 or ±4, at column own[i] of the hidden states; x [B·T,D] has no other entries, unless
    it is one of these, so that products of 24 bits cancel to the same look-up:

    single: size at `reserve` too, where weights take back the low bits that they have at own;
    twin: (1 + μ) size at own and −μ size at `spare`, where W_Q and W_K are what they are at own.
    """

    x: Array
    size: Array
    own: Array
    reserve: int
    single: Array
    twin: Array
    spare: Array


def _tokens(count: int, D: int, full: bool, random: Random) -> _Tokens:
    own, reserve, rest = np.split(random.permutation(D), [count, count + 1])
    twin = np.arange(1, count, 2)[: rest.size] if full else np.arange(0)
    single = np.setdiff1d(np.arange(count if full else 0), twin)
    size, x = _powers(random, count), np.zeros((count, D))
    mu = (random.integers(2**20, 7 * 2**18, twin.size) * 2 + 1) * 2.0**-23  # 1/4 to 7/16, an odd number of 2^(−23)
    x[np.arange(count), own] = size
    x[single, reserve] = size[single]
    x[twin, own[twin]] *= 1 + mu
    x[twin, rest[: twin.size]] = -mu * size[twin]
    return _Tokens(x, size, own, int(reserve[0]), single, twin, rest[: twin.size])


def _look_up(tokens: _Tokens, wanted: Array, magnitude: float, random: Random, bias: Array | float) -> Array:
    """W_Q or W_K, [heads·H,D], that projects the tokens to the signs `wanted` [B,T,heads,H], times a power of two, once
    the bias [heads·H, 1], or 0, has been added."""
    heads, H = wanted.shape[2:]
    power = np.repeat(magnitude * 2.0 ** (np.arange(heads) % 3), H)[:, None]
    weight = np.zeros((heads * H, tokens.x.shape[1]), np.float32)
    weight[:, tokens.own] = power * wanted.reshape(tokens.size.size, -1).T * np.sign(tokens.size) - bias / tokens.size
    weight[:, tokens.spare] = weight[:, tokens.own[tokens.twin]]
    low = power * (random.integers(2**19, 2**20, (heads * H, 1)) * 2 + 1) * 2.0**-23  # 1/8 to 1/4 of the power
    weight[:, tokens.own[tokens.single]] += low
    weight[:, [tokens.reserve]] = -low
    return weight


class _Values(NamedTuple):
    """W_V [K·H,D], W_O [D,N·H], d_output [B·T,D]."""

    v: Array
    o: Array
    d_y: Array


def _dense(tokens: _Tokens, config: AttentionConfig, random: Random) -> _Values:
    """Small integers everywhere."""
    sizes, D = config.sizes(), config.hidden_size
    v = random.integers(-3, 4, (sizes["KH"], D), np.int8).astype(np.float32)
    o = random.integers(-2, 3, (D, sizes["NH"]), np.int8).astype(np.float32)
    return _Values(v, o, random.integers(-2, 3, (len(tokens.x), D)).astype(float))


def _sparse(name: str, tokens: _Tokens, config: AttentionConfig, target: Array, random: Random) -> _Values:
    """One term in every sum, so that one factor may have 24 bits where the other one is a power of two.

    significand: a channel has 24 bits in W_V, or else in W_O; a twin's values, 24 bits of its own, need powers in both.
    cotangent: d_output has them. Each row of W_O reads one channel of the heads; a key gets its gradient through one.
    """
    full, D, H, KH, NH = name == "significand", *(config.sizes()[letters] for letters in ("D", "H", "KH", "NH"))
    reads = np.resize(random.permutation(NH), D)
    channel = reads // H // config.num_key_value_groups * H + reads % H  # of V, which that channel of the heads mixes
    carries = (random.random(KH) < 0.5) & full

    v = np.where(carries[:, None], _full(random, KH, D), _powers(random, KH, D))
    v[:, tokens.own[tokens.twin]] = _powers(random, KH, tokens.twin.size)
    v[:, tokens.spare] = np.where(carries[:, None], 0, v[:, tokens.own[tokens.twin]])
    v[:, tokens.reserve] = 0
    o = np.zeros((D, NH), np.float32)
    o[np.arange(D), reads] = np.where(carries[channel] | (not full), _powers(random, D), _full(random, D))

    d_y = np.zeros((len(tokens.x), D))
    free = np.arange(D) < NH  # rows of W_O; each channel is read by one of them
    B, _, T = target.shape
    for b, s in np.ndindex(B, T):
        allowed = free & carries[channel] if b * T + s in tokens.twin else free
        for n, t in random.permutation(np.argwhere(target[b] == s)):
            rows = np.flatnonzero(allowed & (reads // H == n))
            if rows.size:
                d_y[b * T + t, rows[0]] = (_powers if full else _full)(random, 1)[0]
                free &= channel != channel[rows[0]]
                break
    return _Values(v.astype(np.float32), o, d_y)


def _biases(name: str, config: AttentionConfig, random: Random) -> dict[str, Array]:
    """Small integers where the layer has biases, multiples of 4 for Q and K, from which W_Q and W_K take them off
    again; 0 where they would be added to, or multiplied by, numbers of 24 bits."""
    zero = {"significand": BIASES, "cotangent": ["v_proj.bias"]}.get(name, ())
    shapes = {each: shape for each, shape in weight_shapes(config).items() if each in BIASES}
    return {
        each: random.integers(-3, 4, shape).astype(np.float32) * (0 if each in zero else 4 if each[0] in "qk" else 1)
        for each, shape in shapes.items()
    }


def _signs(random: Random, *shape: int) -> Array:
    return random.integers(0, 2, shape, np.int8) * 2.0 - 1


def _powers(random: Random, *shape: int) -> Array:
    """±1, ±2, ±4."""
    return np.array([-4.0, -2, -1, 1, 2, 4])[random.integers(6, size=shape, dtype=np.int8)]


def _full(random: Random, *shape: int) -> Array:
    """Numbers of 24 significant bits, the last one set, from ±8 to ±16."""
    return (random.integers(2**22, 2**23, shape, np.int32) * 2 + 1) * 2.0**-20 * _signs(random, *shape)


# --------------------------------------------------------------------------------------------------- the layer's answer


def _layer(name: str, config: AttentionConfig, plan: _Attention, random: Random, fused: bool) -> Probe:
    """Weights and inputs that lead to the plan's queries and keys, and what the layer must answer."""
    B, T, _, _ = plan.q_norm.shape
    tokens = _tokens(B * T, config.hidden_size, name == "significand", random)
    magnitude = 2.0**10 if config.rms_norm_eps < 2**-5 else 2.0**13
    sparse = name in ("significand", "cotangent")
    values = _sparse(name, tokens, config, plan.target, random) if sparse else _dense(tokens, config, random)
    biases = _biases(name, config, random)
    b_q, b_k = (biases[each][:, None] if biases else 0.0 for each in ("q_proj.bias", "k_proj.bias"))
    weights = {
        "q_proj.weight": _look_up(tokens, np.sign(plan.q_norm), magnitude, random, b_q),
        "k_proj.weight": _look_up(tokens, np.sign(plan.k_norm), magnitude, random, b_k),
        "v_proj.weight": values.v,
        "q_norm.weight": plan.q_weight.astype(np.float32),
        "k_norm.weight": plan.k_weight.astype(np.float32),
        "o_proj.weight": values.o,
        **biases,
    }
    turns = np.tile(plan.turns, 2)
    inputs = {
        "hidden_states": tokens.x.reshape(B, T, -1).astype(np.float32),
        "cos": np.array([1, 0, -1, 0], np.float32)[turns],
        "sin": np.array([0, 1, 0, -1], np.float32)[turns],
    }
    d_output = values.d_y.reshape(B, T, -1).astype(np.float32)
    expected = _answer(weights, inputs["hidden_states"], d_output, plan, config)
    for path, norm in (("q_proj", plan.q_norm), ("k_proj", plan.k_norm)):
        one = np.abs(expected[path][..., :1])
        power_of_two = (np.frexp(one)[0] == 0.5).all() and config.rms_norm_eps < U * one.min() ** 2
        if not power_of_two or (expected[path] != np.sign(norm) * one).any():
            raise ValueError(f"probe {name!r}: {path} is not as planned, so that its RMSNorm would round")
    late = _fused(expected, weights, tokens.x, d_output, plan.turns, config) if fused else {}
    for entry in (entry for entry in expected if entry.endswith("proj.weight")):  # millions, of no more than 24 bits
        if np.array_equal(single := expected[entry].astype(np.float32), expected[entry]):
            expected[entry] = single
    return Probe(name, weights, inputs, d_output, expected, _allowance(config), late, plan.target)


def _answer(
    weights: dict[str, Array], x: Array, d_y: Array, plan: _Attention, config: AttentionConfig
) -> dict[str, Array]:
    """Every stage and gradient of the layer, by selection: a query's answer is the value of the key it attends to."""
    B, T, N, H = plan.q_norm.shape
    K, G, D = config.num_key_value_heads, config.num_key_value_groups, config.hidden_size
    w_v, w_o = weights["v_proj.weight"], weights["o_proj.weight"]

    def affine(x: Array, name: str) -> Array:
        """x W^T + b, a product of one term more."""
        w, b = weights[f"{name}.weight"].T, weights.get(f"{name}.bias")
        return product(x, w) if b is None else product(np.insert(x, 0, 1, axis=-1), np.insert(w, 0, b, axis=0))

    v = affine(x, "v_proj").reshape(B, T, K, H)
    v_BNSH = np.repeat(v, G, axis=2).swapaxes(1, 2)
    heads = np.take_along_axis(v_BNSH, plan.target[..., None], axis=2).swapaxes(1, 2)
    probs = np.eye(T)[plan.target]
    d_heads = product(d_y, w_o).reshape(B, T, N, H)
    d_v = product(_asked(probs, K), _by_key(d_heads, K)).swapaxes(1, 2)
    stages = {
        "q_proj": affine(x, "q_proj").reshape(B, T, N, H),
        "k_proj": affine(x, "k_proj").reshape(B, T, K, H),
        "v_proj": v,
        "q_norm": plan.q_norm,
        "k_norm": plan.k_norm,
        "q_rope": plan.q_rope,
        "k_rope": plan.k_rope,
        "scores": plan.scores,
        "masked_scores": np.where(visible(plan.scores.shape), plan.scores, -np.inf),
        "probs": probs,
        "heads": heads,
        "output": affine(heads.reshape(B, T, N * H), "o_proj"),
    }
    gradients = {
        "d_heads": d_heads,
        "d_probs": product(d_heads.swapaxes(1, 2), v_BNSH.swapaxes(2, 3)),
        "d_v_proj": d_v,
        "d_hidden_states": product(d_v.reshape(B, T, K * H), w_v),
        "d_v_proj.weight": product(d_v.reshape(B * T, -1).T, x.reshape(B * T, D)),
        "d_o_proj.weight": product(d_y.reshape(B * T, D).T, heads.reshape(B * T, -1)),
    }
    if config.attention_bias:
        sums = {"d_v_proj.bias": d_v.reshape(B * T, -1), "d_o_proj.bias": d_y.reshape(B * T, -1)}
        gradients |= {name: product(np.ones((1, B * T)), d)[0] for name, d in sums.items()}
    shapes = {name: value.shape for name, value in stages.items()} | weight_shapes(config)
    none = [name for name in whole(config) if name.startswith("d_") and name not in gradients]
    # p (dp − δ) = 0, and all that is computed from it
    return stages | gradients | {name: np.zeros(shapes[name.removeprefix("d_")], np.float32) for name in none}


def _asked(probs: Array, K: int) -> Array:
    """[B,N,T,S] -> [B,K,S,G·T]: which queries of its group attend to a key."""
    B, _, _, S = probs.shape
    return probs.reshape(B, K, -1, S).swapaxes(2, 3)


def _by_key(x: Array, K: int) -> Array:
    """[B,T,N,H] -> [B,K,G·T,H]."""
    B, _, _, H = x.shape
    return x.swapaxes(1, 2).reshape(B, K, -1, H)


def _allowance(config: AttentionConfig) -> dict[str, float]:
    """What is not exact, in units of an entry's largest magnitude."""
    H = config.head_dim
    allowed: dict[str, float] = {}
    if not _exact_scale(H):  # the score is rounded; 16 u, so that a query may be scaled before the product
        allowed |= dict.fromkeys(("scores", "masked_scores"), 16 * U)
    if np.float32(H) * np.float32(1 / H) != 1:  # a mean may be a sum times 1/H
        allowed |= dict.fromkeys(("q_norm", "k_norm", "q_rope", "k_rope"), 4 * U)
        allowed |= dict.fromkeys(("scores", "masked_scores"), 24 * U)
    return allowed


def _fused(
    expected: dict[str, Array], weights: dict[str, Array], x: Array, d_y: Array, turns: Array, config: AttentionConfig
) -> dict[str, float]:
    """How far a kernel that keeps no probabilities may be off, in units of an entry's largest magnitude.

    It divides by Σ e^s at the end, where one that takes e^0 for 1 − 2^(−24), as XLA does, rounds: the heads, and once
    more for each tile of keys. Its δ = Σ dO ⊙ O is then not quite dO · v, and what should be 0 is small times keys and
    queries. Going backward it makes p = e^(s − log Σ e^s) anew, where s, large, may be rounded a few times.
    """
    _, T, N, H = expected["heads"].shape
    K, U_H = config.num_key_value_heads, U * (2 * T + 2 * H + 8)
    p, a = expected["probs"], {name: np.abs(value) for name, value in (expected | weights).items()}
    x, d_y = np.abs(x), np.abs(d_y).reshape(len(x), -1)
    late, b_o = U * (2 * T + 4), a.get("o_proj.bias", 0)
    terms = int((weights["o_proj.weight"] != 0).sum(axis=1).max()) + config.attention_bias
    again = 4 * U if _exact_scale(H) else math.expm1(4 * U * a["scores"][p == 1].max())

    delta = p * (U_H * (a["d_heads"] * a["heads"]).sum(axis=-1)).swapaxes(1, 2)[..., None] * 1.01 / math.sqrt(H)
    k_BNSH = np.repeat(a["k_rope"], N // K, axis=2).swapaxes(1, 2)
    d_rope = {
        "q": (delta @ k_BNSH).swapaxes(1, 2),
        "k": (_asked(delta, K) @ _by_key(a["q_rope"], K)).swapaxes(1, 2),
    }
    heads = a["heads"].reshape(len(x), -1)
    d_v = (_asked(p, K) @ _by_key(a["d_heads"], K)).swapaxes(1, 2).reshape(len(x), -1) * (again + len(x) * U)
    worst = {
        "heads": late * a["heads"],
        "output": (late + terms * U) * (heads @ a["o_proj.weight"].T + b_o).reshape(expected["output"].shape),
        "d_o_proj.weight": (late + len(x) * U) * (d_y.T @ heads),
        "d_v_proj": d_v,
        "d_v_proj.weight": d_v.T @ x,
        "d_v_proj.bias": d_v.sum(axis=0),
        "d_hidden_states": d_v @ a["v_proj.weight"],
    }
    for path, d in d_rope.items():
        d_norm = np.abs(_rotate(d, -turns % 4))
        g = a[f"{path}_norm.weight"] * d_norm
        d_proj = ((g + g.mean(axis=-1, keepdims=True)) / a[f"{path}_proj"]).reshape(len(x), -1)
        worst |= {f"d_{path}_rope": d, f"d_{path}_norm": d_norm, f"d_{path}_proj": d_proj}
        worst |= {f"d_{path}_norm.weight": d_norm.sum(axis=(0, 1, 2)), f"d_{path}_proj.weight": d_proj.T @ x}
        worst[f"d_{path}_proj.bias"] = d_proj.sum(axis=0)
        worst["d_hidden_states"] = worst["d_hidden_states"] + d_proj @ a[f"{path}_proj.weight"]
    return {name: float(value.max() / _size(expected[name])) for name, value in worst.items() if name in expected}


def _exact_scale(H: int) -> bool:
    """Whether 1/√H is a power of two."""
    return math.frexp(H**-0.5)[0] == 0.5


def product(a: Array, b: Array) -> Array:
    """a @ b in float64, proved to be exact in float32 in whatever order it is summed; else ValueError."""
    if b.ndim > 2:
        return _proved(a, b)
    rows = a.reshape(-1, a.shape[-1])
    result = np.zeros((len(rows), b.shape[1]))
    i, j, k = rows.any(axis=1), rows.any(axis=0) & b.any(axis=1), b.any(axis=0)  # what is 0 adds nothing
    result[np.ix_(i, k)] = _proved(rows[np.ix_(i, j)], b[np.ix_(j, k)])
    return result.reshape(*a.shape[:-1], -1)


def _proved(a: Array, b: Array) -> Array:
    """A partial sum is a multiple of every power of two that divides all terms, and is at most Σ|terms|: it is exact in
    float32 if that is 2^24 of them or fewer. For integers a bound on Σ|terms| will do. Else the largest such power is
    found for each row and column, from below: 1/power is a maximum, and a norm of order 16 is not less.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    whole = (np.rint(a) == a).all() and (np.rint(b) == b).all()
    if not whole or np.abs(a).sum(axis=-1).max(initial=0) * max(b.max(initial=0), -b.min(initial=0)) > 2**24:
        total, finest = np.abs(a) @ np.abs(b), (_power(a) ** -16.0 @ _power(b) ** -16.0) ** (1 / 16)
        if (total * finest > 2**24).any():
            raise ValueError("a sum of this probe would round")
    return a @ b


def _power(x: Array) -> Array:
    """The largest power of two that divides each entry; of 0, infinity."""
    mantissa, exponent = np.frexp(x)
    whole = (mantissa * 2.0**53).astype(np.int64)
    return np.where(x == 0, np.inf, np.ldexp((whole & -whole).astype(float), exponent - 53))
