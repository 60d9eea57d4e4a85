"""One stream on several GPUs or machines: the K views of a batch shared out over ranks.

Every rank has the batch, the student and the teacher. A rank computes the teacher's predictions of its share of the views,
with the random numbers that one process would give those views; one all-gather brings them together, everybody sums them in
the order of the views, and the update is done by all alike. Nothing else is communicated, batch norm needs no
synchronisation, and the result is that of one process.

    ranks = petal.parallel.join(device)             # in a process started by torchrun; None if it is the only one
    if ranks is not None:
        petal.parallelize(adapter, ranks)
    adapter(x)                                      # by every rank, with the same batches in the same order

GPUs talk through NCCL about predictions and through gloo about everything small; CPUs use gloo. With gloo a rank whose
process dies is noticed at once, one that is silent after a time.
"""

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from petal.errors import ConfigError, PetalError
from petal.methods import Adapter
from petal.methods.mean_teacher import MeanTeacher

log = logging.getLogger(__name__)

TIMEOUT = 120.0             # seconds a rank may be silent: writing a checkpoint, or compiling on a slower machine
CHECK_EVERY = 32            # batches between comparisons of the weights
TOLERANCE = 1e-3            # relative difference between norms of weights that rounding may explain

A = TypeVar("A", bound=MeanTeacher)


class ParallelError(PetalError, RuntimeError):
    """Another rank was lost, or does something else. The adapter is as it was after the last whole step."""


class Ranks:
    """The processes that share out the views. The first of them, rank 0, is the one that writes and prints."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.rank, self.size, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self.realigned = 0                  # how often the others were given rank 0's weights
        self.stopping = False
        self._turns = 0

    @property
    def first(self) -> bool:
        """True if this is the rank that writes and prints."""
        return self.rank == 0

    # What a method asks (see `Sharing` in `petal.methods.mean_teacher`)

    def decided(self, needed: Tensor) -> Tensor:
        """Which samples need views, as rank 0 sees it: all go the same way, even where rounding differs."""
        shared = needed.to(torch.uint8)
        self._talk(lambda: dist.broadcast(shared, 0))
        return shared.bool()

    def computes(self, view: int) -> bool:
        """True if a view is of this rank's share: they are dealt out in turn."""
        return view % self.size == self.rank

    def gathered(self, mine: Sequence[Tensor], views: int) -> Tensor:
        """The predictions [views, N, classes] of all ranks, in the order of the views, from those of this rank's share."""
        share = math.ceil(views / self.size)
        sent = mine[0].new_zeros(share, *mine[0].shape)
        torch.stack(list(mine), out=sent[: len(mine)])
        received = sent.new_empty(self.size, *sent.shape)
        self._talk(lambda: dist.all_gather(list(received), sent))
        return received.transpose(0, 1).flatten(0, 1)[:views]

    # What a run asks

    def start(self, adapter: Adapter, position: int = 0) -> int:
        """Let every rank begin where rank 0 does: at its position, and with its adapter's state unless that is the start."""
        position = int(self.exchange([position])[0, 0])
        if position > 0:
            self.send_state(adapter)
        return position

    def exchange(self, numbers: Sequence[float]) -> Tensor:
        """The numbers of every rank: [ranks, numbers]."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        theirs = mine.new_empty(self.size, len(mine))
        self._talk(lambda: dist.all_gather(list(theirs), mine))
        return theirs

    def send_state(self, adapter: Adapter) -> None:
        """Give every rank the state of rank 0's adapter: weights, optimizer, random numbers."""
        state = adapter.state_dict() if self.first else {}
        about: list[Any] = [[(key, value.shape, value.dtype) for key, value in state.items()]]
        self._talk(lambda: dist.broadcast_object_list(about, 0, device=torch.device("cpu")))
        for key, shape, dtype in about[0]:
            value = torch.empty(shape, dtype=dtype, device=adapter.device)
            if self.first:
                value.copy_(state[key])     # plain memory order, whatever the network's layout
            self._talk(lambda value=value: dist.broadcast(value, 0))  # type: ignore[misc]
            state[key] = value
        if not self.first:
            adapter.load_state_dict(state)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Rank 0 does the block, then the others, who wait as long as it takes: for files that one makes and all read."""
        store = dist.distributed_c10d._get_default_store()
        self._turns += 1
        turn = f"petal-turn-{self._turns}"
        if not self.first:
            self._talk(lambda: store.wait([turn], timedelta(days=7)))
        yield
        if self.first:
            store.set(turn, "over")

    @contextmanager
    def finishing_batches(self) -> Iterator[None]:
        """SIGTERM, by which a launcher ends the ranks that are left, sets `stopping` instead of ending rank 0 mid-way."""
        if not self.first or threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: object) -> None:
            self.stopping = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def leave(self) -> None:
        """Say goodbye when all is done; nobody goes while another still talks."""
        with suppress(ParallelError):
            self.exchange([0.0])
        dist.destroy_process_group()

    # The check that all do the same

    def meet(self, adapter: MeanTeacher, call: int, x: object) -> None:
        """Before a batch: everybody is at the same one and, now and then, has the same weights.

        Rounding may differ between GPUs: then all go on from rank 0's state. A greater difference is an error.
        """
        samples = x.shape[0] if isinstance(x, Tensor) and x.dim() else 0
        check = call % CHECK_EVERY == 0
        table = self.exchange([call, samples, norm_of_weights(adapter) if check else 0.0])
        for rank, row in enumerate(table.tolist()):
            if row[:2] != [call, samples]:
                raise ParallelError(
                    f"rank {rank} is at batch {row[0]:.0f} with {row[1]:.0f} samples, and rank {self.rank} at batch {call} "
                    f"with {samples}: every rank must be given the same batches"
                )
        norms = table[:, 2]
        if check and bool((norms.view(torch.int64) != norms[:1].view(torch.int64)).any()):
            away = float((norms / norms[0] - 1).abs().max())
            if not away <= TOLERANCE:
                raise ParallelError(
                    f"the ranks' weights have gone apart (their norms are {', '.join(f'{n:.9g}' for n in norms.tolist())}): "
                    "do they run the same version on the same source and data?"
                )
            self.realigned += 1
            log.info("weights differ by rounding (%.1g): all continue from rank 0's", away)
            self.send_state(adapter)

    def _talk(self, body: Callable[[], object]) -> None:
        try:
            body()
        except RuntimeError as error:  # backends have no class of their own for it
            log.info("%s", error)
            raise ParallelError(
                f"rank {self.rank} of {self.size} has lost another rank: it ended, or was silent for {self.timeout:g} "
                "seconds"
            ) from error


def norm_of_weights(adapter: MeanTeacher) -> float:
    """A number that changes with any weight of student or teacher and with its place: a norm with growing weights."""
    total = 0.0
    with torch.no_grad():
        for parameter in (*adapter.model.parameters(), *adapter.teacher.parameters()):
            flat = parameter.flatten()
            total = total + (flat * torch.linspace(1, 2, len(flat), device=flat.device)).norm().double()
    return float(total)


def parallelize(adapter: A, ranks: Ranks) -> A:
    """Let an adapter compute its share of the views only, and get the others from the other ranks. Returns it.

    From here on every rank calls it (and its `predict`) with the same batches in the same order. An `augment` of the
    user's own is called for every view by every rank, so that its random numbers stay in step; only the teacher's work on
    the views is shared out then. State and checkpoints are those of one process.
    """
    if not isinstance(adapter, MeanTeacher):
        raise ConfigError(f"{type(adapter).__name__} has no views to share out: only CoTTA, Petal and their like have")
    if adapter.sharing is not None:
        raise ConfigError("this adapter shares out its views already")
    if 0 < adapter.views < ranks.size:
        raise ConfigError(
            f"{adapter.views} views cannot be shared out over {ranks.size} ranks: start at most {adapter.views}"
        )
    adapter.sharing = ranks
    calls = iter(range(2**53))
    adapter.register_forward_pre_hook(lambda module, inputs: ranks.meet(adapter, next(calls), *inputs[:1]))
    return adapter


def started() -> bool:
    """True if a launcher such as torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(device: torch.device | str = "cpu", timeout: float = TIMEOUT) -> Ranks | None:
    """Meet the other ranks that torchrun started, or None if this process is the only one.

    `timeout` is how many seconds a rank may be silent. A process group that exists already is used as it is.
    """
    if not dist.is_available():
        if started():
            raise ConfigError("this build of torch cannot talk to other processes (torch.distributed is not available)")
        return None
    if not dist.is_initialized():
        if not started():
            return None
        if not timeout > 0:
            raise ConfigError(f"timeout must be a number of seconds above 0, got {timeout!r}")
        # torch.compile imports this, and what is imported after the meeting keeps the group in its functions' defaults:
        # then `leave` cannot end gloo's threads, and one that lets a tensor go while Python ends aborts the process.
        import_module("torch.distributed.nn.functional")
        backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            raise ParallelError(f"the ranks cannot meet: {str(error).splitlines()[0]}") from error
    ranks = Ranks(timeout)
    return ranks if ranks.size > 1 else None
