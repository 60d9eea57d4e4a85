"""The streams with the corruptions themselves, on real images."""

from itertools import islice

import pytest
import torch

from petal import corruptions
from petal.data import digits, streams


def images(stream):
    return torch.cat([batch.x for batch in stream])


def test_every_corruption_is_independent_of_the_batch_size():
    names = (*corruptions.CORRUPTIONS, *corruptions.VALIDATION_CORRUPTIONS)
    one, many = (streams.continual(digits(), names, severity=3, images=5, batch_size=size) for size in (1, 4))
    assert len(one) == 19 * 5
    assert torch.equal(images(one), images(many))


def test_a_mixed_stream_has_the_images_of_the_continual_one():
    names = ["gaussian_noise", "glass_blur", "frost", "jpeg_compression"]
    continual = streams.continual(digits(), names, images=6, batch_size=6)
    expected = {(b.domain, int(i)): x for b in continual for x, i in zip(b.x, b.index, strict=True)}
    for batch in streams.mixed(digits(), names, images=6, batch_size=5):
        for x, domain, i in zip(batch.x, batch.domains, batch.index.tolist(), strict=True):
            assert torch.equal(x, expected[domain, i])


def test_corruptions_differ_by_seed_and_change_the_images():
    clean, first, second = (
        images(s)
        for s in (
            streams.single(digits(), images=8),
            streams.single(digits(), "gaussian_noise", images=8),
            streams.single(digits(), "gaussian_noise", images=8, seed=1),
        )
    )
    assert (clean - first).abs().mean() > 0.02
    assert (first - second).abs().mean() > 0.02


def test_blended_stays_an_image_and_resumes():
    stream = streams.blended(digits(), drift=40, batch_size=16)
    batches = list(islice(stream, 12))
    for batch in batches:
        assert batch.x.min() >= 0
        assert batch.x.max() <= 1
        assert batch.x.isfinite().all()
    assert torch.equal(next(iter(stream.at(7))).x, batches[7].x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_corrupted_where_asked():
    for stream in (
        streams.continual(digits(), images=4, device="cuda", prefetch=1),
        streams.mixed(digits(), images=4, device="cuda"),
        streams.blended(digits(), device="cuda", batch_size=4),
    ):
        for batch in islice(stream, 15):
            assert batch.x.is_cuda
            assert batch.y.is_cuda
            assert not batch.index.is_cuda
    here, there = (images(streams.continual(digits(), images=4, device=d)).cpu() for d in ("cpu", "cuda"))
    assert ((here - there).abs() > 1.5 / 255).float().mean() < 1e-3
