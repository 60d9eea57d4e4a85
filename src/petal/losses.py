"""Losses and weights of samples that methods of the field share, as pure functions of logits [N, C] and features [N, D].

Entropy and cross-entropies are in `petal.functional`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from petal.functional import entropy


def soft_likelihood_ratio(logits: Tensor, clip: float = 0.99, eps: float = 1e-5) -> Tensor:
    """-Σ p log(p / (1 - p) + eps) of every sample, p clipped from above: the loss of ROID.

    >>> soft_likelihood_ratio(torch.zeros(1, 2)).abs().item() < 1e-4
    True
    """
    p = logits.softmax(1).clamp(max=clip)
    return -(p * (p / (1 - p) + eps).log()).sum(1)


def min_max(values: Tensor) -> Tensor:
    """Values moved and scaled to reach from 0 to 1; zeros where all are alike.

    >>> min_max(torch.tensor([1.0, 3.0, 2.0])), min_max(torch.tensor([7.0]))
    (tensor([0.0000, 1.0000, 0.5000]), tensor([0.]))
    """
    low, high = values.aminmax()
    return (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)


def certain_and_diverse(logits: Tensor, mean: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Weights of the samples, exp(diversity · certainty / temperature), and which of them count: ROID's weighting.

    Diversity is the cosine distance to the mean prediction of the past, [C], certainty the negative entropy, each from 0 to
    1 in the batch. Samples of less than the mean diversity do not count: their weight is 0.
    """
    diverse = min_max(1 - F.cosine_similarity(mean[None], logits.softmax(1), dim=1))
    counts = ~(diverse < diverse.mean())
    weights = (diverse * min_max(-entropy(logits)) / temperature).exp()
    return torch.where(counts, weights, 0), counts


def smoothed_prior(logits: Tensor) -> Tensor:
    """The mean prediction of a batch, [C], smoothed the more the fewer samples there are: ROID's prior."""
    prior = logits.softmax(1).mean(0)
    samples, classes = logits.shape
    smooth = max(1 / samples, 1 / classes) / prior.amax()
    return (prior + smooth) / (1 + smooth * classes)


def contrastive(views: Tensor, temperature: float) -> Tensor:
    """The contrastive loss over views [V, N, D]: those of a sample are to be alike, and unlike all of other samples.

    Supervised contrastive loss (Khosla et al., 2020, eq. 2) where every sample is a class of its own, as in RMT.

    >>> alike = torch.eye(3).expand(2, 3, 3)
    >>> contrastive(alike, 0.1).item() < 1e-3 < contrastive(torch.ones(2, 3, 3), 0.1).item()
    True
    """
    count, samples, _ = views.shape
    z = F.normalize(views.flatten(0, 1), dim=1)
    itself = torch.eye(count * samples, dtype=torch.bool, device=z.device)
    sample = torch.eye(samples, dtype=torch.bool, device=z.device).repeat(count, count)
    log_p = (z @ z.T / temperature).masked_fill(itself, -torch.inf).log_softmax(1)
    return -log_p.masked_fill(itself | ~sample, 0).sum(1).mean() / (count - 1)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy of the mean prediction over views [V, C] of one image: the loss of MEMO.

    >>> marginal_entropy(100 * torch.eye(2)), marginal_entropy(torch.zeros(5, 2))
    (tensor(0.6931), tensor(0.6931))
    """
    log_p = logits.log_softmax(1).logsumexp(0) - math.log(len(logits))
    return -(log_p.exp() * log_p).sum()


def relations_kept(features: Tensor, labels: Tensor, organised: Tensor) -> Tensor:
    """How unlike the relations of classes are those of `organised`, one row a class: -1 where they are alike (OBAO).

    Relations are the cosines between the class means of features [N, D] by their labels, and between the rows [C, D']; of
    the classes that there are, they are compared by the cosine of all of them.

    >>> relations_kept(torch.eye(2), torch.tensor([0, 1]), 3 * torch.eye(3))
    tensor(-1.)
    """
    members = F.one_hot(labels, len(organised)).to(features.dtype)
    count = members.sum(0)
    means = members.T @ features / count.clamp(min=1)[:, None]
    there = (count[:, None] * count > 0).to(features.dtype)
    now, then = (F.normalize(rows, dim=1) @ F.normalize(rows, dim=1).T * there for rows in (means, organised))
    return -(now * then).sum() / (now.square().sum() * then.square().sum()).sqrt()


def nearest(features: Tensor, prototypes: Tensor, there: Tensor) -> Tensor:
    """The prototype [N, D] of highest cosine to each feature; of [C, D], those that are `there` [C]."""
    cosine = F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T
    return prototypes[cosine.masked_fill(~there, -torch.inf).argmax(1)]
