"""The distance in a record is over all parameters of the network, whichever of them adapt."""

from pathlib import Path

import pytest
import torch

import petal
from petal import models
from petal.data import digits, streams
from petal.recipes import recipe
from runs.command import FEW, call, of, records


@pytest.mark.parametrize("row", ["tent", "pseudo-label"])
def test_distance_counts_the_parameters_that_do_not_adapt(row: str, source: Path, tmp_path: Path) -> None:
    call("run", "digits", *FEW, *of(source), "-m", row, "--engine", "eager", "-q", "--out", tmp_path)
    chosen = recipe("digits")
    model = models.build("small", 10, source / "network.safetensors", **chosen.network_options)
    adapter = petal.METHODS[row](model, lr=chosen.affine_lr, optimizer=chosen.affine_optimizer)
    stream = streams.continual(digits("test"), chosen.order(1), severity=5, batch_size=8, images=16, profile=chosen.profile)
    adapted = sum(p.numel() for p in adapter.adapted.values())
    count = sum(p.numel() for p in model.parameters())
    assert adapted < 0.5 * count
    start = dict(model.named_parameters())
    for record, batch in zip(records(tmp_path, f"{row}-o1-s0")[:4], stream, strict=False):
        adapter(batch.x)
        squares = [(p.detach().double() - start[name].detach().double()).square().sum()
                   for name, p in adapter.model.named_parameters()]  # fmt: skip
        assert record["distance"] == pytest.approx(float(torch.stack(squares).sum() / count) ** 0.5, rel=1e-4)
        assert record["distance"] > 0
