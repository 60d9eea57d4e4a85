"""Any stream with an attacker in it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from petal.attacks.scene import Attack, Scene
from petal.calls import inputs_and_labels
from petal.data.streams import Batch
from petal.errors import ConfigError, DataError
from petal.evaluate import STREAM
from petal.methods import Adapter

APART = 1_000_003   # between the random numbers of two seeds: torch takes 32 bits of one
OWN = 200           # images that an attacker keeps


class Poisoned:
    """A stream in which the `share` of all images is an attacker's: in each batch so many places are his.

    `stream` is anything that `petal.evaluate` takes, with labels. Of a share that is less than one image a batch the images
    come in some of the batches. The places are drawn anew for each batch from `seed`, or are its first ones if the attack
    wants its images in a row. Batches say in `benign` which images are not his: `petal.evaluate` scores these alone.

    Attacks that know the weights need the `victim`, the adapter that the stream goes to, and see it as it is when the
    batch is asked for. An attack with the same seed on the same adapter is the same to the bit.

    >>> import petal
    >>> stream = petal.streams.single(petal.data.digits("test"), "fog", batch_size=50, images=100)
    >>> poisoned = Poisoned(stream, petal.attacks.Picture("stripes"), share=0.2)
    >>> [(len(batch), int(batch.benign.sum())) for batch in poisoned]
    [(50, 40), (50, 40)]
    """

    def __init__(
        self, stream: Iterable[Any], attack: Attack, share: float = 0.2, victim: Adapter | None = None, seed: int = 0
    ) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"share of the images that are the attacker's is from 0 to 1, got {share!r}")
        self.stream, self.attack, self.share, self.victim, self.seed = stream, attack, share, victim, seed

    def __len__(self) -> int:
        return len(self.stream)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        seen, own = 0, list[Tensor]()
        for number, given in enumerate(self.stream):
            batch = as_batch(given, number)
            places = self.places(batch, seen)
            seen += len(batch)
            mine = batch.x[places], batch.y[places]
            own = [torch.cat(pair)[:OWN] for pair in zip(own, mine, strict=True)] if own else list(mine)
            x, where = batch.x, torch.zeros(len(batch), dtype=torch.bool, device=batch.x.device)
            where[places] = True
            if len(places):
                generator = torch.Generator().manual_seed(self.seed * APART + batch.position + 1)
                scene = Scene(batch.x, batch.y, where, own[0], own[1], self.victim, generator)
                x = x.clone()
                x[where] = self.attack.images(scene).detach().to(x)
            yield replace(batch, x=x, benign=~where)

    def places(self, batch: Batch, seen: int) -> Tensor:
        """The attacker's places in a batch, in order, after so many images."""
        count = int((seen + len(batch)) * self.share + 1e-9) - int(seen * self.share + 1e-9)
        if self.attack.together:
            return torch.arange(count)
        generator = torch.Generator().manual_seed(self.seed * APART + batch.position)
        return torch.randperm(len(batch), generator=generator)[:count].sort().values


def as_batch(given: Any, number: int) -> Batch:
    """What a stream gives as a batch of one tensor with labels."""
    x, y = inputs_and_labels(given)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise DataError(f"batch {number} is to be poisoned and is no tensor with labels: both are needed")
    if isinstance(given, Batch):
        return given
    domain, severity = getattr(given, "domain", STREAM), int(getattr(given, "severity", 0))
    position = int(getattr(given, "position", number))
    return Batch(x, y, domain, severity, torch.arange(len(y)), position, stream=getattr(given, "stream", None))
