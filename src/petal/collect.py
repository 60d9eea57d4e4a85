"""Source statistics of a network from source images."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from petal.errors import ConfigError, StatisticsError
from petal.methods.inputs import check_choice, check_number
from petal.methods.network import Network, logits_of
from petal.methods.style import LayerStyle, Style
from petal.norm import affine_parameters, network_copy
from petal.statistics import PARTS, SourceStatistics


def collect_statistics(
    model: nn.Module,
    loader: Iterable[Any],
    wanted: Sequence[str] = ("prototypes", "fisher"),
    *,
    batch_statistics: bool = True,
    labels: str = "given",
    prototype_images: int = 100_000,
    fisher_images: int = 2_000,
    style_batches: int = 1_000,
    style: Style | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> SourceStatistics:
    """Fisher information, class prototypes and styles of a source network, from batches (x, y) of source images.

    Each of the parts runs through the loader once, as far as its number of images. The Fisher information is that of EATA
    (Niu et al., 2022, eq. 9, as its code has it): the mean over batches of the squared gradient, by the scale and shift of
    normalisation layers, of the batch's mean cross-entropy on the network's own labels; it needs no y. Prototypes are means
    and variances of the features of each class; by `labels` "given" with the batch or "predicted" by the network (as PeTTA,
    Hoang et al., 2024). Batch norms use the statistics of the batch, as they will while adapting; for prototypes, with
    `batch_statistics=False`, those of the source. Styles are of up to `style_batches` whole batches, which have to be of the
    size that they will have while adapting, in a shuffled order: by default of the network's first layers (`LayerStyle`),
    else by `style`, a function from a batch to a vector. `progress` is called with the part and the number of images so far.
    """
    for part in wanted:
        check_choice("wanted", part, PARTS)
    if not wanted:
        raise ConfigError(f"say which statistics to collect: {', '.join(PARTS)}")
    check_choice("labels", labels, ("given", "predicted"))
    check_number("prototype_images", prototype_images, low=1, whole=True)
    check_number("fisher_images", fisher_images, low=1, whole=True)
    check_number("style_batches", style_batches, low=2, whole=True)
    tell = progress or (lambda part, images: None)
    fisher: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    with torch.inference_mode(False):
        if "prototypes" in wanted:
            network = network_copy(model, batch_statistics)
            batches = _first(loader, prototype_images, network, "prototypes", tell)
            found = _prototypes(network, batches, labels == "given")
        if "fisher" in wanted:
            network = network_copy(model, True)
            fisher = _fisher(network, _first(loader, fisher_images, network, "fisher", tell))
        if "styles" in wanted:
            network = network_copy(model, False)
            batches = _first(loader, sys.maxsize, network, "styles", tell)
            found["styles"] = _styles(style or LayerStyle(network), batches, style_batches)
    return SourceStatistics(fisher, **found)


def _first(
    loader: Iterable[Any], images: int, network: nn.Module, part: str, tell: Callable[[str, int], None]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The first so many images of a loader, batch by batch, where the network is."""
    like = next(network.parameters())
    seen = 0
    for batch in loader:
        x, y = (batch[0], batch[1]) if isinstance(batch, (tuple, list)) else (batch, None)
        x, y = x[: images - seen], None if y is None else y[: images - seen]
        yield x.to(like), None if y is None else y.to(like.device)
        seen += len(x)
        tell(part, seen)
        if seen >= images:
            return
    if seen == 0:
        raise StatisticsError("the loader of source images gave no batch")


def _prototypes(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor | None]], given: bool) -> dict[str, Tensor]:
    sums: Tensor | None = None                              # [2, C, D] of the features and their squares, in float64
    counts = torch.zeros(0)
    running, dtype = Network(network), torch.float64
    for x, y in batches:
        with torch.no_grad():
            features, logits = running.features(x)
        if given and y is None:
            raise StatisticsError('prototypes need the labels of source images: give batches (x, y), or labels="predicted"')
        labels = y if given and y is not None else logits.argmax(1)
        classes, dtype = logits.shape[1], features.dtype
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise StatisticsError(f"labels go from {int(labels.min())} to {int(labels.max())}; there are {classes} classes")
        members = nn.functional.one_hot(labels, classes).double()           # [N, C]
        features = features.double()
        now = torch.stack([members.T @ features, members.T @ features.square()])
        sums = now if sums is None else sums + now
        counts = members.sum(0) + (counts if len(counts) else 0)
    assert sums is not None
    mean = sums[0] / counts.clamp(min=1)[:, None]
    spread = sums[1] - counts[:, None] * mean.square()
    var = (spread / (counts - 1).clamp(min=1)[:, None]).clamp(min=0)
    return {"prototypes": mean.to(dtype), "variances": var.to(dtype), "counts": counts.long()}


def _styles(style: Style, batches: Iterable[tuple[Tensor, Tensor | None]], most: int) -> Tensor:
    found: list[Tensor] = []
    size = 0
    for x, _ in islice(batches, most):
        size = size or len(x)
        if len(x) == size:                  # the style of a short batch is more uncertain
            found.append(style(x).detach().flatten())
    if len(found) < 2:
        raise StatisticsError(f"styles need two whole batches or more, and the loader gave {len(found)}")
    return torch.stack(found)


def _fisher(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor | None]]) -> dict[str, Tensor]:
    parameters = affine_parameters(network)
    if not parameters:
        raise StatisticsError("the Fisher information is of normalisation layers, and this network has none")
    values = [parameter.requires_grad_(True) for parameter in parameters.values()]
    total = [torch.zeros_like(value) for value in values]
    count = 0
    for x, _ in batches:
        with torch.enable_grad():
            logits = logits_of(network, x)
            loss = nn.functional.cross_entropy(logits, logits.detach().argmax(1))
            gradients = torch.autograd.grad(loss, values, materialize_grads=True)
        torch._foreach_addcmul_(total, gradients, gradients)
        count += 1
    return {name: value / count for name, value in zip(parameters, total, strict=True)}
