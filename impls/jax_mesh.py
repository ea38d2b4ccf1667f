"""Attention over a mesh of devices in JAX. Read it beside `jax_attention.py`, whose equations these are, unchanged.

Each device has some heads of some tokens of some sequences; which axis of the mesh cuts which letter, `MESH` says in
`spec.py`. Devices talk twice: 3.2 gathers the keys and values of all tokens, since a query sees them all, and 3.12 adds
up what the heads of each device give. What the backward exchanges follows: JAX transposes both.

B batch   T query position   S key position   D hidden size   N query heads   K key/value heads   G = N/K   H head size
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from impls import jax_attention
from impls.jax_attention import differentiate, mix, plus, scores, share, softmax, tapped
from impls.jax_cache import causal_mask
from impls.spec import BIASES, MESH, STAGES, WEIGHTS, AttentionConfig, Observe, cut, keep

AXES = ("batch", "sequence", "heads")

# ------------------------------------------------------------------------------------------------------------ forward


class Attention(jax_attention.Attention):
    """The layer as one device has it, of its own sequences, tokens and heads: the letters are its own sizes."""

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        cos_BTH: Float[Array, "B T H"],
        sin_BTH: Float[Array, "B T H"],
        mask_B1TS: Float[Array, "B 1 T S"] | None = None,
        observe: Observe = keep,
    ) -> Float[Array, "B T D"]:
        """3.12: MHA(X) = Σ head_h W_O^(h) + b_O: a device sums over its own heads, the all-reduce over all of them."""
        b_D, self.o_bias = self.o_bias, None
        # every device uses them: their gradients are added up, once for Q, K and V together
        x_BTD = jax.lax.pcast(x_BTD, "heads", to="varying")

        def summed(name: str, value: Array) -> Array:
            return observe(name, plus(jax.lax.psum(value, "heads"), b_D) if name == "output" else value)

        return super().__call__(x_BTD, cos_BTH, sin_BTH, mask_B1TS, summed)

    def attend(
        self,
        qr_BTNH: Float[Array, "B T N H"],
        kr_BTKH: Float[Array, "B T K H"],
        v_BTKH: Float[Array, "B T K H"],
        mask_B1TS: Float[Array, "B 1 T S"] | None,
        observe: Observe,
    ) -> Float[Array, "B T N H"]:
        """3.2, 3.11: softmax(Q K^T / √d_k + M) V, of the device's queries and the keys of all tokens."""
        G, start = self.config.num_key_value_groups, jax.lax.axis_index("sequence") * qr_BTNH.shape[1]
        kr_BSKH = jax.lax.all_gather(kr_BTKH, "sequence", axis=1, tiled=True)
        v_BSKH = jax.lax.all_gather(v_BTKH, "sequence", axis=1, tiled=True)
        s_BNTS = observe("scores", scores(qr_BTNH, share(kr_BSKH, G)))  # 3.5
        mask_TS = causal_mask(s_BNTS, start) if mask_B1TS is None else mask_B1TS
        m_BNTS = observe("masked_scores", s_BNTS + mask_TS)  # 3.10
        a_BNTS = observe("probs", softmax(m_BNTS))  # 3.6
        return mix(a_BNTS, share(v_BSKH, G))


def across(mesh: Mesh, config: AttentionConfig, padded: bool = False) -> Callable[..., tuple[Array, dict[str, Array]]]:
    """`tapped` on all devices of a mesh at once: each is given its part of every array, and returns its part."""
    heads = mesh.shape["heads"]
    own = replace(
        config,
        num_attention_heads=config.num_attention_heads // heads,
        num_key_value_heads=config.num_key_value_heads // heads,
    )
    stages = {stage.name: P(*cut(stage.shape)) for stage in STAGES}
    weights = {name: P(*cut(key)) for name, key in (WEIGHTS | (BIASES if config.attention_bias else {})).items()}
    table, mask = P(*cut("BTH")), P(*cut("B1TS")) if padded else None
    return jax.shard_map(
        partial(tapped, config=own, layer=Attention),
        mesh=mesh,
        in_specs=({**weights, "hidden_states": P(*cut("BTD")), **stages}, table, table, mask),
        out_specs=(stages["output"], stages),
    )


# ----------------------------------------------------------------------------------------------------------- backward


def make_mesh(devices: Sequence[jax.Device], batch: int = 1, sequence: int = 1, heads: int = 1) -> Mesh:
    """A mesh of the first batch · sequence · heads of the devices."""
    sizes = (batch, sequence, heads)
    return jax.make_mesh(sizes, AXES, (AxisType.Auto,) * 3, devices=devices[: math.prod(sizes)])


def run(
    weights: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    d_output: Float[np.ndarray, "B T D"],
    config: AttentionConfig,
    mesh: Mesh,
) -> dict[str, np.ndarray]:
    """d_output [B,T,D]  ->  every stage, and the gradient of every stage, of every weight and of the hidden states.

    Sequences, and tokens at the end, are added until the mesh divides them, and taken off again: nothing sees them.
    """
    B, T, _ = d_output.shape
    own = {"B": slice(B), "T": slice(T), "S": slice(T)}
    shapes = {"hidden_states": "BTD"} | {stage.name: stage.shape for stage in STAGES}
    with jax.enable_x64(True):  # float64 is let in; which dtype it is, the arrays decide
        traced = trace(*place(weights, inputs, d_output, mesh), config, mesh)
        gathered = jax.jit(lambda trace: trace, out_shardings=NamedSharding(mesh, P()))(traced)
        whole = {name: np.asarray(value) for name, value in gathered.items()}
    parts = {name: [own.get(x, slice(None)) for x in shapes.get(name.removeprefix("d_"), "")] for name in whole}
    return {name: value[tuple(parts[name])] for name, value in whole.items()}


def place(
    weights: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], d_output: np.ndarray, mesh: Mesh
) -> tuple[dict[str, Array], Array, Array, Array, Array | None, Array]:
    """What `trace` is given, each device its part of it; sequences and tokens are added until the mesh divides them."""
    more = {axis: -size % mesh.shape[axis] for axis, size in zip(("batch", "sequence"), d_output.shape, strict=False)}

    def put(array: np.ndarray, letters: Iterable[str]) -> Array:
        sharding = NamedSharding(mesh, P(*cut(letters)))
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    def grown(array: np.ndarray, letters: str, value: float = 0) -> Array:
        room = [(0, more.get(MESH.get(letter, ""), 0)) for letter in letters]
        return put(np.pad(array, room, constant_values=value), letters)

    x_BTD, cos_BTH, sin_BTH = (grown(inputs[name], "BTD") for name in ("hidden_states", "cos", "sin"))
    mask = inputs.get("attention_mask")
    mask_B1TS = None if mask is None else grown(mask, "B1TS", jnp.finfo(mask.dtype).min)
    placed = {name: put(weights[name], key) for name, key in (WEIGHTS | BIASES).items() if name in weights}
    return placed, x_BTD, cos_BTH, sin_BTH, mask_B1TS, grown(d_output, "BTD")


@partial(jax.jit, static_argnames=("config", "mesh"))
def trace(
    weights: Mapping[str, Array],
    x_BTD: Float[Array, "B T D"],
    cos_BTH: Float[Array, "B T H"],
    sin_BTH: Float[Array, "B T H"],
    mask_B1TS: Float[Array, "B 1 T S"] | None,
    d_output: Float[Array, "B T D"],
    config: AttentionConfig,
    mesh: Mesh,
) -> dict[str, Array]:
    """What `jax_attention.trace` gives, from all devices of the mesh, in one program."""
    forward = across(mesh, config, mask_B1TS is not None)
    return differentiate(forward, weights, x_BTD, cos_BTH, sin_BTH, mask_B1TS, d_output, config.sizes())


def programs(
    weights: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    d_output: Float[np.ndarray, "B T D"],
    config: AttentionConfig,
    mesh: Mesh,
) -> Iterator[str]:
    """Compiled, as text: the forward; with the gradient of the hidden states; with those of the weights, too."""
    with jax.enable_x64(True):
        given = place(weights, inputs, d_output, mesh)
        wanted = ["output"]
        for more in ([], ["d_hidden_states"], [f"d_{name}" for name in weights]):
            wanted += more
            program = jax.jit(partial(_some, config=config, mesh=mesh, names=tuple(wanted)))
            yield program.lower(*given).compile().as_text()


def _some(*given: Any, config: AttentionConfig, mesh: Mesh, names: Sequence[str]) -> list[Array]:
    """Of what `trace` gives, what is wanted: the compiler leaves out the rest."""
    traced = trace(*given, config, mesh)
    return [traced[name] for name in names]
