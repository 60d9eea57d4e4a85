"""One suite that every method passes on every network for which it makes sense."""

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import petal
from networks import NETWORKS, images, needed, network
from petal.recommended import flagship

VIEWS = 4


def _petal(model: nn.Module, **options: object) -> petal.Adapter:
    q = petal.DiagonalGaussian.isotropic(model, std=0.05)
    settings = {"views": VIEWS, "confidence": 0.9, "restore": petal.Fisher(0.1), "prior_weight": 1e-4} | options
    return petal.Petal(model, q, **settings)


def _petta(model: nn.Module, **options: object) -> petal.Adapter:
    dtype = next(model.parameters()).dtype
    batches = [(images(64, seed=s, dtype=dtype), None) for s in range(2)]
    known = petal.collect_statistics(model, batches, ["prototypes"], labels="predicted", batch_statistics=False)
    return petal.PeTTA(model, known, **({"memory": 12} | options))
def _flagship(model: nn.Module, **options: object) -> petal.Adapter:
    return petal.Petal(model, **(flagship() | {"warmup": 3} | options))


MAKE: dict[str, Callable[..., petal.Adapter]] = {
    "source": lambda model, **options: petal.Source(model),
    "bn": lambda model, **options: petal.BatchNorm(model),
    "pseudo-label": petal.PseudoLabel,
    "tent": petal.Tent,
    "cotta": lambda model, **options: petal.CoTTA(model, **({"views": VIEWS, "restore": petal.Stochastic(0.1)} | options)),
    "petal": _petal,
    "note": lambda model, **options: petal.NOTE(model, **({"memory": 12, "every": 12} | options)),
    "lame": lambda model, **options: petal.LAME(model),
    "petta": _petta,
    "rotta": lambda model, **options: petal.RoTTA(model, **({"memory": 12, "every": 12} | options)),
}
WRAPPED: dict[str, Callable[..., petal.Adapter]] = {  # what goes around a method is an adapter like any other
    "guard(petal)": lambda model, **options: petal.Guard(_petal(model, **options), every=5, window=60),
    "flagship": _flagship,
    "guard(tent)": lambda model, **options: petal.Guard(petal.Tent(model, **options), every=5, window=60),
    "small(tent)": lambda model, **options: petal.SmallBatch(petal.Tent(model, **options), memory=12, every=12),
    "small(flagship)": lambda model, **options: petal.SmallBatch(_flagship(model, **options), memory=12, every=12),
    "guard(small(petal))": lambda model, **options: petal.Guard(
        petal.SmallBatch(_petal(model, **options), memory=16, every=12), every=5, window=60
    ),
}
MAKE["sar"] = lambda model, **options: petal.SAR(model, **({"margin": 1.0, "reset_threshold": 0.0} | options))
MAKE["deyo"] = lambda model, **options: petal.DeYO(model, **({"margin": 1.0, "plpd": -1.0} | options))


def _with_what_it_needs(kind: type[petal.Adapter]) -> Callable[..., petal.Adapter]:
    name = next(name for name, known in petal.METHODS.items() if known is kind)
    return lambda model, **options: kind(model, *needed(name, model), **options)


MAKE |= {name: _with_what_it_needs(kind) for name, kind in petal.METHODS.items() if name not in MAKE} | WRAPPED
SENSIBLE = [(m, n) for m in petal.METHODS for n in NETWORKS if not (m == "bn" and n != "batch-norm")]
SENSIBLE += [(w, n) for w in WRAPPED for n in ("batch-norm", "group-norm")]
ADAPTING = [(m, n) for m, n in SENSIBLE if m not in ("source", "bn", "lame") and "small" not in m]  # own pace
VIEWED = ("rotta", "petta")                                         # draws random views in every step
REMEMBERS = ("rotta", "note", "petta")                                # a memory takes in what an update is not made of


PLAIN = petal.engine.Policy()  # flat parameters and channels-last, nothing compiled


@pytest.fixture(autouse=True, params=["eager", "engine"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check holds for the plain code and for the engine."""
    if request.param == "engine":
        for name, make in list(MAKE.items()):
            monkeypatch.setitem(
                MAKE, name, lambda *args, make=make, **kw: petal.accelerate(make(*args, **kw), policy=copy.copy(PLAIN))
            )


def without_chance(method: str) -> dict[str, object]:
    """An augmentation of any input that draws nothing, where a method has one and no number of views."""
    known = inspect.signature(petal.METHODS[method]).parameters if method in petal.METHODS else {}
    return {"augment": lambda x: 0.9 * x} if "augment" in known and "views" not in known else {}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def inner(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state without what a guard counts."""
    return {key: value for key, value in state.items() if not key.startswith("guard.")}


def run(adapter: petal.Adapter, first: int, count: int) -> list[Tensor]:
    return [adapter(images(seed=s)) for s in range(first, first + count)]


def test_every_method_is_covered() -> None:
    assert MAKE.keys() - WRAPPED.keys() == petal.METHODS.keys()
    for name, kind in petal.METHODS.items():
        assert isinstance(MAKE[name](network()), kind)


@pytest.mark.parametrize(("method", "net"), SENSIBLE)
class TestEveryMethod:
    def test_returns_logits_of_every_sample(self, method: str, net: str) -> None:
        logits = MAKE[method](network(net))(images())
        assert logits.shape == (12, 5)
        assert logits.isfinite().all()
        assert not logits.requires_grad

    def test_users_model_is_untouched(self, method: str, net: str) -> None:
        model = network(net)
        model.train()
        model.requires_grad_(False)
        before = copy.deepcopy(model.state_dict())
        hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
        run(MAKE[method](model), 0, 3)
        assert same(before, model.state_dict())
        assert all(m.training for m in model.modules())
        assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
        assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks

    def test_same_seed_same_bits(self, method: str, net: str) -> None:
        first, second = MAKE[method](network(net), seed=3), MAKE[method](network(net), seed=3)
        assert all(torch.equal(a, b) for a, b in zip(run(first, 0, 4), run(second, 0, 4), strict=True))
        assert same(first.state_dict(), second.state_dict())

    def test_reset_is_exact(self, method: str, net: str) -> None:
        adapter = MAKE[method](network(net))
        fresh = adapter.state_dict()
        first = run(adapter, 0, 3)
        adapter.reset()
        assert same(fresh, adapter.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(first, run(adapter, 0, 3), strict=True))

    def test_state_dict_continues_bit_identically(self, method: str, net: str) -> None:
        adapter = MAKE[method](network(net))
        run(adapter, 0, 3)
        state = adapter.state_dict()
        rest = run(adapter, 3, 3)
        other = MAKE[method](network(net), seed=99)
        run(other, 7, 2)
        other.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(rest, run(other, 3, 3), strict=True))
        assert same(adapter.state_dict(), other.state_dict())

    def test_state_dict_is_flat_tensors(self, method: str, net: str) -> None:
        adapter = MAKE[method](network(net))
        run(adapter, 0, 1)
        assert all(isinstance(v, Tensor) for v in adapter.state_dict().values())
        assert len(pickle.dumps(adapter.state_dict())) > 0

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_works_inside(self, method: str, net: str, mode: Callable[[], object]) -> None:
        expected = run(MAKE[method](network(net)), 0, 3)
        model = network(net)
        with mode():
            got = run(MAKE[method](model), 0, 3)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))

    def test_predict_is_the_next_answer_and_changes_nothing(self, method: str, net: str) -> None:
        adapter = MAKE[method](network(net))
        run(adapter, 0, 2)
        before = adapter.state_dict()
        predicted = adapter.predict(images(seed=5))
        assert same(before, adapter.state_dict())
        answer = adapter(images(seed=5))
        # without gradients torch runs attention by another kernel, which rounds differently
        assert torch.allclose(predicted, answer, atol=1e-5) if net == "vit" else torch.equal(predicted, answer)

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_train_and_eval_change_nothing(self, method: str, net: str, mode: str) -> None:
        expected = run(MAKE[method](network(net)), 0, 2)
        adapter = MAKE[method](network(net))
        getattr(adapter, mode)()
        assert all(torch.equal(a, b) for a, b in zip(expected, run(adapter, 0, 2), strict=True))
        assert not any(m.training for m in adapter.modules())

    def test_bad_input_leaves_the_state_unchanged(self, method: str, net: str) -> None:
        adapter = MAKE[method](network(net))
        run(adapter, 0, 2)
        before = adapter.state_dict()
        nan, inf = images(), images()
        nan[3, 1, 2, 2] = float("nan")
        inf[0, 0, 0, 0] = float("inf")
        bad = {
            "NaN or Inf in 1 of 12": nan,
            "NaN or Inf": inf,
            r"\[3\]": torch.rand(3),
            r"shape \[12, 2, 8, 8\]": torch.rand(12, 2, 8, 8),
            r"\[3, 8, 8\]": torch.rand(3, 8, 8),
            r"\[2, 12, 3, 8, 8\]": torch.rand(2, 12, 3, 8, 8),
            "empty": torch.rand(0, 3, 8, 8),
            "float64": images(dtype=torch.float64),
            "uint8": torch.zeros(12, 3, 8, 8, dtype=torch.uint8),
            "meta": torch.empty(12, 3, 8, 8, device="meta"),
            "list": [[1.0]],
        }
        for message, x in bad.items():
            with pytest.raises(petal.InputError, match=message):
                adapter(x)
            with pytest.raises(petal.InputError, match=message):
                adapter.predict(x)
            assert same(before, adapter.state_dict()), message

    def test_moving_is_refused(self, method: str, net: str) -> None:
        with pytest.raises(petal.ConfigError, match="move the network first"):
            MAKE[method](network(net)).double()

    def test_state_of_another_network_is_refused(self, method: str, net: str) -> None:
        adapter = MAKE[method](network(net))
        run(adapter, 0, 1)
        before = adapter.state_dict()
        for change in ("missing", "unexpected", "instead of"):
            state = dict(before)
            if change == "missing":
                del state["generator"]
            elif change == "unexpected":
                state["model.nothing"] = torch.zeros(1)
            elif any(k.startswith("model.") for k in state):
                key = next(k for k in state if k.startswith("model."))
                state[key] = torch.zeros(99)
            else:
                continue
            with pytest.raises(petal.ConfigError, match=change):
                adapter.load_state_dict(state)
            assert same(before, adapter.state_dict())

    def test_one_sample_works_or_says_what_to_do(self, method: str, net: str) -> None:
        adapter = MAKE[method](network(net))
        assert adapter(images(1)).shape == (1, 5)  # 64 values a channel are enough

    def test_float64(self, method: str, net: str) -> None:
        adapter = MAKE[method](network(net, torch.float64))
        assert adapter(images(dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(("method", "net"), ADAPTING)
class TestAdaptingMethods:
    def test_adapts(self, method: str, net: str) -> None:
        adapter = MAKE[method](network(net))
        before = adapter.state_dict()
        run(adapter, 0, 2)
        moved = [k for k, v in adapter.state_dict().items() if k.startswith("model.") and not torch.equal(v, before[k])]
        assert moved

    def test_steps(self, method: str, net: str) -> None:
        x = images()
        once, twice = MAKE[method](network(net)), MAKE[method](network(net), steps=2)
        once(x)
        second = once(x)
        assert torch.equal(twice(x), second)
        assert same(inner(once.state_dict()), inner(twice.state_dict()))

    def test_episodic_starts_every_batch_afresh(self, method: str, net: str) -> None:
        plain = {"restore": None, "views": 0} if method in ("cotta", "petal", "guard(petal)") else without_chance(method)
        plain = {"learn": "plain"} if method == "flagship" else plain
        options = {"episodic": True} | plain
        options |= {"destroy": petal.destroy.Occlusion(4, 2, 2)} if method == "deyo" else {}
        adapter = MAKE[method](network(net), steps=2, **options)
        first = adapter(images(seed=1))
        adapter(images(seed=2))
        assert torch.equal(adapter(images(seed=1)), first)
        before = adapter.state_dict()
        with pytest.raises(petal.InputError):
            adapter(torch.rand(12, 2, 8, 8))
        assert same(before, adapter.state_dict())

    def test_a_state_without_its_optimizer_is_refused(self, method: str, net: str) -> None:
        adapter = MAKE[method](network(net))
        state = {key: value for key, value in adapter.state_dict().items() if not key.startswith("optimizer.")}
        with pytest.raises(petal.ConfigError, match=r"missing 'optimizer.group.0.lr'"):
            adapter.load_state_dict(state)

    def test_optimizer_factory_is_used(self, method: str, net: str) -> None:
        def sgd(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)

        adapter = MAKE[method](network(net), optimizer=sgd, lr=0.01)
        plain = MAKE[method](network(net), lr=0.01)
        assert isinstance(adapter.optimizer, torch.optim.SGD)
        assert adapter.optimizer.param_groups[0]["lr"] == 0.01
        run(adapter, 0, 3)
        run(plain, 0, 3)
        assert not torch.equal(adapter.predict(images()), plain.predict(images()))
        state = adapter.state_dict()
        rest = run(adapter, 3, 2)
        other = MAKE[method](network(net), optimizer=sgd, lr=0.5)
        other.load_state_dict(state)
        assert other.optimizer.param_groups[0]["lr"] == 0.01
        assert all(torch.equal(a, b) for a, b in zip(rest, run(other, 3, 2), strict=True))

    def test_a_loss_that_is_not_finite_is_skipped_and_counted(self, method: str, net: str) -> None:
        if method in REMEMBERS:
            pytest.skip("see its own tests")
        adapter = MAKE[method](network(net))
        run(adapter, 0, 2)
        with torch.no_grad():
            broken = next(reversed(adapter.adapted.values()))
            kept = broken.clone()
            broken.fill_(float("inf"))
        before = inner(adapter.state_dict())
        adapter(images(seed=4))
        after = inner(adapter.state_dict())
        assert adapter.skipped == 1
        assert int(after.pop("skipped")) == 1 + int(before.pop("skipped"))
        before.pop("generator"), after.pop("generator")  # views were drawn
        assert same(before, after)
        with torch.no_grad():
            broken.copy_(kept)
        twin = MAKE[method](network(net))
        twin.load_state_dict(adapter.state_dict())
        assert torch.equal(adapter(images(seed=4)), twin(images(seed=4)))
        # the gradients of the batch that was skipped are in no later step
        assert same(inner(adapter.state_dict()), inner(twin.state_dict()))  # a guard has seen answers that are not finite
        assert adapter.skipped == 1

    @pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "fast", True])
    def test_bad_learning_rate(self, method: str, net: str, value: object) -> None:
        with pytest.raises(petal.ConfigError, match="lr must be"):
            MAKE[method](network(net), lr=value)

    @pytest.mark.parametrize("value", [0, -1, 1.5])
    def test_bad_steps(self, method: str, net: str, value: object) -> None:
        with pytest.raises(petal.ConfigError, match="steps must be"):
            MAKE[method](network(net), steps=value)


@pytest.mark.parametrize("method", [m for m in petal.METHODS if m not in ("source", "lame", *REMEMBERS)])
def test_one_value_a_channel_is_refused_with_advice(method: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    adapter = MAKE[method](model, **({"views": 0} if method in ("cotta", "petal") else without_chance(method)))
    adapter(torch.rand(8, 4))
    before = adapter.state_dict()
    with pytest.raises(petal.InputError, match=r"batch norm '1' sees one value a channel.*two images or more"):
        adapter(torch.rand(1, 4))
    assert same(before, adapter.state_dict())


@pytest.mark.parametrize("net", ["group-norm", "vit"])
def test_bn_without_batch_norm_says_what_to_use(net: str) -> None:
    with pytest.raises(petal.ConfigError, match="use Tent, CoTTA or Petal"):
        petal.BatchNorm(network(net))


@pytest.mark.parametrize("method", [petal.Tent, petal.PseudoLabel])
def test_affine_methods_need_normalisation(method: type[petal.Tent]) -> None:
    with pytest.raises(petal.ConfigError, match="use CoTTA or Petal"):
        method(nn.Linear(3, 2))


def test_teacher_methods_adapt_every_parameter_whatever_its_name() -> None:
    adapter = MAKE["petal"](network("vit"))
    before = {k: v.clone() for k, v in adapter.model.named_parameters()}
    assert {"cls_token", "attention.in_proj_weight"} <= before.keys()
    run(adapter, 0, 2)
    assert all(not torch.equal(v, before[k]) for k, v in adapter.model.named_parameters())


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_every_kind_of_batch_norm(layer: type[nn.Module]) -> None:
    kinds = {nn.BatchNorm1d: (nn.Conv1d, 3), nn.BatchNorm3d: (nn.Conv3d, 5)}
    conv, rank = kinds.get(layer, (nn.Conv2d, 4))
    model = nn.Sequential(conv(3, 4, 3), layer(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)).eval()
    x = torch.rand(6, 3, *[5] * (rank - 2))
    model(x)
    shifted = x * 3 + 1
    normalised = petal.BatchNorm(model)
    assert torch.allclose(normalised(x), normalised(shifted), atol=1e-3)  # batch statistics undo scale and shift
    assert not torch.allclose(petal.Source(model)(x), petal.Source(model)(shifted), atol=1e-3)
    petal.CoTTA(model, views=2, confidence=2, augment=lambda x: x.flip(-1))(x)


def test_a_generator_serves_as_seed() -> None:
    by_seed = MAKE["petal"](network(), seed=5)
    by_generator = MAKE["petal"](network(), seed=torch.Generator().manual_seed(5))
    assert all(torch.equal(a, b) for a, b in zip(run(by_seed, 0, 3), run(by_generator, 0, 3), strict=True))
    other = MAKE["petal"](network(), seed=6)
    assert not all(torch.equal(a, b) for a, b in zip(run(by_seed, 0, 3), run(other, 0, 3), strict=True))
