"""The one thread that owns the weights: it gathers requests into batches, adapts in order, and does what an admin asks.

Everything that reads or changes the adapter happens here, one thing after the other: batches, roll backs, snapshots and
checkpoints. Other threads hand in work and get futures.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from petal import functional as F
from petal._random import random_state, set_random_state
from petal.checkpoint import CheckpointError, Checkpoints, digest, fingerprint
from petal.errors import PetalError
from petal.methods import Adapter
from petal.order import Keys
from petal.serve.logs import Audit
from petal.serve.model import Served
from petal.serve.queue import ADAPT, PREDICT, SOURCE, Answer, Closed, Item, RequestQueue
from petal.serve.settings import Settings
from petal.serve.versions import NoVersion, Version, Versions
from petal.serve.watch import IMAGES, Seen, Watch, number

log = logging.getLogger(__name__)


class Unanswered(PetalError):
    """The network gave no usable answer."""


Action = tuple[Callable[[], Any], "Future[Any]"]


class Worker(RequestQueue, threading.Thread):
    """The owner of an adapter. Start it, `submit` batches, `close` it."""

    def __init__(
        self, served: Served, settings: Settings, watch: Watch, audit: Audit, checkpoints: Checkpoints, versions: Versions
    ) -> None:
        threading.Thread.__init__(self, name="petal-worker", daemon=True)
        RequestQueue.__init__(self, settings, watch)
        self.served, self.audit = served, audit
        self.checkpoints, self.versions = checkpoints, versions
        checkpoints.on_write = self._written
        self.adapter: Adapter = served.adapter
        self.weights = fingerprint(served.source)
        self.version = self.newest = self.steps = 0
        self.frozen = self.resumed = False
        self.changed = False                # since the last checkpoint
        self.checkpointed = self._tried = time.time()
        self._actions: deque[Action] = deque()
        self._compared = -math.inf
        self._latest: deque[tuple[Tensor, int, float, str]] = deque(maxlen=IMAGES)
        self._alarms = 0
        self._viewer: tuple[int, Adapter] | None = None
        self._snapshot_steps = 0

    # What other threads call

    def has_version(self, number: int) -> bool:
        """True if requests can name this version."""
        return number == self.version or number in self.versions

    def act(self, name: str, by: str, **arguments: Any) -> "Future[Any]":
        """Have an admin action done between two batches: freeze, thaw, reset, rollback, snapshot, checkpoint, digest."""
        actions: dict[str, Callable[..., Any]] = {
            "freeze": lambda by: self._set_frozen(True, "freeze", by), "reset": lambda by: self._go_to(0, "reset", by),
            "thaw": lambda by: self._set_frozen(False, "thaw", by), "rollback": self._rollback,
            "snapshot": self._snapshot, "checkpoint": self._checkpoint_now, "digest": self._digest,
        }  # fmt: skip
        future: Future[Any] = Future()
        with self._change:
            if not self.is_alive() or self._closing:
                raise Closed
            self._actions.append((lambda: actions[name](by, **arguments), future))
            self._change.notify()
        return future

    @property
    def resting(self) -> bool:
        """True while a guard has stopped adaptation, for a time or until it is thawed."""
        return bool(getattr(self.adapter, "frozen", False))

    # The thread

    def resume(self) -> None:
        """Continue from the last checkpoint, if there is one; before the thread starts."""
        extra = self.checkpoints.load_latest(self.adapter)
        self.versions.read(self.adapter)
        if extra is not None:
            if missing := {"version", "newest", "steps", "frozen"} - extra.keys():
                folder, what = self.checkpoints.folder, ", ".join(sorted(missing))
                raise CheckpointError(f"the checkpoint in {folder} is not a server's: it does not tell {what}")
            if extra.get("weights", self.weights) != self.weights:      # PETAL itself starts at the posterior's mean
                raise CheckpointError(f"the checkpoint in {self.checkpoints.folder} was made beside other source weights")
            self.version, self.newest, self.steps = (int(extra[key]) for key in ("version", "newest", "steps"))
            self.frozen, self.resumed = bool(extra["frozen"]), True
        self.newest = max(self.newest, *(v.number for v in self.versions.list()))      # kept after the last checkpoint
        self._snapshot_steps = self.steps
        self._alarms = len(getattr(self.adapter, "alarms", ()))
        self.watch.state(self.version, self.frozen or self.resting)

    def run(self) -> None:
        """Work until closed."""
        self.audit.write("start", "server", version=self.version, resumed=self.resumed, frozen=self.frozen)
        while (work := self._next()) is not None:
            if isinstance(work, list):
                self._batch(work)
            elif isinstance(work, tuple):
                self._act(*work)
            self._checkpoint_if_due()
        self._checkpoint(sure=True)
        self.audit.write("stop", "server", version=self.version)

    def _next(self) -> list[Item] | Action | bool | None:
        """A batch, an action, True if only a checkpoint is due, or None at the end."""
        with self._change:
            while True:
                if self._actions:
                    return self._actions.popleft()
                if self._queue:
                    first = self._queue[0]
                    ready = sum(len(i.x) for i in self._queue if i.target == first.target)
                    left = first.arrived + self.settings.delay_ms / 1000 - time.monotonic()
                    if ready >= self.settings.batch_size or left <= 0 or self._closing:
                        return self._take(first.target)
                    self._change.wait(left)
                elif self._closing:
                    return None
                else:
                    self._change.wait(self._seconds_to_checkpoint() if self.changed else None)
                    if self.changed and self._seconds_to_checkpoint() == 0:
                        return True

    def _batch(self, items: list[Item]) -> None:
        items = [item for item in items if item.future.set_running_or_notify_cancel()]
        if not items:
            return
        try:
            self._answer_all(items)
        except Exception as error:          # whatever happens to a batch, the next one is served
            log.exception("a batch failed")
            self.watch.metrics.failed.inc()
            for item in items:
                if not item.future.done():
                    item.future.set_exception(error)

    def _answer_all(self, items: list[Item]) -> None:
        """Answer running items together, or one by one if the adapter refuses them together."""
        target, began = items[0].target, time.monotonic()
        x = torch.cat([item.x for item in items]).to(self.adapter.device)
        try:
            logits, version, adapted = self._logits(x, target, [item.stream for item in items for _ in item.x])
        except PetalError as error:
            if len(items) == 1:
                items[0].future.set_exception(error)
            else:
                for item in items:
                    self._answer_all([item])
            return
        if adapted:
            self.steps, self.changed = self.steps + 1, True
            self._moved_to(self.newest + 1)
        logits = logits.float().cpu()
        probabilities, entropy = logits.softmax(1), F.entropy(logits)
        confidence, label = probabilities.max(1)
        finite = logits.isfinite().all(1)
        seconds = time.monotonic() - began
        self._rate = len(x) / seconds if not self._rate else 0.8 * self._rate + 0.2 * len(x) / seconds
        self.watch.batch(_shown(target), len(items), len(x), seconds, self.waiting)
        start = 0
        for item in items:
            part = slice(start, start := start + len(item.x))
            if not bool(finite[part].all()):
                item.future.set_exception(Unanswered("the network's answer is not finite"))
                continue
            cut = logits[part].numpy(), probabilities[part].numpy(), label[part].numpy(), entropy[part].numpy()
            item.future.set_result(Answer(*cut, version, adapted))
        if target in (ADAPT, PREDICT) and bool(finite.all()):
            self.watch.predicted(float(confidence.mean()), float(entropy.mean()), len(x))
            self._compare(x, label, confidence, version)
        if target == ADAPT and not self.frozen:
            self._after_call(adapted)

    def _logits(self, x: Tensor, target: str, stream: Keys) -> tuple[Tensor, str, bool]:
        """Logits, the version of the weights they come from, and whether the weights moved on afterwards."""
        if target == SOURCE:
            return self.served.source.predict(x), SOURCE, False
        if target == PREDICT or (target == ADAPT and self.frozen):
            return self.adapter.predict(x, stream), str(self.version), False
        if target == ADAPT:
            learns = not self.resting and self.served.learns
            return self.adapter(x, stream=stream), str(self.version), learns
        if int(target) == self.version:
            return self.adapter.predict(x, stream), target, False
        return self._view(int(target)).predict(x, stream), target, False

    def _view(self, number: int) -> Adapter:
        """A second adapter at a version that is kept; the last one asked for stays loaded."""
        if number not in self.versions:
            raise NoVersion(f"version {number} is no longer kept")
        if self._viewer is None or self._viewer[0] != number:
            generators = random_state()                 # a look at a version does not change what the method draws
            adapter = self.served.make() if self._viewer is None else self._viewer[1]
            self._viewer = None
            self.versions.put_back(adapter, number)
            set_random_state(generators)
            self._viewer = number, adapter
        return self._viewer[1]

    def _compare(self, x: Tensor, label: Tensor, confidence: Tensor, version: str) -> None:
        """Every now and then, what the source makes of the latest samples, and how far the weights have gone."""
        self._latest.extend(zip(x, label.tolist(), confidence.tolist(), [version] * len(x), strict=True))
        now = time.monotonic()
        if now - self._compared < self.settings.compare_seconds:
            return
        self._compared = now
        latest = list(self._latest)
        self._latest.clear()
        source = self.served.source.predict(torch.stack([one[0] for one in latest])).float().cpu().softmax(1).max(1)
        images = [
            Seen(pixels.float().cpu().numpy(), label, probability, source_label, source_probability, version, time.time())
            for (pixels, label, probability, version), source_label, source_probability in zip(
                latest, source.indices.tolist(), source.values.tolist(), strict=True
            )
        ]
        self.watch.compared(images, None if self.served.distance is None else self.served.distance())

    def _after_call(self, adapted: bool) -> None:
        if adapted:
            core = self.served.core
            self.watch.adapted(float(core.restored), core.skipped)
        self._listen_to_guard()
        if self.steps - self._snapshot_steps >= self.settings.snapshot_every:
            self._keep("regular")

    def _listen_to_guard(self) -> None:
        """The guard's new alarms, its signals, and whether it has frozen the adapter."""
        guard: Any = self.adapter
        alarms = getattr(guard, "alarms", None)
        if alarms is None:
            return
        for alarm in alarms[self._alarms :]:
            self.watch.alarm(alarm.signal, alarm.action)
            values = {"value": number(alarm.value), "limit": number(alarm.limit)}
            self.audit.write(alarm.action, "guard", signal=alarm.signal, version=self.version, **values)
        self._alarms = len(alarms)
        self.watch.signals(guard.status(), guard.pulls)
        self.watch.state(self.version, self.frozen or self.resting)

    def _moved_to(self, version: int) -> None:
        self.version = version
        self.newest = max(self.newest, version)
        self.watch.state(self.version, self.frozen or self.resting)

    # Admin actions: on this thread, between batches

    def _act(self, action: Callable[[], Any], future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(action())
        except Exception as error:
            if not isinstance(error, PetalError):
                log.exception("an admin action failed")
            future.set_exception(error)

    def _set_frozen(self, frozen: bool, name: str, by: str) -> dict[str, Any]:
        guard: Any = self.adapter
        if not frozen and self.resting:
            guard.thaw()                                # it had learning off
        self.frozen = frozen
        return self._done(name, by)

    def _rollback(self, by: str, version: int | None = None) -> dict[str, Any]:
        if version is None:
            older = [v.number for v in self.versions.list() if v.number < self.version]
            if not older:
                raise NoVersion("there is no older version to roll back to")
            version = max(older)
        if version not in self.versions:
            self.versions.put_back(self.adapter, version)       # raises, with what there is
        return self._go_to(version, "rollback", by)

    def _go_to(self, version: int, name: str, by: str) -> dict[str, Any]:
        before = self.version
        if before not in self.versions:
            self._keep(f"before {name}", spare=version)
        self.versions.put_back(self.adapter, version)
        self._alarms = len(getattr(self.adapter, "alarms", ()))
        self._moved_to(version)
        return self._done(name, by, before=before)

    def _snapshot(self, by: str) -> dict[str, Any]:
        self._keep("asked for")
        return self._done("snapshot", by)

    def _keep(self, reason: str, spare: int | None = None) -> None:
        """Keep the present state as a version, and the one to `spare`. A full disk must not stop service."""
        now = self.watch.now
        about = Version(self.version, time.time(), reason, now.get("confidence"), now.get("distance"))
        self._snapshot_steps = self.steps
        try:
            self.versions.take(self.adapter, about, spare)
        except CheckpointError as error:
            self.watch.metrics.checkpoint_failures.inc()
            log.warning("version %d is not kept: %s", self.version, error)

    def _done(self, name: str, by: str, **about: Any) -> dict[str, Any]:
        self.watch.state(self.version, self.frozen or self.resting)
        self.changed = True
        self.audit.write(name, by, version=self.version, frozen=self.frozen, **about)
        self._checkpoint(sure=True)
        return {"action": name, "version": self.version, "frozen": self.frozen, **about}

    def _checkpoint_now(self, by: str) -> dict[str, Any]:
        self.changed = True
        self._checkpoint(sure=True)
        return {"action": "checkpoint", "version": self.version, "written": not self.changed}

    def _digest(self, by: str) -> dict[str, Any]:
        return {"version": self.version, "sha256": digest(self.adapter.state_dict())}

    # Checkpoints

    def _seconds_to_checkpoint(self) -> float:
        return max(0.0, self._tried + self.settings.checkpoint_seconds - time.time())

    def _checkpoint_if_due(self) -> None:
        if self.changed and self._seconds_to_checkpoint() == 0:
            self._checkpoint()

    def _checkpoint(self, sure: bool = False) -> None:
        """Hand the adapter's state, and where it stands, to the writer; with `sure`, wait until it is on the disk.

        A full disk must not stop service; it is told and counted.
        """
        if self.changed:
            extra = {
                "version": self.version, "newest": self.newest, "steps": self.steps, "frozen": self.frozen,
                "weights": self.weights,
            }  # fmt: skip
            self._tried = time.time()
            self.changed = False
            try:
                self.checkpoints.save(self.adapter, extra)
            except CheckpointError as error:
                self._written(error)
        if sure:
            self.checkpoints.wait()

    def _written(self, error: CheckpointError | None) -> None:
        """The writer's thread is done with a checkpoint, or could not write it."""
        with self._change:
            if error is None:
                self.checkpointed = self._tried
            else:
                self.changed = True
                self.watch.metrics.checkpoint_failures.inc()
                log.warning("the server goes on without a checkpoint: %s", error)
            self._change.notify_all()


def _shown(target: str) -> str:
    """The target as a label of a metric: all kept versions are one."""
    return target if target in (ADAPT, PREDICT, SOURCE) else "version"
