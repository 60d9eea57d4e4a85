import threading
import time

import pytest
import torch

from data.fakes import toy
from petal.data import Segment, Stream, streams
from petal.data.streams import Loaded

from .kinds import NAMES, same

pytestmark = pytest.mark.usefixtures("fake")


def test_prefetch_changes_nothing_and_stops():
    def workers():
        return [t for t in threading.enumerate() if t.name.startswith("petal-prefetch")]

    plain = list(streams.continual(toy(), NAMES, batch_size=4))
    for depth in (1, 2, 50):
        ahead = list(streams.continual(toy(), NAMES, batch_size=4, prefetch=depth))
        assert len(plain) == len(ahead)
        for a, b in zip(plain, ahead, strict=True):
            same(a, b)
    running = iter(streams.blended(toy(), NAMES, batch_size=4, prefetch=2))
    next(running)
    assert workers()
    running.close()
    deadline = time.time() + 10
    while workers() and time.time() < deadline:
        time.sleep(0.01)
    assert not workers()


def test_prefetch_works_ahead_but_not_further():
    made = []
    segment = Segment("d", 0, 10, lambda: torch.arange(10), lambda i, o: made.append(o) or Loaded(i[:, None], i, i))
    running = iter(Stream([segment], batch_size=1, prefetch=2))
    next(running)
    deadline = time.time() + 10
    while len(made) < 3 and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2]
    running.close()
