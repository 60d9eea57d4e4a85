"""A stream through a method: answers instead of logits, one record per batch, and the scores of the whole."""

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from petal import functional as F
from petal._optional import optional
from petal.calls import given, inputs_and_labels, mapped, taken
from petal.errors import DataError, PetalWarning
from petal.methods import Adapter
from petal.metrics import BINS, SCORES
from petal.order import Keys

STREAM = "stream"       # the domain of batches that name none


class Prediction(NamedTuple):
    """The answer for each of N samples: its label, that label's probability, and the predictive entropy in nats, each [N].

    `views_used` is True if some sample's answer is an average over augmented views; `probabilities` [N, C] has every class.
    """

    label: Tensor
    probability: Tensor
    entropy: Tensor
    views_used: bool
    probabilities: Tensor


def predict(adapter: Adapter, x: Any, adapt: bool = True, after: bool = False, stream: Keys = None) -> Prediction:
    """Labels with their uncertainty; adapts to the batch unless adapt=False. `stream` is as in a call of the adapter.

    The answer is the method's own, which for most is of before it learned from the batch. With `after` the batch is
    predicted once more, by what has been learned from it too.

    >>> from torch import nn
    >>> answer = predict(adapter=_demo(), x=torch.rand(4, 2))
    >>> answer.label.shape, bool((answer.probability >= 1 / 3).all()), answer.views_used
    (torch.Size([4]), True, False)
    """
    logits = _answer(adapter, x, after, stream) if adapt else adapter.predict(x, **_named(stream))
    probabilities = logits.softmax(1)
    probability, label = probabilities.max(1)
    return Prediction(label, probability, F.entropy(logits), adapter.views_used, probabilities)


def _answer(adapter: Adapter, x: Any, after: bool, stream: Keys = None) -> Tensor:
    logits: Tensor = adapter(x, **_named(stream))
    return adapter.predict(x, **_named(stream)) if after else logits


def _named(stream: Keys) -> dict[str, Any]:
    """The key of a source as an argument, if there is one: a user's own method need not know of it."""
    return {} if stream is None else {"stream": stream}


def _demo() -> Adapter:
    from petal.methods import Source

    return Source(torch.nn.Linear(2, 3))


@dataclass(frozen=True)
class Record:
    """One batch of an evaluation. Scores are means over its samples, as fractions; NaN without labels.

    `calibration` is three rows of counts over equal bins of confidence: samples, summed confidence, summed correctness.
    `forwards` and `backwards` are how often networks were run on a batch of this size, and their results had a gradient:
    counted by samples, whichever network it was, so that half a batch is half a pass.
    """

    position: int
    domain: str
    severity: int
    n: int
    error: float
    nll: float
    brier: float
    confidence: float
    entropy: float
    calibration: list[list[float]] = field(repr=False)
    views_used: bool = False
    restored: float = 0.0
    skipped: int = 0
    seconds: float = 0.0
    forwards: float = 0.0
    backwards: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data for a line of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Scores:
    """Error, NLL, Brier score and calibration error over `n` samples, as fractions."""

    n: int
    error: float
    nll: float
    brier: float
    ece: float

    @classmethod
    def pooled(
        cls, n: Sequence[float], error: Sequence[float], nll: Sequence[float], brier: Sequence[float], counts: Tensor
    ) -> "Scores":
        """Over all samples, from the sizes and mean scores of batches and their summed calibration counts [3, bins].

        >>> Scores.pooled([1, 3], [1.0, 0.0], [2.0, 0.0], [1.0, 0.0], torch.tensor([[4.0], [2.0], [3.0]]))
        Scores(n=4, error=0.25, nll=0.5, brier=0.25, ece=0.25)
        """
        total = sum(n)
        if not total:
            return cls(0, math.nan, math.nan, math.nan, math.nan)

        def mean(values: Sequence[float]) -> float:
            return float(sum(v * k for v, k in zip(values, n, strict=True) if k) / total)

        ece = F.calibration_error(counts).item() if bool(counts.any()) else math.nan
        return cls(int(total), mean(error), mean(nll), mean(brier), ece)


@dataclass(frozen=True)
class Result:
    """Scores of a whole evaluation: pooled over all samples, and for each domain over all its visits."""

    mean: Scores
    by_domain: Mapping[str, Scores]
    records: list[Record] = field(repr=False, default_factory=list)

    def to_frame(self) -> Any:
        """The records as a pandas frame, a row a batch."""
        pd = optional("pandas", "a frame", "frames")
        return pd.DataFrame([record.to_json() for record in self.records]).drop(columns="calibration", errors="ignore")


class Callback(Protocol):
    """Who is told of an evaluation while it runs, such as the trackers of `petal.track`."""

    def on_record(self, record: Record) -> None:
        """After every batch."""
        ...

    def on_end(self, result: Result) -> None:
        """After the last one."""
        ...


def iter_evaluate(
    adapter: Adapter, stream: Iterable[Any], reset_on_domain_change: bool = False, after: bool = False
) -> Iterator[Record]:
    """Run a stream through a method, predicting online, and yield a record after every batch.

    A stream is any iterable, such as a DataLoader, of batches (x, y), dicts with `labels`, inputs alone, or objects with `x`
    and perhaps `y`, `domain`, `severity` and `position`. Without labels there are no scores (NaN); confidence, entropy and
    what the method did are there. `after` is that of `predict`: scores of the answers after learning from the batch.
    """
    previous: tuple[str, int] | None = None
    runs = RunsWarning(adapter)
    for number, batch in enumerate(stream):
        here = (getattr(batch, "domain", STREAM), int(getattr(batch, "severity", 0)))
        if reset_on_domain_change and previous is not None and here != previous:
            adapter.reset()
        previous = here
        record, _ = evaluate_batch(adapter, batch, number, after)
        runs.look(inputs_and_labels(batch)[1])
        yield record


class RunsWarning:
    """Warns, once, where labels come in runs and the method goes by the statistics of a batch."""

    def __init__(self, adapter: Adapter) -> None:
        self.kind, self.order = adapter.kind, Order() if adapter.by_batch else None

    def look(self, labels: Tensor | None) -> None:
        """After every batch."""
        if self.order is not None and labels is not None and self.order.runs(labels):
            self.order = None
            warnings.warn(
                f"the labels of this stream come in runs, and {self.kind} goes by the statistics of a batch, which is then "
                "of few classes: put petal.SmallBatch around it (METHOD+small on the command line), or choose a method for "
                "such streams (`petal methods`)", PetalWarning, stacklevel=3,
            )  # fmt: skip


class Order:
    """Whether the labels of a stream come in runs: by how many are followed by their like."""

    def __init__(self) -> None:
        self.counts = torch.zeros(0, dtype=torch.int64)
        self.pairs = self.alike = 0

    def runs(self, labels: Tensor) -> bool:
        """After one more batch: true if, of 200 pairs or more, half of those are alike that by chance would not be.

        >>> Order().runs(torch.arange(300) // 30), Order().runs(torch.arange(300) % 10), Order().runs(torch.zeros(300).int())
        (True, False, False)
        """
        labels = labels.cpu().long()
        counts = torch.bincount(labels, minlength=len(self.counts))
        self.counts = counts + nn.functional.pad(self.counts, (0, len(counts) - len(self.counts)))
        self.pairs += len(labels) - 1
        self.alike += int((labels[1:] == labels[:-1]).sum())
        by_chance = float((self.counts / self.counts.sum()).square().sum())
        return self.pairs >= 200 and self.alike / self.pairs > (1 + by_chance) / 2


def evaluate_batch(
    adapter: Adapter, batch: Any, number: int = 0, after: bool = False, learns: bool = True
) -> tuple[Record, Tensor]:
    """Predict and adapt to one batch, and score the prediction. Returns the record and the logits [N, C].

    With `learns=False` there is no time to learn: the answer is that of one pass (`Adapter.glance`).

    Labels that cannot be labels are refused before the method sees the batch; labels of no class once it has said how many
    classes there are. Of a batch that says which of its images are `benign`, these alone are scored.
    """
    x, y = inputs_and_labels(batch)
    x, domain = taken(x), getattr(batch, "domain", STREAM)
    x = mapped(x, lambda t: t.to(adapter.device) if isinstance(t, Tensor) else t)       # what is none the adapter refuses
    if y is not None:
        _check_labels(x, y, number, domain)
        y = y.to(adapter.device)
    before, started = (adapter.work.forwards, adapter.work.backwards), time.perf_counter()
    stream = getattr(batch, "stream", None)
    logits = _answer(adapter, given(x), after, stream) if learns else adapter.glance(given(x), **_named(stream))
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    seconds = time.perf_counter() - started
    benign = getattr(batch, "benign", None)
    exact = logits.double() if benign is None else logits[benign.to(logits.device)].double()
    if y is not None and benign is not None:
        y = y[benign.to(y.device)]
    each = [F.confidence(exact), F.entropy(exact)]
    if y is not None:
        if bool((y >= logits.shape[1]).any()):
            raise _bad_labels(y, number, domain, f"the network predicts {logits.shape[1]} classes, from 0")
        each = [*(score(exact, y.long()).double() for score in SCORES.values()), *each]
    scores = torch.stack([value.mean() for value in each]).tolist()
    if y is None:
        scores = [math.nan] * len(SCORES) + scores
    record = Record(
        position=int(getattr(batch, "position", number)),
        domain=domain,
        severity=int(getattr(batch, "severity", 0)),
        n=len(exact),
        error=scores[0],
        nll=scores[1],
        brier=scores[2],
        confidence=scores[3],
        entropy=scores[4],
        calibration=[[0.0] * BINS] * 3 if y is None else F.calibration_counts(exact, y.long(), BINS).tolist(),
        views_used=learns and adapter.views_used,
        restored=float(adapter.restored) if learns else 0.0,
        skipped=adapter.skipped,
        seconds=seconds,
        forwards=(adapter.work.forwards - before[0]) / len(logits),
        backwards=(adapter.work.backwards - before[1]) / len(logits),
    )
    return record, logits


def _check_labels(x: Any, y: Any, number: int, domain: str) -> None:
    if not isinstance(y, Tensor):
        raise DataError(f"batch {number} of domain {domain!r} has labels that are a {type(y).__name__} and no tensor")
    rows = tuple(getattr(x, "shape", ())[:1])
    if y.is_floating_point() or y.is_complex() or tuple(y.shape) != rows or bool((y < 0).any()):
        expected = f"labels are whole numbers from 0, one for each of the {sum(rows)} samples"
        raise _bad_labels(y, number, domain, expected)


def _bad_labels(y: Tensor, number: int, domain: str, expected: str) -> DataError:
    span = f" from {y.min().item()} to {y.max().item()}" if y.numel() and not y.is_complex() else ""
    return DataError(f"batch {number} of domain {domain!r} has {y.dtype} labels of shape {list(y.shape)}{span}: {expected}")


def evaluate(
    adapter: Adapter,
    stream: Iterable[Any],
    reset_on_domain_change: bool = False,
    after: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run a whole stream through a method (see `iter_evaluate`). TENT-online is Tent with reset_on_domain_change=True.

    `callbacks` are told every record, and the result in the end.

    >>> from types import SimpleNamespace
    >>> batch = SimpleNamespace(x=torch.rand(4, 2), y=torch.zeros(4, dtype=torch.long), domain="fog", severity=5)
    >>> evaluate(_demo(), [batch]).mean.n
    4
    """
    records = []
    for record in iter_evaluate(adapter, stream, reset_on_domain_change, after):
        records.append(record)
        for callback in callbacks:
            callback.on_record(record)
    result = summarize(records)
    for callback in callbacks:
        callback.on_end(result)
    return result


def summarize(records: Iterable[Record]) -> Result:
    """The scores of a whole run from its records."""
    records = list(records)
    if not records:
        raise DataError("the stream gave no batches: there is nothing to evaluate")
    domains: dict[str, list[Record]] = {}
    for record in records:
        domains.setdefault(record.domain, []).append(record)
    return Result(_pooled(records), {name: _pooled(group) for name, group in domains.items()}, records)


def _pooled(records: list[Record]) -> Scores:
    counts = torch.tensor([r.calibration for r in records], dtype=torch.float64).sum(0)
    n, error, nll, brier = ([getattr(r, name) for r in records] for name in ("n", "error", "nll", "brier"))
    return Scores.pooled(n, error, nll, brier, counts)
