"""The real timm, torchvision and transformers, where they are installed: random weights, nothing is downloaded."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import petal
from lookalikes import drop_words, tokens
from methods.made import ENGINES
from networks import images
from petal import models
from petal.apply import Application, apply
from petal.engine import Policy


def library(name: str) -> Any:
    """The package; a skip if it is absent or made for another torch."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"{name} cannot be imported: {error}")


@pytest.fixture
def transformers() -> Any:
    return library("transformers")


def vit(transformers: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).eval()  # type: ignore[no-any-return]


def bert(transformers: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=5
    )
    return transformers.BertForSequenceClassification(config).eval()  # type: ignore[no-any-return]


def tried(adapter: petal.Adapter, engine: str, batches: list[Any]) -> list[Tensor]:
    petal.accelerate(adapter, engine, policy=Policy())
    return [adapter(batch) for batch in batches]


@pytest.mark.parametrize("kind", ["tent", "cotta", "lame", "sar"])
def test_a_vision_transformer_as_it_is(transformers: Any, kind: str) -> None:
    model, batches = vit(transformers), [images(seed=seed) for seed in range(3)]
    plain, fast = (tried(petal.METHODS[kind](model), engine, batches) for engine in ENGINES)
    for one, other in zip(plain, fast, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(petal.Source(model)(batches[0]), model(batches[0]).logits)
    adapter = petal.adapt(model, guard=True, engine="auto")
    result = petal.evaluate(adapter, [{"pixel_values": x, "labels": torch.arange(12) % 5} for x in batches])
    assert result.mean.n == 36


@pytest.mark.parametrize("engine", ENGINES)
def test_a_text_classifier_by_dicts(transformers: Any, engine: str) -> None:
    model, batches = bert(transformers), [tokens(seed=seed) for seed in range(3)]
    encodings = [transformers.BatchEncoding(batch) for batch in batches]
    adapter = petal.adapt(model, augment=drop_words, guard=False, engine="eager")
    answers = tried(adapter, engine, encodings)
    with torch.no_grad():
        torch.testing.assert_close(petal.Source(model)(batches[0]), model(**batches[0]).logits)
    assert all(answer.shape == (12, 5) for answer in answers)
    assert any(not torch.equal(p, adapter.origin()[name]) for name, p in adapter.adapted.items())
    labelled = [batch | {"labels": torch.arange(12) % 5} for batch in batches]
    q = petal.fit_swag(model, labelled, epochs=1)
    assert petal.evaluate(petal.Petal(model, q, views=2, confidence=2.0, augment=drop_words), labelled).mean.n == 36
    statistics = petal.collect_statistics(model, labelled)
    assert statistics.prototypes.shape == (5, 16)


def test_a_checkpoint_of_transformers_by_name(transformers: Any, tmp_path: Path) -> None:
    model = vit(transformers)
    model.save_pretrained(tmp_path)
    with pytest.raises(petal.ModelError, match=r"transformers:.* cannot be made with 5 classes"):
        models.build(f"transformers:{tmp_path}", 5)             # nothing says how images are normalised
    found = models.build(f"transformers:{tmp_path}", 5, mean=(0.5,) * 3, std=(0.25,) * 3)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "ViTImageProcessor", "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}'
    )
    by_card = models.build(f"transformers:{tmp_path}", 5)
    x = images()
    with torch.no_grad():
        expected = model((x - 0.5) / 0.25).logits
        for network in (found, by_card):
            torch.testing.assert_close(petal.Source(network)(x), expected)
    drawn = models.build(f"transformers:{tmp_path}", 7, pretrained=False, seed=0)
    assert petal.Source(drawn)(x).shape == (12, 7)
    assert by_card.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", ["timm:resnet10t", "torchvision:resnet18"])
def test_networks_of_other_libraries(name: str) -> None:
    library(name.partition(":")[0])
    model = models.build(name, 5, seed=0)
    x = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    adapter = petal.adapt(model, guard=False, engine="eager")
    assert adapter(x).shape == (4, 5)


def test_a_network_with_auxiliary_answers() -> None:
    torchvision = library("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.get_model("googlenet", weights=None, num_classes=5, init_weights=False)
    x, y = torch.rand(2, 3, 64, 64), torch.tensor([0, 1])
    assert type(model.train()(x)).__name__ == "GoogLeNetOutputs"
    assert petal.fit_swag(model, [(x, y)], epochs=1, train_batch_norm=True).mean


def test_images_through_a_checkpoint_with_its_own_card(transformers: Any, tmp_path: Path) -> None:
    """`petal apply` reads classes, names, preprocessing and normalisation from the folder of a Hugging Face checkpoint."""
    model = vit(transformers)
    model.config.id2label = dict(enumerate(("cat", "dog", "bee", "ant", "owl")))
    model.save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "ViTImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "do_resize": True,
        "size": {"height": 8, "width": 8}, "resample": 3,
    }))  # fmt: skip
    pictures = np.random.default_rng(0).integers(0, 256, (6, 20, 30, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=pictures)
    settings = Application(f"transformers:{tmp_path / 'vit'}", pretrained=True, method="source", batch_size=3)
    opened = settings.open(tmp_path / "images.npz", torch.device("cpu"))
    assert opened.preprocessing == models.Preprocessing((8, 8), None, "bicubic", (0.5,) * 3, (0.25,) * 3)
    apply(opened, tmp_path / "p.csv")
    resized = [Image.fromarray(p).resize((8, 8), Image.Resampling.BICUBIC) for p in pictures]
    x = torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1).float() / 255 for p in resized])
    with torch.no_grad():
        expected = model((x - 0.5) / 0.25).logits.argmax(1)
    rows = [line.split(",") for line in (tmp_path / "p.csv").read_text().splitlines()[1:]]
    assert [int(row[1]) for row in rows] == expected.tolist()
    assert [row[2] for row in rows] == [model.config.id2label[int(n)] for n in expected]
    with pytest.raises(petal.ModelError, match="folder of this machine"):
        petal.save_source(tmp_path / "s", model, f"transformers:{tmp_path / 'vit'}", classes=5)


def test_what_libraries_say_of_their_checkpoints() -> None:
    library("timm")
    library("torchvision")
    for name, resize in (("timm:resnet10t", 201), ("torchvision:resnet18", 256)):
        model = models.build(name, 5, seed=0)
        card = models.preprocessing_of(model)
        assert card is not None
        assert (card.resize, card.mean) == (resize, (0.485, 0.456, 0.406))
    count, names = models.checkpoint_classes("torchvision:resnet18")
    assert (count, names[0]) == (1000, "tench")
    assert models.checkpoint_classes("timm:resnet10t")[0] == 1000
