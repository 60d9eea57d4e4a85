import pytest

from petal import corruptions
from petal.data import order

from .fakes import fake_corrupt, fake_keys


@pytest.fixture
def fake(monkeypatch):
    """`petal.corruptions` replaced by something fast; the same for every hypothesis example of a test."""
    monkeypatch.setattr(corruptions, "corrupt", fake_corrupt, raising=False)
    monkeypatch.setattr(corruptions, "image_keys", fake_keys, raising=False)
    monkeypatch.setattr(corruptions, "CORRUPTIONS", order("standard-15"), raising=False)
    validation = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    monkeypatch.setattr(corruptions, "VALIDATION_CORRUPTIONS", validation, raising=False)
