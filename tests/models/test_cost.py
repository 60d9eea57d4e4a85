"""Sizes and costs, against arithmetic."""

import pytest
import torch
from torch import nn

from petal import models


def test_wrn_28_10_costs_ten_and_a_half_gigaflops() -> None:
    with torch.device("meta"):
        model = models.build("wrn-28-10")

    def conv(side: int, inputs: int, outputs: int, kernel: int = 3) -> int:
        return 2 * side * side * inputs * outputs * kernel * kernel

    total = conv(32, 3, 16) + 2 * 640 * 10
    for side, inputs, outputs in ((32, 16, 160), (16, 160, 320), (8, 320, 640)):
        total += conv(side, inputs, outputs) + 7 * conv(side, outputs, outputs) + conv(side, inputs, outputs, 1)
    assert models.flops(model, (3, 32, 32)) == total
    assert total / 1e9 == pytest.approx(10.5, abs=0.05)


def test_resnet_50_costs_what_is_published() -> None:
    with torch.device("meta"):
        model = models.build("resnet-50", classes=1000)
    assert models.flops(model, (3, 224, 224)) / 2e9 == pytest.approx(
        4.09, abs=0.005
    )  # torchvision: 4.09 G multiply-adds


@pytest.mark.parametrize("training", [True, False])
def test_attention_is_counted(training: bool) -> None:
    dim, tokens, hidden = 64, 65, 128
    model = models.build("vit-tiny").train(training)
    block = tokens * dim * (3 * dim + dim + 2 * hidden) + 2 * tokens * tokens * dim  # projections, perceptron; QK', AV
    patches = 64 * (3 * 16) * dim
    with torch.inference_mode(not training):
        assert models.flops(model, (3, 32, 32)) == 2 * (4 * block + patches + dim * 10)


def test_a_batch_costs_its_images() -> None:
    model = models.build("small")
    assert models.flops(model, (7, 3, 32, 32)) == 7 * models.flops(model, (3, 32, 32))


def test_grouped_convolutions() -> None:
    assert models.flops(nn.Conv2d(8, 16, 3, padding=1, groups=4, bias=False), (8, 5, 5)) == 2 * 25 * 16 * 2 * 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_counting_leaves_the_network_alone(dtype: torch.dtype) -> None:
    model = models.build("wrn-10-1", mean=[0.5], std=[0.5]).to(dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert models.flops(model, (3, 16, 16)) > 0
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_networks_that_need_data() -> None:
    class Needy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)
            self.fc = nn.Linear(3, 5)
            self.table = torch.ones(3)  # no buffer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.fc(self.norm(x).mean((2, 3)) * self.table)
            return out if float(out.detach().sum()) > 1e9 else 2 * out

    model = Needy()
    assert models.flops(model, (3, 4, 4)) == 2 * 3 * 5
    assert model.norm.num_batches_tracked == 0
    with pytest.raises(RuntimeError, match="channel"):
        models.flops(models.build("small"), (4, 16, 16))


def test_counting_parameters() -> None:
    layer = nn.Linear(4, 4)
    shared = nn.Sequential(layer, layer)
    assert models.count_parameters(shared) == 20
    layer.bias.requires_grad_(False)
    assert models.count_parameters(shared) == 20
    assert models.count_parameters(shared, trainable_only=True) == 16
