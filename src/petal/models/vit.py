"""A tiny vision transformer (Dosovitskiy et al., 2021): layer norm only, parameters not called weight or bias."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petal.errors import ModelError
from petal.models.normalize import Normalize


class TransformerBlock(nn.Module):
    """Self-attention and a two-layer perceptron, each after a layer norm and beside a shortcut."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens `[N, T, dim]` to tokens."""
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


class VisionTransformer(nn.Module):
    """A ViT with a class token and learned positions for square images in [0, 1] of one size."""

    def __init__(
        self,
        classes: int = 10,
        image_size: int = 32,
        patch: int = 4,
        dim: int = 64,
        depth: int = 4,
        heads: int = 4,
        mean: Sequence[float] | None = (0.5, 0.5, 0.5),
        std: Sequence[float] | None = (0.5, 0.5, 0.5),
    ) -> None:
        super().__init__()
        if image_size % patch or dim % heads:
            raise ModelError(
                f"vit: image_size must be a multiple of patch, dim of heads; not {image_size}, {patch}, {dim}, {heads}"
            )
        self.image_size = image_size
        self.normalize = Normalize(mean, std)
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + (image_size // patch) ** 2, dim))
        self.blocks = nn.Sequential(*(TransformerBlock(dim, heads, 2 * dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[N, 3, S, S]` to logits `[N, classes]`."""
        if x.shape[-2:] != (self.image_size, self.image_size):
            raise ModelError(
                f"this ViT takes images of {self.image_size} pixels, not {tuple(x.shape[-2:])}; "
                "build it with image_size=..."
            )
        tokens = self.patch_embed(self.normalize(x)).flatten(2).transpose(1, 2)  # [N, T, dim]
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], dim=1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits
