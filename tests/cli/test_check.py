"""`petal check`: methods with typical mistakes, each found and named with what to do about it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from petal import METHODS, ConfigError
from petal.checks.learning import within_rounding
from petal.cli import app

NAN, INF = float("nan"), float("inf")
MISTAKES = """
import torch
import petal
from petal.functional import entropy
from petal.methods.network import logits_of
from petal.norm import affine_parameters


class Good(petal.Adapter):
    def __init__(self, model, lr=1e-2, seed=0):
        super().__init__(model, batch_statistics=True, seed=seed)
        self.adapt(affine_parameters(self.model), lr)
        self.begin(model)

    def begin(self, model):
        pass

    def weight(self, logits):
        return 1.0

    def step(self, x):
        logits = self.logits(self.model, x)
        self.descend((self.weight(logits) * entropy(logits)).mean())
        return logits


class Undeclared(Good):                     # a running mean that is no state
    def begin(self, model):
        self.mean = None

    def weight(self, logits):
        now = logits.detach().softmax(1).mean(0)
        self.mean = now if self.mean is None else self.mean.lerp(now, 0.1)
        return 1 - logits.detach().softmax(1) @ self.mean


class Counter(Good):                        # a tensor that is changed in place
    def begin(self, model):
        self.temperature = torch.ones(())

    def weight(self, logits):
        return self.temperature.mul_(0.9).clone()


class Touches(Good):                        # the user's own network, kept and changed
    def begin(self, model):
        self.given = [model]

    def weight(self, logits):
        with torch.no_grad():
            next(self.given[0].parameters()).mul_(0.99)
        return 1.0


class Dice(Good):                           # torch's own random numbers
    def weight(self, logits):
        return torch.rand(len(logits))


class InPlace(Good):                        # the batch itself
    def step(self, x):
        return super().step(x.mul_(0.9))


class Hasty(Good):                          # another answer than the one that was out already
    def step(self, x):
        self.give(self.logits(self.model, x))
        return super().step(x) + 1


petal.METHODS |= {"good": Good, "undeclared": Undeclared, "counter": Counter, "touches": Touches, "dice": Dice,
                  "in-place": InPlace, "hasty": Hasty}
"""

FOUND = {
    "undeclared": ("no undeclared state", "`mean` changes while adapting", "self.register_state('mean', value)"),
    "counter": ("no undeclared state", "`temperature` changes while", "self.register_state('temperature', value)"),
    "touches": ("user's network", "the user's network was changed", "work on self.model, which is a copy"),
    "dice": ("same seed", "torch's own random numbers were used", "draw random numbers from self.generator alone"),
    "hasty": ("answers", "the answer that is handed out is not the one that is returned", "hands to self.give"),
    "in-place": ("batch untouched", "the batch was changed in place", "x.clone()"),
}


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    before = dict(METHODS)
    path = tmp_path / "mistakes.py"
    path.write_text(MISTAKES)
    yield path
    for name in METHODS.keys() - before.keys():
        del METHODS[name]


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check", *map(str, arguments)], catch_exceptions=False)


def said(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize("name", FOUND)
def test_a_mistake_is_found_and_named_with_a_hint(name: str, plugin: Path) -> None:
    result = run(plugin, "--method", name, "--network", "batch-norm")
    check, *words = FOUND[name]
    assert result.exit_code == 1
    assert f"failed {check}: " in said(result)
    for text in words:
        assert text in said(result)


def test_a_method_without_mistakes_passes_on_all_networks(plugin: Path) -> None:
    result = run(plugin, "--method", "good")
    assert result.exit_code == 0, result.output
    assert "failed" not in result.output
    row = next(line for line in result.output.splitlines() if line.startswith("no undeclared state"))
    assert row.split() == ["no", "undeclared", "state", *["ok"] * 6]
    assert all(network in result.output for network in ("batch-norm", "group-norm", "vit"))


def test_what_goes_around_a_method_is_checked_with_it() -> None:
    result = run("--method", "source+guard", "--network", "batch-norm")
    assert result.exit_code == 0
    assert "source+guard" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((), "say what to check"), (("--method", "tentt"), "did you mean tent"),
     (("--method", "tent+gard"), "did you mean .*guard"), (("--method", "tent", "--network", "vgg"), "no network 'vgg'")],
)  # fmt: skip
def test_what_there_is_not_is_named(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(*arguments)


@pytest.mark.parametrize(
    ("other", "same"),
    [([1.0, NAN, INF], True), ([1.001, NAN, INF], True), ([1.1, NAN, INF], False), ([NAN, NAN, INF], False),
     ([1.0, 0.0, INF], False), ([1.0, NAN, 0.0], False), ([1.0, NAN, -INF], False), ([1.0, NAN], False)],
)  # fmt: skip
def test_state_of_the_engine_is_near_where_all_that_is_no_number_is_equal(other: list[float], same: bool) -> None:
    assert within_rounding(torch.tensor([1.0, NAN, INF]), torch.tensor(other)) is same
    assert not within_rounding(torch.tensor([1, 2]), torch.tensor([1, 3]))
