"""The wrapper that watches an adapter: predictions into sums, sums into a verdict, a verdict into an action."""

import logging
import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from petal.errors import OutOfMemory, PetalWarning
from petal.guard.actions import POLICIES, Alarm, CoolDown, Snapshots
from petal.guard.judge import judge
from petal.guard.signals import SIGNALS, SUMMED, Reading, Strangers, Sums, distance
from petal.methods import Adapter, Wrapper
from petal.methods.inputs import check_choice, check_number
from petal.order import Keys

log = logging.getLogger(__name__)

COUNTERS = 9
AGAIN = 10              # looks after which an alarm about strangers that stay is repeated


class Guard(Wrapper):
    """Watches an adapter and acts when it collapses.

    Limits: `disagreement` is the share of samples (times 1 - 1/classes, what chance gives) that raises an alarm together
    with another signal, or alone from 1.3 times as much; `concentration` and `entropy` (a share of log(classes)) are how far
    the adapter may be beyond the source, alone twice as far (concentration) or together with some disagreement; `distance`
    and `update` are multiples of their usual values, and both at once raise an alarm. An adapter whose weights or answers
    are not finite raises one at the next look.

    `drift` is how much flatter than the source's the predictions may become (a share of log(classes)). Above it, every look
    moves the weights by the share `pull` toward the source, without an alarm; `pulls` counts these. 1 turns it off.
    `strangers` is how far some images may pull the statistics of a batch of 32 or more away from those of most of them, in
    standard deviations. Above it there is an alarm and a warning, and nothing else happens, with every policy.

    Policies, on an alarm:

        warn        a PetalWarning and an entry in `alarms`, as in all of them; nothing is ever changed, not by drift either
        rollback    back to the last good snapshot, and no learning for `cooldown` samples
        soften      weights move by the share `soften` toward the source; further with every alarm that follows
        reset       everything back to the start, and no learning for `cooldown` samples
        freeze      back to the last good snapshot, and no learning until `thaw()`

    What caused a collapse is often still there afterwards. So the cool-down doubles with every alarm that follows within
    100 cool-downs: an adapter that cannot learn here without collapsing comes to rest at its last good weights and tries
    again ever more rarely. While learning is off, predictions go on as `predict` makes them, and what follows the stream
    besides weights (`SmallBatch`) goes on too.

    The sums of a batch stay on its device. Every `every` batches the guard looks: one forward of the source, norms of the
    weights, and one wait for the device. Every `window` samples the weights are kept if no signal is suspicious; a snapshot
    counts as good once the next one is taken and every look in between was healthy. Two are held in memory.
    """

    prefix = "guard."

    def __init__(
        self,
        adapter: Adapter,
        policy: str = "rollback",
        every: int = 10,
        window: int = 5000,
        disagreement: float = 0.4,
        concentration: float = 0.3,
        entropy: float = 0.3,
        distance: float = 3.0,
        update: float = 10.0,
        cooldown: int = 10_000,
        soften: float = 0.5,
        drift: float = 0.03,
        pull: float = 0.05,
        strangers: float = 0.35,
    ) -> None:
        super().__init__(adapter)
        check_choice("policy", policy, POLICIES)
        for name, count in (("every", every), ("window", window), ("cooldown", cooldown)):
            check_number(name, count, low=1, whole=True)
        for name, share in (("disagreement", disagreement), ("concentration", concentration), ("entropy", entropy)):
            check_number(name, share, low=0, high=1)
        check_number("distance", distance, low=1)
        check_number("update", update, low=1)
        check_number("strangers", strangers, low=0)
        for name, share in (("soften", soften), ("drift", drift), ("pull", pull)):
            check_number(name, share, low=0, high=1)
        self.policy, self.every, self.window = policy, every, window
        self.limits = {"disagreement": disagreement, "concentration": concentration, "entropy": entropy,
                       "distance": distance, "update": update, "drift": drift, "strangers": strangers}  # fmt: skip
        self.cooldown, self.soften, self.pull = cooldown, soften, pull
        self.reset_own()

    def reset_own(self) -> None:
        """Forget all that was seen: windows, snapshots, alarms."""
        self.alarms: list[Alarm] = []
        self.pulls = 0
        self._step = 0                              # batches seen
        self._seen = 0                              # samples seen
        self._sums = Sums()
        self._snapshots = Snapshots(self.adapter)
        self._rest = CoolDown()
        self._usual = {"distance": 0.0, "update": 0.0}      # of healthy looks; 0: not known yet
        self._reading: Reading | None = None
        self._strangers = math.nan                  # at the last look

    # What users call

    def forward(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict and adapt, or only predict while learning is off; then watch."""
        if self._snapshots.good is None:
            self._snapshots.good = self._snapshots.copy()
        if self.frozen:
            logits = self.adapter.observe(x, stream)
            self.method.restored = 0.0
        else:
            with self.handing_on():
                logits = self.adapter(x, stream=stream)
        with torch.inference_mode(False), torch.no_grad():
            judged = logits if self.adapter.uncorrected is None else self.adapter.uncorrected
            self._watch(x, judged.detach().clone() if judged.is_inference() else judged.detach())
        return logits

    def describe(self) -> dict[str, str]:
        """What it does and with which settings, and those of the adapter inside."""
        return self.adapter.describe() | {"guard": f"{self.policy}, looks every {self.every} batches"}

    def status(self) -> dict[str, float]:
        """The signals at the last look; NaN before the first one."""
        found = self._reading
        summed = {name: math.nan if found is None else getattr(found, name) for name in SUMMED}
        return summed | {"strangers": self._strangers}

    @property
    def batches(self) -> int:
        """Batches seen."""
        return self._step

    @property
    def looked(self) -> bool:
        """True if it looked after the last batch."""
        return bool(self.adapted) and self._step > 0 and self._step % self.every == 0

    @property
    def frozen(self) -> bool:
        """True while learning is off."""
        return self._rest.thaw < 0 or self._seen < self._rest.thaw

    def freeze(self) -> None:
        """Stop learning, with the weights as they are, until `thaw`."""
        self._rest.thaw = -1

    def thaw(self) -> None:
        """Learn again."""
        self._rest.thaw = 0

    def rollback(self) -> None:
        """Back to the last good weights, and what goes around them, with a fresh optimizer; counters go on."""
        if self._snapshots.good is not None:
            self.adapter.put_back(self._snapshots.good)
            self._forget()

    # What happens after a batch

    @property
    def _origin(self) -> Mapping[str, Tensor]:
        return self.adapter.origin()

    def _watch(self, x: Tensor, logits: Tensor) -> None:
        """Add a batch to the sums, and look if it is time."""
        self._sums.add(logits, self.window)
        frozen = self.frozen
        self._step, self._seen = self._step + 1, self._seen + len(logits)
        if self.looked:
            self._look(x, logits, frozen)

    def _look(self, x: Tensor, logits: Tensor, frozen: bool) -> None:
        strangers = Strangers(len(x))
        try:
            with strangers.watching(self.method.model):
                source = self.adapter.logits_with(self._origin, x)
            plain = self._plain(x, logits)
        except (torch.OutOfMemoryError, OutOfMemory):
            log.warning("no memory for a look at %s after batch %d", self.adapter.kind, self._step)
            return
        self._strangers = strangers.read()
        self._tell_of_strangers()
        self._sums.compare(logits, plain, source, self.window, self.every)
        here = self._reading = self._sums.read(self._norms())
        if frozen:
            self._snapshots.kept = self._seen       # `update` is measured over batches that learn
            return
        verdict = judge(here, self._usual, self.limits, self._sums.looks, logits.shape[1])
        if verdict.alarm is not None:
            self._act(*verdict.alarm, here)
            return
        if verdict.healthy:
            for name, known in self._usual.items():
                value = getattr(here, name)
                self._usual[name] = known + 0.1 * (value - known) if known else value
        self._snapshots.update(verdict.healthy, self._seen, self.window)
        if verdict.worn and self.policy != "warn":
            self._snapshots.pull(self._origin, self.pull, fresh=False)
            self.pulls += 1

    def _tell_of_strangers(self) -> None:
        """An alarm about the images of this batch, unless there was one a few looks ago."""
        found, limit = self._strangers, self.limits["strangers"]
        last = next((alarm.step for alarm in reversed(self.alarms) if alarm.signal == "strangers"), -math.inf)
        if found > limit and self._step - last >= AGAIN * self.every:
            self.alarms.append(Alarm(self._step, "strangers", found, limit, "warn"))
            text = f"some images of batch {self._step} are unlike all others and decide its statistics: strangers "
            text += f"{found:.3g}, limit {limit:.3g}; answers to the others may be wrong (see petal.Robust, petal.Screen)"
            warnings.warn(text, PetalWarning, stacklevel=6)

    def _plain(self, x: Tensor, logits: Tensor) -> Tensor:
        """The predictions without views, to compare with the source's: those that were made, if no views were used."""
        if not self.views_used:
            return logits
        weights = self._snapshots.weights()
        return self.adapter.logits_with({n: weights.get(f"teacher.{n}", p) for n, p in self.adapted.items()}, x)

    def _norms(self) -> Tensor:
        """Distance from the source, and that from the last snapshot per batch that learned since then: [2] on the device."""
        last = self._snapshots.candidate if self._snapshots.candidate is not None else self._snapshots.good
        assert last is not None
        adapted = {name: p.detach() for name, p in self.adapted.items()}
        kept = {name: last[f"model.{name}"] for name in adapted}
        posterior = getattr(self, "posterior", None)
        scale: list[Tensor] | None = None
        if posterior is not None:
            variance = posterior.variance()
            scale = [(variance[name] + posterior.damping).sqrt() for name in adapted]
        batches = max((self._seen - self._snapshots.kept) * self._step / self._seen, 1)
        return torch.stack([distance(adapted, self._origin, scale), distance(adapted, kept, scale) / batches])

    def _act(self, signal: str, value: float, limit: float, here: Reading) -> None:
        before = self._rest.strike(self._seen, self.cooldown)
        action = self.policy
        if action == "soften" and not here.finite:
            action = "rollback"                     # there is nothing to mix the source with
        if action in ("rollback", "freeze"):
            self.rollback()
        elif action == "reset":
            self.adapter.reset()
        elif action == "soften":
            self._snapshots.pull(self._origin, 1 - (1 - self.soften) ** (before + 1), fresh=True)
        self._forget()
        if action in ("rollback", "reset"):
            self._rest.start(self._seen, self.cooldown, before)
        elif action == "freeze":
            self.freeze()
        self.alarms.append(Alarm(self._step, signal, value, limit, action))
        text = f"{self.adapter.kind} shows signs of a collapse after batch {self._step}"
        warnings.warn(f"{text}: {signal} {value:.3g}, limit {limit:.3g}; {action}", PetalWarning, stacklevel=5)

    def _forget(self) -> None:
        """After the weights were moved: what was seen before says nothing about them."""
        kept = self._snapshots
        kept.candidate, kept.kept, kept.well = None, self._seen, True
        self._sums.clear()

    # The state

    def own_state(self) -> dict[str, Tensor]:
        """Windows, counters, alarms and both snapshots."""
        kept, rest = self._snapshots, self._rest
        state = {
            "counters": torch.tensor([self._step, self._seen, kept.kept, int(kept.well), rest.thaw, rest.strikes, rest.last,
                                      self._sums.looks, self.pulls]),
            "usual": torch.tensor(list(self._usual.values()), dtype=torch.float64),
            "alarms": torch.tensor(
                [[a.step, SIGNALS.index(a.signal), a.value, a.limit, POLICIES.index(a.action)] for a in self.alarms],
                dtype=torch.float64,
            ).reshape(-1, 5),
        }  # fmt: skip
        if self._strangers == self._strangers:
            state["strangers"] = torch.tensor([self._strangers], dtype=torch.float64)
        if self._reading is not None:
            state["reading"] = torch.tensor(list(vars(self._reading).values()), dtype=torch.float64)
        if len(self._sums.window):
            state |= {"sums": self._sums.window.clone(), "pairs": self._sums.pairs.clone()}
        for name, snapshot in (("good", kept.good), ("candidate", kept.candidate)):
            state |= {f"{name}.{key}": value.clone() for key, value in (snapshot or {}).items()}
        return state

    def check_own_state(self, state: Mapping[str, Tensor]) -> list[str]:
        """Names and shapes; windows and snapshots may not be there yet."""
        shapes = {"counters": [COUNTERS], "usual": [2], "strangers": [1],
                  "reading": [len(Reading.__dataclass_fields__)]}  # fmt: skip
        needed, windows = ["counters", "usual", "alarms"], ["sums", "pairs"]
        problems = []
        for name in ("good", "candidate"):
            kept = _of(state, name)
            problems += [p.replace("'", f"'guard.{name}.", 1) for p in self.adapter.check_kept(kept)] if kept else []
        needed += windows if any(key in state for key in windows) else ()
        if all(key in state for key in windows):
            shapes["pairs"] = [2 * len(state["sums"]) + 1]
        others = [key for key in state if not key.startswith(("good.", "candidate."))]
        problems += [f"missing 'guard.{key}'" for key in needed if key not in state]
        problems += [f"unexpected 'guard.{key}'" for key in others if key not in {*shapes, "alarms", *windows}]
        return problems + [
            f"'guard.{key}' is {list(state[key].shape)} instead of {shape}"
            for key, shape in shapes.items()
            if key in state and list(state[key].shape) != shape
        ]

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checked state."""
        self.reset_own()
        kept, rest = self._snapshots, self._rest
        self._step, self._seen, kept.kept, well, *rested, self._sums.looks, self.pulls = map(int, state["counters"].tolist())
        kept.well, (rest.thaw, rest.strikes, rest.last) = bool(well), rested
        self._usual = dict(zip(self._usual, state["usual"].tolist(), strict=True))
        self._reading = Reading(*state["reading"].tolist()) if "reading" in state else None
        self._strangers = float(state["strangers"]) if "strangers" in state else math.nan
        self.alarms = [
            Alarm(int(step), SIGNALS[int(signal)], value, limit, POLICIES[int(action)])
            for step, signal, value, limit, action in state["alarms"].tolist()
        ]
        if "sums" in state:
            self._sums.window = state["sums"].to(self.device, copy=True)
            self._sums.pairs = state["pairs"].to(self.device, copy=True)
        now = self.adapter.kept()
        for name in ("good", "candidate"):
            found = _of(state, name)
            copies = {k: v.to(now[k].device if k in now else v.device, copy=True) for k, v in found.items()}
            setattr(kept, name, copies if found or (name == "good" and self._step) else None)


def _of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """A snapshot in a guard's state."""
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
