"""From signals to a verdict: a pure function that knows no adapter and remembers nothing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from petal.guard.signals import SUMMED, Reading

SURE = 1.3                                  # times its limit, disagreement needs no second signal
HEALTHY = 0.6                               # of its limit: up to here disagreement is nothing to worry about
LOST = 0.5                                  # mean entropy of a lost source, as a share of the largest possible one
LOOKS = 8                                   # comparisons with the source before they count: one may be of a single class


@dataclass(frozen=True)
class Verdict:
    """What a reading means for the adapter."""

    alarm: tuple[str, float, float] | None  # a collapse: the signal that gave it away, its value and its limit
    healthy: bool = False                   # nothing is suspicious: a snapshot may be taken
    worn: bool = False                      # drift is over its limit


def judge(here: Reading, usual: Mapping[str, float], limits: Mapping[str, float], looks: int, classes: int) -> Verdict:
    """Judge a reading after `looks` comparisons with the source; see `Guard` for the limits.

    `usual` has the distance and update of healthy looks, 0 while they are not known. A source that knows little of these
    samples, or sees fewer classes in them than the adapter does, is no judge of the adapter.
    """
    if not here.finite:
        name = next((name for name in SUMMED if not math.isfinite(getattr(here, name))), "disagreement")
        return Verdict((name, getattr(here, name), math.inf))
    most = math.log(max(classes, 2))
    concentration, entropy = limits["concentration"], limits["entropy"]
    distance, update = (usual[name] * limits[name] or math.inf for name in ("distance", "update"))
    narrow = here.paired_concentration - here.source_concentration
    blurred = (here.entropy - here.source_entropy) / most
    far, fast, ready = here.distance > distance, here.update > update, looks >= LOOKS
    known = here.source_entropy <= LOST * most and here.source_concentration <= here.paired_concentration + concentration
    limit = limits["disagreement"] * (1 - 1 / classes)
    doubtful = known and here.disagreement > HEALTHY * limit
    second = narrow > concentration or blurred > entropy or far or fast
    enough, lopsided = limit if second else SURE * limit, concentration if doubtful else 2 * concentration
    unsure = 1.5 / classes
    rules = (
        ("update", far and fast, here.update, update),
        ("disagreement", ready and known and here.disagreement > enough, here.disagreement, enough),
        ("concentration", ready and narrow > lopsided, narrow, lopsided),
        ("entropy", ready and doubtful and blurred > entropy, blurred, entropy),
        ("confidence", ready and known and here.confidence < unsure and here.source_confidence > 2 * here.confidence,
         here.confidence, unsure),
    )  # fmt: skip
    alarm = next(((signal, value, limit) for signal, raised, value, limit in rules if raised), None)
    return Verdict(alarm, not doubtful and narrow <= concentration, ready and known and here.drift > limits["drift"])
