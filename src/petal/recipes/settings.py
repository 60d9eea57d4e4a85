"""Settings from text: `petal.ema=0.99`, `petal.restore=Fisher(0.01)`. Values are parsed, never evaluated."""

import ast
import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union, get_args, get_origin

import torch
from torch import nn

from petal.augment import AugMix, Jitter, Views
from petal.destroy import Occlusion, Patches, Pixels
from petal.errors import ConfigError, PetalError
from petal.methods import METHODS, Adapter, FanIn, PosteriorRates
from petal.methods.describe import in_short
from petal.recipes.names import unknown
from petal.recipes.row import Row
from petal.restore import Fisher, Stochastic


@dataclass(frozen=True)
class SGD:
    """SGD as the `optimizer` of a method."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __call__(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The optimizer of these parameters."""
        return torch.optim.SGD(
            parameters, lr=lr, momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay
        )


@dataclass(frozen=True)
class Adam:
    """Adam as the `optimizer` of a method; the defaults are the paper's."""

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0

    def __call__(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The optimizer of these parameters."""
        return torch.optim.Adam(parameters, lr=lr, betas=self.betas, weight_decay=self.weight_decay, fused=True)


VALUES: dict[str, type] = {
    kind.__name__: kind
    for kind in (Fisher, Stochastic, Views, Jitter, AugMix, SGD, Adam, FanIn, PosteriorRates, Patches, Pixels, Occlusion)
}
TAKES: dict[str, tuple[type, ...]] = {
    "restore": (Fisher, Stochastic), "augment": (Views, Jitter, AugMix), "optimizer": (SGD, Adam),
    "lr": (float, FanIn, PosteriorRates), "destroy": (Patches, Pixels, Occlusion),
}  # fmt: skip
FIXED = ("self", "model", "posterior", "statistics", "seed", "adapter")  # given by the run, not by the user


def parse_value(text: str) -> Any:
    """A number, true, false, none, a word, or one of the `VALUES` with plain arguments.

    >>> parse_value("1e-9"), parse_value("none"), parse_value("Fisher(0.01)"), parse_value("sample")
    (1e-09, None, Fisher(quantile=0.01), 'sample')
    """
    words = {"none": None, "true": True, "false": False}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return text.strip()
    try:
        if isinstance(tree, ast.Call):
            return _made(tree)
        return ast.literal_eval(tree)
    except (ValueError, SyntaxError) as error:
        if isinstance(error, PetalError):
            raise
        return text.strip()


def _made(call: ast.Call) -> Any:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    known = {key.lower(): key for key in VALUES}
    if name.lower() not in known:
        raise unknown("value", name or ast.unparse(call.func), VALUES)
    try:
        arguments = [ast.literal_eval(a) for a in call.args]
        named = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg is not None}
        return VALUES[known[name.lower()]](*arguments, **named)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{ast.unparse(call)}: {error}") from error


def options_of(method: type[Adapter]) -> dict[str, inspect.Parameter]:
    """The settings a method's constructor takes, besides its network, what it knows of the source, and seed."""
    parameters = inspect.signature(method.__init__).parameters
    return {k: p for k, p in parameters.items() if k not in FIXED and p.kind is not p.VAR_KEYWORD}


def apply_settings(
    rows: Mapping[str, Row], settings: Sequence[str], wrappers: Mapping[str, type[Adapter]] | None = None
) -> dict[str, Row]:
    """The rows with `NAME.OPTION=VALUE` settings applied, the later the stronger.

    NAME is a row, or a method, which means all its rows; then what makes a row different from the others of its method
    (the restore of petal-sres) stays. With `wrappers`, NAME may be what goes around methods: `guard.window=2000`.
    """
    out = dict(rows)
    for setting in settings:
        left, equals, text = setting.partition("=")
        name, dot, option = left.strip().partition(".")
        if not equals or not dot or not option:
            raise ConfigError(f"a setting is written METHOD.OPTION=VALUE, for example petal.ema=0.99; got {setting!r}")
        if name in (wrappers or {}):
            value = checked(name, (wrappers or {})[name], option, text)
            for row in out.values():
                mine = {**row.wrapper_options.get(name, {}), option: value}
                out[row.name] = replace(row, wrapper_options={**row.wrapper_options, name: mine})
            continue
        meant = [r for r in out.values() if r.name == name or (r.method == name and option not in r.own)]
        if not meant:
            if not any(r.method == name for r in out.values()):
                raise unknown("method", name, dict.fromkeys([*out, *METHODS, *(wrappers or {})]))
            raise ConfigError(f"{setting!r}: {option} is what the rows of {name} differ in; set it for a row by its name")
        for row in meant:
            value = checked(row.name, METHODS[row.method], option, text)
            out[row.name] = replace(row, options={**row.options, option: value})
    return out


def checked(name: str, method: type[Adapter], option: str, text: str) -> Any:
    """The value of a setting of `name`, of the type that the constructor of its class declares."""
    known = options_of(method)
    if option not in known:
        if not known:
            raise ConfigError(f"{name} has no settings, so not {option!r} either")
        raise unknown(f"setting of {name}", option, known)
    value = parse_value(text)
    annotation = known[option].annotation
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    value = float(value) if option == "lr" and type(value) is int else value
    if option in TAKES:
        allowed = (*TAKES[option], *((type(None),) if type(None) in kinds else ()))
        if not isinstance(value, allowed):
            choices = ["a number" if kind is float else f"{kind.__name__}(...)" for kind in TAKES[option]]
            choices += ["none"] * (type(None) in kinds)
            raise ConfigError(f"{name}.{option} takes {', '.join(choices)}, got {text!r}")
        return value
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if str in kinds and float not in kinds and not isinstance(value, str) and value is not None:
        return text.strip()
    plain = tuple(k for k in kinds if isinstance(k, type))
    right = isinstance(value, plain) and not (isinstance(value, bool) and bool not in plain)
    if annotation is not inspect.Parameter.empty and plain and not right:
        wanted = " or ".join("none" if k is type(None) else k.__name__ for k in plain)
        raise ConfigError(f"{name}.{option} takes {wanted}, got {text!r}")
    return value


def as_json(value: Any) -> Any:
    """A setting as plain data: what is not plain is written as the text that `parse_value` reads.

    >>> as_json(Fisher(0.03)), as_json(SGD(momentum=0.9)), as_json(0.92)
    ('Fisher(quantile=0.03)', 'SGD(momentum=0.9)', 0.92)
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    return in_short(value)
