"""The mean of predictions, of logits or of probabilities."""

import numpy as np
import pytest
import torch

from petal.methods.network import mean_over


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_the_mean_is_that_of_logits_or_of_probabilities_and_leaves_them_as_they_are(average: str) -> None:
    """An answer and a target may have members in common: what one mean is of, the next may need."""
    given = [4 * torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    before = [logits.numpy().copy() for logits in given]
    mean = mean_over(given, 3, average).numpy()
    for logits, old in zip(given, before, strict=True):
        np.testing.assert_array_equal(logits, old)
    if average == "logits":
        np.testing.assert_allclose(mean, np.mean(before, 0))
    else:
        each = [np.exp(old) / np.exp(old).sum(1, keepdims=True) for old in before]
        np.testing.assert_allclose(np.exp(mean), np.mean(each, 0))
