"""ReservoirTTA: parameters of their own for every domain, found again by the style of its batches (Vray et al., 2025)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from petal.methods.inputs import check_number
from petal.methods.state import optimizer_state, optimizer_to_load, optimizer_values
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
    In the released code SAR's momentum is shared by all domains, and a reset of RDumb has no effect; here momentum and
    count belong to a domain.
    """

    card = Card(
        title="ReservoirTTA", year=2025, adapts=AFFINE,
        paper="Vray et al., ReservoirTTA: prolonged test-time adaptation for evolving and recurring domains, NeurIPS 2025",
    )  # fmt: skip
    prefix = "reservoir."

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
        self.capacity, self.threshold, self.quantile, self.warmup, self.average = capacity, threshold, quantile, warmup, average
        self.known = None if known is None else known.to(adapter.device, adapter.dtype)
        self.style = LayerStyle(by_source_statistics(adapter), layers) if style is None else style
        self.clusters = Clusters(room, lr)
        self.reset_own()

    @property
    def domains(self) -> int:
        """Domains found so far."""
        return len(self.bank)

    def forward(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Find the domain, predict, and let the method learn with what belongs to it."""
        if self.stopped:
            return self.predict(x, stream)
        with self._guarded(x) as x, torch.enable_grad():
            for _ in range(self.steps):
                logits = self._once(x).detach()
            return self.corrected(logits)

    def step(self, x: Tensor) -> Tensor:
        """The method's step, after a prediction with averaged weights."""
        if self.domains == 1 or not self.average:
            return self.adapter.step(x)
        with torch.no_grad(), self._borrowed(self._mean):
            answer = self.adapter.prediction(x)
        self.adapter.step(x)
        return answer

    def predict(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict a batch: what a call would return next, with nothing changed."""
        with self._guarded(x) as x, torch.no_grad():
            way = self._way(x)
            with self._borrowed(way.mean if self.average else way.rows[way.index]):
                return self.adapter.predict(x)

    def describe(self) -> dict[str, str]:
        """What the method does, and how many domains it has."""
        origin = "given" if self.threshold is not None else "the source's" if self.known is not None else "learned"
        text = f"{self.domains} domains of up to {self.capacity}; threshold: {origin}"
        return self.adapter.describe() | {"reservoir": text}

    # A batch and its domain

    def _once(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            way, before = self._way(x), self.active
            self._mean = way.mean
            if way.parent is not None:
                self._open(way)
            self._switch(way.index)
        try:
            logits = self._run(self.step, x)
        except BaseException:
            with torch.no_grad():
                self._switch(before)
                if way.parent is not None:
                    self.bank = self.bank[:-1]
                    self.kept.pop()
            raise
        with torch.no_grad():
            self._write_row()
            self._learn(way, len(x))
        return logits

    def _way(self, x: Tensor) -> "Way":
        """The domain of a batch, and the weights that predict it. Nothing changes."""
        self._write_row()
        style, clusters = self._style(x), self.clusters
        if clusters.mean is None:
            return Way(style, self.bank, 0, None, style.new_ones(1))
        near = clusters.distances(style)
        limit = style.new_tensor(torch.inf) if clusters.threshold is None else clusters.threshold
        index, far = torch.stack([near.argmin(), near.amin() > limit]).tolist()
        if not far or self.domains == self.capacity or len(x) < self.largest:
            return Way(style, self.bank, index, None, (-near).softmax(0))
        parent = self._most_informative(x)
        rows, near = torch.cat([self.bank, self.bank[parent][None]]), torch.cat([near, near.new_zeros(1)])
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
        for row in self.bank:
            with self._borrowed(row):
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

    # What belongs to a domain

    def _open(self, way: "Way") -> None:
        """A domain with weights and optimizer of its parent, and declared state as at the beginning."""
        assert way.parent is not None
        kept = self.kept[way.parent] or self._taken()
        optimizer = {key: value.clone() for key, value in kept.optimizer.items()}
        start = {name: None if value is None else value.clone() for name, value in self._declared.items()}
        self.bank, self.kept = way.rows, [*self.kept, Kept(optimizer, start)]

    def _switch(self, index: int) -> None:
        """Let the adapter have what belongs to another domain."""
        if index == self.active:
            return
        new = self.kept[index]
        assert new is not None
        self.kept[self.active], self.kept[index] = self._taken(), None
        self.active = index
        self._put(self.bank[index])
        self.adapter.rewind(new.state)
        now = optimizer_values(self._optimizer, self.adapted)
        if now.keys() == new.optimizer.keys() and all(isinstance(value, Tensor) for value in now.values()):
            if now:
                torch._foreach_copy_(list(now.values()), [new.optimizer[key] for key in now])
        elif self.descent is not None:      # one of the two has made no step yet
            state = {f"optimizer.state.{key}": value for key, value in new.optimizer.items()}
            state = optimizer_state(self._optimizer, {}) | state
            fresh = self.adapter._fresh_optimizer()
            fresh.load_state_dict(optimizer_to_load(fresh, self.adapted, state, []))
            self.descent.optimizer = fresh

    def _taken(self) -> "Kept":
        """Copies of what belongs to the domain that the adapter has, but for its weights."""
        values = optimizer_values(self._optimizer, self.adapted)
        return Kept({key: torch.as_tensor(value).clone() for key, value in values.items()}, self.adapter.snapshot())

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self.adapter.optimizer is not None
        return self.adapter.optimizer

    def _row(self) -> Tensor:
        return torch.cat([value.detach().flatten() for value in self.adapted.values()])

    def _write_row(self) -> None:
        """The weights may have been changed by others since."""
        self.bank[self.active] = self._row()

    def _put(self, row: Tensor) -> None:
        parameters = list(self.adapted.values())
        parts = row.split([p.numel() for p in parameters])
        torch._foreach_copy_(parameters, [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)])

    @contextmanager
    def _borrowed(self, row: Tensor) -> Iterator[None]:
        """In here the network has these weights."""
        kept = self._row()
        self._put(row)
        try:
            yield
        finally:
            self._put(kept)

    # The state

    def reset_own(self) -> None:
        """One domain, and what is known of the source."""
        with torch.inference_mode(False), torch.no_grad():
            self.bank = torch.cat([value.flatten() for value in self.adapter.origin().values()])[None]      # [domains, P]
            self.kept: list[Kept | None] = [None]       # what belongs to a domain; None for the one that the adapter has
            self.active, self.largest = 0, 0
            self.clusters.clear()
            if self.known is not None:
                self.clusters.begin(self.known.mean(0))
                self.clusters.threshold = spread(self.known, self.quantile)
            if self.threshold is not None:
                self.clusters.threshold = torch.tensor(self.threshold, device=self.device, dtype=self.dtype)

    def own_state(self) -> dict[str, Tensor]:
        """Weights of all domains, what else belongs to those that the adapter does not have, and the centroids."""
        with torch.no_grad():
            self._write_row()
        state = {"bank": self.bank.clone(), "counters": torch.tensor([self.active, self.largest])}
        state |= {f"clusters.{key}": value for key, value in self.clusters.state().items()}
        for number, kept in enumerate(self.kept):
            if kept is not None:
                declared = {f"{number}.state.{key}": value.clone() for key, value in kept.state.items() if value is not None}
                state |= declared | {f"{number}.optimizer.{key}": value.clone() for key, value in kept.optimizer.items()}
        return state

    def check_own_state(self, state: Mapping[str, Tensor]) -> list[str]:
        """Names and shapes, for as many domains as it is of."""
        missing = [f"missing 'reservoir.{key}'" for key in ("bank", "counters") if key not in state]
        if missing:
            return missing
        bank, counters = state["bank"], state["counters"]
        shape = [len(bank), self.bank.shape[1]]
        if list(bank.shape) != shape or not 1 <= len(bank) <= self.capacity or list(counters.shape) != [2]:
            text = f"of up to {self.capacity} domains with {shape[1]} weights"
            return [f"'reservoir.bank' is {list(bank.shape)} instead {text}, with 2 counters"]
        parts = _by_first(key for key in state if key not in ("bank", "counters"))
        clusters = {key: state[f"clusters.{key}"] for key in parts.pop("clusters", [])}
        problems = self.clusters.problems(clusters, len(bank))
        others = {str(number) for number in range(len(bank))} - {str(int(counters[0]))}
        for number, keys in parts.items():
            known = {f"state.{name}" for name in self._declared}
            found = {f"optimizer.state.{key.removeprefix('optimizer.')}": state[f"{number}.{key}"]
                     for key in keys if key.startswith("optimizer.")}  # fmt: skip
            fresh = self.adapter._fresh_optimizer()
            optimizer_to_load(fresh, self.adapted, found | optimizer_state(fresh, {}), problems)
            wrong = [key for key in keys if number not in others or not (key in known or key.startswith("optimizer."))]
            problems += [f"unexpected 'reservoir.{number}.{key}'" for key in wrong]
        return problems

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checked state."""
        with torch.inference_mode(False), torch.no_grad():
            self.bank = state["bank"].to(self.bank, copy=True)
            self.active, self.largest = map(int, state["counters"].tolist())
            parts = _by_first(key for key in state if key not in ("bank", "counters"))
            self.clusters.load({key: state[f"clusters.{key}"] for key in parts.pop("clusters", [])}, self.bank)
            if self.clusters.threshold is None and self.threshold is not None:
                self.clusters.threshold = self.bank.new_tensor(self.threshold)
            self.kept = [Kept({}, dict.fromkeys(self._declared)) for _ in self.bank]
            self.kept[self.active] = None
            for number, keys in parts.items():
                kept = self.kept[int(number)]
                assert kept is not None
                for key in keys:
                    kind, _, name = key.partition(".")
                    value: dict[str, Any] = kept.state if kind == "state" else kept.optimizer
                    value[name] = state[f"{number}.{key}"].to(self.device, copy=True)


@dataclass
class Kept:
    """What belongs to a domain besides its weights: the optimizer's values by <parameter>.<key>, and declared state."""

    optimizer: dict[str, Tensor]
    state: dict[str, Tensor | None]


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


def _by_first(keys: Iterator[str] | Sequence[str]) -> dict[str, list[str]]:
    """Keys by what they begin with, without it."""
    found: dict[str, list[str]] = {}
    for key in keys:
        first, _, rest = key.partition(".")
        found.setdefault(first, []).append(rest)
    return found
