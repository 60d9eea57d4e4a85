"""The maths of the methods as pure functions of tensors: no state, no networks, no randomness of their own.

Predictions are logits of shape [N, C]; `softmax` of them is the prediction. Parameters are sequences of tensors
in a fixed order. Names that end in an underscore work in place, as in torch.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """H(y', y) of every sample: the student's `logits` under the teacher's prediction `target` (Alg. 2, l. 7).

    >>> y = torch.tensor([[0.0, 0.0]])
    >>> round(cross_entropy(y, y).item(), 6) == round(math.log(2), 6)
    True
    """
    return -(target.softmax(1) * logits.log_softmax(1)).sum(1)


def symmetric_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Half H(y', y) and half H(y, y') of every sample, the loss of the released ImageNet settings."""
    return 0.5 * cross_entropy(logits, target) + 0.5 * cross_entropy(target, logits)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the prediction of every sample, in nats.

    >>> entropy(torch.tensor([[0.0, 0.0]]))
    tensor([0.6931])
    """
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def opinion_entropy(logits: Tensor) -> Tensor:
    """Entropy of the opinion that the evidence exp(logits) gives: C beliefs and one uncertainty (COME).

    The length of the logits takes no part in the gradient: more evidence is no way to less entropy. The released code has
    1000 in the place of C, the number of classes; the two agree on ImageNet.

    >>> round(opinion_entropy(torch.zeros(1, 1)).item(), 4) == round(math.log(2), 4)    # exp(0) against C = 1
    True
    """
    length = logits.norm(dim=1, keepdim=True).clamp(min=torch.finfo(logits.dtype).tiny)
    logits = logits / length * length.detach()
    uncertainty = logits.new_full((len(logits), 1), math.log(logits.shape[1]))
    opinion = torch.cat([logits, uncertainty], 1).softmax(1) + 1e-7
    return -(opinion * opinion.log()).sum(1)


def generalised_cross_entropy(logits: Tensor, labels: Tensor, q: float) -> Tensor:
    """(1 - p^q) / q of every sample, p being the probability of its label: cross-entropy as q goes to 0 (Zhang and Sabuncu).

    >>> generalised_cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([0]), 1.0)
    tensor([0.5000])
    """
    p = logits.softmax(1).gather(1, labels[:, None]).squeeze(1)
    return (1 - p**q) / q


def confidence(logits: Tensor) -> Tensor:
    """C(p(y|x)): the largest class probability of every sample.

    >>> confidence(torch.tensor([[0.0, 0.0], [100.0, 0.0]]))
    tensor([0.5000, 1.0000])
    """
    return logits.softmax(1).amax(1)


def ema_(average: Sequence[Tensor], values: Sequence[Tensor], decay: float) -> None:
    """Move `average` toward `values`: decay * average + (1 - decay) * values (Alg. 2, l. 12).

    >>> a = [torch.tensor([1.0])]
    >>> ema_(a, [torch.tensor([0.0])], 0.9); a
    [tensor([0.9000])]
    """
    torch._foreach_lerp_(list(average), list(values), 1.0 - decay)


def quantile_(flat: Tensor, q: float) -> Tensor:
    """The `q`-quantile of a flat tensor, linear between the two nearest order statistics, which are exact.

    The tensor is not copied and may come back in another order. `torch.quantile` sorts, and refuses more than 16 million
    elements; this selects, and takes any number. A NaN anywhere makes the result unspecified.

    >>> quantile_(torch.tensor([10.0, 0.0, 1.0, 2.0, 3.0]), 0.625)
    tensor(2.5000)
    """
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"a quantile lies in [0, 1], got {q}")
    count = flat.numel()
    if count == 0:
        raise ValueError("the quantile of no elements does not exist")
    rank = q * (count - 1)
    lower_rank = math.floor(rank)
    upper_rank = min(lower_rank + 1, count - 1)
    select = _select_cpu if flat.device.type == "cpu" else _select_topk
    lower, upper = select(flat, lower_rank, upper_rank)
    share = rank - lower_rank
    return lower + (upper - lower) * share if share else lower  # an infinite upper times zero would be NaN


def _select_cpu(flat: Tensor, lower: int, upper: int) -> tuple[Tensor, Tensor]:
    """Order statistics by NumPy's introselect in place: five times faster than torch's kthvalue, and no index kept."""
    work = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    work.numpy().partition((lower, upper))
    return work[lower].to(flat.dtype), work[upper].to(flat.dtype)


def _select_topk(flat: Tensor, lower: int, upper: int) -> tuple[Tensor, Tensor]:
    """Order statistics by `topk` from the nearer end: on a GPU far faster than kthvalue, with no host round trip."""
    count = flat.numel()
    if upper <= count // 2:
        nearest = flat.topk(upper + 1, largest=False, sorted=False).values
        ends = nearest.topk(min(2, nearest.numel()), largest=True).values
        return ends[upper - lower], ends[0]
    nearest = flat.topk(count - lower, largest=True, sorted=False).values
    ends = nearest.topk(min(2, nearest.numel()), largest=False).values
    return ends[0], ends[upper - lower]


def restore_(parameters: Sequence[Tensor], source: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Put the masked weights back to their source values (Alg. 2, l. 15).

    >>> p = [torch.ones(3)]
    >>> restore_(p, [torch.zeros(3)], [torch.tensor([True, False, True])]); p
    [tensor([0., 1., 0.])]
    """
    for parameter, original, mask in zip(parameters, source, masks, strict=True):
        parameter.copy_(torch.where(mask, original, parameter))


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """True if every element of every tensor is finite, as one boolean tensor on their device.

    >>> all_finite([torch.ones(2), torch.tensor([1.0, float("nan")])])
    tensor(False)
    """
    filled = [tensor for tensor in tensors if tensor.numel()]  # a layer without inputs has an empty weight
    if not filled:
        return torch.tensor(True)
    largest = torch._foreach_norm(filled, math.inf)  # the largest magnitude; NaN and Inf carry through
    return torch.stack([value.isfinite() for value in largest]).all()


def wrong(logits: Tensor, labels: Tensor) -> Tensor:
    """True for every sample whose most probable class is not its label."""
    return logits.argmax(1) != labels


def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """Brier score of every sample, summed over classes: between 0 and 2.

    >>> brier(torch.tensor([[100.0, 0.0]]), torch.tensor([1]))
    tensor([2.])
    """
    probabilities = logits.softmax(1)
    return (probabilities - torch.nn.functional.one_hot(labels, logits.shape[1])).square().sum(1)


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of the true label of every sample.

    >>> nll(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor([0.6931])
    """
    return -logits.log_softmax(1).gather(1, labels[:, None]).squeeze(1)


def calibration_counts(logits: Tensor, labels: Tensor, bins: int) -> Tensor:
    """Number of samples, summed confidence and summed correctness in each of `bins` equal bins of confidence: [3, bins].

    A bin is open on its left and closed on its right, (lo, hi], as in Guo et al., so that a confidence of exactly 1
    belongs to the last one.
    """
    probability, label = logits.softmax(1).max(1)
    probability = probability.double()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=logits.device)
    where = (torch.bucketize(probability, edges) - 1).clamp(0, bins - 1)
    rows = torch.stack([torch.ones_like(probability), probability, (label == labels).double()])
    return torch.zeros(3, bins, dtype=torch.float64, device=logits.device).index_add_(1, where, rows)


def calibration_error(counts: Tensor) -> Tensor:
    """Expected calibration error of `calibration_counts`: the gap between confidence and accuracy, bin by bin.

    >>> calibration_error(torch.tensor([[0.0, 2.0], [0.0, 1.8], [0.0, 1.0]]))
    tensor(0.4000)
    """
    count, summed_confidence, summed_correct = counts.unbind()
    return (summed_confidence - summed_correct).abs().sum() / count.sum().clamp(min=1)
