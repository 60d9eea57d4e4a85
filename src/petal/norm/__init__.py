"""Normalisation: which layers and parameters there are, the copy of a network that a method works on, and batch norms by
other statistics. `network_copy` is the door.

    layers    the layers of a network, their parameters, and others in their place
    network   `network_copy`: batch statistics, running ones, or layers of a method's choice
    recent    `RecentNorm`: the source and recent images, class by class (`SmallBatch`)
    mixed     `MixedNorm`: a mix of source and batch (`BatchNorm`)
    robust    `BoundedNorm`: batch statistics that no few images decide; `robust_statistics` of any network
    moving    running statistics that follow: `RobustNorm` (RoTTA, PeTTA), `InstanceAwareNorm` (NOTE)
"""

from petal.norm.layers import AFFINE_LAYERS, affine_parameters, batch_norms, replaced, source_statistics, unwrapped
from petal.norm.mixed import MixedNorm
from petal.norm.moving import InstanceAwareNorm, MovingNorm, RobustNorm, following, instance_aware
from petal.norm.network import network_copy, plain_copy, shared_copy
from petal.norm.recent import Following, RecentNorm, with_recent_norm
from petal.norm.robust import STATISTICS, BoundedNorm, robust_statistics

__all__ = [
    "AFFINE_LAYERS",
    "STATISTICS",
    "BoundedNorm",
    "Following",
    "InstanceAwareNorm",
    "MixedNorm",
    "MovingNorm",
    "RecentNorm",
    "RobustNorm",
    "affine_parameters",
    "batch_norms",
    "following",
    "instance_aware",
    "network_copy",
    "plain_copy",
    "replaced",
    "robust_statistics",
    "shared_copy",
    "source_statistics",
    "unwrapped",
    "with_recent_norm",
]
