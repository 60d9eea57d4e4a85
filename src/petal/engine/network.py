"""The methods with one network (Source, BatchNorm, Tent, PseudoLabel), executed fast."""

import logging
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from petal.engine.flat import Layout
from petal.engine.networks import image_buffer, logit_gradient, low_precision, prefers_channels_last
from petal.engine.policy import Policy, record
from petal.functional import all_finite, entropy
from petal.methods import Adapter, PseudoLabel, Tent
from petal.methods.base import not_finite

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
            self.layout = layout
            if policy.low is not None:
                self._make_low_precision()
            elif self.channels_last:
                for parameter in parameters.values():
                    if parameter.dim() == 4:
                        parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self.objective = objective(adapter)
        self.programs: dict[torch.Size, NetworkProgram] = {}
        self.seen: dict[torch.Size, int] = {}

    def _make_low_precision(self) -> None:
        assert self.policy.low is not None
        parameters = {name: p.detach() for name, p in self.adapter.model.named_parameters()}
        self.net = low_precision(self.adapter.model, self.layout, self.layout.pack(parameters, self.policy.low))

    def call(self, x: Tensor) -> Tensor:
        """Predict and adapt."""
        adapter = self.adapter
        if adapter.episodic:
            adapter._try(x)
            adapter._restart()
        for _ in range(adapter.steps):
            logits = self._run(x, learn=self.objective is not None)
        return logits

    def _run(self, x: Tensor, learn: bool) -> Tensor:
        with self.policy.algorithms(x.shape, self.seen):
            logits = self._program(x).run(x, learn)
            if self.policy.low == torch.float16 and not bool(logits.isfinite().all()):
                log.warning("this network leaves the range of float16 and runs in bfloat16 from here on")
                self.policy.low = torch.bfloat16
                self.programs.clear()
                with torch.no_grad():
                    self._make_low_precision()
                logits = self._program(x).run(x, learn)
        return logits

    def predict(self, x: Tensor) -> Tensor:
        """Predict only."""
        return self._run(x, learn=False)

    def skipped(self) -> int:
        """Skipped updates are counted by the adapter itself here."""
        return 0

    def invalidate(self) -> None:
        """Nothing is derived from the weights that change."""

    def _program(self, x: Tensor) -> "NetworkProgram":
        times = self.seen[x.shape] = self.seen.get(x.shape, 0) + 1
        program = self.programs.get(x.shape)
        compiled = sum(p.compiled for shape, p in self.programs.items() if shape != x.shape)
        due = self.policy.due(x.shape, times, compiled)
        if program is None or program.compiled != due:
            program = self.programs[x.shape] = NetworkProgram(self, x, due)
        return program


class NetworkProgram:
    """Forward, and forward with backward, for one batch shape."""

    def __init__(self, engine: NetworkEngine, x: Tensor, compiled: bool) -> None:
        self.engine, self.compiled = engine, compiled
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
            raise not_finite(x)
        if learn:
            self._update()
        return logits

    def _forward(self) -> Tensor:
        policy = self.engine.policy
        self.finite = self.x.isfinite().all()
        with torch.autocast(self.x.device.type, dtype=policy.low, cache_enabled=False) if policy.low else nullcontext():
            return self.engine.adapter.forward_through(self.net, self.x).float()

    def _predict(self) -> None:
        with torch.no_grad():
            self.logits = self._forward()

    def _learn(self) -> None:
        assert self.engine.objective is not None
        with torch.enable_grad():
            logits = self._forward()
            loss, grad, unscale = logit_gradient(logits, self.engine.objective)
            grads = torch.autograd.grad(logits, list(self.engine.adapter.adapted.values()), grad)
        with torch.no_grad():
            self.grads = [g * unscale for g in grads]
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
