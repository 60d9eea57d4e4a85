"""A small convolutional network for demonstrations and tests, with batch norm or with group norm."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from petal.errors import ModelError
from petal.models.initialize import initialize_


class SmallNet(nn.Module):
    """Four 3x3 convolutions, each with a norm and a relu, for small images in [0, 1] (63,000 parameters).

    `norm="group"` gives the same network without batch statistics; `width` is the number of channels of the first
    layer, a multiple of 8.
    """

    def __init__(self, classes: int = 10, norm: Literal["batch", "group"] = "batch", width: int = 16) -> None:
        super().__init__()
        if norm not in ("batch", "group") or width < 8 or width % 8:
            raise ModelError(f"small: norm is 'batch' or 'group', width a multiple of 8; not {norm!r} and {width}")

        def layer(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(8, outputs),
                nn.ReLU(),
            )

        self.layers = nn.Sequential(
            layer(3, width, 1),
            layer(width, 2 * width, 2),
            layer(2 * width, 4 * width, 2),
            layer(4 * width, 4 * width, 2),
        )
        self.fc = nn.Linear(4 * 4 * width, classes)
        initialize_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[N, 3, H, W]` to logits `[N, classes]`."""
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(self.layers(x), 2).flatten(1))  # keeps where in the image
        return logits
