"""Against the statistics of the benchmark's own generator on real CIFAR-10 images."""

import io
import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from petal.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, corrupt, image_keys

ROOT = os.environ.get("PETAL_REAL_DATA", "")
COUNT = 300

pytestmark = [
    pytest.mark.real_data,
    pytest.mark.skipif(not ROOT, reason="PETAL_REAL_DATA names no folder"),
]


@cache
def images() -> torch.Tensor:
    pack = np.load(Path(ROOT) / "data" / "cifar10_test.npz")
    header, bodies, offsets = pack["header"].tobytes(), pack["bodies"].tobytes(), pack["offsets"]
    files = (io.BytesIO(header + bodies[offsets[i] : offsets[i + 1]]) for i in range(COUNT))
    levels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    return torch.from_numpy(levels).permute(0, 3, 1, 2).float() / 255


@cache
def reference() -> dict[str, dict[str, float]]:
    return json.loads((Path(ROOT) / "corruption_reference.json").read_text())


def statistics(out: torch.Tensor, clean: torch.Tensor) -> dict[str, float]:
    o, d = out.double(), out.double() - clean.double()
    return {
        "mean": o.mean().item(),
        "std": o.std(correction=0).item(),
        "rmse": d.square().mean().sqrt().item(),
        "hf": (o.diff(dim=2).abs().mean() + o.diff(dim=3).abs().mean()).item(),
    }


@cache
def ours(name: str, severity: int) -> dict[str, float]:
    out = corrupt(images(), name, severity, keys=image_keys(0, name, severity, range(COUNT)), quantize=True)
    return statistics(out, images())


def test_the_images_are_the_ones_meant() -> None:
    clean = statistics(images(), images())
    assert clean["mean"] == pytest.approx(reference()["clean"]["mean"], abs=1e-5)
    assert clean["std"] == pytest.approx(reference()["clean"]["std"], abs=1e-5)


@pytest.mark.parametrize("severity", [1, 3, 5])
@pytest.mark.parametrize("name", CORRUPTIONS + VALIDATION_CORRUPTIONS)
def test_statistics_are_the_benchmarks(name: str, severity: int) -> None:
    got, expected = ours(name, severity), reference()[f"{name}_{severity}"]
    assert got["mean"] == pytest.approx(expected["mean"], abs=0.01)
    assert got["std"] == pytest.approx(expected["std"], abs=0.02)
    assert got["rmse"] == pytest.approx(expected["rmse"], rel=0.12)
    assert got["hf"] == pytest.approx(expected["hf"], rel=0.12)


@pytest.mark.parametrize("name", ["defocus_blur", "zoom_blur", "contrast", "pixelate", "jpeg_compression", "gaussian_blur"])
def test_what_is_not_random_is_the_benchmarks_to_the_fourth_digit(name: str) -> None:
    for severity in (1, 3, 5):
        got, expected = ours(name, severity), reference()[f"{name}_{severity}"]
        for what, value in got.items():
            assert value == pytest.approx(expected[what], abs=1.5e-4), (what, severity)


@pytest.mark.parametrize("name", CORRUPTIONS + VALIDATION_CORRUPTIONS)
def test_change_grows_and_falls_with_severity_as_the_benchmarks_does(name: str) -> None:
    published = np.diff([reference()[f"{name}_{severity}"]["rmse"] for severity in (1, 3, 5)])
    found = np.diff([ours(name, severity)["rmse"] for severity in (1, 3, 5)])
    assert (published != 0).all()
    assert np.sign(found).tolist() == np.sign(published).tolist()
