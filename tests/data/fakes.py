"""A stand-in for the corruptions: fast, and as strict about its arguments as the streams may rely on."""

import zlib

import numpy as np
import torch

from petal.data import from_arrays


def fake_keys(seed, name, severity, index):
    words = np.array([seed, zlib.crc32(name.encode()), severity], dtype=np.int64)
    return torch.tensor([zlib.crc32(np.append(words, int(i)).tobytes()) for i in index], dtype=torch.int64)


def fake_corrupt(x, name, severity=5, profile="cifar", generator=None, quantize=False, *, keys=None):
    assert x.dtype == torch.float32
    assert keys.dtype == torch.int64
    assert len(keys) == len(x)
    assert 1 <= severity <= 5
    noise = torch.stack([torch.rand(x.shape[1:], generator=torch.Generator().manual_seed(int(k))) for k in keys])
    y = (0.7 * x + 0.06 * severity * noise).clamp(0, 1)
    return (y * 255).floor() / 255 if quantize else y


def toy(n=23, classes=4, size=4, seed=0):
    """n tiny images, the k-th recognisable by its first value."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(n, 3, size, size, generator=generator)
    images[:, 0, 0, 0] = torch.arange(n) / n
    labels = torch.randint(classes, (n,), generator=generator)
    return from_arrays(images, labels, name="toy", classes=[f"c{k}" for k in range(classes)])
