"""The methods with one network (Source, BatchNorm, Tent, PseudoLabel), executed fast."""

import logging
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from petal.engine.flat import Layout
from petal.engine.networks import image_buffer, low_precision, prefers_channels_last
from petal.engine.policy import Policy, record
from petal.errors import InputError
from petal.functional import all_finite, entropy
from petal.methods import Adapter, PseudoLabel, Tent

log = logging.getLogger(__name__)


def _pseudo_label(logits: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, logits.argmax(1))


def objective(adapter: Adapter) -> Callable[[Tensor], Tensor] | None:
    """What the method minimises, as a function of its logits."""
    if isinstance(adapter, Tent):
        return lambda logits: entropy(logits).mean()
    return _pseudo_label if isinstance(adapter, PseudoLabel) else None


class NetworkEngine:
    """Executes the calls of an adapter whose prediction is its network's own.

    Weights of convolutions and linear layers never change in these methods, so one low-precision copy serves for good.
    """

    def __init__(self, adapter: Adapter, policy: Policy) -> None:
        self.adapter, self.policy = adapter, policy
        self.net = adapter.model
        with torch.inference_mode(False), torch.no_grad():
            parameters = dict(adapter.model.named_parameters())
            self.channels_last = prefers_channels_last(adapter.model, adapter.device)
            layout = Layout.of(parameters, self.channels_last)
            if policy.low is not None:
                low = layout.pack({k: p.detach() for k, p in parameters.items()}, policy.low)
                self.net = low_precision(adapter.model, layout, low)
            elif self.channels_last:
                for parameter in parameters.values():
                    if parameter.dim() == 4:
                        parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self.objective = objective(adapter)
        self.programs: dict[torch.Size, NetworkProgram] = {}
        self.seen: dict[torch.Size, int] = {}

    def call(self, x: Tensor) -> Tensor:
        """Predict and adapt."""
        adapter = self.adapter
        if adapter.episodic:
            adapter._try(x)
            adapter._restart()
        program = self._program(x)
        for _ in range(adapter.steps):
            logits = program.run(x, learn=self.objective is not None)
        return logits

    def predict(self, x: Tensor) -> Tensor:
        """Predict only."""
        return self._program(x).run(x, learn=False)

    def skipped(self) -> int:
        """Skipped updates are counted by the adapter itself here."""
        return 0

    def invalidate(self) -> None:
        """Nothing is derived from the weights that change."""

    def _program(self, x: Tensor) -> "NetworkProgram":
        times = self.seen[x.shape] = self.seen.get(x.shape, 0) + 1
        program = self.programs.get(x.shape)
        due = self.policy.compile and times >= self.policy.compile_after
        if program is None or (due and not program.final):
            compiled = sum(p.compiled for p in self.programs.values())
            program = NetworkProgram(self, x, due and compiled < self.policy.compiled_shapes)
            program.final = due
            self.programs[x.shape] = program
        return program


class NetworkProgram:
    """Forward, and forward with backward, for one batch shape."""

    def __init__(self, engine: NetworkEngine, x: Tensor, compiled: bool) -> None:
        self.engine, self.compiled, self.final = engine, compiled, True
        self.net = engine.policy.compiler(engine.net) if compiled else engine.net
        self.x = image_buffer(x, engine.channels_last)
        self.graphs = compiled and x.is_cuda
        self.recorded: dict[bool, Callable[[], None]] = {}

    def run(self, x: Tensor, learn: bool) -> Tensor:
        """Logits of the batch, and one update if `learn`."""
        self.x.copy_(x, non_blocking=True)
        body = self._learn if learn else self._predict
        if self.graphs and learn not in self.recorded:
            try:
                self.recorded[learn] = record(body, torch.cuda.graph_pool_handle())
            except Exception as error:
                log.warning("this network cannot run as a CUDA graph and runs without: %s", error)
                torch.cuda.synchronize()
                self.graphs = False
        self.recorded.get(learn, body)()
        logits = self.logits.clone()
        if not bool(self.finite):
            bad = int((~x.isfinite()).flatten(1).any(1).sum())
            raise InputError(f"the batch has NaN or Inf in {bad} of {x.shape[0]} samples: leave those out")
        if learn:
            self._update()
        return logits

    def _forward(self) -> Tensor:
        policy = self.engine.policy
        self.finite = self.x.isfinite().all()
        with torch.autocast("cuda", dtype=policy.low, cache_enabled=False) if policy.low else nullcontext():
            return self.engine.adapter.forward_through(self.net, self.x).float()

    def _predict(self) -> None:
        with torch.no_grad():
            self.logits = self._forward()

    def _learn(self) -> None:
        assert self.engine.objective is not None
        with torch.enable_grad():
            logits = self._forward()
            loss = self.engine.objective(logits)
            self.grads = torch.autograd.grad(loss, list(self.engine.adapter.adapted.values()))
        with torch.no_grad():
            self.logits, self.usable = logits.detach(), all_finite([loss, *self.grads])

    def _update(self) -> None:
        adapter = self.engine.adapter
        assert adapter.optimizer is not None
        if not bool(self.usable):
            adapter.skipped += 1
            return
        for parameter, grad in zip(adapter.adapted.values(), self.grads, strict=True):
            parameter.grad = grad
        adapter.optimizer.step()
        for parameter in adapter.adapted.values():
            parameter.grad = None
