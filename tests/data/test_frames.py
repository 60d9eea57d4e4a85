import numpy as np
import pytest
import torch

import petal
from petal.data import Frames, from_arrays


def _photographs(height=12, width=16):
    """Every pixel tells where it is: red its row, green its column; blue the photograph."""
    rows, columns = torch.meshgrid(torch.arange(height) / 100, torch.arange(width) / 100, indexing="ij")
    images = torch.stack([torch.stack([rows, columns, torch.full_like(rows, n / 10)]) for n in range(5)])
    return from_arrays(images, [3, 1, 4, 1, 5], name="places")


def test_a_window_moves_evenly_along_a_straight_line_within_the_photograph():
    data = Frames(_photographs(), count=9, share=0.5, size=(6, 8))
    x, y = data.batch(torch.arange(len(data)))
    assert (len(data), tuple(x.shape)) == (45, (45, 3, 6, 8))
    assert y.tolist() == data.labels.tolist() == [label for label in (3, 1, 4, 1, 5) for _ in range(9)]
    corners = (x[:, :2, 0, 0] * 100).round().reshape(5, 9, 2)       # nothing is resized: corners are whole pixels
    assert torch.equal(x[:, 2, 0, 0], torch.arange(5).repeat_interleave(9) / 10)
    assert bool((x[:, 0, -1, 0] * 100 <= 11.01).all())
    assert bool((x[:, 1, 0, -1] * 100 <= 15.01).all())
    even = corners[:, :1] + (corners[:, -1:] - corners[:, :1]) * torch.linspace(0, 1, 9)[:, None]
    assert float((corners - even).abs().max()) <= 1.0               # rounding of the ends and of the place between
    assert len({tuple(c.flatten().tolist()) for c in corners}) == 5         # each photograph has a line of its own
    assert float((corners[:, -1] - corners[:, 0]).abs().max()) >= 3


def test_frames_do_not_depend_on_what_they_are_read_with():
    data = Frames(_photographs(), count=4)
    whole, _ = data.batch(torch.arange(len(data)))
    some = torch.tensor([17, 2, 2, 9])
    x, y = data.batch(some)
    assert torch.equal(x, whole[some])
    assert torch.equal(y, data.labels[some])
    assert x.shape[1:] == (3, 12, 16)                               # resized to the photograph's size
    assert not torch.equal(whole, Frames(_photographs(), count=4, seed=1).batch(torch.arange(20))[0])


def test_frames_of_a_stream_come_in_runs():
    stream = petal.streams.continual(Frames(_photographs(), count=4), ["clean"], batch_size=10)
    assert np.concatenate([b.y for b in stream]).tolist() == [k for k in (3, 1, 4, 1, 5) for _ in range(4)]
    options = ({}, {"count": 4}, {"share": 0.5}, {"seed": 1}, {"size": (8, 8)})
    prints = [Frames(_photographs(), **o).fingerprint() for o in options]
    assert all(one != other for i, one in enumerate(prints) for other in prints[:i])


@pytest.mark.parametrize("options", [{"count": 0}, {"share": 0.0}, {"share": 1.5}, {"seed": -1}])
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(petal.DataError, match=next(iter(options))):
        Frames(_photographs(), **options)
