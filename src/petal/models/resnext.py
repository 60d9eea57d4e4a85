"""ResNeXt for small images (Xie et al., 2017), in the key names of AugMix's and RobustBench's checkpoints."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from petal.errors import ModelError
from petal.models.initialize import initialize_
from petal.models.normalize import Normalize
from petal.models.pixels import NORMALIZED_PIXELS, UNIT_PIXELS


class GroupedBottleneck(nn.Module):
    """1x1 down, grouped 3x3, 1x1 up, plus a shortcut; norms after the convolutions."""

    def __init__(self, inputs: int, planes: int, groups: int, base_width: int, stride: int) -> None:
        super().__init__()
        inner = groups * (planes * base_width // 64)
        outputs = 4 * planes
        self.conv_reduce = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn_reduce = nn.BatchNorm2d(inner)
        self.conv_conv = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(inner)
        self.conv_expand = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn_expand = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """`[N, inputs, H, W]` to `[N, 4 planes, H / stride, W / stride]`."""
        y = F.relu(self.bn_reduce(self.conv_reduce(x)))
        y = F.relu(self.bn(self.conv_conv(y)))
        y = self.bn_expand(self.conv_expand(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNeXt(nn.Module):
    """ResNeXt-29 for small images in [0, 1], by default the network of AugMix's CIFAR checkpoints.

    What that work and its users call "ResNeXt-29 (32x4d)" has 4 groups of 32 channels in its files, so these are the
    defaults here; `cardinality=32, base_width=4` gives 32 groups of 4. The checkpoints expect `(x - 0.5) / 0.5`,
    which is part of the network.
    """

    def __init__(
        self,
        classes: int = 10,
        depth: int = 29,
        cardinality: int = 4,
        base_width: int = 32,
        mean: Sequence[float] | None = (0.5, 0.5, 0.5),
        std: Sequence[float] | None = (0.5, 0.5, 0.5),
    ) -> None:
        super().__init__()
        if depth < 11 or (depth - 2) % 9:
            raise ModelError(f"resnext: the depth must be 9 n + 2 (11, 20, 29, 38, ...), not {depth}")
        blocks = (depth - 2) // 9
        self.pixels = UNIT_PIXELS if mean is not None else NORMALIZED_PIXELS
        self.normalize = Normalize(mean, std)
        self.conv_1_3x3 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn_1 = nn.BatchNorm2d(64)

        def stage(inputs: int, planes: int, stride: int) -> nn.Sequential:
            first = GroupedBottleneck(inputs, planes, cardinality, base_width, stride)
            rest = (GroupedBottleneck(4 * planes, planes, cardinality, base_width, 1) for _ in range(blocks - 1))
            return nn.Sequential(first, *rest)

        self.stage_1 = stage(64, 64, 1)
        self.stage_2 = stage(256, 128, 2)
        self.stage_3 = stage(512, 256, 2)
        self.classifier = nn.Linear(1024, classes)
        initialize_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[N, 3, H, W]` to logits `[N, classes]`."""
        x = F.relu(self.bn_1(self.conv_1_3x3(self.normalize(x))))
        x = self.stage_3(self.stage_2(self.stage_1(x)))
        logits: Tensor = self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits
