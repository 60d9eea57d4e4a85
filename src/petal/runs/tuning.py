"""Choosing alpha and delta as the paper does: on the four validation corruptions, never on those of the test."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from petal.corruptions import VALIDATION_CORRUPTIONS
from petal.errors import ConfigError
from petal.evaluate import evaluate
from petal.recipes.row import Row
from petal.restore import Fisher
from petal.runs.experiment import OpenExperiment

ALPHAS = (1e-6, 1e-7, 1e-9, 5e-10, 1e-10, 5e-11, 1e-11, 1e-12)     # the paper's grid
DELTAS = (0.003, 0.01, 0.03, 0.1)


@dataclass(frozen=True)
class Trial:
    """The scores of one setting, over the validation corruptions."""

    prior_weight: float
    quantile: float
    error: float
    nll: float
    brier: float


def tune(
    opened: OpenExperiment,
    row: Row,
    *,
    alphas: Sequence[float] = ALPHAS,
    deltas: Sequence[float] = DELTAS,
    corruptions: Sequence[str] = VALIDATION_CORRUPTIONS,
    seed: int = 0,
    progress: Callable[[int, int, Trial], None] | None = None,
) -> list[Trial]:
    """Every alpha at the recipe's delta, then every delta at the best alpha. Returns the trials, the best first."""
    wrong = [name for name in corruptions if name not in VALIDATION_CORRUPTIONS]
    if wrong or not corruptions:
        raise ConfigError(
            f"settings are chosen on the validation corruptions ({', '.join(VALIDATION_CORRUPTIONS)}) and never on the "
            f"test's; got {', '.join(wrong) or 'none'}"
        )
    if not alphas or not deltas:
        raise ConfigError("give at least one alpha and one delta")
    plain = replace(opened.experiment, stream="continual", visits=None, label_correlation=None)
    opened = replace(opened, experiment=plain)
    start = row.options.get("restore")
    delta = start.quantile if isinstance(start, Fisher) else opened.recipe.quantile
    if delta not in deltas and len(deltas) == 1:
        delta = deltas[0]
    total = len(alphas) + sum(d != delta for d in deltas)
    trials: list[Trial] = []

    def trials_of(pairs: Sequence[tuple[float, float]]) -> Iterator[Trial]:
        for alpha, quantile in pairs:
            trial = _trial(opened, row, alpha, quantile, corruptions, seed)
            trials.append(trial)
            if progress is not None:
                progress(len(trials), total, trial)
            yield trial

    best = min(trials_of([(a, delta) for a in alphas]), key=_rank)
    list(trials_of([(best.prior_weight, d) for d in deltas if d != delta]))
    return sorted(trials, key=_rank)


def _rank(trial: Trial) -> tuple[float, float]:
    return trial.error, trial.brier         # the paper's criterion is the error; the Brier score decides between equals


def _trial(opened: OpenExperiment, row: Row, alpha: float, delta: float, corruptions: Sequence[str], seed: int) -> Trial:
    changed = replace(row, options={**row.options, "prior_weight": alpha, "restore": Fisher(delta)})
    mean = evaluate(opened.adapter(changed, seed), opened.stream(corruptions)).mean
    return Trial(alpha, delta, mean.error, mean.nll, mean.brier)
