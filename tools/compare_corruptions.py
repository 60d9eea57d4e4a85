"""Compare the corruptions with the benchmark's own generator, as a Markdown table.

    python tools/compare_corruptions.py FOLDER

FOLDER has corruption_reference.json, the statistics of the benchmark's generator (CIFAR profile, severities 1, 3, 5) on
the first 300 images of data/cifar10_test.npz, and those images. A cell is ours / the benchmark's.
"""

import argparse
import io
import itertools
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from petal.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, corrupt, image_keys

COUNT = 300
SEVERITIES = (1, 3, 5)


def images(pack: Path) -> torch.Tensor:
    with np.load(pack) as content:
        header, bodies, offsets = content["header"].tobytes(), content["bodies"].tobytes(), content["offsets"]
    files = (io.BytesIO(header + bodies[a:b]) for a, b in itertools.pairwise(offsets[: COUNT + 1]))
    levels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    return torch.from_numpy(levels).permute(0, 3, 1, 2).float() / 255


def statistics(out: torch.Tensor, clean: torch.Tensor) -> dict[str, float]:
    out, change = out.double(), out.double() - clean.double()
    return {
        "mean": out.mean().item(),
        "rmse": change.square().mean().sqrt().item(),
        "hf": (out.diff(dim=2).abs().mean() + out.diff(dim=3).abs().mean()).item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the corruptions with the benchmark's own generator.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    reference = json.loads((folder / "corruption_reference.json").read_text())
    clean = images(folder / "data" / "cifar10_test.npz")
    heads = [f"{what} {severity}" for what in ("rmse", "hf") for severity in SEVERITIES]
    print("| corruption |", " | ".join(heads), "| largest difference of means |")
    print("| --- |" + " ---: |" * (len(heads) + 1))
    for name in CORRUPTIONS + VALIDATION_CORRUPTIONS:
        ours = {}
        for severity in SEVERITIES:
            keys = image_keys(0, name, severity, range(COUNT))
            ours[severity] = statistics(corrupt(clean, name, severity, keys=keys, quantize=True), clean)
        theirs = {severity: reference[f"{name}_{severity}"] for severity in SEVERITIES}
        cells = [f"{ours[s][what]:.3f} / {theirs[s][what]:.3f}" for what in ("rmse", "hf") for s in SEVERITIES]
        furthest = max(abs(ours[s]["mean"] - theirs[s]["mean"]) for s in SEVERITIES)
        print(f"| {name} |", " | ".join(cells), f"| {furthest:.4f} |", flush=True)


if __name__ == "__main__":
    main()
