"""What every stream is made with: the options they share, the images chosen, and seeded draws."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from petal import corruptions
from petal.data.dataset import CorruptedDataset, Dataset, check_severity, check_whole
from petal.data.orders import resolve_order
from petal.data.streams.stream import Loaded, Segment, Stream
from petal.errors import DataError

CLEAN = "clean"
Order = str | Sequence[str] | None


class Options(TypedDict, total=False):
    """What every stream takes besides its own arguments; the defaults are those of `StreamBuilder`."""

    batch_size: int                         # 200
    images: int | None                      # images of each domain; None: all
    subset: str                             # "first" n images, or "random": n chosen by the seed, the same in every domain
    shuffle: bool                           # False: in the dataset's order; True: shuffled anew in each segment
    seed: int                               # 0
    profile: corruptions.Profile            # "cifar" or "imagenet": whose constants corrupt clean images
    quantize: bool                          # True: to 8 bits, as the published files are
    device: torch.device | str | None       # where clean images are corrupted, and where batches end up
    prefetch: int                           # 0; batches made ahead in a thread
    start: int                              # 0; the batch to start from


@dataclass(frozen=True, eq=False)
class StreamBuilder:
    """What all streams share: which images of `data`, how they are corrupted, and the segments and the stream made of them.

    `data` is a clean dataset, corrupted as the stream runs, or one that has corrupted images of its own. The other fields
    are those of `Options`.
    """

    data: Dataset
    _: KW_ONLY
    batch_size: int = 200
    images: int | None = None
    subset: str = "first"
    shuffle: bool = False
    seed: int = 0
    profile: corruptions.Profile = "cifar"
    quantize: bool = True
    device: torch.device | str | None = None
    prefetch: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        if self.subset not in ("first", "random"):
            raise DataError(f"subset is 'first' or 'random', not {self.subset!r}")
        if self.profile not in ("cifar", "imagenet"):
            raise DataError(f"profile is 'cifar' or 'imagenet', not {self.profile!r}")
        check_whole("seed", self.seed, 0)
        if self.images is not None and check_whole("images", self.images, 1) > len(self.data):
            raise DataError(f"asked for {self.images} images per domain; {self.data.name} has {len(self.data)}")
        if self.size == 0:
            raise DataError(f"{self.data.name} has no images")

    @property
    def size(self) -> int:
        """Images per domain."""
        return len(self.data) if self.images is None else self.images

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
        picked = draws(self.seed, "subset").choice(len(self.data), self.size, replace=False)
        return torch.from_numpy(np.sort(picked))

    def arrival(self, number: int) -> Tensor:
        """Indices of the images in the order they arrive in the `number`-th segment."""
        if not self.shuffle:
            return self.chosen
        return self.chosen[torch.from_numpy(draws(self.seed, "shuffle", number).permutation(self.size))]

    def segment(self, domain: str, severity: int, number: int = 0, visit: int = 0) -> Segment:
        """The images under one corruption, as the `number`-th segment; an error now if they cannot be loaded later."""
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
        """A function from indices int64 [n] to images under `domain` and labels."""
        if isinstance(self.data, CorruptedDataset):
            if domain == CLEAN:
                raise DataError(f"{self.data.name} has no clean images")
            view = self.data.corrupted(domain, severity)
            if len(view) != len(self.data):
                raise DataError(f"{view.name} has {len(view)} images, {self.data.name} has {len(self.data)}")
            return lambda index: self.placed(view.batch(index))
        if domain != CLEAN:
            check_corruption(domain)

        def load(index: Tensor) -> tuple[Tensor, Tensor]:
            x, y = self.placed(self.data.batch(index))
            return (x if domain == CLEAN else self.corrupt(x, domain, severity, index, quantize=self.quantize)), y

        return load

    def corrupt(
        self, x: Tensor, domain: str, severity: int, index: Tensor, *, quantize: bool = True, salt: int = 0
    ) -> Tensor:
        """`x` under a corruption; what is random in it is drawn from seed, corruption, severity and image index.

        A `salt` other than 0 draws it anew.
        """
        seed = self.seed if salt == 0 else int(draws(self.seed, "salt", salt).integers(2**31))
        keys = corruptions.image_keys(seed, domain, severity, index)
        return corruptions.corrupt(x, domain, severity, self.profile, quantize=quantize, keys=keys)

    def placed(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Images and labels on the stream's device."""
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


_PURPOSES = ("subset", "shuffle", "mixed", "correlated", "walk", "peak", "salt", "markov")


def draws(seed: int, purpose: str, number: int = 0) -> np.random.Generator:
    """A generator for each purpose and number: draws in one place never change those in another."""
    return np.random.Generator(np.random.PCG64([seed, _PURPOSES.index(purpose), number]))


def check_corruption(name: str) -> None:
    """Raise a DataError unless a corruption is called `name`."""
    known = (*corruptions.CORRUPTIONS, *corruptions.VALIDATION_CORRUPTIONS)
    if name not in known:
        raise DataError(f"no corruption is called {name!r}; there are {', '.join(known)}, and {CLEAN}")
