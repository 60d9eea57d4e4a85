"""Tables that compare methods, from records kept as data.

    python tools/tables.py collect NAME RUN...     # finished jobs of run folders, as docs/results/data/methods/NAME.json
    python tools/tables.py page                    # docs/results/methods.md, from all of them (`make docs`)
"""

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results"
DATA, PAGE = RESULTS / "data" / "methods", RESULTS / "methods.md"
SCORES = {"error": ("error %", 100, 2), "nll": ("NLL", 1, 3), "brier": ("Brier", 1, 3), "ece": ("ECE", 1, 3)}


def collect(name: str, runs: Sequence[str]) -> None:
    from petal.report import load

    found = []
    for run in runs:
        for section in load(run).sections:
            for row in section.rows:
                found += [entry(section, row, job) for job in row.jobs if job.records is not None]
    found.sort(key=lambda r: (r["row"], r["stream_seed"], r["seed"]))
    about = {key: section.manifest.get(key) for key in ("recipe", "network", "stream", "batch_size", "images", "visits",
                                                        "label_correlation", "device_name")}  # fmt: skip
    DATA.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(r) for r in found)
    path = DATA / f"{name}.json"
    path.write_text(f'{{"about": {json.dumps(about)},\n "runs": [\n{lines}\n]}}\n')
    print(f"wrote {path}: {len(found)} runs")


def entry(section: Any, row: Any, job: Any) -> dict[str, Any]:
    """One finished job."""
    records = job.records
    whole = records.scores()
    visits = int(records.visit.max()) + 1
    return {
        "row": row.id, "label": row.label, "seed": job.seed, "order": job.order,
        "stream_seed": section.manifest.get("stream_seed", 0), "shuffle": bool(section.manifest.get("shuffle")),
        "images": int(records.n.sum()),
        **{score: round(getattr(whole, score), 5) for score in SCORES},
        "domains": {d: round(records.scores(d).error, 4) for d in records.domains},
        **({"visits": [{score: round(getattr(records.scores(visit=v), score), 4) for score in SCORES}
                       for v in range(visits)]} if visits > 1 else {}),
    }  # fmt: skip


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def rows_of(runs: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs by row, the lowest error first."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        rows.setdefault(run["row"], []).append(run)
    return dict(sorted(rows.items(), key=lambda pair: statistics.mean(run["error"] for run in pair[1])))


def text(values: Sequence[float], score: str) -> str:
    """Mean, and the standard deviation in brackets where there are several."""
    _, scale, digits = SCORES[score]
    mean = f"{statistics.mean(values) * scale:.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({statistics.stdev(values) * scale:.{digits}f})"


def table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    aligned = [":---" if number < 2 else "---:" for number in range(len(heads))]
    return [f"| {' | '.join(cells)} |" for cells in (heads, aligned, *body)]


def scores_table(name: str, steps: dict[str, dict[str, Any]] | None = None) -> list[str]:
    """All scores of a stream, a row for each method; with steps also what they cost."""
    body = []
    for row, runs in rows_of(read(name)["runs"]).items():
        cells = [f"`{row}`", runs[0]["label"], *(text([run[s] for run in runs], s) for s in SCORES), str(len(runs))]
        if steps is not None:
            step = steps.get(row)
            cells += ["", ""] if step is None else [f"{step['ms']:.1f}", f"{step['peak_mib']:,.0f}"]
        body.append(cells)
    heads = ["row", "method", *(title for title, _, _ in SCORES.values()), "runs"]
    return table(heads if steps is None else [*heads, "ms per batch", "peak MiB"], body)


def visits_table(name: str) -> list[str]:
    """Error by visit, and NLL of the first and the last."""
    rows = rows_of(read(name)["runs"])
    most = max(len(run["visits"]) for runs in rows.values() for run in runs)
    shown = [v for v in (0, 1, 2, 4, 9, 19) if v < most]
    body = []
    for row, runs in rows.items():
        visits = [[run["visits"][v] for run in runs if v < len(run["visits"])] for v in range(most)]
        cells = [text([v["error"] for v in visits[v_]], "error") if visits[v_] else "-" for v_ in shown]
        last = [run["visits"][-1]["nll"] for run in runs]
        body.append([f"`{row}`", runs[0]["label"], *cells, text([v["nll"] for v in visits[0]], "nll"), text(last, "nll")])
    return table(["row", "method", *(f"visit {v + 1}" for v in shown), "NLL, first", "NLL, last"], body)


def steps() -> dict[str, dict[str, Any]]:
    """Times of steps by row."""
    path = DATA / "steps.json"
    return {row["method"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def page() -> None:
    parts = (DATA / "page.md").read_text().splitlines()
    out = []
    for line in parts:
        kind, _, name = line.removeprefix("<!-- table: ").removesuffix(" -->").partition(" ")
        if not line.startswith("<!-- table: "):
            out.append(line)
        elif kind == "visits":
            out += visits_table(name)
        else:
            out += scores_table(name, steps() if kind == "cost" else None)
    PAGE.write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1] == "collect":
        collect(sys.argv[2], sys.argv[3:])
    elif sys.argv[1:] == ["page"]:
        page()
    else:
        sys.exit(__doc__)
