import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from networks import ConvNet
from petal import BatchNorm, CoTTA, DiagonalGaussian, Petal, PetalError, Source, Tent
from petal.checkpoint import CheckpointError, Checkpoints, DamagedCheckpoint, load, save


def network(seed: int = 0) -> ConvNet:
    torch.manual_seed(seed)
    return ConvNet("batch").eval()


def adapters() -> dict[str, object]:
    model = network()
    q = DiagonalGaussian.isotropic(model, 0.1)
    return {
        "source": lambda: Source(model),
        "bn": lambda: BatchNorm(model),
        "tent": lambda: Tent(model),
        "cotta": lambda: CoTTA(model, views=3, confidence=2.0, restore=None),
        "petal": lambda: Petal(model, q, views=3, confidence=2.0),
        "petal-sgd": lambda: Petal(
            model, q, views=2, optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True)
        ),
    }


def batches(count: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.rand(6, 3, 8, 8, generator=g) for _ in range(count)]


@pytest.mark.parametrize("name", list(adapters()))
def test_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    make = adapters()[name]
    straight, first, second = make(), make(), make()
    x = batches(5)
    expected = [straight(b) for b in x]
    for b in x[:3]:
        first(b)
    save(first, tmp_path / "a.safetensors", {"position": 3, "note": "ü"})
    assert load(second, tmp_path / "a.safetensors") == {"position": 3, "note": "ü"}
    for b, logits in zip(x[3:], expected[3:], strict=True):
        assert torch.equal(second(b), logits)
    for key, value in straight.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key


def same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_refuses_other_source_posterior_method_and_network(tmp_path: Path) -> None:
    model, other = network(0), network(1)
    q = DiagonalGaussian.isotropic(model, 0.1)
    path = tmp_path / "a.safetensors"
    save(Petal(model, q, views=1), path)
    for wrong, word in (
        (Petal(model, DiagonalGaussian.isotropic(other, 0.1), views=1), "other source weights or posterior"),
        (Petal(model, DiagonalGaussian.isotropic(model, 0.2), views=1), "other source weights or posterior"),
        (CoTTA(model, views=1), "checkpoint of Petal"),
    ):
        before = wrong.state_dict()
        with pytest.raises(CheckpointError, match=word):
            load(wrong, path)
        assert same_state(before, wrong.state_dict())
    save(Tent(model), path)
    with pytest.raises(CheckpointError, match="other source weights"):
        load(Tent(other), path)
    with pytest.raises(CheckpointError, match="another network"):
        load(Tent(network().double()), path)


def test_source_is_recognised_after_adapting(tmp_path: Path) -> None:
    """The fingerprint is of where an adapter started, not of where it is."""
    model = network()
    a, b = Tent(model, lr=0.1), Tent(model, lr=0.1)
    a(batches(1)[0])
    save(a, tmp_path / "a.safetensors")
    load(b, tmp_path / "a.safetensors")
    assert same_state(a.state_dict(), b.state_dict())


def test_every_flipped_byte_and_truncation_is_noticed(tmp_path: Path) -> None:
    adapter = Petal(network(), DiagonalGaussian.isotropic(network(), 0.1), views=1)
    adapter(batches(1)[0])
    path, bad = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save(adapter, path, {"position": 1})
    whole = path.read_bytes()
    before = adapter.state_dict()
    positions = torch.randint(0, len(whole), (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for position in positions:
        broken = bytearray(whole)
        broken[position] ^= 0x10
        bad.write_bytes(broken)
        with pytest.raises(DamagedCheckpoint):
            load(adapter, bad)
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        bad.write_bytes(whole[:size])
        with pytest.raises(DamagedCheckpoint):
            load(adapter, bad)
    assert same_state(before, adapter.state_dict())


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("/tmp/petal-bomb-must-not-exist",)


def test_foreign_files_are_refused_and_never_run(tmp_path: Path) -> None:
    adapter = Source(network())
    bad = tmp_path / "x.safetensors"
    bad.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DamagedCheckpoint):
        load(adapter, bad)
    assert not Path("/tmp/petal-bomb-must-not-exist").exists()
    save_file({"a": torch.zeros(2)}, bad)
    with pytest.raises(DamagedCheckpoint, match="not a petal checkpoint"):
        load(adapter, bad)
    with pytest.raises(CheckpointError, match="no such file"):
        load(adapter, tmp_path / "missing.safetensors")
    with pytest.raises(PetalError, match="cannot write"):
        save(adapter, tmp_path / "no-folder" / "a.safetensors")


def test_two_generations_and_falling_back(tmp_path: Path) -> None:
    model = network()
    adapter, kept = Tent(model), Checkpoints(tmp_path)
    assert kept.latest() is None
    assert kept.load_latest(adapter) is None
    for position, x in enumerate(batches(3)):
        adapter(x)
        kept.save(adapter, {"position": position})
    newest, older = kept.paths()
    assert len(list(tmp_path.iterdir())) == 2
    assert kept.latest() == newest
    assert kept.load_latest(Tent(model)) == {"position": 2}
    assert kept.load_latest(Tent(model), lambda extra: extra["position"] < 2) == {"position": 1}
    newest.write_bytes(newest.read_bytes()[:-7])
    assert kept.latest() == older
    assert kept.load_latest(Tent(model)) == {"position": 1}
    with pytest.raises(CheckpointError, match="other source"):  # whole, but of another network: no falling back
        kept.load_latest(Tent(network(1)))
    (tmp_path / ".checkpoint-9.safetensors.1.tmp").touch()
    kept.clear()
    assert not list(tmp_path.iterdir())
