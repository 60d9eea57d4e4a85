"""All adapted parameters of a network in one buffer, so that a pass over them is a pass over memory and not over tensors.

A buffer holds the parameters one after the other; convolution weights lie in it in channels-last order, if asked for. The
networks' parameters become views of the buffers: same names, same shapes, always current.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in a flat buffer."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    size: int
    channels_last: bool = True

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], channels_last: bool = True) -> "Layout":
        """The layout of these parameters, in their order."""
        shapes = tuple(value.shape for value in parameters.values())
        return cls(tuple(parameters), shapes, sum(shape.numel() for shape in shapes), channels_last)

    def fits(self, parameters: Mapping[str, Tensor]) -> bool:
        """True if these parameters have the names and shapes of the layout, and perhaps others besides."""
        pairs = zip(self.names, self.shapes, strict=True)
        return bool(self.names) and all(name in parameters and parameters[name].shape == shape for name, shape in pairs)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter as a view of the buffer."""
        out = {}
        pieces = flat.split_with_sizes([shape.numel() for shape in self.shapes])
        for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True):
            if len(shape) == 4 and self.channels_last:
                out[name] = piece.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)
            else:
                out[name] = piece.view(shape)
        return out

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """A new buffer with these values."""
        like = values[self.names[0]]
        flat = torch.empty(self.size, device=like.device, dtype=like.dtype)
        for name, view in self.views(flat).items():
            view.copy_(values[name])
        return flat

    def adopt(self, network: nn.Module) -> Tensor:
        """Move a network's parameters into a new buffer and let them be views of it. Returns the buffer."""
        parameters = dict(network.named_parameters())
        flat = self.pack({name: parameters[name].detach() for name in self.names})
        for name, view in self.views(flat).items():
            parameters[name].data = view
        return flat
