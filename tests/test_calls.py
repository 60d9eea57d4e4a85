"""Any network: what it returns and what it is given, in methods, fits and statistics, by plain code and on the engine."""

import inspect
import logging
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import petal
from lookalikes import FORMS, TextNet, TwoInputs, Wrapped, drop_words, text_network, tokens
from methods.made import ENGINES, make, run, same
from networks import images, needed, network
from petal.engine import Policy

REMEMBERS = {"note", "rotta", "petta"}
IMAGES_ONLY = {"deyo"}                      # of images, by its nature


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["tent", "petal", "santa"])
def test_every_form_of_answer_is_the_tensor_in_it(kind: str, form: str, engine: str) -> None:
    plain, formed = (make(kind, engine, net) for net in (network(), Wrapped(network(), form)))
    for ours, theirs in zip(run(formed, 1, 2), run(plain, 1, 2), strict=True):
        assert torch.equal(ours, theirs)
    assert same(formed.state_dict(), plain.state_dict())
    assert torch.equal(formed.predict(images()), plain.predict(images()))
    assert torch.equal(formed.logits_with(formed.origin(), images()), plain.logits_with(plain.origin(), images()))


def fitted(model: nn.Module, batches: object, **options: object) -> petal.DiagonalGaussian:
    torch.manual_seed(0)                                    # of dropout
    return petal.fit_swag(model, batches, **options)


@pytest.mark.parametrize("form", FORMS)
def test_fits_and_statistics_take_every_form(form: str) -> None:
    batches = [(images(seed=seed), torch.arange(12) % 5) for seed in range(3)]
    plain, formed = network(), Wrapped(network(), form)
    ours, theirs = (fitted(net, batches, epochs=2, train_batch_norm=True) for net in (formed, plain))
    assert ours.mean.keys() == theirs.mean.keys()
    assert all(torch.equal(ours.mean[k], v) for k, v in theirs.mean.items())
    assert all(torch.equal(ours.buffers[k], v) for k, v in theirs.buffers.items())
    ours, theirs = (petal.collect_statistics(net, batches) for net in (formed, plain))
    assert torch.equal(ours.prototypes, theirs.prototypes)
    assert all(torch.equal(ours.fisher[k], v) for k, v in theirs.fisher.items())


class Odd(nn.Module):
    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer, self.scale = answer, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> object:
        return self.answer(x.flatten(1)[:, :5] * self.scale)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda z: {"out": z, "aux": z}, "returned dict with 'out', 'aux': say which they are, with petal.with_output"),
        (lambda z: None, "returned NoneType"),
        (lambda z: z[:3], r"returned \[3, 5\]"),
        (lambda z: z[:, :, None], r"returned \[12, 5, 1\]"),
        (lambda z: ({"scores": z},), "returned dict with 'scores'"),
        (lambda z: (), "returned tuple"),
    ],
)
def test_what_holds_no_logits_is_an_error_that_says_what_to_do(answer: object, words: str) -> None:
    model, batch = Odd(answer), (images(), torch.zeros(12, dtype=torch.long))
    for call in (
        lambda: petal.Source(model)(images()), lambda: petal.fit_swag(model, [batch]),
        lambda: petal.collect_statistics(model, [batch], ["prototypes"]),
    ):  # fmt: skip
        with pytest.raises(petal.InputError, match=words):
            call()


def test_an_output_function_names_the_logits() -> None:
    odd, plain = Odd(lambda z: {"out": z, "aux": 2 * z}), Odd(lambda z: z)
    batches = [(images(seed=1), torch.arange(12) % 5)]
    found = petal.with_output(odd, lambda answer: answer["out"])
    assert torch.equal(petal.Source(found)(images()), plain(images()))
    assert isinstance(odd(images()), dict)                  # the user's own is as it was
    assert found.state_dict().keys() == odd.state_dict().keys()
    fits = [petal.fit_swag(plain, batches), petal.fit_swag(odd, batches, output=lambda answer: answer["out"])]
    assert torch.equal(fits[0].mean["scale"], fits[1].mean["scale"])
    adapter = petal.adapt(odd, output=lambda answer: answer["aux"], engine="eager")
    assert torch.equal(petal.Source(plain)(images()) * 2, adapter.logits_with(adapter.origin(), images()))


# Inputs


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", petal.METHODS)
def test_methods_take_a_dict_of_tokens(kind: str, engine: str) -> None:
    model = text_network()
    if kind in ("bn", "eata", "deyo") or "statistics" in inspect.signature(petal.METHODS[kind]).parameters:
        pytest.skip("needs batch norm, statistics of images, or images")
    options = {"augment": drop_words} if "augment" in inspect.signature(petal.METHODS[kind]).parameters else {}
    adapter = make(kind, engine, model, **options)
    if kind in REMEMBERS:
        with pytest.raises(petal.InputError, match="a sample is one tensor"):
            adapter(tokens())
        return
    twin = make(kind, "eager", model, **options)
    for seed in range(3):
        answer, expected = adapter(tokens(seed=seed)), twin(UserDict(tokens(seed=seed)))
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
    assert answer.shape == (12, 5)
    if adapter.adapted and kind not in ("sar",):
        assert any(not torch.equal(p, adapter.origin()[name]) for name, p in adapter.adapted.items())


def test_inputs_reach_the_network_as_they_were_given() -> None:
    batch, two = tokens(), (images(), torch.randn(12, 4))
    assert torch.equal(petal.Source(text_network())(batch), text_network()(**batch).logits)
    model = TwoInputs().eval()
    assert torch.equal(petal.Source(model)(two), model(*two))
    assert torch.equal(petal.Source(model)(list(two)), model(*two))
    assert torch.equal(petal.Source(text_network())(batch["input_ids"]), text_network()(batch["input_ids"]).logits)


@pytest.mark.parametrize("kind", ["tent", "petal", "rotta"])
def test_one_tensor_of_tokens_runs_on_the_engine_like_any_other(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def hide(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.2, 0)

    options = {} if kind == "tent" else {"augment": hide}
    options |= {"every": 12} if kind == "rotta" else {}
    fast, plain = (make(kind, engine, text_network(), **options) for engine in ("auto", "eager"))
    with caplog.at_level(logging.INFO, "petal"):
        for seed in range(3):
            x = tokens(seed=seed)["input_ids"]
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-5)
        assert "several tensors" not in caplog.text
        if kind == "tent":
            fast(tokens())
            assert "several tensors (input_ids [12, 9], attention_mask [12, 9])" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b | {"return_dict": True}, "'return_dict' is a torch.Tensor or a tuple or dict of them, got bool"),
        (lambda b: b | {"attention_mask": b["attention_mask"][:5]}, r"got input_ids \[12, 9\], attention_mask \[5"),
        (lambda b: b | {"attention_mask": b["attention_mask"].double()}, "'attention_mask' is torch.float64"),
        (lambda b: b | {"attention_mask": b["attention_mask"] / 0.0}, "NaN or Inf in 12 of 12"),
        (lambda b: b | {"words": b["input_ids"]}, r"cannot take a batch of shape input_ids \[12, 9\].*unexpected keyword"),
        (lambda b: b | {"words": b["input_ids"].byte()}, "the batch's 'words' is torch.uint8"),
        (lambda b: {}, "empty tuple or dict"),
        (lambda b: {k: v.numpy() for k, v in b.items()}, "got a NumPy ndarray: use torch.from_numpy"),
        (lambda b: {k: v[:0] for k, v in b.items()}, "'input_ids' is empty"),
    ],
)
def test_a_bad_part_is_named_and_changes_nothing(change: object, words: str) -> None:
    adapter = petal.Tent(text_network())
    adapter(tokens())
    before = adapter.state_dict()
    with pytest.raises(petal.InputError, match=words):
        adapter(change(tokens()))
    assert same(adapter.state_dict(), before)


def test_views_are_for_images_and_say_so() -> None:
    for batch in (tokens(), tokens()["input_ids"]):
        with pytest.raises(petal.InputError, match="give the method an `augment` of your own"):
            petal.Petal(text_network(), views=2, confidence=2.0, prior_weight=0)(batch)
        with pytest.raises(petal.InputError, match="Jitter adds noise to one tensor of floats"):
            petal.adapt(text_network(), images=False, engine="eager")(batch)
    with pytest.raises(petal.InputError, match="DeYO a `destroy` of your own"):
        petal.DeYO(text_network(), margin=10.0, plpd=-1.0)(tokens())
    with pytest.raises(petal.InputError, match=r"augment must return a batch like its input input_ids \[12, 9\]"):
        petal.Petal(text_network(), views=2, confidence=2.0, prior_weight=0, augment=lambda b: b["input_ids"])(tokens())


def test_what_no_memory_holds_is_used_as_it_is() -> None:
    for batch in (tokens(), tokens()["input_ids"]):
        alone, *inner = (petal.Tent(text_network(), lr=0.1) for _ in range(3))
        around, ordered = petal.SmallBatch(inner[0], shuffled=True), petal.SmallBatch(inner[1])
        for _ in range(3):
            said = ordered.predict(batch)
            answer = alone(batch)
            assert torch.equal(around(batch), answer)
            assert torch.equal(ordered(batch), said)
            assert torch.equal(ordered.uncorrected, answer)  # type: ignore[arg-type]
        assert not torch.equal(said, answer)                        # by the order
        assert same(around.adapter.state_dict(), alone.state_dict())
        assert "small.samples" not in around.state_dict()
        assert around.logits_with(around.origin(), batch).shape == answer.shape


def test_a_guard_watches_batches_of_any_form() -> None:
    guard = petal.Guard(petal.adapt(text_network(), augment=drop_words, guard=False, engine="eager"), every=2)
    for seed in range(4):
        guard(tokens(seed=seed))
    assert guard.status()["concentration"] >= 0
    assert guard.batches == 4


# Loaders


def batches_of(x: Tensor, y: Tensor) -> dict[str, list[object]]:
    return {
        "tuples": [(x, y)],
        "DataLoader": [*DataLoader(TensorDataset(x, y), batch_size=12)],
        "more": [(x, y, torch.arange(12))],
        "dict": [{"pixel_values": x, "labels": y}],
        "label": [{"image": x, "label": y}],
        "object": [SimpleNamespace(x=x, y=y, domain="fog", severity=3)],
        "NumPy labels": [(x, y.numpy())],
    }


@pytest.mark.parametrize("form", ["tuples", "DataLoader", "more", "dict", "label", "object", "NumPy labels"])
def test_streams_and_loaders_of_every_form_score_the_same(form: str) -> None:
    x, y = images(), torch.arange(12) % 5
    stream = batches_of(x, y)[form]
    expected = petal.evaluate(petal.Tent(network()), [SimpleNamespace(x=x, y=y, domain="fog")]).mean
    result = petal.evaluate(petal.Tent(network()), stream)
    assert result.mean == expected
    assert list(result.by_domain) == ["fog" if form == "object" else "stream"]
    ours, theirs = (fitted(network(), data) for data in (stream, [(x, y)]))
    assert all(torch.equal(ours.mean[k], v) for k, v in theirs.mean.items())


def test_a_loader_of_tokens_is_fitted_collected_and_evaluated() -> None:
    stream = [tokens(seed=seed) | {"labels": torch.arange(12) % 5} for seed in range(3)]
    model = text_network()
    q = petal.fit_swag(model, stream, epochs=2, lr=0.1)
    statistics = petal.collect_statistics(model, stream, ["prototypes", "fisher"])
    assert statistics.prototypes.shape == (5, 16)
    assert statistics.fisher.keys() == {f"{layer}.{name}" for layer in ("norm", "norm2") for name in ("weight", "bias")}
    adapter = petal.Petal(model, q, augment=drop_words, views=2, confidence=2.0)
    result = petal.evaluate(adapter, stream)
    assert result.mean.n == 36
    assert 0 <= result.mean.error <= 1


def test_a_stream_without_labels_has_predictions_and_no_scores() -> None:
    x = images()
    expected = petal.Tent(network())(x).softmax(1).amax(1).double().mean().item()
    for batch in (x, [x], (x,), {"image": x}, SimpleNamespace(x=x, domain="stream")):
        result = petal.evaluate(petal.Tent(network()), [batch, batch])
        first = result.records[0]
        assert first.confidence == pytest.approx(expected, abs=1e-6)
        assert all(np.isnan([first.error, first.nll, first.brier, result.mean.error, result.mean.ece]))
        assert result.mean.n == 24
        assert first.entropy > 0


def test_labels_that_are_none_are_refused() -> None:
    with pytest.raises(petal.DataError, match="labels that are a list and no tensor"):
        petal.evaluate(petal.Tent(network()), [(images(), [1] * 12)])
    with pytest.raises(petal.InputError, match=r"use torch.from_numpy\(x\)"):
        petal.evaluate(petal.Tent(network()), [(images().numpy(), torch.zeros(12, dtype=torch.long))])


def test_records_as_a_frame() -> None:
    pytest.importorskip("pandas")
    x, y = images(), torch.arange(12) % 5
    frame = petal.evaluate(petal.Tent(network()), [(x, y), (x, y)]).to_frame()
    assert list(frame["position"]) == [0, 1]
    assert frame["n"].sum() == 24
    assert {"error", "entropy", "domain", "skipped"} <= set(frame.columns)
    assert "calibration" not in frame


def test_statistics_for_methods_that_need_them_come_from_the_network_itself() -> None:
    adapter = petal.EATA(Wrapped(network(), "mapping"), *needed("eata", network()))
    assert petal.accelerate(adapter, policy=Policy())(images()).shape == (12, 5)
    assert isinstance(text_network(), TextNet)
