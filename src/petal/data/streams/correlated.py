"""Streams whose labels are correlated in time."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petal.data.dataset import Dataset, check_whole
from petal.data.streams.builder import Options, Order, StreamBuilder, draws
from petal.data.streams.stream import Loaded, Segment, Stream
from petal.errors import DataError

Numbers = NDArray[np.int64]


def correlated(
    data: Dataset,
    order: Order = None,
    *,
    concentration: float = 0.1,
    slots: int | None = None,
    stretch: int | None = None,
    alternate: int | None = None,
    sources: int | None = None,
    severity: int = 5,
    **options: Unpack[Options],
) -> Stream:
    """A continual stream whose labels come in runs: the smaller `concentration`, the longer the runs.

    In each domain every class is dealt out over `slots` stretches of time by proportions drawn from a symmetric
    Dirichlet(concentration); within a slot the classes follow one another. Every image arrives exactly once per domain.
    `slots` is by default the number of classes present.

    With `stretch`, images are shuffled within stretches of so many: the same classes for a while, and no runs. With
    `alternate`, runs begin and end: so many domains have them, as many are shuffled, and so on. With `sources`, images come
    from so many cameras, each with runs of its own, interleaved at random; `batch.stream` has the source of each image.
    """
    if not (math.isfinite(concentration) and concentration > 0):
        raise DataError(f"concentration must be a number above 0; got {concentration}")
    given = {"slots": slots, "stretch": stretch, "alternate": alternate, "sources": sources}
    given = {name: check_whole(name, value, 1) for name, value in given.items() if value is not None}

    def arranged(labels: Numbers, number: int, random: np.random.Generator) -> Numbers:
        if alternate is not None and number // alternate % 2:
            return random.permutation(len(labels))
        found = correlated_order(labels, concentration, slots, random)
        if stretch is None:
            return found
        return np.concatenate([random.permutation(found[at : at + stretch]) for at in range(0, len(found), stretch)])

    settings = {"concentration": concentration, "slots": slots, **given}
    return _stream("correlated", StreamBuilder(data, **options), order, severity, arranged, sources, settings)


def markov(
    data: Dataset, order: Order = None, *, run: float = 5.0, severity: int = 5, **options: Unpack[Options]
) -> Stream:
    """A continual stream whose labels are a Markov chain: runs of one class of `run` images on average, then another class.

    Every image arrives exactly once per domain, so that runs are shorter where a class has no images left, and longer where
    no other class has.
    """
    if not (math.isfinite(run) and run >= 1):
        raise DataError(f"run must be a number of at least 1; got {run}")

    def arranged(labels: Numbers, number: int, random: np.random.Generator) -> Numbers:
        return markov_order(labels, run, random)

    return _stream("markov", StreamBuilder(data, **options), order, severity, arranged, None, {"run": run})


def _stream(
    kind: str,
    builder: StreamBuilder,
    order: Order,
    severity: int,
    arranged: Callable[[Numbers, int, np.random.Generator], Numbers],
    sources: int | None,
    settings: dict[str, Any],
) -> Stream:
    """A continual stream in which `arranged(labels, segment, random)` says in what order the images of a segment arrive."""
    names, chosen = builder.names(order), builder.chosen
    labels, size = builder.data.labels[chosen].numpy(), len(builder.data)

    def items(number: int) -> Tensor:       # an item is source * size + index of the image
        random = draws(builder.seed, kind, number)
        if sources is None:
            return chosen[torch.from_numpy(arranged(labels, number, random))]
        parts = np.array_split(random.permutation(len(labels)), min(sources, len(labels)))
        queues = [chosen[part[arranged(labels[part], number, random)]] + s * size for s, part in enumerate(parts)]
        turns = torch.from_numpy(random.permutation(np.repeat(np.arange(len(queues)), [len(queue) for queue in queues])))
        return torch.cat(queues)[turns.argsort(stable=True).argsort()]

    def segment(number: int, name: str) -> Segment:
        plain = builder.segment(name, severity)

        def load(items: Tensor, offset: int) -> Loaded:
            part = plain.load(items % size, offset)
            return part if sources is None else replace(part, stream=tuple((items // size).tolist()))

        return replace(plain, items=lambda: items(number), load=load)

    segments = [segment(number, name) for number, name in enumerate(names)]
    return builder.stream(kind, segments, order=names, severity=severity, **settings)


def correlated_order(labels: Numbers, concentration: float, slots: int | None, random: np.random.Generator) -> Numbers:
    """A permutation of 0..len(labels)-1 in which equal labels come in runs; see `correlated`."""
    classes = np.unique(labels)
    slots = len(classes) if slots is None else slots
    dealt: list[list[Numbers]] = [[] for _ in range(slots)]
    for label in classes:
        members = random.permutation(np.flatnonzero(labels == label))
        shares = np.cumsum(random.dirichlet(np.full(slots, concentration)))[:-1]
        for slot, part in zip(dealt, np.split(members, np.rint(shares * len(members)).astype(int)), strict=True):
            slot.append(part)
    return np.concatenate([slot[k] for slot in dealt for k in random.permutation(len(slot))])


def markov_order(labels: Numbers, run: float, random: np.random.Generator) -> Numbers:
    """A permutation of 0..len(labels)-1 whose labels are a Markov chain; see `markov`."""
    classes, counts = np.unique(labels, return_counts=True)
    members = [list(random.permutation(np.flatnonzero(labels == label))) for label in classes]
    left, here, found = counts.astype(float), -1, []
    for leaves in random.random(len(labels)) < 1 / run:
        if here < 0 or leaves or not left[here]:
            others = left * (np.arange(len(left)) != here)      # those with more images left come more often: all last
            here = random.choice(len(left), p=others / others.sum()) if others.any() else here
        left[here] -= 1
        found.append(members[here].pop())
    return np.array(found)
