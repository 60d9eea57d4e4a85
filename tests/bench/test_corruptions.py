import io
import json

import pytest
import torch
from rich.console import Console

from petal.bench import corruptions as bench
from petal.corruptions import CORRUPTIONS
from petal.errors import ConfigError


def test_rows():
    rows = bench.run(images=20, repeat=2)
    assert [row["corruption"] for row in rows] == [*CORRUPTIONS, "total"]
    assert json.loads(json.dumps(rows)) == rows
    for row in rows:
        assert row["images_per_second"] == pytest.approx(row["images"] / row["seconds"])
        assert (row["size"], row["profile"], row["severity"], row["device"]) == (32, "cifar", 5, "cpu")
        assert row["threads"] == torch.get_num_threads()
    assert rows[-1]["seconds"] == pytest.approx(sum(row["seconds"] for row in rows[:-1]))
    assert rows[-1]["images"] == 15 * 20


def test_large_images_have_the_imagenet_profile():
    rows = bench.run(images=2, size=224, corruptions=["contrast", "fog"], severity=3)
    assert [row["corruption"] for row in rows] == ["contrast", "fog", "total"]
    assert {(row["size"], row["profile"], row["severity"]) for row in rows} == {(224, "imagenet", 3)}


def test_memory_is_bounded_and_every_image_is_made(monkeypatch):
    seen, keys = [], []
    monkeypatch.setattr(bench, "_POOL_PIXELS", 7 * 32 * 32)

    def count(x, *arguments, **options):
        if "keys" in options:
            seen.append(len(x))
            keys.extend(options["keys"].tolist())
        return x

    monkeypatch.setattr(bench, "corrupt", count)
    bench.run(images=17, corruptions=["fog"])
    assert seen == [7, 7, 3]
    assert len(set(keys)) == 17


def test_own_images():
    rows = bench.run(images=4, corruptions=["fog"], source=torch.rand(3, 3, 48, 48))
    assert rows[0]["size"] == 48
    assert rows[0]["images"] == 4


def test_made_up_images_look_natural():
    x = bench.natural(200, 32)
    assert x.mean().item() == pytest.approx(0.47, abs=0.02)
    assert x.std().item() == pytest.approx(0.25, abs=0.02)
    neighbours = torch.corrcoef(torch.stack((x[..., 1:].flatten(), x[..., :-1].flatten())))[0, 1]
    channels = torch.corrcoef(torch.stack((x[:, 0].flatten(), x[:, 1].flatten())))[0, 1]
    assert neighbours > 0.8             # 0.95 of photographs of this size, 0 of noise
    assert channels > 0.8
    assert torch.equal(x, bench.natural(200, 32))


def test_table():
    console = Console(file=io.StringIO(), width=100)
    console.print(bench.table(bench.run(images=3, corruptions=["fog", "contrast"])))
    text = console.file.getvalue()
    assert "3 images of 32x32, cifar profile, severity 5" in " ".join(text.split())
    for word in ("fog", "contrast", "total", "images/s", "seconds"):
        assert word in text


@pytest.mark.parametrize("options", [{"images": 0}, {"repeat": 0}, {"size": 0}, {"corruptions": []}])
def test_errors(options):
    with pytest.raises(ConfigError):
        bench.run(**options)
