"""A stream whose labels are correlated in time."""

import math
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from petal.data.dataset import Dataset, check_whole
from petal.data.streams.builder import Options, Order, StreamBuilder, draws
from petal.data.streams.stream import Segment, Stream
from petal.errors import DataError


def correlated(
    data: Dataset,
    order: Order = None,
    *,
    concentration: float = 0.1,
    slots: int | None = None,
    severity: int = 5,
    **options: Unpack[Options],
) -> Stream:
    """A continual stream whose labels come in runs: the smaller `concentration`, the longer the runs.

    In each domain every class is dealt out over `slots` stretches of time by proportions drawn from a symmetric
    Dirichlet(concentration); within a slot the classes follow one another. Every image arrives exactly once per domain.
    `slots` is by default the number of classes present.
    """
    if not (math.isfinite(concentration) and concentration > 0):
        raise DataError(f"concentration must be a number above 0; got {concentration}")
    if slots is not None:
        check_whole("slots", slots, 1)
    builder = StreamBuilder(data, **options)
    names = builder.names(order)
    chosen = builder.chosen
    labels = data.labels[chosen].numpy()

    def items(number: int) -> Tensor:
        random = draws(builder.seed, "correlated", number)
        return chosen[torch.from_numpy(correlated_order(labels, concentration, slots, random))]

    def segment(number: int, name: str) -> Segment:
        return replace(builder.segment(name, severity), items=lambda: items(number))

    segments = [segment(number, name) for number, name in enumerate(names)]
    settings = {"severity": severity, "concentration": concentration, "slots": slots}
    return builder.stream("correlated", segments, order=names, **settings)


def correlated_order(
    labels: np.ndarray[Any, Any], concentration: float, slots: int | None, random: np.random.Generator
) -> np.ndarray[Any, Any]:
    """A permutation of 0..len(labels)-1 in which equal labels come in runs; see `correlated`."""
    classes = np.unique(labels)
    slots = len(classes) if slots is None else slots
    dealt: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(slots)]
    for label in classes:
        members = random.permutation(np.flatnonzero(labels == label))
        shares = np.cumsum(random.dirichlet(np.full(slots, concentration)))[:-1]
        for slot, part in zip(dealt, np.split(members, np.rint(shares * len(members)).astype(int)), strict=True):
            slot.append(part)
    return np.concatenate([slot[k] for slot in dealt for k in random.permutation(len(slot))])
