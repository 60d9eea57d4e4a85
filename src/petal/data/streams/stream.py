"""A stream as a plan: segments, the batches cut out of them, and a position that can be stored and continued from."""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from petal.data.dataset import check_whole
from petal.data.streams.prefetch import ahead
from petal.errors import DataError


@dataclass(frozen=True, eq=False)
class Batch:
    """What arrives at one time step. Only `x` is for the model; the rest is for whoever scores it.

    x float32 [n, 3, H, W] in [0, 1]; y int64 [n]; index int64 [n], numbers of the images in the dataset, on the CPU.
    """

    x: Tensor
    y: Tensor
    domain: str                             # corruption, "clean", "mixed", "fog+snow" or the user's own name
    severity: int                           # 0 where there is none
    index: Tensor
    position: int                           # number of the batch in the stream, from 0
    domain_changed: bool = False            # the previous batch was of another domain or severity
    visit: int = 0                          # how often this domain came before, in a recurring stream
    domains: tuple[str, ...] = ()           # domain of each image; they differ only within a batch of a mixed stream
    strengths: Mapping[str, float] = field(default_factory=dict)    # blended: mean strength of each corruption
    stream: tuple[int, ...] | None = None   # the source of each image, such as a camera, where there are several
    benign: Tensor | None = None            # bool [n]: which images are no attacker's, and are scored; None: all of them

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a segment's `load` returns; without `domains` all images are of the segment's, without `stream` of one source."""

    x: Tensor
    y: Tensor
    index: Tensor
    domains: tuple[str, ...] | None = None
    strengths: Mapping[str, float] = field(default_factory=dict)
    stream: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Segment:
    """A stretch of a stream with a single domain.

    `items()` returns int64 [size], what arrives, in order; it is called when the stream gets there. `load(items, offset)`
    loads some of them, the first of which is number `offset` of the segment.
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
    batch of the latest iteration: store it (`state_dict`) to continue later.
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
        self.batch_size = check_whole("batch_size", batch_size, 1)
        self.device = torch.device("cpu" if device is None else device)
        self.prefetch = check_whole("prefetch", prefetch, 0)
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
        """True if the stream never ends; it has no `len` then."""
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
        """What identifies this stream, as JSON: kind, data, seed, order, sizes. Not its position or device."""
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
        check_whole("position", position, 0)
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
        for batch in ahead(batches, self.prefetch) if self.prefetch else batches:
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
                stream=part.stream,
            )

    def __repr__(self) -> str:
        kind = self._description.get("stream", "own")
        size = "endless" if self.batches is None else f"{self.batches} batches"
        return f"<Stream {kind}: {size} of {self.batch_size}, at {self.position}>"
