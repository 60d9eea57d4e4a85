"""Settings with several values: every row they mean in every combination."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from petal.errors import ConfigError
from petal.recipes import WRAPPERS, Row, apply_settings, pick_rows


def split_values(setting: str) -> list[str]:
    """One setting for each of its values; commas within brackets do not part them.

    >>> split_values("petal.ema=0.99,0.999"), split_values("petal.restore=Fisher(0.01), none")
    (['petal.ema=0.99', 'petal.ema=0.999'], ['petal.restore=Fisher(0.01)', 'petal.restore=none'])
    >>> split_values("cotta.augment=Views(flip=0, noise=0)")
    ['cotta.augment=Views(flip=0, noise=0)']
    """
    left, equals, right = setting.partition("=")
    values, depth = [""], 0
    for letter in right:
        depth += letter in "([{"
        depth -= letter in ")]}"
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    if equals and not all(value.strip() for value in values):
        raise ConfigError(f"{setting!r} has an empty value: values are separated by single commas")
    return [f"{left}{equals}{value.strip()}" for value in values]


def grid_rows(known: Mapping[str, Row], wanted: Sequence[str], settings: Sequence[str]) -> list[Row]:
    """The rows called `wanted` with settings applied, one for each combination of the values that mean it.

    A setting with several values becomes part of the row's name, by which its folders are called; its label stays, and
    reports tell such rows apart by what they differ in.
    """
    axes = [split_values(setting) for setting in settings]
    found: list[Row] = []
    for plain in pick_rows(known, wanted):
        mine = [axis for axis in axes if _means(known, plain, axis[0])]
        others = [axis[0] for axis in axes if axis not in mine]     # looked at too, so that a mistake in them is found
        for values in product(*mine):
            (row,) = pick_rows(apply_settings(known, [*others, *values], WRAPPERS), [plain.name])
            parts = [value.partition(".")[2] for value, axis in zip(values, mine, strict=True) if len(axis) > 1]
            row = replace(row, name=",".join([plain.name, *parts]).replace("/", "_"))
            if any(row.name == other.name for other in found):      # the same value twice
                continue
            for other in found:
                if replace(row, name=other.name) == other:
                    raise ConfigError(f"{other.name} and {row.name} are the same run: is an option in --set twice?")
            found.append(row)
    return found


def _means(known: Mapping[str, Row], row: Row, setting: str) -> bool:
    changed = apply_settings(known, [setting], WRAPPERS)
    name, target = row.name.split("+")[0], setting.partition(".")[0].strip()
    return target in row.wraps if target in WRAPPERS else changed[name] is not known[name]
