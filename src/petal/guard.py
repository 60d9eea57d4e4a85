"""A watch over an adapter that adapts without labels: sees it collapse, and takes it back to where it was well.

Nobody tells an adapter that it has begun to learn from its own mistakes. `Guard` goes around any method and compares what
it says with what the network it started from says of the same samples. A narrow distribution of labels is no sign of a
collapse if the source sees it too; disagreement with the source is none if the source is lost itself. So signals are judged
together:

    concentration   1 - H(mean prediction) / log(classes) over the last `window` samples; 1 is a single class
    entropy         mean entropy of the predictions, in nats
    confidence      mean probability of the predicted label
    disagreement    share of samples that the source calls otherwise
    distance        root mean square of (θ - θ_0) / σ by the source posterior if the method has one, else |θ - θ_0| / |θ_0|
    update          the same measure of the way since the last snapshot, for each batch
    drift           how much flatter its predictions without views are than the source's: (H - H_0) / log(classes)

A collapse raises an alarm. Wear does not look like one: averages of averages make predictions a little flatter with every
batch, and over thousands of batches errors follow. So drift is held: where it passes its limit, the weights are drawn a
little toward the source at every look until it is back.

The sums of a batch stay on its device. Every `every` batches the guard looks: one forward of the source, norms of the
weights, and one wait for the device.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petal import functional as F
from petal.errors import PetalWarning
from petal.methods import Adapter, Wrapper
from petal.methods.inputs import check_choice, check_number

SIGNALS = ("concentration", "entropy", "confidence", "disagreement", "distance", "update", "drift")
POLICIES = ("warn", "rollback", "soften", "reset", "freeze")
SURE = 1.3                                  # times its limit, disagreement needs no second signal
HEALTHY = 0.6                               # of its limit: up to here disagreement is nothing to worry about
LOST = 0.5                                  # mean entropy of a lost source, as a share of the largest there is
LOOKS = 8                                   # comparisons with the source before they count: one may be of a single class
STEADY = 0.9                                # share of earlier comparisons that the next one leaves, at least
FORGET = 100                                # cool-downs after which an alarm is forgotten
COUNTERS = ("_step", "_seen", "_kept", "_well", "_thaw", "_strikes", "_last", "_looks", "pulls")
DOUBLINGS = 8                               # a cool-down is never longer than 2^8 of the first


@dataclass(frozen=True)
class Alarm:
    """What was seen and done: after which batch, by which signal, its value and limit, and the action taken."""

    step: int
    signal: str
    value: float
    limit: float
    action: str


@dataclass(frozen=True)
class Reading:
    """The signals at one look: of the adapter and, of the same samples, of the source."""

    concentration: float
    entropy: float
    confidence: float
    disagreement: float
    distance: float
    update: float
    drift: float
    paired_concentration: float             # of the adapter over the samples that the source saw too
    source_concentration: float
    source_entropy: float
    source_confidence: float

    @property
    def finite(self) -> bool:
        """Whether every signal is a number."""
        return all(map(math.isfinite, vars(self).values()))


class Guard(Wrapper):
    """Watches an adapter and acts when it collapses.

    Limits: `disagreement` is the share of samples (times 1 - 1/classes, what chance gives) that raises an alarm together
    with another signal, or alone from 1.3 times as much; `concentration` and `entropy` (a share of log(classes)) are how far
    the adapter may be beyond the source, alone twice as far (concentration) or together with some disagreement; `distance`
    and `update` are multiples of their usual values, and both at once raise an alarm. An adapter whose weights or answers
    are not finite raises one at the next look.

    `drift` is how much flatter than the source's predictions may become (a share of log(classes)). Beyond it, every look
    moves the weights the share `pull` toward the source, without an alarm; `pulls` counts these. 1 leaves it out.

    Policies, on an alarm:

        warn        a PetalWarning and an entry in `alarms`, as all of them; nothing is ever changed, by drift neither
        rollback    back to the last good snapshot, and no learning for `cooldown` samples
        soften      weights move the share `soften` toward the source; further with every alarm that follows
        reset       everything back to the start, and no learning for `cooldown` samples
        freeze      back to the last good snapshot, and no learning until `thaw()`

    What caused a collapse is mostly still there afterwards. So the cool-down doubles with every alarm that follows within
    100 cool-downs: an adapter that cannot learn here without collapsing comes to rest at its last good weights and tries
    again ever more rarely. While learning is off, predictions go on as `predict` makes them.

    Every `window` samples the weights are kept, if no signal is suspicious; a snapshot counts as good when the next one is
    taken and every look in between was well. Two are held in memory.
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
    ) -> None:
        super().__init__(adapter)
        check_choice("policy", policy, POLICIES)
        for name, count in (("every", every), ("window", window), ("cooldown", cooldown)):
            check_number(name, count, low=1, whole=True)
        for name, share in (("disagreement", disagreement), ("concentration", concentration), ("entropy", entropy)):
            check_number(name, share, low=0, high=1)
        check_number("distance", distance, low=1)
        check_number("update", update, low=1)
        for name, share in (("soften", soften), ("drift", drift), ("pull", pull)):
            check_number(name, share, low=0, high=1)
        self.policy, self.every, self.window = policy, every, window
        self.limits = {"disagreement": disagreement, "concentration": concentration, "entropy": entropy,
                       "distance": distance, "update": update, "drift": drift}  # fmt: skip
        self.cooldown, self.soften, self.pull = cooldown, soften, pull
        self._origin = adapter.origin()
        self.reset_own()

    def reset_own(self) -> None:
        """Forget all that was seen: windows, snapshots, alarms."""
        self.alarms: list[Alarm] = []
        self.pulls = 0
        self._sums: Tensor | None = None            # long window, [classes + 3]: mean prediction, entropy, confidence, count
        self._pairs: Tensor | None = None           # judged samples, [2 classes + 7]: adapter, source, and their totals
        self._good: dict[str, Tensor] | None = None
        self._candidate: dict[str, Tensor] | None = None
        self._step = 0                              # batches seen
        self._seen = 0                              # samples seen
        self._kept = 0                              # samples seen when the candidate was taken
        self._well = True                           # every look since the candidate was
        self._looks = 0                             # comparisons with the source in `_pairs`
        self._thaw = 0                              # learning is off until so many samples; -1: until `thaw`
        self._last = 0                              # samples seen at the last alarm
        self._strikes = 0
        self._usual = [0.0, 0.0]                    # distance and update while well; 0: not known yet
        self._reading: Reading | None = None

    # What users call

    def forward(self, x: Tensor) -> Tensor:
        """Predict and adapt, or only predict while learning is off; then watch."""
        if self._good is None:
            self._good = self._snapshot()
        if self.frozen:
            logits = self.adapter.predict(x)
            self.method.restored = 0.0
        else:
            logits = self.adapter(x)
        with torch.inference_mode(False), torch.no_grad():
            self._watch(x, logits.detach().clone() if logits.is_inference() else logits.detach())
        return logits

    def status(self) -> dict[str, float]:
        """The signals at the last look; NaN before the first one."""
        found = self._reading
        return {name: math.nan if found is None else getattr(found, name) for name in SIGNALS}

    @property
    def batches(self) -> int:
        """Batches seen."""
        return self._step

    @property
    def looked(self) -> bool:
        """Whether it looked after the last batch."""
        return bool(self._origin) and self._step > 0 and self._step % self.every == 0

    @property
    def frozen(self) -> bool:
        """Whether learning is off."""
        return self._thaw < 0 or self._seen < self._thaw

    def freeze(self) -> None:
        """Learn no more, with the weights as they are, until `thaw`."""
        self._thaw = -1

    def thaw(self) -> None:
        """Learn again."""
        self._thaw = 0

    def rollback(self) -> None:
        """Back to the last good weights, with a fresh optimizer; random numbers and counters go on."""
        if self._good is not None:
            self.adapter.load_weights(self._good)
            self._forget()

    # The watch

    def _watch(self, x: Tensor, logits: Tensor) -> None:
        """Add a batch to the sums, and look if it is time."""
        n, classes = logits.shape
        if self._sums is None or self._pairs is None:
            self._sums = torch.zeros(classes + 3, dtype=torch.float64, device=logits.device)
            self._pairs = torch.zeros(2 * classes + 7, dtype=torch.float64, device=logits.device)
        self._sums.mul_((1 - 1 / self.window) ** n).add_(_totals(logits))
        frozen = self.frozen
        self._step, self._seen = self._step + 1, self._seen + n
        if self.looked:
            self._look(x, logits, frozen)

    def _look(self, x: Tensor, logits: Tensor, frozen: bool) -> None:
        source = self.adapter.logits_with(self._origin, x)
        assert self._sums is not None
        assert self._pairs is not None
        differ = (logits.argmax(1) != source.argmax(1)).double().sum()
        both = torch.stack([differ, F.entropy(self._plain(x, logits)).double().sum()])
        fading = max((1 - 1 / self.window) ** (self.every * logits.shape[0]), STEADY)
        self._looks += 1
        self._pairs.mul_(fading).add_(torch.cat([_totals(logits), _totals(source)[:-1], both]))
        here = self._reading = self._read(logits.shape[1])
        if frozen:
            self._kept = self._seen                 # the way is measured over batches that learn
            return
        alarm = self._judge(here, logits.shape[1])
        if alarm is not None:
            self._act(*alarm, here)
            return
        self._keep(here, logits.shape[1])
        if self._worn(here, logits.shape[1]):
            self._move(self.pull, fresh=False)
            self.pulls += 1

    def _plain(self, x: Tensor, logits: Tensor) -> Tensor:
        """The predictions without views, to compare with the source's: those that were made, if no views were used."""
        if not self.views_used:
            return logits
        weights = self.weights()
        return self.adapter.logits_with({n: weights.get(f"teacher.{n}", p) for n, p in self.adapted.items()}, x)

    def _worn(self, here: Reading, classes: int) -> bool:
        known = self._looks >= LOOKS and self._is_judge(here, classes)
        return self.policy != "warn" and known and here.drift > self.limits["drift"]

    def _read(self, classes: int) -> Reading:
        """Every signal as a number: the one place that waits for the device."""
        assert self._sums is not None
        assert self._pairs is not None
        numbers = torch.cat([self._sums, self._pairs, self._norms()]).cpu()
        sums, pairs, norms = numbers[: classes + 3], numbers[classes + 3 : -2], numbers[-2:]
        ours, theirs, count = pairs[:classes], pairs[classes + 3 : 2 * classes + 3], float(pairs[classes + 2])
        return Reading(
            concentration=_concentration(sums[:classes]),
            entropy=float(pairs[classes]) / count,
            confidence=float(pairs[classes + 1]) / count,
            disagreement=float(pairs[-2]) / count,
            distance=float(norms[0]),
            update=float(norms[1]),
            drift=float(pairs[-1] - pairs[-4]) / count / math.log(max(classes, 2)),
            paired_concentration=_concentration(ours),
            source_concentration=_concentration(theirs),
            source_entropy=float(pairs[-4]) / count,
            source_confidence=float(pairs[-3]) / count,
        )

    def _norms(self) -> Tensor:
        """Distance from the source, and the way since the last snapshot for each batch: [2] on the device."""
        last = self._candidate if self._candidate is not None else self._good
        assert last is not None
        adapted = {name: p.detach() for name, p in self.adapted.items()}
        kept = {name: last[f"model.{name}"] for name in adapted}
        posterior = getattr(self, "posterior", None)
        scale: list[Tensor] | None = None
        if posterior is not None:
            scale = [(posterior.var[name] + posterior.damping).sqrt() for name in adapted]
        batches = max((self._seen - self._kept) * self._step / self._seen, 1)       # since the last snapshot
        return torch.stack([_length(adapted, self._origin, scale), _length(adapted, kept, scale) / batches])

    def _judge(self, here: Reading, classes: int) -> tuple[str, float, float] | None:
        """The signal that raises an alarm, with its value and limit; None if all is well."""
        if not here.finite:
            name = next((name for name in SIGNALS if not math.isfinite(getattr(here, name))), "disagreement")
            return name, getattr(here, name), math.inf
        chance, most = 1 - 1 / classes, math.log(classes)
        limit = self.limits["disagreement"] * chance
        judge = self._is_judge(here, classes)
        narrow = here.paired_concentration - here.source_concentration
        blurred = (here.entropy - here.source_entropy) / most
        concentration, entropy = self.limits["concentration"], self.limits["entropy"]
        distance, update = (self._usual[n] * self.limits[k] or math.inf for n, k in enumerate(("distance", "update")))
        far, fast = here.distance > distance, here.update > update
        if far and fast:
            return "update", here.update, update
        if self._looks < LOOKS:
            return None
        second = narrow > concentration or blurred > entropy or far or fast
        if judge and here.disagreement > (limit if second else SURE * limit):
            return "disagreement", here.disagreement, limit if second else SURE * limit
        doubtful = judge and here.disagreement > HEALTHY * limit
        if (narrow > concentration and doubtful) or narrow > 2 * concentration:
            return "concentration", narrow, concentration if doubtful else 2 * concentration
        if blurred > entropy and doubtful:
            return "entropy", blurred, entropy
        if judge and here.confidence < 1.5 / classes and here.source_confidence > 2 * here.confidence:
            return "confidence", here.confidence, 1.5 / classes
        return None

    def _is_judge(self, here: Reading, classes: int) -> bool:
        """A source that knows little of these samples, or sees fewer classes in them than the adapter, is no judge."""
        unsure = here.source_entropy > LOST * math.log(classes)
        return not unsure and here.source_concentration <= here.paired_concentration + self.limits["concentration"]

    def _keep(self, here: Reading, classes: int) -> None:
        """Note the usual values and keep a snapshot, if nothing is suspicious."""
        limit = HEALTHY * self.limits["disagreement"] * (1 - 1 / classes)
        narrow = here.paired_concentration - here.source_concentration
        well = (here.disagreement <= limit or not self._is_judge(here, classes)) and narrow <= self.limits["concentration"]
        if not well:
            self._well = False
            return
        for number, value in enumerate((here.distance, here.update)):
            known = self._usual[number]
            self._usual[number] = known + 0.1 * (value - known) if known else value
        if self._seen - self._kept >= self.window or not self._well:
            if self._well and self._candidate is not None:
                self._good = self._candidate
            self._candidate, self._kept, self._well = self._snapshot(), self._seen, True

    def _snapshot(self) -> dict[str, Tensor]:
        with torch.inference_mode(False):
            return {key: value.detach().clone() for key, value in self.weights().items()}

    def _forget(self) -> None:
        """After the weights were moved: what was seen before says nothing of them."""
        self._candidate, self._kept, self._well, self._looks = None, self._seen, True, 0
        if self._sums is not None and self._pairs is not None:
            self._sums.zero_()
            self._pairs.zero_()

    # What is done about it

    def _act(self, signal: str, value: float, limit: float, here: Reading) -> None:
        if self._seen - self._last > FORGET * self.cooldown:
            self._strikes = 0
        action = self.policy
        if action == "soften" and not here.finite:
            action = "rollback"                     # there is nothing to mix the source with
        if action in ("rollback", "freeze"):
            self.rollback()
        elif action == "reset":
            self.adapter.reset()
        elif action == "soften":
            self._move(1 - (1 - self.soften) ** (self._strikes + 1))
        self._forget()
        if action in ("rollback", "reset"):
            self._thaw = self._seen + self.cooldown * 2 ** min(self._strikes, DOUBLINGS)
        elif action == "freeze":
            self.freeze()
        self._strikes, self._last = self._strikes + 1, self._seen
        self.alarms.append(Alarm(self._step, signal, value, limit, action))
        text = f"{self.adapter.kind} shows signs of a collapse after batch {self._step}"
        warnings.warn(f"{text}: {signal} {value:.3g}, limit {limit:.3g}; {action}", PetalWarning, stacklevel=5)

    def _move(self, share: float, fresh: bool = True) -> None:
        """Weight ensembling with the source: θ <- (1 - share) θ + share θ_0, student and teacher."""
        weights = self._snapshot()
        for key, value in weights.items():
            start = self._origin.get(key.partition(".")[2])
            if start is not None:
                value.lerp_(start, share)
        self.adapter.load_weights(weights, fresh)

    # The state

    def own_state(self) -> dict[str, Tensor]:
        """Windows, counters, alarms and both snapshots."""
        state = {
            "counters": torch.tensor([int(getattr(self, name)) for name in COUNTERS]),
            "usual": torch.tensor(self._usual, dtype=torch.float64),
            "alarms": torch.tensor(
                [[a.step, SIGNALS.index(a.signal), a.value, a.limit, POLICIES.index(a.action)] for a in self.alarms],
                dtype=torch.float64,
            ).reshape(-1, 5),
        }
        if self._reading is not None:
            state["reading"] = torch.tensor(list(vars(self._reading).values()), dtype=torch.float64)
        if self._sums is not None and self._pairs is not None:
            state |= {"sums": self._sums.clone(), "pairs": self._pairs.clone()}
        for name, snapshot in (("good", self._good), ("candidate", self._candidate)):
            state |= {f"{name}.{key}": value.clone() for key, value in (snapshot or {}).items()}
        return state

    def check_own_state(self, state: Mapping[str, Tensor]) -> list[str]:
        """Names and shapes; windows and snapshots may not be there yet."""
        fixed = {"counters": (len(COUNTERS),), "usual": (2,)}
        problems = [f"missing 'guard.{key}'" for key in (*fixed, "alarms") if key not in state]
        weights = {key: tuple(value.shape) for key, value in self.weights().items()}
        shapes: dict[str, tuple[int, ...]] = {**fixed, "reading": (len(Reading.__dataclass_fields__),)}
        for name in ("good", "candidate"):
            expected = {f"{name}.{key}": shape for key, shape in weights.items()}
            if any(key.startswith(f"{name}.") for key in state):
                problems += [f"missing 'guard.{key}'" for key in expected if key not in state]
            shapes |= expected
        if ("sums" in state) != ("pairs" in state):
            problems.append("missing 'guard.sums' or 'guard.pairs'")
        elif "sums" in state and state["pairs"].shape != (2 * len(state["sums"]) + 1,):
            problems.append(f"'guard.pairs' is {list(state['pairs'].shape)} instead of [{2 * len(state['sums']) + 1}]")
        free = {"alarms", "sums", "pairs"}
        problems += [f"unexpected 'guard.{key}'" for key in state if key not in shapes and key not in free]
        return problems + [
            f"'guard.{key}' is {list(state[key].shape)} instead of {list(shape)}"
            for key, shape in shapes.items()
            if key in state and tuple(state[key].shape) != shape
        ]

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checked state."""
        for name, value in zip(COUNTERS, state["counters"].tolist(), strict=True):
            setattr(self, name, int(value))
        self._well = bool(self._well)
        self._usual = state["usual"].tolist()
        self._reading = Reading(*state["reading"].tolist()) if "reading" in state else None
        self.alarms = [
            Alarm(int(step), SIGNALS[int(signal)], value, limit, POLICIES[int(action)])
            for step, signal, value, limit, action in state["alarms"].tolist()
        ]
        place: dict[str, Any] = {"device": self.device}
        self._sums, self._pairs = (state[k].to(copy=True, **place) if k in state else None for k in ("sums", "pairs"))
        weights = self.weights()
        for name in ("good", "candidate"):
            found = {key: state[f"{name}.{key}"] for key in weights if f"{name}.{key}" in state}
            copies = {key: torch.empty_like(weights[key]).copy_(value) for key, value in found.items()}
            setattr(self, f"_{name}", copies if found or (name == "good" and self._step) else None)


def _totals(logits: Tensor) -> Tensor:
    """Summed prediction, entropy, confidence and count of a batch, [classes + 3], in double precision."""
    rows = torch.cat([logits.softmax(1), F.entropy(logits)[:, None], F.confidence(logits)[:, None]], 1).double().sum(0)
    return torch.cat([rows, rows.new_full((1,), logits.shape[0])])


def _concentration(summed: Tensor) -> float:
    """1 - H(p) / log(classes) of a summed prediction.

    >>> _concentration(torch.tensor([5.0, 5.0])), _concentration(torch.tensor([3.0, 0.0]))
    (0.0, 1.0)
    """
    p = summed / summed.sum()
    most = math.log(len(p))
    return float(1 + torch.special.xlogy(p, p).sum() / most) if most else 0.0


def _length(here: Mapping[str, Tensor], there: Mapping[str, Tensor], scale: list[Tensor] | None) -> Tensor:
    """Root mean square of the difference in units of `scale`, or relative to the length of `there`."""
    ends = [there[name] for name in here]
    way = list(torch._foreach_sub(list(here.values()), ends))
    if scale is not None:
        torch._foreach_div_(way, scale)
    squares = torch.stack(torch._foreach_norm(way)).double().square().sum()
    if scale is not None:
        return (squares / sum(w.numel() for w in way)).sqrt()
    return (squares / torch.stack(torch._foreach_norm(ends)).double().square().sum().clamp(min=1e-30)).sqrt()
