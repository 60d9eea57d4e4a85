"""The methods of the paper, one file each. `METHODS` names them; adding one is adding an entry."""

from petal.methods.asr import ASR
from petal.methods.base import Adapter
from petal.methods.bn import BatchNorm
from petal.methods.cmf import CMF
from petal.methods.cotta import CoTTA
from petal.methods.deyo import DeYO
from petal.methods.eata import EATA
from petal.methods.eta import ETA
from petal.methods.gold import GOLD
from petal.methods.lame import LAME
from petal.methods.memo import MEMO
from petal.methods.memory import CSTU, PBRS, Memory
from petal.methods.note import NOTE
from petal.methods.obao import OBAO
from petal.methods.ordered import Ordered
from petal.methods.palm import PALM
from petal.methods.petal import Petal
from petal.methods.petta import PeTTA
from petal.methods.pseudo_label import PseudoLabel
from petal.methods.rates import FanIn, PosteriorRates
from petal.methods.rdumb import RDumb
from petal.methods.reservoir import Reservoir
from petal.methods.rmt import RMT
from petal.methods.robust import Robust
from petal.methods.roid import ROID
from petal.methods.rotta import RoTTA
from petal.methods.rpl import RPL
from petal.methods.santa import SANTA
from petal.methods.sar import SAR
from petal.methods.screen import Screen
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
    "eta": ETA,
    "eata": EATA,
    "rdumb": RDumb,
    "rpl": RPL,
    "sar": SAR,
    "deyo": DeYO,
    "roid": ROID,
    "cmf": CMF,
    "rmt": RMT,
    "santa": SANTA,
    "rotta": RoTTA,
    "note": NOTE,
    "petta": PeTTA,
    "lame": LAME,
    "memo": MEMO,
    "palm": PALM,
    "obao": OBAO,
    "gold": GOLD,
}

__all__ = [
    "ASR",
    "CMF",
    "CSTU",
    "EATA",
    "ETA",
    "GOLD",
    "LAME",
    "MEMO",
    "METHODS",
    "NOTE",
    "OBAO",
    "PALM",
    "PBRS",
    "RMT",
    "ROID",
    "RPL",
    "SANTA",
    "SAR",
    "Adapter",
    "BatchNorm",
    "CoTTA",
    "DeYO",
    "FanIn",
    "Memory",
    "Ordered",
    "PeTTA",
    "Petal",
    "PosteriorRates",
    "PseudoLabel",
    "RDumb",
    "Reservoir",
    "RoTTA",
    "Robust",
    "Screen",
    "SmallBatch",
    "Source",
    "Tent",
    "Wrapper",
]
