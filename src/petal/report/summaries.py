"""What the tables need of a run, and its form as data: small files from which `petal report` remakes its pages.

    {"format": "petal-summary-1", "title", "notes", "remarks",
     "runs": [{"folder", "manifest",                                the manifest without its jobs
               "rows": [{"row", "method", "label", "options"}],     what they were
               "jobs": {ID: {"row", "order", "seed", ...}}}],       a `Summary` for each that is finished
     "averages": [{"jobs": ["FOLDER/ID", ...], "runs", "std", ...}]}    of rows whose single runs were not kept
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from petal.errors import DataError
from petal.evaluate import Scores
from petal.report.metric import METRICS
from petal.report.records import Floats, Records

FORMAT = "petal-summary-1"
_SCORES = ("n", *METRICS)
_SHARES = ("views", "restored", "learned", "seconds", "forwards", "backwards")
_COUNTS = ("batches", "skipped", "alarms", "steps")


@dataclass(frozen=True)
class Summary:
    """The scores of one run, as a whole, by domain and by visit, and what it cost.

    `severities` are those that a domain was seen at, `steps` how many changes of domain or severity there were and one;
    `views`, `restored`, `learned`, `forwards` and `backwards` are means over batches, `seconds` is the median of those that
    were learned from.
    """

    mean: Scores
    by_domain: Mapping[str, Scores]
    by_visit: tuple[Scores, ...]
    severities: Mapping[str, tuple[int, ...]]
    batches: int
    steps: int = 1
    views: float = 0.0
    restored: float = 0.0
    learned: float = 1.0
    seconds: float = math.nan
    forwards: float = math.nan          # where they were counted
    backwards: float = math.nan
    skipped: int = 0
    alarms: int = 0
    calibration: Floats | None = field(default=None, repr=False)      # [3, bins]; None if it was not kept

    @classmethod
    def of(cls, records: Records) -> "Summary":
        """The summary of a run's records."""
        times = records.seconds[np.isfinite(records.seconds) & (records.learned > 0)]
        visits = int(records.visit.max()) + 1
        return cls(
            mean=records.scores(),
            by_domain={domain: records.scores(domain) for domain in records.domains},
            by_visit=tuple(records.scores(visit=visit) for visit in range(visits)) if visits > 1 else (),
            severities={d: tuple(sorted({s for name, s in records.pairs if name == d})) for d in records.domains},
            batches=len(records),
            steps=sum(len(np.flatnonzero(np.diff(records.severity[a:b]))) + 1 for _, a, b in records.visits),
            views=float(records.views_used.mean()),
            restored=float(records.restored.mean()),
            learned=float(records.learned.mean()),
            seconds=float(np.median(times)) if len(times) else math.nan,
            forwards=float(records.forwards.mean()),
            backwards=float(records.backwards.mean()),
            skipped=records.skipped_updates,
            alarms=int(records.alarms.max()),
            calibration=records.counts(),
        )

    @property
    def pairs(self) -> frozenset[tuple[str, int]]:
        """Every (domain, severity) of the stream."""
        return frozenset((domain, severity) for domain, found in self.severities.items() for severity in found)

    def to_json(self) -> dict[str, Any]:
        """Plain data; the numbers of the whole run have ten digits, others six."""
        out: dict[str, Any] = {name: _short(getattr(self.mean, name), 10) for name in _SCORES}
        out |= {name: _short(getattr(self, name), 10) for name in (*_COUNTS, *_SHARES)}
        out["domains"] = list(self.by_domain)
        out["severities"] = [list(self.severities[domain]) for domain in self.by_domain]
        out["by_domain"] = _columns(self.by_domain.values())
        if self.by_visit:
            out["by_visit"] = _columns(self.by_visit)
        if self.calibration is not None:
            out["calibration"] = [[_short(float(value)) for value in row] for row in self.calibration]
        return out

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Summary":
        """The summary that `to_json` wrote."""
        counts = value.get("calibration")
        return cls(
            mean=_scores(*(value[name] for name in _SCORES)),
            by_domain=dict(zip(value["domains"], _rows(value["by_domain"]), strict=True)),
            by_visit=tuple(_rows(value["by_visit"])) if "by_visit" in value else (),
            severities={d: tuple(s) for d, s in zip(value["domains"], value["severities"], strict=True)},
            calibration=None if counts is None else np.array(counts, dtype=np.float64),
            batches=int(value["batches"]), skipped=int(value["skipped"]), alarms=int(value["alarms"]),
            steps=int(value["steps"]), views=_number(value["views"]), restored=_number(value["restored"]),
            learned=_number(value["learned"]), seconds=_number(value["seconds"]),
            forwards=_number(value.get("forwards")), backwards=_number(value.get("backwards")),
        )  # fmt: skip


@dataclass(frozen=True)
class Averages:
    """The means over several runs of a row and their standard deviations, where the single runs were not kept."""

    runs: int
    means: Summary
    std: Mapping[str, float]


def _columns(scores: Iterable[Scores]) -> dict[str, list[Any]]:
    listed = list(scores)
    return {name: [_short(getattr(one, name)) for one in listed] for name in _SCORES}


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[Scores]:
    return [_scores(*values) for values in zip(*(columns[name] for name in _SCORES), strict=True)]


def _scores(n: Any, *values: Any) -> Scores:
    return Scores(int(n), *map(_number, values))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _short(value: float, digits: int = 6) -> float | None:
    """So many digits, whole numbers whole, and None for what JSON does not have.

    >>> _short(0.123456789), _short(150000), _short(3.0), _short(math.nan)
    (0.123457, 150000, 3, None)
    """
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(f"{value:.{digits}g}")


def to_text(value: Any, indent: int = 0, width: int = 150) -> str:
    """JSON in which everything that fits stands on one line.

    >>> print(to_text({"a": [1, 2], "b": "c"}, width=12))
    {
     "a": [1, 2],
     "b": "c"
    }
    """
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    if len(flat) + indent <= width or not isinstance(value, (dict, list)) or not value:
        return flat
    space = "\n" + " " * (indent + 1)
    if isinstance(value, dict):
        names = [json.dumps(key, ensure_ascii=False) for key in value]
        parts = [f"{name}: {to_text(inner, indent + 1, width)}" for name, inner in zip(names, value.values(), strict=True)]
    elif all(not isinstance(inner, (dict, list)) for inner in value):
        return flat
    else:
        parts = [to_text(inner, indent + 1, width) for inner in value]
    ends = "{}" if isinstance(value, dict) else "[]"
    return ends[0] + space + f",{space}".join(parts) + "\n" + " " * indent + ends[1]


@dataclass(frozen=True)
class SummaryFile:
    """The contents of such a file, checked as far as its outline goes."""

    path: Path
    title: str | None
    notes: tuple[str, ...]
    remarks: tuple[str, ...]
    runs: tuple[Mapping[str, Any], ...]
    averages: tuple[Mapping[str, Any], ...]


def read_summary(path: Path) -> SummaryFile:
    """Read such a file; an error that names it if it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    found = value.get("format") if isinstance(value, dict) else None
    if found != FORMAT:
        raise DataError(f"{path} has format {found!r}; files to report from have {FORMAT!r}: make one with "
                        "`petal report RUN... --format data`")  # fmt: skip
    try:
        return SummaryFile(path, value.get("title"), tuple(value.get("notes", ())), tuple(value.get("remarks", ())),
                           tuple(value["runs"]), tuple(value.get("averages", ())))  # fmt: skip
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is no whole summary: {error}") from None
