"""The copy of a network that a method works on, normalised as the method asks for."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from petal.errors import InputError
from petal.norm.layers import batch_norms, check_values, replaced, unwrapped
from petal.norm.moving import share_switch


def network_copy(
    model: nn.Module, batch_statistics: bool, norm: Callable[[_BatchNorm], nn.Module] | None = None
) -> nn.Module:
    """A copy of the user's network for a method to work on: evaluation mode, so dropout and stochastic depth are off.

    With `batch_statistics`, every batch norm normalises by the statistics of the batch it sees, in every mode, and its
    running statistics are dropped. Otherwise `norm`, if given, makes the layer that takes the place of each batch norm.
    """
    with torch.inference_mode(False):
        network = deepcopy(unwrapped(model)).eval().requires_grad_(False)
        if any(tensor.is_inference() for tensor in network.state_dict().values()):
            raise InputError("the network holds inference tensors: build or load it outside torch.inference_mode()")
        if batch_statistics:
            for name, layer in batch_norms(network):
                _use_batch_statistics(name, layer)
        elif norm is not None:
            network = replaced(network, norm)
            share_switch(network)
        for module in network.modules():
            if isinstance(module, nn.GroupNorm):
                module.register_forward_pre_hook(_in_rows)
    return network


def _in_rows(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """On a CPU torch's GroupNorm crashes in its backward pass where images lie channels-last and need no gradient."""
    risky = bool(inputs) and inputs[0].device.type == "cpu" and not (inputs[0].requires_grad or inputs[0].is_contiguous())
    return (inputs[0].contiguous(), *inputs[1:]) if risky else None


def _use_batch_statistics(name: str, layer: _BatchNorm) -> None:
    if layer.running_mean is not None and layer.running_var is not None:
        kept = (layer.running_mean.clone(), layer.running_var.clone())
        object.__setattr__(layer, "source_statistics", kept)  # for `RecentNorm`; not part of the network's state
    layer.track_running_stats = False
    layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    guarded_layer(name, layer)


def guarded_layer(name: str, layer: _BatchNorm) -> _BatchNorm:
    """The layer, which by its name now refuses a batch of one value a channel."""
    layer.register_forward_pre_hook(partial(_check_values, name))
    return layer


def _check_values(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if inputs:          # and not called as layer(input=x)
        check_values(inputs[0], name)


OURS = (_in_rows, _check_values)


def plain_copy(network: nn.Module, running: bool) -> nn.Module:
    """A copy without what `network_copy` added; with `running`, batch norms have running statistics again, the source's."""
    network = deepcopy(network).requires_grad_(True)
    for module in network.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "func", hook) in OURS:
                del module._forward_pre_hooks[key]
        kept = vars(module).get("source_statistics")
        if running and kept is not None and isinstance(module, _BatchNorm):
            module.track_running_stats = True
            module.running_mean, module.running_var = (statistic.clone() for statistic in kept)
            module.num_batches_tracked = torch.zeros((), dtype=torch.long, device=kept[0].device)
        vars(module).pop("source_statistics", None)
    return network


def shared_copy(network: nn.Module, others: Mapping[int, object]) -> nn.Module:
    """The same network on the same tensors, but for those tensors or layers that `others` replaces, by their `id`."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    return deepcopy(network, shared | dict(others))
