"""A network as the engine runs it: in the precision, layout and form that suit the device."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from petal._threads import crew
from petal.calls import shapes
from petal.engine.networks import WithFeatures, with_stored_scales
from petal.engine.programs import Program
from petal.engine.views import made_together
from petal.errors import InputError
from petal.methods.network import Network, ViewSource, last_layer, logits_of, outputs_of

if TYPE_CHECKING:
    from petal.engine.engine import Engine

log = logging.getLogger(__name__)

RARE = 8  # programs of shapes that are not compiled: methods that select samples bring new ones all the time
LARGE = 1 << 16  # numbers in a batch: two such views fill a GPU, and more of them only take memory


class FastNetwork(Network):
    """A module of an adapter with the weights it runs on.

    The student, and networks that follow it, run one program each, of the student's: where their weights are equal so are
    their predictions, to the bit. A network that never changes, and predictions that are averaged over views, have programs
    of their own in low precision.
    """

    def __init__(self, engine: "Engine", module: nn.Module) -> None:
        super().__init__(module, engine.adapter.work)
        self.engine, self.member = engine, engine.member(module)
        adapter = engine.adapter
        student = engine.member(adapter.model)
        follows = any(module is other for other in adapter._following.values())
        self.learns = any(p.requires_grad for p in module.parameters())
        moves = bool(adapter._buffers_start)                        # statistics that are equal now need not stay so
        self.borrows = follows and not moves and self.member.flat is not None and same_buffers(module, student.module)
        self.exact = module is adapter.model or (follows and not self.borrows)
        self.last = ""                                              # the linear layer that is given the features
        self.programs: dict[tuple[Any, ...], Program] = {}
        self.callables: dict[tuple[Any, ...], Any] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [N, C] of a batch."""
        return self._run(x, features=False)[-1]

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the last linear layer is given [N, D], and the logits [N, C]."""
        if not self.last and isinstance(x, Tensor):
            adapter = self.engine.adapter
            state = adapter.snapshot()
            self.last = last_layer(self.module, x)
            adapter.rewind(state)
            if self.borrows:
                adapter.network(adapter.model).last = self.last  # type: ignore[attr-defined]
        features, logits = self._run(x, features=True)
        return features, logits

    def each(self, views: ViewSource, wanted: Sequence[int]) -> Iterator[Tensor]:
        """Logits of the views with these numbers, in order: by threads on a CPU, side by side on a GPU."""
        engine = self.engine
        if not isinstance(views.x, Tensor):
            return super().each(views, wanted)
        if not engine.cuda and engine.policy.view_threads > 1 and views.views is not None:
            return map(self.work.counted, self._tried(lambda: self._by_threads(views, wanted)))
        return self._side_by_side(views, wanted)

    # How it is run

    def _run(self, x: Tensor, features: bool) -> tuple[Tensor, ...]:
        engine, learns = self.engine, torch.is_grad_enabled() and self.learns
        if not isinstance(x, Tensor):
            return self._plainly(x, features)
        elif learns or self.exact:
            found = self._exactly(x, features, learns)
        elif self.borrows:
            student = engine.adapter.network(engine.adapter.model)
            assert isinstance(student, FastNetwork)
            with engine.swapped(self.member):
                found = student._exactly(x, features, False)
        else:
            found = self._tried(lambda: self._program(x, features).run([x])[0])
            found = tuple(tensor.clone() for tensor in found)
        engine.admit()
        self.work.ran(*found)
        return found

    def _plainly(self, x: Any, features: bool) -> tuple[Tensor, ...]:
        """A batch of several tensors, by the module as it is: programs are for one."""
        if not self.engine.said:
            self.engine.said = True
            log.info("a batch of several tensors (%s) is not compiled or recorded, and runs in full precision", shapes(x))
        found = super().features(x) if features else (super().__call__(x),)
        self.engine.admit()
        return found

    def _exactly(self, x: Tensor, features: bool, learns: bool) -> tuple[Tensor, ...]:
        """By the student's program, which is the one with gradients even where none are wanted."""
        engine = self.engine
        if engine.scales:
            program = self._program(x, features, exact=True)
            if learns:
                return program.run_to_learn(x)
            found = tuple(tensor.clone() for tensor in program.run([x])[0])
            program.release()
            if not program.compiled:    # of a part of a batch, whose size is another each time, nothing is kept
                self.programs = {key: kept for key, kept in self.programs.items() if kept is not program}
            return found
        network = self._callable(True, features, engine.due(x.shape))
        with torch.set_grad_enabled(self.learns):
            found = outputs_of(network, engine.empty_like(x).copy_(x))
        return found if learns else tuple(tensor.detach() for tensor in found)

    def _tried(self, body: Callable[..., Any], *given: Any) -> Any:
        """On a CPU, networks that know no low precision run in full; whether it was the batch shows in the second try."""
        engine, low = self.engine, self.engine.low_views
        random = engine.adapter.generator.get_state()
        try:
            found = body(*given)
        except InputError as error:
            if engine.proven or engine.low is not None or low is None:
                raise
            engine.low_views = None
            engine.adapter.generator.set_state(random)
            try:
                found = body(*given)
            except BaseException:
                engine.low_views = low
                raise
            log.warning("source and views run in %s: in %s, %s", engine.adapter.dtype, low, error)
        engine.proven = True
        return found

    def _program(self, x: Tensor, features: bool, exact: bool = False, batches: int = 1) -> Program:
        engine = self.engine
        room, compiled = engine.room(), engine.due(x.shape)
        low = engine.low if exact else engine.low or engine.low_views
        network = self._callable(exact, features, compiled)  # and its copies are current
        key = (x.shape, features, exact, batches, low, id(room))
        program = self.programs.get(key)
        if program is None or program.network is not network:
            program = None  # its memory is free before the new one takes its own
            self.programs.pop(key, None)
            for rare in [k for k, kept in self.programs.items() if not kept.compiled][:-RARE]:
                del self.programs[rare]
            program = self.programs[key] = Program(
                engine, network, x, low, learns=exact and self.learns, room=room, compiled=compiled, batches=batches
            )
        return program

    def _callable(self, exact: bool, features: bool, compiled: bool, one_thread: bool = False) -> Any:
        """What is called with a batch: the network, compiled or not."""
        engine = self.engine
        low = engine.low if exact else engine.low or engine.low_views
        network = self.module if low is None else self.member.in_low_precision(low, adapted=not (exact and self.learns))
        if compiled and not engine.cuda and not exact:
            compiled = engine.low_views is None  # a CPU gains nothing from it in low precision
        key = (exact, features, compiled, one_thread, network)
        if key not in self.callables:
            if compiled and not engine.cuda and not exact:
                network = with_stored_scales(network)
            found: Any = WithFeatures(network, self.last) if features else network
            if compiled:
                found = engine.policy.compiler(found, inference=not exact, one_thread=one_thread, alike=engine.alike)
            self.callables[key] = found
        return self.callables[key]

    # Views

    def _side_by_side(self, views: ViewSource, wanted: Sequence[int]) -> Iterator[Tensor]:
        """As many at a time as the policy has streams for, so that none is left over."""
        x, streams = views.x, self.engine.policy.view_streams
        most = min(streams, 2) if x.numel() > LARGE else streams
        count = max(n for n in range(1, most + 1) if len(wanted) % n == 0) if views.sharing is None else 1
        made = self.made(views, wanted)
        for _ in range(len(wanted) // count):
            several: Iterable[Tensor] = islice(made, count)
            if self.engine.low_views is not None and not self.engine.proven:
                several = [view.clone() for view in several]  # they may be needed for a second try
            results = self._tried(lambda views: self._program(x, False, batches=count).run(views), several)
            yield from (self.work.counted(logits) for (logits,) in results)
        for _ in made:
            raise AssertionError("every view is predicted")

    def made(self, views: ViewSource, wanted: Sequence[int]) -> Iterator[Tensor]:
        """The views with these numbers, in order; on a GPU many by one kernel."""
        if self.engine.cuda and views.views is not None:
            for view in made_together(views, wanted):
                yield views.views.as_given(view, views.x)
            return
        make = self.engine.maker(views)
        for number, drawn in enumerate(views.draws()):
            if number in wanted:
                yield make(drawn)

    def _by_threads(self, views: ViewSource, wanted: Sequence[int]) -> list[Tensor]:
        """Each view is made and predicted by one thread; draws are made in order."""
        engine, compiled = self.engine, self.engine.due(views.x.shape)
        make, numbers, low = engine.maker(views), iter(range(views.count)), engine.low or engine.low_views
        network = self._callable(False, False, compiled, one_thread=True)

        def predict(numbered: tuple[int, Any]) -> Tensor:
            number, drawn = numbered
            if number not in wanted:
                return views.x
            view = make(drawn)
            with engine.autocast(low):
                return logits_of(network, engine.empty_like(view).copy_(view)).to(engine.adapter.dtype)

        threads, alone = crew(engine.policy.view_threads), compiled and network not in engine.warm
        made = threads.work(lambda: (next(numbers), views.draw()), predict, views.count, alone=alone)
        engine.warm.add(network)
        return [made[number] for number in wanted]


def same_buffers(one: nn.Module, other: nn.Module) -> bool:
    """True if two networks differ in parameters alone, and are of one class."""
    mine, theirs = dict(one.named_buffers()), dict(other.named_buffers())
    names = [(dict(network.named_parameters()).keys(), dict(network.named_buffers()).keys()) for network in (one, other)]
    return type(one) is type(other) and names[0] == names[1] and all(torch.equal(mine[key], theirs[key]) for key in mine)
