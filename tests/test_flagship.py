"""The flagship's step against NumPy in float64, and each of its arguments."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import petal
from networks import images, network
from oracle import network as oracle_network
from oracle.flagship import NumpyFlagship
from petal.engine import Engine, Policy
from petal.recipes import SGD
from petal.recipes import Adam as AdamValue
from petal.recommended import flagship

MEMBERS = {"teacher": ("teacher", False), "teacher-flip": ("teacher", True), "student": ("student", False),
           "student-flip": ("student", True)}  # fmt: skip
BASE: dict[str, Any] = {"learn": "both", "target": "teacher+teacher-flip", "answer": "teacher+teacher-flip+student",
                        "ema": 0.9, "warmup": None}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "flagship": {},
    "plain": {"learn": "plain"},
    "view": {"learn": "view"},
    "no flips": {"target": "teacher", "answer": "teacher+student"},
    "student in the target": {"target": "student+teacher"},
    "students alone": {"target": "student-flip", "answer": "student-flip+student"},
    "one answer": {"answer": "teacher"},
    "slow teacher": {"ema": 0.999},
    "warm-up": {"ema": 0.7, "warmup": 2},
    "long warm-up": {"ema": 0.999, "warmup": 7.5},
}
FLAGSHIP: dict[str, Any] = {"views": 0, "prior_weight": 0.0, "restore": None}


def moved(x: Any) -> Any:
    """A view without random numbers, for arrays and tensors."""
    roll = torch.roll if isinstance(x, Tensor) else np.roll
    return 0.9 * roll(x, 1, -1) + 0.02


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("engine", [False, True])
def test_the_step(case: str, optimizer: str, engine: bool) -> None:
    options = BASE | SETTINGS[case]
    parameters = oracle_network.initial_parameters(seed=0)
    # fan-in by hand: 3 x 9 and 6 x 9 numbers make an output of the convolutions, 8 one of the linear layer
    rates = dict.fromkeys(parameters, 4e-3) | {"0.weight": 0.1 / 27, "3.weight": 0.1 / 54, "8.weight": 5e-3}
    oracle = NumpyFlagship(
        parameters, augment=moved, rates=rates, optimizer=optimizer,
        **{**options, **{key: [MEMBERS[name] for name in options[key].split("+")] for key in ("target", "answer")}},
    )  # fmt: skip
    adapter = petal.Petal(
        oracle_network.torch_network(parameters), lr=petal.FanIn(0.1, 5e-3, 4e-3), augment=moved, **FLAGSHIP, **options,
        optimizer=AdamValue() if optimizer == "adam" else SGD(momentum=0.9, nesterov=True),
    )  # fmt: skip
    if engine:
        adapter.execute_with(Engine(adapter, Policy()))
    for seed in range(4):
        x = oracle_network.images(seed=seed)
        predicted = adapter.predict(torch.tensor(x))
        expected, got = oracle.step(x), adapter(torch.tensor(x)).numpy()
        assert np.abs(predicted.numpy() - got).max() < 1e-12
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)
        for weights, module in ((oracle.student, adapter.model), (oracle.teacher, adapter.teacher)):
            for name, value in module.named_parameters():
                np.testing.assert_allclose(value.detach().numpy(), weights[name], rtol=0, atol=1e-9, err_msg=name)
    assert adapter.skipped == 0


def test_every_setting_changes_the_step() -> None:
    ends = {}
    for case, changed in SETTINGS.items():
        adapter = petal.Petal(oracle_network.torch_network(), lr=1e-2, augment=moved, **FLAGSHIP, **(BASE | changed))
        answers = [adapter(torch.tensor(oracle_network.images(seed=seed))) for seed in range(2)]
        ends[case] = torch.cat([*answers, *(p.detach().reshape(-1, 5) for p in [adapter.teacher.get_parameter("8.bias")])])
    for one in SETTINGS:
        for other in SETTINGS:
            assert one == other or not torch.allclose(ends[one], ends[other], atol=1e-8), (one, other)


def test_the_default_is_the_papers() -> None:
    """What stands in the way of the flagship's arguments is Algorithm 2 as it was."""
    q = petal.DiagonalGaussian.isotropic(network(), std=0.05)
    told = {"learn": "plain", "target": "teacher", "answer": "teacher", "warmup": None}
    one, other = petal.Petal(network(), q, views=3), petal.Petal(network(), q, views=3, **told)
    for seed in range(3):
        assert torch.equal(one(images(seed=seed)), other(images(seed=seed)))


def test_views_are_of_each_image_and_follow_the_seed() -> None:
    seen: list[Tensor] = []

    def watched(x: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(petal.Views(per_sample=True)(x, generator=generator))
        return seen[-1]

    same = images(1).expand(6, -1, -1, -1)
    for seed in (0, 0, 1):
        petal.Petal(network(), **(flagship() | {"augment": watched, "seed": seed}))(same)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert (seen[0][0] - seen[0][1:]).abs().flatten(1).amax(1).min() > 0.02


class TestFanIn:
    def test_rates(self) -> None:
        rate = petal.FanIn(scale=1.0, most=0.1, vectors=0.02)
        shapes = {
            (8, 4, 3, 3): 1 / 36, (8, 5): 0.1, (40, 50): 0.02, (8,): 0.02, (): 0.02, (1, 1, 16): 0.02, (8, 1, 1): 0.02,
            (8, 1, 5, 5): 1 / 25, (10, 0): 0.02,
        }  # fmt: skip
        for shape, expected in shapes.items():
            assert rate.of(torch.empty(shape)) == expected, shape

    @pytest.mark.parametrize("method", [petal.Tent, petal.CoTTA, petal.Petal])
    def test_any_method_takes_them(self, method: type[petal.Adapter]) -> None:
        options = {"prior_weight": 0.0} if method is petal.Petal else {}
        adapter = method(network(), lr=petal.FanIn(0.5, 0.01, 0.002), **options)
        got = {id(p): group["lr"] for group in adapter.optimizer.param_groups for p in group["params"]}
        for name, p in adapter.adapted.items():
            fan_in = p[0].numel() if p.dim() > 1 else 0
            assert got[id(p)] == (min(0.01, 0.5 / fan_in) if fan_in else 0.002), name

    @pytest.mark.parametrize("name", ["scale", "most", "vectors"])
    @pytest.mark.parametrize("value", [-1.0, math.nan, "fast", True])
    def test_bad_values(self, name: str, value: object) -> None:
        with pytest.raises(petal.ConfigError, match=f"{name} of FanIn must be a number from 0"):
            petal.FanIn(**{name: value})


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"learn": "everything"}, "learn must be one of 'plain', 'view', 'both', got 'everything'"),
            ({"target": "teacher+pupil"}, "target must be one of .*'teacher-flip'.*got 'pupil'"),
            ({"answer": ""}, "answer must be one of"),
            ({"answer": 3}, "answer must be one of .*got 3"),
            ({"target": "teacher+teacher"}, "target names a member twice"),
            ({"warmup": 0}, "warmup must be a number from 1, got 0"),
            ({"prior_weight": 1e-9}, "the prior needs a posterior.*or prior_weight=0"),
        ],
    )
    def test_bad_values_are_named(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(petal.ConfigError, match=words):
            petal.Petal(network(), **(flagship() | options))

    def test_flips_are_of_images(self) -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
        adapter = petal.Petal(model, **(flagship() | {"augment": petal.Jitter()}))
        before = adapter.state_dict()
        adapter.answer = ("teacher", "teacher-flip")
        with pytest.raises(petal.InputError, match=r"only images .* have mirror images, not \[8, 4\]"):
            adapter(torch.rand(8, 4))
        assert all(torch.equal(value, before[key]) for key, value in adapter.state_dict().items())

    def test_with_a_posterior_it_starts_at_the_mean(self) -> None:
        model = network()
        mean = {name: p + 0.01 for name, p in model.named_parameters()}
        q = petal.DiagonalGaussian(mean, {name: torch.ones_like(p) for name, p in mean.items()})
        adapter = petal.Petal(model, q, **flagship())
        for kept in (adapter.model, adapter.teacher, adapter.source):
            assert all(torch.equal(p, mean[name]) for name, p in kept.named_parameters())

    @pytest.mark.parametrize("engine", [False, True])
    def test_the_window_counts_steps_that_were_made(self, engine: bool) -> None:
        adapter = petal.Petal(network(), **(flagship() | {"warmup": 2, "ema": 0.75, "learn": "plain"}))
        if engine:
            petal.accelerate(adapter, policy=Policy())
        decays = []
        for seed in range(4):
            decays.append(float(adapter.decay()))
            adapter(images(seed=seed))
        assert decays == pytest.approx([1 / 2, 2 / 3, 3 / 4, 3 / 4])
        assert float(adapter.state_dict()["state.followed"]) == 4
        with torch.no_grad():
            adapter.adapted["fc.bias"].fill_(math.inf)
        adapter(images())
        assert (float(adapter.followed), adapter.skipped) == (4, 1)
        adapter.reset()
        assert float(adapter.decay()) == 0.5

    def test_no_source_is_asked_without_views(self) -> None:
        adapter = petal.Petal(network(), **flagship())
        calls = []
        adapter.source.register_forward_hook(lambda *_: calls.append(1))
        adapter(images())
        assert not calls
        assert not adapter.views_used


class TestCalibrate:
    """The temperature by NumPy, from what the same adapter says without one: learning does not depend on it."""

    PAIRS = ("teacher+teacher-flip", "student+teacher-flip", "student-view+teacher")

    @pytest.mark.parametrize("engine", [False, True])
    @pytest.mark.parametrize("pair", PAIRS)
    def test_the_temperature_follows(self, pair: str, engine: bool) -> None:
        model = network()
        with torch.no_grad():
            model.fc.weight.mul_(3)                     # too sure by far
        plain, warm = (petal.Petal(model, **(flagship() | {"calibrate": c, "augment": moved})) for c in (None, pair))
        if engine:
            petal.accelerate(warm, policy=Policy())
        heat, seen = 0.0, []
        for seed in range(12):
            x = images(40, seed=seed)
            said = {}
            for name in pair.split("+"):
                who, _, how = name.partition("-")
                with torch.no_grad():
                    shown = moved(x) if how == "view" else x.flip(-1) if how == "flip" else x
                    said[name] = plain.logits(plain.teacher if who == "teacher" else plain.model, shown).argmax(1).numpy()
            answer = plain(x).numpy() / math.exp(heat)
            np.testing.assert_allclose(warm.predict(x).numpy(), answer, atol=1e-3)
            np.testing.assert_allclose(warm(x).numpy(), answer, atol=1e-3)
            p = np.exp(answer - answer.max(1, keepdims=True))
            sure = (p / p.sum(1, keepdims=True)).max(1).mean()
            one, other = said.values()
            heat = min(max(heat + 0.1 * (sure - (one == other).mean()), 0.0), math.log(4))
            assert float(warm.log_temperature) == pytest.approx(heat, abs=1e-3)
            seen.append(heat)
        assert max(seen) > 0.01

    def test_comes_down_again_and_never_sharpens(self) -> None:
        adapter = petal.Petal(network(), **(flagship() | {"calibrate": "teacher+student", "lr": 0.0}))
        assert str(adapter).count("no surer than teacher and student agree") == 1
        adapter(images())                               # the two are the same: they always agree
        assert float(adapter.log_temperature) == 0
        adapter.log_temperature.fill_(0.5)
        for seed in range(40):
            adapter(images(seed=seed))
        assert float(adapter.log_temperature) < 0.1

    def test_rises_to_four_at_most(self) -> None:
        adapter = petal.Petal(network(), **(flagship() | {"calibrate": "teacher+student"}))
        one, other = 99 * torch.eye(5), 99 * torch.eye(5).roll(1, 0)        # all sure, and never of one opinion
        for _ in range(20):
            adapter.temper(one, one, other)
        assert float(adapter.log_temperature.exp()) == pytest.approx(4)

    def test_is_state(self) -> None:
        adapter = petal.Petal(network(), **(flagship() | {"calibrate": "student-view+teacher"}))
        for seed in range(3):
            adapter(images(seed=seed))
        adapter.log_temperature.fill_(0.25)
        state = adapter.state_dict()
        assert float(state["state.log_temperature"]) == 0.25
        adapter.reset()
        assert float(adapter.log_temperature) == 0
        with torch.no_grad():
            adapter.adapted["fc.bias"].fill_(math.nan)
        adapter(images())
        assert float(adapter.log_temperature) == 0      # of answers that are not finite nothing is learned
        adapter.load_state_dict(state)
        assert torch.equal(adapter.log_temperature, state["state.log_temperature"])

    @pytest.mark.parametrize("pair", ["teacher", "teacher+student+teacher-flip"])
    def test_two_members(self, pair: str) -> None:
        with pytest.raises(petal.ConfigError, match="calibrate names two members"):
            petal.Petal(network(), **(flagship() | {"calibrate": pair}))

    def test_unknown_members(self) -> None:
        with pytest.raises(petal.ConfigError, match=r"calibrate must be one of .*'student-view', got 'agreement'"):
            petal.Petal(network(), **(flagship() | {"calibrate": "agreement"}))


class TestJitter:
    def test_a_share_of_the_spread_of_each_number(self) -> None:
        x = torch.randn(4000, 3) * torch.tensor([1.0, 10.0, 0.0]) + 5
        noise = petal.Jitter(0.2)(x, generator=torch.Generator().manual_seed(0)) - x
        assert noise.std(0).tolist() == pytest.approx([0.2, 2.0, 0.0], rel=0.1)
        assert torch.equal(petal.Jitter(0.0)(x), x)

    @pytest.mark.parametrize("count", [1, 3])
    def test_of_few_images(self, count: int) -> None:
        """One image has no spread, and stays as it is."""
        x = torch.rand(count, 4)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).numpy()
        expected = x.numpy() + 0.3 * x.numpy().std(0) * noise
        np.testing.assert_allclose(petal.Jitter(0.3)(x, generator=torch.Generator().manual_seed(7)), expected, rtol=1e-5)

    def test_bad_values(self) -> None:
        with pytest.raises(petal.ConfigError, match="share of Jitter"):
            petal.Jitter(-0.1)


class TestAdapt:
    def test_one_line(self) -> None:
        plain = petal.Petal(network(), **flagship())
        alone = petal.adapt(network(), memory=0, engine="eager")
        shuffled = petal.adapt(network(), shuffled=True, engine="eager")
        for seed in range(3):
            x = images(40, seed=seed)
            answer = plain(x)
            for adapter in (alone, shuffled):
                assert isinstance(adapter, petal.Guard)
                assert torch.equal(adapter(x), answer)

    def test_print_says_what_was_chosen(self) -> None:
        text = str(petal.adapt(network()))
        for words in (
            "ConvNet, 1,185 parameters, of which all adapt", "min(0.001, 1.15 / fan-in), vectors 0.0003; Adam once a batch",
            "accelerated, on cpu", "from the batch and a view of it (Views(per_sample=True))",
            "teacher + teacher-flip + student", "follows by 0.999", "starts at the network; no prior",
            "large batches in no order as they are; else every 64 images a memory of 200", "a prior for the next label",
            "rollback, looks every 10 batches",
        ):  # fmt: skip
            assert words in text, words
        assert len(text.splitlines()) < 15

    def test_what_must_not_be_done_to_an_input(self) -> None:
        unflipped = petal.adapt(network(), flip=False)
        assert (unflipped.target, unflipped.answer, unflipped.augment.flip) == (("teacher",), ("teacher", "student"), 0)
        grey = petal.adapt(network(), colour=False).augment
        ranges = {name: getattr(grey, name) for name in ("brightness", "contrast", "saturation", "gamma", "hue")}
        assert set(map(tuple, ranges.values())) == {(1, 1), (0, 0)}
        assert (ranges["hue"], grey.flip, grey.degrees) == ((0, 0), 0.5, (-15, 15))
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
        vectors = petal.adapt(model, images=False)
        before = vectors.state_dict()
        assert vectors(torch.rand(200, 4)).shape == (200, 3)
        assert not torch.equal(vectors.state_dict()["model.0.weight"], before["model.0.weight"])

    def test_own_augment_and_options(self) -> None:
        adapter = petal.adapt(network(), augment=moved, guard=False, memory=0, lr=0.5, ema=0.9, steps=2, engine="eager")
        assert (adapter.augment, adapter.rates, adapter.ema, adapter.steps) == (moved, 0.5, 0.9, 2)
        assert type(adapter) is petal.Petal
        assert adapter.executor is None
        with pytest.raises(petal.ConfigError, match="leave flip, colour and images out"):
            petal.adapt(network(), augment=moved, flip=False)

    @pytest.mark.parametrize("net", ["group-norm", "vit"])
    def test_without_batch_norm_the_rates_are_higher(self, net: str) -> None:
        assert petal.adapt(network(net)).rates == petal.FanIn(3.45, 3e-3, 9e-4)
        assert petal.adapt(network()).rates == petal.FanIn()

    def test_with_a_posterior(self) -> None:
        q = petal.DiagonalGaussian.isotropic(network(), std=0.05)
        adapter = petal.adapt(network(), q)
        assert "starts at its mean" in str(adapter)
        assert adapter(images()).isfinite().all()
