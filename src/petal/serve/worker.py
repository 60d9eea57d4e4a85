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
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from petal._random import random_state, set_random_state
from petal.checkpoint import CheckpointError, Checkpoints, digest, fingerprint
from petal.errors import DeviceLost, OutOfMemory, PetalError
from petal.methods import Adapter
from petal.methods.failures import is_lost, lost
from petal.order import Keys
from petal.serve.logs import Audit
from petal.serve.model import Served
from petal.serve.queue import ADAPT, PREDICT, SOURCE, Closed, Item, RequestQueue
from petal.serve.replies import Reply, Shown
from petal.serve.settings import Settings
from petal.serve.versions import NoVersion, Version, Versions
from petal.serve.watch import IMAGES, Seen, Watch, number

log = logging.getLogger(__name__)


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
        self.lost: DeviceLost | None = None                 # why the thread ended by itself
        self.ended: Callable[[], Any] = lambda: None        # who is told then

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
            try:
                self._checkpoint_if_due()
            except RuntimeError as error:
                if not self._loses_device(error):
                    raise
            if self.lost is not None:
                self._end_without_device(self.lost)
                return
        self._checkpoint(sure=True)
        self.audit.write("stop", "server", version=self.version)

    def _end_without_device(self, error: DeviceLost) -> None:
        """Nothing can be read from the device: the last checkpoint is what was handed to the writer before."""
        self.abandon()
        while self._actions:
            self._actions.popleft()[1].set_exception(Closed())
        self.checkpoints.wait()
        age = time.time() - self.checkpointed
        log.critical("%s; the last checkpoint is %.0f s old", error, age)
        self.audit.write("lost", "device", version=self.version, checkpoint_age=round(age, 1), reason=str(error))
        self.ended()

    def _loses_device(self, error: BaseException) -> bool:
        """True, and noted, if an error says that the device is gone."""
        if is_lost(error):
            self.lost = error if isinstance(error, DeviceLost) else lost(error, self.adapter.device)
        return self.lost is not None

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
            if not self._loses_device(error):
                log.exception("a batch failed")
                self._go_back_if_needed(error)
            self.watch.metrics.failed.inc()
            for item in items:
                if not item.future.done():
                    item.future.set_exception(error if self.lost is None else Closed())

    def _answer_all(self, items: list[Item]) -> None:
        """Answer running items together, or one by one if the adapter refuses them together; then learn from them."""
        target = items[0].target
        x = torch.cat([item.x for item in items]).to(self.adapter.device)
        reply = Reply(items, x, time.monotonic())
        try:
            logits, version, adapted = self._logits(reply, target, [item.stream for item in items for _ in item.x])
        except Exception as error:
            if reply.shown is not None:
                self._not_learned_from(error)
            elif not isinstance(error, PetalError) or is_lost(error):
                raise
            else:
                self._go_back_if_needed(error)
                if len(items) == 1:
                    items[0].future.set_exception(error)
                else:
                    for item in items:
                        self._answer_all([item])
            if reply.shown is None:
                return
        else:
            if reply.shown is None:
                self._send(reply, logits, version, adapted)
        self._after_answers(reply, target)

    def _send(self, reply: Reply, logits: Tensor, version: str, adapted: bool) -> None:
        """Give every request its part of the logits. The weights move on to the next version, perhaps a moment later."""
        if adapted:
            self.steps, self.changed = self.steps + 1, True
            self._moved_to(self.newest + 1)
        shown = reply.shown = Shown.of(logits, version, adapted)
        items, seconds = reply.items, reply.seconds
        self.watch.answered(_shown(items[0].target), len(items), len(reply.x), seconds, self.waiting)
        if items[0].target in (ADAPT, PREDICT) and bool(shown.finite.all()):
            self.watch.predicted(float(shown.confidence.mean()), float(shown.entropy.mean()), len(reply.x))
        reply.send(shown)

    def _after_answers(self, reply: Reply, target: str) -> None:
        """What takes its time when nobody waits any more: looks at the batch, versions to keep."""
        shown, seconds, count = reply.shown, reply.seconds, len(reply.x)
        assert shown is not None
        self._rate = count / seconds if not self._rate else 0.8 * self._rate + 0.2 * count / seconds
        self.watch.worked(_shown(target), seconds)
        if target in (ADAPT, PREDICT) and bool(shown.finite.all()):
            self._compare(reply.x, shown.label, shown.confidence, shown.version)
        if target == ADAPT and not self.frozen:
            self._after_call(shown.adapted)

    def _logits(self, reply: Reply, target: str, stream: Keys) -> tuple[Tensor, str, bool]:
        """Logits, the version of the weights they come from, and whether the weights moved on afterwards."""
        x, version = reply.x, str(self.version)
        if target == SOURCE:
            return self.served.source.predict(x), SOURCE, False
        if target == PREDICT or (target == ADAPT and self.frozen):
            return self.adapter.predict(x, stream), version, False
        if target == ADAPT:
            learns = not self.resting and self.served.learns
            answering = getattr(self.adapter, "answering", None) if self.settings.answer_first else None
            early = nullcontext() if answering is None else answering(lambda y: self._send(reply, y, version, learns))
            with early:
                return self.adapter(x, stream=stream), version, learns
        if int(target) == self.version:
            return self.adapter.predict(x, stream), target, False
        return self._view(int(target)).predict(x, stream), target, False

    def _not_learned_from(self, error: Exception) -> None:
        """A batch is answered, and learning from it failed: the adapter is as it was, or goes back to a kept version."""
        self.watch.metrics.unlearned.labels(_reason(error)).inc()
        if is_lost(error):
            raise error
        log.error("a batch is answered and not learned from: %s", error, exc_info=not isinstance(error, PetalError))
        self._go_back_if_needed(error)

    def _go_back_if_needed(self, error: Exception) -> None:
        """Weights that were left in between are of no use: the last version that is kept takes their place."""
        descent = self.served.core.descent
        if descent is None or not descent.moving:
            return
        descent.moving = False
        before = self.version
        kept = max((v.number for v in self.versions.list() if v.number <= before), default=0)
        self.versions.put_back(self.adapter, kept)
        self._alarms = len(getattr(self.adapter, "alarms", ()))
        self._moved_to(kept)
        self.changed = True
        self.audit.write("rollback", "server", version=kept, before=before, reason=str(error))

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
            self.watch.adapted(getattr(self.adapter, "vitals", self.served.core.vitals)())
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
            if not self._loses_device(error) and not isinstance(error, PetalError):
                log.exception("an admin action failed")
            future.set_exception(error if self.lost is None else Closed())

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


def _reason(error: BaseException) -> str:
    """Why learning failed, as a label of a metric."""
    if is_lost(error):
        return "device"
    return "memory" if isinstance(error, (OutOfMemory, torch.OutOfMemoryError)) else "error"


def _shown(target: str) -> str:
    """The target as a label of a metric: all kept versions are one."""
    return target if target in (ADAPT, PREDICT, SOURCE) else "version"
