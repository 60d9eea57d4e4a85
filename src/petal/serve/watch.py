"""What can be watched: numbers for Prometheus, a history for the live page, the latest images."""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = 900                               # of history for the page
IMAGES = 12                                 # latest images for the page
WINDOW = 100                                # samples that a mean is about
LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Seen:
    """An image with what the adapted and the source network made of it."""

    pixels: NDArray[np.float32]             # [C, H, W]
    label: int
    probability: float
    source_label: int
    source_probability: float
    version: str
    time: float


class Metrics:
    """The numbers that Prometheus reads, in a registry of their own."""

    def __init__(self, batch_size: int, names: Sequence[tuple[str, str]]) -> None:
        self.registry = r = CollectorRegistry()
        sizes = sorted({n for n in (1, 2, 5, 10, 20, 50, 100, 200) if n < batch_size} | {batch_size})
        self.requests = Counter("petal_requests", "Inference requests", ["protocol", "target", "status"], registry=r)
        self.latency = Histogram(
            "petal_request_seconds", "Seconds from a request to its answer", ["target"], buckets=LATENCY, registry=r
        )
        self.samples = Counter("petal_samples", "Samples answered", ["target"], registry=r)
        self.refused = Counter("petal_refused", "Requests refused before the queue, by reason", ["reason"], registry=r)
        self.failed = Counter("petal_failed_batches", "Batches that failed in the worker", registry=r)
        self.queue = Gauge("petal_queue_samples", "Samples that wait for the worker", registry=r)
        self.queue_limit = Gauge("petal_queue_limit_samples", "Samples that may wait", registry=r)
        self.batches = Histogram("petal_batch_samples", "Samples of a batch", ["target"], buckets=sizes, registry=r)
        self.batch_seconds = Histogram(
            "petal_batch_seconds", "Seconds the worker spent on a batch, learning included", ["target"], buckets=LATENCY,
            registry=r,
        )
        self.answer_seconds = Histogram(
            "petal_answer_seconds", "Seconds of these until the batch was answered", ["target"], buckets=LATENCY, registry=r
        )
        self.unlearned = Counter(
            "petal_unlearned_batches", "Batches answered from which learning failed, by reason", ["reason"], registry=r
        )
        for reason in ("error", "memory", "device"):    # from 0 on, so that the first one is an increase
            self.unlearned.labels(reason)
        self.confidence = Gauge("petal_confidence", "Mean probability of the label, about the last 100 samples", registry=r)
        self.entropy = Gauge("petal_entropy_nats", "Mean predictive entropy, about the last 100 samples", registry=r)
        self.disagreement = Gauge(
            "petal_source_disagreement_ratio", "Share of labels that are not the source's, about 100 samples", registry=r
        )
        self.drift = Gauge(
            "petal_source_distance", "Root mean square distance of the weights from where they started", registry=r
        )
        self.restored = Gauge("petal_restored_ratio", "Share of weights restored in the last step", registry=r)
        self.skipped = Gauge(
            "petal_skipped_updates", "Updates not made: loss or gradient not finite, or memory ran out", registry=r
        )
        self.short_of_memory = Gauge(
            "petal_out_of_memory_updates", "Of the skipped updates those for which memory ran out", registry=r
        )
        self.memory = Gauge("petal_memory_samples", "Samples in the memory that is learned from", registry=r)
        self.order = Gauge("petal_order_belief_ratio", "How far the order of the stream is believed, 0 to 1", registry=r)
        self.streams = Gauge("petal_order_streams", "Sources of images whose order is followed", registry=r)
        self.temperature = Gauge("petal_temperature", "By which answers are softened; 1 does nothing", registry=r)
        for gauge in (self.memory, self.order, self.streams, self.temperature):
            gauge.set(math.nan)             # until the adapter says that it has such a thing
        self.alarms = Counter("petal_guard_alarms", "Alarms of the guard", ["signal", "action"], registry=r)
        self.signals = Gauge("petal_guard_signal", "Signals that the guard watches", ["signal"], registry=r)
        self.pulls = Gauge("petal_guard_pulls", "Times that the guard drew slow drift back", registry=r)
        self.version = Gauge("petal_version", "Version of the weights in service", registry=r)
        self.frozen = Gauge("petal_frozen", "1 while adaptation is frozen", registry=r)
        self.ready = Gauge("petal_ready", "1 while requests are accepted", registry=r)
        self.checkpoint_age = Gauge("petal_checkpoint_age_seconds", "Seconds since the last checkpoint", registry=r)
        self.checkpoint_failures = Counter("petal_checkpoint_failures", "Checkpoints that could not be written", registry=r)
        info = Gauge("petal_info", "What is served", [name for name, _ in names], registry=r)
        info.labels(*(value for _, value in names)).set(1)


FIELDS = ("requests", "samples", "refused", "confidence", "entropy", "disagreement", "distance", "queue", "ms")
_SUMS = ("requests", "samples", "refused")


class History:
    """One row per second for the live page: sums of what happened in it, last values of the rest (None before the first)."""

    def __init__(self, seconds: int = SECONDS) -> None:
        self.lock = threading.Lock()
        self.rows: deque[list[float | None]] = deque(maxlen=seconds)

    def add(self, now: float | None = None, **values: float) -> None:
        """Count `requests`, `samples` and `refused`; set the others."""
        second = math.floor(time.time() if now is None else now)
        with self.lock:
            row = self._row(second)
            for name, value in values.items():
                place = FIELDS.index(name) + 1
                row[place] = (row[place] or 0) + value if name in _SUMS else value

    def since(self, second: float, now: float | None = None) -> list[list[float | None]]:
        """Rows [time, *FIELDS] after a second, up to the present one, with rows for seconds in which nothing happened."""
        with self.lock:
            self._row(math.floor(time.time() if now is None else now))
            return [list(row) for row in self.rows if (row[0] or 0) > second]

    def _row(self, second: int) -> list[float | None]:
        if not self.rows:
            self.rows.append([second, *([0.0] * len(_SUMS)), *([None] * (len(FIELDS) - len(_SUMS)))])
        last = self.rows[-1]
        assert last[0] is not None
        first = max(int(last[0]) + 1, second - (self.rows.maxlen or 0))
        for missing in range(first, second + 1):
            self.rows.append([missing, *([0.0] * len(_SUMS)), *last[len(_SUMS) + 1 :]])
        return self.rows[-1]


def number(value: float) -> float | None:
    """A number as JSON can hold it: None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None


class Watch:
    """Everything the worker tells about its batches."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.history = History()
        self.images: deque[Seen] = deque(maxlen=IMAGES)
        self.now: dict[str, Any] = {}       # last values, for the page
        self._means: dict[str, float] = {}
        self.totals = {"requests": 0, "samples": 0, "refused": 0, "alarms": 0}

    def refused(self, reason: str) -> None:
        """A request did not come as far as the queue."""
        self.metrics.refused.labels(reason).inc()
        self.history.add(refused=1)
        self.totals["refused"] += 1

    def answered(self, target: str, requests: int, samples: int, seconds: float, queue: int) -> None:
        """The worker has answered a batch, and may go on learning from it."""
        m = self.metrics
        m.samples.labels(target).inc(samples)
        m.batches.labels(target).observe(samples)
        m.answer_seconds.labels(target).observe(seconds)
        self.history.add(requests=requests, samples=samples, queue=queue, ms=1000 * seconds)
        self.totals["requests"] += requests
        self.totals["samples"] += samples
        self.now["batch_ms"], self.now["batch_samples"] = 1000 * seconds, samples

    def worked(self, target: str, seconds: float) -> None:
        """The worker is done with a batch, learning included."""
        self.metrics.batch_seconds.labels(target).observe(seconds)

    def predicted(self, confidence: float, entropy: float, samples: int) -> None:
        """How sure the adapted network was of a batch, on the mean."""
        confidence, entropy = self._mean("confidence", confidence, samples), self._mean("entropy", entropy, samples)
        self.metrics.confidence.set(confidence)
        self.metrics.entropy.set(entropy)
        self.history.add(confidence=confidence, entropy=entropy)
        self.now |= {"confidence": confidence, "entropy": entropy}

    def compared(self, images: Sequence[Seen], distance: float | None) -> None:
        """The latest images with both predictions, and how far the weights have gone."""
        differ = sum(one.label != one.source_label for one in images) / len(images)
        disagreement = self._mean("disagreement", differ, len(images))
        self.metrics.disagreement.set(disagreement)
        self.history.add(disagreement=disagreement)
        self.now["disagreement"] = disagreement
        if distance is not None:
            self.metrics.drift.set(distance)
            self.now["distance"] = number(distance)
            if math.isfinite(distance):
                self.history.add(distance=distance)
        self.images.extend(images)

    def _mean(self, name: str, value: float, samples: int) -> float:
        """A mean over about the last `WINDOW` samples: single ones say little."""
        weight = (1 - 1 / WINDOW) ** samples
        self._means[name] = out = weight * self._means.get(name, value) + (1 - weight) * value
        return out

    def adapted(self, vitals: Mapping[str, float]) -> None:
        """A step was made, and these are the adapter's vital signs (`petal.Adapter.vitals`)."""
        m = self.metrics
        for name, gauge in (("restored", m.restored), ("skipped", m.skipped), ("short_of_memory", m.short_of_memory),
                            ("memory", m.memory), ("order", m.order), ("streams", m.streams),
                            ("temperature", m.temperature)):  # fmt: skip
            if name in vitals:
                gauge.set(vitals[name])
        self.now |= {name: number(value) for name, value in vitals.items()}

    def alarm(self, signal: str, action: str) -> None:
        """The guard found something."""
        self.metrics.alarms.labels(signal, action).inc()
        self.totals["alarms"] += 1

    def signals(self, values: Mapping[str, float], pulls: int = 0) -> None:
        """What the guard watches, and how often it drew drift back."""
        self.metrics.pulls.set(pulls)
        for name, value in values.items():
            self.metrics.signals.labels(name).set(value)
        self.now["guard"] = {name: number(value) for name, value in values.items()}

    def state(self, version: int, frozen: bool) -> None:
        """Which weights are in service, and whether they move."""
        self.metrics.version.set(version)
        self.metrics.frozen.set(float(frozen))
