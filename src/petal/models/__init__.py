"""Networks and their checkpoints. Every network takes pixels in [0, 1]; normalisation is part of it."""

from petal.errors import renamed
from petal.models.cost import count_parameters, flops
from petal.models.libraries import LIBRARIES, checkpoint_classes, is_function
from petal.models.normalize import Normalize
from petal.models.pixels import (
    BYTE_PIXELS,
    NORMALIZED_PIXELS,
    UNIT_PIXELS,
    PixelStatistics,
    check_input,
    expected_input,
    input_problem,
)
from petal.models.preprocessing import Preprocessing, preprocessing_of
from petal.models.registry import NETWORKS, build
from petal.models.resnet import ResNet
from petal.models.resnext import ResNeXt
from petal.models.small import SmallNet
from petal.models.vit import VisionTransformer
from petal.models.weights import load_weights
from petal.models.wide_resnet import WideResNet

__all__ = [
    "BYTE_PIXELS",
    "LIBRARIES",
    "NETWORKS",
    "NORMALIZED_PIXELS",
    "UNIT_PIXELS",
    "Normalize",
    "PixelStatistics",
    "Preprocessing",
    "ResNeXt",
    "ResNet",
    "SmallNet",
    "VisionTransformer",
    "WideResNet",
    "build",
    "check_input",
    "checkpoint_classes",
    "count_parameters",
    "expected_input",
    "flops",
    "input_problem",
    "is_function",
    "load_weights",
    "preprocessing_of",
]

__getattr__ = renamed(__name__, Pixels=PixelStatistics)
