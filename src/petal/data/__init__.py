"""Datasets and the streams made of them.

A dataset (`open_dataset`, or one of the readers by name) is numbered images with labels; a stream (`petal.streams`) is
a dataset arriving under changing corruptions, one `Batch` at a time.
"""

from petal.data import streams
from petal.data.cifar import Cifar, CifarC, npz
from petal.data.dataset import ArrayDataset, CorruptedDataset, Dataset, from_arrays
from petal.data.folders import CorruptedTree, FileDataset, image_folder, imagenet_3dcc, imagenet_c
from petal.data.frames import Frames
from petal.data.orders import order, order_names, resolve_order
from petal.data.recognise import KINDS, open_dataset
from petal.data.streams import STREAMS, Batch, Segment, Stream
from petal.data.torch_data import TorchDataset, digits, from_torch
from petal.data.write import WriteProgress, Written, write_corrupted
from petal.errors import renamed

__all__ = [
    "KINDS", "STREAMS", "ArrayDataset", "Batch", "Cifar", "CifarC", "CorruptedDataset", "CorruptedTree", "Dataset",
    "FileDataset", "Frames",
    "Segment", "Stream", "TorchDataset", "WriteProgress", "Written", "digits", "from_arrays", "from_torch",
    "image_folder", "imagenet_3dcc", "imagenet_c", "npz", "open_dataset", "order", "order_names", "resolve_order",
    "streams", "write_corrupted",
]  # fmt: skip

__getattr__ = renamed(__name__, Progress=WriteProgress)
