from itertools import product

import pytest

from petal import ConfigError, Fisher
from petal.recipes import recipe, rows
from petal.sweep import grid_rows, split_values

KNOWN = rows(recipe("digits"))


def test_every_combination_of_what_means_a_row() -> None:
    settings = ["petal.ema=0.9,0.99", "petal.restore=Fisher(0.01), none", "petal.views=3", "cotta.ema=0.5,0.6"]
    found = grid_rows(KNOWN, ["bn", "petal", "petal-sres", "cotta", "bn"], settings)
    assert [row.name for row in found] == [
        "bn",
        "petal,ema=0.9,restore=Fisher(0.01)", "petal,ema=0.9,restore=none",
        "petal,ema=0.99,restore=Fisher(0.01)", "petal,ema=0.99,restore=none",
        "petal-sres,ema=0.9", "petal-sres,ema=0.99",            # its restore is its own
        "cotta,ema=0.5", "cotta,ema=0.6",
    ]  # fmt: skip
    pairs = [(row.options["ema"], row.options["restore"]) for row in found[1:5]]
    assert pairs == list(product([0.9, 0.99], [Fisher(0.01), None]))
    assert {row.options["views"] for row in found[1:7]} == {3}
    assert [row.options["ema"] for row in found[5:]] == [0.9, 0.99, 0.5, 0.6]
    assert {row.label for row in found[1:5]} == {KNOWN["petal"].label}
    assert found[0] == KNOWN["bn"]


def test_settings_of_what_goes_around_a_method() -> None:
    found = grid_rows(KNOWN, ["petal", "petal+guard"], ["guard.window=100,200", "petal.ema=0.5"])
    assert [row.name for row in found] == ["petal", "petal+guard,window=100", "petal+guard,window=200"]
    assert [row.wrapper_options.get("guard") for row in found[1:]] == [{"window": 100}, {"window": 200}]
    assert {row.options["ema"] for row in found} == {0.5}


def test_one_value_changes_no_name_and_the_same_value_twice_is_one() -> None:
    assert [row.name for row in grid_rows(KNOWN, ["petal"], ["petal.ema=0.5"])] == ["petal"]
    assert [row.name for row in grid_rows(KNOWN, ["petal"], ["petal.ema=0.5,0.5"])] == ["petal,ema=0.5"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [("petal.ema=0.5,,0.6", "empty value"), ("petal.ema=0.5,x", "takes float"), ("petals.ema=1,2", "did you mean petal"),
     ("cotta.emma=1,2", "did you mean ema"), ("ema", "METHOD.OPTION=VALUE")],
)  # fmt: skip
def test_mistakes(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grid_rows(KNOWN, ["petal"], [setting])


@pytest.mark.parametrize("settings", [["petal.ema=0.5,.50"], ["petal.ema=0.5,0.9", "petal.ema=0.7"]])
def test_names_that_mean_one_run_are_refused(settings: list[str]) -> None:
    """A later setting is the stronger: both rows would have its value, under names that say otherwise."""
    with pytest.raises(ConfigError, match=r"petal,ema=0.5 and petal,ema=.* are the same run"):
        grid_rows(KNOWN, ["petal"], settings)


def test_split() -> None:
    assert split_values("a.b=Adam(betas=(0.5, 0.9)), SGD()") == ["a.b=Adam(betas=(0.5, 0.9))", "a.b=SGD()"]
