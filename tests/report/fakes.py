"""Run folders as `petal run` writes them, made up: plausible numbers, no network."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

DOMAINS = ("gaussian_noise", "shot_noise", "fog", "jpeg_compression")
BINS = 15

ROWS: dict[str, tuple[str, str, dict[str, Any], float]] = {   # row -> method, label, options, error
    "source": ("source", "Source", {}, 0.42),
    "bn": ("bn", "BN Adapt", {}, 0.22),
    "pseudo-label": ("pseudo-label", "Pseudo-label", {"lr": 1e-3}, 0.21),
    "tent-online": ("tent", "TENT-online", {"lr": 1e-3}, 0.205),
    "tent-continual": ("tent", "TENT-continual", {"lr": 1e-3}, 0.215),
    "cotta": ("cotta", "CoTTA", {"lr": 1e-3, "ema": 0.999, "restore": "stochastic:0.01"}, 0.19),
    "petal-sres": ("petal", "PETAL (S-Res)", {"restore": "stochastic:0.01"}, 0.185),
    "petal-fim": ("petal", "PETAL (FIM)", {"restore": "fisher:0.03", "views": 32}, 0.175),
}


def record(rng: np.random.Generator, position: int, domain: str, severity: int, n: int, error: float) -> dict[str, Any]:
    """One batch: correctness and confidence are drawn, and the scores computed from them, for a problem of ten classes."""
    confidence = np.clip(rng.beta(6, 1.4, n), 0.11, 0.9999)
    correct = rng.random(n) >= np.clip(error * 2 * (1.15 - confidence) / (2 * (1.15 - confidence)).mean(), 0, 1)
    other = (1 - confidence) / 9
    truth = np.where(correct, confidence, other)
    squares = confidence**2 + 9 * other**2
    where = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    counts = [np.bincount(where, weights, BINS).tolist() for weights in (np.ones(n), confidence, correct.astype(float))]
    return {
        "position": position, "domain": domain, "severity": severity, "n": n, "error": float(1 - correct.mean()),
        "nll": float(-np.log(truth).mean()), "brier": float((squares - 2 * truth + 1).mean()),
        "confidence": float(confidence.mean()), "entropy": float(rng.random()), "calibration": counts,
    }  # fmt: skip


def records(
    row: str, order: Sequence[str], seed: int, batches: int = 6, n: int = 40, severities: Sequence[int] = (5,)
) -> list[dict]:
    """The records of a job: `batches` batches for each pair of domain and severity."""
    method, _, _, error = ROWS[row]
    rng = np.random.default_rng([seed, *map(ord, row)])
    lines: list[dict] = []
    for number, domain in enumerate(order):
        hard = 0.6 + 0.8 * ((sum(map(ord, domain)) % 11) / 10)
        for severity in severities:
            for batch in range(batches):
                drift = 1 + (0.4 * number / len(order) if row == "tent-continual" else 0.3 * np.exp(-batch / 3))
                line = record(rng, len(lines), domain, severity, n, error * hard * drift * (0.4 + 0.12 * severity))
                mean_teacher = method in ("cotta", "petal")
                line |= {
                    "views_used": bool(mean_teacher and rng.random() < 0.3 * hard),
                    "restored": (0.03 if row == "petal-fim" else 0.01 * rng.uniform(0.95, 1.05)) if mean_teacher else 0.0,
                    "skipped": 0, "seconds": float(rng.gamma(20, 0.004 if mean_teacher else 0.0005)),
                    "distance": None if method in ("source", "bn") else 3 - 3 * np.exp(-len(lines) / 60) + rng.random() / 20,
                    "order": "standard-15", "seed": seed, "row": row,
                }  # fmt: skip
                lines.append(line)
    return lines


def write_run(
    folder: Path,
    rows: Sequence[str] = tuple(ROWS),
    *,
    seeds: Sequence[int] = (0,),
    orders: Sequence[tuple[str, Sequence[str]]] = (("standard-15", DOMAINS),),
    unfinished: Sequence[str] = (),
    samples: bool = False,
    manifest: dict[str, Any] | None = None,
    deterministic: Sequence[str] = ("source", "bn"),
    **kwargs: Any,
) -> Path:
    """Write a run folder; jobs whose id is in `unfinished` are left half-way."""
    jobs = []
    for row in rows:
        method, label, options, _ = ROWS[row]
        for name, order in orders:
            for seed in seeds[:1] if row in deterministic else seeds:
                identifier = f"{row}-{name}-{seed}".replace(":", "-")
                jobs.append({"id": identifier, "row": row, "method": method, "label": label, "order": name, "seed": seed,
                             "options": options})  # fmt: skip
                here = folder / "jobs" / identifier
                here.mkdir(parents=True)
                lines = records(row, order, seed, **kwargs)
                done, total = identifier not in unfinished, len(lines)
                lines = lines if done else lines[: len(lines) // 2]
                (here / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
                status = {"status": "done" if done else "running", "batches": total, "seconds": 1.5}
                (here / "job.json").write_text(json.dumps(status))
                if samples:
                    write_samples(here, order, row)
    whole = {
        "format": "petal-run-1", "recipe": "cifar10", "title": "CIFAR10-to-CIFAR10C", "fidelity": "official",
        "created": "2026-01-02T03:04:05+00:00",
        "command": ["petal", "run", "cifar10"], "versions": {"petal": "0.1", "torch": "2.13.0", "python": "3.11.9"},
        "device": "NVIDIA H200", "engine": "auto", "seeds": list(seeds), "orders": [name for name, _ in orders],
        "severity": 5, "batch_size": 40, "images": 240,
        "data": {"name": "CIFAR-10", "path": "/data/cifar10", "sha256": "ab" * 32},
        "weights": {"path": "/weights/wrn.safetensors", "sha256": "cd" * 32, "model": "wrn-28-10"},
        "posterior": {"path": "/weights/q.safetensors", "sha256": "ef" * 32},
        "classes": ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"], "jobs": jobs,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(whole | (manifest or {})))
    return folder


def write_samples(folder: Path, order: Sequence[str], row: str, each: int = 4, side: int = 16) -> None:
    """Pictures that are the same for every row, with predictions that are not."""
    rng, guess = np.random.default_rng(0), np.random.default_rng(len(row))
    y, x = np.mgrid[0:side, 0:side] / side
    images, entries = [], []
    for domain in order:
        for number in range(each):
            label = int(rng.integers(10))
            waves = [np.sin((3 + label) * (x * np.cos(k + label) + y * np.sin(k))) for k in range(3)]
            wave = 0.5 + 0.5 * np.stack(waves, -1)
            images.append((255 * np.clip(wave + 0.15 * rng.standard_normal(wave.shape), 0, 1)).astype(np.uint8))
            predicted = label if guess.random() < 1 - ROWS[row][3] else int(guess.integers(10))
            entries.append({"domain": domain, "severity": 5, "label": label, "predicted": predicted,
                            "probability": float(guess.uniform(0.3, 1)), "position": number})  # fmt: skip
    np.savez(folder / "samples.npz", images=np.stack(images))
    (folder / "samples.json").write_text(json.dumps(entries))
