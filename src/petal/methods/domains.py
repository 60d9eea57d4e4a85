"""All that a method learns, once for every domain: what `Reservoir` exchanges."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petal.methods.base import Adapter
from petal.methods.state import optimizer_state, optimizer_to_load, optimizer_values


@dataclass
class Kept:
    """What belongs to a domain besides its weights: the optimizer's values by <parameter>.<key>, and declared state."""

    optimizer: dict[str, Tensor]
    state: dict[str, Tensor | None]


class Domains:
    """Weights, optimizer and declared state of every domain. The adapter has those of the `active` one.

    `bank` [domains, P] are the weights, its parameters one after the other; the active row is written by `write`. `kept` is
    what else belongs to each, None for the active one. They are exchanged in place, so that the engine sees it.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.clear()

    def clear(self) -> None:
        """One domain, the adapter's, as it began."""
        with torch.inference_mode(False), torch.no_grad():
            self.bank = torch.cat([value.flatten() for value in self.adapter.origin().values()])[None]
            self.kept: list[Kept | None] = [None]
            self.active = 0

    def __len__(self) -> int:
        return len(self.bank)

    def row(self) -> Tensor:
        """The adapter's weights as they are [P]."""
        return torch.cat([value.detach().flatten() for value in self.adapter.adapted.values()])

    def write(self) -> None:
        """Let the bank have the adapter's weights: they have learned, or somebody has changed them."""
        self.bank[self.active] = self.row()

    @contextmanager
    def borrowed(self, row: Tensor) -> Iterator[None]:
        """In here the network has these weights."""
        kept = self.row()
        self._put(row)
        try:
            yield
        finally:
            self._put(kept)

    def open(self, parent: int) -> None:
        """Another domain, with weights and optimizer of its parent, and declared state as at the beginning."""
        kept = self.kept[parent] or self._taken()
        optimizer = {key: value.clone() for key, value in kept.optimizer.items()}
        start = {name: None if value is None else value.clone() for name, value in self.adapter._declared.items()}
        self.bank, self.kept = torch.cat([self.bank, self.bank[parent][None]]), [*self.kept, Kept(optimizer, start)]

    def drop(self) -> None:
        """Without the last one."""
        self.bank, self.kept = self.bank[:-1], self.kept[:-1]

    def switch(self, index: int) -> None:
        """Let the adapter have what belongs to another domain."""
        if index == self.active:
            return
        new = self.kept[index]
        assert new is not None
        self.kept[self.active], self.kept[index] = self._taken(), None
        self.active = index
        self._put(self.bank[index])
        self.adapter.rewind(new.state)
        now = optimizer_values(self._optimizer, self.adapter.adapted)
        if now.keys() == new.optimizer.keys() and all(isinstance(value, Tensor) for value in now.values()):
            if now:
                torch._foreach_copy_(list(now.values()), [new.optimizer[key] for key in now])
        elif self.adapter.descent is not None:      # one of the two has made no step yet
            self.adapter.descent.optimizer = self._made(new.optimizer, [])

    def _put(self, row: Tensor) -> None:
        parameters: list[Tensor] = list(self.adapter.adapted.values())
        parts = torch.split(row, [p.numel() for p in parameters])
        with torch.no_grad():
            torch._foreach_copy_(parameters, [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)])

    def _taken(self) -> Kept:
        """Copies of what belongs to the active domain, but for its weights."""
        values = optimizer_values(self._optimizer, self.adapter.adapted)
        return Kept({key: torch.as_tensor(value).clone() for key, value in values.items()}, self.adapter.snapshot())

    def _made(self, values: Mapping[str, Tensor], problems: list[str]) -> torch.optim.Optimizer:
        """An optimizer with these values; what does not fit goes to `problems`."""
        fresh, adapted = self.adapter._fresh_optimizer(), self.adapter.adapted
        state = optimizer_state(self._optimizer, {}) | {f"optimizer.state.{key}": value for key, value in values.items()}
        nested = optimizer_to_load(fresh, adapted, state, problems)
        if not problems:
            fresh.load_state_dict(nested)
        return fresh

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self.adapter.optimizer is not None
        return self.adapter.optimizer

    # The state

    def state(self) -> dict[str, Tensor]:
        """Copies: `bank`, `active`, and of each domain <number>.state.<name> and <number>.optimizer.<parameter>.<key>."""
        self.write()
        state = {"bank": self.bank.clone(), "active": torch.tensor(self.active)}
        for number, kept in enumerate(self.kept):
            if kept is not None:
                declared = {f"{number}.state.{key}": value.clone() for key, value in kept.state.items() if value is not None}
                state |= declared | {f"{number}.optimizer.{key}": value.clone() for key, value in kept.optimizer.items()}
        return state

    def problems(self, state: Mapping[str, Tensor], capacity: int) -> list[str]:
        """What is wrong with a state of up to so many domains."""
        if missing := [f"missing {key!r}" for key in ("bank", "active") if key not in state]:
            return missing
        shape, active, width = list(state["bank"].shape), int(state["active"]), self.bank.shape[1]
        if len(shape) != 2 or not 0 <= active < shape[0] <= capacity or shape[1] != width:
            return [f"'bank' is {shape}, the active one {active}, instead of up to {capacity} domains with {width} weights"]
        wrong: list[str] = []
        for number, kept in enumerate(self._parsed(state, wrong)):
            wrong += [f"unexpected '{number}.state.{name}'" for name in kept.state if name not in self.adapter._declared]
            self._made(kept.optimizer, wrong)
        return wrong

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state without problems."""
        self.bank, self.active = state["bank"].to(self.bank, copy=True), int(state["active"])
        self.kept = [*self._parsed(state, [])]
        self.kept[self.active] = None

    def _parsed(self, state: Mapping[str, Tensor], wrong: list[str]) -> list[Kept]:
        """What belongs to each domain; keys that belong to none are `wrong`."""
        found = [Kept({}, dict.fromkeys(self.adapter._declared)) for _ in state["bank"]]
        known = {str(number): kept for number, kept in enumerate(found) if number != int(state["active"])}
        for key in state.keys() - {"bank", "active"}:
            number, _, rest = key.partition(".")
            kind, _, name = rest.partition(".")
            if number not in known or kind not in ("state", "optimizer"):
                wrong.append(f"unexpected {key!r}")
                continue
            values: dict[str, Any] = known[number].state if kind == "state" else known[number].optimizer
            values[name] = state[key].to(self.bank.device, copy=True)
        return found
