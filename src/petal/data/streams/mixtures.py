"""Streams in which corruptions meet: all of them within a batch, or two at a time, one fading into the next."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Unpack

import torch
from torch import Tensor

from petal.data.dataset import CorruptedDataset, Dataset, check_severity, check_whole
from petal.data.streams.builder import CLEAN, Options, Order, StreamBuilder, check_corruption, draws
from petal.data.streams.stream import Loaded, Segment, Stream
from petal.errors import DataError

MIXED = "mixed"


def mixed(data: Dataset, order: Order = None, *, severity: int = 5, **options: Unpack[Options]) -> Stream:
    """All domains at once: every image of every domain arrives exactly once, in an order shuffled by the seed.

    Images of many domains share a batch: `batch.domain` is "mixed", and `batch.domains` has the domain of each image.
    """
    builder = StreamBuilder(data, **options)
    names = builder.names(order)
    if len(set(names)) != len(names):
        raise DataError(f"a mixed stream has each domain once; the order repeats one: {', '.join(names)}")
    loaders = [builder.loader(name, 0 if name == CLEAN else check_severity(severity)) for name in names]

    def items() -> Tensor:                  # an item is domain * size + place among the images chosen
        return torch.from_numpy(draws(builder.seed, "mixed").permutation(len(names) * builder.size))

    def load(items: Tensor, offset: int) -> Loaded:
        domain, index = items // builder.size, builder.chosen[items % builder.size]
        return Loaded(*_grouped(domain, index, loaders), index=index, domains=tuple(names[d] for d in domain.tolist()))

    segment = Segment(MIXED, severity, len(names) * builder.size, items, load)
    return builder.stream("mixed", [segment], order=names, severity=severity)


def _grouped(
    domain: Tensor, index: Tensor, loaders: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]]
) -> tuple[Tensor, Tensor]:
    """Images and labels where image i comes from loader `domain[i]`: loaded domain by domain, put back in order."""
    present = sorted(set(domain.tolist()))
    rows = [torch.nonzero(domain == d).flatten() for d in present]
    parts = [loaders[d](index[r]) for d, r in zip(present, rows, strict=True)]
    back = torch.cat(rows).argsort().to(parts[0][0].device)
    return torch.cat([x for x, _ in parts])[back], torch.cat([y for _, y in parts])[back]


def blended(
    data: Dataset,
    order: Order = None,
    *,
    drift: int = 2000,
    strength: tuple[float, float] = (0.5, 1.0),
    severity: int = 5,
    **options: Unpack[Options],
) -> Stream:
    """Without end: two corruptions at a time, one fading out while the next fades in, over `drift` images each.

    A seeded walk goes through the corruptions of `order` again and again, in a new order each time. Each one's strength s
    rises from 0 to a peak drawn from the range `strength` and falls back, as sin^2; x becomes (1 - s) x + s corrupt(x),
    first by the one that fades out, then by the other. The walk, the peaks, the strengths and the images' order follow
    from the seed and the number of images before, so a stream can start anywhere. Images come in passes over the data,
    shuffled (unless `shuffle=False`) and corrupted anew in each. With `quantize` the result is rounded to 8 bits.
    """
    if isinstance(data, CorruptedDataset):
        raise DataError(f"{data.name} has its images already corrupted; a blended stream needs clean ones")
    low, high = strength
    if not 0 <= low <= high <= 1:
        raise DataError(f"strength is a range within 0..1; got {strength}")
    options.setdefault("shuffle", True)
    builder = StreamBuilder(data, **options)
    names = builder.names(order, least=2)
    if len(set(names)) != len(names):
        raise DataError(f"a blended stream walks through each corruption in turn; the order repeats one: {names}")
    for name in names:
        check_corruption(name)
    check_severity(severity)
    check_whole("drift", drift, 1)

    def walk(step: int) -> str:
        return names[walk_step(builder.seed, len(names), step)]

    def peak(step: int) -> float:
        return float(draws(builder.seed, "peak", step).uniform(low, high))

    def segment(number: int) -> Segment:
        pair = (walk(number), walk(number + 1))
        peaks = (peak(number), peak(number + 1))

        def items() -> Tensor:              # an item is pass * size + index of the image
            start, stop = number * drift, (number + 1) * drift
            return torch.cat([
                p * len(data) + builder.arrival(p)[max(start - p * builder.size, 0) : stop - p * builder.size]
                for p in range(start // builder.size, (stop - 1) // builder.size + 1)
            ])

        def load(items: Tensor, offset: int) -> Loaded:
            passes, index = items // len(data), items % len(data)
            runs = [(number, len(list(run))) for number, run in groupby(passes.tolist())]
            lengths = [length for _, length in runs]
            x, y = builder.placed(data.batch(index))
            time = (offset + torch.arange(len(items), dtype=torch.float64)) / drift * (math.pi / 2)
            weights = (peaks[0] * time.cos() ** 2, peaks[1] * time.sin() ** 2)
            for name, weight in zip(pair, weights, strict=True):
                parts = zip(torch.split(x, lengths), torch.split(index, lengths), runs, strict=True)
                corrupted = torch.cat([
                    builder.corrupt(images, name, severity, numbers, quantize=False, salt=1 + number)
                    for images, numbers, (number, _) in parts
                ])
                x = x.lerp(corrupted, weight.to(x).reshape(-1, 1, 1, 1))
            if builder.quantize:
                x = x.mul(255).round_().div_(255)
            means = {name: float(weight.mean()) for name, weight in zip(pair, weights, strict=True)}
            return Loaded(x, y, index, strengths=means)

        return Segment("+".join(pair), severity, drift, items, load)

    return builder.stream("blended", segment, order=names, severity=severity, drift=drift, strength=strength)


def walk_step(seed: int, size: int, step: int) -> int:
    """Number of the corruption at `step` of a walk in shuffled passes; neighbours differ."""
    if size == 2:
        return step % 2
    turn, place = divmod(step, size)
    order = draws(seed, "walk", turn).permutation(size)
    if turn and place < 2 and draws(seed, "walk", turn - 1).permutation(size)[-1] == order[0]:
        place = 1 - place                   # never the same twice in a row; the last place of a pass is never moved
    return int(order[place])
