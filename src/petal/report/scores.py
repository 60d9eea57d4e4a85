"""Jobs sorted into the rows of tables: what may be averaged with what, and the averages."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from petal.errors import DataError
from petal.report.files import JobFolder, RunFolder, read_run, run_folders, runs_of
from petal.report.metric import METRICS
from petal.report.paper import paper_name
from petal.report.protocol import protocol_line
from petal.report.rows import ResultRow
from petal.report.summaries import read_summary
from petal.runs import ORDER

_ORDER = ("source", "bn", "pseudo-label", "tent", "cotta", "petal")


@dataclass
class Section:
    """The rows of one table: they share benchmark, data, source network, severity and batch size."""

    recipe: str
    manifest: Mapping[str, Any]
    rows: list[ResultRow]
    title: str = ""
    slug: str = ""
    folders: list[RunFolder] = field(default_factory=list)
    against: str | None = None          # the row that others are compared with

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Domains in the order of the first finished run."""
        runs = [run for row in self.rows for run in row.runs]
        runs = runs or [job.summary for row in self.rows for job in row.unfinished if job.summary is not None]
        return tuple(dict.fromkeys(domain for run in runs for domain in run.by_domain))

    @cached_property
    def order(self) -> str:
        """The order shown by the figures along the stream: the first of those that most rows have."""
        jobs = [job for row in self.rows for job in row.jobs] or [job for row in self.rows for job in row.unfinished]
        orders = [job.order for job in jobs]
        having = {order: sum(order in row.orders for row in self.rows) for order in dict.fromkeys(orders)}
        return max(having, key=lambda order: having[order]) if having else ""

    @property
    def orders(self) -> list[str]:
        """Every order of the finished jobs."""
        return list(dict.fromkeys(order for row in self.rows for order in row.orders))

    @cached_property
    def gradual(self) -> bool:
        """True if severities change along the stream."""
        return any(len({severity for _, severity in run.pairs}) > 1 for row in self.rows for run in row.runs)

    @cached_property
    def visits(self) -> int:
        """How often each domain is visited: 1 unless the stream recurs."""
        begun = [job.summary for row in self.rows for job in row.unfinished if job.summary is not None]
        return max((len(run.by_visit) for run in (*begun, *(run for row in self.rows for run in row.runs))), default=0) or 1

    @property
    def protocol(self) -> str:
        """How the runs were evaluated, in one line."""
        names = dict.fromkeys(str(folder.manifest.get("protocol") or "none") for folder in self.folders)
        alike = f" Runs under the names {', '.join(names)}, which are the same here." if len(names) > 1 else ""
        return protocol_line(self.manifest) + alike

    @property
    def classes(self) -> Sequence[str] | None:
        """Class names, if the manifest has them."""
        names = self.manifest.get("classes")
        return [str(name) for name in names] if isinstance(names, list) else None

    def best(self) -> ResultRow | None:
        """The row with the lowest error."""
        rows = [row for row in self.rows if row.jobs and math.isfinite(row.stat("error").mean)]
        return min(rows, key=lambda row: row.stat("error").mean, default=None)

    def reference(self) -> ResultRow | None:
        """The row that others are compared with: the one asked for, or the best."""
        asked = next((row for row in self.rows if row.id == self.against and row.jobs), None)
        return asked or self.best()

    def notes(self) -> list[str]:
        """What a reader must know before using the numbers."""
        rows, notes = [row for row in self.rows if row.jobs], []
        for row in self.rows:
            for job in row.unfinished:
                so_far = "no batch yet"
                if job.summary is not None:
                    batches = f"{job.batches} of {job.total}" if job.total else str(job.batches)
                    so_far = f"{batches} batches on disk, error so far {100 * job.summary.mean.error:.2f} %"
                notes.append(f"Unfinished, and in no average: {row.label}, {_which(job)} ({so_far}).")
        single = [row.label for row in rows if row.count == 1]
        if single and len(single) == len(rows):
            notes.append("One run per method: there is no standard deviation, and small differences mean nothing.")
        elif single:
            notes.append(f"One run only, so no standard deviation: {', '.join(single)}.")
        several = [row for row in rows if row.count > 1]
        if several:
            counts = {row.over for row in several}
            over = f"over {counts.pop()}" if len(counts) == 1 else "over the runs that the table of all scores names"
            notes.append(f"In brackets: the sample standard deviation of the runs' means, {over}.")
        lost = [row.label for row in rows if row.averages is not None]
        if lost:
            notes.append(f"Only averages over runs were kept, and not the single runs, of {', '.join(lost)}.")
        orders = {tuple(row.orders) for row in rows}
        if len(orders) > 1:
            notes.append("The rows were not all run over the same orders: see the orders and seeds of each.")
        notes += [f"{row.label} skipped {row.skipped} {'update' if row.skipped == 1 else 'updates'}: the loss or a gradient "
                  "was not finite." for row in rows if row.skipped]
        for row in rows:
            if row.alarms is not None:
                how = "no alarm" if not row.alarms else f"{row.alarms} {'alarm' if row.alarms == 1 else 'alarms'}"
                notes.append(f"The guard of {row.label} raised {how}.")
        for metric in METRICS.values():
            broken = [row.label for row in rows if not math.isfinite(row.stat(metric.name).mean)]
            if broken:
                notes.append(f"{metric.title} is not finite for {', '.join(broken)}.")
        if len(self.orders) > 1:
            notes.append(f"{len(self.orders)} orders of the domains: columns stand in the order of the first, "
                         f"figures along the stream show order {self.order}.")
        sizes = {tuple(run.by_domain[d].n if d in run.by_domain else 0 for d in self.domains)
                 for row in rows for run in row.runs}
        if len(sizes) > 1:
            notes.append("The runs do not all have the same number of images in every domain.")
        elif sizes and len(set(next(iter(sizes)))) > 1:
            notes.append("Domains differ in size: the mean is over all images, not over the columns.")
        if self.gradual:
            pairs = {run.steps for row in rows for run in row.runs}
            notes.append("Severity changes along the stream: every number is an average over all the pairs of domain and "
                         f"severity ({', '.join(map(str, sorted(pairs)))} in a run).")
        notes.append("The mean ECE is computed over all images of a run together; it is not the mean of the columns.")
        for name in ("device", "engine", "versions"):
            if len({json.dumps(folder.manifest.get(name), sort_keys=True) for folder in self.folders}) > 1:
                notes.append(f"The run folders differ in their {name}; times may not be comparable.")
        return notes


def _which(job: JobFolder) -> str:
    parts = [f"{name} {value}" for name, value in (("order", job.order), ("seed", job.seed)) if value]
    return ", ".join(parts) or job.id


@dataclass
class Report:
    """The data of all tables and figures."""

    folders: tuple[RunFolder, ...]
    sections: tuple[Section, ...]
    title: str = "Lifelong test-time adaptation"
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()       # what is said after the results


def load(
    *runs: str | Path, title: str | None = None, notes: Iterable[str] = (), remarks: Iterable[str] = (),
    against: str | None = None,
) -> Report:  # fmt: skip
    """Read run folders, those of sweeps, or files of summaries (`to_summary`), and sort their jobs into tables.

    Jobs share a row if method, options, fidelity and posterior are the same; they share a table if benchmark, data,
    source network, severity, batch size and domains are. The same (order, seed) in two folders gives two rows, never an
    average of a run with itself. Jobs that are not finished are kept apart. `notes` are texts to show at the top, `remarks`
    at the end; those of files come first. `against` is the row that others are compared with, by default the best of each
    table.
    """
    if not runs:
        raise DataError("nothing to report: give at least one run folder")
    files = [read_summary(Path(given)) for given in runs if Path(given).is_file()]
    folders: list[RunFolder] = []
    for given in runs:
        found = runs_of(read_summary(Path(given))) if Path(given).is_file() else map(read_run, run_folders(given))
        for folder in found:
            if any(folder.path.resolve() == known.path.resolve() for known in folders):
                raise DataError(f"{folder.path} is given twice")
            folders.append(folder)
    sections = _sections(folders)
    for section in sections:
        _finish(section)
        section.against = against
    finished = dict.fromkeys(row.id for section in sections for row in section.rows if row.jobs)
    if against is not None and against not in finished:
        raise DataError(f"no finished row {against!r} to compare with: there are {', '.join(finished) or 'none'}")
    titles = [section.title for section in sections]
    for number, section in enumerate(sections, 1):
        if titles.count(section.title) > 1:
            section.title = f"{section.title} ({_differs(section, sections) or number})"
        alone = [s.recipe for s in sections].count(section.recipe) == 1
        section.slug = re.sub(r"[^\w.-]+", "-", section.recipe if alone else f"{section.recipe}-{number}")
    title = title or next((file.title for file in files if file.title), None)
    notes = [*(note for file in files for note in file.notes), *notes]
    remarks = [*(remark for file in files for remark in file.remarks), *remarks]
    if title is None:
        title = "Lifelong test-time adaptation"
        title += f": {sections[0].title}" if len(sections) == 1 else ""
    return Report(tuple(folders), tuple(sections), title, tuple(notes), tuple(remarks))


def _sections(folders: list[RunFolder]) -> list[Section]:
    sections: dict[tuple[str, object], Section] = {}
    jobs = [(folder, job) for folder in folders for job in folder.jobs]
    for folder, job in sorted(jobs, key=lambda pair: not pair[1].finished):
        base = json.dumps(_setting(folder.manifest), sort_keys=True)
        if job.finished and job.pairs is not None:
            key: tuple[str, object] = (base, job.pairs)
        else:
            key = next((key for key in sections if key[0] == base), (base, None))
        section = sections.setdefault(key, Section(str(folder.manifest.get("recipe") or "run"), folder.manifest, []))
        if not any(known is folder for known in section.folders):
            section.folders.append(folder)
        _add(section, folder, job)
    return list(sections.values())


def _setting(manifest: Mapping[str, Any]) -> dict[str, Any]:
    names = ("recipe", "stream", "stream_seed", "shuffle", "severity", "batch_size", "images", "visits", "label_correlation",
             *ORDER, "reset_per_domain", "after", "rate", "rate_source_ms", "network")  # fmt: skip
    setting = {name: manifest.get(name) for name in names}
    return setting | {name: _fingerprint(manifest.get(name)) for name in ("data", "weights")}


def _fingerprint(value: Any) -> Any:
    """The hashes in a description, or all of it if it has none (paths may differ between machines)."""
    marks = ("sha", "hash", "digest", "fingerprint")
    hashes = {k: v for k, v in flatten(value).items() if v and any(mark in k.lower() for mark in marks)}
    return hashes or value


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Nested objects as one, with dotted names.

    >>> flatten({"a": {"b": 1}, "c": [2, 3]})
    {'a.b': 1, 'c': [2, 3]}
    """
    if isinstance(value, dict):
        flat: dict[str, Any] = {}
        for key, inner in value.items():
            flat |= flatten(inner, f"{name}.{key}" if name else str(key))
        return flat
    return {name: value} if name else {}


def _add(section: Section, folder: RunFolder, job: JobFolder) -> None:
    fidelity = str(folder.manifest.get("fidelity") or "")
    posterior = json.dumps(_fingerprint(folder.manifest.get("posterior")), sort_keys=True) if job.method == "petal" else ""
    options = {name: value for name, value in job.options.items() if name != "seed"}
    fresh = ResultRow(job.row, job.method, job.label, fidelity, options, posterior, paper=paper_name(job.row, job.label),
                      averages=job.averaged)  # fmt: skip
    for row in section.rows:
        if row.key != fresh.key:
            continue
        clash = next((j for j in row.jobs if job.finished and (j.order, j.seed) == (job.order, job.seed)), None)
        if clash is None:
            break
        if clash.folder.parent == job.folder.parent:
            file = folder.path / "manifest.json"
            raise DataError(f"{file}: jobs {clash.id!r} and {job.id!r} have the same row, order and seed")
    else:
        row = fresh
        section.rows.append(row)
    if not job.finished and any((j.order, j.seed) == (job.order, job.seed) for j in row.jobs):
        return  # finished in another folder
    (row.jobs if job.finished else row.unfinished).append(job)
    if folder.name not in row.folders:
        row.folders.append(folder.name)


def _finish(section: Section) -> None:
    """Order the rows as in the paper, make their labels distinct, and set the title."""
    places = {job.folder: n for n, job in enumerate(job for folder in section.folders for job in folder.jobs)}

    def place(row: ResultRow) -> tuple[int, int]:
        known = _ORDER.index(row.method) if row.method in _ORDER else len(_ORDER)
        return known, min(places[job.folder] for job in (*row.jobs, *row.unfinished))

    section.rows.sort(key=place)
    fidelities = [row.fidelity for row in section.rows]
    usual = max(dict.fromkeys(fidelities), key=fidelities.count)   # the fidelity of most rows is not named
    for label in dict.fromkeys(row.label for row in section.rows):
        _tell_apart([row for row in section.rows if row.label == label], usual)
    severity, name = section.manifest.get("severity"), section.manifest.get("protocol")
    section.title = str(section.manifest.get("title") or section.recipe)
    if severity not in (None, "", "gradual") and not section.gradual:
        section.title += f", severity {severity}"
    section.title += f", protocol {name}" if name else ""


def _tell_apart(rows: list[ResultRow], usual: str) -> None:
    if len(rows) < 2:
        return
    flat = [flatten(dict(row.options)) for row in rows]
    names = dict.fromkeys(name for f in flat for name in f)
    varying = [name for name in names if len({json.dumps(f.get(name), default=str) for f in flat}) > 1]
    chosen = [""] * len(rows)
    for candidates in (
        ["" if row.fidelity == usual else f"{row.fidelity or 'no'} fidelity" for row in rows],
        [", ".join(f"{k}={f.get(k)}" for k in varying) for f in flat],
        [" + ".join(row.folders) for row in rows],
        [f"row {n}" for n in range(1, len(rows) + 1)],
    ):
        if len(set(chosen)) == len(rows):
            break
        if len(set(candidates)) > 1:
            chosen = ["; ".join(filter(None, pair)) for pair in zip(chosen, candidates, strict=True)]
    for row, suffix in zip(rows, chosen, strict=True):
        row.label = f"{row.label} [{suffix}]" if suffix else row.label


def _differs(section: Section, sections: list[Section]) -> str:
    """The first settings in which sections of the same title differ, as text."""
    alike = [flatten(_setting(s.manifest)) for s in sections if s.title.startswith(section.title)]
    mine = flatten(_setting(section.manifest))
    names = [k for k in mine if len({json.dumps(a.get(k), default=str) for a in alike}) > 1]
    return ", ".join(_said(name, mine[name]) for name in names[:2])


def _said(name: str, value: Any) -> str:
    if name == "images":
        return "all images" if value is None else f"first {value:,} images"
    return f"{name.replace('_', ' ')} {str(value)[:16]}"
