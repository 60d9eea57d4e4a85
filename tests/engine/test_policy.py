"""Which batch shapes are compiled."""

import pytest
import torch

import petal
from networks import network
from petal.engine import Policy

SHAPE, OTHER = torch.Size([12, 3, 8, 8]), torch.Size([7, 3, 8, 8])


def test_a_shape_is_due_from_the_nth_time_on_while_there_is_room() -> None:
    policy = Policy(compile=True, compile_after=3, compiled_shapes=2)
    assert [policy.due(SHAPE, times, 0) for times in range(1, 6)] == [False, False, True, True, True]
    assert [policy.due(SHAPE, 3, compiled) for compiled in range(4)] == [True, True, False, False]


def test_named_shapes_are_due_at_once_and_no_others() -> None:
    policy = Policy(compile=True, compile_after=1, shapes=frozenset([SHAPE]))
    assert policy.due(SHAPE, 1, 100)
    assert not policy.due(OTHER, 100, 0)


@pytest.mark.parametrize("shapes", [None, frozenset([SHAPE])])
def test_nothing_is_due_where_nothing_is_compiled(shapes: frozenset[torch.Size] | None) -> None:
    assert not Policy(compile=False, compile_after=1, shapes=shapes).due(SHAPE, 100, 0)


def test_the_sizes_of_memories_are_compiled_beside_the_streams() -> None:
    adapter = petal.accelerate(petal.RoTTA(network(), memory=7), batch_shape=SHAPE)
    assert adapter.executor.policy.shapes == {SHAPE, OTHER}
    plain = petal.accelerate(petal.Tent(network()), batch_shape=SHAPE)
    assert plain.executor.policy.shapes == {SHAPE}
