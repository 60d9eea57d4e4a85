"""Images in folders: class folders, ImageNet-C and ImageNet-3DCC trees.

Files are decoded by Pillow in `workers` threads (it lets go of the interpreter lock while it decodes and resizes), in
the order asked for. Reading ahead of the model is the stream's `prefetch`.
"""

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from petal.data.dataset import CorruptedDataset, Dataset, check_labels, check_severity, to_unit
from petal.data.orders import order
from petal.errors import DataError

SUFFIXES = frozenset({".jpeg", ".jpg", ".png", ".ppm", ".bmp", ".webp", ".tif", ".tiff"})
IMAGENET_3DCC = order("imagenet-3dcc", 1)


def open_picture(path: Path) -> Image.Image:
    """The image in a file, as RGB; a DataError if it is none."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise DataError(f"{path}: no such image") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: truncated or not an image ({error})") from error


def decode(path: Path, size: int | None = None) -> NDArray[np.uint8]:
    """The image as uint8 [H, W, 3]; with a `size`, its shorter side to 8/7 of that and the centre cut out.

    An image that already is `size` by `size` stays as it is, as ImageNet-C's do. 224 gives the usual resize to 256.
    """
    picture = open_picture(path)
    if size is not None and picture.size != (size, size):
        shorter = round(size * 8 / 7)
        width, height = picture.size
        scale = shorter / min(width, height)
        wide, high = (shorter if side == min(width, height) else int(side * scale) for side in (width, height))
        picture = picture.resize((wide, high), Image.Resampling.BILINEAR)
        left, top = round((wide - size) / 2), round((high - size) / 2)
        picture = picture.crop((left, top, left + size, top + size))
    return np.asarray(picture)


class FileDataset(Dataset):
    """Images in files, `paths[i]` with label `labels[i]`; the class behind every folder layout."""

    def __init__(
        self,
        paths: Sequence[Path],
        labels: NDArray[np.int64],
        *,
        name: str,
        classes: Sequence[str] | None = None,
        size: int | None = None,
        workers: int | None = None,
    ) -> None:
        self.paths = paths
        self.name = name
        self.classes = None if classes is None else tuple(classes)
        self._labels = check_labels(labels, len(paths), None if classes is None else len(classes), name)
        self.size = size
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def labels(self) -> Tensor:
        """All labels, int64 [len]."""
        return torch.from_numpy(self._labels)

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Decodes the files in threads; the order is that of `indices`."""
        paths = [self.paths[i] for i in indices]
        if self.workers > 1 and len(paths) > 1:
            with ThreadPoolExecutor(min(self.workers, len(paths))) as pool:
                images = list(pool.map(lambda path: decode(path, self.size), paths))
        else:
            images = [decode(path, self.size) for path in paths]
        for path, image in zip(paths, images, strict=True):
            if image.shape != images[0].shape:
                raise DataError(f"{path}: is {image.shape[1]}x{image.shape[0]} where {paths[0]} is"
                                f" {images[0].shape[1]}x{images[0].shape[0]}; size=224 (say) brings all to one size")
        x = to_unit(np.stack(images), self.name) if images else torch.empty(0, 3, self.size or 0, self.size or 0)
        return x, torch.from_numpy(self._labels[indices])


def _entries(folder: Path, what: str) -> list[os.DirEntry[str]]:
    """The visible entries of `folder`, by name."""
    try:
        with os.scandir(folder) as found:
            return sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder}: no such folder; expected {what}") from None


def list_classes(folder: Path) -> tuple[str, ...]:
    """The class folders in `folder`, sorted: their position is their label."""
    return tuple(entry.name for entry in _entries(folder, "one folder per class") if entry.is_dir())


def list_images(folder: Path, classes: Iterable[str]) -> list[str]:
    """All images below `folder` as `class/file`, by class, then by name."""
    return [
        f"{label}/{entry.name}"
        for label in classes
        for entry in _entries(folder / label, "the images of a class")
        if Path(entry.name).suffix.lower() in SUFFIXES
    ]


def image_folder(
    path: str | Path,
    *,
    classes: Sequence[str] | None = None,
    size: int | None = None,
    workers: int | None = None,
    name: str | None = None,
) -> FileDataset:
    """Class folders of images. Labels count the sorted folder names, or the names in `classes` if they are given.

    Without `size` images are taken as they are and must agree; `size=224` is resize to 256 and centre crop.
    """
    root = Path(path)
    ids = _reference(root, classes)
    paths = [root / image for image in ids.images]
    return FileDataset(paths, ids.labels, name=name or root.name, classes=ids.classes, size=size, workers=workers)


@dataclass(frozen=True)
class _Ids:
    """Which images a tree has: `class/file` each, with its label."""

    images: tuple[str, ...]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]


def _reference(folder: Path, classes: Sequence[str] | None) -> _Ids:
    """All images of `folder`, which has class folders."""
    found = list_classes(folder)
    names = found if classes is None else tuple(classes)
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise DataError(f"{folder / unknown[0]}: a class folder that is not among the {len(names)} classes given")
    images = list_images(folder, [label for label in names if label in set(found)])
    if not images:
        raise DataError(f"{folder}: no images; expected one folder per class with {', '.join(sorted(SUFFIXES))} files")
    number = {label: k for k, label in enumerate(names)}
    labels = np.array([number[image.partition("/")[0]] for image in images], dtype=np.int64)
    return _Ids(tuple(images), labels, names)


def read_ids(
    path: str | Path, folders: Sequence[str], classes: Sequence[str] | None = None
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """A list of images, one per line: `class/file`, followed on every line or on none by the label (space, tab, comma).

    A line without a label gets its class folder's place in `classes`, or in `folders` where no classes are given. With
    `classes` a label must agree with them. Blank lines and lines that begin with # are skipped.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the list of images ({error})") from error
    number = {label: k for k, label in enumerate(folders if classes is None else classes)}
    labels: dict[str, int] = {}
    given: dict[str, int] = {}
    for row, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{path}, line {row}"
        match = re.fullmatch(r"([^\s,/]+)/([^\s,/]+)(?:[\s,]+(\d+))?", line.strip())
        if match is None or ".." in match.group(1, 2):
            raise DataError(f"{where}: expected class/file, with or without a label after it; found {line!r}")
        folder, image = match[1], f"{match[1]}/{match[2]}"
        if labels and (match[3] is not None) != bool(given):
            raise DataError(f"{where}: expected a label on every line or on none")
        if match[3] is None and folder not in number:
            raise DataError(f"{where}: {folder} is not among the {len(number)} classes")
        label = number[folder] if match[3] is None else int(match[3])
        known = number.get(folder) if classes is not None else given.get(folder)
        if match[3] is not None and label != given.setdefault(folder, label if known is None else known):
            raise DataError(f"{where}: {folder} has label {given[folder]}, not {label}")
        if image in labels:
            raise DataError(f"{where}: {image} is listed more than once")
        labels[image] = label
    if not labels:
        raise DataError(f"{path}: lists no image")
    numbers = np.array(list(labels.values()), dtype=np.int64)
    return tuple(labels), check_labels(numbers, len(labels), None if classes is None else len(classes), str(path))


class CorruptedTree(CorruptedDataset):
    """ImageNet-C or ImageNet-3DCC: `<corruption>/<severity>/<class>/<image>`, also one folder deeper (`blur/...`).

    Labels count the sorted class folders; where only some classes were unpacked, give the whole list in `classes`.
    `ids` is a list of the images to use (`read_ids`), such as the 5,000 of RobustBench; otherwise all images of the
    first corruption found are used, and every other one must have the same.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        ids: str | Path | None = None,
        classes: Sequence[str] | None = None,
        size: int | None = 224,
        workers: int | None = None,
        name: str = "imagenet-c",
        default_order: str = "standard-15",
    ) -> None:
        self.path = Path(path)
        self.name = name
        self.default_order = default_order
        self.size = size
        self.workers = workers
        self._folders = find_corruptions(self.path)
        if not self._folders:
            raise DataError(f"{self.path}: no corruption; expected <corruption>/<severity 1..5>/<class>/<image>")
        self._wanted = None if classes is None else tuple(classes)
        self._ids: _Ids | None = None
        self.listed = ids is not None
        folders = list_classes(self._first)
        self.classes = folders if self._wanted is None else self._wanted
        if ids is not None:
            images, labels = read_ids(ids, folders, classes)
            self._ids = _Ids(images, labels, self.classes)
            place = {folder: k for k, folder in enumerate(self.classes)}
            if any(place.get(image.partition("/")[0]) != label for image, label in zip(images, labels, strict=True)):
                self.classes = None         # the list has its own numbers for the classes and does not name them all

    @property
    def corruptions(self) -> tuple[str, ...]:
        """The corruptions that are here, by name."""
        return tuple(sorted(self._folders))

    @property
    def _first(self) -> Path:
        folder = self._folders[self.corruptions[0]]
        return next(folder / f"{severity}" for severity in range(1, 6) if (folder / f"{severity}").is_dir())

    @cached_property
    def ids(self) -> _Ids:
        """The images used, with their labels; listed once."""
        return self._ids or _reference(self._first, self._wanted)

    def __len__(self) -> int:
        return len(self.ids.images)

    @property
    def labels(self) -> Tensor:
        """All labels, int64 [len]; the same in every corruption."""
        return torch.from_numpy(self.ids.labels)

    def corrupted(self, name: str, severity: int) -> Dataset:
        """The images of one corruption and severity, in the tree's one order."""
        check_severity(severity)
        if name not in self._folders:
            raise DataError(f"{self.path / name}: no such corruption; there are {', '.join(self.corruptions)}")
        folder = self._folders[name] / f"{severity}"
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; expected the images of {name} at severity {severity}")
        return _TreeView(self, folder, name=f"{self.name}/{name}/{severity}")


class _TreeView(FileDataset):
    """One corruption of a tree. Files are compared with the tree's list when the first batch is read."""

    def __init__(self, tree: CorruptedTree, folder: Path, *, name: str) -> None:
        self._tree, self._folder, self._checked = tree, folder, False
        paths = _Paths(folder, tree.ids.images)
        super().__init__(paths, tree.ids.labels, name=name, classes=tree.classes, size=tree.size, workers=tree.workers)

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """As `FileDataset`, after one comparison of the folder with the list."""
        if not self._checked and not self._tree.listed:
            expected, found = set(self._tree.ids.images), set(list_images(self._folder, list_classes(self._folder)))
            for image in sorted(expected ^ found)[:1]:
                what = "missing" if image in expected else f"not in {self._tree._first}"
                raise DataError(f"{self._folder / image}: {what}; expected the same {len(expected)} images in every"
                                f" corruption, found {len(found)} (pass ids= to choose the images)")
        self._checked = True
        return super().read(indices)


class _Paths(Sequence[Path]):
    """`folder / image` for every image, made when asked for: 75 views of a tree share one list."""

    def __init__(self, folder: Path, images: tuple[str, ...]) -> None:
        self._folder, self._images = folder, images

    def __len__(self) -> int:
        return len(self._images)

    @overload
    def __getitem__(self, item: int) -> Path: ...
    @overload
    def __getitem__(self, item: slice) -> list[Path]: ...
    def __getitem__(self, item: int | slice) -> Path | list[Path]:
        if isinstance(item, slice):
            return [self._folder / image for image in self._images[item]]
        return self._folder / self._images[item]


def find_corruptions(root: Path) -> dict[str, Path]:
    """The folders with numbered severities, right below `root` or one folder deeper, by corruption name."""
    def numbered(folder: Path) -> bool:
        return any((folder / f"{severity}").is_dir() for severity in range(1, 6))

    found: dict[str, Path] = {}
    for entry in _entries(root, "a tree of corruptions"):
        if not entry.is_dir():
            continue
        folder = Path(entry.path)
        if numbered(folder):                # below it are classes, which may have numbers for names as well
            found.setdefault(folder.name, folder)
            continue
        for below in _entries(folder, "folders"):
            if below.is_dir() and numbered(Path(below.path)):
                found.setdefault(below.name, Path(below.path))
    return found


def imagenet_c(
    path: str | Path,
    *,
    ids: str | Path | None = None,
    classes: Sequence[str] | None = None,
    size: int | None = 224,
    workers: int | None = None,
) -> CorruptedTree:
    """An ImageNet-C tree; see `CorruptedTree`."""
    return CorruptedTree(path, ids=ids, classes=classes, size=size, workers=workers)


def imagenet_3dcc(
    path: str | Path,
    *,
    ids: str | Path | None = None,
    classes: Sequence[str] | None = None,
    size: int | None = 224,
    workers: int | None = None,
) -> CorruptedTree:
    """An ImageNet-3DCC tree (12 corruptions); see `CorruptedTree`."""
    return CorruptedTree(path, ids=ids, classes=classes, size=size, workers=workers, name="imagenet-3dcc",
                         default_order="imagenet-3dcc")
