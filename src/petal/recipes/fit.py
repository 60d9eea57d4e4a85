"""A source network from scratch or from given weights, its SWAG-D posterior and its source statistics.

Images lie on the device as 8-bit numbers, and a whole batch is cropped and flipped at once there, so that the network
never waits for data. Training and the collection of the posterior write their state after every epoch and continue from it.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from petal._files import make_folder, write_json, writing
from petal._random import random_state, set_random_state
from petal.checkpoint import CheckpointError, digest, read_state, write_state
from petal.collect import collect_statistics
from petal.data import Dataset
from petal.errors import ConfigError, DataError, ModelError
from petal.methods.network import logits_of
from petal.posterior import DiagonalGaussian, LowRankGaussian, Posterior
from petal.recipes.provenance import described, versions
from petal.recipes.published import FitSettings
from petal.source_folder import CONFIG, STATISTICS, SourceConfig, save_network, write_config
from petal.swag import FitProgress, fit_swag

RESIDENT = 8 << 30                          # bytes of images that may lie on the device; more are read as they come
TRAINING = "petal-training-1"
COLLECTING = "petal-swag-1"


class Loader:
    """Batches (x, y) of a dataset on a device, shuffled, with random crops and flips; run through it once per epoch.

    The order and the augmentation of an epoch follow from the seed and the epoch's number (`epoch`, which counts itself).
    x is float32 [n, 3, H, W] in [0, 1], channels-last.
    """

    def __init__(
        self,
        data: Dataset,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        shuffle: bool = True,
        crop: int = 0,
        flip: bool = False,
        seed: int = 0,
        resident: int = RESIDENT,
    ) -> None:
        if batch_size < 1 or len(data) == 0:
            raise DataError(f"batches of {batch_size} of {len(data)} images cannot be made")
        self.data, self.batch_size, self.device = data, batch_size, torch.device(device)
        self.shuffle, self.crop, self.flip, self.seed, self.epoch = shuffle, crop, flip, seed, 0
        x, _ = data.batch([0])
        self.images: Tensor | None = None
        self.labels: Tensor | None = None
        if len(data) * x.numel() <= resident:
            self._load()

    def _load(self) -> None:
        """All images on the device: 8 bits each if that is exact."""
        parts, labels = [], []
        for numbers in torch.split(torch.arange(len(self.data)), 2048):
            x, y = self.data.batch(numbers)
            levels = x.mul(255)
            exact = bool((levels.round() - levels).abs().max() < 1e-3)
            parts.append((levels.round_().byte() if exact else x).to(self.device))
            labels.append(y)
        same = all(part.dtype == torch.uint8 for part in parts)
        self.images = torch.cat(parts if same else [p.float().div(255) if p.dtype == torch.uint8 else p for p in parts])
        self.labels = torch.cat(labels).to(self.device)

    def __len__(self) -> int:
        return math.ceil(len(self.data) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.epoch += 1
        count = len(self.data)
        order = torch.randperm(count, generator=random) if self.shuffle else torch.arange(count)
        draws = torch.rand(3, count, generator=random)
        pairs = list(zip(torch.split(order, self.batch_size), torch.split(draws, self.batch_size, 1), strict=True))
        for (x, y), (_, draw) in zip(self._batches([numbers for numbers, _ in pairs]), pairs, strict=True):
            yield self._augmented(x, draw.to(x.device)), y

    def _batches(self, numbers: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        if self.images is not None and self.labels is not None:
            for chosen in numbers:
                here = chosen.to(self.device)
                yield self.images[here], self.labels[here]
            return
        with ThreadPoolExecutor(1) as pool:                 # read the next batch while this one is worked on
            waiting = pool.submit(self.data.batch, numbers[0])
            for following in [*numbers[1:], None]:
                x, y = waiting.result()
                if following is not None:
                    waiting = pool.submit(self.data.batch, following)
                yield x.to(self.device), y.to(self.device)

    def _augmented(self, x: Tensor, draw: Tensor) -> Tensor:
        """Crop and flip in one read: every image has its own rows and columns of the padded batch."""
        count, _, height, width = x.shape
        if self.crop or self.flip:
            x = nn.functional.pad(x, [self.crop] * 4)
            moves = draw[:2].mul(2 * self.crop + 1).long().clamp_(max=2 * self.crop)
            rows = moves[0, :, None] + torch.arange(height, device=x.device)
            columns = torch.arange(width, device=x.device).expand(count, -1)
            if self.flip:
                columns = torch.where(draw[2, :, None] < 0.5, width - 1 - columns, columns)
            columns = moves[1, :, None] + columns
            n = torch.arange(count, device=x.device)[:, None, None]
            x = x[n, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)     # [n, H, W, C] in memory
        x = x.float().div_(255) if x.dtype == torch.uint8 else x
        return x.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class TrainProgress:
    """Where `train` stands, after every batch; numbers count from 1."""

    epoch: int
    epochs: int
    batch: int
    batches: int
    loss: float


def train(
    model: nn.Module,
    loader: Loader,
    settings: FitSettings,
    *,
    path: Path | None = None,
    progress: Callable[[TrainProgress], None] | None = None,
) -> nn.Module:
    """Train a network by SGD (Nesterov momentum 0.9, cosine to zero); `path` keeps the state after every epoch.

    If `path` holds the state of a training that was interrupted, it goes on from there.
    """
    device = next(model.parameters()).device
    model.train().requires_grad_(True)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.lr, momentum=0.9, nesterov=True, weight_decay=settings.weight_decay
    )
    low = autocast_dtype(device)
    first = 0 if path is None else _resume(model, optimizer, path, settings, loader)
    steps = settings.epochs * len(loader)
    for epoch in range(first, settings.epochs):
        loader.epoch = epoch
        for number, (x, y) in enumerate(loader):
            step = epoch * len(loader) + number
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * 0.5 * (1 + math.cos(math.pi * step / steps))
            with torch.autocast(device.type, dtype=low, enabled=low is not None):
                loss = nn.functional.cross_entropy(logits_of(model, x), y, label_smoothing=settings.label_smoothing)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if progress is not None and (number % 20 == 0 or number + 1 == len(loader)):
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise ModelError(f"the loss is {value} in epoch {epoch + 1}: lower lr={settings.lr}")
                progress(TrainProgress(epoch + 1, settings.epochs, number + 1, len(loader), value))
        if path is not None:
            _keep(model, optimizer, path, settings, loader, epoch + 1)
    return model.eval()


def _keep(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, settings: FitSettings, loader: Loader, epoch: int
) -> None:
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()} | random_state()
    for name, p in model.named_parameters():
        tensors[f"momentum.{name}"] = optimizer.state[p]["momentum_buffer"]
    write_state(path, tensors, {"epoch": epoch, **_about(settings, loader, swag=False)}, TRAINING)


def _resume(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, settings: FitSettings, loader: Loader
) -> int:
    """The number of epochs done, with network, optimizer and random numbers put where they were."""
    found = _unfinished(path, _about(settings, loader, swag=False), TRAINING)
    if found is None:
        return 0
    epoch, tensors = found
    model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    for name, p in model.named_parameters():
        optimizer.state[p]["momentum_buffer"] = tensors[f"momentum.{name}"].to(p)
    set_random_state(tensors)
    return epoch


def _about(settings: FitSettings, loader: Loader, swag: bool) -> dict[str, Any]:
    """What must be the same for work to be continued: the settings of its half of `fit`, seed and data."""
    used = {key: value for key, value in asdict(settings).items() if ("swag" in key) == swag or key in ("crop", "flip")}
    return {**used, "seed": loader.seed, "data": loader.data.fingerprint()}


def _unfinished(path: Path, about: Mapping[str, Any], kind: str) -> tuple[int, dict[str, Tensor]] | None:
    """The epochs done and the tensors of work that was interrupted, if there is any."""
    if not path.exists():
        return None
    try:
        was, tensors = read_state(path, kind)
        epoch = int(was["epoch"])
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} cannot be continued: {error}; remove it to begin anew") from error
    changed = [f"{k} was {was.get(k)!r} and is {v!r}" for k, v in about.items() if was.get(k) != v]
    if changed:
        raise ConfigError(f"{path} is of work with other settings: {'; '.join(changed)}; give another --out, or remove it")
    return epoch, tensors


def collect(
    model: nn.Module,
    loader: Loader,
    settings: FitSettings,
    *,
    path: Path | None = None,
    progress: Callable[[FitProgress], None] | None = None,
) -> DiagonalGaussian | LowRankGaussian:
    """The network's SWAG posterior; `path` keeps the state after every epoch, and what it holds is continued."""
    about = {**_about(settings, loader, swag=True), "network": digest(model.state_dict())}
    found = None if path is None else _unfinished(path, about, COLLECTING)
    loader.epoch = 0 if found is None else found[0]

    def keep(epoch: int, state: dict[str, Tensor]) -> None:
        if path is not None:
            write_state(path, state, {"epoch": epoch, **about}, COLLECTING)

    return fit_swag(
        model.eval(),
        loader,
        epochs=settings.swag_epochs,
        lr=settings.swag_lr,
        snapshots_per_epoch=settings.swag_snapshots,
        rank=settings.swag_rank,
        autocast=autocast_dtype(next(model.parameters()).device),
        progress=progress,
        on_epoch=keep,
        state=None if found is None else found[1],
    )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """bfloat16 on a GPU that has it, full precision elsewhere."""
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None


@torch.no_grad()
def clean_error(model: nn.Module, data: Dataset, batch_size: int = 500) -> float:
    """Share of wrong labels on clean images, by the network as it is."""
    device = next(model.parameters()).device
    model.eval()
    wrong = 0
    low = autocast_dtype(device)
    for numbers in torch.split(torch.arange(len(data)), batch_size):
        x, y = data.batch(numbers)
        with torch.autocast(device.type, dtype=low, enabled=low is not None):
            wrong += int((logits_of(model, x.to(device)).argmax(1).cpu() != y).sum())
    return wrong / len(data)


@dataclass(frozen=True)
class FitReport:
    """What `fit` made: files, errors on clean test images (None without them), seconds."""

    network: Path
    posterior: Path
    error: float | None
    posterior_error: float | None
    train_seconds: float
    swag_seconds: float
    statistics: Path | None = None


def fit(
    model: nn.Module,
    data: Dataset,
    settings: FitSettings,
    folder: str | Path,
    *,
    trained: bool = False,
    test: Dataset | None = None,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
    source: SourceConfig | None = None,
    on_train: Callable[[TrainProgress], None] | None = None,
    on_swag: Callable[[FitProgress], None] | None = None,
    parts: Sequence[str] = (),
    statistics_batch: int = 200,
) -> FitReport:
    """Train a network (unless it is `trained`), collect its SWAG-D posterior, and write both with `fit.json`.

    `parts` of source statistics ("prototypes", "fisher") are collected too, in batches of `statistics_batch` images, which
    should be the size of the batches to adapt to. With `source`, what the network is, the folder is one that
    `petal.load_source` reads.
    """
    folder = Path(folder)
    make_folder(folder)
    with writing(folder / CONFIG):
        (folder / CONFIG).unlink(missing_ok=True)           # until all of it is there it is no source
    network, posterior, state, collected = (
        folder / f"{name}.safetensors" for name in ("network", "posterior", "training", "collecting")
    )
    device = next(model.parameters()).device
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    options: dict[str, Any] = {"device": device, "crop": settings.crop, "flip": settings.flip}
    began = time.monotonic()
    if not trained:
        loader = Loader(data, settings.batch_size, seed=seed, **options)
        train(model, loader, settings, path=state, progress=on_train)
    save_network(model, network)
    train_seconds = time.monotonic() - began

    began = time.monotonic()
    if not settings.swag_augment:
        options |= {"crop": 0, "flip": False}
    collecting = Loader(data, settings.swag_batch_size, seed=seed + 1, **options)
    q = collect(model, collecting, settings, path=collected, progress=on_swag)
    q.save(posterior)
    swag_seconds = time.monotonic() - began
    errors: tuple[float | None, float | None] = (None, None)
    if test is not None:
        errors = clean_error(model, test), clean_error(at_mean(model, q), test)
    statistics = folder / "statistics.safetensors" if parts else None
    if statistics is not None:
        collect_into(statistics, model, data, parts, statistics_batch)
    report = FitReport(network, posterior, *errors, train_seconds, swag_seconds, statistics)
    write_json(
        folder / "fit.json",
        {
            "format": "petal-fit-1",
            "versions": versions(),
            "device": device.type,
            "seed": seed,
            "settings": asdict(settings if not trained else replace(settings, epochs=0)),
            "data": data.fingerprint(),
            "test": None if test is None else test.fingerprint(),
            "network": _named(network),
            "posterior": _named(posterior),
            **({} if statistics is None else {"statistics": _named(statistics)}),
            "clean_error": errors[0],
            "clean_error_of_mean": errors[1],
            "train_seconds": train_seconds,
            "swag_seconds": swag_seconds,
            **(about or {}),
        },
    )
    if source is not None:
        if statistics is None:
            (folder / STATISTICS).unlink(missing_ok=True)   # of another network
        said = ""
        if errors[0] is not None:
            said = f"Error on clean test images: {errors[0]:.2%}; of the posterior's mean: {errors[1]:.2%}."
        write_config(replace(source, folder=folder), said)
    for path in (state, collected):
        path.unlink(missing_ok=True)
    return report


def _named(path: Path) -> dict[str, Any]:
    """A file's name and hash: folders of sources are copied."""
    return {**described(path), "path": path.name}


def collect_into(path: Path, model: nn.Module, data: Dataset, parts: Sequence[str], batch_size: int) -> None:
    """Write source statistics of a network to a file, from clean images in a shuffled order."""
    loader = Loader(data, batch_size, device=next(model.parameters()).device, seed=2)
    collect_statistics(model, loader, parts).save(path)


def at_mean(model: nn.Module, q: Posterior) -> nn.Module:
    """A copy of the network at the posterior's mean."""
    copy = deepcopy(model)
    with torch.no_grad():
        for name, p in copy.named_parameters():
            p.copy_(q.mean[name])
        for name, b in copy.named_buffers():
            if q.buffers and name in q.buffers:
                b.copy_(q.buffers[name])
    return copy
