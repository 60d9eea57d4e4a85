"""What carries out the steps of one adapter: fast forms of its networks and of its descent.

The Python of the step is the one in `petal.methods`. It runs networks and the descent through these objects, and nothing in
here knows which method it is.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from petal.augment import Views
from petal.calls import finite, not_finite
from petal.engine.descent import FlatDescent
from petal.engine.flat import Layout
from petal.engine.network import FastNetwork
from petal.engine.networks import Member
from petal.engine.policy import Policy
from petal.engine.programs import Room
from petal.engine.views import Maker
from petal.methods import Adapter
from petal.methods.descent import Values
from petal.methods.network import ViewSource

log = logging.getLogger(__name__)

CHOICES = ("low", "low_views", "proven", "seen", "compiled")    # made on the way, by what came
MAPPINGS = 8    # flat copies that are kept of them: a method may make new ones for every step


class Engine:
    """Executes the steps of one adapter; with the `choices` of another engine, it goes on as that one would."""

    def __init__(self, adapter: Adapter, policy: Policy, choices: Mapping[str, Any] | None = None) -> None:
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
        self.said = False                                                   # that batches of several tensors run plainly
        self.warm: set[Any] = set()                                         # compiled functions that threads have called
        self._counted: set[torch.Size] = set()
        self._makers: dict[tuple[Views, bool], Maker] = {}
        self._flats: dict[int, tuple[Any, Any, Tensor]] = {}                # flat copies of mappings, by where they lie
        self._members: dict[nn.Module, Member] = {}
        self._finite: Flag | None = None
        self._range: Flag | None = None
        with torch.inference_mode(False), torch.no_grad():
            # on a CPU torch's GroupNorm can crash in its backward pass if images are laid out channels-last
            groups = any(isinstance(layer, nn.GroupNorm) for layer in adapter.model.modules())
            self.layout = Layout.of(adapter.adapted, channels_last=self.cuda or not groups)
            for network in adapter.children():
                if network is adapter.model or self.layout.fits(dict(network.named_parameters())):
                    self.member(network)
            flat = self.member(adapter.model).flat
            self.descent = None if flat is None or adapter.descent is None else FlatDescent(self, flat)
        vars(self).update(choices or {})

    # What an adapter asks of its executor

    def run(self, body: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A step or a prediction by `body`, on a batch whose values have not been looked at yet if it lies on a GPU."""
        adapter = self.adapter
        self._counted.clear()
        with nullcontext() if self.alike else self.policy.algorithms(x.shape, self.seen):
            if self.low is not torch.float16:
                return self._attempt(body, x)
            random, declared = adapter.generator.get_state(), adapter.snapshot()
            skipped = None if self.descent is None else self.descent.skips_on_device.clone()
            answer = self._attempt(body, x)
            if self._range is not None and self._range.read():
                return answer
            log.warning("this network leaves the range of float16 and runs in bfloat16 from here on")
            self.low = torch.bfloat16
            for member in self._members.values():
                member.forget_copies()
            adapter._networks.clear()
            self.rooms = [Room()]
            adapter.generator.set_state(random)
            adapter.rewind(declared)
            if self.descent is not None and skipped is not None:
                self.descent.skips_on_device.copy_(skipped)
            return self._attempt(body, x)

    def sure(self) -> bool:
        """True if the batch is finite and all networks so far stayed in the range of float16; waits for the device."""
        self.admit()
        return self.low is not torch.float16 or Flag(self.in_range).read()

    def again(self) -> Callable[[Adapter], "Engine"]:
        """What makes one like this for a copy of the adapter: with the same choices, so that it rounds the same."""
        return partial(Engine, policy=self.policy, choices={name: getattr(self, name) for name in CHOICES})

    def network(self, module: nn.Module) -> FastNetwork:
        """A network of the adapter in its fast form."""
        return FastNetwork(self, module)

    def together(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors with the names of the adapted parameters as views of one."""
        with torch.inference_mode(False), torch.no_grad():
            return self.layout.views(self.layout.pack(values))

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
        tensors = [values[name].detach() for name in self.layout.names]
        stamp = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
        kept = self._flats.get(stamp[0][0])
        if kept is None or kept[1] != stamp:
            base = values[self.layout.names[0]]._base       # they may be views of one tensor already
            views = {} if base is None or base.shape != (self.layout.size,) else self.layout.views(base)
            if base is None or [view.data_ptr() for view in views.values()] != [place for place, _ in stamp]:
                base = self.layout.pack(dict(zip(self.layout.names, tensors, strict=True)))
            self._flats = {} if len(self._flats) >= MAPPINGS else self._flats
            kept = self._flats[stamp[0][0]] = (tensors, stamp, base)
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
    def alike(self) -> bool:
        """True if networks have to round alike in several processes, which then do not drift apart."""
        return getattr(self.adapter, "sharing", None) is not None

    @property
    def scales(self) -> bool:
        """True if networks that learn run as programs, which scale their gradients."""
        return self.cuda or self.low is not None

    @property
    def records_now(self) -> bool:
        """True unless a program that is not recorded waits: its graph ties the weights' gradients to another stream."""
        return all(room.waiting is None or room.waiting.replay is not None for room in self.rooms)

    def room(self) -> Room:
        """The first room in which nothing waits for its backward pass."""
        if all(room.waiting is not None for room in self.rooms):
            self.rooms.append(Room())
        return next(room for room in self.rooms if room.waiting is None)

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
        if key not in self._makers:
            self._makers[key] = Maker(views.views, self.policy, key[1])
        make, own = self._makers[key].of(views.images), views.views
        return lambda drawn: own.as_given(make(drawn), views.x)

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
            self._batch, self._finite = x, Flag(finite(x))
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
                if room.waiting is not None:
                    room.waiting.release()


class Flag:
    """One boolean of the device that the host reads later, without waiting for what was sent off after it."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.event = value, None
        if value.is_cuda:
            self.value = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(value, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    def read(self) -> bool:
        """The boolean, once it is known."""
        if self.event is not None:
            self.event.synchronize()
        return bool(self.value)
