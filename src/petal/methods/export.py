"""An adapted network in a file: its weights as safetensors, or all of it as ONNX."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from petal._files import make_folder, replacing, writing
from petal._optional import optional
from petal.calls import check_batch, given, logits_in, moved, parts
from petal.errors import ConfigError, InputError, ModelError

SUFFIXES = (".safetensors", ".onnx")


def write_network(network: nn.Module, path: str | Path, example: Any = None) -> None:
    """Write a network: to a name in .safetensors its state_dict, to one in .onnx a graph of it, made from an example."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a network is written as {' or '.join(SUFFIXES)}, by the name of the file; not {path.name!r}")
    if path.suffix == ".onnx":
        _write_onnx(network, path, example)
        return
    make_folder(path.parent)
    tied = {name: value.detach().contiguous().clone() for name, value in network.state_dict().items()}
    try:
        with writing(path), replacing(path) as temporary:
            save_file(tied, temporary)
    except SafetensorError as error:
        raise ModelError(f"cannot write the network to {path}: {error}") from error


def _write_onnx(network: nn.Module, path: Path, example: Any) -> None:
    """As ONNX, by torch's exporter; the size of the batch stays open. Inputs are `input`, `input_0`..., or as in a dict."""
    for package in ("onnx", "onnxscript"):
        optional(package, "an ONNX file", "onnx")
    if example is None:
        raise ConfigError("ONNX is made by watching a batch go through: give example=, a batch as the method gets them")
    like = next(network.parameters())
    x = moved(example, like)
    check_batch(x, like.device, like.dtype)
    if len(x) < 2:
        raise InputError("the size of the batch stays open only if the example has two samples or more")
    tensors = parts(x)
    names = ["input"] if isinstance(x, Tensor) else [f"input_{n}" if n.isdecimal() else n for n in x.named()]
    around = Logits(network, x)
    open_size = tuple({0: torch.export.Dim.DYNAMIC} for _ in tensors)
    make_folder(path.parent)
    with quiet():
        try:
            program = torch.onnx.export(
                around, tuple(tensors.values()), dynamo=True, dynamic_shapes=(open_size,), input_names=names,
                output_names=["logits"], verbose=False,
            )  # fmt: skip
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise ModelError(f"torch cannot make ONNX of this network: {reason[0] if reason else error!r}") from error
        with writing(path), replacing(path) as temporary:
            program.save(str(temporary), external_data=False)  # type: ignore[union-attr]


class Logits(nn.Module):
    """A network with its inputs as separate tensors and its logits as the only result."""

    def __init__(self, network: nn.Module, like: Any) -> None:
        super().__init__()
        self.network, self.names = network, None if isinstance(like, Tensor) else list(like.named())
        self.named = isinstance(given(like), dict)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Logits [N, C]."""
        if self.named and self.names is not None:
            found = self.network(**dict(zip(self.names, tensors, strict=True)))
        else:
            found = self.network(*tensors)
        logits: Tensor = logits_in(found)
        return logits


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's warnings, of packages that nobody asked for and of what it calls deprecated in itself."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
