"""Compare methods on one stream with several seeds: errors, calibration and cost, as a table and as a pandas frame.

    python examples/compare_methods.py --out records.csv

`petal run` does the same for whole benchmarks, resumes, and writes reports; this is how to do it in a notebook.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import petal

DOMAINS = ["gaussian_noise", "fog", "contrast", "jpeg_compression"]
METHODS: dict[str, Callable[[nn.Module, int], petal.Adapter]] = {
    "source": lambda model, seed: petal.Source(model),
    "batch norm": lambda model, seed: petal.BatchNorm(model),
    "tent": lambda model, seed: petal.Tent(model, lr=1e-3),
    "tent, rates by fan-in": lambda model, seed: petal.Tent(model, lr=petal.FanIn()),      # needs no search
    "cotta": lambda model, seed: petal.CoTTA(model, views=4, augment=petal.Views(flip=0.0), seed=seed),
    "petal-f": lambda model, seed: petal.adapt(model, flip=False, seed=seed),
}


def source() -> nn.Module:
    """A network for clean digits."""
    torch.manual_seed(0)
    model, data = petal.models.build("small", classes=10, seed=0), petal.data.digits("train")
    x, y = data.batch(range(len(data)))
    optimizer = torch.optim.Adam(model.train().parameters(), 3e-3)
    for rows in torch.cat([torch.randperm(len(x)) for _ in range(3)]).split(64):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    """Every method over the same images in the same order, each with its own seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a CSV of all records; needs pandas")
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    model, frames = source(), []
    print(f"{'method':<24}{'error %':>14}{'ECE':>8}{'forwards':>10}{'backwards':>10}{'ms':>7}")
    for name, make in METHODS.items():
        results = []
        for seed in range(arguments.seeds):
            stream = petal.streams.continual(petal.data.digits("test"), DOMAINS, batch_size=50, images=100)
            results.append(petal.evaluate(make(model, seed), stream))
            if arguments.out is not None:
                frames.append(results[-1].to_frame().assign(method=name, seed=seed))
        errors = torch.tensor([100 * result.mean.error for result in results])
        records = [record for result in results for record in result.records]
        forwards, backwards, seconds = (
            sum(getattr(r, part) for r in records) / len(records) for part in ("forwards", "backwards", "seconds")
        )
        spread = f"± {errors.std():.2f}" if len(errors) > 1 else ""
        print(f"{name:<24}{errors.mean():>7.2f} {spread:<6}{results[0].mean.ece:>8.3f}{forwards:>10.1f}{backwards:>10.1f}"
              f"{1000 * seconds:>7.0f}")  # fmt: skip
    if arguments.out is not None:
        import pandas as pd

        pd.concat(frames, ignore_index=True).to_csv(arguments.out, index=False)
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
