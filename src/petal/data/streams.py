"""Streams: what arrives at test time, in which order, a batch at a time.

A `Stream` is a plan and nothing else: a list of `Segment`s, each one domain with its number of images, the order they
arrive in and how to load them. Batches are cut out of segments and never cross from one to the next. Everything random
is drawn from the seed and a place in the plan, so any batch can be made without making those before it: `stream.at(p)`
starts there at once, and gives the same batches as a stream that was not interrupted.

A corrupted image depends on seed, corruption, severity and its index in the dataset only: not on the batch size, nor on
where in the stream it arrives.

To add a stream, write a function that makes the segments and hands them to `Stream`, and put it into `STREAMS`:

    def backwards(data, order=None, *, severity=5, **options):
        setup = Setup(data, **options)
        segments = [setup.segment(name, severity) for name in reversed(setup.names(order))]
        return setup.stream("backwards", segments, severity=severity)
"""

import json
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, count, groupby
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from petal import corruptions
from petal.data.dataset import CorruptedDataset, Dataset, check_severity
from petal.data.orders import resolve_order
from petal.errors import DataError

CLEAN = "clean"
MIXED = "mixed"
Order = str | Sequence[str] | None


@dataclass(frozen=True, eq=False)
class Batch:
    """What arrives at one moment. Only `x` is for the model; the rest is for whoever scores it.

    x float32 [n, 3, H, W] in [0, 1]; y int64 [n]; index int64 [n], numbers of the images in the dataset (on the CPU).
    """

    x: Tensor
    y: Tensor
    domain: str                             # corruption, "clean", "mixed", "fog+snow" or the user's own name
    severity: int                           # 0 where there is none
    index: Tensor
    position: int                           # number of the batch in the stream, from 0
    domain_changed: bool = False            # the batch before was of another domain or severity
    visit: int = 0                          # how often this domain was met before, in a recurring stream
    domains: tuple[str, ...] = ()           # domain of each image: they differ within a batch of a mixed stream only
    strengths: Mapping[str, float] = field(default_factory=dict)    # blended: mean strength of each corruption

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a segment's `load` returns; `domains` is None where all images are of the segment's domain."""

    x: Tensor
    y: Tensor
    index: Tensor
    domains: tuple[str, ...] | None = None
    strengths: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """A stretch of a stream that is one domain.

    `items()` gives int64 [size]: what arrives, in order; it is called when the stream gets there. `load(items, offset)`
    loads some of them, of which the first is the `offset`-th of the segment.
    """

    domain: str
    severity: int
    size: int
    items: Callable[[], Tensor]
    load: Callable[[Tensor, int], Loaded]
    visit: int = 0


class Stream:
    """An iterable of `Batch`es, from batch `start` to the end; it can be iterated again.

    `segments` is a list, or for a stream without end a function from a segment's number to the segment (all of the same
    size). `prefetch` batches are made ahead in a thread, which never changes them. `position` is the number of the next
    batch of the latest iteration: store it (`state_dict`) to go on later.
    """

    def __init__(
        self,
        segments: Sequence[Segment] | Callable[[int], Segment],
        *,
        batch_size: int = 200,
        description: Mapping[str, Any] | None = None,
        start: int = 0,
        device: torch.device | str | None = None,
        prefetch: int = 0,
    ) -> None:
        self.batch_size = _whole("batch_size", batch_size, 1)
        self.device = torch.device("cpu" if device is None else device)
        self.prefetch = _whole("prefetch", prefetch, 0)
        self._segments = segments
        self._description = dict(description or {})
        if callable(segments):
            self._ends: list[int] | None = None
            self._each = math.ceil(segments(0).size / batch_size)
        else:
            self._ends = list(accumulate(math.ceil(segment.size / batch_size) for segment in segments))
        self.start = self._check_position(start)
        self.position = self.start

    # -- the plan ------------------------------------------------------------------------------------------------------

    @property
    def endless(self) -> bool:
        """Whether the stream never ends; it has no `len` then."""
        return self._ends is None

    @property
    def batches(self) -> int | None:
        """Batches of the whole stream, wherever this one starts; None if it never ends."""
        return None if self._ends is None else (self._ends[-1] if self._ends else 0)

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError("an endless stream has no length; take what you need with itertools.islice")
        return self.batches - self.start

    @property
    def domains(self) -> list[tuple[str, int]]:
        """(domain, severity) of every segment of the whole stream, in order; empty if it never ends."""
        return [] if callable(self._segments) else [(s.domain, s.severity) for s in self._segments]

    def at(self, position: int) -> "Stream":
        """The same stream from batch `position` on; batches before it are not made."""
        return Stream(self._segments, batch_size=self.batch_size, description=self._description, start=position,
                      device=self.device, prefetch=self.prefetch)

    def fingerprint(self) -> dict[str, Any]:
        """What (JSON) makes this stream the one it is: kind, data, seed, order, sizes. Not its position or device."""
        text = json.dumps({**self._description, "batch_size": self.batch_size, "batches": self.batches})
        return dict(json.loads(text))

    def state_dict(self) -> dict[str, Any]:
        """The position, with the fingerprint of the stream it belongs to (JSON)."""
        return {"position": self.position, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start from a stored position; refused if it belongs to another stream."""
        mine, theirs = self.fingerprint(), state.get("fingerprint")
        if not isinstance(theirs, Mapping) or "position" not in state:
            raise DataError(f"expected a stream's position and fingerprint; found {', '.join(state) or 'nothing'}")
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                raise DataError(f"the stored position belongs to another stream: {key} was {theirs.get(key)!r} and is"
                                f" {mine.get(key)!r}")
        self.start = self.position = self._check_position(state["position"])

    def _check_position(self, position: int) -> int:
        _whole("position", position, 0)
        if self.batches is not None and position > self.batches:
            raise DataError(f"the stream has {self.batches} batches; it cannot start at {position}")
        return position

    def _locate(self, position: int) -> tuple[int, int]:
        """(number of the segment, number of the batch in it)."""
        if self._ends is None:
            return divmod(position, self._each)
        number = bisect_right(self._ends, position)
        return number, position - (self._ends[number - 1] if number else 0)

    def _segment(self, number: int) -> Segment:
        return self._segments(number) if callable(self._segments) else self._segments[number]

    # -- the batches ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        self.position = self.start
        batches = self._make()
        for batch in _ahead(batches, self.prefetch) if self.prefetch else batches:
            self.position = batch.position + 1
            yield batch

    def _make(self) -> Iterator[Batch]:
        positions = count(self.start) if self.batches is None else range(self.start, self.batches)
        entered = -1
        for position in positions:
            number, within = self._locate(position)
            if number != entered:
                entered, segment = number, self._segment(number)
                items = segment.items()
                before = self._segment(number - 1) if number else segment
                changed = (before.domain, before.severity) != (segment.domain, segment.severity)
            offset = within * self.batch_size
            with torch.no_grad():
                part = segment.load(items[offset : offset + self.batch_size], offset)
            yield Batch(
                x=part.x.to(self.device),
                y=part.y.to(self.device),
                domain=segment.domain,
                severity=segment.severity,
                index=part.index,
                position=position,
                domain_changed=changed and within == 0,
                visit=segment.visit,
                domains=(segment.domain,) * len(part.y) if part.domains is None else part.domains,
                strengths=part.strengths,
            )

    def __repr__(self) -> str:
        kind = self._description.get("stream", "own")
        size = "endless" if self.batches is None else f"{self.batches} batches"
        return f"<Stream {kind}: {size} of {self.batch_size}, at {self.position}>"


def _ahead(batches: Iterator[Batch], depth: int) -> Iterator[Batch]:
    """The same batches, made up to `depth` ahead by one thread."""

    def following() -> Batch | None:
        return next(batches, None)

    pool = ThreadPoolExecutor(1, thread_name_prefix="petal-prefetch")
    waiting: deque[Future[Batch | None]] = deque()
    try:
        waiting.extend(pool.submit(following) for _ in range(depth))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(following))
            yield batch
    finally:                                # also when the reader stops early; a batch being made is let go
        pool.shutdown(wait=False, cancel_futures=True)


class Options(TypedDict, total=False):
    """What every stream takes besides its own arguments; the defaults are those of `Setup`."""

    batch_size: int                         # 200
    images: int | None                      # images of each domain; None: all
    subset: str                             # "first" n images, or "random": n chosen by the seed, the same everywhere
    shuffle: bool                           # False: in the dataset's order; True: shuffled anew in each segment
    seed: int                               # 0
    profile: corruptions.Profile            # "cifar" or "imagenet": whose constants corrupt clean images
    quantize: bool                          # True: to 8 bits, as the published files are
    device: torch.device | str | None       # where clean images are corrupted, and where batches end up
    prefetch: int                           # 0; batches made ahead in a thread
    start: int                              # 0; the batch to start from


class Setup:
    """What the streams have in common: which images of `data`, corrupted how, and the segments and stream made of them.

    `data` is a clean dataset, corrupted as the stream runs, or one that has its own corrupted images.
    """

    def __init__(
        self,
        data: Dataset,
        *,
        batch_size: int = 200,
        images: int | None = None,
        subset: str = "first",
        shuffle: bool = False,
        seed: int = 0,
        profile: corruptions.Profile = "cifar",
        quantize: bool = True,
        device: torch.device | str | None = None,
        prefetch: int = 0,
        start: int = 0,
    ) -> None:
        if subset not in ("first", "random"):
            raise DataError(f"subset is 'first' or 'random', not {subset!r}")
        if profile not in ("cifar", "imagenet"):
            raise DataError(f"profile is 'cifar' or 'imagenet', not {profile!r}")
        self.data, self.shuffle, self.profile, self.quantize = data, shuffle, profile, quantize
        self.seed = _whole("seed", seed, 0)
        self.subset = subset
        self.device = None if device is None else torch.device(device)
        self.size = len(data) if images is None else _whole("images", images, 1)
        if self.size > len(data):
            raise DataError(f"asked for {self.size} images a domain; {data.name} has {len(data)}")
        if self.size == 0:
            raise DataError(f"{data.name} has no images")
        self.batch_size, self.prefetch, self.start = batch_size, prefetch, start

    def names(self, order: Order, least: int = 1) -> tuple[str, ...]:
        """The domains meant by `order`; by default the 15 in the standard order, or the data's own default."""
        own = self.data.default_order if isinstance(self.data, CorruptedDataset) else "standard-15"
        names = resolve_order(own if order is None else order)
        if len(names) < least:
            raise DataError(f"this stream needs at least {least} corruptions; got {', '.join(names)}")
        return names

    @cached_property
    def chosen(self) -> Tensor:
        """Indices of the images used, int64 [size], in the dataset's order."""
        if self.subset == "first" or self.size == len(self.data):
            return torch.arange(self.size)
        picked = _random(self.seed, "subset").choice(len(self.data), self.size, replace=False)
        return torch.from_numpy(np.sort(picked))

    def arrival(self, number: int) -> Tensor:
        """Indices of the images in the order they arrive in the `number`-th segment."""
        if not self.shuffle:
            return self.chosen
        return self.chosen[torch.from_numpy(_random(self.seed, "shuffle", number).permutation(self.size))]

    def segment(self, domain: str, severity: int, number: int = 0, visit: int = 0) -> Segment:
        """The images under one corruption, as the `number`-th segment; an error now if they cannot be had later."""
        severity = 0 if domain == CLEAN else check_severity(severity)
        load = self.loader(domain, severity)
        return Segment(
            domain,
            severity,
            self.size,
            items=lambda: self.arrival(number),
            load=lambda index, offset: Loaded(*load(index), index=index),
            visit=visit,
        )

    def loader(self, domain: str, severity: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """From indices to images under `domain` and labels."""
        if isinstance(self.data, CorruptedDataset):
            if domain == CLEAN:
                raise DataError(f"{self.data.name} has no clean images")
            view = self.data.corrupted(domain, severity)
            if len(view) != len(self.data):
                raise DataError(f"{view.name} has {len(view)} images, {self.data.name} has {len(self.data)}")
            return lambda index: self._placed(view.batch(index))
        if domain != CLEAN:
            _check_corruption(domain)

        def load(index: Tensor) -> tuple[Tensor, Tensor]:
            x, y = self._placed(self.data.batch(index))
            return (x if domain == CLEAN else self.corrupt(x, domain, severity, index, quantize=self.quantize)), y

        return load

    def corrupt(
        self, x: Tensor, domain: str, severity: int, index: Tensor, *, quantize: bool = True, salt: int = 0
    ) -> Tensor:
        """`x` under a corruption; what is random in it is drawn from seed, corruption, severity and image index.

        A `salt` other than 0 draws it anew.
        """
        seed = self.seed if salt == 0 else int(_random(self.seed, "salt", salt).integers(2**31))
        keys = corruptions.image_keys(seed, domain, severity, index)
        return corruptions.corrupt(x, domain, severity, self.profile, quantize=quantize, keys=keys)

    def _placed(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair if self.device is None else (pair[0].to(self.device), pair[1].to(self.device))

    def stream(
        self, kind: str, segments: Sequence[Segment] | Callable[[int], Segment], **description: Any
    ) -> Stream:
        """The stream of `segments`; `description` goes into its fingerprint."""
        own = {} if isinstance(self.data, CorruptedDataset) else {"profile": self.profile, "quantize": self.quantize}
        described = {"stream": kind, "data": self.data.fingerprint(), "images": self.size, "subset": self.subset,
                     "shuffle": self.shuffle, "seed": self.seed, **own, **description}
        return Stream(segments, description=described, batch_size=self.batch_size, start=self.start, device=self.device,
                      prefetch=self.prefetch)


def single(data: Dataset, domain: str = CLEAN, *, severity: int = 5, **options: Unpack[Options]) -> Stream:
    """One domain: a corruption at one severity, or the clean images."""
    setup = Setup(data, **options)
    return setup.stream("single", [setup.segment(domain, severity)], order=[domain], severity=severity)


def continual(data: Dataset, order: Order = None, *, severity: int = 5, **options: Unpack[Options]) -> Stream:
    """One corruption after the other, each with all its images: the setting of the paper's main tables.

    `order` is a sequence of names, a published order such as "imagenet-c:3", or None for the standard 15.

    >>> from petal.data import digits
    >>> stream = continual(digits(), "imagenet-c:3", images=30, batch_size=20)
    >>> len(stream), stream.domains[0]
    (30, ('contrast', 5))
    """
    setup = Setup(data, **options)
    names = setup.names(order)
    segments = [setup.segment(name, severity, number) for number, name in enumerate(names)]
    return setup.stream("continual", segments, order=names, severity=severity)


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
    setup = Setup(data, **options)
    names = setup.names(order)
    segments = [setup.segment(name, severity, number) for number, (name, severity) in enumerate(gradual_pairs(names))]
    return setup.stream("gradual", segments, order=names)


def recurring(
    data: Dataset, order: Order = None, *, visits: int, severity: int = 5, **options: Unpack[Options]
) -> Stream:
    """The continual stream again and again, `visits` times; `batch.visit` counts from 0."""
    _whole("visits", visits, 1)
    setup = Setup(data, **options)
    names = setup.names(order)
    first = [setup.segment(name, severity) for name in names]

    def again(number: int) -> Segment:
        visit, place = divmod(number, len(names))
        return replace(first[place], items=lambda: setup.arrival(number), visit=visit)

    segments = [again(number) for number in range(visits * len(names))]
    return setup.stream("recurring", segments, order=names, severity=severity, visits=visits)


def mixed(data: Dataset, order: Order = None, *, severity: int = 5, **options: Unpack[Options]) -> Stream:
    """All domains at once: every image of every domain arrives exactly once, in an order shuffled by the seed.

    Images of many domains share a batch: `batch.domain` is "mixed", and `batch.domains` has the domain of each image.
    """
    setup = Setup(data, **options)
    names = setup.names(order)
    if len(set(names)) != len(names):
        raise DataError(f"a mixed stream has each domain once; the order repeats one: {', '.join(names)}")
    loaders = [setup.loader(name, 0 if name == CLEAN else check_severity(severity)) for name in names]

    def items() -> Tensor:                  # an item is domain * size + place among the images chosen
        return torch.from_numpy(_random(setup.seed, "mixed").permutation(len(names) * setup.size))

    def load(items: Tensor, offset: int) -> Loaded:
        domain, index = items // setup.size, setup.chosen[items % setup.size]
        return Loaded(*_grouped(domain, index, loaders), index=index, domains=tuple(names[d] for d in domain.tolist()))

    segment = Segment(MIXED, severity, len(names) * setup.size, items, load)
    return setup.stream("mixed", [segment], order=names, severity=severity)


def correlated(
    data: Dataset,
    order: Order = None,
    *,
    concentration: float = 0.1,
    slots: int | None = None,
    severity: int = 5,
    **options: Unpack[Options],
) -> Stream:
    """A continual stream whose labels come in runs: the smaller `concentration`, the more alike are neighbours.

    In each domain every class is dealt out over `slots` stretches of time by proportions drawn from a symmetric
    Dirichlet(concentration); within a slot the classes follow one another. Every image arrives exactly once a domain.
    `slots` is by default the number of classes present.
    """
    if not (math.isfinite(concentration) and concentration > 0):
        raise DataError(f"concentration must be a number above 0; got {concentration}")
    if slots is not None:
        _whole("slots", slots, 1)
    setup = Setup(data, **options)
    names = setup.names(order)
    chosen = setup.chosen
    labels = data.labels[chosen].numpy()

    def items(number: int) -> Tensor:
        random = _random(setup.seed, "correlated", number)
        return chosen[torch.from_numpy(correlated_order(labels, concentration, slots, random))]

    def segment(number: int, name: str) -> Segment:
        return replace(setup.segment(name, severity), items=lambda: items(number))

    segments = [segment(number, name) for number, name in enumerate(names)]
    settings = {"severity": severity, "concentration": concentration, "slots": slots}
    return setup.stream("correlated", segments, order=names, **settings)


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


def own(domains: Sequence[tuple[str, Dataset]], **options: Unpack[Options]) -> Stream:
    """The user's own domains: (name, dataset) pairs, one after the other, as they are.

    `images` limits each of them; severities are 0.
    """
    if not domains:
        raise DataError("give at least one (name, dataset)")
    setups = [Setup(data, **options) for _, data in domains]

    def segment(number: int) -> Segment:
        setup = setups[number]
        return replace(setup.segment(CLEAN, 0, number), domain=domains[number][0])

    described = [[name, setup.data.fingerprint(), setup.size] for (name, _), setup in zip(domains, setups, strict=True)]
    return setups[0].stream("own", [segment(number) for number in range(len(domains))], own=described)


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

    A seeded walk goes through the corruptions of `order` in ever new orders. Each one's strength s rises from 0 to a
    peak drawn from the range `strength` and falls back, as sin^2; x becomes (1 - s) x + s corrupt(x), first by the one
    that fades out, then by the other. The walk, the peaks, the strengths and the images' order follow from the seed
    and the number of images before, so a stream can start anywhere. Images come in passes over the data, shuffled
    (unless `shuffle=False`) and corrupted anew in each. With `quantize` the result is rounded to 8 bits.
    """
    if isinstance(data, CorruptedDataset):
        raise DataError(f"{data.name} has its images already corrupted; a blended stream needs clean ones")
    low, high = strength
    if not 0 <= low <= high <= 1:
        raise DataError(f"strength is a range within 0..1; got {strength}")
    options.setdefault("shuffle", True)
    setup = Setup(data, **options)
    names = setup.names(order, least=2)
    if len(set(names)) != len(names):
        raise DataError(f"a blended stream walks through each corruption in turn; the order repeats one: {names}")
    for name in names:
        _check_corruption(name)
    check_severity(severity)
    _whole("drift", drift, 1)

    def walk(step: int) -> str:
        return names[_walk(setup.seed, len(names), step)]

    def peak(step: int) -> float:
        return float(_random(setup.seed, "peak", step).uniform(low, high))

    def segment(number: int) -> Segment:
        pair = (walk(number), walk(number + 1))
        peaks = (peak(number), peak(number + 1))

        def items() -> Tensor:              # an item is pass * size + index of the image
            start, stop = number * drift, (number + 1) * drift
            return torch.cat([
                p * len(data) + setup.arrival(p)[max(start - p * setup.size, 0) : stop - p * setup.size]
                for p in range(start // setup.size, (stop - 1) // setup.size + 1)
            ])

        def load(items: Tensor, offset: int) -> Loaded:
            passes, index = items // len(data), items % len(data)
            runs = [(number, len(list(run))) for number, run in groupby(passes.tolist())]
            lengths = [length for _, length in runs]
            x, y = setup._placed(data.batch(index))
            time = (offset + torch.arange(len(items), dtype=torch.float64)) / drift * (math.pi / 2)
            weights = (peaks[0] * time.cos() ** 2, peaks[1] * time.sin() ** 2)
            for name, weight in zip(pair, weights, strict=True):
                parts = zip(torch.split(x, lengths), torch.split(index, lengths), runs, strict=True)
                corrupted = torch.cat([
                    setup.corrupt(images, name, severity, numbers, quantize=False, salt=1 + number)
                    for images, numbers, (number, _) in parts
                ])
                x = x.lerp(corrupted, weight.to(x).reshape(-1, 1, 1, 1))
            if setup.quantize:
                x = x.mul(255).round_().div_(255)
            means = {name: float(weight.mean()) for name, weight in zip(pair, weights, strict=True)}
            return Loaded(x, y, index, strengths=means)

        return Segment("+".join(pair), severity, drift, items, load)

    return setup.stream("blended", segment, order=names, severity=severity, drift=drift, strength=strength)


STREAMS: dict[str, Callable[..., Stream]] = {
    "single": single,
    "continual": continual,
    "gradual": gradual,
    "mixed": mixed,
    "correlated": correlated,
    "recurring": recurring,
    "blended": blended,
    "own": own,
}


# -- helpers -----------------------------------------------------------------------------------------------------------

_PURPOSES = ("subset", "shuffle", "mixed", "correlated", "walk", "peak", "salt")


def _random(seed: int, purpose: str, number: int = 0) -> np.random.Generator:
    """A generator of its own for each purpose and number: draws in one place never move those in another."""
    return np.random.Generator(np.random.PCG64([seed, _PURPOSES.index(purpose), number]))


def _walk(seed: int, size: int, step: int) -> int:
    """Number of the corruption at `step` of a walk in shuffled passes; neighbours differ."""
    if size == 2:
        return step % 2
    turn, place = divmod(step, size)
    order = _random(seed, "walk", turn).permutation(size)
    if turn and place < 2 and _random(seed, "walk", turn - 1).permutation(size)[-1] == order[0]:
        place = 1 - place                   # never the same twice in a row; the last place of a pass is never moved
    return int(order[place])


def _grouped(
    domain: Tensor, index: Tensor, loaders: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]]
) -> tuple[Tensor, Tensor]:
    """Images and labels where image i comes from loader `domain[i]`: loaded domain by domain, put back in order."""
    present = sorted(set(domain.tolist()))
    rows = [torch.nonzero(domain == d).flatten() for d in present]
    parts = [loaders[d](index[r]) for d, r in zip(present, rows, strict=True)]
    back = torch.cat(rows).argsort().to(parts[0][0].device)
    return torch.cat([x for x, _ in parts])[back], torch.cat([y for _, y in parts])[back]


def _check_corruption(name: str) -> None:
    known = (*corruptions.CORRUPTIONS, *corruptions.VALIDATION_CORRUPTIONS)
    if name not in known:
        raise DataError(f"no corruption is called {name!r}; there are {', '.join(known)}, and {CLEAN}")


def _whole(what: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{what} must be a whole number of at least {least}; got {value!r}")
    return value
