"""The parameter pass: everything a PETAL step does to single weights, in two sweeps over memory and a selection.

    sweep 1    total gradient g = g_loss / scale + α (θ - μ) / (σ² + damping); is everything finite?
    threshold  γ, the δ-quantile of g² over all weights, exact, by radix selection on the bits of |g|
    sweep 2    optimizer step, teacher's moving average (and its bf16 copy), restore where g² < γ (or by lot)

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
    """An optimizer in the form the pass knows: Adam, or SGD with momentum."""

    kind: str
    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    nesterov: bool = False

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "Rule | None":
        """The rule of a torch optimizer, or None if the pass does not know it in this form."""
        if len(optimizer.param_groups) != 1:
            return None
        group = optimizer.param_groups[0]
        if type(optimizer) is torch.optim.Adam:
            if group["weight_decay"] or group["amsgrad"] or group["maximize"] or isinstance(group["lr"], Tensor):
                return None
            beta1, beta2 = group["betas"]
            return cls("adam", group["lr"], beta1, beta2, group["eps"])
        if type(optimizer) is torch.optim.SGD:
            if group["weight_decay"] or group["dampening"] or group["maximize"] or isinstance(group["lr"], Tensor):
                return None
            return cls("sgd", group["lr"], group["momentum"], nesterov=group["nesterov"])
        return None

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of its parameter-sized state in torch's optimizer."""
        if self.kind == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.beta1 else ()


def total_gradient_(
    grad: Tensor,
    parameter: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: float,
    damping: float,
    ok: Tensor,
    unscale: Tensor,
) -> None:
    """Sweep 1, in place on `grad`, which is first multiplied by `unscale` (one element).

    `ok` (int32, one element) becomes 0 if a gradient is not finite.
    """
    kernels = kernels_for(grad)
    if kernels is not None:
        kernels.total_gradient(grad, parameter, mean, var, weight, damping, ok, unscale)
        return
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
    rule: Rule,
    grad: Tensor,
    parameter: Tensor,
    teacher: Tensor | None,
    source: Tensor | None,
    state: list[Tensor],
    step: Tensor,
    ema: float,
    threshold: Tensor | None,
    lots: Tensor | None,
    probability: float,
    ok: Tensor,
    teacher_low: Tensor | None,
    restored: Tensor,
) -> None:
    """Sweep 2, in place on parameter, teacher, optimizer state and step; nothing is written where ok is 0.

    `threshold` (from `squared_quantile`) restores by information, `lots` (uniform numbers) by `probability`.
    `restored` receives the number of weights put back.
    """
    step.add_(ok[0])
    correction = bias_corrections(rule, step, grad.dtype)
    restored.zero_()
    kernels = kernels_for(grad)
    if kernels is not None:
        kernels.update(
            rule, grad, parameter, teacher, source, state, correction, ema, threshold, lots, probability, ok,
            teacher_low, restored,
        )  # fmt: skip
        return
    if not bool(ok):  # plain torch may look: only the kernels promise not to
        return
    if threshold is not None:
        mask = grad.square() < threshold
    elif lots is not None:
        mask = lots < probability
    else:
        mask = None
    if rule.kind == "adam":
        first, second = state
        first.lerp_(grad, 1 - rule.beta1)
        second.mul_(rule.beta2).addcmul_(grad, grad, value=1 - rule.beta2)
        denominator = (second.sqrt() * correction[1]).add_(rule.eps)
        parameter.sub_(first / denominator * correction[0])
    elif state:
        (buffer,) = state
        buffer.mul_(rule.beta1).add_(grad)
        parameter.sub_(grad + rule.beta1 * buffer if rule.nesterov else buffer, alpha=rule.lr)
    else:
        parameter.sub_(grad, alpha=rule.lr)
    if teacher is not None:
        teacher.lerp_(parameter, 1 - ema)
        if teacher_low is not None:
            teacher_low.copy_(teacher)
    if mask is not None and source is not None:
        torch.where(mask, source, parameter, out=parameter)
        restored.add_(mask.sum())


def bias_corrections(rule: Rule, step: Tensor, dtype: torch.dtype) -> Tensor:
    """lr / (1 - β1^t) and 1 / sqrt(1 - β2^t) as two numbers on the device, computed in float64; ones without Adam."""
    if rule.kind != "adam":
        return torch.ones(2, dtype=dtype, device=step.device)
    t = step.double()
    first = rule.lr / (1 - torch.exp(t * math.log(rule.beta1)) if rule.beta1 else torch.ones_like(t))
    second = (1 - torch.exp(t * math.log(rule.beta2)) if rule.beta2 else torch.ones_like(t)).rsqrt()
    return torch.cat([first.reshape(1), second.reshape(1)]).to(dtype)
