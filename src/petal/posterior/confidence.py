"""How sure the source is of its own images: the threshold of PETAL's gate, for confidence="auto"."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from petal import functional as F
from petal.calls import called, inputs_and_labels, logits_in, moved
from petal.norm import network_copy

QUANTILE = 0.05         # CoTTA's, section A of its supplement


@torch.no_grad()
def source_confidence(
    model: nn.Module,
    loader: Iterable[Any],
    parameters: Mapping[str, Tensor] | None = None,
    images: int = 10_000,
) -> float | None:
    """The confidence that all but 5 % of source images exceed, by a network with the statistics of the batch.

    That is how the gate of PETAL asks it; a last batch that is smaller than the first is left out. `parameters` take the
    place of the network's own. Of the loader the first so many images are used; None if it has none.
    """
    network = network_copy(model, batch_statistics=True)
    for name, value in ({} if parameters is None else parameters).items():
        network.get_parameter(name).copy_(value)
    like = next(network.parameters())
    found: list[Tensor] = []
    for batch in loader:
        x = moved(inputs_and_labels(batch)[0], like)
        if found and len(x) < len(found[0]):
            break
        found.append(F.confidence(logits_in(called(network, x))))
        if sum(map(len, found)) >= images:
            break
    return float(torch.cat(found).double().quantile(QUANTILE)) if found else None
