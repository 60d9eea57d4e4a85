"""Reading published checkpoints: whatever they are wrapped in, into a network that is otherwise unchanged."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from petal.errors import ModelError
from petal.models.normalize import find_normalize

PICKLED = (".pt", ".pth", ".tar", ".bin", ".ckpt")
CONTAINERS = ("state_dict", "model_state_dict", "model", "net")
PREFIXES = ("module.", "model.", "_orig_mod.")  # DataParallel, a wrapper that normalises, torch.compile
_BOOKKEEPING = ("n_averaged",)  # torch.optim.swa_utils
_NORMALIZATION = re.compile(r"(?:(?:normaliz\w*|normalis\w*|preprocess)\.)?(mean|mu|std|sigma)")
_SHOWN = 6

Model = TypeVar("Model", bound=nn.Module)


def load_weights(model: Model, path: str | Path) -> Model:
    """Load a checkpoint file into a network and return the network.

    Takes `.safetensors`, or `.pt`, `.pth`, `.tar`, `.bin`, `.ckpt` as `torch.save` writes them. Pickled files are read
    with `weights_only=True`: a file that would run code is refused. Weights may lie inside `state_dict`,
    `model_state_dict`, `model` or `net`, and have `module.`, `model.` or `_orig_mod.` before their names. Normalisation
    entries (`mu`, `sigma`, `normalize.mean`, ...) must agree with the network's own normalisation.

    Raises `ModelError`, with the network unchanged, when the file cannot be read or does not fit.
    """
    file = Path(path).expanduser()
    wanted = model.state_dict()
    state = _strip_prefixes(_find_state(_read(file), file), wanted)
    unused: tuple[str, ...] = getattr(model, "unused_prefixes", ())
    state = {key: v for key, v in state.items() if key not in _BOOKKEEPING and not (unused and key.startswith(unused))}
    state = _check_normalization(model, state, wanted, file)
    _check_fit(state, wanted, file)
    model.load_state_dict(state, strict=False)  # checked above; only num_batches_tracked may be absent
    return model


def _read(file: Path) -> Any:
    """The content of a checkpoint file, read without running anything."""
    if not file.is_file():
        raise ModelError(f"no weights at {file}: " + ("that is a folder" if file.is_dir() else "there is no such file"))
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{file} is not a readable safetensors file: {error}") from error
    if file.suffix in PICKLED:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle can fail in any way
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(
                f"{file} is damaged, no checkpoint, or holds objects other than tensors, which petal does not load "
                f"because they can run code: {reason} If you trust it, save its state_dict as safetensors."
            ) from error
    raise ModelError(f"{file}: weights are read from .safetensors or {', '.join(PICKLED)} files")


def _find_state(content: Any, file: Path) -> dict[str, Tensor]:
    """The innermost mapping from names to tensors."""
    while isinstance(content, Mapping):
        # AugMix writes {"state_dict": {...}, "model": "resnext", ...}: only a mapping is a container.
        inner = next((content[key] for key in CONTAINERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        raise ModelError(f"{file} holds a {type(content).__name__}, not a state_dict")
    state = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise ModelError(
            f"{file} holds no weights; looked for tensors in it and in its {', '.join(CONTAINERS)}. "
            f"It has: {_shorten([str(key) for key in content])}"
        )
    return state


def _strip_prefixes(state: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove prefixes that all weights share, until some name is one of the network's."""
    while not state.keys() & wanted.keys():
        weights = [key for key in state if not _NORMALIZATION.fullmatch(key) and key not in _BOOKKEEPING]
        prefix = next((p for p in PREFIXES if weights and all(key.startswith(p) for key in weights)), None)
        if prefix is None:
            break
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _check_normalization(
    model: nn.Module, state: dict[str, Tensor], wanted: Mapping[str, Tensor], file: Path
) -> dict[str, Tensor]:
    """Remove normalisation entries, after a check that they agree with the network's own."""
    normalize = find_normalize(model)
    entries = {key: _NORMALIZATION.fullmatch(key) for key in state if key not in wanted}
    found = {match[1]: state[key] for key, match in entries.items() if match and state[key].numel() in (1, 3)}
    if not found or normalize is None:
        return state
    mean = found.get("mean", found.get("mu", torch.zeros(1))).flatten().double()
    std = found.get("std", found.get("sigma", torch.ones(1))).flatten().double()
    own_mean = torch.zeros(1) if normalize.mean is None else normalize.mean
    own_std = torch.ones(1) if normalize.std is None else normalize.std
    for theirs, ours in ((mean, own_mean), (std, own_std)):
        ours = ours.flatten().double().cpu()
        if not torch.allclose(theirs.expand(3), ours.expand(3), atol=1e-4):
            asked = ", ".join(f"{k}={[round(n, 4) for n in v.tolist()]}" for k, v in (("mean", mean), ("std", std)))
            raise ModelError(
                f"{file} was trained with other input normalisation than this network has ({normalize}); build the "
                f"network with {asked}"
            )
    return {key: value for key, value in state.items() if not entries.get(key) or value.numel() not in (1, 3)}


def _check_fit(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], file: Path) -> None:
    """Raise unless the weights are exactly those the network needs."""
    missing = [key for key in wanted if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in wanted]
    common = [key for key in wanted if key in state]
    wrong = [key for key in common if state[key].shape != wanted[key].shape]
    kind = [key for key in common if state[key].is_floating_point() != wanted[key].is_floating_point()]
    problems = []
    if missing:
        problems.append(f"missing: {_shorten(missing)}")
    if unexpected:
        problems.append(f"unexpected: {_shorten(unexpected)}")
    if wrong:
        shapes = [f"{key} is {_shape(state[key])}, the network's {_shape(wanted[key])}" for key in wrong]
        problems.append(f"wrongly shaped: {_shorten(shapes, '; ')}")
    if kind:
        types = [f"{key} is {state[key].dtype}, the network's {wanted[key].dtype}" for key in kind]
        problems.append(f"of another type: {_shorten(types, '; ')}")
    if problems:
        if wrong and not missing and not unexpected:
            problems.extend(_classes_hint(wrong, state, wanted))
        raise ModelError(f"{file} does not fit the network\n  " + "\n  ".join(problems))
    broken = [key for key in common if state[key].is_floating_point() and not bool(state[key].isfinite().all())]
    if broken:
        raise ModelError(f"{file} holds weights that are not finite: {_shorten(broken)}")


def _classes_hint(wrong: list[str], state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """If only the last layer's number of outputs differs, say so."""
    outputs = {(state[key].shape[:1].numel(), wanted[key].shape[:1].numel()) for key in wrong if state[key].ndim}
    if len(outputs) == 1 and all(state[key].shape[1:] == wanted[key].shape[1:] for key in wrong):
        theirs, ours = outputs.pop()
        return [f"the weights are for {theirs} classes, the network has {ours}: build it with classes={theirs}"]
    return []


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "a number"


def _shorten(names: Sequence[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more
