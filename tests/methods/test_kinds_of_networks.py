"""Every method on networks with 2 and with 1,000 classes, in half precision, and with batch norms of vectors."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petal
from methods.golden import augment
from networks import images
from petal.errors import InputError


class Net(nn.Module):
    """Batch norms of images and of vectors; or group and layer norms, which see no other image."""

    def __init__(self, classes: int, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2, bias=False)
        self.norm1 = nn.BatchNorm2d(6) if norm == "batch" else nn.GroupNorm(2, 6)
        self.linear = nn.Linear(6, 8)
        self.norm2 = nn.BatchNorm1d(8) if norm == "batch" else nn.LayerNorm(8)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv(x)).relu().mean((2, 3))
        out: Tensor = self.fc(self.norm2(self.linear(x)).relu())
        return out


def made(method: str, classes: int, dtype: torch.dtype, norm: str = "batch", **options: Any) -> petal.Adapter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(classes, norm).train()
        for seed in range(5):
            model(images(16, seed=seed))
        model = model.eval().to(dtype)
    known = inspect.signature(petal.METHODS[method]).parameters
    given: list[Any] = []
    if "statistics" in known:
        source = [images(16, seed, dtype) for seed in range(3)]
        given = [petal.collect_statistics(model, source, labels="predicted", batch_statistics=method != "petta")]
    if "posterior" in known:
        given = [petal.DiagonalGaussian.isotropic(model, std=0.05)]
    usual = {"memory": 8, "every": 8, "views": 2} | options
    return petal.METHODS[method](model, *given, **{name: value for name, value in usual.items() if name in known})


KINDS = [(2, torch.float32), (1000, torch.float32), (5, torch.bfloat16), (5, torch.float16)]
NORMS = [(method, norm) for method in petal.METHODS for norm in ("batch", "group") if (method, norm) != ("bn", "group")]


@pytest.mark.parametrize(("classes", "dtype"), KINDS)
@pytest.mark.parametrize(("method", "norm"), NORMS)
def test_few_and_many_classes_and_half_precision(method: str, norm: str, classes: int, dtype: torch.dtype) -> None:
    adapter = made(method, classes, dtype, norm)
    for seed, count in enumerate((12, 5, 12)):
        logits = adapter(images(count, seed, dtype))
        assert logits.shape == (count, classes)
        assert logits.dtype == dtype
        assert logits.isfinite().all()
    assert adapter.skipped == 0
    assert all(value.isfinite().all() for value in adapter.weights().values())


@pytest.mark.filterwarnings("ignore:a batch of one sample:petal.PetalWarning")
@pytest.mark.parametrize("method", petal.METHODS)
def test_a_batch_of_one(method: str) -> None:
    """Where no norm looks at the batch. Where one does, an error says so, unless the method has statistics of its own."""
    if method != "bn":
        adapter = made(method, 5, torch.float32, "group")
        assert all(adapter(images(1, seed)).isfinite().all() for seed in range(10))
    adapter = made(method, 5, torch.float32)
    before = adapter.state_dict()
    if not any(isinstance(layer, nn.BatchNorm1d) and layer.running_mean is None for layer in adapter.model.modules()):
        assert all(adapter(images(1, seed)).isfinite().all() for seed in range(10))
        return
    with pytest.raises(InputError, match="give two images or more at a time, or put SmallBatch around the method"):
        adapter(images(1))
    assert all(torch.equal(value, before[key]) for key, value in adapter.state_dict().items())
    small = petal.SmallBatch(adapter, memory=8, every=8)
    assert all(small(images(1, seed)).isfinite().all() for seed in range(17))


@pytest.mark.parametrize("method", ["deyo", "roid", "cmf"])
def test_one_sample_that_counts_is_seen_beside_the_others_where_it_has_to_be(method: str) -> None:
    """ROID and DeYO look at the samples that count as a batch of their own: a batch norm of vectors can't do with one."""
    seen: list[int] = []

    def change(x: Tensor) -> Tensor:
        seen.append(len(x))
        return augment(x)

    counted = {"batch": 0, "group": 0}
    for norm in counted:
        for seed in range(12):
            seen.clear()
            adapter = made(method, 5, torch.float32, norm, augment=change, destroy=change, margin=0.85, plpd=-2)
            if method == "deyo":
                x = images(8, seed)
                logits = adapter.predict(x)
                sure = petal.functional.entropy(logits).sort().values
                adapter.margin = float(sure[:2].mean() / torch.tensor(5.0).log())
            else:
                x = images(2, seed)
            assert adapter(x).isfinite().all()
            counted[norm] += seen == [1]
            assert norm == "group" or seen == [len(x)]
    assert counted["group"] == 12
    assert counted["batch"] == 0
