"""What we recommend: the settings of PETAL's flagship, and an adapter of them for a network in one line."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from petal.augment import Augment, Jitter, Views
from petal.calls import with_output
from petal.engine import accelerate
from petal.errors import ConfigError
from petal.guard import Guard
from petal.methods import Adapter, FanIn, Petal, Robust, Screen, SmallBatch
from petal.methods.base import Rates
from petal.norm import batch_norms
from petal.posterior import Posterior

WARMUP = 50                                         # steps of the teacher's first window
WITHOUT_BATCH_NORM = FanIn(3.45, 3e-3, 9e-4)        # three times the usual: no statistics of the batch do part of the work


def flagship(augment: Augment | None = None) -> dict[str, Any]:
    """The flagship as arguments of `Petal`; images are flipped if `augment` flips them.

    >>> flagship()["answer"], flagship(Views(flip=0.0))["answer"]
    ('teacher+teacher-flip+student', 'teacher+student')
    """
    augment = Views() if augment is None else augment
    flips = isinstance(augment, Views) and augment.flip > 0
    return {
        "lr": FanIn(), "ema": 0.999, "warmup": WARMUP, "views": 0, "prior_weight": 0.0, "restore": None,
        "average": "probs", "augment": replace(augment, per_sample=True) if isinstance(augment, Views) else augment,
        "learn": "both", "target": "teacher+teacher-flip" if flips else "teacher",
        "answer": "teacher+teacher-flip+student" if flips else "teacher+student",
    }  # fmt: skip


def adapt(
    model: nn.Module,
    posterior: Posterior | None = None,
    *,
    flip: bool = True,
    colour: bool = True,
    images: bool = True,
    augment: Augment | None = None,
    normalised: tuple[Sequence[float], Sequence[float]] | None = None,
    output: Callable[[Any], Any] | None = None,
    lr: Rates | None = None,
    memory: int = 200,
    shuffled: bool = False,
    statistics: str = "batch",
    outliers: str = "take",
    guard: bool = True,
    engine: str = "auto",
    batch_shape: Sequence[int] | None = None,
    seed: int = 0,
    **options: Any,
) -> Adapter:
    """The adapter that we recommend for a network: a classifier that goes on learning from what it predicts.

    Say what must not be done to an input: `flip=False` where a mirror image means something else (digits, text, X-rays),
    `colour=False` where brightness and colour carry meaning, `images=False` for anything but images [N, 3 or 1, H, W] in
    [0, 1]. Or give an `augment` that changes inputs without changing their label. `normalised` is the (mean,
    std) of a network that takes normalised images; `output` finds the logits in what a network returns (`with_output`).
    Without batch norm the rates are three times those with it; `lr` says otherwise.

    Batches may be of any size, from one image up, and labels in any order: large batches in no order are used as they come,
    and else it learns from `memory` images and answers by the order too (`SmallBatch`). Say `shuffled` where the order is
    known to mean nothing. `memory=0` is the flagship alone, for large shuffled batches and nothing else. Inputs of several
    tensors, and tokens, are used as they come: no memory holds them.

    `statistics="median"` is the defence against images that are made to spoil the answers to others (`Robust`), and
    `outliers` says what becomes of images far out of range: "refuse", "aside", "take" (`Screen`). `guard`, `engine` and
    `batch_shape` are those of `Guard` and `accelerate`; further options those of `Petal`.

    With a posterior it starts at the posterior's mean. `print` shows what was chosen.

    >>> import petal
    >>> print(petal.adapt(petal.models.build("small", 10), flip=False, engine="eager"))
    method    PETAL
    network   SmallNet, 63,258 parameters, of which all adapt
    rates     min(0.001, 1.15 / fan-in), vectors 0.0003; Adam once a batch
    runs      eager, on cpu
    learns    from the batch and a view of it (Views(per_sample=True, flip=0.0))
    target    teacher
    answer    teacher + student
    teacher   follows by 0.999 from a window of 50 steps on
    restore   none
    posterior none: starts at the network; no prior
    small     large batches in no order as they are; else every 64 images a memory of 200
    order     a prior for the next label
    guard     rollback, looks every 10 batches
    """
    if normalised is not None and not (augment is None and images):
        raise ConfigError("normalised is said of images with the usual views: leave it out, or augment and images")
    if augment is None:
        augment = _views(flip, colour, *(normalised or (None, None))) if images else Jitter()
    elif not (flip and colour and images):
        raise ConfigError("an augment of your own says all: leave flip, colour and images out")
    model = model if output is None else with_output(model, output)
    if lr is None:
        lr = FanIn() if any(True for _ in batch_norms(model)) else WITHOUT_BATCH_NORM
    adapter: Adapter = Petal(model, posterior, **{**flagship(augment), "lr": lr, "seed": seed, **options})
    if statistics != "batch":
        adapter = Robust(adapter, statistics)
    if memory:
        adapter = SmallBatch(adapter, memory, shuffled=shuffled)
    if outliers != "take":
        adapter = Screen(adapter, outliers)
    if guard:
        adapter = Guard(adapter)
    return accelerate(adapter, engine, batch_shape)


def _views(flip: bool, colour: bool, mean: Sequence[float] | None, std: Sequence[float] | None) -> Views:
    same: dict[str, Any] = {"hue": (0, 0), **dict.fromkeys(("brightness", "contrast", "saturation", "gamma"), (1, 1))}
    return Views(flip=0.5 if flip else 0.0, mean=mean, std=std, **({} if colour else same))
