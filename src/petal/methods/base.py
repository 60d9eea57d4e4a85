"""What every method is: a module with one verb. Calling it predicts a batch and adapts to it."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from petal.augment import Augment, Views
from petal.calls import mapped, taken
from petal.errors import ConfigError
from petal.methods.card import Card
from petal.methods.descent import Descent
from petal.methods.describe import description
from petal.methods.early import Answering
from petal.methods.executor import Executor
from petal.methods.failures import is_lost, lost, not_enough, with_memory
from petal.methods.inputs import check_batch, check_number, generator_of
from petal.methods.network import Network, Sharing, ViewSource, logits_of
from petal.methods.rates import FanIn, adam
from petal.methods.state import misfits, optimizer_state, optimizer_to_load
from petal.methods.work import Work
from petal.norm import batch_norms, network_copy
from petal.order import Keys

OptimizerFactory = Callable[..., torch.optim.Optimizer]
Rates = float | FanIn | Mapping[str, float]


class Adapter(Answering):
    """A classifier that adapts to what it sees.

    To add a method, derive from this class and write `step` (predict a batch and adapt to it) and, if the prediction is
    not the network's own, `prediction`. `self.model` is a copy of the user's network, in evaluation mode, with batch norm
    by batch statistics if asked for, or with the layers that `norm` makes (`petal.norm`). The constructor names the
    parameters that adapt in `adapt`, networks that follow them in `register_network`, running statistics that move in
    `register_statistics`, and every other tensor that changes in `register_state`: state, reset, checkpoints, the handling
    of losses that are not finite and fast execution are then done here.

    Inside `step`, `self.logits(network, x)` runs a network that the adapter holds, `self.give(logits)` says what the answer
    is, for those who do not wait, and `self.descend(loss)` makes a step. `self.generator` is the only source of randomness.
    """

    card: ClassVar[Card | None] = None      # what tables and `petal methods` say of the method
    batch_sizes: tuple[int, ...] = ()       # of batches of its own making, such as a memory: the engine compiles them too
    alone: ClassVar[str] = ""               # why `SmallBatch` makes no sense around the method, if it makes none
    ordered: ClassVar[bool] = False         # answers use the order of the stream, as `Ordered` does
    uncorrected: Tensor | None = None       # then the last answer without it, for what judges the weights

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_statistics: bool,
        norm: Callable[[_BatchNorm], nn.Module] | None = None,
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
        self.model = network_copy(model, batch_statistics, norm)
        tensor = next(self.model.parameters(), None)
        if tensor is None:
            raise ConfigError("the network has no parameters: there is nothing to adapt or to predict with")
        if tensor.device.type == "meta":
            raise ConfigError("the network is on the meta device: give it weights first")
        self.device, self.dtype = tensor.device, tensor.dtype
        self.generator = generator_of(seed, self.device)
        self._seed = self.generator.get_state()
        self._given = frozenset(name for name, _ in self.model.named_parameters())
        self.views_used = False
        self.work = Work()
        self.adapted: dict[str, nn.Parameter] = {}
        self.descent: Descent | None = None
        self.executor: Executor | None = None
        self.rates: Rates = 0.0
        self._start: Mapping[str, Tensor] = {}
        self._following: dict[str, nn.Module] = {}
        self._buffers_start: dict[str, Tensor] = {}
        self._declared: dict[str, Tensor | None] = {}
        self._networks: dict[nn.Module, Network] = {}
        self._looked = False                    # at the first images for views
        self.by_batch = batch_statistics and bool(batch_norms(self.model))
        nn.Module.train(self, False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.card = vars(cls).get("card")    # a class derived from a method is another method
        if "_weights" in vars(cls):
            text = f"{cls.__name__}._weights: name what changes in register_network and register_state instead"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            cls.weights = vars(cls)["_weights"]  # type: ignore[method-assign]

    # The step of a method

    @abstractmethod
    def step(self, x: Tensor) -> Tensor:
        """Predict a batch and adapt to it once."""

    def prediction(self, x: Tensor) -> Tensor:
        """Logits of a batch with the weights as they are; here the network's own."""
        return self.logits(self.model, x)

    def corrected(self, logits: Tensor) -> Tensor:
        """The answer to a batch, from what `step` or `prediction` gave: the same, unless a method corrects it by a prior."""
        return logits

    def plain_prediction(self, x: Tensor) -> Tensor:
        """The answer to a batch without views, by the networks that `answered_by` names: what `SmallBatch` answers with."""
        return self.logits(getattr(self, self.answered_by[0]), x)

    @property
    def answered_by(self) -> tuple[str, ...]:
        """The names of the networks that answer; the first is the best alone. Here the teacher, where there is one."""
        return ("teacher",) if isinstance(getattr(self, "teacher", None), nn.Module) else ("model",)

    # What a constructor says

    def adapt(
        self,
        parameters: Mapping[str, nn.Parameter],
        lr: Rates,
        optimizer: OptimizerFactory | None = None,
        start: nn.Module | None = None,
    ) -> None:
        """Say which parameters of `self.model` adapt, and how. Called once in a method's constructor.

        `lr` is one rate, a rule such as `FanIn`, or a rate for each parameter by its name. `start` is a frozen network that
        holds the values they start from, if the method keeps one; without it a copy of them is kept, for `reset` and all
        that looks at the way.
        """
        self.rates, lr = lr, lr.rates(parameters) if isinstance(lr, FanIn) else lr
        for rate in lr.values() if isinstance(lr, Mapping) else [lr]:
            check_number("lr", rate, low=0)
        if isinstance(lr, Mapping) and lr.keys() != parameters.keys():
            raise ConfigError(f"lr names other parameters than adapt: {', '.join(sorted(lr.keys() ^ parameters.keys()))}")
        self.adapted = dict(parameters)
        for parameter in self.adapted.values():
            parameter.requires_grad_(True)
        if start is None:
            with torch.inference_mode(False):
                self._start = {name: p.detach().clone() for name, p in self.adapted.items()}
        else:
            self._start = dict(start.named_parameters())
        self.lr, self._make_optimizer = lr, optimizer or adam
        self.descent = Descent(self.adapted, self._fresh_optimizer(), self.generator)

    def register_network(self, name: str, network: nn.Module, follows: bool = True) -> None:
        """Keep a network as attribute `name`. One that `follows` the adapted parameters, by an average of them, is state."""
        self.add_module(name, network.requires_grad_(False))
        if follows:
            self._following[name] = network

    def register_state(self, name: str, value: Tensor | None) -> None:
        """Keep a tensor that changes while adapting as attribute `name`: a running mean, a memory, a counter.

        It is then in the state and checkpoints, `reset` puts it back, `predict` and refused batches leave it alone. Change
        it in place or by assignment. One that begins as None may be of any shape later.
        """
        with torch.inference_mode(False):
            self._declared[name] = None if value is None else value.detach().clone()
            value = value.clone() if value is not None and value.is_inference() else value
        self.register_buffer(name, value, persistent=False)

    def register_statistics(self, name: str) -> None:
        """Declare that the buffers of the network called `name` change while adapting, such as running statistics."""
        for key, buffer in getattr(self, name).state_dict(keep_vars=True).items():
            if not isinstance(buffer, nn.Parameter):
                self._buffers_start[f"{name}.{key}"] = buffer.detach().clone()

    def begin_here(self) -> None:
        """Let `reset` put random numbers back to where they are now: for constructors that draw some."""
        self._seed = self.generator.get_state()

    # What a step is made of

    def logits(self, network: nn.Module, x: Tensor) -> Tensor:
        """Logits [N, C] of a batch by a network that the adapter holds: `self.model`, a teacher, a source."""
        return self.network(network)(x)

    def features(self, network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """What its last linear layer is given [N, D], and its logits [N, C]."""
        return self.network(network).features(x)

    def network(self, module: nn.Module) -> Network:
        """A network that the adapter holds, in the form in which it runs."""
        if module not in self._networks:
            self._networks[module] = Network(module, self.work) if self.executor is None else self.executor.network(module)
        return self._networks[module]

    @contextmanager
    def exchanged(self, others: Mapping[nn.Module, nn.Module]) -> Iterator[None]:
        """In here these networks run as others on the same parameters, such as copies with other norms."""
        kept = self._networks
        exchanged = {module: self.network(other) for module, other in others.items()}
        try:
            self._networks = exchanged
            yield
        finally:
            self._networks = kept

    def augmented(self, x: Tensor, augment: Augment) -> Tensor:
        """One view of a batch, by random numbers of the adapter's own."""
        return next(self.network(self.model).made(self.views_of(x, augment), [0]))

    def views_of(self, x: Tensor, augment: Augment, count: int = 1, sharing: Sharing | None = None) -> ViewSource:
        """The views of a batch. The first images that default views are made of are looked at: a GPU waits for it, once."""
        source = ViewSource(x, augment, count, self.generator, sharing)
        if isinstance(augment, Views) and not self._looked:
            self._looked = True
            augment.look(x)
        return source

    def descend(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """One step on a loss, with penalties and what comes after the step: see `Descent`."""
        assert self.descent is not None, "a method that updates calls adapt() in its constructor"
        return self.descent(loss, *args, **kwargs)

    def update(self, loss: Tensor) -> None:
        """One plain optimizer step on `loss`, or none, counted in `skipped`, if it is not finite."""
        self.descend(loss)

    def backward(self, loss: Tensor) -> bool:
        """Compute the gradients of the adapted parameters. False, counted in `skipped`, unless all are finite."""
        assert self.descent is not None, "a method that updates calls adapt() in its constructor"
        return bool(self.descent.gradient(loss))

    def forward_through(self, network: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        """`logits` under its earlier name; takes any callable."""
        return self.logits(network, x) if isinstance(network, nn.Module) else logits_of(network, x)

    # What users call

    @property
    def kind(self) -> str:
        """What a checkpoint is called after: the name of the class."""
        return type(self).__name__

    def forward(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict a batch and adapt to it. Returns logits; a refused batch leaves the state as it was.

        `stream` names the source of the images, such as a camera, for what goes by their order (`Ordered`): one key, or one
        for each image. Everything else takes it and makes no use of it.
        """
        if self.stopped:
            return self.predict(x, stream)
        return with_memory(self, lambda: self._adapted_to(x), x, stream)

    def _adapted_to(self, x: Tensor) -> Tensor:
        with self._guarded(x) as x, torch.enable_grad():
            self.tell_of_one(x)
            if self.episodic:
                with torch.no_grad():
                    self.work.ran(logits_of(self.model, x))     # a batch that it cannot take is refused before any change
                self._restart()
            for _ in range(self.steps):
                logits = self._run(self.step, x)
            return self.corrected(logits.detach())

    def predict(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict a batch with the weights as they are: what a call would return next, with nothing changed."""
        return self._unchanged(self.prediction, x)

    def glance(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Answer a batch that there is no time to learn from: one pass without views, and nothing changes."""
        return self._unchanged(self.plain_prediction, x)

    def _unchanged(self, answer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with self._guarded(x) as x, torch.no_grad():
            self.tell_of_one(x)
            state, declared = self.generator.get_state(), self.snapshot()
            try:
                return self.corrected(self._run(answer, x))
            except torch.OutOfMemoryError as error:
                raise not_enough(x) from error
            finally:
                self.generator.set_state(state)
                self.rewind(declared)

    def observe(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Answer a batch without learning: what follows a stream besides weights goes on. Here that is nothing."""
        return self.predict(x, stream)

    def reset(self) -> None:
        """Back to the state after construction: weights, optimizer, random numbers and counters."""
        self._restart()
        self.generator.set_state(self._seed)
        self.skipped, self.views_used, self.restored, self.stopped, self.short_of_memory = 0, False, 0.0, False, 0

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Everything that changes while adapting, as a flat dict of tensor copies: weights, optimizer, random state."""
        if args or kwargs:
            raise ConfigError("the state of a method takes no options")
        state = {key: value.detach().clone() for key, value in (self.weights() | self._declared_state()).items()}
        state["generator"] = self.generator.get_state()
        state["skipped"] = torch.tensor(self.skipped)
        return state | ({} if self.optimizer is None else optimizer_state(self.optimizer, self.adapted))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Continue from `state_dict` exactly. A state of another network or method is refused and changes nothing."""
        if not strict or assign:
            raise ConfigError("the state of a method is loaded whole and by copy: strict=True, assign=False")
        weights = self.weights()
        mine = weights | self._declared_state() | {"generator": self._seed, "skipped": torch.tensor(0)}
        free = frozenset(f"state.{name}" for name, value in self._declared.items() if value is None)
        theirs = {key: value for key, value in state_dict.items() if not key.startswith("optimizer.")}
        problems = misfits(mine, theirs, free)
        optimizer, nested = None, {}
        if self.optimizer is None:
            problems += [f"unexpected {key!r}" for key in state_dict.keys() - theirs.keys()]
        else:
            optimizer = self._fresh_optimizer()
            nested = optimizer_to_load(optimizer, self.adapted, state_dict, problems)
        if problems:
            raise ConfigError(f"this state does not fit {type(self).__name__} of this network: {'; '.join(problems[:10])}")
        with torch.inference_mode(False), torch.no_grad():
            for key, value in weights.items():
                value.copy_(state_dict[key])
            if optimizer is not None and self.descent is not None:
                optimizer.load_state_dict(nested)
                self.descent.optimizer = optimizer
            for name, start in self._declared.items():
                given, where = state_dict.get(f"state.{name}"), self.device if start is None else start.device
                setattr(self, name, None if given is None else given.to(where, copy=True))
        self.generator.set_state(state_dict["generator"].cpu())
        self.skipped = int(state_dict["skipped"])

    def describe(self) -> dict[str, str]:
        """What it does and with which settings, for people: `print` shows it."""
        return description(self)

    # What goes around a method uses these

    def _weights(self) -> dict[str, Tensor]:
        return Adapter.weights(self)        # for classes that extend it under this earlier name

    def weights(self) -> dict[str, Tensor]:
        """The tensors that adapt, by name in the state: the student's parameters, and those that follow them."""
        networks = {"model": self.model} | self._following
        found: dict[str, Tensor] = {}
        for prefix, network in networks.items():
            parameters = self.adapted if prefix == "model" else dict(network.named_parameters())
            found |= {f"{prefix}.{name}": parameters[name] for name in self.adapted}
        for key in self._buffers_start:
            prefix, _, name = key.partition(".")
            found[key] = getattr(self, prefix).get_buffer(name)
        return found

    def origin(self) -> dict[str, Tensor]:
        """The adapted parameters as they were after construction, by name: the tensors themselves, not to be changed."""
        return {name: self._start[name].detach() for name in self.adapted}

    def logits_with(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Logits of a batch by the network with these parameters in the place of its own; nothing changes."""
        with self._guarded(x) as x, torch.no_grad():
            logits = logits_of(lambda *args, **named: functional_call(self.model, dict(parameters), args, named), x)
            self.work.ran(logits)
            return logits

    def load_weights(self, weights: Mapping[str, Tensor], fresh: bool = True) -> None:
        """Put all that adapts to these values (keys as in the state); the optimizer is made anew, or goes on."""
        with torch.inference_mode(False), torch.no_grad():
            for key, value in self.weights().items():
                value.copy_(weights[key])
        if fresh and self.descent is not None:
            self.descent.optimizer = self._fresh_optimizer()

    def kept(self) -> dict[str, Tensor]:
        """What a guard keeps copies of, to put it back after a collapse."""
        return self.weights()

    def check_kept(self, kept: Mapping[str, Tensor]) -> list[str]:
        """What is wrong with names and shapes of something kept."""
        return misfits(self.weights(), kept)

    def put_back(self, kept: Mapping[str, Tensor]) -> None:
        """Go on from something kept, with a fresh optimizer."""
        self.load_weights(kept)

    def snapshot(self) -> dict[str, Tensor | None]:
        """Copies of the declared state and statistics, for `rewind`."""
        kept = {name: getattr(self, name) for name in self._declared}
        if self._buffers_start:
            kept |= {key: value for key, value in self.weights().items() if key in self._buffers_start}
        return {name: None if value is None else value.clone() for name, value in kept.items()}

    def rewind(self, snapshot: Mapping[str, Tensor | None]) -> None:
        """Put the declared state and statistics back to a snapshot."""
        for name, value in snapshot.items():
            if name in self._declared:
                setattr(self, name, value)
            elif value is not None:
                prefix, _, key = name.partition(".")
                getattr(self, prefix).get_buffer(key).copy_(value)

    # The parts

    def _run(self, body: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return body(x) if self.executor is None else self.executor.run(body, x)

    def _declared_state(self) -> dict[str, Tensor]:
        named = {f"state.{name}": getattr(self, name) for name in self._declared}
        return {key: value for key, value in named.items() if value is not None}

    def _restart(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for key, value in self.weights().items():
                start = self._buffers_start.get(key)
                name = key.partition(".")[2]
                if start is not None or name in self._start:
                    value.copy_(self._start[name] if start is None else start)
            getattr(self, "_restore_initial", lambda: None)()       # of a class written for an earlier version
            for name, start in self._declared.items():
                setattr(self, name, None if start is None else start.clone())
        if self.descent is not None:
            self.descent.optimizer = self._fresh_optimizer()

    @contextmanager
    def _guarded(self, x: Tensor) -> Iterator[Tensor]:
        """The checked batch as plain tensors; if the block fails, random and declared state come back, gradients go."""
        with self._lock, torch.inference_mode(False):
            x = taken(x)
            check_batch(x, self.device, self.dtype, values=self.executor is None or self.device.type == "cpu")
            before = self.generator.get_state()
            with torch.no_grad():
                declared = self.snapshot()
            try:
                yield mapped(x, lambda t: t.clone() if t.is_inference() else t.detach())
            except BaseException as error:
                if is_lost(error):
                    raise lost(error, self.device) from error
                self.generator.set_state(before)
                with torch.no_grad():
                    self.rewind(declared)
                if self.descent is not None:
                    self.descent.clear()
                raise
