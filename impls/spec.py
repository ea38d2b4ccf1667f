"""The contract that every implementation keeps: dimension key, configuration, weights, stages.

Dimension key, used in names (`q_BTNH`), shapes and docstrings:

    B  batch                    D  hidden size (d_model)         N  query heads (h)
    T  query positions          H  head size (d_k), not D / N    K  key/value heads
    S  key positions                                             G  query heads per key/value head, N / K
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class AttentionConfig:
    """What changes the mathematics of the layer, under Hugging Face's field names; its only default is Hugging Face's.

    RoPE's theta is not here: a layer is given the tables cos and sin.
    Raises ValueError where no layer has these sizes.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for field in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}; it must be a whole number of at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding turns pairs, so it must be even")
        if not isinstance(self.rms_norm_eps, int | float) or not 0 <= self.rms_norm_eps < 1:  # also refuses NaN
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps!r}; it must be in [0, 1)")
        if not isinstance(self.attention_bias, bool):
            raise ValueError(f"attention_bias is {self.attention_bias!r}; it must be true or false")
        # a NumPy scalar would turn a float32 layer into a float64 one
        object.__setattr__(self, "rms_norm_eps", float(self.rms_norm_eps))

    @property
    def num_key_value_groups(self) -> int:
        """G, the query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def sizes(self) -> dict[str, int]:
        """The letters of the dimension key that the configuration fixes; NH and KH are rows of a weight."""
        N, K, H = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        return {"D": self.hidden_size, "N": N, "K": K, "G": N // K, "H": H, "NH": N * H, "KH": K * H}


WEIGHTS: dict[str, tuple[str, ...]] = {
    "q_proj.weight": ("NH", "D"),
    "k_proj.weight": ("KH", "D"),
    "v_proj.weight": ("KH", "D"),
    "q_norm.weight": ("H",),
    "k_norm.weight": ("H",),
    "o_proj.weight": ("D", "NH"),
}
"""Hugging Face's names, relative to `self_attn`, and its layout: a linear map is stored [out, in]."""

BIASES: dict[str, tuple[str, ...]] = {
    "q_proj.bias": ("NH",),
    "k_proj.bias": ("KH",),
    "v_proj.bias": ("KH",),
    "o_proj.bias": ("D",),
}
"""What the projections add, where `attention_bias` says so: y = x W^T + b."""


MESH: dict[str, str] = {
    "B": "batch",
    "T": "sequence",
    "S": "sequence",
    "N": "heads",
    "K": "heads",
    "NH": "heads",
    "KH": "heads",
}
"""Where a layer is spread over a mesh of devices: the axis of the mesh that cuts each letter of the dimension key. So
W_Q, W_K and W_V are cut by their columns, W_O by its rows; D and H are whole everywhere."""


def cut(letters: Iterable[str]) -> tuple[str | None, ...]:
    """The axis that cuts each of an array's letters, or None. Each axis cuts one: beside T, S is whole."""
    axes = [MESH.get(letter) for letter in letters]
    return tuple(None if axis in axes[:i] else axis for i, axis in enumerate(axes))


def weight_shapes(config: AttentionConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each weight, and of each bias if it has them, of a layer with this configuration."""
    sizes, letters = config.sizes(), WEIGHTS | (BIASES if config.attention_bias else {})
    return {name: tuple(sizes[letter] for letter in key) for name, key in letters.items()}


class Stage(NamedTuple):
    """One value on the way from hidden states to output: its equation, shape and what it is computed from."""

    name: str
    equation: str
    shape: str  # letters of the dimension key
    inputs: tuple[str, ...]


STAGES: tuple[Stage, ...] = (
    Stage("q_proj", "3.1", "BTNH", ("hidden_states", "q_proj.weight")),
    Stage("k_proj", "3.1", "BSKH", ("hidden_states", "k_proj.weight")),
    Stage("v_proj", "3.1", "BSKH", ("hidden_states", "v_proj.weight")),
    Stage("q_norm", "RMSNorm", "BTNH", ("q_proj", "q_norm.weight")),
    Stage("k_norm", "RMSNorm", "BSKH", ("k_proj", "k_norm.weight")),
    Stage("q_rope", "RoPE", "BTNH", ("q_norm", "cos", "sin")),
    Stage("k_rope", "RoPE", "BSKH", ("k_norm", "cos", "sin")),
    Stage("scores", "3.5", "BNTS", ("q_rope", "k_rope")),
    Stage("masked_scores", "3.10", "BNTS", ("scores",)),
    Stage("probs", "3.6", "BNTS", ("masked_scores",)),
    Stage("heads", "3.11", "BTNH", ("probs", "v_proj")),
    Stage("output", "3.12", "BTD", ("heads", "o_proj.weight")),
)
"""In the order of the dataflow. RMSNorm and RoPE are Qwen3's, between 3.1 and 3.2; they have no number."""

GRADIENTS: dict[str, str] = {
    "d_heads": "3.12",
    "d_probs": "3.11",
    "d_v_proj": "3.11",
    "d_masked_scores": "3.9",
    "d_scores": "3.10",
    "d_q_rope": "3.5",
    "d_k_rope": "3.5",
    "d_q_norm": "RoPE",
    "d_k_norm": "RoPE",
    "d_q_proj": "RMSNorm",
    "d_k_proj": "RMSNorm",
    "d_hidden_states": "3.1",
    "d_q_proj.weight": "3.1",
    "d_k_proj.weight": "3.1",
    "d_v_proj.weight": "3.1",
    "d_q_norm.weight": "RMSNorm",
    "d_k_norm.weight": "RMSNorm",
    "d_o_proj.weight": "3.12",
}
"""Every gradient of a trace, in the order of the backward, and the equation that it undoes; `d_output` is given."""

BIAS_GRADIENTS: dict[str, str] = {
    "d_q_proj.bias": "3.1",
    "d_k_proj.bias": "3.1",
    "d_v_proj.bias": "3.1",
    "d_o_proj.bias": "3.12",
}
"""Those that come after them where the projections have biases."""


def steps(tokens: int) -> Iterator[slice]:
    """Which tokens come together where keys and values are cached: the first half, the prompt, then each by itself."""
    prompt = max(1, tokens // 2)
    yield slice(0, prompt)
    yield from (slice(t, t + 1) for t in range(prompt, tokens))


Observe = Callable[[str, Any], Any]
"""`observe(name, value) -> value`: sees every stage as it arises, and may replace it (noise, rounding, taps)."""


def keep(name: str, value: Any) -> Any:
    """The default `observe`: look at nothing, change nothing."""
    return value
