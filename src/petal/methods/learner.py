"""What an adapter shows of its descent, and how that changes hands between plain code and executors."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from petal.methods.descent import Descent
from petal.methods.executor import Executor
from petal.methods.network import Network
from petal.methods.portable import Portable
from petal.methods.state import optimizer_state, optimizer_to_load

CARRIED = ("skipped", "restored", "standing", "first")       # of a descent, to the one that takes its place


class Learner(Portable):
    """A module with weights that adapt: optimizer and counters are its descent's, whichever that is."""

    adapted: dict[str, nn.Parameter]
    lr: Any                                         # one rate, or one for each parameter by its name
    generator: torch.Generator
    descent: Descent | None
    executor: Executor | None
    _networks: dict[nn.Module, Network]
    _make_optimizer: Callable[..., torch.optim.Optimizer]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the adapted parameters, if there are any."""
        return None if self.descent is None else self.descent.optimizer

    @property
    def skipped(self) -> int:
        """Updates not made because the loss or a gradient was not finite, or memory ran out."""
        return 0 if self.descent is None else self.descent.skipped

    @skipped.setter
    def skipped(self, value: int) -> None:
        if self.descent is not None:
            self.descent.skipped = value

    @property
    def restored(self) -> torch.Tensor | float:
        """The share of the weights that the last step put back."""
        return 0.0 if self.descent is None else self.descent.restored

    @restored.setter
    def restored(self, value: torch.Tensor | float) -> None:
        if self.descent is not None:
            self.descent.restored = value

    def vitals(self) -> dict[str, float]:
        """Numbers for people who run it, by name; waits for the device. Methods and wrappers add those of their state.

        `skipped` and `short_of_memory` count updates that were not made, `restored` is the share of weights that the last
        step put back; `memory` is how many samples are remembered, `order` how far the order of the stream is believed,
        of so many `streams`, and `temperature` what answers are divided by.
        """
        short = getattr(self, "short_of_memory", 0)
        found = {"skipped": self.skipped, "short_of_memory": short, "restored": float(self.restored)}
        facts = getattr(self, "memory_facts", None)         # of a method that has a memory
        return found if facts is None else found | {"memory": float((facts[:, 0] >= 0).sum())}

    def execute_with(self, executor: Executor | None) -> None:
        """Let calls be carried out by `executor`, or by the plain code if there is none (see `petal.accelerate`)."""
        if self.descent is not None:
            descent = self.plain_descent() if executor is None else _carried(self.descent, executor.descent)
            self.descent.clear()
            self.descent.release()
            self.descent = descent
        self.executor, self._networks = executor, {}

    def plain_descent(self) -> Descent | None:
        """The descent in plain torch, with an optimizer of its own: an executor's has one counter of steps for all."""
        if self.descent is None:
            return None
        optimizer = self._fresh_optimizer()
        kept = optimizer_state(self.descent.optimizer, self.adapted)
        optimizer.load_state_dict(optimizer_to_load(optimizer, self.adapted, kept, []))
        return _carried(self.descent, Descent(self.adapted, optimizer, self.generator))

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        if not isinstance(self.lr, Mapping):
            return self._make_optimizer(list(self.adapted.values()), self.lr)
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in self.adapted.items():
            groups.setdefault(self.lr[name], []).append(parameter)
        return self._make_optimizer([{"params": p, "lr": rate} for rate, p in groups.items()], max(groups))


def _carried(old: Descent, new: Descent | None) -> Descent:
    assert new is not None
    for name in CARRIED:
        setattr(new, name, getattr(old, name))
    return new
