"""ASR against runs of the authors' code, and what it does not do as that code does."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.field import close, flat
from methods.golden import OPTIMIZERS, augment, fast, read, small
from petal.errors import ConfigError

CASES = [(kind, norm, opt) for kind in ("eta", "eata", "roid") for norm in ("batch", "group") for opt in OPTIMIZERS]
RATES = {"adam": 0.005, "sgd": 0.0003}


def stream(norm: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[Tensor]]:
    """The network, and 24 batches that drift away; the last one is short."""
    model, x = small(norm, dtype)
    batches = [x[b] * (1 - 0.2 * v) + 0.15 * v * x[b].flip(1) for v in range(4) for b in range(6)]
    return model, [*batches[:-1], batches[-1][:7]]


def base(kind: str, model: nn.Module, norm: str, optimizer: str) -> petal.Adapter:
    """The method inside, with the settings of the golden runs."""
    common: dict[str, Any] = {"lr": RATES[optimizer], "optimizer": OPTIMIZERS[optimizer]}
    if kind == "roid":
        more = {"share": 0.03, "momentum": 0.8, "temperature": 0.5, "batch_size": 24, "augment": augment}
        return petal.ROID(model, **common, **more)
    if kind == "eta":
        return petal.ETA(model, margin=0.9, similarity=0.99, **common)
    generator = torch.Generator().manual_seed(5)
    names = petal.norm.affine_parameters(model)
    fisher = {name: torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p) for name, p in names.items()}
    known = petal.SourceStatistics(fisher=fisher)
    return petal.EATA(model, known, margin=0.9, similarity=0.99, fisher_weight=0.3, **common)


def reset_often(norm: str) -> dict[str, float]:
    return {"change": 0.3, "weight": 10.0, "level": {"batch": 0.112, "group": 0.3}[norm], "keep": 0.8, "slope": 2.0}


@pytest.mark.parametrize(("kind", "norm", "optimizer"), CASES)
def test_asr_is_the_reference(kind: str, norm: str, optimizer: str) -> None:
    """For ROID the released code, whose reset goes to the wrong network, was put right before it ran."""
    golden, _ = read("asr")
    golden = {key.removeprefix(f"{kind}.{norm}.{optimizer}."): value for key, value in golden.items()}
    model, batches = stream(norm)
    adapter = petal.ASR(base(kind, model, norm, optimizer), **reset_often(norm))
    logits, levels = [], []
    for x in batches:
        logits.append(adapter(x))
        levels.append(float(adapter.memory.numbers[2]))
    assert adapter.resets == int(golden["resets"])
    assert close(torch.tensor(levels), golden["levels"], 1e-6)
    assert close(torch.cat(logits[-6:]), golden["logits"])
    assert close(flat(adapter.adapted), golden["weights"])
    assert close(adapter.memory.held, golden["held"])


def test_as_released_the_reset_of_roid_goes_to_the_wrong_network() -> None:
    golden, _ = read("asr")
    released, right = golden["roid.batch.adam.released.logits"], golden["roid.batch.adam.logits"]
    assert (released - right).abs().max() > 1      # so that the runs above tell one from the other
    model, batches = stream("batch")
    adapter = petal.ASR(base("roid", model, "batch", "adam"), **reset_often("batch"))
    anchor = flat(adapter.adapter.start).clone()
    for x in batches:
        adapter(x)
    assert adapter.resets > 1
    assert torch.equal(flat(adapter.adapter.start), anchor)


@pytest.mark.parametrize("kind", ["eta", "roid"])
def test_on_the_engine_it_does_the_same(kind: str) -> None:
    plain, quick = (petal.ASR(base(kind, stream("batch", torch.float32)[0], "batch", "sgd"), **reset_often("batch"))
                    for _ in range(2))  # fmt: skip
    fast(quick)
    assert quick.executor is not None
    for x in stream("batch", torch.float32)[1][:10]:
        assert close(quick(x), plain(x).double(), 1e-3)
    assert quick.resets == plain.resets > 0
    assert close(flat(quick.adapted), flat(plain.adapted).double(), 1e-4)
    assert quick.own_state().keys() == plain.own_state().keys()


def test_a_reset_brings_back_the_last_parameters_optimizer_and_state() -> None:
    """The first share of the parameters, in the order of the network, stays; all else is the source's."""
    model, batches = stream("batch")
    before: dict[str, Tensor] = {}

    class Watched(petal.ETA):
        def step(self, x: Tensor) -> Tensor:
            logits = super().step(x)
            before.update({name: p.detach().clone() for name, p in self.adapted.items()})
            return logits

    adapter = petal.ASR(Watched(model, 0.01, margin=1.0, similarity=1.0), level=1.0, keep=0.5, slope=0.0)
    adapter(batches[0])
    assert adapter.resets == 1
    start = adapter.origin()
    kept = [name for name, p in adapter.adapted.items() if torch.equal(p, before[name]) and not torch.equal(p, start[name])]
    assert kept == list(adapter.adapted)[: len(start) // 2]
    assert all(torch.equal(p, start[name]) for name, p in adapter.adapted.items() if name not in kept)
    assert not adapter.optimizer.state
    assert not adapter.mean.any()
    assert torch.allclose(adapter.memory.held[1], flat(start))          # the weights before the step


def test_every_setting_changes_something() -> None:
    def answer(**settings: Any) -> Tensor:
        model, batches = stream("batch")
        adapter = petal.ASR(base("eta", model, "batch", "sgd"), **(reset_often("batch") | settings))
        return torch.cat([adapter(x) for x in batches[:20]])

    usual = answer()
    changed = {"change": 0.9, "weight": 40.0, "level": 0.12, "keep": 0.3, "slope": 0.5, "momentum": 0.2}
    for name, value in changed.items():
        assert not close(answer(**{name: value}), usual, 1e-9), name


class Watching:
    """A penalty that adds nothing and remembers the gradient it saw."""

    elementwise = False

    def add_(self, weights: Any) -> None:
        self.seen = torch.cat([g.flatten().clone() for g in weights.gradients])


@pytest.mark.parametrize("engine", [False, True])
def test_a_standing_penalty_comes_last_and_stays_when_the_engine_changes(engine: bool) -> None:
    """It sees the gradient of the loss and of the step's own penalties, EATA's here, and is in no look of SAR's."""
    def seen(kind: str) -> Tensor:
        model, batches = stream("batch", torch.float32)
        adapter = base(kind, model, "batch", "sgd")
        watching = Watching()
        adapter.descent.standing = (watching,)
        adapter = fast(adapter) if engine else adapter
        for x in batches[:2]:
            adapter(x)
        assert bool(adapter.descent.made)
        assert petal.accelerate(adapter, "eager").descent.standing == (watching,)
        return watching.seen

    assert not close(seen("eata"), seen("eta").double(), 1e-4)
    model, batches = stream("batch", torch.float32)
    adapter = petal.SAR(model, 0.01, margin=1.0)
    calls: list[int] = []
    adapter.descent.standing = (type("Count", (), {"elementwise": False, "add_": lambda self, w: calls.append(1)})(),)
    (fast(adapter) if engine else adapter)(batches[0])
    assert len(calls) == 1


def test_a_standing_penalty_sees_the_prior_on_the_engine_too() -> None:
    """Which the engine adds in a pass of its own where nothing comes after it."""
    def seen(engine: bool, weight: float) -> Tensor:
        model, batches = stream("batch", torch.float32)
        q = petal.DiagonalGaussian.isotropic(model, std=0.05)
        adapter = petal.Petal(model, q, 0.01, views=0, prior_weight=weight, restore=None, optimizer=torch.optim.SGD)
        adapter = fast(adapter) if engine else adapter
        adapter.descent.standing = (watching := Watching(),)
        with torch.no_grad():
            for p in adapter.adapted.values():
                p.add_(0.1)
        adapter(batches[0])
        return watching.seen

    assert close(seen(True, 1e-2), seen(False, 1e-2).double(), 1e-4)
    assert not close(seen(True, 1e-2), seen(True, 1e-9).double(), 1e-3)


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("due", [False, True])
@pytest.mark.parametrize("kind", [petal.Tent, petal.CoTTA])
def test_a_restart_of_some_parameters(kind: Any, engine: bool, due: bool) -> None:
    """Of CoTTA's, which the engine steps in one pass on a CPU too, so that it is decided there without the host."""
    model, batches = stream("batch", torch.float32)
    adapter = kind(model, 0.05, **({} if kind is petal.Tent else {"views": 0}))
    adapter = fast(adapter) if engine else adapter
    for x in batches[:2]:
        adapter(x)
    assert not engine or kind is petal.Tent or adapter.descent.rule is not None
    moved, start = {n: p.detach().clone() for n, p in adapter.adapted.items()}, adapter.origin()
    which = torch.tensor([number % 2 == 1 for number in range(len(moved))])
    petal.methods.resets.restart(adapter, start, torch.tensor(due), which=which)
    for number, (name, p) in enumerate(adapter.adapted.items()):
        assert torch.equal(p, start[name] if due and number % 2 else moved[name])
    state = adapter.state_dict()
    moments = [value for key, value in state.items() if key.endswith("exp_avg")]
    assert bool(sum(m.abs().sum() for m in moments)) is not due


@pytest.mark.parametrize(("make", "words"), [
    (lambda model: petal.Source(model), "it adapts nothing"),
    (lambda model: petal.CoTTA(model, views=0), r"networks that follow the weights \(teacher\)"),
    (lambda model: petal.CMF(model), r"networks that follow the weights \(hidden\)"),
    (lambda model: petal.NOTE(model), "running statistics move"),
    (lambda model: petal.Tent(model, episodic=True), "episodic"),
    (lambda model: petal.Guard(petal.Tent(model)), "wrapped already"),
])  # fmt: skip
def test_methods_that_it_does_not_fit(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"ASR makes no sense around .*{words}"):
        petal.ASR(make(stream("batch")[0]))


@pytest.mark.parametrize(("options", "words"), [
    ({"change": 1.5}, "change must be"), ({"level": 0}, "level must be"), ({"weight": -1}, "weight must be"),
    ({"keep": 2}, "keep must be"), ({"slope": -0.1}, "slope must be"), ({"momentum": "x"}, "momentum must be"),
])  # fmt: skip
def test_settings_that_make_no_sense(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        petal.ASR(petal.ETA(stream("batch")[0]), **options)
