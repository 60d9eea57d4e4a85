"""An adapted network in a file: as a state_dict, and as ONNX that another runtime runs to the same numbers."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import petal
from networks import images, network


def adapted(model: nn.Module, *batches: object) -> petal.Adapter:
    adapter = petal.Tent(model, lr=0.1)
    for batch in batches:
        adapter(batch)
    return adapter


class Two(nn.Module):
    """Two inputs by name, a Hugging Face answer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(20, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"logits": self.out(self.norm(self.embed(input_ids).mean(1) * scale[:, None]))}


def tokens(n: int, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(20, (n, 5), generator=random), "scale": torch.rand(n, generator=random)}


def test_the_state_dict_in_a_file_fits_the_users_class(tmp_path: Path) -> None:
    adapter = adapted(network(), images(), images(seed=1))
    exported = adapter.export([images(seed=2)], path=tmp_path / "deep" / "net.safetensors")
    fresh = network()
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    fresh.load_state_dict(load_file(tmp_path / "deep" / "net.safetensors"))
    x = images(seed=3)
    torch.testing.assert_close(fresh.eval()(x), exported(x), rtol=0, atol=0)
    assert not torch.equal(fresh(x), network()(x))


@pytest.mark.parametrize("statistics", [False, True])
def test_onnx(tmp_path: Path, statistics: bool) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    adapter, path = adapted(network(), images(), images(seed=1)), tmp_path / "net.onnx"
    exported = adapter.export([images(seed=2)] if statistics else None, path=path, example=images())
    session = runtime.InferenceSession(str(path))
    assert [i.name for i in session.get_inputs()] == ["input"]
    for n in (12, 5):           # as the example, and of another size
        x = images(n, seed=4)
        (logits,) = session.run(["logits"], {"input": x.numpy()})
        np.testing.assert_allclose(logits, exported(x).detach().numpy(), atol=1e-5)
        np.testing.assert_allclose(logits, adapter.predict(x).numpy(), atol=1e-5 if not statistics else np.inf)
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


def test_onnx_of_a_network_with_two_named_inputs(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    adapter, path = adapted(Two(), tokens(8), tokens(8, seed=1)), tmp_path / "net.onnx"
    adapter.export(path=path, example=tokens(4))
    session, x = runtime.InferenceSession(str(path)), tokens(7, seed=2)
    (logits,) = session.run(["logits"], {name: value.numpy() for name, value in x.items()})
    np.testing.assert_allclose(logits, adapter.predict(x).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "example", "words"),
    [
        ("net.pkl", None, r"written as \.safetensors or \.onnx, by the name of the file; not 'net\.pkl'"),
        ("net.onnx", None, "give example="),
        ("net.onnx", images(1), "two samples or more"),
        ("net.onnx", images() * float("nan"), "NaN or Inf in 12 of 12 samples"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, name: str, example: Tensor | None, words: str) -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(petal.PetalError, match=words):
        adapted(network()).export(path=tmp_path / name, example=example)
    assert not list(tmp_path.iterdir())


class Undecided(nn.Module):
    """Its graph depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.mean().item() > 0.3 else self.inner(x).flip(1)


def test_a_network_that_cannot_be_onnx_is_told(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(petal.ModelError, match="torch cannot make ONNX of this network: "):
        adapted(Undecided()).export(path=tmp_path / "net.onnx", example=images())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_an_absent_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(petal.ConfigError, match=rf"needs {package}: pip install {package}, or 'petal-tta\[onnx\]'"):
        adapted(network()).export(path=tmp_path / "net.onnx", example=images())
