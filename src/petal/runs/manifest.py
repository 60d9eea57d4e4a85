"""A run's folder: a manifest, and a folder for each job.

    RUN/manifest.json               format "petal-run-1": everything that was set, versions, hashes, and the jobs
    RUN/jobs/ID/job.json            the job's settings as used, "status" ("running", "done"), batches, seconds
    RUN/jobs/ID/records.jsonl       a `petal.Record` per batch, with "distance", "row", "order" and "seed"; "visit" in a
                                    recurring stream; "guard" (frozen, alarms, pulls, signals, alarm) where there is one
                                    "learned" and "busy_until" at a rate
    RUN/jobs/ID/samples.json        [{"domain", "severity", "position", "index", "label", "predicted", "probability"},
                                    ...]: the first images of each domain
    RUN/jobs/ID/samples.npz         "images" uint8 [n, H, W, 3], in the order of samples.json
    RUN/jobs/ID/checkpoint-*.safetensors    while it runs
    RUN/jobs/ID/track.json          "key", by which other tools know the job, if it is tracked
"""

import json
import platform
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from petal._files import alone, make_folder, write_json
from petal.data import CorruptedDataset
from petal.errors import ConfigError, PetalWarning
from petal.recipes.provenance import described, versions
from petal.runs.experiment import ORDER, OpenExperiment
from petal.runs.job import Job, describe_job
from petal.runs.rate import pace

FORMAT = "petal-run-1"


def make_manifest(opened: OpenExperiment, jobs: Sequence[Job], command: str = "") -> dict[str, Any]:
    """Everything about a run, as plain data. A stream that cannot be made is an error here, before there is a folder."""
    e, own, device = opened.experiment, opened.recipe, opened.device
    orders = sorted({job.order for job in jobs})
    for number in orders:
        opened.stream(number)
    plugin = e.load_plugin()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "format": FORMAT,
        "recipe": own.name,
        "title": own.title,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": versions(),
        "device": device.type,
        "device_name": name,
        "seeds": sorted({job.seed for job in jobs}),
        "orders": orders,
        "order_names": {str(n): list(own.order(n)) for n in orders},
        "stream": opened.stream_name,
        "severity": opened.severity,
        "batch_size": opened.batch_size,
        **{key: getattr(e, key) for key in ("fidelity", "engine", "stream_seed", "images", "visits", "label_correlation")},
        **({"shuffle": True} if e.shuffle else {}),
        **{name: getattr(e, name) for name in ORDER if getattr(e, name) is not None},
        **{name: getattr(e, name) for name in ("protocol", "reset_per_domain", "after") if getattr(e, name)},
        **pace(opened, min(orders, default=1)),
        "preprocessing": preprocessing(opened),
        "network": own.network,
        "classes": list(opened.images.classes) if opened.images.classes else own.classes,
        "data": {**described(e.data or e.corrupted), "fingerprint": opened.images.fingerprint()},
        "weights": described(e.weights),
        "posterior": described(e.posterior),
        **({} if e.statistics is None else {"statistics": described(e.statistics)}),
        **({"plugin": plugin} if plugin else {}),
        "jobs": [describe_job(job) for job in jobs],
    }


def preprocessing(opened: OpenExperiment) -> str:
    """How the images come to be what the network sees, in words; what a network does to its input is part of it."""
    ready = isinstance(opened.images, CorruptedDataset)
    size = getattr(opened.images, "size", None)
    cut = "" if size is None else f"shorter side {round(size * 8 / 7)}, centre {size} x {size}, "
    return cut + ("corrupted images from files" if ready else f"corrupted here ({opened.recipe.profile} profile)")


SAME = ("recipe", "fidelity", "device", "engine", "stream", "stream_seed", "severity", "batch_size", "images", "network",
        "visits", "label_correlation", "shuffle", "protocol", "reset_per_domain", "after", "rate", *ORDER)  # fmt: skip


def open_run(folder: str | Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Start a run's folder, or continue one: jobs it has are kept, new ones are added. Returns what is now there.

    A folder of a run with other settings is refused, with the differences.
    """
    folder = Path(folder)
    path = folder / "manifest.json"
    if (folder / "sweep.json").exists():
        raise ConfigError(f"{folder} is the folder of a sweep, whose reports would not show this run: give another --out")
    make_folder(folder / "jobs")
    with alone(folder):                     # another may be adding jobs of its own
        if path.exists():
            manifest = _merged(read_manifest(folder), manifest, folder)
        write_json(path, manifest)
    return manifest


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a run; an error if there is none or it is not one."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{path} is not the manifest of a run: its format is not {FORMAT!r}")
    return manifest


def _merged(old: dict[str, Any], new: dict[str, Any], folder: Path) -> dict[str, Any]:
    differences = [f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in SAME if old.get(key) != new.get(key)]
    hashed = ("weights", "posterior", "statistics", "plugin")
    for key, part in (("data", "fingerprint"), *((key, "sha256") for key in hashed)):
        was, now = (m.get(key, {}).get(part) for m in (old, new))
        if was != now and not (key in ("posterior", "statistics", "plugin") and None in (was, now)):
            differences.append(f"{key} was {_short(was)} and is {_short(now)}")
    jobs = {job["id"]: job for job in old["jobs"]}
    for job in new["jobs"]:
        known = jobs.setdefault(job["id"], job)
        for key, value in job["options"].items():
            if known["options"].get(key) != value:
                differences.append(f"{job['row']}.{key} was {known['options'].get(key)!r} and is {value!r}")
    times, others = old.get("rate_ms", {}), new.get("rate_ms", {})
    differences += [f"rate_ms of {row} was {times[row]:g} and is {others[row]:g}" for row in times
                    if row in others and times[row] != others[row]]
    if "source" in others and "source" not in times and times is not others and "rate" in old:
        differences.append(f"the source network's time was measured as {old['rate_source_ms']:g} ms, not given")
    if differences:
        listed = "; ".join(dict.fromkeys(differences))
        raise ConfigError(f"{folder} holds a run with other settings: {listed}. Give another --out, or the same settings")
    if old["versions"] != new["versions"]:
        changed = [k for k in new["versions"] if old["versions"].get(k) != new["versions"][k]]
        text = f"the run in {folder} was begun with another version of {', '.join(changed)}"
        warnings.warn(text, PetalWarning, stacklevel=3)
    out = {**old, "jobs": list(jobs.values()), "order_names": {**old["order_names"], **new["order_names"]}}
    if "rate" in old:                       # the source network's own time stays what it was at the start
        out["rate_ms"] = {**times, **others}
    for key in ("posterior", "statistics", "plugin"):
        if new.get(key):
            out[key] = new[key]
    for key in ("seeds", "orders"):
        out[key] = sorted({*old[key], *new[key]})
    return out


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)
