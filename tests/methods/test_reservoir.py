"""ReservoirTTA against runs of the authors' code, and what becomes of domains."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.field import close
from methods.golden import OPTIMIZERS, augment, fast, read, small
from petal.errors import ConfigError, StatisticsError
from petal.methods.clusters import Clusters
from petal.recipes.settings import SGD

RATES = {"adam": 0.005, "sgd": 0.0003}
ORDER = (0, 0, 0, 1, 1, 1, 0, 2, 2, 1, 0, 3, 3, 4, 1, 2, 0, 5, 4, 1, 0, 2, 3, 3, 0, 1, 2, 0, 4, 5, 0, 1, 3, 2)
CASES = [(kind, norm, opt) for kind in ("tent", "eta", "eata", "roid") for norm in ("batch", "group") for opt in OPTIMIZERS]
CASES += [("sar", "batch", "sgd"), ("sar", "group", "sgd")]


def changed(x: Tensor, domain: int) -> Tensor:
    """The same images in one of six domains."""
    mixed = (x + 0.3 * x.flip(2)).clamp(0, 1)
    return [x, x * 0.5 + 0.2, mixed, x.roll(1, 3) * 0.7 + 0.3 * x, 1 - x * 0.3, x * x][domain]


def stream(norm: str = "batch", dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[Tensor]]:
    """The network, and batches of six domains in turn, two of them short."""
    model, x = small(norm, dtype)
    batches = [changed(x[number % 6], domain) for number, domain in enumerate(ORDER)]
    batches[17], batches[-1] = batches[17][:9], batches[-1][:7]
    return model, batches


def style(x: Tensor) -> Tensor:
    """The style of the golden runs: variances of pixels, and of differences of neighbours, by channel."""
    edges = x[..., 1:] - x[..., :-1]
    return torch.cat([x.var((0, 2, 3)).log(), edges.var((0, 2, 3)).log()])


def source(dtype: torch.dtype = torch.float64) -> petal.SourceStatistics:
    """Styles of the source batches of the golden runs."""
    batches = [small()[1][b, :20].roll(s, 2) * (1 - 0.02 * s) for b in range(6) for s in range(2)]
    return petal.SourceStatistics(styles=torch.stack([style(x) for x in batches]).to(dtype))


def base(kind: str, model: nn.Module, optimizer: str) -> petal.Adapter:
    """The method inside, with the settings of the golden runs."""
    common: dict[str, Any] = {"lr": RATES[optimizer], "optimizer": OPTIMIZERS[optimizer], "seed": 7}
    if kind == "tent":
        return petal.Tent(model, **common)
    if kind == "sar":
        common["optimizer"] = SGD(momentum=0.9)
        return petal.SAR(model, margin=0.9, reset_threshold=0.2, reset_optimizer=True, frozen=(), **common)
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


def reservoir(kind: str, model: nn.Module, optimizer: str = "adam", **options: Any) -> petal.Reservoir:
    """Around it, with the settings of the golden runs."""
    dtype = next(model.parameters()).dtype
    given = {"statistics": source(dtype), "capacity": 4, "buffer": 24, "quantile": 0.25, "style": style} | options
    return petal.Reservoir(base(kind, model, optimizer), **given)


def run(adapter: petal.Reservoir, batches: list[Tensor]) -> tuple[Tensor, list[int]]:
    """The last answers, and the domain of each batch."""
    found = [(adapter(x), adapter.active) for x in batches]
    return torch.cat([logits for logits, _ in found[-7:]]), [domain for _, domain in found]


@pytest.mark.parametrize(("kind", "norm", "optimizer"), CASES)
def test_reservoir_is_the_reference(kind: str, norm: str, optimizer: str) -> None:
    """Of SAR the released code, which has one momentum for all domains, was put right before it ran."""
    golden, _ = read("reservoir")
    model, batches = stream(norm)
    adapter = reservoir(kind, model, optimizer)
    assert close(adapter.clusters.threshold, golden["threshold"])
    logits, domains = run(adapter, batches)
    golden = {key.removeprefix(f"{kind}.{norm}.{optimizer}."): value for key, value in golden.items()}
    assert domains == golden["ways"].tolist()
    assert adapter.domains == 4
    assert close(logits, golden["logits"])
    assert close(adapter.own_state()["domains.bank"], golden["bank"])
    assert close(adapter.clusters.mean + adapter.clusters.delta.detach(), golden["centroids"])
    assert close(adapter.clusters.sample, golden["sample"])


def test_the_nearest_domain_alone_is_the_reference_without_ensembling() -> None:
    golden, _ = read("reservoir")
    model, batches = stream()
    adapter = reservoir("eta", model, average=False)
    assert close(run(adapter, batches)[0], golden["nearest.logits"])
    assert close(adapter.own_state()["domains.bank"], golden["nearest.bank"])


@pytest.mark.parametrize("kind", ["eta", "roid", "sar"])
def test_on_the_engine_it_does_the_same(kind: str) -> None:
    plain, quick = (reservoir(kind, stream(dtype=torch.float32)[0], "sgd") for _ in range(2))
    fast(quick)
    batches = stream(dtype=torch.float32)[1][:20]
    (expected, ways), (got, same) = run(plain, batches), run(quick, batches)
    assert quick.executor is not None
    assert same == ways
    assert close(got, expected.double(), 1e-3)
    state, other = plain.state_dict(), quick.state_dict()
    assert state.keys() == other.keys()
    assert all(close(other[key].float(), value.double(), 1e-2) for key, value in state.items() if value.is_floating_point())
    plain.load_state_dict(other)
    assert close(plain(batches[3]), quick(batches[3]).double(), 1e-3)


def test_each_domain_has_its_own_optimizer_and_declared_state() -> None:
    model, batches = stream()
    adapter = reservoir("eta", model)
    run(adapter, batches[:6])
    state = adapter.own_state()
    others = [number for number in range(adapter.domains) if number != adapter.active]
    steps = {float(state[f"domains.{number}.optimizer.bn1.weight.step"]) for number in others}
    assert len(others) == 3
    assert len(steps) > 1
    means = [state[f"domains.{number}.state.mean"] for number in others if f"domains.{number}.state.mean" in state]
    assert len(means) > 1
    assert not torch.equal(means[0], means[1])


def test_without_statistics_the_first_batches_give_the_threshold() -> None:
    """The largest distance between their styles, so that none of them opens a domain."""
    model, x = small()
    same = [x[0].roll(s, 2) * (1 + 0.01 * s) for s in range(5)]
    adapter = reservoir("tent", model, statistics=None, buffer=40, warmup=5, quantile=1.0)
    for batch in same:
        adapter(batch)
    styles = torch.stack([style(batch) for batch in same])
    assert close(adapter.clusters.threshold, torch.pdist(styles).max().double())
    assert adapter.domains == 1
    assert "learned" in adapter.describe()["reservoir"]
    adapter(1 - x[0] * 0.1)
    assert adapter.domains == 2


def test_a_domain_beyond_the_capacity_is_learned_with_the_nearest() -> None:
    model, batches = stream()
    adapter = reservoir("tent", model, capacity=2)
    before = None
    for x in batches:
        before = adapter.own_state()["domains.bank"]
        near = int(adapter.clusters.distances(style(x)).argmin())
        adapter(x)
    assert adapter.domains == 2
    moved = (adapter.own_state()["domains.bank"] - before).abs().amax(1) > 0
    assert moved.tolist() == [number == near for number in range(2)]


def test_a_short_batch_opens_no_domain() -> None:
    model, batches = stream()
    adapter = reservoir("tent", model, threshold=1e-6, statistics=None)
    adapter(batches[0])
    adapter(batches[3][:9])
    assert adapter.domains == 1
    adapter(batches[3])
    assert adapter.domains == 2


def test_every_setting_changes_something() -> None:
    def answer(**options: Any) -> Tensor:
        model, batches = stream()
        return run(reservoir("eta", model, **options), batches)[0]

    usual = answer()
    changes: dict[str, Any] = {"statistics": None, "capacity": 3, "buffer": 8, "threshold": 1.2, "quantile": 0.6, "lr": 0.05,
                               "average": False, "style": lambda x: style(x)[:4]}  # fmt: skip
    changes["statistics"] = petal.SourceStatistics(styles=source().styles[:4])
    for name, value in changes.items():
        more = {"statistics": petal.SourceStatistics(styles=source().styles[:, :4])} if name == "style" else {}
        assert not close(answer(**{name: value}, **more), usual, 1e-12), name
    learned = {"statistics": None, "buffer": 40}
    assert not close(answer(**learned, warmup=3), answer(**learned, warmup=9), 1e-12)
    own = {"style": None, "statistics": None, "threshold": 0.5}
    assert not close(answer(**own, layers=1), answer(**own, layers=2), 1e-12)


def test_the_style_is_of_the_source_whatever_the_method_has_learned() -> None:
    """Against NumPy: ln of the unbiased variance of what the first two convolutions give, by running statistics."""
    model, batches = stream()
    adapter = petal.Reservoir(petal.Tent(model, 0.1), threshold=5.0, layers=2)
    for x in batches[:3]:
        adapter(x)
    x = batches[3]
    with torch.no_grad():
        first = model.conv1(x)
        second = model.conv2(model.bn1(first).relu())
    expected = [out.numpy().transpose(1, 0, 2, 3).reshape(out.shape[1], -1).var(1, ddof=1) for out in (first, second)]
    assert close(adapter.style(x), torch.cat([torch.from_numpy(values).log() for values in expected]))
    vector = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    x = torch.rand(8, 4, dtype=torch.float64)
    style_of = petal.methods.style.LayerStyle(vector, 1)
    assert close(style_of(x), torch.from_numpy(vector[0](x).detach().numpy().var(0, ddof=1)).log())


def test_styles_are_collected_as_they_are_taken() -> None:
    model, batches = stream()
    known = petal.collect_statistics(model, [*batches[:4], batches[17]], ["styles"])       # the last one is short
    adapter = petal.Reservoir(petal.Tent(model), known, quantile=1.0)
    assert close(known.styles, torch.stack([adapter.style(x) for x in batches[:4]]))
    assert close(adapter.clusters.threshold, torch.pdist(known.styles).max())
    assert close(adapter.clusters.mean, known.styles.mean(0))
    mine = petal.collect_statistics(model, batches[:4], ["styles"], style=style, style_batches=3)
    assert close(mine.styles, torch.stack([style(x) for x in batches[:3]]))
    with pytest.raises(StatisticsError, match="styles need two whole batches or more, and the loader gave 1"):
        petal.collect_statistics(model, batches[:1], ["styles"])


def test_a_refused_batch_opens_nothing() -> None:
    model, batches = stream()

    class Fussy(petal.Tent):
        def step(self, x: Tensor) -> Tensor:
            if len(batches) == 0:
                raise petal.InputError("not today")
            return super().step(x)

    adapter = petal.Reservoir(Fussy(model), threshold=1e-6, style=style, buffer=40, capacity=2)
    adapter(batches[0])
    before, x = adapter.state_dict(), batches[3]
    batches.clear()
    with pytest.raises(petal.InputError, match="not today"):
        adapter(x)
    after = adapter.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_the_sample_of_styles_forgets_slowly() -> None:
    """A reservoir of four whose count starts again at four once it is above forty, by a plain loop."""
    clusters, generator = Clusters(4, 0.0), torch.Generator().manual_seed(1)
    clusters.begin(torch.zeros(1, dtype=torch.float64))
    draws, kept, seen = torch.Generator().manual_seed(1), [], 0
    for number in range(200):
        clusters.learn(torch.tensor([float(number)], dtype=torch.float64), generator)
        if len(kept) < 4:
            kept.append(number)
        else:
            place = int(float(torch.rand((), dtype=torch.float64, generator=draws)) * seen)
            if place < 4:
                kept[place] = number
            seen = 4 if seen > 40 else seen
        seen += 1
    assert clusters.sample[:, 0].tolist() == kept
    assert clusters.seen == seen


def test_a_state_that_does_not_fit_is_refused() -> None:
    model, batches = stream()
    adapter = reservoir("eta", model)
    run(adapter, batches[:6])
    state = adapter.state_dict()
    wrong = {
        "missing 'bank'": {"reservoir.domains.bank": None},
        "instead of up to 4 domains": {"reservoir.domains.bank": state["reservoir.domains.bank"].repeat(2, 1)},
        "unexpected '7.state.mean'": {"reservoir.domains.7.state.mean": torch.zeros(10)},
        "unexpected '0.state.means'": {"reservoir.domains.0.state.means": torch.zeros(10)},
        "missing 'largest'": {"reservoir.largest": None},
        "unexpected 'nothing'": {"reservoir.nothing": torch.zeros(1)},
        "'delta' is": {"reservoir.clusters.delta": torch.zeros(2, 2)},
    }
    for words, change in wrong.items():
        given = {key: value for key, value in (state | change).items() if value is not None}
        with pytest.raises(ConfigError, match=words):
            adapter.load_state_dict(given)
        assert all(torch.equal(value, state[key]) for key, value in adapter.state_dict().items())


def test_a_style_of_another_width_is_refused() -> None:
    model, batches = stream()
    with pytest.raises(StatisticsError, match="of 4 numbers, and those known are of 6"):
        reservoir("tent", model, style=lambda x: style(x)[:4])(batches[0])


@pytest.mark.parametrize(("make", "words"), [
    (lambda model: petal.BatchNorm(model), "it adapts nothing"),
    (lambda model: petal.CMF(model), r"networks that follow the weights \(hidden\)"),
    (lambda model: petal.NOTE(model), "running statistics move"),
    (lambda model: petal.Tent(model, episodic=True), "episodic"),
    (lambda model: petal.ASR(petal.Tent(model)), "wrapped already"),
])  # fmt: skip
def test_methods_that_it_does_not_fit(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"Reservoir makes no sense around .*{words}"):
        petal.Reservoir(make(stream()[0]))


@pytest.mark.parametrize(("options", "words"), [
    ({"capacity": 0}, "capacity must be"), ({"buffer": 3}, "buffer must be a whole number from 16"),
    ({"lr": -1}, "lr must be"),
    ({"quantile": 2}, "quantile must be"), ({"threshold": -1}, "threshold must be"), ({"warmup": 1}, "warmup must be"),
    ({"layers": 0}, "layers must be"), ({"buffer": 64}, "buffer=64 holds 4 styles a domain, fewer than the warmup of 20"),
])  # fmt: skip
def test_settings_that_make_no_sense(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        petal.Reservoir(petal.ETA(stream()[0]), **options)
