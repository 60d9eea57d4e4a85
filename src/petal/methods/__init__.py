"""The methods of the paper, one file each. `METHODS` names them; adding one is adding an entry."""

from petal.methods.base import Adapter
from petal.methods.bn import BatchNorm
from petal.methods.cotta import CoTTA
from petal.methods.petal import Petal
from petal.methods.pseudo_label import PseudoLabel
from petal.methods.rates import FanIn
from petal.methods.small_batch import SmallBatch
from petal.methods.source import Source
from petal.methods.tent import Tent
from petal.methods.wrapper import Wrapper

METHODS: dict[str, type[Adapter]] = {
    "source": Source,
    "bn": BatchNorm,
    "pseudo-label": PseudoLabel,
    "tent": Tent,
    "cotta": CoTTA,
    "petal": Petal,
}

__all__ = [
    "METHODS", "Adapter", "BatchNorm", "CoTTA", "FanIn", "Petal", "PseudoLabel", "SmallBatch", "Source", "Tent", "Wrapper",
]  # fmt: skip
