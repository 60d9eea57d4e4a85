"""CoTTA's and PETAL's step, executed fast: flat parameters, low precision, compiled networks, CUDA graphs.

The plain step in `petal.methods` says what is computed; `TeacherEngine.call` has the same lines in the same order, each
of them carried out by a `Program` for the batch shape at hand. On a GPU the host waits once in a step, for the gate's
decision.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from petal import functional as F
from petal.augment import Views
from petal.engine import passes
from petal.engine.flat import Layout
from petal.engine.networks import image_buffer, logit_gradient, low_precision, prefers_channels_last, with_stored_scales
from petal.engine.policy import Policy, record, side_stream, side_streams
from petal.engine.views import Maker, crew, draw, group_size, make_views
from petal.errors import InputError
from petal.methods.base import not_finite
from petal.methods.mean_teacher import MeanTeacher, Sharing
from petal.methods.petal import Petal
from petal.restore import Fisher, Stochastic

log = logging.getLogger(__name__)


class TeacherEngine:
    """Executes the calls of one CoTTA or Petal adapter."""

    def __init__(self, adapter: MeanTeacher, policy: Policy) -> None:
        self.adapter, self.policy = adapter, policy
        device = adapter.device
        with torch.inference_mode(False), torch.no_grad():
            self.layout = Layout.of(adapter.adapted, prefers_channels_last(adapter.model, device))
            self.student = self.layout.adopt(adapter.model)
            self.teacher = self.layout.adopt(adapter.teacher)
            self.source = self.layout.adopt(adapter.source)
            self.var = self._adopt_posterior()
            self.grad = torch.zeros_like(self.student)
            self._make_low_precision()
            self.ok = torch.ones(1, dtype=torch.int32, device=device)
            self.restored = torch.zeros(1, dtype=torch.int32, device=device)
            self.skips = torch.zeros((), dtype=torch.int64, device=device)
        self.student_net = adapter.model
        self.rule: passes.Rule | None = None
        self.state: list[Tensor] = []
        self.step = torch.zeros((), device=device)
        self.programs: dict[torch.Size, Program] = {}
        self.proven = False  # a batch has gone through
        self.seen: dict[torch.Size, int] = {}
        self._link_optimizer()

    def _adopt_posterior(self) -> Tensor | None:
        if not isinstance(self.adapter, Petal):
            return None
        var = self.layout.pack(self.adapter.posterior.var)
        self.adapter.posterior = self.adapter.posterior.moved(
            {name: p.detach() for name, p in self.adapter.source.named_parameters()}, self.layout.views(var)
        )
        return var

    def _make_low_precision(self) -> None:
        adapter, low = self.adapter, self.low_views
        self.teacher_low = self.source_low = None
        self.teacher_net, self.source_net = adapter.teacher, adapter.source
        if low is not None:
            self.teacher_low, self.source_low = self.teacher.to(low), self.source.to(low)
            self.teacher_net = low_precision(adapter.teacher, self.layout, self.teacher_low)
            self.source_net = low_precision(adapter.source, self.layout, self.source_low)

    # What an adapter asks of its executor

    def call(self, x: Tensor) -> Tensor:
        """Predict and adapt."""
        adapter = self.adapter
        if adapter.episodic:
            adapter._try(x)
            adapter._restart()
        for _ in range(adapter.steps):
            with self._algorithms(x):
                target = self._predict(x)
                self._program(x, again=True).learn(target)
        adapter.restored = self.restored[0] / self.layout.size
        return target.clone()

    def predict(self, x: Tensor) -> Tensor:
        """Predict only."""
        with self._algorithms(x):
            return self._predict(x).clone()

    def _algorithms(self, x: Tensor) -> AbstractContextManager[None]:
        if self.adapter.sharing is not None:
            return nullcontext()
        return self.policy.algorithms(x.shape, self.seen)

    def _predict(self, x: Tensor) -> Tensor:
        try:
            answer = self._program(x).predict(x)
        except OutOfRange:
            log.warning("this network leaves the range of float16 and runs in bfloat16 from here on")
            self.policy.low = torch.bfloat16
            self._make_anew()
            answer = self._program(x, again=True).predict(x)
        except InputError as error:
            if self.proven or self.policy.low is not None or self.policy.low_views is None:
                raise
            answer = self._predict_in_full(x, error)
        self.proven = True
        return answer

    def _predict_in_full(self, x: Tensor, error: InputError) -> Tensor:
        """For a network that knows no low precision: the source says so before any random number is drawn."""
        low, self.policy.low_views = self.policy.low_views, None
        self._make_anew()
        try:
            answer = self._program(x, again=True).predict(x)
        except BaseException:  # it was the batch
            self.policy.low_views = low
            self._make_anew()
            raise
        log.warning("source and views run in %s: in %s, %s", self.adapter.dtype, low, error)
        return answer

    def _make_anew(self) -> None:
        """What depends on the precision."""
        self.programs.clear()
        with torch.no_grad():
            self._make_low_precision()

    def skipped(self) -> int:
        """Updates not made since the last invalidation; waits for the device."""
        return int(self.skips)

    def invalidate(self) -> None:
        """Weights or optimizer were changed from outside: make the derived copies anew."""
        with torch.inference_mode(False), torch.no_grad():
            if self.teacher_low is not None:
                self.teacher_low.copy_(self.teacher)
            self.skips.zero_()
            self._link_optimizer()

    # The parts

    def _link_optimizer(self) -> None:
        """Let the optimizer's own state be views of flat buffers, so that it is always current."""
        optimizer = self.adapter.optimizer
        assert optimizer is not None
        rule = passes.Rule.of(optimizer)
        for parameter, view in zip(self.adapter.adapted.values(), self.layout.views(self.grad).values(), strict=True):
            parameter.grad = view
        if rule != self.rule:
            self.programs.clear()
            self.rule, self.state = rule, []
        if rule is None:
            return
        if not self.state:
            self.state = [torch.zeros_like(self.student) for _ in rule.state_names]
        first = next(iter(self.adapter.adapted.values()))
        begun = optimizer.state.get(first, {})
        self.step.fill_(float(begun.get("step", 1.0 if begun else 0.0)))
        views = [self.layout.views(flat) for flat in self.state]
        for name, parameter in self.adapter.adapted.items():
            old = optimizer.state.get(parameter, {})
            for key, buffers in zip(rule.state_names, views, strict=True):
                if not isinstance(old.get(key), Tensor):
                    buffers[name].zero_()
                elif old[key].data_ptr() != buffers[name].data_ptr():
                    buffers[name].copy_(old[key])
            if begun:
                self._expose(name, parameter, rule, views)

    def _expose(self, name: str, parameter: nn.Parameter, rule: passes.Rule, views: list[dict[str, Tensor]]) -> None:
        assert self.adapter.optimizer is not None
        entry: dict[str, Any] = {"step": self.step} if rule.kind == "adam" else {}
        entry |= {key: view[name] for key, view in zip(rule.state_names, views, strict=True)}
        self.adapter.optimizer.state[parameter] = entry

    def expose_optimizer(self) -> None:
        """After a first update, show the flat state as the optimizer's."""
        optimizer = self.adapter.optimizer
        assert optimizer is not None
        if self.rule is not None and not optimizer.state and self.rule.state_names:
            views = [self.layout.views(flat) for flat in self.state]
            for name, parameter in self.adapter.adapted.items():
                self._expose(name, parameter, self.rule, views)

    def _program(self, x: Tensor, again: bool = False) -> "Program":
        """The program for this shape: plain until the shape has shown that it comes again, then compiled."""
        times = self.seen[x.shape] = self.seen.get(x.shape, 0) + (not again)
        program = self.programs.get(x.shape)
        settings = self._settings()
        if settings[0] != self.rule:  # somebody changed the optimizer's settings
            self._link_optimizer()
            program = None
        compiled = sum(p.compiled for shape, p in self.programs.items() if shape != x.shape)
        due = self.policy.due(x.shape, times, compiled)
        if program is None or program.settings != settings or program.compiled != due:
            program = None  # the old one's memory is free before the new one takes its own
            self.programs.pop(x.shape, None)
            program = self.programs[x.shape] = Program(self, x, settings, compiled=due)
        return program

    def _settings(self) -> tuple[object, ...]:
        """What a captured program holds as constants: if any of it changes, the program is made anew."""
        a = self.adapter
        assert a.optimizer is not None
        rule = passes.Rule.of(a.optimizer)
        prior = a.prior_weight if isinstance(a, Petal) else 0.0
        return (rule, a.ema, a.views, a.confidence, a.restore, a.gate, a.average, a.loss, a.augment, prior, a.sharing)

    @property
    def low_views(self) -> torch.dtype | None:
        """The precision of the teacher on views and of the source, if it is not the adapter's own."""
        return self.policy.low or self.policy.low_views

    def autocast(self, low: torch.dtype | None) -> AbstractContextManager[Any]:
        """Networks in here run in this precision, if one is given."""
        if low is None:
            return nullcontext()
        return torch.autocast(self.adapter.device.type, dtype=low, cache_enabled=False)


class OutOfRange(ArithmeticError):
    """A network in float16 gave values that are not finite for a batch that is."""


LARGE = 1 << 16  # numbers in a batch: two such views fill a GPU, and more of them only take memory


def views_at_once(adapter: MeanTeacher, policy: Policy, x: Tensor) -> int:
    """How many views go through the teacher side by side: as many as the policy has streams, and none is left over."""
    if adapter.sharing is not None or not adapter.views:
        return 1
    most = min(policy.view_streams, 2) if x.numel() > LARGE else policy.view_streams
    return max(n for n in range(1, most + 1) if adapter.views % n == 0)


class Program:
    """The parts of a step for one batch shape, on buffers of its own: plain, or compiled and captured as CUDA graphs."""

    def __init__(self, engine: TeacherEngine, x: Tensor, settings: tuple[object, ...], compiled: bool) -> None:
        self.engine, self.settings, self.compiled = engine, settings, compiled
        adapter = engine.adapter
        self.cuda = adapter.device.type == "cuda"
        self.x = image_buffer(x, engine.layout.channels_last)
        teacher, source = engine.teacher_net, engine.source_net
        compiles = compiled and (self.cuda or engine.low_views is None)  # a CPU gains nothing from it in low precision
        if compiles and not self.cuda:
            teacher, source = with_stored_scales(teacher), with_stored_scales(source)
        self.teacher: Any = teacher
        self.source: Any = source
        self.student: Any = engine.student_net
        alike = adapter.sharing is not None  # processes that round alike do not drift apart
        if compiles:
            self.teacher, self.source = (
                engine.policy.compiler(n, inference=True, alike=alike) for n in (teacher, source)
            )
        if compiled:
            self.student = engine.policy.compiler(self.student, alike=alike)
        self.teacher_of_views = self.teacher
        self.by_threads = not self.cuda and engine.policy.view_threads > 1 and isinstance(adapter.augment, Views)
        self.threads_ready = False
        if compiles and self.by_threads:
            self.teacher_of_views = engine.policy.compiler(teacher, inference=True, one_thread=True)
        at_once = views_at_once(adapter, engine.policy, x)
        self.views = [image_buffer(x, engine.layout.channels_last) for _ in range(at_once)]
        self.streams: list[torch.cuda.Stream | None] = [None] * at_once  # the first on the one that is current
        if self.cuda:
            self.streams[1:] = [side_stream(torch.cuda.current_device(), number) for number in range(1, at_once)]
        self.plain: Tensor | None = None
        self.needed: Tensor | None = None
        self.total: Tensor | None = None
        self.target: Tensor | None = None
        self.flags = torch.zeros(4, dtype=torch.bool, pin_memory=self.cuda)
        self.recorded: dict[str, Callable[[], None]] = {}
        self.maker: Maker | None = None
        if not self.cuda and isinstance(adapter.augment, Views):
            self.maker = Maker(adapter.augment, engine.policy, compiled)
        self.lots: Tensor | None = None
        if isinstance(adapter.restore, Stochastic) and adapter.restore.probability > 0:
            self.lots = torch.empty(engine.layout.size, device=adapter.device)
        self.graphs = compiled and self.cuda and engine.rule is not None
        self.captured = False
        self.tried = False

    def predict(self, x: Tensor) -> Tensor:
        """The teacher's prediction y' (Alg. 2, l. 3-5)."""
        adapter = self.engine.adapter
        self.images = x.contiguous()
        self.x.copy_(x, non_blocking=True)
        if self.graphs and not self.captured:
            self._capture()
        with torch.no_grad():
            self.look()
            assert self.needed is not None
            if adapter.sharing is not None and adapter.views:
                self.needed.copy_(adapter.sharing.decided(self.needed))
                self.flags_on_device[2:] = torch.stack([self.needed.any(), self.needed.all()])
            self.flags.copy_(self.flags_on_device, non_blocking=True)
            self._decide(overlap=adapter.gate == "sample")
            finite, in_range, adapter.views_used, everywhere = self.flags.tolist()
            if not finite:
                raise not_finite(x)
            if adapter.gate == "batch" and not everywhere:
                self.guess()
            answer = self.plain
            if adapter.views_used:
                answer = self._average()
                if not everywhere:
                    assert self.plain is not None
                    answer = torch.where(self.needed[:, None], answer, self.plain)
            assert answer is not None
            if self.engine.policy.low == torch.float16:
                if not self.tried:  # once for each program; from then on the source's answer tells
                    in_range, self.tried = in_range and bool(answer.isfinite().all()), True
                if not in_range:
                    raise OutOfRange
            return answer

    def _decide(self, overlap: bool) -> None:
        """Wait for the gate's decision. If single samples decide, the plain prediction is computed meanwhile.

        One decision for the batch is waited for first: if it opens, nobody needs the plain prediction.
        """
        decided = None
        if self.cuda:
            decided = torch.cuda.Event()  # type: ignore[no-untyped-call]
            decided.record()
        if overlap:
            self.guess()
        if decided is not None:
            decided.synchronize()

    def _average(self) -> Tensor:
        adapter = self.engine.adapter
        self.total = None if not self.captured else self.total
        if self.maker is not None:
            self.maker.begin(self.images)
        if adapter.sharing is not None:
            return self._average_of_shares(adapter.sharing)
        if self.by_threads:
            for logits in self._predictions_by_threads():
                self._sum(logits)
        else:
            self._start_sum()
            made = self._all_views()
            for _ in range(adapter.views // len(self.views)):
                for buffer in self.views:  # at once: who makes views may use one tensor for all of them
                    buffer.copy_(next(made))
                self.add()
        assert self.total is not None
        return self._mean(self.total)

    def _all_views(self) -> Iterator[Tensor]:
        """The views of the batch, one after the other."""
        adapter = self.engine.adapter
        if not isinstance(adapter.augment, Views) or self.x.dim() != 4:
            yield from (adapter.view(self.images) for _ in range(adapter.views))
            return
        size = group_size(self.images)
        for start in range(0, adapter.views, size):
            count = min(size, adapter.views - start)
            yield from self._views(*draw(adapter.augment, self.images, count, adapter.generator))

    def _average_of_shares(self, sharing: Sharing) -> Tensor:
        """The same where processes share out the views: the same random numbers, and the same sums in the same order."""
        adapter = self.engine.adapter
        mine: list[Tensor] = []

        def predict(view: Tensor) -> None:
            if not self.captured:
                self.total = None
            self._start_sum()
            self.views[0].copy_(view)
            self.add()
            assert self.total is not None
            mine.append(self.total.clone())

        if self.by_threads:
            logits = self._predictions_by_threads(sharing)
            mine = logits if adapter.average == "logits" else [z.log_softmax(1) for z in logits]
        elif isinstance(adapter.augment, Views) and self.x.dim() == 4:
            size = group_size(self.images)
            for start in range(0, adapter.views, size):
                count = min(size, adapter.views - start)
                uniform, noise = draw(adapter.augment, self.images, count, adapter.generator)
                share = [k for k in range(count) if sharing.computes(start + k)]
                if share:
                    for view in self._views(uniform[share], noise[share]):
                        predict(view)
        else:
            for number in range(adapter.views):
                view = adapter.view(self.images)
                if sharing.computes(number):
                    predict(view)
        first, *others = sharing.gathered(mine, adapter.views)
        total = first.clone()
        for prediction in others:
            total = total.add_(prediction) if adapter.average == "logits" else torch.logaddexp(total, prediction, out=total)
        return self._mean(total)

    def _views(self, uniform: Tensor, noise: Tensor) -> Iterable[Tensor]:
        """The views of the batch that the random numbers [K, ...] mean, one after the other."""
        if self.maker is not None:
            return map(self.maker.make, uniform, noise)
        assert isinstance(self.engine.adapter.augment, Views)
        return make_views(self.engine.adapter.augment, self.images, uniform, noise)

    def _mean(self, total: Tensor) -> Tensor:
        """The mean over views of logits, or of probabilities as their logarithm."""
        views = self.engine.adapter.views
        return total / views if self.engine.adapter.average == "logits" else total - math.log(views)

    def _predictions_by_threads(self, sharing: Sharing | None = None) -> list[Tensor]:
        """The teacher's logits of each view, or of this process's share of them, each made and predicted by one thread."""
        adapter, views = self.engine.adapter, self.engine.adapter.augment
        assert isinstance(views, Views)
        maker = self.maker
        assert maker is not None
        layout = torch.channels_last if self.engine.layout.channels_last else torch.contiguous_format
        mine = [sharing is None or sharing.computes(number) for number in range(adapter.views)]
        numbers = iter(range(adapter.views))

        def draw() -> tuple[int, tuple[Tensor, Tensor]]:
            return next(numbers), views.draw(self.images, adapter.generator)

        def make(numbered: tuple[int, tuple[Tensor, Tensor]]) -> Tensor:
            number, drawn = numbered
            if not mine[number]:
                return self.images
            view = maker.make(*drawn).contiguous(memory_format=layout)
            with self.engine.autocast(self.engine.low_views):
                return adapter.forward_through(self.teacher_of_views, view).to(adapter.dtype)

        threads = crew(self.engine.policy.view_threads)
        made = threads.work(draw, make, adapter.views, alone=self.compiled and not self.threads_ready)
        self.threads_ready = True
        return [logits for logits, own in zip(made, mine, strict=True) if own]

    def _start_sum(self) -> None:
        if self.total is not None:
            self.total.fill_(0.0 if self.engine.adapter.average == "logits" else -math.inf)

    def learn(self, target: Tensor) -> None:
        """Student step, teacher average and restore (Alg. 2, l. 6-15)."""
        engine, adapter = self.engine, self.engine.adapter
        if self.target is None:
            self.target = target.clone()
        else:
            self.target.copy_(target)
        if self.lots is not None:
            self.lots.uniform_(generator=adapter.generator)
        self.adapt()
        engine.expose_optimizer()

    # The bodies, as they are or as graphs

    def look(self) -> None:
        """`needed` and `flags_on_device` of the batch."""
        self.recorded.get("look", self._look)()

    def guess(self) -> None:
        """`plain`, the teacher's prediction of the batch."""
        self.recorded.get("guess", self._guess)()

    def add(self) -> None:
        """Add the teacher's predictions of `views` to `total`."""
        self.recorded.get("add", self._add)()

    def adapt(self) -> None:
        """Learn from `target`."""
        self.recorded.get("adapt", self._adapt)()

    def _look(self) -> None:
        """Which samples need views, by the source's confidence, and whether the batch is finite."""
        engine, adapter = self.engine, self.engine.adapter
        finite = in_range = self.x.isfinite().all()
        if adapter.views == 0:
            self.needed = self.x.new_zeros(self.x.shape[0], dtype=torch.bool)
        else:
            with engine.autocast(engine.low_views):
                logits = adapter.forward_through(self.source, self.x).to(adapter.dtype)
            in_range = logits.isfinite().all()
            confidence = F.confidence(logits)
            if adapter.gate == "batch":
                confidence = confidence.mean().expand(self.x.shape[0])
            self.needed = confidence < adapter.confidence
        self.flags_on_device = torch.stack([finite, in_range, self.needed.any(), self.needed.all()])

    def _guess(self) -> None:
        """The teacher's plain prediction, by the student's own program with the teacher's weights.

        The student learns from the difference of the two. Where they agree it has to be nothing, and not the difference
        between two ways of rounding, of which Adam would make full steps.
        """
        engine, adapter = self.engine, self.engine.adapter
        kept = engine.grad.copy_(engine.student)  # no gradient is waiting here
        engine.student.copy_(engine.teacher)
        try:
            with torch.enable_grad(), engine.autocast(engine.policy.low):
                logits = adapter.forward_through(self.student, self.x).to(adapter.dtype)
            logits = logits.detach()  # kept outside of what a graph's other parts write over
            self.plain = logits if self.plain is None else self.plain.copy_(logits)
        finally:
            engine.student.copy_(kept)

    def _add(self) -> None:
        """The teacher's predictions of the views, added to the total in their order.

        Each runs on a stream of its own: while one normalises and waits for memory, another multiplies.
        """
        adapter = self.engine.adapter
        others = [stream for stream in self.streams if stream is not None]
        predictions = []
        with side_streams if others else nullcontext():
            for stream in others:
                stream.wait_stream(torch.cuda.current_stream())
            for view, on in zip(self.views, self.streams, strict=True):
                with nullcontext() if on is None else torch.cuda.stream(on), self.engine.autocast(self.engine.low_views):
                    predictions.append(adapter.forward_through(self.teacher, view).to(adapter.dtype))
            for stream, logits in zip(others, predictions[1:], strict=False):
                torch.cuda.current_stream().wait_stream(stream)
                logits.record_stream(torch.cuda.current_stream())
        for logits in predictions:
            self._sum(logits)

    def _sum(self, logits: Tensor) -> None:
        if self.engine.adapter.average == "logits":
            self.total = logits if self.total is None else self.total.add_(logits)
        else:
            logits = logits.log_softmax(1)
            self.total = logits if self.total is None else torch.logaddexp(self.total, logits, out=self.total)

    def _adapt(self) -> None:
        engine, adapter = self.engine, self.engine.adapter
        target = self.target
        assert target is not None
        engine.grad.zero_()
        with torch.enable_grad():
            with engine.autocast(engine.policy.low):
                logits = adapter.forward_through(self.student, self.x).to(adapter.dtype)
            loss, grad, unscale = logit_gradient(logits, lambda z: adapter.consistency(z, target).mean())
            torch.autograd.backward(logits, grad, inputs=list(adapter.adapted.values()))
        with torch.no_grad():
            self._update(loss, unscale)

    def _update(self, loss: Tensor, unscale: Tensor) -> None:
        engine, adapter = self.engine, self.engine.adapter
        engine.ok.copy_(loss.isfinite().reshape(1))
        mean, weight, damping = None, 0.0, 0.0
        if isinstance(adapter, Petal):
            mean, weight, damping = engine.source, adapter.prior_weight, adapter.posterior.damping
        passes.total_gradient_(engine.grad, engine.student, mean, engine.var, weight, damping, engine.ok, unscale)
        engine.skips.add_(1 - engine.ok[0])
        threshold = None
        if isinstance(adapter.restore, Fisher) and adapter.restore.quantile > 0:
            threshold = passes.squared_quantile(engine.grad, adapter.restore.quantile)
        probability = adapter.restore.probability if isinstance(adapter.restore, Stochastic) else 0.0
        restores = threshold is not None or self.lots is not None
        if engine.rule is None:
            self._update_with_foreign_optimizer(threshold, probability)
            return
        passes.update_(
            engine.rule, engine.grad, engine.student, engine.teacher, engine.source if restores else None, engine.state,
            engine.step, adapter.ema, threshold, self.lots, probability, engine.ok, engine.teacher_low, engine.restored,
        )  # fmt: skip

    def _update_with_foreign_optimizer(self, threshold: Tensor | None, probability: float) -> None:
        """An optimizer that the fused pass does not know takes its own step on the same parameters."""
        engine, adapter = self.engine, self.engine.adapter
        assert adapter.optimizer is not None
        if not bool(engine.ok):
            return
        mask = None
        if threshold is not None:
            mask = engine.grad.square() < threshold
        elif self.lots is not None:
            mask = self.lots < probability
        adapter.optimizer.step()
        engine.teacher.lerp_(engine.student, 1 - adapter.ema)
        if engine.teacher_low is not None:
            engine.teacher_low.copy_(engine.teacher)
        engine.restored.zero_()
        if mask is not None:
            torch.where(mask, engine.source, engine.student, out=engine.student)
            engine.restored.add_(mask.sum())

    # CUDA graphs

    def _capture(self) -> None:
        """Record the bodies as graphs. What cannot be recorded runs as it is."""
        adapter = self.engine.adapter
        keep = [t.cpu() for t in self._mutable()]  # not on the device, whose peak memory this would be
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # the memory of a program that this one follows
        try:
            with torch.no_grad():
                self._guess()
                assert self.plain is not None
                for view in self.views:
                    view.copy_(self.x)
                self.target, self.total = self.plain.clone(), self.plain.clone()
                self.recorded["look"] = record(self._look, pool)
                if adapter.views:
                    self.recorded["add"] = record(self._add, pool)
                if adapter.views and isinstance(adapter.augment, Views):  # its kernels are compiled now, not in the stream
                    random = torch.Generator(self.x.device).manual_seed(0)
                    make_views(adapter.augment, self.images, *draw(adapter.augment, self.images, 1, random))
                if self.lots is not None:
                    self.lots.fill_(1.0)
                self.recorded["adapt"] = record(self._adapt, pool)
                # the plain prediction is a part of it, so it is warm, and finds room in the memory of the whole
                self.recorded["guess"] = record(self._guess, pool, warmup=0)
            self.captured = True
        except Exception as error:
            log.warning("this network cannot run as a CUDA graph and runs without: %s", error)
            torch.cuda.synchronize()
            self.recorded.clear()
            self.graphs = False
        finally:
            for tensor, value in zip(self._mutable(), keep, strict=True):
                tensor.copy_(value)

    def _mutable(self) -> list[Tensor]:
        e = self.engine
        tensors = [e.student, e.teacher, *e.state, e.step, e.skips, e.restored]
        return tensors if e.teacher_low is None else [*tensors, e.teacher_low]
