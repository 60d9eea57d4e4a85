"""Source statistics and a Laplace posterior of a network, from source images."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from petal.calls import check_batch, inputs_and_labels, moved, with_output
from petal.errors import ConfigError, StatisticsError
from petal.methods.inputs import check_choice, check_number
from petal.methods.network import Network, logits_of
from petal.methods.style import LayerStyle, Style
from petal.norm import affine_parameters, network_copy
from petal.posterior import DiagonalGaussian, source_confidence
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
    output: Callable[[Any], Any] | None = None,
) -> SourceStatistics:
    """Fisher information, class prototypes and styles of a source network, from batches (x, y) of source images.

    Each of the parts runs through the loader once, as far as its number of images. The Fisher information is that of EATA
    (Niu et al., 2022, eq. 9, as its code has it): the mean over batches of the squared gradient, by the scale and shift of
    normalisation layers, of the batch's mean cross-entropy on the network's own labels; it needs no y. Prototypes are means
    and variances of the features of each class; by `labels` "given" with the batch or "predicted" by the network (as PeTTA,
    Hoang et al., 2024). Batch norms use the statistics of the batch, as they will while adapting; for prototypes, with
    `batch_statistics=False`, those of the source. Styles are of up to `style_batches` whole batches, which have to be of the
    size that they will have while adapting, in a shuffled order: by default of the network's first layers (`LayerStyle`),
    else by `style`, a function from a batch to a vector. `output` finds the logits, as in `fit_swag`. `progress` is called
    with the part and the number of images so far.
    """
    for part in wanted:
        check_choice("wanted", part, PARTS)
    if not wanted:
        raise ConfigError(f"say which statistics to collect: {', '.join(PARTS)}")
    check_choice("labels", labels, ("given", "predicted"))
    check_number("prototype_images", prototype_images, low=1, whole=True)
    check_number("fisher_images", fisher_images, low=1, whole=True)
    model = model if output is None else with_output(model, output)
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
        x, y = inputs_and_labels(batch)
        x, y = moved(x, like)[: images - seen], None if y is None else y[: images - seen]
        check_batch(x, like.device, like.dtype)
        yield x, None if y is None else y.to(like.device)
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


def fit_laplace(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    images: int = 2_000,
    size: int | None = None,
    prior_precision: float = 1.0,
    damping: float = 0.0,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> DiagonalGaussian:
    """A diagonal Laplace approximation around a trained network, from source images; it needs no labels.

    The variance is 1 / (size · F + prior_precision) (Ritter et al., 2018), where F is the diagonal Fisher information of an
    image, estimated from the first so many `images`, and `size` how many the network was trained on (default: `images`).
    With labels that the network itself would draw, gradients of different images are independent and of mean zero: so the
    squared gradient of a batch's sum estimates the sum of squared gradients without bias, by one gradient a batch.
    """
    check_number("images", images, low=1, whole=True)
    check_number("prior_precision", prior_precision, low=0)
    if size is not None:
        check_number("size", size, low=1, whole=True)
    with torch.inference_mode(False):
        network = network_copy(model, False)
        parameters = dict(network.named_parameters())
        generator = torch.Generator(next(network.parameters()).device).manual_seed(seed)
        total, count = [torch.zeros_like(value) for value in parameters.values()], 0
        batches = _first(loader, images, network, "laplace", lambda _, seen: progress(seen) if progress else None)

        def drawn(probabilities: Tensor) -> Tensor:
            return probabilities.multinomial(1, generator=generator)[:, 0]

        for number, gradients in _gradients(network, parameters, batches, drawn):
            torch._foreach_addcmul_(total, gradients, gradients, value=float(number) ** 2)
            count += number
        share = (size or count) / count
        var = {name: 1 / (value * share + prior_precision) for name, value in zip(parameters, total, strict=True)}
        return DiagonalGaussian(
            {name: value.detach() for name, value in parameters.items()}, var, damping=damping,
            buffers=dict(network.named_buffers()), confidence=source_confidence(model, loader),
        )  # fmt: skip


def _fisher(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor | None]]) -> dict[str, Tensor]:
    parameters = affine_parameters(network)
    if not parameters:
        raise StatisticsError("the Fisher information is of normalisation layers, and this network has none")
    total = [torch.zeros_like(value) for value in parameters.values()]
    count = 0
    for _, gradients in _gradients(network, parameters, batches, lambda probabilities: probabilities.argmax(1)):
        torch._foreach_addcmul_(total, gradients, gradients)
        count += 1
    return {name: value / count for name, value in zip(parameters, total, strict=True)}


def _gradients(
    network: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batches: Iterable[tuple[Tensor, Tensor | None]],
    labels: Callable[[Tensor], Tensor],
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """The gradient of each batch's mean cross-entropy on labels made of the network's own probabilities."""
    values = [parameter.requires_grad_(True) for parameter in parameters.values()]
    for x, _ in batches:
        with torch.enable_grad():
            logits = logits_of(network, x)
            loss = nn.functional.cross_entropy(logits, labels(logits.detach().softmax(1)))
            yield len(x), torch.autograd.grad(loss, values, materialize_grads=True)
