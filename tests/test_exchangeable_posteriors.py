"""Posteriors that PETAL can be given: each against dense algebra in NumPy, and all of them through a step."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import petal
from networks import images, network
from petal.engine import Policy
from petal.recommended import flagship


def low_rank(model: nn.Module, rank: int = 3, seed: int = 0, **options: Any) -> petal.LowRankGaussian:
    g = torch.Generator().manual_seed(seed)
    parts = {name: p.detach() for name, p in model.named_parameters()}
    mean = {name: p + 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype) for name, p in parts.items()}
    var = {name: 0.1 + torch.rand(p.shape, generator=g, dtype=p.dtype) for name, p in parts.items()}
    factors = {name: torch.randn((rank, *p.shape), generator=g, dtype=p.dtype) for name, p in parts.items()}
    return petal.LowRankGaussian(mean, var, factors=factors, **options)


def flat(values: dict[str, Tensor]) -> np.ndarray:
    return np.concatenate([value.detach().double().numpy().ravel() for value in values.values()])


def dense(q: petal.LowRankGaussian) -> np.ndarray:
    """The covariance, written out."""
    rows = np.concatenate([f.double().flatten(1).numpy() for f in q.factors.values()], 1)
    return np.diag(flat(dict(q.var)) + q.damping) + rows.T @ rows


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()


class TestLowRank:
    @pytest.mark.parametrize("damping", [0.0, 0.3])
    @pytest.mark.parametrize("rank", [1, 3, 40])
    def test_log_prob_and_gradient_against_dense_algebra(self, rank: int, damping: float) -> None:
        model = small_net()
        q = low_rank(model, rank, damping=damping)
        parameters = dict(model.named_parameters())
        difference = flat(parameters) - flat(dict(q.mean))
        pulled = np.linalg.solve(dense(q), difference)
        value = q.log_prob(model)
        value.backward()
        assert value.item() == pytest.approx(-0.5 * difference @ pulled, rel=1e-9)
        np.testing.assert_allclose(flat({n: p.grad for n, p in parameters.items()}), -pulled, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(flat(q.score(parameters)), -pulled, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(flat(q.variance()), np.diag(dense(q)) - damping, rtol=1e-12)

    def test_in_single_precision(self) -> None:
        model = small_net()
        q = low_rank(model, damping=1e-6)
        single = q.to(dtype=torch.float32)
        parameters = dict(model.named_parameters())
        got = flat(single.score({n: p.detach().float() for n, p in parameters.items()}))
        np.testing.assert_allclose(got, flat(q.score(parameters)), rtol=1e-3, atol=1e-4)

    def test_samples_have_its_mean_and_covariance(self) -> None:
        model = nn.Linear(2, 1).double()
        q = low_rank(model, 2, damping=0.2)
        g = torch.Generator().manual_seed(1)
        drawn = np.stack([flat(q.sample(g)) for _ in range(20_000)])
        covariance = dense(q)
        np.testing.assert_allclose(drawn.mean(0), flat(dict(q.mean)), atol=5 * np.sqrt(covariance.max() / 20_000))
        np.testing.assert_allclose(np.cov(drawn.T), covariance, atol=0.06 * covariance.max())

    def test_file(self, tmp_path: Path) -> None:
        q = low_rank(network(), damping=1e-3, buffers={"b": torch.ones(2)}, confidence=0.75)
        q.save(tmp_path / "q")
        for found in (petal.LowRankGaussian.load(tmp_path / "q"), petal.load_posterior(tmp_path / "q")):
            assert isinstance(found, petal.LowRankGaussian)
            assert (found.damping, found.confidence) == (1e-3, 0.75)
            for group in ("mean", "var", "factors", "buffers"):
                mine, theirs = getattr(q, group), getattr(found, group)
                assert mine.keys() == theirs.keys()
                assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        with pytest.raises(petal.PosteriorError, match="'petal-posterior-lowrank-1'"):
            petal.DiagonalGaussian.load(tmp_path / "q")

    def test_factors_that_do_not_fit(self) -> None:
        one = {"w": torch.ones(2), "v": torch.ones(3)}
        none, some = {"w": torch.ones(0, 2), "v": torch.ones(0, 3)}, {"w": torch.ones(1, 2), "v": torch.ones(2, 3)}
        for factors in ({}, {"w": torch.ones(1, 2)}, some, none, one):
            with pytest.raises(petal.PosteriorError, match="factors are K >= 1 rows"):
                petal.LowRankGaussian(one, one, factors=factors)
        with pytest.raises(petal.PosteriorError, match=r"'v'.*not finite"):
            petal.LowRankGaussian(one, one, factors={"w": torch.ones(1, 2), "v": torch.full((1, 3), math.nan)})


class TestSwag:
    @pytest.fixture(autouse=True)
    def dropout(self) -> None:
        torch.manual_seed(0)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return [(images(seed=s), torch.arange(12) % 5) for s in range(3)]

    def test_the_factors_are_the_last_deviations(self) -> None:
        seen: list[dict[str, Tensor]] = []
        options: dict[str, Any] = {"epochs": 2, "snapshots_per_epoch": 3, "lr": 0.05}
        q = petal.fit_swag(network(), self.batches(), rank=4, on_snapshot=seen.append, **options)
        torch.manual_seed(0)
        diagonal = petal.fit_swag(network(), self.batches(), **options)
        assert isinstance(q, petal.LowRankGaussian)
        for name, mean in q.mean.items():
            path = np.stack([point[name].double().numpy() for point in seen])
            deviations = path[-4:] - path.mean(0)
            np.testing.assert_allclose(q.factors[name], deviations / np.sqrt(2 * 3), atol=1e-6)
            np.testing.assert_allclose(q.var[name], path.var(0) / 2, atol=1e-7)
            assert torch.equal(mean, diagonal.mean[name])

    def test_continues_exactly(self) -> None:
        options: dict[str, Any] = {"epochs": 3, "lr": 0.05, "rank": 2}
        states: list[dict[str, Tensor]] = []

        def keep(_: int, state: dict[str, Tensor]) -> None:
            states.append({key: value.clone() for key, value in state.items()})

        whole = petal.fit_swag(network(), self.batches(), on_epoch=keep, **options)
        for state in states[:2]:
            rest = petal.fit_swag(network(), self.batches(), state=state, **options)
            assert isinstance(rest, petal.LowRankGaussian)
            assert all(torch.equal(f, rest.factors[name]) for name, f in whole.factors.items())

    @pytest.mark.parametrize("rank", [0, 1, 7])
    def test_bad_rank(self, rank: int) -> None:
        with pytest.raises(petal.PosteriorError, match=f"from 2 to the number of snapshots, 6; got {rank}"):
            petal.fit_swag(network(), self.batches(), epochs=2, snapshots_per_epoch=3, rank=rank)


class TestLaplace:
    def test_fisher_of_a_linear_classifier(self) -> None:
        """Of softmax regression it is E[(p_c - p_c²) x²], which needs no labels and no gradients."""
        model = nn.Linear(4, 3).double()
        with torch.no_grad():
            model.weight.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
        x = torch.randn(40_000, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        q = petal.fit_laplace(model, list(x.split(10)), images=40_000, size=100, prior_precision=2.0)
        with torch.no_grad():
            p = model(x).softmax(1).numpy()
        inputs = np.concatenate([x.numpy(), np.ones((40_000, 1))], 1)
        fisher = ((p - p**2)[:, :, None] * inputs[:, None] ** 2).mean(0)
        got = np.concatenate([q.var["weight"].numpy(), q.var["bias"].numpy()[:, None]], 1)
        np.testing.assert_allclose(1 / got, 100 * fisher + 2.0, rtol=0.1)
        assert all(torch.equal(p, q.mean[n]) for n, p in model.named_parameters())

    def test_each_argument(self) -> None:
        batches = [images(seed=s) for s in range(4)]
        base = petal.fit_laplace(network(), batches, images=24)
        total = sum(float((1 / v - 1).sum()) for v in base.var.values())
        doubled = petal.fit_laplace(network(), batches, images=24, size=48)
        assert sum(float((1 / v - 1).sum()) for v in doubled.var.values()) == pytest.approx(2 * total, rel=1e-3)
        stiff = petal.fit_laplace(network(), batches, images=24, prior_precision=5.0)
        for name, v in base.var.items():
            torch.testing.assert_close(1 / stiff.var[name], 1 / v + 4, rtol=1e-3, atol=1e-3)
        for options in ({"seed": 1}, {"images": 36}):
            other = petal.fit_laplace(network(), batches, **({"images": 24} | options))
            assert not torch.equal(other.var["fc.bias"], base.var["fc.bias"])
        assert petal.fit_laplace(network(), batches, images=24, damping=0.5).damping == 0.5
        seen: list[int] = []
        petal.fit_laplace(network(), batches, images=30, progress=seen.append)
        assert seen == [12, 24, 30]

    @pytest.mark.parametrize("name", ["images", "size", "prior_precision"])
    def test_bad_values(self, name: str) -> None:
        with pytest.raises(petal.ConfigError, match=f"{name} must be"):
            petal.fit_laplace(network(), [images()], **{name: -1})


def test_diagonal_samples() -> None:
    mean, var = {"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([0.25, 4.0])}
    q = petal.DiagonalGaussian(mean, var, damping=0.75)
    g = torch.Generator().manual_seed(0)
    drawn = torch.stack([q.sample(g)["w"] for _ in range(20_000)])
    assert drawn.mean(0).tolist() == pytest.approx([1.0, -2.0], abs=0.06)
    assert drawn.var(0).tolist() == pytest.approx([1.0, 4.75], rel=0.05)
    assert torch.equal(q.sample(torch.Generator().manual_seed(3))["w"], q.sample(torch.Generator().manual_seed(3))["w"])


POSTERIORS = {
    "diagonal": lambda: petal.DiagonalGaussian.isotropic(network(), std=0.05),
    "low rank": lambda: low_rank(network(), damping=1e-2),
    "laplace": lambda: petal.fit_laplace(network(), [images(seed=7)]),
}


@pytest.mark.parametrize("kind", POSTERIORS)
class TestAsPrior:
    def test_the_step(self, kind: str) -> None:
        """With a gradient of zero from the loss, SGD moves the weights by the score alone."""
        q = POSTERIORS[kind]()
        adapter = petal.Petal(network(), q, lr=0.1, views=0, prior_weight=1e-2, restore=None, optimizer=torch.optim.SGD)
        adapter.consistency = lambda logits, target: 0 * logits.sum(1)      # type: ignore[method-assign]
        with torch.no_grad():
            for p in adapter.adapted.values():
                p.add_(0.1)
        before = {name: p.detach().clone() for name, p in adapter.adapted.items()}
        adapter(images())
        for name, score in q.score(before).items():
            torch.testing.assert_close(adapter.adapted[name].detach(), before[name] + 1e-3 * score, rtol=1e-4, atol=1e-6)

    def test_the_engine_agrees(self, kind: str) -> None:
        plain, fast = (
            petal.Petal(network(), POSTERIORS[kind](), views=2, prior_weight=1e-3, confidence=0.99) for _ in range(2)
        )
        petal.accelerate(fast, policy=Policy())
        for seed in range(3):
            torch.testing.assert_close(plain(images(seed=seed)), fast(images(seed=seed)), rtol=1e-3, atol=1e-4)
        for name, p in plain.adapted.items():
            torch.testing.assert_close(p, fast.adapted[name], rtol=1e-3, atol=1e-4)

    def test_the_prior_holds(self, kind: str) -> None:
        ways = []
        for weight in (0.0, 1.0):
            adapter = petal.Petal(network(), POSTERIORS[kind](), views=0, prior_weight=weight, lr=1e-2, answer="student")
            for seed in range(6):
                adapter(images(seed=seed))
            origin = adapter.origin()
            ways.append(sum(float((p.detach() - origin[name]).square().sum()) for name, p in adapter.adapted.items()))
        assert ways[1] < 0.8 * ways[0]

    def test_is_a_posterior(self, kind: str) -> None:
        assert isinstance(POSTERIORS[kind](), petal.Posterior)


class TestConfidence:
    def test_the_quantile_of_the_training_images(self) -> None:
        model = network()
        batches = [(images(40, seed=s), torch.arange(40) % 5) for s in range(5)] + [(images(3), torch.arange(3))]
        q = petal.fit_swag(model, batches, epochs=1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(q.mean[name])
        source = petal.BatchNorm(model)                     # by the statistics of the batch, as the gate asks
        found = np.concatenate([source(x).softmax(1).amax(1).numpy() for x, _ in batches[:5]])
        assert q.confidence == pytest.approx(np.quantile(found, 0.05), abs=1e-6)
        assert petal.Petal(model, q, confidence="auto").confidence == q.confidence
        laplace = petal.fit_laplace(model, [x for x, _ in batches])
        assert laplace.confidence == pytest.approx(q.confidence, abs=1e-6)

    def test_is_kept_with_the_file(self, tmp_path: Path) -> None:
        q = petal.DiagonalGaussian({"w": torch.ones(2)}, {"w": torch.ones(2)}, confidence=0.875)
        q.save(tmp_path / "new")
        assert petal.DiagonalGaussian.load(tmp_path / "new").confidence == 0.875
        assert q.to(dtype=torch.float64).confidence == 0.875
        petal.DiagonalGaussian({"w": torch.ones(2)}, {"w": torch.ones(2)}).save(tmp_path / "old")
        with safe_open(tmp_path / "old", framework="pt") as file:
            assert file.metadata().keys() == {"format", "damping"}      # as before there was a confidence
        assert petal.DiagonalGaussian.load(tmp_path / "old").confidence is None

    def test_unknown(self) -> None:
        q = petal.DiagonalGaussian.isotropic(network(), std=0.05)
        for posterior, options in ((q, {}), (None, {"prior_weight": 0.0})):
            with pytest.raises(petal.ConfigError, match=r'confidence="auto" needs a posterior that knows.*petal fit'):
                petal.Petal(network(), posterior, confidence="auto", **options)
        with pytest.raises(petal.ConfigError, match="confidence must be a number, got 'high'"):
            petal.Petal(network(), q, confidence="high")
        with pytest.raises(petal.PosteriorError, match=r"confidence lies in \[0, 1\], got 1.5"):
            petal.DiagonalGaussian({"w": torch.ones(2)}, {"w": torch.ones(2)}, confidence=1.5)

    def test_a_loader_that_runs_once_has_none(self) -> None:
        assert petal.fit_swag(network(), iter([(images(), torch.arange(12) % 5)]), epochs=1).confidence is None


class TestSamples:
    def test_the_answer_is_the_mean_over_networks_around_the_teacher(self) -> None:
        q = low_rank(network(), damping=1e-3)
        options = flagship() | {"answer": "samples", "target": "teacher", "lr": 0.02, "ema": 0.5, "samples": 3, "seed": 5}
        adapter = petal.Petal(network(), q, **options)
        for seed in range(2):
            x = images(seed=seed)
            drawn = torch.Generator()
            drawn.set_state(adapter.generator.get_state())
            expected = torch.zeros(12, 5)
            for _ in range(3):
                offset = q.sample(drawn)
                weights = {n: p.detach() + offset[n] - q.mean[n] for n, p in adapter.teacher.named_parameters()}
                expected += adapter.logits_with(weights, x).softmax(1) / 3
            torch.testing.assert_close(adapter.predict(x).softmax(1), expected)
            torch.testing.assert_close(adapter(x).softmax(1), expected)

    def test_how_many(self) -> None:
        q = petal.DiagonalGaussian.isotropic(network(), std=0.05)
        one, other = (petal.Petal(network(), q, **flagship() | {"answer": "samples", "samples": n}) for n in (1, 2))
        assert not torch.allclose(one(images()), other(images()))

    @pytest.mark.parametrize("options", [{"answer": "teacher+samples"}, {"lr": petal.PosteriorRates()}])
    def test_needs_a_posterior(self, options: dict[str, Any]) -> None:
        with pytest.raises(petal.ConfigError, match="needs a posterior"):
            petal.Petal(network(), **(flagship() | options))

    def test_bad_number(self) -> None:
        with pytest.raises(petal.ConfigError, match="samples must be a whole number from 1, got 0"):
            petal.Petal(network(), **(flagship() | {"samples": 0}))


class TestPosteriorRates:
    def test_rates(self) -> None:
        q = low_rank(network())
        adapter = petal.Petal(network(), q, lr=petal.PosteriorRates(0.02, 0.038))
        got = {id(p): group["lr"] for group in adapter.optimizer.param_groups for p in group["params"]}
        capped = set()
        for name, p in adapter.adapted.items():
            deviation = np.sqrt(np.mean(q.var[name].numpy() + (q.factors[name].numpy() ** 2).sum(0)))
            assert got[id(p)] == pytest.approx(min(0.038, 0.02 * deviation), rel=1e-5), name
            capped.add(bool(0.02 * deviation > 0.038))
        assert capped == {True, False}

    @pytest.mark.parametrize("name", ["share", "most"])
    def test_bad_values(self, name: str) -> None:
        with pytest.raises(petal.ConfigError, match=f"{name} of PosteriorRates must be a number from 0"):
            petal.PosteriorRates(**{name: -1.0})
