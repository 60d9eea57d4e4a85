"""Checkpoint files of every make, and of none."""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from petal import models
from petal.errors import ModelError

State = dict[str, Tensor]


@pytest.fixture
def source() -> nn.Module:
    model = models.build("wrn-10-1", classes=4, seed=0)
    model(torch.rand(4, 3, 8, 8))  # running statistics that are not the initial ones
    return model


def fresh() -> nn.Module:
    return models.build("wrn-10-1", classes=4, seed=1)


def same(model: nn.Module, state: State) -> bool:
    return all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def prefixed(state: State, prefix: str) -> State:
    return {prefix + key: value for key, value in state.items()}


FORMS: dict[str, Callable[[State], Any]] = {
    "plain": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3, "arch": "wrn"},
    "model": lambda state: {"model": state, "optimizer": {"state": {}, "param_groups": []}},
    "model_state_dict": lambda state: {"model_state_dict": state, "loss": 0.1},
    "net": lambda state: {"net": state, "acc": 94.0},
    "nested twice": lambda state: {"state_dict": {"model": state}},
    "DataParallel": lambda state: {"state_dict": prefixed(state, "module.")},
    "compiled": lambda state: prefixed(state, "_orig_mod."),
    "compiled DataParallel": lambda state: prefixed(state, "_orig_mod.module."),
    "AugMix": lambda state: {
        "epoch": 1,
        "model": "wrn",
        "dataset": "cifar10",
        "state_dict": prefixed(state, "module."),
        "best_acc": 0.9,
        "optimizer": {"state": {}, "param_groups": []},
    },
    "RobustBench with a normalising wrapper": lambda state: {
        "normalize.mean": torch.zeros(1, 3, 1, 1),
        "normalize.std": torch.ones(1, 3, 1, 1),
        **prefixed(state, "model."),
    },
    "AveragedModel": lambda state: {"n_averaged": torch.tensor(5), **prefixed(state, "module.")},
    "TRADES": lambda state: {**state, **{f"sub_{key}": state[key] for key in state if key.startswith("block1.")}},
    "before num_batches_tracked": lambda state: {k: v for k, v in state.items() if "num_batches_tracked" not in k},
    "half precision": lambda state: {k: v.half() if v.is_floating_point() else v for k, v in state.items()},
}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pth.tar", ".bin", ".ckpt"])
@pytest.mark.parametrize("form", ["plain", "state_dict"])
def test_pickled_suffixes(source: nn.Module, tmp_path: Path, form: str, suffix: str) -> None:
    torch.save(FORMS[form](source.state_dict()), tmp_path / f"w{suffix}")
    assert same(models.load_weights(fresh(), tmp_path / f"w{suffix}"), source.state_dict())


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_checkpoints(source: nn.Module, tmp_path: Path, form: str) -> None:
    torch.save(FORMS[form](source.state_dict()), tmp_path / "w.pt")
    model = fresh()
    assert models.load_weights(model, str(tmp_path / "w.pt")) is model
    expected = dict(source.state_dict())
    if form == "before num_batches_tracked":
        expected |= {key: torch.tensor(0) for key in expected if key.endswith("num_batches_tracked")}
    if form == "half precision":
        expected = {k: v.half().float() if v.is_floating_point() else v for k, v in expected.items()}
    assert same(model, expected)


@pytest.mark.parametrize(
    "form", ["plain", "compiled DataParallel", "RobustBench with a normalising wrapper", "before num_batches_tracked"]
)
def test_safetensors(source: nn.Module, tmp_path: Path, form: str) -> None:
    save_file(FORMS[form](source.state_dict()), tmp_path / "w.safetensors")
    loaded = models.load_weights(fresh(), tmp_path / "w.safetensors")
    assert torch.equal(loaded.fc.weight, source.fc.weight)
    assert torch.equal(loaded.bn1.running_var, source.bn1.running_var)


def test_a_network_whose_own_names_begin_like_a_prefix(tmp_path: Path) -> None:
    def wrapped() -> nn.Module:
        return nn.Sequential(torch.nn.modules.container.OrderedDict(model=nn.Linear(2, 2)))

    source = wrapped()
    torch.save(prefixed(source.state_dict(), "module."), tmp_path / "w.pt")
    assert same(models.load_weights(wrapped(), tmp_path / "w.pt"), source.state_dict())


# Normalisation entries


def resnext(**options: Any) -> nn.Module:
    return models.build("resnext-29", depth=11, base_width=4, **options)


@pytest.mark.parametrize("names", [("mu", "sigma"), ("mean", "std"), ("normalize.mean", "normalize.std")])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_robustbench_normalisation_entries(tmp_path: Path, names: tuple[str, str], prefix: str) -> None:
    source = resnext(seed=0)
    half = torch.full((1, 3, 1, 1), 0.5)
    torch.save(
        {"state_dict": prefixed({**source.state_dict(), names[0]: half, names[1]: half}, prefix)}, tmp_path / "w.pt"
    )
    assert same(models.load_weights(resnext(seed=1), tmp_path / "w.pt"), source.state_dict())


def test_other_normalisation_than_the_network_has(source: nn.Module, tmp_path: Path) -> None:
    half = torch.full((1, 3, 1, 1), 0.5)
    torch.save({**source.state_dict(), "mu": half, "sigma": half}, tmp_path / "w.pt")
    model = fresh()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"normalisation.*mean=\[0.5, 0.5, 0.5\], std=\[0.5, 0.5, 0.5\]"):
        models.load_weights(model, tmp_path / "w.pt")
    assert same(model, before)
    asked = models.build("wrn-10-1", classes=4, mean=[0.5], std=[0.5], weights=tmp_path / "w.pt")  # as the error says
    assert same(asked, source.state_dict())

    torch.save({**resnext().state_dict(), "mu": half, "sigma": half / 2}, tmp_path / "other.pt")
    with pytest.raises(ModelError, match=r"std=\[0.25"):
        models.load_weights(resnext(), tmp_path / "other.pt")


# What does not fit


def refuse(model: nn.Module, path: Path) -> str:
    """Load, expect a refusal that names the file and leaves the network as it was; return the message."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ModelError) as caught:
        models.load_weights(model, path)
    assert path.name in str(caught.value)
    assert same(model, before)
    return str(caught.value)


def test_missing_unexpected_and_wrong_shapes_are_listed(source: nn.Module, tmp_path: Path) -> None:
    state = dict(source.state_dict())
    del state["block2.layer.0.conv1.weight"]
    state["extra.weight"] = torch.zeros(2)
    state["conv1.weight"] = torch.zeros(16, 1, 3, 3)
    torch.save(state, tmp_path / "w.pt")
    message = refuse(fresh(), tmp_path / "w.pt")
    assert "missing: block2.layer.0.conv1.weight" in message
    assert "unexpected: extra.weight" in message
    assert "conv1.weight is 16x1x3x3, the network's 16x3x3x3" in message
    assert "bn1" not in message


def test_long_lists_are_shortened(tmp_path: Path) -> None:
    torch.save({f"features.{i}.weight": torch.zeros(1) for i in range(50)}, tmp_path / "w.pt")
    message = refuse(fresh(), tmp_path / "w.pt")
    assert "features.0.weight" in message
    assert "and 44 more" in message
    assert len(message) < 1200


def test_another_number_of_classes_says_so(tmp_path: Path) -> None:
    torch.save(models.build("wrn-10-1", classes=100).state_dict(), tmp_path / "w.pt")
    assert "classes=100" in refuse(fresh(), tmp_path / "w.pt")


def test_another_width_does_not_speak_of_classes(tmp_path: Path) -> None:
    torch.save(models.build("small", width=8).state_dict(), tmp_path / "w.pt")
    assert "classes=" not in refuse(models.build("small", width=16), tmp_path / "w.pt")


def test_integers_for_weights(source: nn.Module, tmp_path: Path) -> None:
    state = dict(source.state_dict())
    state["fc.weight"] = (state["fc.weight"] * 100).to(torch.int8)
    torch.save(state, tmp_path / "w.pt")
    assert "fc.weight is torch.int8" in refuse(fresh(), tmp_path / "w.pt")


def test_weights_that_are_not_finite(source: nn.Module, tmp_path: Path) -> None:
    state = {key: value.clone() for key, value in source.state_dict().items()}
    state["fc.weight"][0, 0] = float("nan")
    torch.save(state, tmp_path / "w.pt")
    assert "not finite: fc.weight" in refuse(fresh(), tmp_path / "w.pt")


# What is no checkpoint


class Hostile:
    """A pickle that makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".tar"])
@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_hostile_pickles_are_refused_and_not_run(source: nn.Module, tmp_path: Path, suffix: str, how: str) -> None:
    trap, file = tmp_path / "trap", tmp_path / f"hostile{suffix}"
    content = {"state_dict": source.state_dict(), "args": Hostile(trap)}
    if how == "torch.save":
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content))
    assert "run code" in refuse(fresh(), file)
    assert not trap.exists()
    if how == "pickle":  # the trap is a real one
        pickle.loads(file.read_bytes())
        assert trap.exists()


def test_whole_pickled_modules_are_refused(source: nn.Module, tmp_path: Path) -> None:
    torch.save(source, tmp_path / "w.pt")
    assert "state_dict as safetensors" in refuse(fresh(), tmp_path / "w.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kept", [0, 7, 200, -100])
def test_truncated_files(source: nn.Module, tmp_path: Path, suffix: str, kept: int) -> None:
    file = tmp_path / f"w{suffix}"
    (torch.save if suffix == ".pt" else save_file)(source.state_dict(), file)
    file.write_bytes(file.read_bytes()[:kept])
    refuse(fresh(), file)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".tar", ".safetensors"])
@pytest.mark.parametrize("content", [b"<html>not found</html>", b"\x80\x02}q\x00.", b"\x89PNG\r\n" + bytes(64)])
def test_files_that_are_something_else(tmp_path: Path, suffix: str, content: bytes) -> None:
    file = tmp_path / f"w{suffix}"
    file.write_bytes(content)
    refuse(fresh(), file)


def test_other_archives(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refuse(fresh(), tmp_path / "w.pt")


@pytest.mark.parametrize("content", [{"epoch": 3}, {}, [1, 2], torch.zeros(3), {"state_dict": {}}, {"model": "wrn"}])
def test_files_without_weights(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "w.pt")
    refuse(fresh(), tmp_path / "w.pt")


def test_absent_files_folders_and_unknown_suffixes(tmp_path: Path) -> None:
    assert "no such file" in refuse(fresh(), tmp_path / "absent.pt")
    (tmp_path / "folder.pt").mkdir()
    assert "folder" in refuse(fresh(), tmp_path / "folder.pt")
    (tmp_path / "w.npz").write_bytes(b"")
    assert ".safetensors" in refuse(fresh(), tmp_path / "w.npz")
