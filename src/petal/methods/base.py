"""What every method is: a module with one verb. Calling it predicts a batch and adapts to it."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from petal.errors import ConfigError, InputError
from petal.functional import all_finite
from petal.norm import network_copy

OptimizerFactory = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]

A = TypeVar("A", bound="Adapter")


def adam(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The paper's optimizer: Adam with betas 0.9 and 0.999. The fused form needs no parameter-sized scratch."""
    return torch.optim.Adam(parameters, lr=lr, fused=True)


class Executor(Protocol):
    """How calls are carried out other than by plain torch code (see `petal.engine`)."""

    def call(self, x: Tensor) -> Tensor:
        """Predict and adapt."""
        ...

    def predict(self, x: Tensor) -> Tensor:
        """Predict only."""
        ...

    def skipped(self) -> int:
        """Updates it did not make since the last `invalidate`."""
        ...

    def invalidate(self) -> None:
        """The weights were changed from outside (reset, load): derived copies are stale."""
        ...


class Adapter(nn.Module):
    """A classifier that adapts to what it sees.

    To add a method, derive from this class and write `step` (predict a batch and adapt to it) and, if the prediction is
    not the network's own, `prediction`. `self.model` is a copy of the user's network, in evaluation mode, with batch norm
    by batch statistics if asked for. Name the parameters that adapt in `adapt`; state, reset, checks and the handling
    of losses that are not finite are done here.

    Inside `step`, `self.forward_through(network, x)` gives logits and `self.backward(loss)` says whether an update may
    be made. `self.generator` is the only source of randomness.
    """

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_statistics: bool,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"a method wraps a torch.nn.Module, got {type(model).__name__}")
        check_number("steps", steps, low=1, whole=True)
        self.steps = steps
        self.episodic = episodic
        self.model = network_copy(model, batch_statistics)
        tensor = next(self.model.parameters(), None)
        if tensor is None:
            raise ConfigError("the network has no parameters: there is nothing to adapt or to predict with")
        if tensor.device.type == "meta":
            raise ConfigError("the network is on the meta device: give it weights first")
        self.device, self.dtype = tensor.device, tensor.dtype
        self.generator = _generator(seed, self.device)
        self._seed = self.generator.get_state()
        self._skipped = 0
        self.views_used = False
        self.restored: Tensor | float = 0.0
        self.adapted: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.executor: Executor | None = None
        super().train(False)

    # The step of a method

    @abstractmethod
    def step(self, x: Tensor) -> Tensor:
        """Predict a batch and adapt to it once."""

    def prediction(self, x: Tensor) -> Tensor:
        """Logits of a batch with the weights as they are; here the network's own."""
        return self.forward_through(self.model, x)

    def adapt(
        self, parameters: Mapping[str, nn.Parameter], lr: float, optimizer: OptimizerFactory | None = None
    ) -> None:
        """Say which parameters of `self.model` adapt, and how. Called once, at the end of a method's constructor."""
        check_number("lr", lr, low=0)
        self.adapted = dict(parameters)
        for parameter in self.adapted.values():
            parameter.requires_grad_(True)
        self.lr, self._make_optimizer = lr, optimizer or adam
        self.optimizer = self._make_optimizer(list(self.adapted.values()), lr)

    def forward_through(self, network: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        """Logits [N, C]; an input that the network cannot take is an InputError."""
        try:
            logits = network(x)
        except Exception as error:
            if type(error) in (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
                raise InputError(f"the network cannot take a batch of shape {list(x.shape)}: {error}") from error
            raise
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != x.shape[0]:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(f"a classifier returns logits [N, classes]; for {list(x.shape)} this one returned {shape}")
        return logits

    def backward(self, loss: Tensor) -> bool:
        """Compute the gradients of the adapted parameters. False, counted in `skipped`, unless all are finite."""
        loss.backward(inputs=list(self.adapted.values()))  # type: ignore[no-untyped-call]
        grads = [p.grad for p in self.adapted.values() if p.grad is not None]
        if bool(all_finite([loss, *grads])):
            return True
        self.skipped += 1
        self.restored = 0.0
        return False

    def update(self, loss: Tensor) -> None:
        """One plain optimizer step on `loss`, or none if it is not finite."""
        assert self.optimizer is not None, "a method that updates calls adapt() in its constructor"
        if self.backward(loss):
            self.optimizer.step()
        self.optimizer.zero_grad()

    # What users call

    @property
    def kind(self) -> str:
        """What a checkpoint is called after: the name of the class."""
        return type(self).__name__

    @property
    def skipped(self) -> int:
        """Updates not made because the loss or a gradient was not finite."""
        return self._skipped + (0 if self.executor is None else self.executor.skipped())

    @skipped.setter
    def skipped(self, value: int) -> None:
        self._skipped = value - (0 if self.executor is None else self.executor.skipped())

    def execute_with(self, executor: Executor | None) -> None:
        """Let calls be carried out by `executor`, or by the plain code if there is none (see `petal.accelerate`)."""
        self._skipped, self.executor = self.skipped, executor

    def forward(self, x: Tensor) -> Tensor:
        """Predict a batch and adapt to it. Returns logits; a refused batch leaves the state as it was."""
        with self._guarded(x) as x:
            if self.executor is not None:
                return self.executor.call(x)
            with torch.enable_grad():
                if self.episodic:
                    self._try(x)
                    self._restart()
                for _ in range(self.steps):
                    logits = self.step(x)
            return logits.detach()

    def predict(self, x: Tensor) -> Tensor:
        """Predict a batch with the weights as they are: what a call would return next, with nothing changed."""
        with self._guarded(x) as x, torch.no_grad():
            state = self.generator.get_state()
            try:
                return self.prediction(x) if self.executor is None else self.executor.predict(x)
            finally:
                self.generator.set_state(state)

    def reset(self) -> None:
        """Back to the state after construction: weights, optimizer, random numbers and counters."""
        self._restart()
        self.generator.set_state(self._seed)
        self._skipped = 0
        self.views_used, self.restored = False, 0.0

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Everything that changes while adapting, as a flat dict of tensor copies: weights, optimizer, random state."""
        if args or kwargs:
            raise ConfigError("the state of a method takes no options")
        state = {key: value.detach().clone() for key, value in self._weights().items()}
        state["generator"] = self.generator.get_state()
        state["skipped"] = torch.tensor(self.skipped)
        return state | self._optimizer_state()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Continue from `state_dict` exactly. A state of another network or method is refused and changes nothing."""
        if not strict or assign:
            raise ConfigError("the state of a method is loaded whole and by copy: strict=True, assign=False")
        weights = self._weights()
        mine = {key for key in state_dict if not key.startswith("optimizer.")}
        expected = weights.keys() | {"generator", "skipped"}
        problems = [f"missing {key!r}" for key in sorted(expected - mine)]
        problems += [f"unexpected {key!r}" for key in sorted(mine - expected)]
        problems += [
            f"{key!r} is {list(state_dict[key].shape)} instead of {list(value.shape)}"
            for key, value in weights.items()
            if key in mine and state_dict[key].shape != value.shape
        ]
        optimizer = self._optimizer_to_load(state_dict, problems)
        if problems:
            raise ConfigError(f"this state does not fit {type(self).__name__} of this network: {'; '.join(problems[:10])}")
        with torch.inference_mode(False), torch.no_grad():
            for key, value in weights.items():
                value.copy_(state_dict[key])
            if self.optimizer is not None:
                self.optimizer = self._make_optimizer(list(self.adapted.values()), self.lr)
                self.optimizer.load_state_dict(optimizer)
        self.generator.set_state(state_dict["generator"].cpu())
        self._weights_changed()
        self._skipped = int(state_dict["skipped"])

    # What goes around a method uses these

    def origin(self) -> dict[str, Tensor]:
        """The adapted parameters as they were after construction, by name."""
        with torch.inference_mode(False), torch.no_grad():
            weights = self._weights()
            now = {key: value.detach().clone() for key, value in weights.items()}
            self._restore_initial()
            start = {name: p.detach().clone() for name, p in self.adapted.items()}
            for key, value in weights.items():
                value.copy_(now[key])
        return start

    def logits_with(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Logits of a batch by the network with these parameters in the place of its own; nothing changes."""
        with self._guarded(x) as x, torch.no_grad():
            return self.forward_through(lambda x: functional_call(self.model, dict(parameters), (x,)), x)

    def load_weights(self, weights: Mapping[str, Tensor], fresh: bool = True) -> None:
        """Put all that adapts to these values (keys as in the state); the optimizer is made anew, or goes on."""
        with torch.inference_mode(False), torch.no_grad():
            for key, value in self._weights().items():
                value.copy_(weights[key])
        if fresh and self.optimizer is not None:
            self.optimizer = self._make_optimizer(list(self.adapted.values()), self.lr)
        self._weights_changed()

    def train(self: A, mode: bool = True) -> A:
        """Networks of a method stay in evaluation mode; asking for another changes nothing."""
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise ConfigError("a method stays on the device and in the precision it was built with: move the network first")

    # The parts

    def _weights(self) -> dict[str, Tensor]:
        """The tensors that adapt, by name in the state: the student's parameters, and more in some methods."""
        return {f"model.{name}": p for name, p in self.adapted.items()}

    def _restore_initial(self) -> None:
        """Put the tensors of `_weights` back to where they started."""

    def _restart(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._restore_initial()
        if self.optimizer is not None:
            self.optimizer = self._make_optimizer(list(self.adapted.values()), self.lr)
        self._weights_changed()

    def _weights_changed(self) -> None:
        if self.executor is not None:
            self._skipped += self.executor.skipped()
            self.executor.invalidate()

    def _try(self, x: Tensor) -> None:
        """Find out whether the network can take the batch before anything changes."""
        with torch.no_grad():
            self.forward_through(self.model, x)

    @contextmanager
    def _guarded(self, x: Tensor) -> Iterator[Tensor]:
        """The checked batch as a plain tensor; random state comes back and gradients go if the block fails."""
        check_batch(x, self.device, self.dtype, values=self.executor is None)
        before = self.generator.get_state()
        with torch.inference_mode(False):
            try:
                yield x.clone() if x.is_inference() else x.detach()
            except BaseException:
                self.generator.set_state(before)
                if self.executor is None:
                    for parameter in self.adapted.values():
                        parameter.grad = None
                raise

    def _optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state as flat tensors: optimizer.state.<parameter>.<key> and optimizer.group.<i>.<key>."""
        if self.optimizer is None:
            return {}
        state: dict[str, Tensor] = {}
        for name, parameter in self.adapted.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    state[f"optimizer.state.{name}.{key}"] = torch.as_tensor(value).detach().clone()
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    state[f"optimizer.group.{number}.{key}"] = torch.tensor(value, dtype=torch.float64)
        return state

    def _optimizer_to_load(self, state: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        if self.optimizer is None:
            problems += [f"unexpected {key!r}" for key in state if key.startswith("optimizer.")]
            return {}
        nested = self._make_optimizer(list(self.adapted.values()), self.lr).state_dict()
        numbers = {name: number for number, name in enumerate(self.adapted)}
        expected = [key for key in self._optimizer_state() if key.startswith("optimizer.group.")]
        problems += [f"missing {key!r}" for key in expected if key not in state]
        for key, value in state.items():
            if key.startswith("optimizer.state."):
                name, _, entry = key.removeprefix("optimizer.state.").rpartition(".")
                if name not in numbers:
                    problems.append(f"unexpected {key!r}")
                elif value.dim() and value.shape != self.adapted[name].shape:
                    problems.append(f"{key!r} is {list(value.shape)} instead of {list(self.adapted[name].shape)}")
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


def check_batch(x: Tensor, device: torch.device, dtype: torch.dtype, values: bool = True) -> None:
    """Raise an InputError that names the value unless `x` is a batch a method can take.

    Without `values` they are not looked at: an executor does so on the device.
    """
    if not isinstance(x, Tensor):
        raise InputError(f"a batch is a torch.Tensor, got {type(x).__name__}")
    if x.dim() < 2:
        raise InputError(f"a batch has at least two dimensions [N, ...], got shape {list(x.shape)}")
    if x.numel() == 0:
        raise InputError(f"the batch is empty: shape {list(x.shape)}")
    if x.device != device:
        raise InputError(f"the batch is on {x.device} and the network on {device}: move it with x.to({str(device)!r})")
    if x.dtype != dtype:
        hint = "images are floats in [0, 1]: use x.float() / 255" if x.dtype == torch.uint8 else f"use x.to({dtype})"
        raise InputError(f"the batch is {x.dtype} and the network {dtype}: {hint}")
    if values and not bool(x.isfinite().all()):
        raise not_finite(x)


def not_finite(x: Tensor) -> InputError:
    """The error for a batch with NaN or Inf, which says how many samples have them."""
    bad = int((~x.isfinite()).flatten(1).any(1).sum())
    return InputError(f"the batch has NaN or Inf in {bad} of {x.shape[0]} samples: leave those out")


def check_number(name: str, value: float, low: float = -math.inf, high: float = math.inf, whole: bool = False) -> None:
    """Raise a ConfigError that names the setting unless the value is a number in [low, high]."""
    kind = Integral if whole else Real  # NumPy's numbers are of these kinds too
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high or math.isinf(value):
        what = "a whole number" if whole else "a number"
        limits = f" from {low:g}" * (low > -math.inf) + f" to {high:g}" * (high < math.inf)
        raise ConfigError(f"{name} must be {what}{limits}, got {value!r}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise a ConfigError that lists the choices unless the value is one of them."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _generator(seed: int | torch.Generator, device: torch.device) -> torch.Generator:
    if isinstance(seed, torch.Generator):
        if seed.device.type != device.type:
            raise ConfigError(f"the generator is on {seed.device} and the network on {device}: they must be the same")
        return seed
    check_number("seed", seed, low=0, whole=True)
    return torch.Generator(device).manual_seed(seed)
