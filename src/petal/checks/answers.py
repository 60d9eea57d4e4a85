"""Checks of what a call returns, what it leaves alone, and what it refuses."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from petal.checks.networks import CLASSES, SIZE, images
from petal.checks.suite import Subject, check, require, same_answers, same_state
from petal.errors import ConfigError, InputError


@check("answers")
def answers(subject: Subject) -> None:
    """Every batch gets finite logits [N, classes] of its own type, without a graph; those handed out early are the same."""
    adapter = subject.new()
    for number in range(subject.some):
        handed: list[Tensor] = []
        with adapter.answering(handed.append):
            logits = subject.answer(adapter, number)
        _require_logits(logits, 12)
        advice = "let step return what it hands to self.give, once"
        wrong = f"the answer that is handed out is not the one that is returned: {advice}"
        same_answers([logits] * len(handed), handed, wrong)
        require(len(handed) < 2, f"an answer is handed out twice: {advice}")


@check("user's network")
def users_network(subject: Subject) -> None:
    """The network that was given is as it was: weights, buffers, modes, gradients, hooks."""
    model = subject.model().train().requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    hooks = _hooks(model)
    subject.run(subject.new(model), 0, subject.some)
    advice = "work on self.model, which is a copy, and keep no reference to the network that was given"
    same_state(before, model.state_dict(), f"the user's network was changed: {advice}")
    require(all(module.training for module in model.modules()), f"the user's network was put to evaluation mode: {advice}")
    clean = not any(p.requires_grad or p.grad is not None for p in model.parameters())
    require(clean, f"the user's network has gradients now: {advice}")
    require(_hooks(model) == hooks, f"the user's network has other hooks now: {advice}")


@check("batch untouched")
def batch_untouched(subject: Subject) -> None:
    """The batch that was given is not written to."""
    adapter = subject.new()
    for number in range(subject.some):
        x = images(seed=number)
        adapter(x)
        adapter.predict(x)
        require(torch.equal(x, images(seed=number)), "the batch was changed in place: work on a copy, x.clone()")


@check("memory layouts")
def memory_layouts(subject: Subject) -> None:
    """The same images lie in memory in another way, and the answer is the same within rounding."""
    x = images()
    (expected,) = subject.run(subject.new(), 0, 1)
    layouts = {
        "channels last": x.to(memory_format=torch.channels_last),
        "every other number of a larger tensor": torch.stack([x, x], -1)[..., 0],
        "columns before rows": x.transpose(2, 3).contiguous().transpose(2, 3),
    }
    for name, laid in layouts.items():
        adapter = subject.new()
        torch.manual_seed(0)
        got = adapter(laid)
        same_answers([expected], [got], f"images laid out as {name} get another answer: use reshape, not view", 1e-4)


@check("short batches")
def short_batches(subject: Subject) -> None:
    """A stream may end with fewer images; one alone is answered, or refused with nothing changed."""
    adapter = subject.new()
    subject.run(adapter, 0, subject.some)
    _require_logits(subject.answer(adapter, 50, 5), 5)
    before = adapter.state_dict()
    try:
        _require_logits(subject.answer(adapter, 51, 1), 1)
    except InputError:
        same_state(before, adapter.state_dict(), "a single image is refused, and the state has changed")
    _require_logits(subject.answer(adapter, 52), 12)


@check("bad input")
def bad_input(subject: Subject) -> None:
    """NaN, wrong shapes, types and devices raise an InputError, and change nothing."""
    adapter, twin = subject.new(), subject.new()
    subject.run(adapter, 0, subject.some), subject.run(twin, 0, subject.some)
    before = adapter.state_dict()
    for name, x in bad_batches().items():
        for call, verb in ((adapter, "adapting to"), (adapter.predict, "predicting")):
            try:
                call(x)
            except InputError:
                pass
            except Exception as error:
                raise_wrong(f"{verb} {name} raises {type(error).__name__}: {error}", "let it be an InputError")
            else:
                raise_wrong(f"{verb} {name} is accepted", "leave the checks to Adapter.forward and predict")
            same_state(before, adapter.state_dict(), f"{verb} {name} is refused, and the state has changed")
    expected, got = (subject.run(each, 20, 2) for each in (twin, adapter))
    same_answers(expected, got, "after batches that were refused, answers are others than without them")


def bad_batches() -> dict[str, Any]:
    """What is no batch for the networks of the checks, by what is wrong with it."""
    nan, inf = images(), images()
    nan[3, 1, 2, 2] = float("nan")
    inf[0, 0, 0, 0] = float("inf")
    return {
        "a NaN": nan,
        "an infinite number": inf,
        "a vector": torch.rand(3),
        "two channels": torch.rand(12, 2, SIZE, SIZE),
        "one image without a batch": torch.rand(3, SIZE, SIZE),
        "five dimensions": torch.rand(2, 12, 3, SIZE, SIZE),
        "no image": torch.rand(0, 3, SIZE, SIZE),
        "float64": images(dtype=torch.float64),
        "uint8": torch.zeros(12, 3, SIZE, SIZE, dtype=torch.uint8),
        "another device": torch.empty(12, 3, SIZE, SIZE, device="meta"),
        "a list": [[1.0]],
    }


@check("predict")
def predict(subject: Subject) -> None:
    """`predict` is the answer that a call would give next, and changes nothing."""
    adapter, twin = subject.new(), subject.new()
    subject.run(adapter, 0, subject.some), subject.run(twin, 0, subject.some)
    before = adapter.state_dict()
    torch.manual_seed(5)
    predicted = adapter.predict(images(seed=5))
    advice = "let prediction() read and not write, or declare what it changes by register_state"
    same_state(before, adapter.state_dict(), f"predict changes the state: {advice}")
    rounding = 1e-5 if _attention(adapter.model) else 0.0     # without gradients torch runs it by another kernel
    expected = subject.answer(twin, 5)
    message = "predict gives another answer than the call: write prediction() as step answers"
    same_answers([expected], [predicted], message, rounding)
    same_answers([expected], [subject.answer(adapter, 5)], f"after predict the next answer is another: {advice}")
    same_state(twin.state_dict(), adapter.state_dict(), f"after predict a method learns other things: {advice}")


@check("inference mode")
def inference_mode(subject: Subject) -> None:
    """Inside torch.no_grad and torch.inference_mode it does the same."""
    expected = subject.run(subject.new(), 0, subject.some)
    modes: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    for name, mode in modes.items():
        model = subject.model()
        with mode():
            got = subject.run(subject.new(model), 0, subject.some)
        same_answers(expected, got, f"inside torch.{name}() it gives other answers: leave gradients to Adapter.forward")


@check("train and eval", "plain")
def train_and_eval(subject: Subject) -> None:
    """`train()` and `eval()` change nothing: the networks of a method stay in evaluation mode."""
    expected = subject.run(subject.new(), 0, 2)
    for mode in ("train", "eval"):
        adapter = getattr(subject.new(), mode)()
        message = f"after {mode}() it gives other answers: leave train to the base class"
        same_answers(expected, subject.run(adapter, 0, 2), message)
        require(not any(m.training for m in adapter.modules()), f"after {mode}() some of its modules are in training mode")


@check("moving", "plain")
def moving(subject: Subject) -> None:
    """Moving an adapter to another device or precision is refused."""
    try:
        subject.new().double()
    except ConfigError:
        return
    raise_wrong("double() converts an adapter that has learned in float32", "leave _apply to the base class")


@check("float64", "plain")
def float64(subject: Subject) -> None:
    """A network in float64 gives answers in float64."""
    adapter = subject.new(subject.model(torch.float64))
    for number in range(subject.some):
        logits = adapter(images(seed=number, dtype=torch.float64))
        require(logits.dtype == torch.float64, f"a network in float64 gives answers in {logits.dtype}: make tensors like x")


def raise_wrong(what: str, advice: str) -> None:
    """Fail with what is wrong and what to do."""
    require(False, f"{what}: {advice}")


def _require_logits(logits: object, size: int) -> None:
    shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    require(shape == [size, CLASSES], f"{size} images of {CLASSES} classes get {shape}: step returns logits [N, classes]")
    assert isinstance(logits, Tensor)
    require(bool(logits.isfinite().all()), "the answer to a good batch has NaN or Inf: a logarithm or quotient of 0?")
    require(not logits.requires_grad, "the answer has a graph: leave forward to the base class, or detach it")


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())


def _attention(model: nn.Module) -> bool:
    return any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
