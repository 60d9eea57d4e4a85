"""Back to the source, decided on the device: for methods that reset themselves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from petal.methods.base import Adapter
from petal.methods.descent import Values


def restart(
    adapter: Adapter, start: Values, when: Tensor | bool = True, optimizer: bool = True, which: Tensor | None = None
) -> None:
    """Put the adapted weights back to `start`, and with `optimizer` its state too, where one boolean is true.

    Nothing waits for it on a GPU. `start` is `adapter.origin()`, kept from the constructor on. With `which`, a boolean for
    each parameter in their order, the others keep their weights. Networks that follow the weights are the method's own to
    put back, and declared state is put back by `forget`.
    """
    assert adapter.descent is not None, "a method that resets itself calls adapt() in its constructor"
    adapter.descent.restart(start, when, adapter._fresh_optimizer if optimizer else None, which)


def forget(adapter: Adapter, when: Tensor) -> None:
    """Put declared state back to how it began where one boolean is true. What began as None becomes zeros: they mean it."""
    for name, start in adapter._declared.items():
        value = getattr(adapter, name)
        if value is not None:
            setattr(adapter, name, value.masked_fill(when, 0) if start is None else torch.where(when, start, value))


def forget_steps(adapter: Adapter, when: Tensor | bool = True) -> None:
    """Let the optimizer begin anew, with the settings that it has, where one boolean is true."""
    descent = adapter.descent
    assert descent is not None, "a method that resets itself calls adapt() in its constructor"

    def emptied() -> torch.optim.Optimizer:
        descent.optimizer.state.clear()
        return descent.optimizer

    descent.restart(adapter.adapted, when, emptied)


@dataclass(frozen=True)
class Every:
    """True after every so many updates; the method declares the counter, an integer on the device."""

    updates: int = 1000

    def due(self, count: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The counter after a batch, which counts if its logits are finite, and whether it is time."""
        counted = logits.isfinite().all()
        count = count + counted
        return count, counted & (count % self.updates == 0)


@dataclass(frozen=True)
class LossAverage:
    """A moving average of losses that says when they are suspiciously low (SAR, Section 3.2).

    The method declares the average, which begins at infinity: then the next loss is taken as it is.
    """

    threshold: float = 0.2
    momentum: float = 0.9

    def follow(self, average: Tensor, loss: Tensor, when: Tensor) -> Tensor:
        """The average after a batch; the same where there was no loss."""
        loss = loss.detach()
        moved = torch.where(average.isinf(), loss, self.momentum * average + (1 - self.momentum) * loss)
        return torch.where(when & loss.isfinite(), moved, average)

    def collapsed(self, average: Tensor) -> Tensor:
        """True if the average is below the threshold."""
        return average < self.threshold
