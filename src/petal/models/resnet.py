"""ResNet-50 (He et al., 2016; stride in the 3x3 convolution), in torchvision's key names."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from petal.models.initialize import initialize_
from petal.models.normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize
from petal.models.pixels import NORMALIZED_PIXELS, UNIT_PIXELS


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, plus a shortcut; norms after the convolutions."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * planes
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """`[N, inputs, H, W]` to `[N, 4 planes, H / stride, W / stride]`."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def _stage(blocks: int, inputs: int, planes: int, stride: int) -> nn.Sequential:
    rest = (Bottleneck(4 * planes, planes, 1) for _ in range(blocks - 1))
    return nn.Sequential(Bottleneck(inputs, planes, stride), *rest)


class ResNet(nn.Module):
    """ResNet-50 for images in [0, 1]; ImageNet's normalisation is part of the network (`mean=None, std=None`: not).

    `blocks` is the number of blocks a stage: (3, 4, 6, 3) is ResNet-50.
    """

    def __init__(
        self,
        classes: int = 1000,
        blocks: tuple[int, int, int, int] = (3, 4, 6, 3),
        mean: Sequence[float] | None = IMAGENET_MEAN,
        std: Sequence[float] | None = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.pixels = UNIT_PIXELS if mean is not None else NORMALIZED_PIXELS
        self.normalize = Normalize(mean, std)
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = _stage(blocks[0], 64, 64, 1)
        self.layer2 = _stage(blocks[1], 256, 128, 2)
        self.layer3 = _stage(blocks[2], 512, 256, 2)
        self.layer4 = _stage(blocks[3], 1024, 512, 2)
        self.fc = nn.Linear(2048, classes)
        initialize_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[N, 3, H, W]` to logits `[N, classes]`."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(self.normalize(x)))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits
