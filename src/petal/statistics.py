"""What methods may know of the source besides its weights: Fisher information, features by class, and styles.

Statistics are data, as a posterior is: small tensors, made once on source images (`petal.collect_statistics`, or
`petal fit --collect prototypes,fisher,styles`) and never changed. No label of a test stream goes into them.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from petal._files import write_tensors
from petal._frozen import Frozen
from petal.errors import StatisticsError
from petal.norm import unwrapped

FORMAT = "petal-statistics-1"
PARTS = ("fisher", "prototypes", "styles")


@dataclass(frozen=True, eq=False)
class SourceStatistics(Frozen):
    """Statistics of source data under the source network. Parts that were not collected are empty or None.

    `fisher` is the diagonal Fisher information by parameter name. `prototypes` and `variances` [C, D] are mean and unbiased
    variance of the features (what the last linear layer is given) of each class, `counts` [C] says of how many images; a
    class of none has zeros. `styles` [n, D] are those of batches, for methods that tell domains apart by them. The tensors
    given are copied.
    """

    fisher: Mapping[str, Tensor] = field(default_factory=dict)
    prototypes: Tensor | None = None
    variances: Tensor | None = None
    counts: Tensor | None = None
    styles: Tensor | None = None

    def __post_init__(self) -> None:
        by_class = {name: getattr(self, name) for name in ("prototypes", "variances", "counts")}
        given = [name for name, value in by_class.items() if value is not None]
        if given and len(given) < 3:
            raise StatisticsError(f"prototypes, variances and counts belong together, got {', '.join(given)} alone")
        if not given and not self.fisher and self.styles is None:
            raise StatisticsError("statistics of nothing: give fisher, styles, or prototypes with variances and counts")
        if self.styles is not None and (self.styles.dim() != 2 or len(self.styles) < 2):
            raise StatisticsError(f"styles are [n, D] of two batches or more, got {list(self.styles.shape)}")
        if given:
            shapes = {name: list(value.shape) for name, value in by_class.items()}
            first = shapes["prototypes"]
            if len(first) != 2 or shapes != {"prototypes": first, "variances": first, "counts": first[:1]}:
                raise StatisticsError(f"prototypes and variances are [C, D] and counts [C], got {shapes}")
        every = {f"fisher of {name!r}": value for name, value in self.fisher.items()}
        signed = {"prototypes": by_class["prototypes"], "styles": self.styles}
        for name, value in (every | {name: by_class[name] for name in given} | signed).items():
            if value is None:
                continue
            if not value.isfinite().all():
                raise StatisticsError(f"{name} has values that are not finite")
            if name not in signed and (value < 0).any():
                raise StatisticsError(f"{name} has values below zero")
        freeze = object.__setattr__  # the dataclass is frozen: this is its constructor
        freeze(self, "fisher", MappingProxyType({name: value.detach().clone() for name, value in self.fisher.items()}))
        for name in given:
            freeze(self, name, by_class[name].detach().clone())
        freeze(self, "styles", None if self.styles is None else self.styles.detach().clone())

    def check(self, model: nn.Module, *parts: str) -> None:
        """Raise a StatisticsError unless these of the `PARTS` are there and fit the network."""
        missing = [part for part in parts if not (self.fisher if part == "fisher" else getattr(self, part) is not None)]
        if missing:
            names = ",".join(missing)
            raise StatisticsError(f"the statistics have no {names}: collect them with `petal fit --collect {names}`")
        model = unwrapped(model)
        parameters = dict(model.named_parameters())
        problems = [f"{name!r} is only in the statistics" for name in self.fisher if name not in parameters]
        problems += [
            f"{name!r} is {list(value.shape)} in the statistics and {list(parameters[name].shape)} in the network"
            for name, value in self.fisher.items()
            if name in parameters and parameters[name].shape != value.shape
        ]
        if self.prototypes is not None:
            layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
            classes, width = self.prototypes.shape
            if all((layer.out_features, layer.in_features) != (classes, width) for layer in layers):
                problems.append(f"prototypes are of {classes} classes and {width} features, and no linear layer is")
        if problems:
            raise StatisticsError(f"the statistics and the network do not fit: {'; '.join(problems[:10])}")

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "SourceStatistics":
        """These statistics on another device or in another precision. Counts stay whole numbers."""
        def moved(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(device, dtype if value.is_floating_point() else None)

        fisher = {name: value.to(device, dtype) for name, value in self.fisher.items()}
        others = (self.prototypes, self.variances, self.counts, self.styles)
        return SourceStatistics(fisher, *map(moved, others))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in a file: fisher.NAME, prototypes, variances, counts, styles."""
        others = {name: getattr(self, name) for name in ("prototypes", "variances", "counts", "styles")}
        found = {f"fisher.{name}": value for name, value in self.fisher.items()}
        return found | {name: value for name, value in others.items() if value is not None}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tensors as safetensors; the file appears whole or not at all."""
        tensors = self.tensors()
        try:
            write_tensors(path, tensors, {"format": FORMAT, "tensors": json.dumps(sorted(tensors))})
        except (OSError, SafetensorError) as error:
            raise StatisticsError(f"cannot write the statistics to {path}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SourceStatistics":
        """Read what `save` wrote; missing and extra tensors are refused by name."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise StatisticsError(f"{path} is no petal statistics: its format is {metadata.get('format')!r}")
                found = {key: file.get_tensor(key) for key in file.keys()}
            wrong = set(json.loads(metadata["tensors"])) ^ found.keys()
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            if isinstance(error, StatisticsError):
                raise
            raise StatisticsError(f"cannot read statistics from {path}: {error}") from error
        known = {"prototypes", "variances", "counts", "styles"}
        wrong |= {key for key in found if key not in known and not key.startswith("fisher.")}
        if wrong:
            raise StatisticsError(f"{path} has missing or unknown tensors: {', '.join(sorted(wrong))}")
        fisher = {key.removeprefix("fisher."): value for key, value in found.items() if key not in known}
        others: dict[str, Any] = {name: found.get(name) for name in known}
        try:
            return cls(fisher, **others)
        except StatisticsError as error:
            raise StatisticsError(f"{path}: {error}") from error
