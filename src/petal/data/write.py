"""Writing a corrupted benchmark made of clean images: what the streams compute as they run, as files.

Two layouts. "npy" is CIFAR-10-C's: `<corruption>.npy` uint8 [5n, H, W, 3], severities stacked, and `labels.npy` with the
n labels five times. "folders" is ImageNet-C's: `<corruption>/<severity>/<class>/<image>.png` (or .jpg). Both are read
back by `open_dataset`. A file `petal.json` says what was written and from what; by it a later run recognises the folder.

A corruption's npy file, and a severity's folder, appear whole or not at all. Repeat an interrupted run with the
same arguments: what is finished stays, the rest is made. Pixels are those of a stream over the same images with the
same seed, truncated to 8 bits (JPEG files lose some of that; PNG files do not).
"""

import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from petal import corruptions
from petal._files import replacing
from petal._version import __version__
from petal.data.cifar import SEVERITIES, map_npy
from petal.data.dataset import MANIFEST, CorruptedDataset, Dataset, check_severity, check_whole, read_manifest
from petal.data.folders import FileDataset, list_classes, list_images
from petal.data.streams import StreamBuilder
from petal.errors import DataError

Layout = Literal["auto", "npy", "folders"]
ALL_SEVERITIES = tuple(range(1, SEVERITIES + 1))
#: suffix -> options of Pillow's save; JPEG as in ImageNet-C's files
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG", "compress_level": 1},
    "jpg": {"format": "JPEG", "quality": 85, "optimize": True},
}
_LARGEST_SMALL = 96             # sides up to here are corrupted with CIFAR's constants, larger ones with ImageNet's
_SPARE = 64 << 20               # bytes to leave on the disk
_LEFT_OVER = re.compile(r"\..+\.(\d+)\.(?:tmp|old)")

Put = Callable[[int, int, NDArray[np.uint8]], None]     # severity, first image, images [n, H, W, 3]


@dataclass(frozen=True)
class WriteProgress:
    """How far a run is: images written, of all that it has to write; an image counts once per severity."""

    corruption: str
    done: int
    total: int


@dataclass(frozen=True)
class Written:
    """What a run did. `made` and `kept` name what lies in `path`: `fog.npy`, or `fog/5`."""

    path: Path
    layout: str
    profile: str
    images: int
    made: tuple[str, ...]
    kept: tuple[str, ...]


def write_corrupted(
    data: Dataset,
    out: str | Path,
    *,
    layout: Layout = "auto",
    names: Sequence[str] = corruptions.CORRUPTIONS,
    severities: Sequence[int] = ALL_SEVERITIES,
    profile: corruptions.Profile | Literal["auto"] = "auto",
    seed: int = 0,
    images: int | None = None,
    batch_size: int = 200,
    device: torch.device | str | None = None,
    image_format: str = "png",
    overwrite: bool = False,
    progress: Callable[[WriteProgress], None] | None = None,
) -> Written:
    """Write the corrupted images of `data` to the folder `out`.

    `layout="auto"` is "folders" for images in files and "npy" for others; `profile="auto"` is "cifar" for sides up to 96
    pixels and "imagenet" for larger ones. `images` takes only the first so many. An npy file always has room for all
    five severities; those not asked for are a hole in the file, which `open_dataset` refuses to read.

    Nothing else is overwritten: `out` must be new, empty, or from a run with the same arguments
    (corruptions may be added, in folders also severities). `overwrite` makes finished files again, also with other
    arguments as long as no old file would stay beside the new ones.

    >>> import tempfile
    >>> from petal.data import digits, open_dataset
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = write_corrupted(digits(), folder, names=["fog"], images=4)
    ...     again = write_corrupted(digits(), folder, names=["fog"], images=4)
    ...     done.made, again.made, open_dataset(folder).corrupted("fog", 5)
    (('fog.npy',), (), <ArrayDataset digits-test-c/fog/5: 4 images>)
    """
    if isinstance(data, CorruptedDataset):
        raise DataError(f"{data.name} has its images already corrupted; clean ones are needed")
    if layout not in ("auto", "npy", "folders"):
        raise DataError(f"layout is 'auto', 'npy' or 'folders', not {layout!r}")
    if profile not in ("auto", "cifar", "imagenet"):
        raise DataError(f"profile is 'auto', 'cifar' or 'imagenet', not {profile!r}")
    if image_format not in FORMATS:
        raise DataError(f"image_format is {' or '.join(map(repr, FORMATS))}, not {image_format!r}")
    check_whole("batch_size", batch_size, 1)
    names = tuple(dict.fromkeys(names))
    severities = tuple(sorted({check_severity(severity) for severity in severities}))
    if not names or not severities:
        raise DataError("give at least one corruption and one severity")
    if len(data) == 0:
        raise DataError(f"{data.name} has no images")
    first, _ = data.batch([0])
    side = max(first.shape[2:])
    chosen: corruptions.Profile = ("cifar" if side <= _LARGEST_SMALL else "imagenet") if profile == "auto" else profile
    builder = StreamBuilder(data, images=images, seed=seed, profile=chosen, device=device)
    for name in names:          # of no images: checks the arguments before hours of work instead of after
        for severity in severities:
            corruptions.corrupt(first[:0], name, severity, chosen)

    in_files = layout == "folders" or (layout == "auto" and isinstance(data, FileDataset))
    size = (first.shape[2], first.shape[3])
    out = Path(out)
    writer = _Folders(out, builder, size, image_format) if in_files else _Npy(out, builder, size, severities)
    try:
        return _write(writer, builder, names, severities, batch_size, overwrite, progress or (lambda progress: None))
    except OSError as error:
        raise DataError(f"{error.filename or out}: cannot write ({error.strerror or error})") from error


def _write(
    writer: "_Writer",
    builder: StreamBuilder,
    names: tuple[str, ...],
    severities: tuple[int, ...],
    batch_size: int,
    overwrite: bool,
    progress: Callable[[WriteProgress], None],
) -> Written:
    wanted = [unit for name in names for unit in writer.units(name, severities)]
    writer.claim(wanted, overwrite)
    todo = {name: severities if overwrite else writer.missing(name, severities) for name in names}
    todo = {name: missing for name, missing in todo.items() if missing}
    total = sum(map(len, todo.values())) * builder.size
    writer.check_space(total)
    writer.begin(overwrite)

    done = 0
    for name, missing in todo.items():
        progress(WriteProgress(name, done, total))
        with writer.open(name, missing) as put:
            for start in range(0, builder.size, batch_size):
                index = builder.chosen[start : start + batch_size]
                x, _ = builder.data.batch(index)
                if tuple(x.shape[2:]) != writer.size:
                    raise DataError(f"{builder.data.name}: images {start} and following are {list(x.shape[2:])}, image 0"
                                    f" is {list(writer.size)}; a size (224, say) brings all images of a folder to one")
                x = x if builder.device is None else x.to(builder.device)
                for severity in missing:
                    y = builder.corrupt(x, name, severity, index, quantize=True)
                    put(severity, start, y.mul_(255).round_().byte().permute(0, 2, 3, 1).contiguous().cpu().numpy())
                    done += len(index)
                    progress(WriteProgress(name, done, total))
    made = tuple(unit for name, missing in todo.items() for unit in writer.units(name, missing))
    kept = tuple(unit for unit in wanted if unit not in made)
    return Written(writer.out, writer.layout, builder.profile, builder.size, made, kept)


class _Writer(ABC):
    """A layout: its units (files or folders that appear whole), which of them exist, and how to make them."""

    layout: str

    def __init__(self, out: Path, builder: StreamBuilder, size: tuple[int, int]) -> None:
        self.out, self.builder, self.size = out, builder, size
        self.settings: dict[str, Any] = {
            "layout": self.layout, "data": builder.data.fingerprint(), "images": builder.size, "size": list(size),
            "seed": builder.seed, "profile": builder.profile,
        }  # fmt: skip
        self.classes = None if builder.data.classes is None else list(builder.data.classes)

    @abstractmethod
    def units(self, name: str, severities: Sequence[int]) -> list[str]:
        """The units of a corruption, as paths below `out`."""

    @abstractmethod
    def existing(self) -> set[str]:
        """All units that exist."""

    @abstractmethod
    def missing(self, name: str, severities: Sequence[int]) -> tuple[int, ...]:
        """The severities that do not exist yet; an error where something else is in their place."""

    @abstractmethod
    def open(self, name: str, severities: Sequence[int]) -> Any:
        """A context with a `Put`; the units exist once it ends without an error."""

    def begin(self, overwrite: bool) -> None:
        """Write what comes before the images."""
        self.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"petal": __version__, **self.settings, "classes": self.classes}, indent=1)
        if not (self.out / MANIFEST).is_file() or (self.out / MANIFEST).read_text(encoding="utf-8") != text:
            with replacing(self.out / MANIFEST) as temporary:
                temporary.write_text(text, encoding="utf-8")

    def claim(self, wanted: Sequence[str], overwrite: bool) -> None:
        """Refuse a folder with other content; remove what dead runs left, and what new settings make wrong."""
        if self.out.exists() and not self.out.is_dir():
            raise DataError(f"{self.out}: is a file; expected a folder, or nothing yet")
        if not self.out.is_dir():
            return
        _sweep(self.out)
        written = read_manifest(self.out)
        if not written:
            foreign = sorted(entry.name for entry in self.out.iterdir() if not _LEFT_OVER.fullmatch(entry.name))
            if foreign:
                raise DataError(f"{self.out}: holds {foreign[0]}{' and more' if len(foreign) > 1 else ''}, which petal did"
                                " not write; choose a new or empty folder")
            return
        changed = [key for key in self.settings if written.get(key) != json.loads(json.dumps(self.settings[key]))]
        if not changed:
            return
        what = "; ".join(f"{key} was {written.get(key)!r} and is {self.settings[key]!r}" for key in changed)
        staying = sorted(self.existing() - set(wanted))
        if "layout" in changed:
            raise DataError(f"{self.out}: was written otherwise ({what}); choose another folder")
        if not overwrite:
            raise DataError(f"{self.out}: was written otherwise ({what}); choose another folder, or overwrite it")
        if staying:
            raise DataError(f"{self.out}: was written otherwise ({what}), and {staying[0]} would stay as it is; overwrite"
                            " all of it, or choose another folder")
        for unit in self.existing():                # an interrupted overwrite must not leave old units among new ones
            _remove(self.out / unit)

    def check_space(self, count: int) -> None:
        """Refuse to start writing `count` images that do not fit on the disk."""
        needed = count * self.bytes_each()
        place = next(folder for folder in (self.out, *self.out.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(place).free
        if count and needed + _SPARE > free:
            raise DataError(f"{self.out}: about {_size(needed)} are needed and {_size(free)} are free; take fewer"
                            " corruptions, severities or images, or another disk")

    def bytes_each(self) -> int:
        """Room for one image."""
        return 3 * self.size[0] * self.size[1]


class _Npy(_Writer):
    """CIFAR-10-C's layout."""

    layout = "npy"

    def __init__(self, out: Path, builder: StreamBuilder, size: tuple[int, int], severities: tuple[int, ...]) -> None:
        super().__init__(out, builder, size)
        self.settings["severities"] = list(severities)
        self.shape = (SEVERITIES * builder.size, *size, 3)
        labels = builder.data.labels[builder.chosen].numpy()
        self.labels = np.tile(labels.astype(np.uint8) if labels.max() < 256 else labels, SEVERITIES)

    def units(self, name: str, severities: Sequence[int]) -> list[str]:
        return [f"{name}.npy"]

    def existing(self) -> set[str]:
        return {file.name for file in self.out.glob("*.npy") if file.name != "labels.npy"}

    def missing(self, name: str, severities: Sequence[int]) -> tuple[int, ...]:
        path = self.out / f"{name}.npy"
        if not path.exists():
            return tuple(severities)
        array = map_npy(path)
        if array.shape != self.shape or array.dtype != np.uint8:
            raise DataError(f"{path}: is not what petal would write there: expected uint8 {list(self.shape)}, found"
                            f" {array.dtype} {list(array.shape)}; remove or overwrite it")
        return ()

    def begin(self, overwrite: bool) -> None:
        super().begin(overwrite)
        path = self.out / "labels.npy"
        if path.exists() and not overwrite:
            if not np.array_equal(map_npy(path), self.labels):
                raise DataError(f"{path}: holds other labels than {self.builder.data.name}; remove or overwrite it")
            return
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, self.labels)

    @contextmanager
    def open(self, name: str, severities: Sequence[int]) -> Iterator[Put]:
        count = self.builder.size
        with replacing(self.out / f"{name}.npy") as temporary:
            rows = np.lib.format.open_memmap(temporary, "w+", np.uint8, self.shape)
            block = count * self.bytes_each()
            if hasattr(os, "posix_fallocate"):      # a full disk is an error here; a mapped write would kill the process
                with temporary.open("rb+") as file:
                    for severity in severities:
                        os.posix_fallocate(file.fileno(), rows.offset + (severity - 1) * block, block)

            def put(severity: int, start: int, images: NDArray[np.uint8]) -> None:
                first = (severity - 1) * count + start
                rows[first : first + len(images)] = images

            yield put
            rows.flush()


class _Folders(_Writer):
    """ImageNet-C's layout. Labels count the sorted class folders, so there is one for every class, empty or not."""

    layout = "folders"

    def __init__(self, out: Path, builder: StreamBuilder, size: tuple[int, int], image_format: str) -> None:
        super().__init__(out, builder, size)
        self.settings["format"] = image_format
        self.image_format = image_format
        labels = builder.data.labels[builder.chosen].tolist()
        self.classes = _class_folders(builder.data.classes, int(builder.data.labels.max()) + 1)
        stems = _stems(builder)
        self.files = [f"{self.classes[label]}/{stem}.{image_format}" for label, stem in zip(labels, stems, strict=True)]
        twice, count = Counter(self.files).most_common(1)[0]
        if count > 1:
            raise DataError(f"{builder.data.name}: two images would be written as {twice}; give one of them another name")

    def units(self, name: str, severities: Sequence[int]) -> list[str]:
        return [f"{name}/{severity}" for severity in severities]

    def existing(self) -> set[str]:
        return {f"{folder.parent.name}/{folder.name}" for folder in self.out.glob("*/[1-5]") if folder.is_dir()}

    def missing(self, name: str, severities: Sequence[int]) -> tuple[int, ...]:
        return tuple(severity for severity in severities if not self._finished(self.out / name / f"{severity}"))

    def _finished(self, folder: Path) -> bool:
        if not folder.exists():
            return False
        found = set(list_images(folder, list_classes(folder)))
        if found != set(self.files):
            odd = min(found ^ set(self.files))
            what = "is missing" if odd in self.files else "was not to be written"
            raise DataError(f"{folder}: is not what petal would write there: {odd} {what}; remove or overwrite it")
        return True

    def bytes_each(self) -> int:
        raw = super().bytes_each()
        return 4096 + (raw if self.image_format == "png" else raw // 3)

    @contextmanager
    def open(self, name: str, severities: Sequence[int]) -> Iterator[Put]:
        (self.out / name).mkdir(exist_ok=True)
        _sweep(self.out / name)
        how = FORMATS[self.image_format]
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="petal-write"))
            folders = {s: stack.enter_context(_replacing_folder(self.out / name / f"{s}", pool)) for s in severities}
            for folder in folders.values():
                for label in self.classes or ():
                    (folder / label).mkdir()

            def put(severity: int, start: int, images: NDArray[np.uint8]) -> None:
                def save(number: int) -> None:
                    Image.fromarray(images[number]).save(folders[severity] / self.files[start + number], **how)

                list(pool.map(save, range(len(images))))

            yield put


@contextmanager
def _replacing_folder(path: Path, pool: ThreadPoolExecutor) -> Iterator[Path]:
    """As `replacing`, for a folder of folders of files: a temporary one takes the place of `path` if the block ends well."""
    temporary, old = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        temporary.mkdir()
        yield temporary
        list(pool.map(_sync, temporary.glob("*/*")))
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        _remove(old)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove the unfinished files and folders of runs that were killed, but not those of one that still works here."""
    for entry in folder.iterdir():
        match = _LEFT_OVER.fullmatch(entry.name)
        if match and (int(match[1]) == os.getpid() or not _alive(int(match[1]))):
            _remove(entry)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _class_folders(classes: Sequence[str] | None, count: int) -> list[str]:
    """A folder name for every class, such that sorted names are in the order of the labels."""
    if classes is None:
        return [f"{label:0{len(str(count - 1))}}" for label in range(count)]
    plain = [re.sub(r"[^\w.+-]+", "_", name).lstrip(".") or "_" for name in classes]
    if list(classes) == plain == sorted(set(plain)):
        return plain
    return [f"{label:0{len(str(len(plain) - 1))}}_{name}" for label, name in enumerate(plain)]


def _stems(builder: StreamBuilder) -> list[str]:
    """A name for every image used: its file's, or its number in the dataset."""
    numbers = builder.chosen.tolist()
    if isinstance(builder.data, FileDataset):
        return [builder.data.paths[i].stem for i in numbers]
    return [f"{i:0{len(str(len(builder.data) - 1))}}" for i in numbers]


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
