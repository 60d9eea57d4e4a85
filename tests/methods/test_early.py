"""Answers that are out before the learning."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.made import ENGINES, make, run, same
from networks import images, network
from petal.methods.wrapper import Wrapper

EARLY = ("pseudo-label", "tent", "cotta", "petal", "eta", "deyo", "rpl", "sar", "roid", "santa", "palm", "rotta", "petta")


class Receiver:
    """Takes what is handed out, with the state that the adapter then has."""

    def __init__(self, adapter: petal.Adapter) -> None:
        self.adapter = adapter
        self.got: list[tuple[Tensor, dict[str, Tensor]]] = []

    def __call__(self, logits: Tensor) -> None:
        self.got.append((logits.clone(), {key: value.clone() for key, value in self.adapter.weights().items()}))

    def call(self, x: Tensor) -> Tensor:
        with self.adapter.answering(self):
            answer: Tensor = self.adapter(x)
        return answer


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", EARLY)
def test_the_answer_is_out_before_a_weight_moves_and_is_the_one_returned(kind: str, engine: str) -> None:
    adapter, twin = make(kind, engine), make(kind, engine)
    run(adapter, 0, 1), run(twin, 0, 1)
    receiver, before = Receiver(adapter), {key: value.clone() for key, value in adapter.weights().items()}
    answer = receiver.call(images(seed=2))
    (early, weights), = receiver.got
    assert torch.equal(early, answer)
    assert same(weights, before)
    assert torch.equal(answer, twin(images(seed=2)))
    assert same(adapter.state_dict(), twin.state_dict()), "somebody who waits changes nothing"
    run(adapter, 3)
    assert len(receiver.got) == 1, "who no longer waits is told nothing"


AROUND = {
    "guard": lambda: petal.Guard(make("tent"), every=1),
    "small": lambda: petal.Guard(petal.SmallBatch(make("tent"), memory=12, every=6)),
    "order": lambda: petal.Ordered(make("roid")),
    "robust": lambda: petal.Robust(make("tent")),
    "look-back": lambda: petal.Ordered(make("tent"), look_back=True),
    "asr": lambda: petal.ASR(petal.ETA(network())),
    "large": lambda: petal.Guard(petal.SmallBatch(make("tent"), memory=12, large=4, sure=0.0)),
    "flagship": lambda: petal.adapt(network(), flip=False, engine="eager", memory=0),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_goes_around_a_method_hands_its_own_answer_out(name: str) -> None:
    adapter, twin = AROUND[name](), AROUND[name]()
    receiver = Receiver(adapter)
    for seed in range(4):
        before = {key: value.clone() for key, value in adapter.weights().items()}
        answer = receiver.call(images(6, seed=seed))
        early, weights = receiver.got[seed]
        assert torch.equal(early, answer)
        assert same(weights, before)
        assert torch.equal(answer, twin(images(6, seed=seed)))
    assert same(adapter.state_dict(), twin.state_dict())
    assert not same(adapter.weights(), AROUND[name]().weights()), "something was learned"


class Shifted(Wrapper):
    """Changes answers, and says nothing of early ones."""

    def forward(self, x: Tensor, stream: Any = None) -> Tensor:
        answer: Tensor = self.adapter(x) + 1
        return answer


@pytest.mark.parametrize("adapter", [
    Shifted(make("tent")), make("tent", steps=2), make("memo"), make("note"),
], ids=["a wrapper of one's own", "two steps", "memo", "note"])  # fmt: skip
def test_an_answer_that_is_known_at_the_end_only_is_not_handed_out(adapter: petal.Adapter) -> None:
    receiver = Receiver(adapter)
    receiver.call(images())
    assert receiver.got == []


def test_learning_that_fails_after_the_answer_leaves_no_trace() -> None:
    adapter, twin = AROUND["small"](), AROUND["small"]()
    run(adapter, 0, 1), run(twin, 0, 1)
    before = adapter.state_dict()
    descent, receiver = adapter.descent, Receiver(adapter)
    assert descent is not None
    descent.gradient = broken                   # type: ignore[method-assign]
    with pytest.raises(OSError, match="nothing is learned"):
        receiver.call(images(seed=2))
    del descent.gradient
    assert len(receiver.got) == 1
    assert same(adapter.state_dict(), before)
    assert torch.equal(*(run(each, 3)[0] for each in (adapter, twin)))


def broken(*_: Any, **__: Any) -> Tensor:
    raise OSError("nothing is learned")


def test_a_call_on_a_gpu_network_in_half_precision_asks_first_if_the_answer_stands() -> None:
    """Where the network has left the range the call is repeated: the first answer is none."""
    adapter = make("tent", "auto")
    executor = adapter.executor
    assert executor is not None
    executor.sure = lambda: False               # type: ignore[method-assign]
    receiver = Receiver(adapter)
    receiver.call(images())
    assert receiver.got == []


def test_vital_signs() -> None:
    adapter = petal.SmallBatch(petal.Petal(network(), prior_weight=0.0, calibrate="teacher+student"), memory=12)
    assert adapter.vitals()["memory"] == 0
    adapter(images(6), stream="left"), adapter(images(6), stream="right")
    found = adapter.vitals()
    assert found["memory"] == 12
    assert found["streams"] == 2
    assert adapter.prior is not None
    believed = [1 - track.belief[:, -2:].sum() for track in adapter.prior._tracks.values()]
    assert found["order"] == pytest.approx(sum(believed) / 2)
    adapter.method.log_temperature.fill_(0.5)
    assert adapter.vitals()["temperature"] == pytest.approx(2.718281828**0.5)
    assert petal.Ordered(make("tent"), shuffled=True).vitals().keys() == {"skipped", "short_of_memory", "restored"}
    rotta = make("rotta")
    rotta(images(5))
    assert rotta.vitals()["memory"] == float((rotta.memory_facts[:, 0] >= 0).sum()) > 0
    assert make("petal", net=nn.Sequential(nn.Flatten(), nn.Linear(192, 5))).vitals()["restored"] == 0
