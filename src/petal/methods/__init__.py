"""The methods of the paper, one file each. `METHODS` names them; adding one is adding an entry."""

from petal.methods.base import Adapter
from petal.methods.bn import BatchNorm
from petal.methods.cotta import CoTTA
from petal.methods.lame import LAME
from petal.methods.memory import CSTU, PBRS, Memory
from petal.methods.note import NOTE
from petal.methods.petal import Petal
from petal.methods.petta import PeTTA
from petal.methods.pseudo_label import PseudoLabel
from petal.methods.rotta import RoTTA
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
    "rotta": RoTTA,
    "note": NOTE,
    "petta": PeTTA,
    "lame": LAME,
}

__all__ = [
    "CSTU",
    "LAME",
    "METHODS",
    "NOTE",
    "PBRS",
    "Adapter",
    "BatchNorm",
    "CoTTA",
    "Memory",
    "PeTTA",
    "Petal",
    "PseudoLabel",
    "RoTTA",
    "SmallBatch",
    "Source",
    "Tent",
    "Wrapper",
]
