"""Attention over several devices in PyTorch: tensor parallel by DTensor. Read it beside `torch_attention.py`.

The equations there are run as they stand, on distributed tensors: DTensor follows the cut through every operation. Each
device has some heads; which letter of a shape is cut, `MESH` says in `spec.py`. Devices talk once, at 3.12, to add up
what the heads of each give; the backward adds up their gradients at the hidden states, and those of the norms' weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from impls import torch_attention
from impls.spec import BIASES, WEIGHTS, AttentionConfig, cut
from impls.torch_attention import array, differentiate, tensor

# ------------------------------------------------------------------------------------------------------------ forward


class Cut(ParallelStyle):
    """How `parallelize_module` treats a module: its weight, and its bias, are cut where `MESH` cuts their letters."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut_parameters(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for kind, value in list(module.named_parameters(recurse=False)):
                letters = (WEIGHTS | BIASES)[f"{self.name}.{kind}"]
                parts = distribute_tensor(value, mesh, placements(letters), src_data_rank=None)
                module.register_parameter(kind, nn.Parameter(parts))

        return distribute_module(module, device_mesh, cut_parameters)


def placements(letters: Iterable[str]) -> list[Placement]:
    """Cut along the letter that the axis `heads` cuts, or whole on every device."""
    axes = cut(letters)
    return [Shard(axes.index("heads")) if "heads" in axes else Replicate()]


def summed(name: str, value: DTensor) -> DTensor:
    """3.12: MHA(X) = Σ head_h W_O^(h): a device sums over its own heads, the all-reduce over all of them."""
    return value.redistribute(placements=[Replicate()]) if name == "output" else value


# ----------------------------------------------------------------------------------------------------------- backward


def run(
    weights: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    d_output: Float[np.ndarray, "B T D"],
    config: AttentionConfig,
    mesh: DeviceMesh,
) -> dict[str, np.ndarray]:
    """d_output [B,T,D]  ->  every stage, and the gradient of every stage, of every weight and of the hidden states."""
    layer, (x_BTD, cos_BTH, sin_BTH, mask_B1TS, d_BTD) = spread(weights, inputs, d_output, config, mesh)
    traced = differentiate(layer, x_BTD, cos_BTH, sin_BTH, mask_B1TS, d_BTD, summed)
    return {name: array(whole(value)) for name, value in traced.items()}


def whole(value: DTensor) -> Tensor:
    """All of a tensor. Where every device holds all of it, that of the first whose copy is another than the rest."""
    full = value.full_tensor().detach().contiguous()
    if not all(placement.is_replicate() for placement in value.placements):
        return full
    copies = [torch.empty_like(full) for _ in range(value.device_mesh.size())]
    distributed.all_gather(copies, full, group=value.device_mesh.get_group())
    return next((copy for copy in copies if not torch.equal(copy.nan_to_num(), full.nan_to_num())), full)


def spread(
    weights: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    d_output: Float[np.ndarray, "B T D"],
    config: AttentionConfig,
    mesh: DeviceMesh,
) -> tuple[torch_attention.Attention, list[Any]]:
    """The layer, of which each device has its part; and what it is given, whole on each, as `run` unpacks it."""
    layer = torch_attention.attention(weights, config, mesh.device_type)
    parallel = parallelize_module(layer, mesh, {name: Cut(name) for name, _ in layer.named_children()})
    given = {
        name: DTensor.from_local(tensor(value, mesh.device_type), mesh, [Replicate()])
        for name, value in {**inputs, "d_output": d_output}.items()
    }
    return parallel, [given.get(name) for name in ("hidden_states", "cos", "sin", "attention_mask", "d_output")]


def passes(
    weights: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    d_output: Float[np.ndarray, "B T D"],
    config: AttentionConfig,
    mesh: DeviceMesh,
) -> Iterator[Sequence[Tensor]]:
    """The output; the gradient of the hidden states; those of the weights: each where a training step wants it."""
    layer, (x_BTD, *given, d_BTD) = spread(weights, inputs, d_output, config, mesh)
    y_BTD = layer(x_BTD.requires_grad_(), *given, summed)
    yield [y_BTD]
    for sources in ([x_BTD], list(layer.parameters())):
        gradients = torch.autograd.grad(torch.sum(y_BTD * d_BTD), sources, retain_graph=True)
        yield [
            gradient.redistribute(placements=source.placements)
            for gradient, source in zip(gradients, sources, strict=True)
        ]
