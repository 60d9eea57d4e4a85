import numpy as np
import pytest
import torch
from PIL import Image

from petal.corruptions import corrupt, jpeg


@pytest.mark.parametrize("quality", [1, 7, 25, 40, 49, 50, 58, 80, 95, 100])
def test_tables_are_those_pillow_writes(quality: int, tmp_path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "a.jpg", quality=quality)
    with Image.open(tmp_path / "a.jpg") as image:
        written = image.quantization
    for number, table in enumerate(jpeg.quantisation_tables(quality)):
        assert table.flatten().int().tolist() == list(written[number])


@pytest.mark.parametrize("height,width", [(32, 32), (28, 28), (33, 47), (17, 40), (96, 9)])
@pytest.mark.parametrize("quality", [7, 40, 58, 80, 98])
def test_torch_codec_equals_pillow(height: int, width: int, quality: int) -> None:
    g = torch.Generator().manual_seed(quality)
    noise = torch.rand(4, 3, height, width, generator=g)
    smooth = torch.nn.functional.avg_pool2d(noise, 5, 1, 2)
    x = torch.cat((noise, (smooth - 0.3) * 2.5)).clamp(0, 1)
    ours, theirs = jpeg.jpeg_torch(x, quality), jpeg.jpeg_pillow(x, quality)
    difference = (ours - theirs).abs().mul(255)
    # equal to the last bit with libjpeg-turbo 3.2; another build may round a coefficient the other way
    assert difference.mean() < 0.02, difference.mean()
    assert (difference <= 1.01).float().mean() > 0.999


def test_codecs_through_corrupt(pictures: torch.Tensor) -> None:
    auto, batched, reference = (corrupt(pictures, "jpeg_compression", codec=c) for c in ("auto", "torch", "pillow"))
    assert torch.equal(auto, batched)
    assert (batched - reference).abs().max() <= 2.01 / 255
    assert not torch.equal(auto, pictures)


def test_integer_dct_is_the_dct() -> None:
    k, n = np.arange(8)[:, None], np.arange(8)
    exact = np.cos((2 * n + 1) * k * np.pi / 16) * np.where(k == 0, 1, np.sqrt(2)) * 8192
    assert abs(np.array(jpeg._DCT) - exact).max() < 1.5
