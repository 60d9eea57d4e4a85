"""The descent on flat parameters: penalties, optimizer, averages and restores in two sweeps over memory.

It computes what `petal.methods.descent` does. On a GPU nothing waits for the host: if not all is finite nothing is written,
and a counter on the device goes up. What the sweeps do not know runs its plain code over the same flat tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from petal.engine import passes
from petal.methods.descent import After, Descent, Ema, Gaussian, Penalty, PutBack, Values, Weights
from petal.restore import Fisher, Stochastic

if TYPE_CHECKING:
    from petal.engine.engine import Engine


class FlatWeights(Weights):
    """The adapted parameters as a list of one tensor."""

    def __init__(self, engine: "Engine", flat: Tensor, grad: Tensor) -> None:
        super().__init__(engine.adapter.adapted, engine.adapter.generator)
        self.engine, self.flat, self.grad = engine, flat, grad

    @property
    def values(self) -> list[Tensor]:
        """All weights."""
        self.flat.grad = self.grad
        return [self.flat]

    @property
    def gradients(self) -> list[Tensor]:
        """All gradients."""
        return [self.grad]

    def like(self, values: Values) -> list[Tensor]:
        """A network's or a mapping's tensors in one."""
        return [self.engine.flat_of(values)]


class FlatDescent(Descent):
    """Steps down a loss, on flat parameters."""

    def __init__(self, engine: "Engine", flat: Tensor) -> None:
        adapter = engine.adapter
        assert adapter.descent is not None
        super().__init__(adapter.adapted, adapter.descent.optimizer, adapter.generator)
        self.engine, self.flat = engine, flat
        self.grad = torch.zeros_like(flat)
        self.grad_views = list(engine.layout.views(self.grad).values())
        self.whole: Weights = FlatWeights(engine, flat, self.grad)      # beside `weights`, the parameters one by one
        self.ok = torch.ones(1, dtype=torch.int32, device=flat.device)
        self.count = torch.zeros(1, dtype=torch.int32, device=flat.device)      # weights put back
        self.skips_on_device = torch.zeros((), dtype=torch.int64, device=flat.device)
        self.unscale: Tensor | None = None                                      # what undoes the scale of the gradient
        self.waiting = False                                                    # gradients wait to be used
        self.rule: passes.Rule | None = None
        self.linked: torch.optim.Optimizer | None = None
        self.judged: torch.optim.Optimizer | None = None                        # the one of which `even` speaks
        self.even = True
        self.sizes = torch.tensor([value.numel() for value in adapter.adapted.values()], device=flat.device)
        self.state: list[Tensor] = []
        self.step = torch.zeros((), device=flat.device)
        self.rates: Tensor | None = None
        self.uniform: Tensor | None = None

    @property
    def skipped(self) -> int:
        """Updates not made because the loss or a gradient was not finite; waits for the device."""
        return int(self.skips_on_device)

    @skipped.setter
    def skipped(self, value: int) -> None:
        self.skips_on_device.fill_(value)

    def clear(self) -> None:
        """Let go of the gradients."""
        self.waiting = False
        super().clear()

    # The gradient

    def gradient(self, loss: Tensor, penalties: Sequence[Penalty] = (), when: Tensor | bool = True) -> Tensor:
        """Gradients of the adapted parameters; true, on the device, if they may be used."""
        self.link_gradients()
        self.grad.zero_()
        self.unscale, self.waiting = None, True
        self.engine.note_range()
        if not self.engine.cuda and not bool(when):     # on a CPU nothing waits, and a backward pass takes its time
            return self.ok.zero_()[0].bool()
        with self.unlinked() if self.engine.scales else nullcontext():
            loss.backward(inputs=[*self.parameters.values(), self.engine.anchor])  # type: ignore[no-untyped-call]
        with torch.no_grad():
            wanted = self.engine.always if when is True else torch.as_tensor(when, device=loss.device)
            self.ok.copy_((loss.detach().isfinite() & self.engine.in_range & wanted).reshape(1))
            self._sweep(penalties)
            made = self.ok[0].bool()
            self.skips_on_device.add_(wanted & ~made)
            return made

    def link_gradients(self) -> None:
        """Let the parameters' gradients be views of the flat one."""
        for parameter, view in zip(self.parameters.values(), self.grad_views, strict=True):
            parameter.grad = view

    @contextmanager
    def unlinked(self) -> Iterator[None]:
        """In here programs, which scale, write to the flat gradient, and nothing else does: the rest is added at the end."""
        for parameter in self.parameters.values():
            parameter.grad = None
        yield
        outside = [(v, p.grad) for v, p in zip(self.grad_views, self.parameters.values(), strict=True) if p.grad is not None]
        if outside and self.unscale is not None:
            self.grad.mul_(self.unscale)
            self.unscale = None
        for view, gradient in outside:
            view.add_(gradient)
        self.link_gradients()

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """In here the parameters' gradients are the flat one, as a program adds to it; outside of it they keep their own."""
        kept = [parameter.grad for parameter in self.parameters.values()]
        self.link_gradients()
        yield
        for parameter, gradient in zip(self.parameters.values(), kept, strict=True):
            parameter.grad = gradient

    def scaled(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of a network's results, scaled to about one; what was added up before is brought to the same scale.

        The scale is a power of two, chosen on the device from the gradients themselves, so that float16 neither underflows
        while teacher and student agree nor overflows when they do not.
        """
        largest = torch.stack([gradient.abs().amax() for gradient in gradients]).amax()
        exponent = torch.floor(-torch.log2(largest.clamp(min=2.0**-40)))
        scale = torch.exp2(torch.nan_to_num(exponent, nan=0.0, posinf=0.0, neginf=0.0))
        if self.unscale is not None:
            self.grad.mul_(self.unscale * scale)
        self.unscale = (1 / scale).reshape(1)
        return [gradient * scale for gradient in gradients]

    def _sweep(self, penalties: Sequence[Penalty]) -> None:
        """The total gradient, and whether it is finite."""
        last = penalties[-1] if penalties else None
        known = last if type(last) is Gaussian else None        # a penalty that comes after another may look at its gradient
        others = penalties if known is None else penalties[:-1]
        if others and self.unscale is not None:
            self.grad.mul_(self.unscale)
            self.unscale = None
        for penalty in others:
            penalty.add_(self.whole if penalty.elementwise else self.weights)
        mean, var, weight, damping = None, None, 0.0, 0.0
        if known is not None:
            mean, var = self.engine.flat_of(known.mean), self.engine.flat_of(known.var)
            weight, damping = known.weight, known.damping
        passes.total_gradient_(self.grad, self.flat, mean, var, weight, damping, self.ok, self.unscale)

    # The step

    def finish(self, made: Tensor, after: Sequence[After]) -> None:
        """The optimizer's step and what comes after it, where the gradients may be used."""
        self.waiting = False
        average, restore, rest = self._known(after)
        self._take_over()
        rule = passes.Rule.of(self.optimizer) if self.even else None
        if rule is None or (self.flat.device.type == "cpu" and len(rest) == len(after)):
            self.restored = 0.0
            if bool(made):
                self.release()
                self.update(after)
            return
        self._link(rule)
        with torch.no_grad():
            prepared = self.prepare(rest)
            self._fused(rule, average, restore)
            if rest and bool(made):
                self.apply(prepared)

    def _known(self, after: Sequence[After]) -> tuple[Ema | None, PutBack | None, list[After]]:
        """An average and a restore that come first, in this order, which the sweep does with the optimizer's step."""
        rest = list(after)
        average = rest.pop(0) if rest and type(rest[0]) is Ema and isinstance(rest[0].average, nn.Module) else None
        fits = rest and type(rest[0]) is PutBack and type(rest[0].restore) in (Fisher, Stochastic)
        restore = rest.pop(0) if fits else None
        return average, restore, rest  # type: ignore[return-value]

    def _fused(self, rule: passes.Rule, average: Ema | None, restore: PutBack | None) -> None:
        how = None if restore is None else restore.restore
        threshold, uniform, probability = None, None, 0.0
        if isinstance(how, Fisher) and how.quantile > 0:
            threshold = passes.squared_quantile(self.grad, how.quantile)
        if isinstance(how, Stochastic) and how.probability > 0:
            self.uniform = torch.empty_like(self.flat) if self.uniform is None else self.uniform
            uniform, probability = self._drawn(self.uniform), how.probability
        restores = restore is not None and (threshold is not None or uniform is not None)
        source = self.engine.flat_of(restore.source) if restore is not None and restores else None
        member = None if average is None else self.engine.member(average.average)  # type: ignore[arg-type]
        teacher, low = (None, None) if member is None else (member.flat, member.low_flat)
        passes.update_(
            rule, self.grad, self.flat, teacher, source, self.state, self.step, 0.0 if average is None else average.decay,
            threshold, uniform, probability, self.ok, low, self.count, self.rates,
        )  # fmt: skip
        if member is not None and low is not None:
            member.is_current()
        self.restored = self.count[0] / len(self.flat)
        self._expose(rule)

    def restart(
        self, start: Values, when: Tensor | bool = True, fresh: Callable[[], torch.optim.Optimizer] | None = None,
        which: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Weights as in `start` and an optimizer's state of zeros, where `when` is true; the host does not ask."""
        if self.rule is None or self.linked is not self.optimizer:
            super().restart(start, when, fresh, which)
            return
        where = torch.as_tensor(when, device=self.flat.device)
        with torch.no_grad():
            for state in () if fresh is None else (*self.state, self.step):
                state.masked_fill_(where, 0)
            if which is not None:
                where = where & which.repeat_interleave(self.sizes, output_size=len(self.flat))
            torch.where(where, self.engine.flat_of(start), self.flat, out=self.flat)

    def _drawn(self, uniform: Tensor) -> Tensor:
        """Random numbers for all weights. On a CPU those that the plain code draws, whatever the order in memory."""
        if uniform.is_cuda or not self.engine.layout.channels_last:
            return uniform.uniform_(generator=self.weights.generator)
        for view in self.engine.layout.views(uniform).values():
            view.copy_(torch.rand(view.shape, dtype=view.dtype, generator=self.weights.generator))
        return uniform

    # The optimizer's own state, as views of flat buffers

    def _take_over(self) -> None:
        """Learn of another optimizer if it has made as many steps with every parameter: the sweep counts them once for all.

        Its state gets the layout of the parameters: torch's fused optimizers go through memory, whatever the layout.
        """
        if self.judged is self.optimizer:
            return
        states = [(p, self.optimizer.state.get(p, {})) for p in self.parameters.values()]
        for parameter, state in states:
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                    state[key] = torch.empty_like(parameter).copy_(value)
        self.judged, self.even = self.optimizer, len({float(state.get("step", 0.0)) for _, state in states}) == 1

    def _link(self, rule: passes.Rule) -> None:
        """Take over the state of the optimizer that there is."""
        if rule == self.rule and self.linked is self.optimizer:
            return
        if self.rule is None or rule.state_names != self.rule.state_names:
            self.state = [torch.zeros_like(self.flat) for _ in rule.state_names]
        self.rates = None
        if rule.rates:
            rates = {id(p): rate for group, rate in zip(self.optimizer.param_groups, rule.rates, strict=True)
                     for p in group["params"]}  # fmt: skip
            self.rates = torch.empty_like(self.flat)
            for parameter, view in zip(self.parameters.values(), self.engine.layout.views(self.rates).values(), strict=True):
                view.fill_(rates[id(parameter)])
        begun: Any = self.optimizer.state.get(next(iter(self.parameters.values())), {})
        self.step.fill_(float(begun.get("step", 1.0 if begun else 0.0)))
        for key, flat in zip(rule.state_names, self.state, strict=True):
            for name, view in self.engine.layout.views(flat).items():
                old = self.optimizer.state.get(self.parameters[name], {}).get(key)
                if not isinstance(old, Tensor):
                    view.zero_()
                elif old.data_ptr() != view.data_ptr():
                    view.copy_(old)
        if begun:
            self.optimizer.state.clear()
        self.rule, self.linked = rule, self.optimizer
        if begun:
            self._expose(rule)

    def release(self) -> None:
        """Give each parameter a number of steps of its own, as torch counts them."""
        if self.rule is not None and self.linked is self.optimizer:
            for state in self.optimizer.state.values():
                state |= {"step": state["step"].clone()} if "step" in state else {}
        self.rule = self.linked = None

    def _expose(self, rule: passes.Rule) -> None:
        """Show the flat state as the optimizer's, once there is one."""
        if self.optimizer.state or not rule.state_names:
            return
        views = [self.engine.layout.views(flat) for flat in self.state]
        for name, parameter in self.parameters.items():
            entry: dict[str, Any] = {"step": self.step} if rule.kind == "adam" else {}
            self.optimizer.state[parameter] = entry | {k: v[name] for k, v in zip(rule.state_names, views, strict=True)}
