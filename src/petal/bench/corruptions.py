"""How fast images are corrupted: images per second for each corruption."""

import time
from collections.abc import Iterable, Sequence
from typing import TypedDict

import torch
from rich.table import Table
from torch import Tensor

from petal.corruptions import CORRUPTIONS, Profile, corrupt, image_keys
from petal.errors import ConfigError

TOTAL = "total"
_POOL_PIXELS = 1 << 25          # the images that are held at once; more of them are the same ones with other keys


class CorruptionTime(TypedDict):
    """The time of one corruption, or of all (`corruption` is "total"); the rest says of what. JSON as it is."""

    corruption: str
    seconds: float
    images_per_second: float
    images: int
    size: int
    profile: str
    severity: int
    device: str
    threads: int


def natural(count: int, size: int, *, seed: int = 0) -> Tensor:
    """Made-up images [count, 3, size, size] on the 256 levels, with the spectrum and the contrast of small photographs.

    >>> x = natural(4, 32)
    >>> tuple(x.shape), float(x.min()) >= 0, 0.2 < float(x.std()) < 0.3
    ((4, 3, 32, 32), True, True)
    """
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.hypot(torch.fft.fftfreq(size)[:, None], torch.fft.rfftfreq(size)[None, :])
    amplitude = frequency.clamp_min(1 / size) ** -1.6       # small photographs are smoother than the 1/f of large ones
    gray = torch.randn(count, 1, size, size, generator=generator)
    colour = torch.randn(count, 3, size, size, generator=generator)
    x: Tensor = torch.fft.irfft2(torch.fft.rfft2(gray + 0.35 * colour) * amplitude, s=(size, size))
    x = 0.47 + 0.26 * (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)
    return x.clamp_(0, 1).mul_(255).round_().div_(255)


def run(
    images: int = 10_000,
    size: int = 32,
    profile: Profile | None = None,
    severity: int = 5,
    device: torch.device | str = "cpu",
    corruptions: Sequence[str] = CORRUPTIONS,
    repeat: int = 1,
    source: Tensor | None = None,
) -> list[CorruptionTime]:
    """Time each corruption of `corruptions` on `images` images, the best of `repeat` times; the last row is the total.

    `profile` is by default the one made for the size. `source` are images [n, 3, H, W] to use in place of made-up ones.
    Where all would not fit in memory, the same ones come again, with other random numbers.
    """
    for what, value in (("images", images), ("repeat", repeat), ("size", size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{what} must be a whole number of at least 1; got {value!r}")
    if not corruptions:
        raise ConfigError("give at least one corruption")
    size = size if source is None else source.shape[-1]
    chosen: Profile = profile or ("cifar" if size <= 96 else "imagenet")
    pool = natural(min(images, max(1, _POOL_PIXELS // size**2)), size) if source is None else source[:images]
    pool = pool.to(device)
    rows: list[CorruptionTime] = []
    for name in corruptions:
        corrupt(pool[:8], name, severity, chosen)       # first use: kernels, tables
        seconds = min(_time(pool, name, severity, chosen, images) for _ in range(repeat))
        rows.append(_row(name, seconds, images, size, chosen, severity, pool.device))
    total = sum(row["seconds"] for row in rows)
    return [*rows, _row(TOTAL, total, images * len(rows), size, chosen, severity, pool.device)]


def _time(pool: Tensor, name: str, severity: int, profile: Profile, images: int) -> float:
    _wait(pool.device)
    started = time.perf_counter()
    for start in range(0, images, len(pool)):
        index = range(start, min(start + len(pool), images))
        keys = image_keys(0, name, severity, index)
        corrupt(pool[: len(index)], name, severity, profile, keys=keys, quantize=True)
    _wait(pool.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(
    name: str, seconds: float, images: int, size: int, profile: str, severity: int, device: torch.device
) -> CorruptionTime:
    return CorruptionTime(
        corruption=name,
        seconds=seconds,
        images_per_second=images / seconds,
        images=images,
        size=size,
        profile=profile,
        severity=severity,
        device=device.type,
        threads=torch.get_num_threads(),
    )


def table(rows: Iterable[CorruptionTime]) -> Table:
    """The rows of a run, to print."""
    rows = list(rows)
    head = rows[0]
    where = "1 thread" if head["threads"] == 1 else f"{head['threads']} threads"
    out = Table(
        title=f"{head['images']:,} images of {head['size']}x{head['size']}, {head['profile']} profile,"
        f" severity {head['severity']}, {head['device'] if head['device'] != 'cpu' else where}"
    )
    out.add_column("corruption")
    out.add_column("seconds", justify="right")
    out.add_column("images/s", justify="right")
    for row in rows:
        total = row["corruption"] == TOTAL
        out.add_section() if total else None
        cells = (row["corruption"], f"{row['seconds']:.2f}", f"{row['images_per_second']:,.0f}")
        out.add_row(*cells, style="bold" if total else None)
    return out
