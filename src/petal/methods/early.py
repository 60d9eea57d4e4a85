"""Answers that are out before the learning: who waits for one need not wait for the step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from petal.methods.learner import Learner


class Answering(Learner):
    """A module that hands the answer to a batch out once it is known, and then learns."""

    steps: int
    corrected: Callable[[Tensor], Tensor]
    short_of_memory: int                                    # updates not made since memory ran out, by this process
    _receive: Callable[[Tensor], None] | None = None        # who waits for the answer
    _answered: Tensor | None = None                         # the answer to this call, once it is out

    def __init__(self) -> None:
        super().__init__()
        self.short_of_memory = 0
        self._receive = self._answered = None

    @contextmanager
    def answering(self, receive: Callable[[Tensor], None]) -> Iterator[None]:
        """In here a call hands its answer to `receive` once it is known, if that is before learning, and returns it later.

        Where the answer is only known at the end, `receive` is not called.
        """
        before = self._receive
        try:
            self._receive = receive
            yield
        finally:
            self._receive, self._answered = before, None

    def give(self, logits: Tensor) -> Tensor:
        """Say in `step` what the answer is, before learning: who waits (`answering`) has it then. Returns `logits`."""
        if self._receive is not None and self.steps == 1 and (self.executor is None or self.executor.sure()):
            with torch.no_grad():
                self._hand_out(self.corrected(logits.detach().clone()))
        return logits

    def _hand_out(self, answer: Tensor) -> None:
        if self._receive is not None:
            self._answered = answer
            self._receive(answer)
