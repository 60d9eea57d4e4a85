"""ReservoirTTA: parameters of their own for every domain, found again by the style of its batches (Vray et al., 2025)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from petal import functional as F
from petal.errors import ConfigError, StatisticsError
from petal.methods.base import Adapter
from petal.methods.card import AFFINE, Card
from petal.methods.clusters import Clusters, spread
from petal.methods.domains import Domains
from petal.methods.failures import with_memory
from petal.methods.inputs import check_number
from petal.methods.style import LayerStyle, Style
from petal.methods.wrapper import Wrapper, beginning, check_learner
from petal.norm import MixedNorm, batch_norms, replaced
from petal.order import Keys
from petal.statistics import SourceStatistics


class Reservoir(Wrapper):
    """Up to `capacity` sets of all that a method learns: weights, optimizer and declared state, one for each domain.

    A whole batch whose style is farther than the threshold from every domain's centroid opens a domain. It begins with
    weights and optimizer of the one whose predictions for the batch are certain and diverse. The method learns with what
    belongs to the nearest domain; the answer is the network's with weights averaged over domains by softmax(-distance), or
    with `average=False` the nearest domain's. A batch smaller than one before opens none. When all domains are there,
    another one is learned with the nearest: none is ever dropped.

    The style is that of the first `layers` of the network (`LayerStyle`), or of `style`, a function from a batch to a
    vector, such as a VGG's in the paper. With `statistics` that have styles, the first centroid is their mean and the
    threshold the `quantile` of their distances. Without, the first centroid is the first batch's, and the threshold that
    quantile over the first `warmup` batches, among which no domain opens: they have to be of one domain, and of fewer pairs
    the quantile is about the largest distance. `threshold` is taken as it is. Centroids move by AdamW of rate `lr` on a
    sample of `buffer` styles, equally many for each domain (`Clusters`).

    One forward with averaged weights and the first layers are added to the method's step; the host waits for the style.
    In the released code (LTS5/ReservoirTTA, f876640) all domains share SAR's momentum, and a scheduled reset as RDumb's ends
    in an error around EATA and does nothing around others; here momentum and count belong to a domain.
    """

    card = Card(
        title="ReservoirTTA", year=2025, adapts=AFFINE,
        paper="Vray et al., ReservoirTTA: prolonged test-time adaptation for evolving and recurring domains, NeurIPS 2025",
    )  # fmt: skip
    prefix = "reservoir."
    largest: int        # images in the largest batch so far

    def __init__(
        self,
        adapter: Adapter,
        statistics: SourceStatistics | None = None,
        capacity: int = 16,
        buffer: int = 1024,
        threshold: float | None = None,
        quantile: float = 0.999,
        warmup: int = 20,
        lr: float = 1e-4,
        average: bool = True,
        layers: int = 3,
        style: Style | None = None,
    ) -> None:
        super().__init__(adapter)
        check_learner("Reservoir", adapter)
        check_number("capacity", capacity, low=1, whole=True)
        check_number("buffer", buffer, low=capacity, whole=True)
        check_number("threshold", 0 if threshold is None else threshold, low=0)
        check_number("quantile", quantile, low=0, high=1)
        check_number("warmup", warmup, low=2, whole=True)
        check_number("lr", lr, low=0)
        room = buffer // capacity
        known = None if statistics is None else statistics.styles
        if threshold is None and known is None and room < warmup:
            raise ConfigError(f"buffer={buffer} holds {room} styles a domain, fewer than the warmup of {warmup} batches")
        self.capacity, self.threshold, self.quantile = capacity, threshold, quantile
        self.warmup, self.average = warmup, average
        self.known = None if known is None else known.to(adapter.device, adapter.dtype)
        self.style = LayerStyle(by_source_statistics(adapter), layers) if style is None else style
        self.clusters, self.stored = Clusters(room, lr), Domains(adapter)
        self.reset_own()

    @property
    def domains(self) -> int:
        """Domains found so far."""
        return len(self.stored)

    @property
    def active(self) -> int:
        """The domain of the last batch."""
        return self.stored.active

    def forward(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Find the domain, predict, and let the method learn with what belongs to it."""
        if self.stopped:
            return self.predict(x, stream)
        return with_memory(self, lambda: self._adapted_to(x), x, stream)

    def _adapted_to(self, x: Tensor) -> Tensor:
        with self._guarded(x) as x, torch.enable_grad():
            for _ in range(self.steps):
                logits = self._once(x).detach()
            return self.corrected(logits)

    def step(self, x: Tensor) -> Tensor:
        """The method's step, after a prediction with averaged weights."""
        if self.domains == 1 or not self.average:
            return self.adapter.step(x)
        with torch.no_grad(), self.stored.borrowed(self._mean):
            answer = self.adapter.prediction(x)
        self.adapter.step(x)
        return answer

    def predict(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict a batch: what a call would return next, with nothing changed."""
        with self._guarded(x) as x, torch.no_grad():
            way = self._way(x)
            with self.stored.borrowed(way.mean if self.average else way.rows[way.index]):
                return self.adapter.predict(x)

    def describe(self) -> dict[str, str]:
        """What the method does, and how many domains it has."""
        origin = "given" if self.threshold is not None else "the source's" if self.known is not None else "learned"
        text = f"{self.domains} of up to {self.capacity} domains; threshold: {origin}"
        return self.adapter.describe() | {"reservoir": text}

    # A batch and its domain

    def _once(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            way, before = self._way(x), self.active
            self._mean = way.mean
            if way.parent is not None:
                self.stored.open(way.parent)
            self.stored.switch(way.index)
        try:
            logits = self._run(self.step, x)
        except BaseException:
            with torch.no_grad():
                self.stored.switch(before)
                if way.parent is not None:
                    self.stored.drop()
            raise
        with torch.no_grad():
            self.stored.write()
            self._learn(way, len(x))
        return logits

    def _way(self, x: Tensor) -> "Way":
        """The domain of a batch, and the weights that predict it. Nothing changes."""
        self.stored.write()
        style, clusters = self._style(x), self.clusters
        if clusters.mean is None:
            return Way(style, self.stored.bank, 0, None, style.new_ones(1))
        near = clusters.distances(style)
        limit = style.new_tensor(torch.inf) if clusters.threshold is None else clusters.threshold
        index, far = torch.stack([near.argmin(), near.amin() > limit]).tolist()
        if not far or self.domains == self.capacity or len(x) < self.largest:
            return Way(style, self.stored.bank, index, None, (-near).softmax(0))
        parent = self._most_informative(x)
        rows, near = torch.cat([self.stored.bank, self.stored.bank[parent][None]]), torch.cat([near, near.new_zeros(1)])
        return Way(style, rows, self.domains, parent, (-near).softmax(0))

    def _style(self, x: Tensor) -> Tensor:
        style = self.style(x).detach().flatten().to(self.device, self.dtype)
        expected = None if self.clusters.mean is None else len(self.clusters.mean)
        if expected is not None and len(style) != expected:
            raise StatisticsError(f"the style of a batch is of {len(style)} numbers, and those known are of {expected}")
        return style

    def _most_informative(self, x: Tensor) -> int:
        """The domain whose predictions are certain one by one, and diverse together."""
        values = []
        for row in self.stored.bank:
            with self.stored.borrowed(row):
                logits = self._run(self.adapter.prediction, x)
            mean = logits.softmax(1).mean(0)
            values.append(F.entropy(logits).mean() + (mean * (mean + 1e-8).log()).sum())
        return int(torch.stack(values).argmin())

    def _learn(self, way: "Way", size: int) -> None:
        """Let the centroids follow."""
        clusters = self.clusters
        if clusters.mean is None:
            clusters.begin(way.style)
        if way.parent is not None:
            clusters.open(way.style)
        clusters.learn(way.style, self.generator)
        self.largest = max(self.largest, size)
        if clusters.threshold is None and len(clusters.sample) >= self.warmup:
            clusters.threshold = spread(clusters.sample, self.quantile)

    # The state

    def reset_own(self) -> None:
        """One domain, and what is known of the source."""
        self.stored.clear()
        self.clusters.clear()
        self.largest = 0
        with torch.inference_mode(False), torch.no_grad():
            if self.known is not None:
                self.clusters.begin(self.known.mean(0))
                self.clusters.threshold = spread(self.known, self.quantile)
            if self.threshold is not None:
                self.clusters.threshold = torch.tensor(self.threshold, device=self.device, dtype=self.dtype)

    def own_state(self) -> dict[str, Tensor]:
        """What belongs to every domain, and the centroids."""
        state = {f"domains.{key}": value for key, value in self.stored.state().items()}
        state |= {f"clusters.{key}": value for key, value in self.clusters.state().items()}
        return state | {"largest": torch.tensor(self.largest)}

    def check_own_state(self, state: Mapping[str, Tensor]) -> list[str]:
        """Names and shapes, for as many domains as it is of."""
        domains, clusters = _part(state, "domains."), _part(state, "clusters.")
        wrong = [] if "largest" in state else ["missing 'largest'"]
        wrong += self.stored.problems(domains, self.capacity)
        wrong += self.clusters.problems(clusters, len(domains["bank"])) if not wrong else []
        known = ("domains.", "clusters.", "largest")
        wrong += [f"unexpected {key!r}" for key in state if not key.startswith(known)]
        return [f"{problem} of the reservoir" for problem in wrong]

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checked state."""
        with torch.inference_mode(False), torch.no_grad():
            self.stored.load(_part(state, "domains."))
            self.clusters.load(_part(state, "clusters."), self.stored.bank)
            self.largest = int(state["largest"])
            if self.clusters.threshold is None and self.threshold is not None:
                self.clusters.threshold = torch.tensor(self.threshold, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class Way:
    """A batch's style, the weights of all domains [k, P], its own domain among them, where that comes from if it is new."""

    style: Tensor
    rows: Tensor
    index: int
    parent: int | None
    shares: Tensor

    @property
    def mean(self) -> Tensor:
        """The weights averaged over domains [P]."""
        return self.shares @ self.rows


def by_source_statistics(adapter: Adapter) -> Any:
    """The network as it began, normalising by the source's statistics where it has some."""
    network = beginning(adapter)
    known = all(layer.running_mean is not None or hasattr(layer, "source_statistics") for _, layer in batch_norms(network))
    return replaced(network, partial(MixedNorm, share=0.0)) if known else network


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
