"""CIFAR-10/100 as published (Python batches), CIFAR-10-C/CIFAR-100-C (npy files) and `.npz` packs.

The Python batches are pickles. A pickle can name any function and have it called, so they are read by an unpickler
that knows three names, gives each a harmless stand-in of its own, and refuses every other.
"""

import math
import pickle
import zipfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petal.data.dataset import (
    ArrayDataset,
    CorruptedDataset,
    Dataset,
    check_labels,
    check_severity,
    read_manifest,
    to_unit,
)
from petal.errors import DataError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SEVERITIES = 5


def map_npy(path: Path) -> NDArray[Any]:
    """An npy file mapped into memory, nothing of it read yet but its header."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected a NumPy array there")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a whole NumPy array file, or one that holds objects ({error})") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: expected one NumPy array (.npy), found an archive")
    return array


class CifarC(CorruptedDataset):
    """A CIFAR-10-C or CIFAR-100-C folder: `<corruption>.npy` uint8 [5n, 32, 32, 3], severities stacked, `labels.npy`.

    `classes` is the number of classes or their names; by default 100 if the folder's name says 100, else 10 if it
    says 10 or all labels are below 10. Files are mapped into memory: only the rows of a batch are ever read.
    A folder that `petal corrupt` wrote says itself which classes, image size and severities it has.
    """

    def __init__(
        self, path: str | Path, *, classes: int | Sequence[str] | None = None, name: str | None = None
    ) -> None:
        self.path = Path(path)
        where = self.path / "labels.npy"
        labels = map_npy(where)
        if len(labels.shape) != 1 or len(labels) == 0 or len(labels) % SEVERITIES:
            raise DataError(f"{where}: expected a label for each image of each of the {SEVERITIES} severities,"
                            f" a multiple of {SEVERITIES}; found shape {list(labels.shape)}")
        self._size = len(labels) // SEVERITIES
        written = read_manifest(self.path)
        if written and classes is None:
            classes = written.get("classes") or int(labels.max()) + 1
            name = name or f"{written['data']['name']}-c"
        self._image_size = tuple(written.get("size", (32, 32)))
        self._severities = tuple(written.get("severities", range(1, SEVERITIES + 1)))
        if isinstance(classes, Sequence):
            self.classes = tuple(classes)
        count = classes if isinstance(classes, int) else len(classes) if classes else self._guess(labels)
        check_labels(labels, len(labels), count, str(where))
        blocks = labels.reshape(SEVERITIES, self._size)
        if not (blocks == blocks[0]).all():
            raise DataError(f"{where}: expected the same {self._size} labels once per severity, in the same order")
        self._labels = blocks[0]
        if count == 10 and self.classes is None and not written:
            self.classes = CIFAR10_CLASSES
        self.name = name or f"cifar{count}-c"
        self._maps: dict[str, NDArray[Any]] = {}

    def _guess(self, labels: NDArray[Any]) -> int:
        if "100" in self.path.name:
            return 100
        return 10 if "10" in self.path.name or int(labels.max()) < 10 else 100

    def __len__(self) -> int:
        return self._size

    @property
    def labels(self) -> Tensor:
        """All labels, int64 [n]; the same at every severity."""
        return torch.from_numpy(np.array(self._labels, dtype=np.int64))

    @property
    def corruptions(self) -> tuple[str, ...]:
        """The corruptions that have a file here, by name."""
        return tuple(sorted(file.stem for file in self.path.glob("*.npy") if file.name != "labels.npy"))

    def corrupted(self, name: str, severity: int) -> ArrayDataset:
        """The n images of one corruption and severity: rows (severity - 1) n onwards of its file."""
        where = self.path / f"{name}.npy"
        if check_severity(severity) not in self._severities:
            raise DataError(f"{where}: was written without severity {severity}; it has {self._severities}")
        if name not in self._maps:
            if name not in self.corruptions:
                here = ", ".join(self.corruptions) or "no corruption"
                raise DataError(f"{where}: no such file; {self.path} has {here}")
            images = map_npy(where)
            expected = (SEVERITIES * self._size, *self._image_size, 3)
            if images.shape != expected or images.dtype != np.uint8:
                raise DataError(f"{where}: expected uint8 {list(expected)} ({SEVERITIES} severities of the"
                                f" {self._size} labelled images), found {images.dtype} {list(images.shape)}")
            self._maps[name] = images
        rows = self._maps[name][(severity - 1) * self._size : severity * self._size]
        return ArrayDataset(rows, self._labels, name=f"{self.name}/{name}/{severity}", classes=self.classes,
                            where=str(where))


class Cifar(Dataset):
    """CIFAR-10 or CIFAR-100 from its published Python batches; the images are read when first needed."""

    def __init__(self, path: str | Path, *, split: str = "test") -> None:
        if split not in ("train", "test"):
            raise DataError(f"the splits of CIFAR are 'train' and 'test', not {split!r}")
        self.path = _cifar_folder(Path(path))
        ten = (self.path / "test_batch").is_file()
        self.files = (
            [self.path / f"data_batch_{k}" for k in range(1, 6)] if ten and split == "train"
            else [self.path / ("test_batch" if ten else split)]
        )
        for file in self.files:
            if not file.is_file():
                raise DataError(f"{file}: no such file; expected a Python batch of CIFAR-{10 if ten else 100}")
        self._label_key = "labels" if ten else "fine_labels"
        self._count = 10 if ten else 100
        self.name = f"cifar{self._count}-{split}"
        self.classes = CIFAR10_CLASSES if ten else None

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        parts = [self._read_file(file) for file in self.files]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _read_file(self, file: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        content = read_batch(file)
        images, labels = content.get("data"), content.get(self._label_key)
        if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != 3072:
            found = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
            raise DataError(f"{file}: expected 'data' as uint8 [N, 3072], found {found}")
        if not isinstance(labels, list) or not all(type(label) is int for label in labels):
            raise DataError(f"{file}: expected {self._label_key!r} as a list of whole numbers")
        numbers = check_labels(np.array(labels, dtype=np.int64), len(images), self._count, str(file))
        return images.reshape(-1, 3, 32, 32), numbers

    def __len__(self) -> int:
        return len(self._arrays[1])

    @property
    def labels(self) -> Tensor:
        """All labels, int64 [len]."""
        return torch.from_numpy(self._arrays[1])

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The whole split is in memory, as uint8, once anything of it has been read."""
        images, labels = self._arrays
        return to_unit(images[indices], self.name), torch.from_numpy(labels[indices])


def _cifar_folder(path: Path) -> Path:
    """`path`, or the folder the published archive unpacks to below it."""
    tried = [path, path / "cifar-10-batches-py", path / "cifar-100-python"]
    for folder in tried:
        if (folder / "test_batch").is_file() or ((folder / "test").is_file() and (folder / "meta").is_file()):
            return folder
    raise DataError(f"{path}: no CIFAR Python batches; looked for test_batch (CIFAR-10) and for test with meta"
                    f" (CIFAR-100) in {', '.join(map(str, tried))}")


class _DType:
    """Stand-in for numpy.dtype: keeps the code and ignores its state (one-byte numbers have no byte order)."""

    __slots__ = ("code",)

    def __init__(self, code: object) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Stand-in for the empty array that numpy's own reconstruction fills: holds bytes until they are checked."""

    __slots__ = ("value",)

    def __init__(self, *ignored: object) -> None:
        self.value: NDArray[np.uint8] | None = None

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple(shape), _DType(code="u1"), bool() | int() as columns_first, bytes(raw)):
                if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) != len(raw):
                    raise pickle.UnpicklingError(f"an array of shape {shape} with {len(raw)} bytes")
                self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if columns_first else "C")
            case _:
                raise pickle.UnpicklingError("an array that is not plain uint8")


class _BatchUnpickler(pickle.Unpickler):
    """Knows the names that a pickled uint8 array uses, as stand-ins, and no others."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="bytes")
        # New for every file: a pickle may set attributes on what it is given, and they must not outlive it.
        self._known: dict[str, Callable[..., object] | str] = {
            "numpy.ndarray": "ndarray",
            "numpy.dtype": lambda code, *ignored: _DType(code),
            "_codecs.encode": _encode_latin1(),
        }
        for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            self._known[f"{module}._reconstruct"] = lambda *ignored: _Array()

    def find_class(self, module: str, name: str) -> object:
        """The stand-in for `module.name`; anything else is refused before it is even imported."""
        try:
            return self._known[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR batch needs") from None


def _encode_latin1() -> Callable[..., bytes]:
    """How Python 3 writes bytes in a protocol-2 pickle: `_codecs.encode(text, "latin1")`; no other codec."""

    def encode(text: object, codec: object = None) -> bytes:
        if not isinstance(text, str) or codec not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("an encoding other than latin1")
        return text.encode("latin1")

    return encode


def read_batch(path: str | Path) -> dict[str, Any]:
    """The dictionary in a CIFAR Python batch: numbers, text, lists, uint8 arrays; nothing in the file is executed."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = _BatchUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise DataError(f"{path}: not a CIFAR Python batch: {error}") from error
    except Exception as error:          # a broken pickle can fail in any way; it never gets to run anything
        raise DataError(f"{path}: truncated or not a CIFAR Python batch ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a dictionary, found {type(content).__name__}")
    unpacked = {}
    for key, value in content.items():
        text = key.decode("latin1") if isinstance(key, bytes) else str(key)
        unpacked[text] = value.value if isinstance(value, _Array) else value
    return unpacked


def npz(
    path: str | Path, *, name: str | None = None, classes: Sequence[str] | None = None
) -> ArrayDataset:
    """An `.npz` with `images` (uint8 or float in [0, 1], either layout) and `labels`.

    Arrays stored without compression (`numpy.savez`) are mapped and streamed; compressed ones are read into memory.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected an .npz with images and labels")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
            missing = [key for key in ("images", "labels") if f"{key}.npy" not in members]
            if missing:
                held = ", ".join(member.removesuffix(".npy") for member in members) or "nothing"
                raise DataError(f"{path}: expected arrays images and labels, found {held}")
            images, labels = (npz_member(path, archive, f"{key}.npy") for key in ("images", "labels"))
    except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: truncated, or not an .npz of plain arrays ({error})") from error
    return ArrayDataset(images, labels, name=name or path.stem, classes=classes, where=str(path))


def npz_member(path: Path, archive: zipfile.ZipFile, member: str) -> NDArray[Any]:
    """One array of an npz: mapped where it lies uncompressed in the file, otherwise read."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{member} has npy format {version}, not 1.0 or 2.0")
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(file)
        start = file.tell()
    if dtype.hasobject:
        raise ValueError(f"{member} holds Python objects")
    info = archive.getinfo(member)
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if info.compress_type != zipfile.ZIP_STORED or size == 0:
        with archive.open(member) as file:
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
    if start + size > info.file_size:
        raise ValueError(f"{member} says {shape} {dtype} but holds {info.file_size - start} bytes")
    with path.open("rb") as raw:        # the local header's lengths may differ from the directory's
        raw.seek(info.header_offset + 26)
        lengths = raw.read(4)
    body = info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return np.memmap(path, dtype, "r", body + start, shape, order="F" if fortran else "C")
