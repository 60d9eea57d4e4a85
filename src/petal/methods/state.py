"""The state of a method as a flat dict of tensors, and back: what checkpoints hold."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def optimizer_values(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """What it has for each parameter, themselves and no copies, as <parameter>.<key>."""
    held = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    return {f"{name}.{key}": value for name, kept in held.items() for key, value in kept.items() if value is not None}


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies of its state as flat tensors: optimizer.state.<parameter>.<key> and optimizer.group.<number>.<key>."""
    state: dict[str, Tensor] = {}
    for key, value in optimizer_values(optimizer, parameters).items():
        state[f"optimizer.state.{key}"] = torch.as_tensor(value).detach().clone()
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                state[f"optimizer.group.{number}.{key}"] = torch.tensor(value, dtype=torch.float64)
    return state


def optimizer_to_load(
    fresh: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    """What `load_state_dict` of a fresh optimizer takes, copied from a flat state; what does not fit goes to `problems`."""
    nested = fresh.state_dict()
    order = {id(p): number for number, p in enumerate(p for group in fresh.param_groups for p in group["params"])}
    numbers = {name: order[id(parameter)] for name, parameter in parameters.items()}
    expected = [key for key in optimizer_state(fresh, parameters) if key.startswith("optimizer.group.")]
    problems += [f"missing {key!r}" for key in expected if key not in state]
    for key, value in state.items():
        if key.startswith("optimizer.state."):
            name, _, entry = key.removeprefix("optimizer.state.").rpartition(".")
            if name not in numbers:
                problems.append(f"unexpected {key!r}")
            elif value.dim() and value.shape != parameters[name].shape:
                problems.append(f"{key!r} is {list(value.shape)} instead of {list(parameters[name].shape)}")
            else:
                nested["state"].setdefault(numbers[name], {})[entry] = value.detach().clone()
        elif key.startswith("optimizer.group."):
            number, _, entry = key.removeprefix("optimizer.group.").partition(".")
            if not number.isdigit() or int(number) >= len(nested["param_groups"]):
                problems.append(f"unexpected {key!r}")
            elif entry in nested["param_groups"][int(number)]:
                kind = type(nested["param_groups"][int(number)][entry])
                nested["param_groups"][int(number)][entry] = kind(value.item())
    return nested


def misfits(mine: Mapping[str, Tensor], theirs: Mapping[str, Any], optional: frozenset[str] = frozenset()) -> list[str]:
    """What is wrong with the names and shapes of a state, against what there is now. Optional ones may be missing."""
    problems = [f"missing {key!r}" for key in sorted(mine.keys() - theirs.keys() - optional)]
    problems += [f"unexpected {key!r}" for key in sorted(theirs.keys() - mine.keys() - optional)]
    return problems + [
        f"{key!r} is {list(theirs[key].shape)} instead of {list(value.shape)}"
        for key, value in mine.items()
        if key in theirs and theirs[key].shape != value.shape and key not in optional
    ]


def rehearsed(adapter: Any, x: Tensor) -> Tensor:
    """What a call would answer, with everything put back: for methods whose answer is of after learning."""
    with adapter._lock:
        state = adapter.state_dict()
        restored = adapter.restored
        try:
            answer: Tensor = adapter(x)
        finally:
            adapter.load_state_dict(state)
            adapter.restored = restored
        return answer
