"""Images without labels, in an order: the files of a folder, an .npz, the frames of a video.

What cannot be read is not left out in silence: it comes with the reason in the place of its pixels.
"""

import hashlib
import os
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from petal.data.cifar import npz_member
from petal.data.folders import SUFFIXES, open_picture
from petal.errors import DataError
from petal.models.preprocessing import Preprocessing, Sides

VIDEOS = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".mjpeg"})


def prepared(image: Image.Image, how: Preprocessing) -> NDArray[np.uint8]:
    """A picture as the network gets it, uint8 [H, W, 3]: resized and cut as torchvision and timm do it with Pillow.

    >>> prepared(Image.new("RGB", (100, 50)), Preprocessing(resize=40, crop=(32, 32))).shape
    (32, 32, 3)
    """
    image = image.convert("RGB")
    width, height = image.size
    if isinstance(how.resize, tuple):
        height, width = how.resize
    elif how.resize is not None:
        shorter = min(width, height)
        width, height = (how.resize if side == shorter else int(how.resize * side / shorter) for side in (width, height))
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling[how.interpolation.upper()])
    if how.crop is not None and (height, width) != how.crop:
        if height < how.crop[0] or width < how.crop[1]:
            raise DataError(f"is {width}x{height}, too small to cut {how.crop[1]}x{how.crop[0]} out of it")
        left, top = round((width - how.crop[1]) / 2), round((height - how.crop[0]) / 2)
        image = image.crop((left, top, left + how.crop[1], top + how.crop[0]))
    return np.asarray(image)


@dataclass(frozen=True, eq=False)
class Picture:
    """One image by its name: pixels [H, W, 3], 8-bit or float in [0, 1], or the `problem` with it."""

    name: str
    pixels: NDArray[Any] | None
    problem: str = ""


class Pictures(ABC):
    """Images in an order. `shape` is (height, width) that all have; `count` how many, for a video as it says itself.

    `left_out` names files that are no images.
    """

    count: int
    shape: Sides
    left_out: tuple[str, ...] = ()

    @abstractmethod
    def batches(self, size: int, start: int = 0) -> Iterator[list[Picture]]:
        """All of them, `size` at a time, from batch number `start` on."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Enough (JSON) to notice that a command that goes on reads other images; no path."""

    def checked(self, name: str, pixels: NDArray[Any]) -> Picture:
        """A picture, if it has the shape that all have."""
        if pixels.shape[:2] != self.shape:
            is_, others = (f"{w}x{h}" for h, w in (pixels.shape[:2], self.shape))
            return Picture(name, None, f"is {is_} where others are {others}: say how to resize and crop")
        return Picture(name, pixels)

    def _first(self, pictures: Iterator[Picture], where: Path) -> Sides:
        """The shape of the first that can be read."""
        problem = "there are none"
        for picture in pictures:
            if picture.pixels is not None:
                return picture.pixels.shape[0], picture.pixels.shape[1]
            problem = f"{picture.name} {picture.problem}"
        raise DataError(f"{where}: no image that can be read ({problem})")


class FolderPictures(Pictures):
    """The image files below a folder, by name, numbers in names counting as numbers: frame2 comes before frame10."""

    def __init__(self, path: Path, preprocessing: Preprocessing, workers: int | None = None) -> None:
        self.path, self.preprocessing = path, preprocessing
        root = path if path.is_dir() else path.parent
        files = sorted((p for p in path.rglob("*") if p.is_file()), key=lambda p: _natural(p.relative_to(path)))
        files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        if not path.is_dir():
            files = [path]
        names = [p.relative_to(root).as_posix() for p in files]
        self.names = [name for name in names if Path(name).suffix.lower() in SUFFIXES]
        self.left_out = tuple(name for name in names if Path(name).suffix.lower() not in SUFFIXES)
        self.root, self.count = root, len(self.names)
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        if not self.names:
            raise DataError(f"{path}: no images; expected {', '.join(sorted(SUFFIXES))} files")
        self.shape = preprocessing.size or self._first((self._read(name) for name in self.names), path)

    def batches(self, size: int, start: int = 0) -> Iterator[list[Picture]]:
        """Files are decoded in threads."""
        with ThreadPoolExecutor(max(self.workers, 1)) as pool:
            for first in range(start * size, self.count, size):
                found = pool.map(self._read, self.names[first : first + size])
                yield [p if p.pixels is None else self.checked(p.name, p.pixels) for p in found]

    def fingerprint(self) -> dict[str, Any]:
        """Names and sizes of the files."""
        sizes = [(self.root / name).stat().st_size for name in self.names]
        listed = "\n".join(f"{name} {size}" for name, size in zip(self.names, sizes, strict=True))
        return {"kind": "folder", "images": self.count, "sha256": hashlib.sha256(listed.encode()).hexdigest()}

    def _read(self, name: str) -> Picture:
        path = self.root / name
        try:
            return Picture(name, prepared(open_picture(path), self.preprocessing))
        except DataError as error:
            return Picture(name, None, str(error).removeprefix(f"{path}: ").replace(str(path), name))


class ArrayPictures(Pictures):
    """`images` of an .npz, or its only array: 8-bit or float in [0, 1]; [N, H, W, 3], [N, 3, H, W], or grey [N, H, W]."""

    def __init__(self, path: Path, preprocessing: Preprocessing) -> None:
        self.path, self.preprocessing = path, preprocessing
        try:
            with zipfile.ZipFile(path) as archive:
                members = [info.filename for info in archive.infolist()]
                member = "images.npy" if "images.npy" in members else members[0] if len(members) == 1 else None
                if member is None:
                    held = ", ".join(name.removesuffix(".npy") for name in members) or "nothing"
                    raise DataError(f"{path}: expected an array images, or one array alone; found {held}")
                self._sum = archive.getinfo(member).CRC
                images = npz_member(path, archive, member)
        except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: truncated, or not an .npz of plain arrays ({error})") from error
        grey = images.ndim == 3
        if not grey and not (images.ndim == 4 and (images.shape[3] in (1, 3) or images.shape[1] in (1, 3))):
            raise DataError(f"{path}: images are [N, H, W, 3], [N, 3, H, W] or grey [N, H, W]; got {list(images.shape)}")
        if images.dtype != np.uint8 and images.dtype not in (np.float16, np.float32, np.float64):
            raise DataError(f"{path}: images are uint8, or float in [0, 1]; got {images.dtype}")
        self.images, self.count = images, len(images)
        self._first_axis = not grey and images.shape[3] not in (1, 3)
        pictures = (self._read(number) for number in range(self.count))
        self.shape = preprocessing.size or self._first(pictures, path)

    def batches(self, size: int, start: int = 0) -> Iterator[list[Picture]]:
        """Only the rows that are asked for are read, where the file is not compressed."""
        for first in range(start * size, self.count, size):
            found = [self._read(number) for number in range(first, min(first + size, self.count))]
            yield [p if p.pixels is None else self.checked(p.name, p.pixels) for p in found]

    def fingerprint(self) -> dict[str, Any]:
        """Shape and checksum of the array."""
        return {"kind": "npz", "images": self.count, "shape": list(self.images.shape), "crc": self._sum}

    def _read(self, number: int) -> Picture:
        name, pixels = str(number), np.asarray(self.images[number])
        if self._first_axis:
            pixels = pixels.transpose(1, 2, 0)
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        if pixels.shape[2] == 1:
            pixels = pixels.repeat(3, axis=2)
        if pixels.dtype != np.uint8:
            pixels = pixels.astype(np.float32)
            if not bool(((pixels >= 0) & (pixels <= 1)).all()):         # not-a-number fails this too
                return Picture(name, None, "has values outside [0, 1]")
        if self.preprocessing.leaves(*pixels.shape[:2]):
            return Picture(name, pixels)
        if pixels.dtype != np.uint8:                                    # resizing is defined on 8 bits
            pixels = np.rint(pixels * 255).astype(np.uint8)
        try:
            return Picture(name, prepared(Image.fromarray(np.ascontiguousarray(pixels)), self.preprocessing))
        except DataError as error:
            return Picture(name, None, str(error))


class VideoPictures(Pictures):
    """The frames of a video in order, every `every`-th of them; named by the video and the frame's number from 0."""

    def __init__(self, path: Path, preprocessing: Preprocessing, every: int = 1) -> None:
        self.path, self.preprocessing, self.every = path, preprocessing, every
        try:
            import cv2
        except ImportError as error:
            raise DataError(
                f"{path}: a video needs OpenCV: pip install opencv-python-headless, or 'petal-tta[video]' ({error})"
            ) from error
        self._cv2: Any = cv2
        said = max(int(self._opened().get(cv2.CAP_PROP_FRAME_COUNT)), 0)
        self.count = -(-said // every)
        self.shape = self._first(self._frames(0), path)

    def batches(self, size: int, start: int = 0) -> Iterator[list[Picture]]:
        """From the beginning, since videos cannot be cut exactly: frames before `start` are passed over."""
        batch: list[Picture] = []
        for picture in self._frames(start * size):
            batch.append(picture if picture.pixels is None else self.checked(picture.name, picture.pixels))
            if len(batch) == size:
                yield batch
                batch = []
        if batch:
            yield batch

    def fingerprint(self) -> dict[str, Any]:
        """The file's checksum, and which frames."""
        with self.path.open("rb") as file:
            return {"kind": "video", "every": self.every, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    def _opened(self) -> Any:
        capture = self._cv2.VideoCapture(str(self.path))
        if not capture.isOpened():
            raise DataError(f"{self.path}: OpenCV cannot open it: it is damaged, no video, or needs another codec")
        return capture

    def _frames(self, skip: int) -> Iterator[Picture]:
        """Frames taken, from the `skip`-th of them on."""
        capture = self._opened()
        try:
            number = -1
            while capture.grab():
                number += 1
                if number % self.every or number // self.every < skip:
                    continue
                name = f"{self.path.name}#{number}"
                good, frame = capture.retrieve()
                if not good or frame is None:
                    yield Picture(name, None, "cannot be decoded")
                    continue
                image = Image.fromarray(self._cv2.cvtColor(frame, self._cv2.COLOR_BGR2RGB))
                try:
                    yield Picture(name, prepared(image, self.preprocessing))
                except DataError as error:
                    yield Picture(name, None, str(error))
        finally:
            capture.release()


def open_pictures(path: str | Path, preprocessing: Preprocessing | None = None, every: int = 1) -> Pictures:
    """The images at a path: a folder or a single image, an .npz, or a video, of which every `every`-th frame is taken."""
    path, known = Path(path), preprocessing or Preprocessing()
    if every < 1:
        raise DataError(f"every counts frames, 1 or more; got {every}")
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; expected a folder of images, an .npz or a video")
    suffix = path.suffix.lower()
    if path.is_file() and suffix in VIDEOS:
        return VideoPictures(path, known, every)
    if every != 1:
        raise DataError(f"{path} is no video: only of a video every {every}th frame can be taken")
    if path.is_file() and suffix == ".npz":
        return ArrayPictures(path, known)
    if path.is_dir() or suffix in SUFFIXES:
        return FolderPictures(path, known)
    images, videos = (", ".join(sorted(known)) for known in (SUFFIXES, VIDEOS))
    raise DataError(f"{path}: expected a folder of images, an image ({images}), an .npz, or a video ({videos})")


def as_batch(pictures: list[Picture]) -> Tensor:
    """The pixels of pictures that could be read, float32 [n, 3, H, W] in [0, 1]."""
    rows = [torch.from_numpy(np.array(p.pixels)).permute(2, 0, 1) for p in pictures if p.pixels is not None]
    if not rows:
        return torch.empty(0, 3, 0, 0)
    return torch.stack([row.float().div_(255) if row.dtype == torch.uint8 else row for row in rows])


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """A key by which numbers in names are in order."""
    parts = re.split(r"(\d+)", path.as_posix())
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts] + [(0, 0, path.as_posix())]
