"""What is served, from settings: each of them shows in the adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import petal
from petal.errors import ConfigError
from petal.recipes.fit import save_network
from petal.runs import Experiment
from petal.serve.model import Served, build, kept
from petal.serve.settings import Settings
from serve.parts import same, state

CPU = torch.device("cpu")


def served(source: Path, **settings: Any) -> Served:
    files = {"weights": source / "network.safetensors", "posterior": source / "posterior.safetensors"}
    return build(Settings(**{"recipe": "digits", **files, **settings}), CPU)


def test_method_settings_seed_and_engine(source: Path) -> None:
    plain = served(source)
    assert isinstance(plain.core, petal.Petal)
    assert (plain.core.gate, plain.core.views, plain.core.ema) == ("batch", 16, 0.99)
    assert plain.core.executor is not None
    changed = served(source, fidelity="paper", set=("petal.views=3",), seed=9, engine="eager")
    assert (changed.core.gate, changed.core.views) == ("sample", 3)
    assert changed.core.executor is None
    assert changed.core.generator.initial_seed() == 9
    assert isinstance(served(source, method="tent").core, petal.Tent)
    assert served(source, recipe=None, network="small", set=(), method="bn", classes=10, **_narrow(source)).learns is False


def _narrow(source: Path) -> dict[str, Any]:
    """Weights of the network by its plain name, which is wider than the recipe's."""
    model = petal.models.build("small", 10, seed=0)
    path = source / "plain.safetensors"
    save_network(model, path)
    return {"weights": path}


def test_the_source_is_the_network_as_it_was_given(source: Path) -> None:
    one = served(source)
    x = torch.rand(4, 3, 32, 32)
    network = petal.models.build("small", 10, source / "network.safetensors", width=8)
    one.adapter(x)
    with torch.no_grad():
        assert torch.allclose(one.source.predict(x), network(x), atol=1e-5)
    assert one.unit_pixels
    assert one.distance is not None
    assert one.distance() > 0


def test_a_network_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(classes: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, classes))

    monkeypatch.setitem(petal.models.NETWORKS, "mine", mine)
    model = mine(5).eval()
    save_file(model.state_dict(), tmp_path / "network.safetensors")
    petal.DiagonalGaussian.isotropic(model, std=1e-3).save(tmp_path / "posterior.safetensors")
    one = served(tmp_path, recipe=None, network="mine", classes=5, input=(1, 8, 8))
    x = torch.rand(4, 1, 8, 8)
    with torch.no_grad():
        assert torch.allclose(one.source.predict(x), model(x), atol=1e-5)
    assert one.adapter(x).shape == (4, 5)


def test_another_adapter_like_it(source: Path) -> None:
    one = served(source, seed=4)
    before = state(one.adapter)
    with kept(one.adapter):
        one.adapter(torch.rand(4, 3, 32, 32))
        assert not same(state(one.adapter), before)
    assert same(state(one.adapter), before)
    assert same(state(one.make()), before)


def test_guard_and_small_batch_go_around_the_method(source: Path) -> None:
    one: Any = served(source, guard="freeze", guard_set=("window=9",), small_batch=True)
    assert isinstance(one.adapter, petal.Guard)
    assert (one.adapter.policy, one.adapter.window, one.guard, one.row) == ("freeze", 9, "freeze", "petal")
    assert isinstance(one.adapter.adapter, petal.SmallBatch)
    assert one.core is one.adapter.adapter.adapter
    assert one.learns
    with pytest.raises(ConfigError, match="guard_set is written OPTION=VALUE, got 'window'"):
        served(source, guard="freeze", guard_set=("window",))
    with pytest.raises(ConfigError, match="did you mean window"):
        served(source, guard="freeze", guard_set=("windov=9",))
    with pytest.raises(ConfigError, match="policy must be one of"):
        served(source, guard="freez")


def test_what_goes_around_the_method_is_named_and_set_as_in_petal_run(source: Path) -> None:
    settings = ("guard.window=90", "guard.every=3", "small.memory=16", "petal.views=2", "petal.confidence=2")
    one: Any = served(source, method="petal+small+guard", set=settings, seed=3)
    files = {"weights": str(source / "network.safetensors"), "posterior": str(source / "posterior.safetensors")}
    experiment = Experiment("digits", images=8, batch_size=8, **files)
    twin: Any = experiment.open(CPU).adapter(experiment.rows(["petal+small+guard"], settings)[0], seed=3)
    assert (one.adapter.window, one.adapter.every, one.adapter.adapter.memory) == (90, 3, twin.adapter.memory)
    assert (one.row, one.guard) == ("petal+small+guard", "rollback")
    x = torch.rand(6, 3, 32, 32)
    assert torch.equal(one.adapter(x), twin(x))
    assert same(state(one.adapter), state(twin))
    both: Any = served(source, method="tent+guard", guard="freeze", small_batch=True)      # settings add what is not named
    assert isinstance(both.adapter.adapter, petal.SmallBatch)
    assert both.adapter.policy == "freeze"
    assert served(source, method="tent+guard", guard_set=("window=70",)).adapter.window == 70
    with pytest.raises(ConfigError, match=r"from the inside out: petal\+small\+guard"):
        served(source, method="petal+guard+small")
    with pytest.raises(ConfigError, match="there is no addition to a method 'gard'"):
        served(source, method="petal+gard")


def test_a_network_by_a_function_of_ones_own_that_has_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served_net.py").write_text(
        "from torch import nn\n"
        "def net():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))\n"
    )
    monkeypatch.chdir(tmp_path)
    options = {"recipe": None, "weights": None, "posterior": None, "classes": 5, "input": (3, 8, 8), "method": "tent"}
    one = served(tmp_path, network="served_net:net", set=(), **options)
    assert one.adapter(torch.rand(4, 3, 8, 8)).shape == (4, 5)
    with pytest.raises(ConfigError, match="give the weights of small"):
        served(tmp_path, network="small", set=(), **options)
