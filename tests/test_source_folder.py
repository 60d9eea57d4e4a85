"""A source as a folder: what is written is what is read, on any machine; what is wrong is said."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import petal
from petal import ConfigError, DiagonalGaussian, ModelError, SourceStatistics, models
from petal.models import Preprocessing
from petal.runs import Experiment
from petal.source_folder import read_names

NAMES = ("cat", "dog", "bee", "ant")


def network(**options: object) -> nn.Module:
    return models.build("small", 4, seed=3, width=8, **options).eval()


def saved(folder: Path, **more: object) -> petal.SourceConfig:
    model = network()
    images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    statistics = petal.collect_statistics(model, [(images, torch.arange(8) % 4)], ["prototypes"])
    given = {"class_names": NAMES, "options": {"width": 8}, "posterior": DiagonalGaussian.isotropic(model, 0.1),
             "statistics": statistics}  # fmt: skip
    return petal.save_source(folder, model, "small", **given | more)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")                     # nothing in it knows where it is
    source = petal.load_source(tmp_path / "b")
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(source.model(x), network()(x))
    assert not source.model.training
    assert source.config.class_names == NAMES
    assert (source.config.classes, source.config.input) == (4, (3, 32, 32))
    assert source.posterior is not None
    assert torch.equal(source.posterior.mean["fc.weight"], network().fc.weight)
    assert isinstance(source.statistics, SourceStatistics)
    assert models.preprocessing_of(source.model) == Preprocessing(32, (32, 32))
    assert petal.adapt(source.model, source.posterior)(x).shape == (2, 4)


def test_it_can_be_put_on_a_hub(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved(tmp_path / name)
    files = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    tensors = {f"{part}.safetensors" for part in ("network", "posterior", "statistics")}
    assert files.keys() == {"config.json", "README.md", *tensors}
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}
    assert not any(str(tmp_path).encode() in content for content in files.values())
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: petal-tta\n")
    assert "cat, dog, bee, ant" in card
    for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        exec(block.replace("FOLDER", str(tmp_path / "a")), {})


def test_a_network_that_takes_normalised_images_takes_pixels(tmp_path: Path) -> None:
    mean, std = (0.48145466, 0.4, 0.3), (0.2, 0.25, 0.3)
    saved(tmp_path, preprocessing=Preprocessing(40, (32, 32), "bicubic", mean, std))
    source = petal.load_source(tmp_path)
    x = torch.rand(2, 3, 32, 32)
    wanted = (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(source.model(x), network()(wanted))
    assert source.config.preprocessing.resize == 40
    vit = models.build("vit-tiny", 4, seed=0, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)).eval()
    petal.save_source(tmp_path / "vit", vit, "vit-tiny", classes=4)         # its statistics are no part of its state_dict
    assert torch.equal(petal.load_source(tmp_path / "vit").model(x), vit(x))


def test_weights_that_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tied(nn.Module):
        def __init__(self, classes: int) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, classes), nn.Linear(4, classes)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.two(x)

    monkeypatch.setitem(models.NETWORKS, "tied", Tied)
    model = Tied(3)
    petal.save_source(tmp_path, model, "tied", classes=3)
    x = torch.rand(2, 4)
    assert torch.equal(petal.load_source(tmp_path).model(x), model(x))


def test_a_function_of_ones_own_is_run_only_when_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_here.py").write_text(
        "from torch import nn\nRUN = []\ndef net():\n    RUN.append(1)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    name = "made_here:net"
    model = models.build(name, 4)
    petal.save_source("a", model, name, classes=4, input=(3, 2, 2))
    import made_here

    made_here.RUN.clear()
    with pytest.raises(ModelError, match=r"code of this machine.*network='made_here:net' or --network made_here:net"):
        petal.load_source("a")
    with pytest.raises(ModelError, match="made_here:net"):
        Experiment(source="a")
    assert not made_here.RUN
    x = torch.rand(2, 3, 2, 2)
    assert torch.equal(petal.load_source("a", name).model(x), model(x))
    other = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    assert torch.equal(petal.load_source("a", other).model(x), model(x))
    assert not torch.equal(other(x), model(x))                  # a module that is given stays as it is
    assert torch.equal(Experiment(source="a", network=name).source_network()(x), model(x))
    with pytest.raises(ModelError, match="not of os:abort"):
        petal.load_source("a", "os:abort")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("gone")), "no source at"),
    "no config": (lambda f: (f / "config.json").unlink(), r"no config\.json.*--weights"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "is damaged"),
    "not ours": (lambda f: (f / "config.json").write_text('{"model_type": "vit"}'), "does not describe a source"),
    "another version": (
        lambda f: edit(f, format="petal-source-9", petal="7.0"), r"'petal-source-9', of petal 7\.0; petal .* reads"
    ),
    "no network": (lambda f: (f / "network.safetensors").unlink(), "network.safetensors is missing"),
    "no posterior": (lambda f: (f / "posterior.safetensors").unlink(), "posterior.safetensors is missing"),
    "damaged": (lambda f: flip(f / "network.safetensors"), "is damaged, or was changed"),
    "cut short": (lambda f: (f / "statistics.safetensors").write_bytes(b"x"), "is damaged, or was changed"),
    "files of others": (lambda f: edit(f, files={"../x": "0"}), "files are network.safetensors"),
    "no classes": (lambda f: edit(f, classes="four"), "classes is a whole number"),
    "lacks something": (lambda f: edit(f, files=None), "cannot be used"),
    "names": (lambda f: edit(f, class_names=["a"]), "1 class names for 4 classes"),
    "remote code": (lambda f: edit(f, network="transformers:a/b", options={"trust_remote_code": True}), "trust_remote_code"),
    "a pickle": (lambda f: edit(f, network="timm:resnet18", options={"checkpoint_path": "x.pth"}), "checkpoint_path"),
    "a folder": (lambda f: edit(f, network="transformers:/models/vit", options={}), "folder of this machine"),
    "preprocessing": (lambda f: edit(f, preprocessing={"resize": -1}), "pixels, 1 or more"),
}


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_is_said(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    saved(folder)
    do, words = DAMAGES[damage]
    do(folder)
    with pytest.raises(ModelError, match=words):
        petal.load_source(folder)


def test_what_cannot_be_a_source_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for wrong, words in (
        ({"class_names": None}, "how many classes"), ({"class_names": NAMES[:3]}, "posterior|fc.bias|differ"),
        ({"options": {}}, "they differ in"), ({"options": {"width": print}}, "cannot be part of a source"),
        ({"class_names": NAMES, "classes": 5}, "4 class names for 5 classes"), ({"input": (3, 0, 3)}, "shape of a sample"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=words):
            saved(tmp_path / "a", **wrong)
    with pytest.raises(petal.PosteriorError, match="do not fit"):
        saved(tmp_path / "a", posterior=DiagonalGaussian.isotropic(nn.Linear(1, 1), 0.1))
    with pytest.raises(ModelError, match="folder of this machine"):
        petal.save_source(tmp_path / "a", network(), f"transformers:{tmp_path}", classes=4)
    assert not (tmp_path / "a").exists()


def test_written_again(tmp_path: Path) -> None:
    saved(tmp_path)
    before = (tmp_path / "README.md").read_text()
    saved(tmp_path, class_names=("a", "b", "c", "d"), statistics=None)
    assert not (tmp_path / "statistics.safetensors").exists()
    assert petal.load_source(tmp_path).statistics is None
    again = (tmp_path / "README.md").read_text()
    assert again != before                                      # nobody had edited it
    (tmp_path / "README.md").write_text(again.replace("# small", "# My network"))
    saved(tmp_path)
    assert "# My network" in (tmp_path / "README.md").read_text()


def test_an_experiment_with_a_source(tmp_path: Path) -> None:
    saved(tmp_path / "s")
    experiment = Experiment(source=str(tmp_path / "s"))
    again = replace(experiment, batch_size=7)                   # as a command does it
    assert (again.network, again.classes, again.input) == ("small", 4, (3, 32, 32))
    opened = again.open(torch.device("cpu"))
    assert opened.posterior is not None
    assert opened.statistics is not None
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(opened.model(x), network()(x))
    norms = [m for m in opened.model.modules() if isinstance(m, _BatchNorm)]
    assert norms
    for wrong, words in (
        ({"weights": "w.safetensors"}, "leave one of them out"), ({"network": "wrn-40-2"}, "name two networks"),
        ({"pretrained": True}, "leave one of them out"), ({"classes": 7}, "has 4 classes, and 7 are asked for"),
        ({"recipe": "digits"}, "has 4 classes, and 10 are asked for"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            Experiment(**{"source": str(tmp_path / "s"), **wrong})
    flip(tmp_path / "s" / "network.safetensors")
    with pytest.raises(ModelError, match="damaged"):
        experiment.open(torch.device("cpu"))


def test_names_of_classes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("cat\n dog \n\nbee\n")
    (tmp_path / "b.json").write_text('["cat", "dog", "bee"]')
    (tmp_path / "c.json").write_text('{"0": ["n01", "cat"], "1": ["n02", "dog"], "2": ["n03", "bee"]}')
    for name in ("a.txt", "b.json", "c.json"):
        assert read_names(tmp_path / name) == ("cat", "dog", "bee")
    saved(tmp_path / "s")
    assert read_names(tmp_path / "s") == NAMES
    (tmp_path / "d.json").write_text('{"1": "cat"}')
    (tmp_path / "e.txt").write_text("\n")
    for name, words in (("d.json", "cannot be read"), ("e.txt", "names no class"), ("gone.txt", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            read_names(tmp_path / name)
