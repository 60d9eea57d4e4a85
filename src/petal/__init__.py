"""Lifelong test-time adaptation: a classifier in service that keeps adapting, stays calibrated and does not forget."""

from petal import checks, data, models
from petal._version import __version__
from petal.augment import Jitter, Views
from petal.checkpoint import Checkpoints, load, save
from petal.collect import collect_statistics
from petal.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, corrupt
from petal.data import open_dataset, streams
from petal.engine import accelerate
from petal.errors import (
    ConfigError,
    DataError,
    InputError,
    ModelError,
    PetalError,
    PetalWarning,
    PosteriorError,
    StatisticsError,
)
from petal.evaluate import Prediction, Record, Result, Scores, evaluate, iter_evaluate, predict, summarize
from petal.guard import Alarm, Guard
from petal.methods import (
    CMF,
    EATA,
    ETA,
    LAME,
    METHODS,
    NOTE,
    RMT,
    ROID,
    RPL,
    SANTA,
    SAR,
    Adapter,
    BatchNorm,
    CoTTA,
    DeYO,
    FanIn,
    Ordered,
    Petal,
    PeTTA,
    PseudoLabel,
    RDumb,
    RoTTA,
    SmallBatch,
    Source,
    Tent,
)
from petal.order import TemporalPrior
from petal.parallel import ParallelError, parallelize
from petal.posterior import DiagonalGaussian
from petal.recommended import adapt
from petal.restore import Fisher, Stochastic
from petal.statistics import SourceStatistics
from petal.swag import fit_swag

__all__ = [
    "CMF",
    "CORRUPTIONS",
    "EATA",
    "ETA",
    "LAME",
    "METHODS",
    "NOTE",
    "RMT",
    "ROID",
    "RPL",
    "SANTA",
    "SAR",
    "VALIDATION_CORRUPTIONS",
    "Adapter",
    "Alarm",
    "BatchNorm",
    "Checkpoints",
    "CoTTA",
    "ConfigError",
    "DataError",
    "DeYO",
    "DiagonalGaussian",
    "FanIn",
    "Fisher",
    "Guard",
    "InputError",
    "Jitter",
    "ModelError",
    "Ordered",
    "ParallelError",
    "PeTTA",
    "Petal",
    "PetalError",
    "PetalWarning",
    "PosteriorError",
    "Prediction",
    "PseudoLabel",
    "RDumb",
    "Record",
    "Result",
    "RoTTA",
    "Scores",
    "SmallBatch",
    "Source",
    "SourceStatistics",
    "StatisticsError",
    "Stochastic",
    "TemporalPrior",
    "Tent",
    "Views",
    "__version__",
    "accelerate",
    "adapt",
    "checks",
    "collect_statistics",
    "corrupt",
    "data",
    "evaluate",
    "fit_swag",
    "iter_evaluate",
    "load",
    "models",
    "open_dataset",
    "parallelize",
    "predict",
    "save",
    "streams",
    "summarize",
]
