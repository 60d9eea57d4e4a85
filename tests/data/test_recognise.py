import numpy as np
import pytest

from petal.data import KINDS, Cifar, CifarC, open_dataset
from petal.errors import DataError

from .test_cifar import cifar_10, cifar_c  # noqa: F401  (fixtures)
from .test_folders import picture, tree

pytestmark = pytest.mark.usefixtures("fake")


def test_npz(tmp_path):
    np.savez(tmp_path / "pack.npz", images=np.zeros((2, 4, 4, 3), np.uint8), labels=[0, 1])
    assert open_dataset(tmp_path / "pack.npz", classes=["a", "b"]).classes == ("a", "b")


def test_cifar_c(cifar_c):  # noqa: F811
    assert isinstance(open_dataset(cifar_c), CifarC)


def test_cifar(cifar_10):  # noqa: F811
    data = open_dataset(str(cifar_10), split="train")
    assert isinstance(data, Cifar)
    assert len(data) == 20


@pytest.mark.parametrize(("name", "corruption"), [("imagenet-c", "fog"), ("imagenet-3dcc", "flash")])
@pytest.mark.parametrize("deeper", ["", "weather"])
def test_trees(tmp_path, name, corruption, deeper):
    tree(tmp_path / deeper, [corruption], per_class=1)
    assert open_dataset(tmp_path).name == name


def test_class_folders(tmp_path):
    (tmp_path / "cats").mkdir()
    picture(0, 8, 8).save(tmp_path / "cats" / "1.png")
    assert open_dataset(tmp_path).classes == ("cats",)


def test_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_dataset("digits").name == "digits-test"
    assert open_dataset("digits:train").name == "digits-train"
    with pytest.raises(DataError, match="'train' and 'test'"):
        open_dataset("digits:val")


def test_says_what_it_looked_for(tmp_path):
    (tmp_path / "file.txt").write_text("")
    for path in (tmp_path, tmp_path / "file.txt", tmp_path / "none"):
        with pytest.raises(DataError) as caught:
            open_dataset(path)
        message = str(caught.value)
        assert str(path) in message
        assert all(name in message and kind.looks in message for name, kind in KINDS.items())


def test_a_kind_that_was_said_is_not_second_guessed(tmp_path):
    with pytest.raises(DataError, match=r"labels\.npy: no such file"):
        open_dataset(tmp_path, "cifar-c")
    with pytest.raises(DataError, match="'cifar10'; there are npz"):
        open_dataset(tmp_path, "cifar10")
