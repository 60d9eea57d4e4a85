"""The parameter pass: everything a PETAL step does to single weights, in two sweeps over memory and a selection.

    sweep 1    total gradient g = g_loss / scale + α (θ - μ) / (σ² + damping); is everything finite?
    threshold  γ, the δ-quantile of g² over all weights, exact, by radix selection on the bits of |g|
    sweep 2    optimizer step, teacher's moving average (and its copy in low precision), restore where g² < γ (or drawn)

Nothing here looks at a value on the host: if the loss or a gradient is not finite, the second sweep writes nothing.
Each function has two bodies that compute the same: Triton kernels for CUDA tensors, plain torch for all others.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petal.functional import quantile_

try:
    from petal.engine import kernels as _kernels
except ImportError:  # no Triton: plain torch everywhere
    _kernels = None  # type: ignore[assignment]


def kernels_for(tensor: Tensor) -> Any:
    """The Triton kernels if they can work on this tensor, else None."""
    if _kernels is None or not (tensor.is_cuda or _kernels.INTERPRETED) or tensor.dtype != torch.float32:
        return None
    return _kernels


@dataclass(frozen=True)
class Rule:
    """An optimizer in the form the pass knows: Adam, or SGD with momentum. With several `rates`, `lr` is 1."""

    kind: str
    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    nesterov: bool = False
    rates: tuple[float, ...] = ()       # of the parameter groups, where they differ in nothing else

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "Rule | None":
        """The rule of a torch optimizer, or None if the pass does not know it in this form."""
        groups = optimizer.param_groups
        group = groups[0]
        rates = tuple(g["lr"] for g in groups)
        alike = all({**g, "params": 0, "lr": 0} == {**group, "params": 0, "lr": 0} for g in groups[1:])
        if not alike or any(isinstance(rate, Tensor) for rate in rates) or group["weight_decay"] or group["maximize"]:
            return None
        lr, rates = (rates[0], ()) if len(groups) == 1 else (1.0, rates)
        if type(optimizer) is torch.optim.Adam and not group["amsgrad"]:
            beta1, beta2 = group["betas"]
            return cls("adam", lr, beta1, beta2, group["eps"], rates=rates)
        if type(optimizer) is torch.optim.SGD and not group["dampening"]:
            return cls("sgd", lr, group["momentum"], nesterov=group["nesterov"], rates=rates)
        return None

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of its parameter-sized state in torch's optimizer."""
        if self.kind == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.beta1 else ()


def total_gradient_(
    grad: Tensor, parameter: Tensor, mean: Tensor | None, var: Tensor | None, weight: float, damping: float, ok: Tensor,
    unscale: Tensor | None,
) -> None:  # fmt: skip
    """Sweep 1, in place on `grad`, which is first multiplied by `unscale` (one element), if there is one.

    `ok` (int32, one element) becomes 0 if a gradient is not finite.
    """
    kernels = kernels_for(grad)
    if kernels is not None:
        kernels.total_gradient(grad, parameter, mean, var, weight, damping, ok, unscale)
        return
    if unscale is not None:
        grad.mul_(unscale)
    if mean is not None and var is not None and weight:
        grad.addcdiv_(parameter - mean, var + damping, value=weight)
    ok.mul_(grad.abs().max().isfinite())


def squared_quantile(grad: Tensor, q: float) -> Tensor:
    """The q-quantile of grad², linear between order statistics: one element, on the device, without a host round trip."""
    kernels = kernels_for(grad)
    if kernels is not None:
        return kernels.squared_quantile(grad, q)  # type: ignore[no-any-return]
    return quantile_(grad.square(), q).reshape(1)


def update_(
    rule: Rule, grad: Tensor, parameter: Tensor, teacher: Tensor | None, source: Tensor | None, state: list[Tensor],
    step: Tensor, ema: float | Tensor, threshold: Tensor | None, uniform: Tensor | None, probability: float, ok: Tensor,
    teacher_low: Tensor | None, restored: Tensor, rates: Tensor | None = None,
) -> None:  # fmt: skip
    """Sweep 2, in place on parameter, teacher, optimizer state and step; nothing is written where ok is 0.

    `threshold` (from `squared_quantile`) restores by information, `uniform` numbers by `probability`. `restored` receives
    the number of weights put back. `rates` are those of the single weights, where they differ.
    """
    step.add_(ok[0])
    numbers = numbers_of(rule, step, ema, grad.dtype)
    restored.zero_()
    kernels = kernels_for(grad)
    if kernels is not None:
        kernels.update(
            rule, grad, parameter, teacher, source, state, numbers, threshold, uniform, probability, ok,
            teacher_low, restored, rates,
        )  # fmt: skip
        return
    if not bool(ok):  # plain torch may look: only the kernels promise not to
        return
    if threshold is not None:
        mask = grad.square() < threshold
    elif uniform is not None:
        mask = uniform < probability
    else:
        mask = None
    if rule.kind == "adam":
        first, second = state
        first.lerp_(grad, 1 - rule.beta1)
        second.mul_(rule.beta2).addcmul_(grad, grad, value=1 - rule.beta2)
        denominator = (second.sqrt() * numbers[1]).add_(rule.eps)
        parameter.sub_(_rated(first / denominator * numbers[0], rates))
    elif state:
        (buffer,) = state
        buffer.mul_(rule.beta1).add_(grad)
        parameter.sub_(_rated(grad + rule.beta1 * buffer if rule.nesterov else buffer, rates), alpha=rule.lr)
    else:
        parameter.sub_(_rated(grad, rates), alpha=rule.lr)
    if teacher is not None:
        teacher.lerp_(parameter, numbers[2])
        if teacher_low is not None:
            teacher_low.copy_(teacher)
    if mask is not None and source is not None:
        torch.where(mask, source, parameter, out=parameter)
        restored.add_(mask.sum())


def _rated(way: Tensor, rates: Tensor | None) -> Tensor:
    return way if rates is None else way * rates


def numbers_of(rule: Rule, step: Tensor, ema: float | Tensor, dtype: torch.dtype) -> Tensor:
    """lr / (1 - β1^t), 1 / sqrt(1 - β2^t) (ones without Adam) and 1 - ema, on the device, computed in float64."""
    t = step.double().reshape(())
    first = second = torch.ones_like(t)
    if rule.kind == "adam":
        first = rule.lr / (1 - torch.exp(t * math.log(rule.beta1)) if rule.beta1 else first)
        second = (1 - torch.exp(t * math.log(rule.beta2)) if rule.beta2 else second).rsqrt()
    share = 1 - ema if isinstance(ema, Tensor) else torch.full_like(t, 1 - ema)
    return torch.stack([first, second, share.to(t).reshape(())]).to(dtype)
