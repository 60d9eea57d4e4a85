"""Recognising the kind of dataset at a path."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petal import corruptions
from petal.data.cifar import Cifar, CifarC, npz
from petal.data.dataset import Dataset, read_manifest
from petal.data.folders import IMAGENET_3DCC, SUFFIXES, CorruptedTree, image_folder, imagenet_3dcc, imagenet_c
from petal.data.torch_data import digits
from petal.errors import DataError


@dataclass(frozen=True)
class Kind:
    """A kind of dataset: its looks in words, a test of a path for them, and the function that opens it."""

    looks: str
    fits: Callable[[Path], bool]
    open: Callable[..., Dataset]


def _has_tree(path: Path, names: tuple[str, ...]) -> bool:
    """A `<corruption>/<severity>` folder of one of `names`, in `path` or one folder below."""
    if not path.is_dir():
        return False
    roots = [path, *(folder for folder in path.iterdir() if folder.is_dir())]
    return any((root / name / f"{k}").is_dir() for root in roots for name in names for k in range(1, 6))


def _has_cifar(path: Path) -> bool:
    places = (path, path / "cifar-10-batches-py", path / "cifar-100-python")
    return any((p / "test_batch").is_file() or ((p / "test").is_file() and (p / "meta").is_file()) for p in places)


def _has_class_folders(path: Path) -> bool:
    if not path.is_dir():
        return False
    folders = (folder for folder in path.iterdir() if folder.is_dir())
    return any(file.suffix.lower() in SUFFIXES for folder in folders for file in folder.iterdir())


def _open_tree(path: Path, **options: Any) -> Dataset:
    """ImageNet-C, or a tree that `petal corrupt` wrote, whose images are taken as they are."""
    if written := read_manifest(path):
        return CorruptedTree(path, **{"size": None, "name": f"{written['data']['name']}-c", **options})
    return imagenet_c(path, **options)


# Tried in this order; the first that fits is opened.
KINDS: dict[str, Kind] = {
    "npz": Kind("an .npz file with images and labels", lambda path: path.suffix == ".npz" and path.is_file(), npz),
    "cifar-c": Kind(
        "a folder with labels.npy and <corruption>.npy files", lambda path: (path / "labels.npy").is_file(), CifarC
    ),
    "cifar": Kind("the Python batches of CIFAR-10 (test_batch) or CIFAR-100 (test and meta)", _has_cifar, Cifar),
    "imagenet-3dcc": Kind(
        "<corruption>/<severity>/<class>/<image> with corruptions such as near_focus",
        lambda path: _has_tree(path, IMAGENET_3DCC),
        imagenet_3dcc,
    ),
    "imagenet-c": Kind(
        "<corruption>/<severity>/<class>/<image> with corruptions such as fog",
        lambda path: _has_tree(path, (*corruptions.CORRUPTIONS, *corruptions.VALIDATION_CORRUPTIONS)),
        _open_tree,
    ),
    "image-folder": Kind("<class>/<image> folders", _has_class_folders, image_folder),
}


def open_dataset(path: str | Path, kind: str | None = None, **options: Any) -> Dataset:
    """The dataset at `path`, of a `kind` in `KINDS` or of the first that fits; `options` go to what opens it.

    `"digits"`, `"digits:train"` and `"digits:test"` are the embedded digits.

    >>> open_dataset("digits:train")
    <ArrayDataset digits-train: 1000 images>
    """
    if kind is not None and kind not in KINDS:
        raise DataError(f"no kind of dataset is called {kind!r}; there are {', '.join(KINDS)}")
    family, _, split = str(path).partition(":")
    if family == "digits" and kind is None and not Path(path).exists():
        return digits(split or "test")
    path = Path(path)
    if kind is None:
        looked = "; ".join(f"{name}: {known.looks}" for name, known in KINDS.items())
        if not path.exists():
            raise DataError(f"{path}: no such file or folder; looked for {looked}")
        kind = next((name for name, known in KINDS.items() if known.fits(path)), None)
        if kind is None:
            raise DataError(f"{path}: no dataset recognised; looked for {looked}")
    return KINDS[kind].open(path, **options)
