"""Which layers normalise, what they hold, and how others are put in their place."""

from collections.abc import Callable
from copy import deepcopy

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from petal.errors import ConfigError, InputError

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


def source_statistics(layer: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Running mean and variance of the source, also if the layer has since been put to batch statistics."""
    if layer.running_mean is not None and layer.running_var is not None:
        return layer.running_mean, layer.running_var
    found = getattr(layer, "source_statistics", None)
    if found is None:
        raise ConfigError("the network's batch norm keeps no running statistics: there is nothing to mix others with")
    mean, var = found
    return mean, var


def replaced(network: nn.Module, make: Callable[[_BatchNorm], nn.Module]) -> nn.Module:
    """The same network, on the same parameters, with every batch norm replaced by what `make` makes of it."""
    memo: dict[int, object] = {id(p): p for p in network.parameters()}
    for _, layer in batch_norms(network):
        memo[id(layer)] = make(layer).train(layer.training)
    return deepcopy(network, memo)


def check_values(x: Tensor, name: str = "") -> None:
    """An InputError unless a batch norm sees two values a channel or more."""
    if x.numel() // max(x.shape[1], 1) < 2:
        which = f"batch norm {name!r}" if name else "a batch norm"
        raise InputError(
            f"{which} sees one value a channel (its input is {list(x.shape)}) and has no statistics to "
            "normalise by: give two images or more at a time, or put SmallBatch around the method"
        )
