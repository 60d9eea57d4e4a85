import pytest
import torch


@pytest.fixture
def pictures() -> torch.Tensor:
    """Seven pictures with edges, ramps, texture, black and white, 32 x 32, on the 256 levels."""
    g = torch.Generator().manual_seed(5)
    coarse = torch.nn.functional.interpolate(torch.rand(7, 3, 5, 5, generator=g), size=(32, 32), mode="bicubic")
    x = coarse + 0.1 * torch.randn(7, 3, 32, 32, generator=g)
    x[:, :, 8:16, 20:28] = torch.rand(7, 3, 1, 1, generator=g)
    x[0, :, :4], x[1, :, -4:] = 0.0, 1.0
    return x.clamp(0, 1).mul(255).round().div(255)
