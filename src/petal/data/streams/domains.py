"""Streams of one domain after the other: single, continual, gradual, recurring, and the user's own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from petal.data.dataset import Dataset, check_whole
from petal.data.streams.builder import CLEAN, Options, Order, StreamBuilder
from petal.data.streams.stream import Segment, Stream
from petal.errors import DataError


def single(data: Dataset, domain: str = CLEAN, *, severity: int = 5, **options: Unpack[Options]) -> Stream:
    """One domain: a corruption at one severity, or the clean images."""
    builder = StreamBuilder(data, **options)
    return builder.stream("single", [builder.segment(domain, severity)], order=[domain], severity=severity)


def continual(data: Dataset, order: Order = None, *, severity: int = 5, **options: Unpack[Options]) -> Stream:
    """One corruption after the other, each with all its images: the setting of the paper's main tables.

    `order` is a sequence of names, a published order such as "imagenet-c:3", or None for the standard 15.

    >>> from petal.data import digits
    >>> stream = continual(digits(), "imagenet-c:3", images=30, batch_size=20)
    >>> len(stream), stream.domains[0]
    (30, ('contrast', 5))
    """
    builder = StreamBuilder(data, **options)
    names = builder.names(order)
    segments = [builder.segment(name, severity, number) for number, name in enumerate(names)]
    return builder.stream("continual", segments, order=names, severity=severity)


def gradual_pairs(names: Sequence[str]) -> list[tuple[str, int]]:
    """(corruption, severity) pairs that change gently: the first falls 5..1, each later one rises and falls 1..5..1.

    >>> len(gradual_pairs("ABC")), gradual_pairs("ABC")[:7]
    (23, [('A', 5), ('A', 4), ('A', 3), ('A', 2), ('A', 1), ('B', 1), ('B', 2)])
    """
    fall = [5, 4, 3, 2, 1]
    rise_and_fall = [1, 2, 3, 4, *fall]
    return [(name, severity) for k, name in enumerate(names) for severity in (rise_and_fall if k else fall)]


def gradual(data: Dataset, order: Order = None, **options: Unpack[Options]) -> Stream:
    """Severity falls to 1 before the corruption changes: 131 pairs for 15 corruptions (`gradual_pairs`)."""
    builder = StreamBuilder(data, **options)
    names = builder.names(order)
    segments = [builder.segment(name, severity, number) for number, (name, severity) in enumerate(gradual_pairs(names))]
    return builder.stream("gradual", segments, order=names)


def recurring(
    data: Dataset, order: Order = None, *, visits: int, severity: int = 5, **options: Unpack[Options]
) -> Stream:
    """The continual stream again and again, `visits` times; `batch.visit` counts from 0."""
    check_whole("visits", visits, 1)
    builder = StreamBuilder(data, **options)
    names = builder.names(order)
    first = [builder.segment(name, severity) for name in names]

    def again(number: int) -> Segment:
        visit, place = divmod(number, len(names))
        return replace(first[place], items=lambda: builder.arrival(number), visit=visit)

    segments = [again(number) for number in range(visits * len(names))]
    return builder.stream("recurring", segments, order=names, severity=severity, visits=visits)


def own(domains: Sequence[tuple[str, Dataset]], **options: Unpack[Options]) -> Stream:
    """The user's own domains: (name, dataset) pairs, one after the other, not corrupted any further.

    `images` limits each of them; severities are 0.
    """
    if not domains:
        raise DataError("give at least one (name, dataset)")
    builders = [StreamBuilder(data, **options) for _, data in domains]

    def segment(number: int) -> Segment:
        builder = builders[number]
        return replace(builder.segment(CLEAN, 0, number), domain=domains[number][0])

    described = [[name, b.data.fingerprint(), b.size] for (name, _), b in zip(domains, builders, strict=True)]
    return builders[0].stream("own", [segment(number) for number in range(len(domains))], own=described)
