"""The reference: Hugging Face's own `Qwen3Attention`, one layer alone, forward and backward, recorded.

Nothing is recomputed here: a `TorchFunctionMode` sees what the layer's code passes through `add`, `mul`, `matmul` and
`softmax`, and forward hooks see what its modules return. The output is bit-identical with and without it.

The same adapter runs on transformers 4.51 (the first with Qwen3) to the pinned release.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from impls.spec import STAGES, AttentionConfig, steps, weight_shapes
from impls.torch_attention import array, tensor

Array = np.ndarray
PER_HEAD = {stage.name for stage in STAGES if stage.shape in ("BTNH", "BSKH")}
_KNOWN = inspect.signature(Qwen3Attention.forward).parameters.keys()
PAST = next(name for name in ("cache", "past_key_values", "past_key_value") if name in _KNOWN)
"""What the layer calls its key/value cache: the releases differ."""
CASTS_TO_FLOAT32 = {"eager": 3, "sdpa": 2}
"""Its two RMSNorms cast to float32, and its eager softmax: these are undone to run the layer in true float64."""


def run(
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    d_output: Array,
    config: AttentionConfig,
    attn_implementation: str = "eager",
    device: str = "cpu",
    masked: bool = True,
) -> dict[str, Array]:
    """The layer's trace: stages, their gradients, and the gradients of inputs and weights.

    Args: arrays of one dtype; `attn_implementation` "eager" or "sdpa" (whose fused kernel shows no
    scores, masked_scores and probs, and is causal by itself where it is not `masked`, as the model calls it without
    padding). Shapes as in `impls.spec`; weights and their gradients are [out, in].
    """
    layer = attention(weights, config, attn_implementation).to(device)
    x, cos, sin, d_y = (
        tensor(value, device) for value in (inputs["hidden_states"], inputs["cos"], inputs["sin"], d_output)
    )
    recorder = Recorder(config)
    with recorder.attached(layer), recorder:
        x.requires_grad_()
        output = call(layer, x, cos, sin, inputs.get("attention_mask")) if masked else bare(layer, x, cos, sin)
    if x.dtype == torch.float64 and recorder.casts != CASTS_TO_FLOAT32[attn_implementation]:
        raise RuntimeError(
            f"transformers' {attn_implementation} layer cast to float32 {recorder.casts} times, not "
            f"{CASTS_TO_FLOAT32[attn_implementation]}: its float64 run cannot be trusted with this release"
        )
    output.backward(d_y)

    trace = {"output": output.detach()}
    for name, value in recorder.stages.items():
        assert value.grad is not None
        trace |= {name: recorder.by_token(name, value.detach()), f"d_{name}": recorder.by_token(name, value.grad)}
    trace["d_hidden_states"] = x.grad
    trace |= {f"d_{name}": layer.get_parameter(name).grad for name in weight_shapes(config)}
    return {name: array(value) for name, value in trace.items()}


def decode(
    weights: Mapping[str, Array], inputs: Mapping[str, Array], config: AttentionConfig, device: str = "cpu"
) -> Iterator[dict[str, Array]]:
    """The stages of each step of the eager layer with its own `DynamicCache`: half of the tokens, then one by one."""
    layer = attention(weights, config, "eager").to(device)
    x, cos, sin = (tensor(inputs[name], device) for name in ("hidden_states", "cos", "sin"))
    cache, T = DynamicCache(), x.shape[1]
    given = inputs.get("attention_mask")
    mask = causal_mask(x) if given is None else tensor(given, device)
    for new in steps(T):
        recorder = Recorder(config)
        with recorder.attached(layer), recorder:
            tables = cos[:, new], sin[:, new]
            output = layer(
                hidden_states=x[:, new],
                position_embeddings=tables,
                attention_mask=mask[:, :, new, : new.stop],
                **{PAST: cache},
                cache_position=torch.arange(new.start, new.stop),
            )[0]
        stages = {**recorder.stages, "output": output}
        del stages["scores"]  # of the square's other rows there are none
        yield {name: array(recorder.by_token(name, value.detach())) for name, value in stages.items()}


def forward(
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    config: AttentionConfig,
    pick: Callable[[str, Any], Mapping[str, Any]],
    device: str = "cpu",
) -> dict[str, Array]:
    """The layer's forward alone under sdpa, causal by itself, as the model calls it without padding.

    `pick(name, value)` says what is kept of a stage; nothing else is held.
    """
    layer = attention(weights, config, "sdpa").to(device)
    x, cos, sin = (tensor(inputs[name], device) for name in ("hidden_states", "cos", "sin"))
    recorder = Picking(config, pick)
    with torch.no_grad(), recorder.attached(layer), recorder:
        recorder.keep("output", bare(layer, x, cos, sin))
    if x.dtype == torch.float64 and recorder.casts != CASTS_TO_FLOAT32["sdpa"]:
        raise RuntimeError(f"transformers' sdpa layer cast to float32 {recorder.casts} times: no float64 run")
    return recorder.kept


def causal_mask(x: torch.Tensor) -> torch.Tensor:
    """3.10 as the model passes it for tokens [B,T,D]: [1,1,T,S], additive, with the most negative finite number."""
    T = x.shape[1]
    return torch.full((T, T), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)[None, None]


def call(
    layer: torch.nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention_mask: Array | None = None
) -> torch.Tensor:
    """The layer's forward as the model calls it: [B,T,D] -> [B,T,D]; the mask [B,1,T,S] where a batch is padded.

    Without a mask the eager layer would not be causal, and it would add a boolean one.
    """
    mask = causal_mask(x) if attention_mask is None else tensor(attention_mask, x.device.type)
    output = layer(hidden_states=x, position_embeddings=(cos, sin), attention_mask=mask)[0]
    return output


def bare(layer: torch.nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The forward of the layer under sdpa without a mask: [B,T,D] -> [B,T,D]."""
    output = layer(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)[0]
    return output


def attention(weights: Mapping[str, Array], config: AttentionConfig, attn_implementation: str) -> torch.nn.Module:
    """`Qwen3Attention` with these weights, in their dtype; no model is built and nothing is initialised in vain."""
    with torch.device("meta"):
        layer = Qwen3Attention(hugging_face_config(config, attn_implementation), layer_idx=0)
    layer.load_state_dict({name: tensor(weights[name], "cpu") for name in weight_shapes(config)}, assign=True)
    return layer.requires_grad_().eval()


def hugging_face_config(config: AttentionConfig, attn_implementation: str = "eager", **more: Any) -> Qwen3Config:
    """A one-layer `Qwen3Config` with this layer's sizes."""
    return Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        num_hidden_layers=1,
        attention_bias=config.attention_bias,
        attn_implementation=attn_implementation,
        **more,
    )


def rope_tables(config: AttentionConfig, theta: float, batch: int, seq_len: int) -> dict[str, Array]:
    """cos and sin [B,T,H] in float32 as the model's own rotary embedding makes them, to hold the case's tables to."""
    rotary = Qwen3RotaryEmbedding(hugging_face_config(config, rope_theta=theta))
    positions = torch.arange(seq_len)[None].expand(batch, -1)
    cos, sin = rotary(torch.zeros(1), positions)
    return {"cos": cos.numpy(), "sin": sin.numpy()}


class Recorder(TorchFunctionMode):
    """Keeps the layer's own intermediate values, with their gradients, and makes a float64 run truly float64."""

    def __init__(self, config: AttentionConfig):
        super().__init__()
        self.config = config
        self.stages: dict[str, torch.Tensor] = {}
        self.casts = 0
        self.multiplied = False  # whether Q K^T was reached

    def attached(self, layer: torch.nn.Module) -> "_Hooks":
        """Within this context the layer's modules report what they return."""
        return _Hooks(
            [
                getattr(layer, name).register_forward_hook(lambda _m, _i, output, name=name: self.keep(name, output))
                for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
            ]
            + [layer.o_proj.register_forward_pre_hook(lambda _m, inputs: self.keep("heads", inputs[0]))]
        )

    def keep(self, name: str, value: torch.Tensor) -> None:
        """Record a value, and have autograd keep its gradient."""
        value.retain_grad()
        self.stages[name] = value

    def by_token(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The layer's layout [B,T,N·H] or [B,N,T,H] as the stages' own, [B,T,N,H]."""
        if name in ("q_rope", "k_rope"):
            return value.transpose(1, 2)
        return value.unflatten(-1, (-1, self.config.head_dim)) if name in PER_HEAD and value.ndim == 3 else value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        operation = getattr(func, "__name__", "").strip("_")
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if operation == "to" and torch.float32 in args:
                self.casts += 1
                return args[0]
            if operation == "softmax" and kwargs.get("dtype") == torch.float32:
                self.casts += 1
                kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.ndim == 4:
            self._recognise(operation, result)
        return result

    def _recognise(self, operation: str, result: torch.Tensor) -> None:
        """Name a result by its place in the layer's code: two rotated sums; Q K^T, its scaling, its mask, and what the
        softmax, of float32, becomes in the layer's dtype."""
        if operation in ("matmul", "scaled_dot_product_attention"):
            self.multiplied = True
        elif not self.multiplied and operation == "add" and result.shape[-1] == self.config.head_dim:
            self.keep("k_rope" if "q_rope" in self.stages else "q_rope", result)
        elif self.multiplied and operation in ("mul", "add", "to"):
            name = {"mul": "scores", "add": "masked_scores", "to": "probs"}[operation]
            if name not in self.stages:
                self.keep(name, result)


class Picking(Recorder):
    """A recorder of a forward alone that keeps, as arrays, what `pick` takes of each stage."""

    def __init__(self, config: AttentionConfig, pick: Callable[[str, Any], Mapping[str, Any]]):
        super().__init__(config)
        self.pick, self.kept = pick, dict[str, Array]()

    def keep(self, name: str, value: torch.Tensor) -> None:
        """Take what is wanted of a value, and hold no more of it."""
        self.stages[name] = value.new_empty(0)
        self.kept |= {key: array(each) for key, each in self.pick(name, self.by_token(name, value)).items()}


class _Hooks:
    """Removes forward hooks when the context ends."""

    def __init__(self, handles: list[Any]):
        self.handles = handles

    def __enter__(self) -> "_Hooks":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
