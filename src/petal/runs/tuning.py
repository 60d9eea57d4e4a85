"""Choosing settings as the paper does: on the four validation corruptions, never on those of the test."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from petal.corruptions import VALIDATION_CORRUPTIONS
from petal.errors import ConfigError
from petal.evaluate import evaluate
from petal.recipes.row import Row
from petal.restore import Fisher
from petal.runs.experiment import ORDER, OpenExperiment

ALPHAS = (1e-6, 1e-7, 1e-9, 5e-10, 1e-10, 5e-11, 1e-11, 1e-12)     # the paper's grid
DELTAS = (0.003, 0.01, 0.03, 0.1)


@dataclass(frozen=True)
class Trial:
    """The scores of some settings, over the validation corruptions."""

    options: Mapping[str, Any]
    error: float
    nll: float
    brier: float
    ece: float

    @property
    def prior_weight(self) -> float:
        """PETAL's alpha."""
        return float(self.options["prior_weight"])

    @property
    def quantile(self) -> float:
        """PETAL's delta."""
        return float(self.options["restore"].quantile)


def tune(
    opened: OpenExperiment,
    row: Row,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    alphas: Sequence[float] = ALPHAS,
    deltas: Sequence[float] = DELTAS,
    budget: int | None = None,
    corruptions: Sequence[str] = VALIDATION_CORRUPTIONS,
    seed: int = 0,
    progress: Callable[[int, int, Trial], None] | None = None,
) -> list[Trial]:
    """Every value of one option after the other, with the best of those before. Returns the trials, the best first.

    `grid` has the values of each option of the row, such as `lr` or, for what goes around a method, `small.memory`. Without
    it PETAL's alphas and then its deltas are tried. An option that the row has a value for begins with it, and a value is
    not tried twice. After `budget` trials it ends.
    """
    wrong = [name for name in corruptions if name not in VALIDATION_CORRUPTIONS]
    if wrong or not corruptions:
        raise ConfigError(
            f"settings are chosen on the validation corruptions ({', '.join(VALIDATION_CORRUPTIONS)}) and never on the "
            f"test's; got {', '.join(wrong) or 'none'}"
        )
    if grid is None:
        grid = {"prior_weight": alphas, "restore": [Fisher(delta) for delta in deltas]}
    empty = [name for name, values in grid.items() if not values]
    if empty or not grid:
        raise ConfigError(f"give at least one value to try{' of ' + ', '.join(empty) if empty else ''}")
    without: dict[str, Any] = dict.fromkeys(("visits", "label_correlation", *ORDER))
    plain = replace(opened.experiment, stream="continual", **without)
    opened = replace(opened, experiment=plain)
    values = {name: list(dict.fromkeys(given)) for name, given in grid.items()}
    best = {name: start_of(row, name, given) for name, given in values.items()}
    total = planned(values, best)
    limit = total if budget is None else min(budget, total)
    trials: list[Trial] = []
    for name, given in values.items():
        tried = {trial.options[name] for trial in trials if trial.options == best}
        for value in given:
            if value not in tried and len(trials) < limit:
                options = {**best, name: value}
                mean = evaluate(opened.adapter(with_options(row, options), seed), opened.stream(corruptions)).mean
                trials.append(Trial(options, mean.error, mean.nll, mean.brier, mean.ece))
                if progress is not None:
                    progress(len(trials), limit, trials[-1])
        best = dict(min(trials, key=_rank).options)
    return sorted(trials, key=_rank)


def planned(values: Mapping[str, Sequence[Any]], start: Mapping[str, Any]) -> int:
    """How many trials there are without a budget: the values of the first option, then those of others not tried by then."""
    first, *others = values
    return len(values[first]) + sum(bool(value != start[name]) for name in others for value in values[name])


def start_of(row: Row, name: str, values: Sequence[Any]) -> Any:
    """The row's own value of an option, unless another is the only one to try."""
    wrapper, _, option = name.rpartition(".")
    own = row.wrapper_options.get(wrapper, {}) if wrapper else row.options
    return values[0] if len(values) == 1 or option not in own else own[option]


def with_options(row: Row, options: Mapping[str, Any]) -> Row:
    """The row with these values of its options, and of the options of what goes around its method."""
    for name, value in options.items():
        wrapper, _, option = name.rpartition(".")
        if wrapper:
            mine = {**row.wrapper_options.get(wrapper, {}), option: value}
            row = replace(row, wrapper_options={**row.wrapper_options, wrapper: mine})
        else:
            row = replace(row, options={**row.options, option: value})
    return row


def _rank(trial: Trial) -> tuple[float, float]:
    return trial.error, trial.brier         # the paper's criterion is the error; the Brier score decides between equals
