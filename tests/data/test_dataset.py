import numpy as np
import pytest
import torch

from petal.data import CorruptedDataset, from_arrays
from petal.errors import DataError

from .fakes import toy


def test_layouts_and_types_give_the_same_images():
    bytes_last = np.random.default_rng(0).integers(0, 256, (5, 6, 7, 3), dtype=np.uint8)
    x, y = from_arrays(bytes_last, [0, 1, 2, 3, 4]).batch([4, 0, 4])
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert x.shape == (3, 3, 6, 7)
    assert y.tolist() == [4, 0, 4]
    np.testing.assert_array_equal(x.numpy(), bytes_last[[4, 0, 4]].transpose(0, 3, 1, 2).astype(np.float32) / 255)
    as_float = from_arrays(torch.from_numpy(bytes_last).permute(0, 3, 1, 2) / 255, torch.arange(5))
    torch.testing.assert_close(as_float.batch(torch.tensor([4, 0, 4]))[0], x, rtol=0, atol=0)


def test_empty_batch():
    x, y = toy().batch([])
    assert x.shape == (0, 3, 4, 4)
    assert y.shape == (0,)
    assert y.dtype == torch.int64


@pytest.mark.parametrize("indices", [[23], [-1], [0.5], [[1, 2]]])
def test_indices_outside_are_refused(indices):
    with pytest.raises(DataError, match="toy"):
        toy().batch(indices)


@pytest.mark.parametrize(
    ("images", "labels", "classes", "message"),
    [
        (np.zeros((2, 4, 4, 3), np.uint8), [0], None, "expected 2 labels"),
        (np.zeros((2, 4, 4, 3), np.uint8), [0, 2], "ab", "0..1; found 2"),
        (np.zeros((2, 4, 4, 3), np.uint8), [0, -1], None, "found -1"),
        (np.zeros((2, 4, 4, 3), np.uint8), [0.0, 1.0], None, "whole-number"),
        (np.zeros((2, 4, 4, 3), np.int32), [0, 1], None, "expected uint8"),
        (np.zeros((2, 4, 4), np.uint8), [0, 1], None, "colour"),
        (np.zeros((2, 4, 4, 1), np.uint8), [0, 1], None, "colour"),
    ],
)
def test_wrong_arrays_are_refused(images, labels, classes, message):
    with pytest.raises(DataError, match=message):
        from_arrays(images, labels, classes=classes)


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), 255.0])
def test_float_images_outside_the_unit_range_are_refused(value):
    images = torch.full((2, 3, 4, 4), 0.5)
    images[1, 0, 0, 0] = value
    data = from_arrays(images, [0, 1], name="mine")
    data.batch([0])
    with pytest.raises(DataError, match=r"mine: float images must lie in \[0, 1\]"):
        data.batch([1])


def test_fingerprint_tells_data_apart():
    assert toy().fingerprint() == toy().fingerprint()
    assert toy(n=22).fingerprint() != toy().fingerprint()
    assert toy(seed=1).fingerprint() != toy().fingerprint()


def test_a_corrupted_dataset_has_no_clean_images():
    class Mine(CorruptedDataset):
        name = "mine"
        labels = torch.zeros(3, dtype=torch.int64)

        def __len__(self):
            return 3

        def corrupted(self, name, severity):
            return toy(3)

    with pytest.raises(DataError, match="corrupted"):
        Mine().batch([0])
