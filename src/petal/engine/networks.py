"""Networks in the form in which they run fast: channels-last, convolutions and linear layers in low precision."""

from collections.abc import Callable
from copy import copy, deepcopy

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from petal.engine.flat import Layout


def matrix_weights(network: nn.Module) -> set[str]:
    """Names of the weights that matrix units multiply by: those of convolutions and linear layers."""
    return {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, layer in network.named_modules()
        if isinstance(layer, (_ConvNd, nn.Linear))
    }


def low_precision(network: nn.Module, layout: Layout, low: Tensor) -> nn.Module:
    """The same network with its matrix weights as views of the low-precision buffer; all else is shared with it.

    Meant to run under autocast, which then has no weights left to convert. Normalisation keeps its float32 parameters.
    """
    views = layout.views(low)
    matrices = matrix_weights(network)
    memo: dict[int, object] = {}
    for name, parameter in network.named_parameters():
        memo[id(parameter)] = nn.Parameter(views[name], requires_grad=False) if name in matrices else parameter
    for buffer in network.buffers():
        memo[id(buffer)] = buffer
    return deepcopy(network, memo)


class StoredScale(nn.BatchNorm2d):
    """A batch norm by the statistics of the batch, in a form that gets a short loop from the compiler on a CPU.

    Left to itself it computes 1 / sqrt(variance) anew for every pixel. The result of a reduction is stored instead: here
    that of a maximum over two copies.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The normalised batch."""
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        scale = torch.rsqrt(var + self.eps) * self.weight
        both = torch.stack([scale, self.bias - mean * scale])
        scale, shift = both.expand(2, *both.shape).amax(0)[..., None, None].unbind()
        return x * scale + shift


def with_stored_scales(network: nn.Module) -> nn.Module:
    """The same network, to be compiled for predictions on a CPU; parameters and buffers are shared with it."""
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    for layer in network.modules():
        if type(layer) is nn.BatchNorm2d and layer.affine and layer.running_mean is None:
            fast = copy(layer)
            fast.__class__ = StoredScale
            memo[id(layer)] = fast
    return deepcopy(network, memo)


def prefers_channels_last(network: nn.Module, device: torch.device) -> bool:
    """Whether to lay images out channels-last. On a CPU torch's GroupNorm can crash in its backward pass so laid out."""
    return device.type != "cpu" or not any(isinstance(layer, nn.GroupNorm) for layer in network.modules())


def image_buffer(x: Tensor, channels_last: bool) -> Tensor:
    """An empty batch like `x`, with images in channels-last order if asked for."""
    if channels_last and x.dim() == 4:
        return torch.empty_like(x, memory_format=torch.channels_last)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def logit_gradient(logits: Tensor, objective: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, its gradient by the logits scaled to about one, and what undoes the scale.

    The scale is a power of two, chosen on the device from the gradient itself, so that float16 neither underflows while
    teacher and student agree nor overflows when they do not.
    """
    leaf = logits.detach().requires_grad_()
    loss = objective(leaf)
    (grad,) = torch.autograd.grad(loss, leaf)
    with torch.no_grad():
        exponent = torch.floor(-torch.log2(grad.abs().amax().clamp(min=2.0**-40)))
        scale = torch.exp2(torch.nan_to_num(exponent, nan=0.0, posinf=0.0, neginf=0.0))
        return loss.detach(), grad * scale, (1 / scale).reshape(1)
