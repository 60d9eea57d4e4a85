"""What an attack costs: error on benign images while it lasts, and on clean batches after it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from petal.attacks.poisoned import Poisoned
from petal.attacks.scene import Attack
from petal.data.streams import Stream
from petal.evaluate import Record, evaluate_batch
from petal.methods import Adapter


@dataclass(frozen=True)
class Outcome:
    """Error of the benign images under attack, and of all images of the clean batches that follow (NaN without any)."""

    during: float
    after: float
    records: list[Record]


def measure(
    adapter: Adapter,
    stream: Stream,
    attack: Attack,
    share: float = 0.2,
    after: int = 0,
    seed: int = 0,
    progress: Callable[[Record], None] | None = None,
) -> Outcome:
    """Run a poisoned stream through an adapter, then the first `after` batches of the stream again, clean."""
    records: list[Record] = []
    for poisoned in (True, False):
        source = Poisoned(stream, attack, share, adapter, seed) if poisoned else islice(stream, after)
        for batch in source:
            record, _ = evaluate_batch(adapter, batch, batch.position)
            records.append(record)
            if progress is not None:
                progress(record)
    return Outcome(_error(records[: len(stream)]), _error(records[len(stream) :]), records)


def _error(records: list[Record]) -> float:
    count = sum(record.n for record in records)
    return sum(record.error * record.n for record in records if record.n) / count if count else math.nan
