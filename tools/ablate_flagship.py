"""The flagship with one thing changed at a time, on the four validation corruptions, as a table in Markdown.

    python tools/ablate_flagship.py digits --seeds 2
    python tools/ablate_flagship.py cifar10 --network wrn-40-2 --data ... --weights ... --posterior ... --device cuda

A seed is the method's and the stream's. What needs a posterior is left out without one; the digits have one.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

import petal
from petal.recipes.settings import checked
from petal.runs import Experiment
from petal.runs.tuning import with_options

CHANGES = {
    "petal-f": {},
    "learns from the batch alone": {"learn": "plain"},
    "learns from a view alone": {"learn": "view"},
    "no mirror images": {"target": "teacher", "answer": "teacher+student"},
    "answer of the teacher alone": {"target": "teacher", "answer": "teacher"},
    "teacher without warm-up": {"warmup": "none"},
    "warm-up from 12 steps": {"warmup": "12"},
    "warm-up from 200 steps": {"warmup": "200"},
    "rate 1e-3 for all": {"lr": "1e-3"},
    "rate 3e-4 for all": {"lr": "3e-4"},
    "rates three times as high": {"lr": "FanIn(3.45, 3e-3, 9e-4)"},
    "restore Stochastic(0.003)": {"restore": "Stochastic(0.003)"},
    "restore Fisher(0.03)": {"restore": "Fisher(0.03)"},
    "no surer than teacher and student agree": {"calibrate": "teacher+student"},
    "no surer than teacher and view agree": {"calibrate": "teacher+student-view"},
}
WITH_POSTERIOR = {
    "prior of weight 1e-6": {"prior_weight": "1e-6"},
    "prior of weight 1e-4": {"prior_weight": "1e-4"},
    "PosteriorRates(0.3)": {"lr": "PosteriorRates(0.3)"},
    "samples of the posterior in the answer": {"answer": "teacher+student+samples"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    for name in ("network", "data", "weights", "posterior"):
        parser.add_argument(f"--{name}")
    for name in ("images", "batch-size", "seeds"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--source", default="runs/flagship-source", help="where the network of the digits is kept")
    parser.add_argument("--only", action="append", help="the rows with this in their name; may be repeated")
    given = vars(parser.parse_args())
    only = given.pop("only") or [""]
    device, folder, seeds = torch.device(given.pop("device")), Path(given.pop("source")), given.pop("seeds") or 1
    experiment = Experiment(given.pop("recipe"), stream="continual", **given).with_source(folder, device)
    print("| " + " | ".join(["", "error %", "NLL", "Brier", "ECE"]) + " |\n| --- | --- | --- | --- | --- |")
    for label, change in (CHANGES | (WITH_POSTERIOR if experiment.posterior else {})).items():
        if not any(word in label for word in only):
            continue
        scores = [scored(experiment, change, seed, device) for seed in range(seeds)]
        if all(scores):
            error, *others = torch.tensor(scores).double().mean(0).tolist()
            print(f"| {label} | {100 * error:.2f} | " + " | ".join(f"{value:.4f}" for value in others) + " |", flush=True)


def scored(experiment: Experiment, change: dict[str, str], seed: int, device: torch.device) -> list[float]:
    """Error, NLL, Brier and ECE of the row with a change; nothing if the row is so already."""
    opened = replace(experiment, stream_seed=seed).open(device)
    (row,) = experiment.rows(["petal-f"])
    options = {name: checked(row.name, petal.Petal, name, text) for name, text in change.items()}
    if options and all(row.options.get(name) == value for name, value in options.items()):
        return []
    mean = petal.evaluate(opened.adapter(with_options(row, options), seed), opened.stream(petal.VALIDATION_CORRUPTIONS)).mean
    return [mean.error, mean.nll, mean.brier, mean.ece]


if __name__ == "__main__":
    main()
