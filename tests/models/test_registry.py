"""Networks by name, those of other libraries included (fakes stand in for the libraries)."""

import copy
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from petal import models
from petal.errors import ModelError
from petal.recipes import Row
from petal.runs import Experiment


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wrn-28-1O", "wrn-28-10"),
        ("resnet50", "resnet-50"),
        ("WRN_40_2", "wrn-40-2"),
        ("resnext29", "resnext-29"),
        ("nonsense", "choices: wrn-28-10"),
        ("nonsense", "timm:NAME"),
        ("", "wrn-D-W"),
        ("keras:vgg", "torchvision:NAME"),
    ],
)
def test_unknown_names_get_the_choices_and_close_matches(name: str, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        models.build(name)
    assert says in str(caught.value)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["wrn-27-10", "wrn-4-1", "wrn-28-0"])
def test_impossible_wide_resnets(name: str) -> None:
    with pytest.raises(ModelError, match="6 n"):
        models.build(name)


@pytest.mark.parametrize("classes", [0, -1, 2.0, "ten", True])
def test_impossible_classes(classes: Any) -> None:
    with pytest.raises(ModelError, match="classes"):
        models.build("small", classes=classes)


def test_wrong_options_are_named_with_the_right_ones() -> None:
    with pytest.raises(ModelError, match=r"small: .*depth.*norm, width"):
        models.build("small", depth=3)
    with pytest.raises(ModelError, match="dropout, mean, std"):
        models.build("wrn-10-1", drop_rate=0.1)
    with pytest.raises(ModelError, match="'batch' or 'group'"):
        models.build("small", norm="layer")
    with pytest.raises(ModelError, match="9 n"):
        models.build("resnext-29", depth=30)
    with pytest.raises(ModelError, match="multiple of patch"):
        models.build("vit-tiny", image_size=30)


def test_own_networks_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.NETWORKS, "mine", lambda classes: nn.Linear(3, classes))
    assert models.build("mine", classes=4)(torch.rand(2, 3)).shape == (2, 4)


def test_a_seed_fixes_the_weights_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    one, two, three = (models.build("small", seed=seed).fc.weight for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


def test_weights_bring_evaluation_mode(tmp_path: Path) -> None:
    source = models.build("small", classes=3, seed=0)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    loaded = models.build("small", classes=3, weights=str(tmp_path / "w.safetensors"), seed=1)
    assert not loaded.training
    assert source.training
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in loaded.state_dict().items())


# timm and torchvision


class Foreign(nn.Module):
    """A network as a library would make it: no normalisation inside."""

    def __init__(self, num_classes: int, seed: int = 0, **given: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, num_classes)
        self.given = given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.bn(self.conv(x)).mean((2, 3)))
        return out


MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    fake: Any = types.ModuleType("timm")

    def create_model(name: str, num_classes: int, **options: Any) -> nn.Module:
        model: Any = Foreign(num_classes, name=name, **options)
        model.pretrained_cfg = {"mean": MEAN, "std": STD}
        return model  # type: ignore[no-any-return]

    fake.create_model = create_model
    fake.list_models = lambda: ["resnet50", "vit_tiny_patch16_224"]
    monkeypatch.setitem(sys.modules, "timm", fake)
    return fake  # type: ignore[no-any-return]


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    fake: Any = types.ModuleType("torchvision")
    default = types.SimpleNamespace(transforms=lambda: types.SimpleNamespace(mean=list(MEAN), std=list(STD)))
    fake.models = types.SimpleNamespace(
        list_models=lambda: ["resnet18", "resnet50"],
        get_model_weights=lambda name: types.SimpleNamespace(DEFAULT=default),
        get_model=lambda name, weights, num_classes, **options: Foreign(
            num_classes, name=name, weights=weights, **options
        ),
    )
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    return fake  # type: ignore[no-any-return]


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_library_networks_normalise_and_keep_their_names(
    library: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.getfixturevalue(library)
    model: Any = models.build(f"{library}:resnet50", classes=5, extra=1).eval()
    assert model.given["name"] == "resnet50"
    assert model.given["extra"] == 1
    plain = Foreign(5).eval()
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in plain.named_parameters()]
    plain.load_state_dict(model.state_dict())

    x = torch.rand(2, 3, 8, 8)
    by_hand = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(by_hand))
        # also for a copy in another precision: the statistics go with it
        torch.testing.assert_close(copy.deepcopy(model).double()(x.double()).float(), plain(by_hand))
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), plain(by_hand))
    torch.compiler.reset()
    assert models.expected_input(model) == models.UNIT_PIXELS

    save_file({f"model.{key}": value for key, value in plain.state_dict().items()}, tmp_path / "w.safetensors")
    again = models.build(f"{library}:resnet50", classes=5, weights=tmp_path / "w.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(again(x), plain(by_hand))


def test_torchvision_weights_only_when_asked_for(torchvision: types.ModuleType) -> None:
    without: Any = models.build("torchvision:resnet18")
    with_them: Any = models.build("torchvision:resnet18", classes=1000, pretrained=True)
    assert without.given["weights"] is None
    assert with_them.given["weights"] is not None


def test_timm_names_with_a_tag(timm: types.ModuleType) -> None:
    tagged: Any = models.build("timm:resnet50.a1_in1k", pretrained=True)
    assert tagged.given == {"name": "resnet50.a1_in1k", "pretrained": True}


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_unknown_library_networks(library: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(library)
    with pytest.raises(ModelError, match=r"resnet51.*close: resnet50"):
        models.build(f"{library}:resnet51")


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_absent_or_broken_libraries(library: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Callable[..., None]:
        raise error(f"no {name} here")

    monkeypatch.setattr("petal.models.libraries.importlib.import_module", fail)
    with pytest.raises(
        ModelError, match=rf"{library}:resnet50 needs {library}.*no {library} here.*pip install {library}"
    ):
        models.build(f"{library}:resnet50")


# Functions of one's own


NETS = '''
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, width=4):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, width, 3), nn.Linear(width, classes)

    def forward(self, x):
        return {"logits": self.head(self.conv(x).mean((2, 3)))}

class Made:
    net = Net

def ten():
    return Net(10)

def any(**options):
    return Net(**options)

def wrong(classes):
    return "a network"

number = 3
'''


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the working directory."""
    (tmp_path / "nets_of_mine.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    yield "nets_of_mine"
    sys.modules.pop("nets_of_mine", None)


def test_functions_of_ones_own_are_named_by_module(nets: str) -> None:
    path = list(sys.path)
    for name, classes in (("Net", 5), ("Made.net", 5), ("ten", 10), ("any", 5)):
        model = models.build(f"{nets}:{name}", classes=5)
        assert model(torch.rand(2, 3, 8, 8))["logits"].shape == (2, classes)
    assert sys.path == path
    assert models.build(f"{nets}:Net", width=6).conv.out_channels == 6
    assert models.build(f"{nets}:any", width=6).conv.out_channels == 6
    twins = [models.build(f"{nets}:Net", seed=3).head.weight for _ in range(2)]
    assert torch.equal(*twins)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("nowhere:net", {}, "there is no network 'nowhere:net'.*No module named 'nowhere'.*transformers:NAME"),
        ("nets_of_mine:absent", {}, "no attribute 'absent'"),
        ("nets_of_mine:number", {}, "cannot be imported.*not a callable"),
        ("nets_of_mine:wrong", {}, "wrong returned str: it is to return the network"),
        ("nets_of_mine:Net", {"depth": 3}, "its options are: width"),
        ("nets_of_mine:ten", {"depth": 3}, "its options are: none"),
    ],
)
def test_what_is_no_function_that_makes_a_network(nets: str, name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        models.build(name, **options)


def test_an_experiment_takes_a_function_with_weights_of_its_own_or_from_a_file(nets: str, tmp_path: Path) -> None:
    experiment = Experiment(network=f"{nets}:Net", classes=5, input=(3, 8, 8), batch_size=4)
    opened = experiment.open(torch.device("cpu"))
    assert not opened.model.training
    row = Row("source", "Source", "source")
    assert opened.adapter(row)(torch.rand(4, 3, 8, 8)).shape == (4, 5)
    save_file(opened.model.state_dict(), tmp_path / "w.safetensors")
    again = replace(experiment, weights=str(tmp_path / "w.safetensors")).open(torch.device("cpu")).model
    assert all(torch.equal(v, opened.model.state_dict()[k]) for k, v in again.state_dict().items())


# transformers


def test_transformers_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"transformers:some/model needs transformers.*pip install transformers"):
        models.build("transformers:some/model")
