import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from petal.data import digits, from_torch, streams
from petal.errors import DataError


class Items(Dataset):
    def __init__(self, items):
        self.items, self.read = items, 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.read += 1
        return self.items[index]


def test_tensor_dataset():
    x, y = torch.rand(5, 3, 4, 4), torch.arange(5)
    data = from_torch(TensorDataset(x, y), name="mine")
    got, labels = data.batch([4, 2])
    assert torch.equal(got, x[[4, 2]])
    assert labels.tolist() == [4, 2]
    assert data.labels.tolist() == [0, 1, 2, 3, 4]
    assert data.name == "mine"


def test_pictures_and_bytes():
    raw = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    data = from_torch(Items([(Image.fromarray(raw), 1), (torch.from_numpy(raw).permute(2, 0, 1), np.int64(0))]))
    x, y = data.batch([0, 1])
    np.testing.assert_array_equal(x[0].numpy(), raw.transpose(2, 0, 1).astype(np.float32) / 255)
    assert torch.equal(x[0], x[1])
    assert y.tolist() == [1, 0]


def test_targets_save_a_pass_over_the_images():
    items = Items([(torch.zeros(3, 2, 2), k) for k in range(4)])
    items.targets = [0, 1, 2, 3]
    assert from_torch(items).labels.tolist() == [0, 1, 2, 3]
    assert items.read == 0
    items.target_transform = lambda y: y + 1
    assert from_torch(items).labels.tolist() == [0, 1, 2, 3]
    assert items.read == 4                  # the transform may have changed them: what the items say counts


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((torch.full((3, 2, 2), 1.5), 0), "put normalisation in the model"),
        ((torch.full((3, 2, 2), torch.nan), 0), "must lie in"),
        ((torch.zeros(1, 2, 2), 0), r"found tensor \[1, 2, 2\]"),
        (("image", 0), "found str"),
        ((torch.zeros(3, 2, 2), 0.5), "whole-number"),
        ((torch.zeros(3, 2, 2), 7), r"0\.\.1; found 7"),
        ((torch.zeros(3, 3, 3), 1), "where others are"),
        (torch.zeros(3, 2, 2), "expected \\(image, label\\)"),
    ],
)
def test_wrong_items(item, message):
    data = from_torch(Items([(torch.zeros(3, 2, 2), 0), item]), classes=["a", "b"])
    with pytest.raises(DataError, match=message):
        data.batch([0, 1])


def test_iterable_datasets_have_no_order():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(DataError, match="map-style"):
        from_torch(Endless())


def test_in_a_stream():
    data = from_torch(TensorDataset(torch.rand(5, 3, 4, 4), torch.arange(5)))
    batches = list(streams.single(data, batch_size=2))
    assert torch.cat([b.y for b in batches]).tolist() == [0, 1, 2, 3, 4]
    assert streams.single(data).fingerprint()["data"]["labels"] is None


def test_digits():
    train, test = digits("train"), digits("test")
    assert (len(train), len(test)) == (1000, 797)
    x, y = train.batch(range(1000))
    assert x.shape == (1000, 3, 32, 32)
    assert x.min() == 0
    assert x.max() == 1
    assert torch.equal(x[:, 0], x[:, 2])
    assert sorted(set(y.tolist())) == list(range(10))
    assert torch.equal(digits("train").batch([17])[0], x[17:18])
    everything = {image.numpy().tobytes() for image in torch.cat([x, test.batch(range(797))[0]])}
    assert len(everything) == 1797          # the splits share no image
    with pytest.raises(DataError, match="'train' and 'test'"):
        digits("val")


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    small = torch.nn.functional.avg_pool2d(digits("test").batch(range(797))[0][:, 0], 4) * 16
    known = torch.from_numpy(load_digits().images).float()
    distance = torch.cdist(small.flatten(1), known.flatten(1))
    assert (torch.from_numpy(load_digits().target)[distance.argmin(1)] == digits("test").labels).float().mean() > 0.99
