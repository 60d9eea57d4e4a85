"""Normalisation layers: batch-statistics mode and the choice of parameters, in one place for every method."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from petal.errors import InputError

AFFINE_LAYERS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own network inside torch.compile, DataParallel or DistributedDataParallel, with its own names.

    >>> [name for name, _ in unwrapped(nn.DataParallel(nn.Linear(1, 1))).named_parameters()]
    ['weight', 'bias']
    """
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)  # of torch.compile
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def batch_norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """Name and layer of every batch normalisation (1d, 2d, 3d, synchronised)."""
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]


def affine_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Scale and shift of every BatchNorm, GroupNorm and LayerNorm: what TENT and pseudo-labelling adapt.

    >>> list(affine_parameters(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
    ['1.weight', '1.bias']
    """
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, layer in model.named_modules()
        if isinstance(layer, AFFINE_LAYERS)
        for name, parameter in layer.named_parameters(recurse=False)
    }


def network_copy(model: nn.Module, batch_statistics: bool) -> nn.Module:
    """A copy of the user's network for a method to work on: evaluation mode, so dropout and stochastic depth are off.

    With `batch_statistics`, every batch norm normalises by the statistics of the batch it sees, in every mode, and its
    running statistics are dropped.
    """
    with torch.inference_mode(False):
        network = deepcopy(unwrapped(model)).eval().requires_grad_(False)
        if any(tensor.is_inference() for tensor in network.state_dict().values()):
            raise InputError("the network holds inference tensors: build or load it outside torch.inference_mode()")
        if batch_statistics:
            for name, layer in batch_norms(network):
                _use_batch_statistics(name, layer)
    return network


def _use_batch_statistics(name: str, layer: _BatchNorm) -> None:
    layer.track_running_stats = False
    layer.running_mean = layer.running_var = layer.num_batches_tracked = None

    def check(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not inputs:  # called as layer(input=x)
            return
        x = inputs[0]
        if x.numel() // max(x.shape[1], 1) < 2:
            raise InputError(
                f"batch norm {name!r} sees one value a channel (its input is {list(x.shape)}) and has no statistics to "
                "normalise by: give two images or more at a time"
            )

    layer.register_forward_pre_hook(check)
