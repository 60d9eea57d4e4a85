"""The gate opens below the confidence, not at it."""

import pytest
import torch

from methods.made import ENGINES, make
from networks import images, network


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gate", ["sample", "batch"])
@pytest.mark.parametrize("kind", ["cotta", "petal"])
def test_full_confidence_is_enough_for_a_limit_of_one(kind: str, gate: str, engine: str) -> None:
    """Logits that lie far apart are a probability of exactly 1 in float32."""
    model, x = network(), images()
    with torch.no_grad():
        model.fc.weight.mul_(1000)
        model.fc.bias.mul_(1000)
    views: list[int] = []

    def counting(images: torch.Tensor) -> torch.Tensor:
        views.append(len(images))
        return images

    adapter = make(kind, engine, model, views=3, confidence=1.0, gate=gate, augment=counting)
    sure = adapter.source(x).softmax(1).amax(1) == 1
    assert 4 < sure.sum() <= len(x)
    adapter(x[sure])
    assert not adapter.views_used
    assert views == []
    adapter.confidence = 1.0 + 2**-20
    adapter(x[sure])
    assert adapter.views_used
    assert len(views) == 3
