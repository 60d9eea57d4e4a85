import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from petal import ConfigError, DiagonalGaussian, ModelError, models
from petal.checkpoint import digest
from petal.data import digits, from_arrays
from petal.recipes import FitSettings, Loader, fit, train
from petal.recipes.fit import TrainProgress, clean_error
from petal.swag import FitProgress

SETTINGS = FitSettings(epochs=3, lr=0.05, batch_size=20, crop=2, flip=False, swag_epochs=2, swag_batch_size=20)


def data(count: int = 60):
    x, y = digits("train").batch(range(count))
    return from_arrays(x, y)


def numbered() -> Tensor:
    """Images whose every pixel says where it came from."""
    image = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).expand(5, 3, 8, 8)
    return image + 64 * torch.arange(3, dtype=torch.uint8).view(1, 3, 1, 1)


@pytest.mark.parametrize("resident", [1 << 30, 0])
def test_plain_batches_are_the_datasets(resident: int) -> None:
    images = numbered()
    loader = Loader(from_arrays(images, [0, 1, 2, 3, 4]), 2, shuffle=False, resident=resident)
    assert len(loader) == 3
    batches = list(loader)
    assert [len(y) for _, y in batches] == [2, 2, 1]
    assert torch.equal(torch.cat([x for x, _ in batches]), images.float() / 255)
    assert torch.cat([y for _, y in batches]).tolist() == [0, 1, 2, 3, 4]


def test_crops_and_flips_are_crops_and_flips() -> None:
    images = numbered()
    padded = np.pad(images[0].numpy(), ((0, 0), (2, 2), (2, 2)))
    crops = [padded[:, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
    both = {c.tobytes() for c in crops} | {c[:, :, ::-1].tobytes() for c in crops}
    loader = Loader(from_arrays(images, [0] * 5), 5, crop=2, flip=True, seed=3)
    seen = set()
    for _ in range(60):
        for x, _ in loader:
            assert x.is_contiguous(memory_format=torch.channels_last)
            seen |= {image.mul(255).round().byte().contiguous().numpy().tobytes() for image in x}
    assert seen <= both
    assert len(seen) > 45  # nearly all of the fifty


def test_an_epoch_follows_from_its_number() -> None:
    def make() -> Loader:
        return Loader(data(), 20, crop=2, flip=True, seed=1)

    first, second = make(), make()
    list(first)
    second.epoch = 1
    for (x, y), (u, v) in zip(first, second, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    assert sorted(torch.cat([y for _, y in make()]).tolist()) == sorted(data().labels.tolist())


def small() -> torch.nn.Module:
    return models.build("small", 10, seed=0, width=8)


class Stop(Exception):
    pass


def test_interrupted_training_continues(tmp_path: Path) -> None:
    def stop(p: TrainProgress) -> None:
        if (p.epoch, p.batch) == (3, 1):
            raise Stop

    whole = train(small(), Loader(data(), 20, crop=2), SETTINGS)
    path = tmp_path / "training.safetensors"
    with pytest.raises(Stop):
        train(small(), Loader(data(), 20, crop=2), SETTINGS, path=path, progress=stop)
    with pytest.raises(ConfigError, match=r"lr was 0.05 and is 0.1"):
        train(small(), Loader(data(), 20, crop=2), replace(SETTINGS, lr=0.1), path=path)
    again = train(small(), Loader(data(), 20, crop=2), SETTINGS, path=path)
    for key, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


class Dropping(torch.nn.Sequential):
    """Draws from torch's own random numbers while it trains."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(3 * 32 * 32, 10))


@pytest.mark.parametrize("make", [small, Dropping])
@pytest.mark.parametrize("at", [(1, 2), (2, 1), (3, 3)])
def test_interrupted_fit_continues_within_the_posterior(
    make: Callable[[], torch.nn.Module], at: tuple[int, int], tmp_path: Path
) -> None:
    settings = replace(SETTINGS, epochs=1, swag_epochs=3, swag_snapshots=2, swag_lr=0.01, swag_augment=True)

    def stop(p: FitProgress) -> None:
        if (p.epoch, p.batch) == at:
            raise Stop

    whole = fit(make(), data(), settings, tmp_path / "whole")
    started: list[int] = []
    with pytest.raises(Stop):
        fit(make(), data(), settings, tmp_path / "cut", on_swag=stop)
    assert not (tmp_path / "cut" / "fit.json").exists()
    if at[0] > 1:
        with pytest.raises(ConfigError, match=r"swag_lr was 0.01 and is 0.02"):
            fit(make(), data(), replace(settings, swag_lr=0.02), tmp_path / "cut")
    torch.manual_seed(99)
    again = fit(make(), data(), settings, tmp_path / "cut", on_swag=lambda p: started.append(p.epoch))
    assert started[0] == at[0]
    assert digest(load_file(again.posterior)) == digest(load_file(whole.posterior))
    assert sorted(p.name for p in again.posterior.parent.iterdir()) == [
        "fit.json", "network.safetensors", "posterior.safetensors",
    ]  # fmt: skip


def test_a_damaged_state_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "collecting.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"collecting.safetensors cannot be continued.*remove it"):
        fit(small(), data(), SETTINGS, tmp_path, trained=True)
    assert path.read_bytes() == b"nothing"


def test_other_weights_data_or_seed_are_not_mixed(tmp_path: Path) -> None:
    def stop(p: FitProgress) -> None:
        if p.epoch == 2:
            raise Stop

    with pytest.raises(Stop):
        fit(small(), data(), SETTINGS, tmp_path, trained=True, on_swag=stop)
    other = small()
    torch.nn.init.zeros_(next(other.parameters()))
    for word, model, images, seed in (("network", other, data(), 0), ("data", small(), data(80), 0),
                                      ("seed", small(), data(), 1)):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{word} was"):
            fit(model, images, SETTINGS, tmp_path, trained=True, seed=seed)


def test_fit_writes_a_network_that_learned_and_its_posterior(tmp_path: Path) -> None:
    report = fit(small(), data(300), replace(SETTINGS, epochs=4), tmp_path, test=digits("test"))
    assert report.error is not None
    assert report.error < 0.5
    model = models.build("small", 10, report.network, width=8)
    assert clean_error(model, digits("test")) == pytest.approx(report.error)
    q = DiagonalGaussian.load(report.posterior)
    q.check(model)
    assert any(float(v.max()) > 0 for v in q.var.values())
    about = json.loads((tmp_path / "fit.json").read_text())
    assert about["settings"]["swag_lr"] == 8e-4
    assert len(about["network"]["sha256"]) == 64
    assert not (tmp_path / "training.safetensors").exists()
    # a trained network is taken as it is
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fit(model, data(), SETTINGS, tmp_path / "more", trained=True)
    kept = models.build("small", 10, tmp_path / "more" / "network.safetensors", width=8)
    assert all(torch.equal(before[k], v) for k, v in kept.state_dict().items())
