"""No memory left, or no device: what a call does, simulated by the errors that torch raises."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import petal
from methods.made import ADAPTING, ENGINES, make, run, same
from networks import images, network

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


def full(*_: Any, **__: Any) -> Tensor:
    raise torch.OutOfMemoryError(FULL)


def but_for_the_count(adapter: petal.Adapter) -> dict[str, Tensor]:
    return {key: value for key, value in adapter.state_dict().items() if key != "skipped"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [*ADAPTING, "roid", "rotta"])
def test_a_step_without_memory_is_left_out_and_counted(kind: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, twin = make(kind, engine), make(kind, engine)
    run(adapter, 0, 1), run(twin, 0, 1)
    before, expected = but_for_the_count(adapter), twin.predict(images(seed=2))
    with monkeypatch.context() as patch:
        where, what = (adapter.memory, "learn") if kind == "rotta" else (adapter.descent, "gradient")
        patch.setattr(where, what, full)
        with pytest.warns(petal.PetalWarning, match=r"memory ran out: a batch \[12, 3, 8, 8\].*not learned from"):
            answer = adapter(images(seed=2))
    assert torch.equal(answer, expected)
    assert same(but_for_the_count(adapter), before)
    assert (adapter.skipped, adapter.short_of_memory, twin.short_of_memory) == (1, 1, 0)
    assert torch.equal(*(run(each, 3)[0] for each in (adapter, twin)))
    assert same(but_for_the_count(adapter), but_for_the_count(twin)), "it goes on as if the batch had only been predicted"
    adapter.reset()
    assert (adapter.skipped, adapter.short_of_memory) == (0, 0)


def hooked(adapter: petal.Adapter, fails: Callable[[int], BaseException | None]) -> None:
    """Let the network's n-th forward from here on fail as told."""
    calls = iter(range(10**6))

    def hook(*_: Any) -> None:
        if (error := fails(next(calls))) is not None:
            raise error

    adapter.model.register_forward_pre_hook(hook)


def test_a_forward_without_memory_is_tried_again_without_learning() -> None:
    adapter, twin = make("tent"), make("tent")
    hooked(adapter, lambda call: torch.OutOfMemoryError(FULL) if call == 0 else None)
    with pytest.warns(petal.PetalWarning, match="memory ran out"):
        assert torch.equal(adapter(images()), twin.predict(images()))


@pytest.mark.filterwarnings("ignore::petal.PetalWarning")
def test_a_batch_that_cannot_even_be_predicted_is_refused() -> None:
    adapter = make("tent")
    before = but_for_the_count(adapter)
    hooked(adapter, lambda call: torch.OutOfMemoryError(FULL))
    for call in (adapter, adapter.predict):
        with pytest.raises(petal.OutOfMemory, match=r"\[12, 3, 8, 8\] torch.float32 on cpu does not fit into memory"):
            call(images())
    assert same(but_for_the_count(adapter), before)
    small = petal.SmallBatch(make("tent"))
    hooked(small, lambda call: torch.OutOfMemoryError(FULL))
    for copy in small._copies.values():
        copy.register_forward_pre_hook(full)
    with pytest.raises(petal.OutOfMemory, match="does not fit into memory"):
        small(images())


class HalfWay(torch.optim.SGD):
    """Runs out of memory with some weights moved."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        super().step(closure)
        raise torch.OutOfMemoryError(FULL)


def test_weights_left_in_between_are_said_to_be_so() -> None:
    adapter = make("tent", optimizer=lambda parameters, lr: HalfWay(parameters, lr=0.1))
    with pytest.raises(petal.OutOfMemory, match=r"while the weights were being changed: go back to a checkpoint"):
        adapter(images())
    adapter.reset()
    assert torch.equal(adapter.predict(images()), make("tent").predict(images()))


def test_of_several_ranks_none_leaves_a_step_out() -> None:
    adapter = make("petal")
    adapter.sharing = petal.methods.network.Sharing     # type: ignore[assignment]
    assert adapter.descent is not None
    adapter.descent.gradient = full                     # type: ignore[method-assign]
    adapter.views = 0
    with pytest.raises(torch.OutOfMemoryError):
        adapter(images())


@pytest.mark.filterwarnings("ignore::petal.PetalWarning")
def test_a_memory_that_does_not_fit_costs_its_step_only() -> None:
    """The answer to the batch is there; nobody asks for that to the memory."""
    small = petal.SmallBatch(make("tent"), memory=12, every=6)
    run(small, 0)
    before = {key: value.clone() for key, value in small.weights().items()}
    hooked(small.adapter, lambda call: torch.OutOfMemoryError(FULL))
    answer, = run(small, 1)
    assert answer.isfinite().all()
    assert small.short_of_memory == small.vitals()["short_of_memory"] == 1
    assert same(small.weights(), before)


def test_a_guard_that_cannot_look_looks_later(caplog: pytest.LogCaptureFixture) -> None:
    guarded = petal.Guard(make("tent"), every=1)
    guarded.adapter.logits_with = full                  # type: ignore[method-assign]
    run(guarded, 0)
    assert "no memory for a look at Tent after batch 1" in caplog.text
    assert guarded._reading is None
    del guarded.adapter.logits_with
    run(guarded, 1)
    assert guarded._reading is not None


LOST = ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: uncorrectable ECC error encountered", "CUDA error: unspecified launch failure")  # fmt: skip


@pytest.mark.parametrize("kind", [RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)])
@pytest.mark.parametrize("text", LOST)
def test_a_lost_device_is_named_and_what_to_do(text: str, kind: type[RuntimeError]) -> None:
    for call in ("__call__", "predict"):
        adapter = make("tent")
        hooked(adapter, lambda call: kind(text))
        first = text.partition("\n")[0]
        with pytest.raises(petal.DeviceLost, match=rf"cpu is lost \({first}\)\. .* start the process again"):
            getattr(adapter, call)(images())


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: invalid argument"), RuntimeError("unknown error"), OSError("CUDA unknown error")]
)
def test_other_errors_are_no_lost_device(error: BaseException) -> None:
    adapter = make("tent")
    hooked(adapter, lambda call: error)
    with pytest.raises((petal.InputError, OSError)):        # what a network raises is its input's fault
        adapter(images())


def test_a_copy_knows_no_receiver() -> None:
    adapter = petal.Tent(network())
    with adapter.answering(lambda logits: None):
        pass
    assert vars(adapter)["_receive"] is None
