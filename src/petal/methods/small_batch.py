"""Any batch size and any order of labels: answers by running estimates and the order, learning from a balanced memory.

A stream that brings one image at a time, or long runs of one class, breaks what methods with batch statistics live by: a
batch that looks like the data. `SmallBatch` goes around any of them and takes both jobs of the batch away from it, unless
the batch does look like the data.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from petal.calls import taken
from petal.errors import ConfigError, OutOfMemory
from petal.functional import entropy
from petal.methods.base import Adapter
from petal.methods.failures import not_enough
from petal.methods.inputs import check_batch, check_number
from petal.methods.network import logits_of
from petal.methods.state import misfits
from petal.methods.wrapper import Wrapper
from petal.norm import Following, RecentNorm, with_recent_norm
from petal.norm.recent import LIMIT
from petal.order import Keys, TemporalPrior
from petal.order.keys import last

PULL = 0.05         # share by which the memory draws the estimates of all classes together, at each look at it
GROSS = 10.0        # times the usual size of an image's numbers, or times 1: not to be learned from
REFERENCE = 64      # images of the memory that stand in for a batch where other weights are tried


class SmallBatch(Wrapper):
    """Lets a method work with batches of any size, from one image up, and with labels in any order.

    Answers are those of the method without its views, by batch norms with running estimates of their own for each network
    that answers (`petal.norm.RecentNorm`). A batch is looked at twice: what the first look takes it for says which class's
    estimate each image moves, and the second look is by the moved estimates. With `order`, the answers are then corrected
    by what the labels before say of the next (`petal.TemporalPrior`).

    The method learns from batches of fixed size `memory`, one for every `every` images and at most one a call: from a
    memory in which every class as answered has the same room, in which the recent images stay, and none older than `age`
    images if there are others. `certainty` is how much an uncertain answer counts against an image, as a share of `age`.
    After learning the estimates look at the memory: they then fit the new weights in all classes, and no class is stuck
    with an estimate that nothing moves.

    A batch of `large` images or more whose labels are believed to come in no order (`TemporalPrior.unordered`, at least
    `sure`) is used as it is: the method answers and learns from it as if nothing were around it. The memory takes its images
    and is what the estimates look at when they are needed again. Where nothing is known of the order, answers by the
    estimates say what to believe of the batch. And as a batch of one class is normalised to look like all of them, and then
    nothing tells the order, every `look` images the last `large` of a batch are answered by the estimates too: if these
    answers would shake the belief, the next batch is not used as it is. With `shuffled`, labels are known to come in no
    order: all that is left out, and the answers stay the method's.

    A batch of several tensors or of whole numbers such as tokens, which no memory holds, is always used as it is. With
    samples of another shape the memory begins anew.

    Networks without batch norm work too: then memory and order alone matter. The views of CoTTA and Petal serve learning.
    """

    prefix = "small."
    by_batch = False

    def __init__(
        self,
        adapter: Adapter,
        memory: int = 200,
        every: int = 64,
        age: int = 2000,
        window: float = 100.0,
        source: float = 0.1,
        own: float = 0.1,
        shuffled: bool = False,
        certainty: float = 0.0,
        large: int = 32,
        sure: float = 0.9,
        look: int = 256,
    ) -> None:
        super().__init__(adapter)
        if isinstance(adapter, Wrapper) and not adapter.inner:
            raise ConfigError(f"SmallBatch goes directly around a method; {adapter.kind} is wrapped already: swap the two")
        if adapter.alone:
            raise ConfigError(f"SmallBatch makes no sense around {adapter.kind}: {adapter.alone}")
        check_number("memory", memory, low=2, whole=True)
        check_number("every", every, low=1, whole=True)
        check_number("age", age, low=1, whole=True)
        check_number("window", window, low=1)
        check_number("source", source, low=0, high=1)
        check_number("own", own, low=0, high=1)
        check_number("certainty", certainty, low=0)
        check_number("large", large, low=1, whole=True)
        check_number("sure", sure, low=0, high=1)
        check_number("look", look, low=1, whole=True)
        self.memory, self.every, self.age, self.certainty = memory, every, age, certainty
        self.large, self.sure, self.look = large, sure, look
        self.method.batch_sizes = (*self.method.batch_sizes, memory)
        self.prior = None if shuffled else TemporalPrior()
        self._copies: dict[str, nn.Module] = {}                 # of the networks that answer, on the same parameters
        self._norms: dict[str, list[RecentNorm]] = {}
        with torch.inference_mode(False):
            self._shared = Following(window, next(adapter.model.parameters()).detach()).eval()
            for name in adapter.answered_by:
                network = getattr(adapter, name)
                self._copies[name], self._norms[name] = with_recent_norm(network, self._shared, source=source, own=own)
        self.reset_own()

    def reset_own(self) -> None:
        """Estimates at the source's statistics, an empty memory, no order."""
        self._samples: Tensor | None = None         # [up to memory, ...]
        self._facts: Tensor | None = None           # [up to memory, 3]: label, entropy, number in the stream
        self._seen, self._waiting = 0, 0            # images so far, and since the method last learned or was looked after
        self._behind = False                        # the last batch was used as it is, and the estimates have not seen it
        self._doubted = False                       # the next one is not
        if self.prior is not None:
            self.prior.reset()
        with torch.inference_mode(False), torch.no_grad():
            self._shared.begin(0)
            for layer in self._layers:
                layer.recent.copy_(layer.start[:, None])
            self._settle()

    def inner_shape(self, shape: Sequence[int] | None) -> Sequence[int] | None:
        """The method inside sees large batches as they come, and batches from the memory."""
        return None if shape is None else (shape[0] if shape[0] >= self.large else self.memory, *shape[1:])

    # What users call

    def forward(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Answer at once; remember the images; let the method learn from the memory when it is time.

        `stream` names the source of images that order means something in: see `TemporalPrior`.
        """
        return self._called(x, stream, learns=not self.stopped)

    def observe(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Answer, and follow the stream, with the weights as they are."""
        return self._called(x, stream, learns=False)

    def predict(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict a batch: what a call would return next, with nothing changed."""
        with self._checked(x) as x:
            if self._as_it_is(x, stream):
                logits = self.uncorrected = self.adapter.predict(x)
                return logits if self.prior is None else self.prior.answers(logits, stream)
            before = self._before(self._behind or len(x) > LIMIT)
            try:
                self._catch_up()
                logits = self.uncorrected = self._seen_twice(x, stream)
                return logits if self.prior is None else self.prior.answers(logits, stream)
            finally:
                self._put_back(before)

    def vitals(self) -> dict[str, float]:
        """With the size of the memory, and how far the order is believed."""
        found = self.adapter.vitals() | {"memory": 0.0 if self._samples is None else float(len(self._samples))}
        return found | ({} if self.prior is None else self.prior.vitals())

    def describe(self) -> dict[str, str]:
        """What it does and with which settings, and those of the adapter inside."""
        small = f"large batches in no order as they are; else every {self.every} images a memory of {self.memory}"
        order = "off: the stream is shuffled" if self.prior is None else "a prior for the next label"
        return self.adapter.describe() | {"small": small, "order": order}

    def logits_with(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Logits by these parameters and the statistics of memory and batch; nothing changes."""
        with self._checked(x) as x:
            if self._behind or not _remembered(x):
                return self.adapter.logits_with(parameters, x)
            network, around = self.adapter.model, self._samples
            if around is None or around.shape[1:] != x.shape[1:]:
                network, around = next(iter(self._copies.values())), None
                self._shared.expect(None, 0.0)
            both = x if around is None else torch.cat([x, around[:REFERENCE]])
            logits = logits_of(lambda x: functional_call(network, dict(parameters), (x,)), both)
            self.work.ran(logits)
            return logits[: len(x)]

    # The parts

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        """True unless the stream is said to be shuffled."""
        return self.prior is not None

    @property
    def views_used(self) -> bool:  # type: ignore[override]
        """True if the last batch was used as it is, and the method made views of it."""
        return self._behind and self.adapter.views_used

    @property
    def _layers(self) -> list[RecentNorm]:
        return [layer for layers in self._norms.values() for layer in layers]

    @contextmanager
    def _checked(self, x: Tensor) -> Iterator[Tensor]:
        x = taken(x)
        check_batch(x, self.device, self.dtype)
        with self._guarded(x) as x, torch.no_grad():
            try:
                yield x
            except torch.OutOfMemoryError as error:
                raise not_enough(x) from error
            finally:
                self._settle()

    def _before(self, all_of_it: bool) -> dict[str, Tensor]:
        """What `_put_back` takes; whatever fails before estimates and memory move needs little of it."""
        return self.own_state() if all_of_it or (self._layers and not self._shared.classes) else {}

    def _put_back(self, before: Mapping[str, Tensor]) -> None:
        if before:
            self.load_own_state(before)

    def _as_it_is(self, x: Any, stream: Keys) -> bool:
        """Whether the method gets this batch itself."""
        believed = 1.0 if self.prior is None else self.prior.unordered(len(x), stream)
        if not _remembered(x):
            return True
        if len(x) < self.large or self._doubted or bool(_gross(x).any()):
            return False
        if not believed:                                    # of a source of images that is new
            believed = self._believed(x[-LIMIT:], stream)
        found = believed >= self.sure
        sharing = getattr(self.method, "sharing", None)     # ranks do the same, even where rounding differs
        return found if sharing is None else bool(sharing.decided(torch.tensor([found], device=self.device)))

    def _believed(self, x: Tensor, stream: Keys) -> float:
        """How sure it would be that labels come in no order after the last images of a batch, answered by the estimates."""
        assert self.prior is not None
        known = self._shared.classes
        try:
            return self.prior.unordered(len(x), last(stream, len(x)), self._run(self._shown, x))
        finally:
            self._shared.begin(known)                       # nothing changes by this

    def _used(self, x: Any, stream: Keys, learns: bool) -> Tensor:
        """The method's own answer to a batch; it learns from it, and the memory takes it."""
        with self.handing_on(lambda logits: logits if self.prior is None else self.prior.answers(logits, stream)):
            logits = self.uncorrected = self.adapter(x) if learns else self.adapter.observe(x)
        if self.prior is not None:
            logits = self.prior(logits, stream)
        if _remembered(x):
            if not self._shared.classes:
                self._shared.begin(logits.shape[1])
            self._remember(x, logits)
            if self.prior is not None and self._waiting >= self.look:
                self._waiting = 0
                self._doubted = self._believed(x[-self.large :], stream) < self.sure
        self._behind = True
        return logits

    def _shown(self, x: Tensor) -> Tensor:
        """What the first network that answers says by estimates that these images have moved."""
        name, network = next(iter(self._copies.items()))
        with self.method.exchanged({getattr(self.method, name): network}):
            self._first_look(x, 0.0)
            return self.method.logits(getattr(self.method, name), x)

    def _called(self, x: Tensor, stream: Keys, learns: bool) -> Tensor:
        with self._checked(x) as x:
            if self._as_it_is(x, stream):
                return self._used(x, stream, learns)
            self.adapter.restored = 0.0             # what it learned from an earlier batch is not of this one
            held = 0 if self._samples is None or self._samples.shape[1:] != x.shape[1:] else len(self._samples)
            due = self._waiting + len(x) >= self.every and held + len(x) >= self.memory
            before = self._before(due or self._behind or len(x) > LIMIT)
            try:
                self._catch_up()
                logits = self.uncorrected = self._seen_twice(x, stream)
                if self.prior is not None:
                    logits = self.prior(logits, stream)
                self._follow()
                self._remember(x, logits)
                self._hand_out(logits.clone())          # before the learning
                if due:
                    self._learn(learns)
            except BaseException:
                self._put_back(before)
                raise
            return logits

    def _learn(self, learns: bool) -> None:
        """Let the method learn from the memory, and the estimates follow."""
        assert self._samples is not None
        self._waiting = 0
        if learns and self.adapted:
            with suppress(OutOfMemory):     # of the answer to the memory, which nobody asks for
                self.adapter(self._samples)
        self._look_at_memory()

    def _seen_twice(self, x: Tensor, stream: Keys) -> Tensor:
        """The method's answer by estimates that the batch has moved; those moved last are in `moved`."""
        *first, last = x.split(LIMIT)  # type: ignore[no-untyped-call]
        twice = partial(self._twice, 1.0 if self.prior is None else self.prior.unordered(len(x), stream))
        answers = []
        for part in first:
            answers.append(self._run(twice, part))
            self._follow()
        return torch.cat([*answers, self._run(twice, last)])

    def _twice(self, shuffled: float, x: Tensor) -> Tensor:
        method = self.method
        if not self._layers:                        # nothing to look twice for
            return method.plain_prediction(x)
        with method.exchanged({getattr(method, name): network for name, network in self._copies.items()}):
            self._first_look(x, shuffled)
            return method.plain_prediction(x)

    def _first_look(self, x: Tensor, shuffled: float) -> None:
        """Say of the images which labels they seem to have by the estimates."""
        self._shared.expect(None, shuffled)
        first = self.method.logits(getattr(self.method, self.method.answered_by[0]), x)
        if not self._shared.classes:
            self._shared.begin(first.shape[1])
        self._shared.expect(first.argmax(1).where(first.isfinite().all(1), -1), shuffled)

    def _follow(self) -> None:
        """Let the estimates be where the last images moved them."""
        if self._layers:
            torch._foreach_copy_([layer.recent for layer in self._layers], [layer.moved for layer in self._layers])

    def _settle(self) -> None:
        """Between batches no labels are expected, and the estimates have moved nowhere: nothing else is left of a batch."""
        self._shared.expect(None, 0.0)
        if self._layers:
            torch._foreach_copy_([layer.moved for layer in self._layers], [layer.recent for layer in self._layers])

    def _catch_up(self) -> None:
        """Let the estimates look at what came while batches were used as they are."""
        if self._behind and self._samples is not None:
            self._look_at_memory()
        self._behind = self._doubted = False

    def _look_at_memory(self) -> None:
        """Let the estimates follow the memory, in all classes."""
        assert self._samples is not None
        assert self._facts is not None
        recent = self._facts[:, 2].argsort()[-LIMIT:]           # in order of arrival
        labels = self._facts[recent, 0].long()

        def look(x: Tensor) -> Tensor:
            self._shared.expect(labels, 0.0, PULL)
            return torch.stack([self.method.logits(network, x) for network in self._copies.values()])

        if self._layers:
            self._run(look, self._samples[recent])
            self._follow()

    def _remember(self, x: Tensor, logits: Tensor) -> None:
        """Take the images into the memory: every class has the same room, and the recent ones stay."""
        n, classes = logits.shape
        number = torch.arange(self._seen, self._seen + n, device=x.device, dtype=torch.float64)
        good = logits.isfinite().all(1)
        label, uncertainty = logits.argmax(1).double(), entropy(logits).double() / math.log(max(classes, 2))
        facts = torch.stack([label.where(good, -1), uncertainty.where(good, 1), number], 1)
        self._seen, self._waiting = self._seen + n, self._waiting + n
        if self._samples is not None and self._facts is not None and self._samples.shape[1:] == x.shape[1:]:
            x, facts = torch.cat([self._samples, x]), torch.cat([self._facts, facts])
        chosen = self._chosen(x, facts, classes)
        self._samples, self._facts = x[chosen], facts[chosen]

    def _chosen(self, x: Tensor, facts: Tensor, classes: int) -> Tensor:
        """Which images stay: the best of each class before the second best of any, then those too old, then bad ones.

        Bad are those whose numbers are out of proportion; in the place of one that would stay is the best of all.
        """
        labels, uncertainty, number = facts.unbind(1)
        bad = (labels < 0) | _gross(x)
        age = self._seen - number
        order = (age / self.age + self.certainty * uncertainty + bad * 1e9).argsort(stable=True)      # best first
        members = nn.functional.one_hot(labels.long().clamp(min=0)[order], classes)
        place = (members.cumsum(0) * members).sum(1)                                # 1 is the best of its class
        place = place + len(order) * ((age[order] > self.age) + 2.0 * bad[order])
        chosen = order[place.argsort(stable=True)][: self.memory]
        return torch.where(bad[chosen], chosen[0], chosen)

    # The state

    def own_state(self) -> dict[str, Tensor]:
        """Estimates, memory, order and counters."""
        state = {
            f"norm.{name}.{number}": layer.recent.clone()
            for name, layers in self._norms.items()
            for number, layer in enumerate(layers)
        }
        state["counters"] = torch.tensor([self._seen, self._waiting, self._shared.classes, self._behind, self._doubted])
        if self._samples is not None and self._facts is not None:
            state |= {"samples": self._samples.clone(), "facts": self._facts.clone()}
        if self.prior is not None:
            state |= _named("order", self.prior.state_dict())
        return state

    def own_kept(self) -> dict[str, Tensor]:
        """Estimates and counters: after a collapse memory and order begin anew."""
        state = {key: value for key, value in self.own_state().items() if key.startswith(("norm.", "counters"))}
        return state | ({} if self.prior is None else _named("order", TemporalPrior().state_dict()))

    def check_own_state(self, state: Mapping[str, Tensor]) -> list[str]:
        """Names and shapes; the memory's images and the order are the state's to say."""
        order = {key.removeprefix("order."): value for key, value in state.items() if key.startswith("order.")}
        free = {key: state[key] for key in ("samples", "facts") if key in state}
        mine, theirs = (
            {f"small.{k}": v for k, v in values.items() if k not in ("samples", "facts") and not k.startswith("order.")}
            for values in (self.own_state(), state)
        )
        problems = misfits(mine, theirs)
        size = len(free.get("samples", ()))
        if len(free) == 1 or size > self.memory or (free and list(free["facts"].shape) != [size, 3]):
            problems.append(f"'small.samples' is a memory of {size} images instead of up to {self.memory} with their facts")
        if self.prior is not None:
            return problems + [f"small.order: {problem}" for problem in self.prior.problems(order)]
        return problems + [f"unexpected 'small.order.{key}'" for key in order]

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checked state."""
        with torch.inference_mode(False), torch.no_grad():
            for name, layers in self._norms.items():
                for number, layer in enumerate(layers):
                    layer.recent.copy_(state[f"norm.{name}.{number}"])
            self._seen, self._waiting, classes, behind, doubted = map(int, state["counters"].tolist())
            self._behind, self._doubted = bool(behind), bool(doubted)
            self._shared.begin(classes)
            self._settle()
        self._samples = state["samples"].to(self.device, self.dtype, copy=True) if "samples" in state else None
        self._facts = state["facts"].to(self.device, copy=True) if "facts" in state else None
        if self.prior is not None:
            self.prior.load_state_dict({k.removeprefix("order."): v for k, v in state.items() if k.startswith("order.")})


def _remembered(x: Any) -> bool:
    """Whether a memory makes sense of these samples: one tensor of numbers, and not of tokens."""
    return isinstance(x, Tensor) and x.is_floating_point()


def _gross(x: Tensor) -> Tensor:
    """Which images' numbers are out of proportion to those of the others."""
    size = x.flatten(1).abs().amax(1)
    return ~(size <= GROSS * size.nanmedian().clamp(min=1))


def _named(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for key, value in state.items()}
