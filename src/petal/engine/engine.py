"""What carries out the steps of one adapter: fast forms of its networks and of its descent.

The Python of the step is the one in `petal.methods`. It runs networks and the descent through these objects, and nothing in
here knows which method it is.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from petal.augment import Views
from petal.engine.descent import FlatDescent
from petal.engine.flat import Layout
from petal.engine.network import FastNetwork
from petal.engine.networks import Member, prefers_channels_last
from petal.engine.policy import Policy
from petal.engine.programs import Room
from petal.engine.views import Maker
from petal.methods import Adapter
from petal.methods.descent import Values
from petal.methods.inputs import not_finite
from petal.methods.network import ViewSource
from petal.posterior import DiagonalGaussian

log = logging.getLogger(__name__)


class Engine:
    """Executes the steps of one adapter."""

    def __init__(self, adapter: Adapter, policy: Policy) -> None:
        self.adapter, self.policy = adapter, policy
        self.low, self.low_views = policy.low, policy.low_views
        device = adapter.device
        self.cuda = device.type == "cuda"
        self.anchor = torch.zeros((), device=device, requires_grad=True)    # what results with gradients hang on
        self.in_range, self.always = (torch.ones((), dtype=torch.bool, device=device) for _ in range(2))
        self.rooms = [Room()]
        self.seen: dict[torch.Size, int] = {}
        self.compiled: set[torch.Size] = set()
        self.proven = False                                                 # a network has run in low precision
        self.warm: set[Any] = set()                                         # compiled functions that threads have called
        self._counted: set[torch.Size] = set()
        self._makers: dict[tuple[Views, bool], Maker] = {}
        self._flats: dict[int, tuple[Any, int, Tensor]] = {}
        self._members: dict[nn.Module, Member] = {}
        self._finite: Flag | None = None
        self._range: Flag | None = None
        with torch.inference_mode(False), torch.no_grad():
            self.layout = Layout.of(adapter.adapted, prefers_channels_last(adapter.model, device))
            for network in adapter.children():
                if network is adapter.model or self.layout.fits(dict(network.named_parameters())):
                    self.member(network)
            self._share_posterior()
            flat = self.member(adapter.model).flat
            self.descent = None if flat is None or adapter.descent is None else FlatDescent(self, flat)

    # What an adapter asks of its executor

    def run(self, body: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A step or a prediction by `body`, on a batch whose values have not been looked at yet if it lies on a GPU."""
        adapter = self.adapter
        self._counted.clear()
        with self._algorithms(x):
            if self.low is not torch.float16:
                return self._attempt(body, x)
            random, declared = adapter.generator.get_state(), adapter.snapshot()
            skipped = None if self.descent is None else self.descent.skips_on_device.clone()
            answer = self._attempt(body, x)
            if self._range is not None and self._range.read():
                return answer
            log.warning("this network leaves the range of float16 and runs in bfloat16 from here on")
            self.low = torch.bfloat16
            self._forget_programs()
            adapter.generator.set_state(random)
            adapter.rewind(declared)
            if self.descent is not None and skipped is not None:
                self.descent.skips_on_device.copy_(skipped)
            return self._attempt(body, x)

    def network(self, module: nn.Module) -> FastNetwork:
        """A network of the adapter in its fast form."""
        return FastNetwork(self, module)

    # What its parts ask of it

    def member(self, module: nn.Module) -> Member:
        """A network with its flat parameters and its copies."""
        if module not in self._members:
            with torch.inference_mode(False), torch.no_grad():
                self._members[module] = Member(module, self.layout, self._members.values())
        return self._members[module]

    def flat_of(self, values: Values) -> Tensor:
        """The tensors of a network or a mapping, with the names of the adapted ones, in one."""
        if isinstance(values, nn.Module):
            flat = self.member(values).flat
            assert flat is not None
            return flat
        stamp = sum(values[name]._version for name in self.layout.names)
        kept = self._flats.get(id(values))
        if kept is None or kept[0] is not values or kept[1] != stamp:
            kept = self._flats[id(values)] = (values, stamp, self._one_tensor(values))
        return kept[2]

    def due(self, shape: torch.Size) -> bool:
        """True if batches of this shape are compiled: counted once per step."""
        if shape not in self._counted:
            self._counted.add(shape)
            self.seen[shape] = self.seen.get(shape, 0) + 1
        if self.policy.due(shape, self.seen[shape], len(self.compiled - {shape})):
            self.compiled.add(shape)
        return shape in self.compiled

    @property
    def scales(self) -> bool:
        """True if networks that learn run as programs, which scale their gradients."""
        return self.cuda or self.low is not None

    def room(self) -> Room:
        """The first room in which nothing waits for its backward pass."""
        free = next((room for room in self.rooms if room.waiting is None), None)
        if free is None:
            free = Room()
            self.rooms.append(free)
        return free

    def admit(self) -> None:
        """Refuse the batch if it is not finite. Called when work has been sent off, so that the device does not wait."""
        flag, self._finite = self._finite, None
        if flag is not None and not flag.read():
            raise not_finite(self._batch)

    def maker(self, views: ViewSource) -> Callable[[Any], Tensor]:
        """What makes a view of its random numbers."""
        if views.views is None or self.cuda:
            return views.make
        key = (views.views, self.due(views.x.shape))
        maker = self._makers.setdefault(key, Maker(views.views, self.policy, key[1]))
        maker.begin(views.images)
        return lambda drawn: maker.make(*drawn)

    def note_range(self) -> None:
        """The networks have run: from here the host may ask whether their results were finite."""
        if self.low is torch.float16:
            self._range = Flag(self.in_range)

    def autocast(self, low: torch.dtype | None) -> AbstractContextManager[Any]:
        """Networks in here run in this precision, if one is given."""
        if low is None:
            return nullcontext()
        return torch.autocast(self.adapter.device.type, dtype=low, cache_enabled=False)

    def empty_like(self, x: Tensor) -> Tensor:
        """An empty batch like `x`, with images in the order of the layout."""
        last = self.layout.channels_last and x.dim() == 4
        return torch.empty_like(x, memory_format=torch.channels_last if last else torch.contiguous_format)

    @contextmanager
    def swapped(self, member: Member) -> Iterator[None]:
        """In here the student has another network's weights.

        What the student's own program predicts with them is equal to the bit where the weights are. The student learns from
        the difference of two predictions: where they agree it has to be nothing, and not the difference between two ways of
        rounding, of which Adam would make full steps.
        """
        descent = self.descent
        assert descent is not None
        assert member.flat is not None
        student = self.member(self.adapter.model)
        current = student.stamp == student._versions()
        kept = (torch.empty_like(descent.grad) if descent.waiting else descent.grad).copy_(descent.flat)
        descent.flat.copy_(member.flat)
        if current:
            student.is_current()    # the copies that its program has are of weights that do not adapt
        try:
            yield
        finally:
            descent.flat.copy_(kept)
            if current:
                student.is_current()

    # The parts

    def _attempt(self, body: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.cuda:
            self._batch, self._finite = x, Flag(x.isfinite().all())
        self.in_range.fill_(True)
        self._range = None
        try:
            answer = body(x)
            self.admit()
            if self._range is None:
                self.note_range()
            return answer
        finally:
            for room in self.rooms:
                room.waiting = None
            for maker in self._makers.values():
                maker.end()

    def _one_tensor(self, values: Mapping[str, Tensor]) -> Tensor:
        """The flat tensor that these are views of, if there is one, or a new one."""
        first = values[self.layout.names[0]]
        base = first._base if first._base is not None else first
        known = [flat for flat in (*(m.flat for m in self._members.values()), base) if flat is not None]
        for flat in [flat for flat in known if flat.shape == (self.layout.size,) and flat.dtype == first.dtype]:
            if all(values[name].data_ptr() == view.data_ptr() for name, view in self.layout.views(flat).items()):
                return flat
        return self.layout.pack({name: values[name].detach() for name in self.layout.names})

    def _algorithms(self, x: Tensor) -> AbstractContextManager[None]:
        if getattr(self.adapter, "sharing", None) is not None:
            return nullcontext()
        return self.policy.algorithms(x.shape, self.seen)

    def _forget_programs(self) -> None:
        for member in self._members.values():
            member.forget_copies()
        self.adapter._networks.clear()
        self.rooms = [Room()]

    def _share_posterior(self) -> None:
        """Let the posterior's mean be the source network's parameters themselves, and its variance one flat tensor."""
        posterior = getattr(self.adapter, "posterior", None)
        source = getattr(self.adapter, "source", None)
        if isinstance(posterior, DiagonalGaussian) and source in self._members:
            mean = {name: p.detach() for name, p in source.named_parameters()}
            views = self.layout.views(self.layout.pack(posterior.var))
            vars(self.adapter)["posterior"] = posterior.moved(mean, views)


class Flag:
    """One boolean of the device that the host reads later, without waiting for what was sent off after it."""

    def __init__(self, value: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        if value.is_cuda:
            self.value = torch.empty((), dtype=torch.bool, pin_memory=True)
            self.value.copy_(value, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()
        else:
            self.value = value

    def read(self) -> bool:
        """The boolean, once it is known."""
        if self.event is not None:
            self.event.synchronize()
        return bool(self.value)
