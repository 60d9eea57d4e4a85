"""What cards of three libraries say of a network's input, and normalisation as a part of the network."""

from copy import deepcopy
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from petal import ModelError, models
from petal.models import Preprocessing, preprocessing_of
from petal.models.normalize import Normalize, find_normalize
from petal.models.preprocessing import by_timm, by_torchvision, by_transformers, normalising, with_normalisation


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"resize": 0}, "pixels"), ({"crop": (3, -1)}, "pixels"), ({"interpolation": "cubic"}, "one of nearest"),
     ({"mean": (0.5,)}, "belong together")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Preprocessing(**wrong)


def test_json_and_back() -> None:
    whole = Preprocessing(256, (224, 200), "bicubic", (0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    for one in (Preprocessing(), whole, Preprocessing((5, 6))):
        assert Preprocessing.from_json(one.to_json()) == one
    for wrong in ([], {"size": 3}, {"crop": [1]}, {"mean": ["a"], "std": [1]}):
        with pytest.raises(ModelError, match="preprocessing"):
            Preprocessing.from_json(wrong)


def test_the_card_of_timm() -> None:
    card = {"input_size": (3, 224, 224), "crop_pct": 0.9, "interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.2,) * 3}
    assert by_timm(card) == Preprocessing(248, (224, 224), "bicubic", (0.5,) * 3, (0.2,) * 3)
    assert by_timm(card | {"crop_mode": "squash", "crop_pct": 1.0}) == Preprocessing((224, 224), (224, 224), "bicubic",
                                                                                   (0.5,) * 3, (0.2,) * 3)  # fmt: skip
    assert by_timm(card | {"crop_mode": "border"}) is None
    model = nn.Linear(1, 1)
    model.pretrained_cfg = card
    assert preprocessing_of(model) == by_timm(card)


def test_the_card_of_torchvision() -> None:
    how = Enum("InterpolationMode", {"BICUBIC": "bicubic"}).BICUBIC
    preset = SimpleNamespace(resize_size=[256], crop_size=[224], interpolation=how, mean=[0.1] * 3, std=[0.2] * 3)
    assert by_torchvision(preset) == Preprocessing(256, (224, 224), "bicubic", (0.1,) * 3, (0.2,) * 3)
    assert by_torchvision(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ({"size": {"height": 224, "width": 200}, "resample": 2}, Preprocessing((224, 200))),
        ({"size": 224, "resample": 3}, Preprocessing((224, 224), None, "bicubic")),
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True, "resample": 3,
          "image_mean": [0.5] * 3, "image_std": [0.1] * 3},
         Preprocessing(256, (224, 224), "bicubic", (0.5,) * 3, (0.1,) * 3)),
        ({"size": {"shortest_edge": 256}, "crop_size": 224, "do_center_crop": False}, Preprocessing(256)),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, Preprocessing(256, (224, 224), "bicubic")),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875}, Preprocessing((384, 384), (384, 384), "bicubic")),
        ({"size": 224, "do_resize": False, "crop_size": 200, "do_center_crop": True}, Preprocessing(None, (200, 200))),
        ({}, None),
    ],
)  # fmt: skip
def test_the_card_of_hugging_face(card: dict[str, object], expected: Preprocessing | None) -> None:
    assert by_transformers(card) == expected


def test_networks_by_name_say_it_themselves() -> None:
    assert preprocessing_of(models.build("wrn-10-1", 3)) == Preprocessing(32, (32, 32))
    assert preprocessing_of(models.build("vit-tiny", 3, image_size=16)) == Preprocessing(16, (16, 16))
    assert preprocessing_of(models.build("resnet-50", 3)) == Preprocessing(256, (224, 224))
    assert preprocessing_of(nn.Linear(1, 1)) is None


def test_normalisation_becomes_a_part_of_the_network() -> None:
    x = torch.rand(2, 3, 4, 4)
    known = Preprocessing(mean=(0.48145466, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    mean, std = (torch.tensor(values)[:, None, None] for values in (known.mean, known.std))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    expected = plain((x - mean) / std)
    assert normalising(plain, Preprocessing()) is plain
    torch.testing.assert_close(normalising(plain, known)(x), expected)
    found = with_normalisation(plain, Preprocessing(7))
    assert (found.resize, found.std) == (7, known.std)
    assert found.mean == pytest.approx(known.mean, abs=1e-8)
    torch.testing.assert_close(deepcopy(plain).double()(x.double()).float(), expected)
    built = models.build("resnet-50", 2)
    assert isinstance(find_normalize(normalising(built, known)), Normalize)
    torch.testing.assert_close(built.normalize(x), (x - mean) / std)
