"""Wide ResNet with pre-activation blocks (Zagoruyko and Komodakis, 2016), in RobustBench's key names."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from petal.errors import ModelError
from petal.models.initialize import initialize_
from petal.models.normalize import Normalize


class WideBlock(nn.Module):
    """norm, relu, conv, twice, plus a shortcut.

    Where the number of channels changes, the first norm and relu stand before the fork: the 1x1 shortcut sees the
    activated input. Elsewhere the shortcut is the unchanged input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.convShortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, inputs, H, W]` to `[N, outputs, H / stride, W / stride]`."""
        activated = F.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(activated)
        y = self.dropout(F.relu(self.bn2(self.conv1(activated))))
        out: Tensor = shortcut + self.conv2(y)
        return out


class Group(nn.Module):
    """Blocks of one width; the first one changes resolution and channels."""

    def __init__(self, blocks: int, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        first = WideBlock(inputs, outputs, stride, dropout)
        self.layer = nn.Sequential(first, *(WideBlock(outputs, outputs, 1, dropout) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    """WRN-depth-width for small images in [0, 1]; no normalisation unless `mean` and `std` are given.

    Built by `build("wrn-28-10")`; any depth 6 n + 4 and any width. RobustBench's AugMix WRN-40-2 is
    `build("wrn-40-2", mean=[0.5], std=[0.5])`.
    """

    unused_prefixes = ("sub_block1.",)  # TRADES-like checkpoints carry a group that no forward pass uses

    def __init__(
        self,
        depth: int = 28,
        width: int = 10,
        classes: int = 10,
        dropout: float = 0.0,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 or width < 1:
            raise ModelError(
                f"wrn-{depth}-{width}: the depth must be 6 n + 4 (10, 16, 22, 28, 34, 40, ...), width >= 1"
            )
        blocks = (depth - 4) // 6
        self.normalize = Normalize(mean, std)
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = Group(blocks, 16, 16 * width, 1, dropout)
        self.block2 = Group(blocks, 16 * width, 32 * width, 2, dropout)
        self.block3 = Group(blocks, 32 * width, 64 * width, 2, dropout)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, classes)
        initialize_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[N, 3, H, W]` to logits `[N, classes]`."""
        x = self.conv1(self.normalize(x))
        x = self.block3(self.block2(self.block1(x)))
        x = F.relu(self.bn1(x))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits
