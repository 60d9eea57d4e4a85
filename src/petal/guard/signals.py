"""Running sums of what adapter and source predict, and the signals read from them; and strangers in a batch."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from petal import functional as F
from petal.norm import batch_norms
from petal.norm.robust import median, of_images

SIGNALS = ("concentration", "entropy", "confidence", "disagreement", "distance", "update", "drift", "strangers")
SUMMED = SIGNALS[:-1]                       # read from sums; strangers are in a single batch
STEADY = 0.9                                # share of the earlier comparisons that the next one leaves, at least
FEW = 32                                    # images below which chance alone moves a mean away from the median


@dataclass(frozen=True)
class Reading:
    """The signals at one look: of the adapter and, for the same samples, of the source."""

    concentration: float
    entropy: float
    confidence: float
    disagreement: float
    distance: float
    update: float
    drift: float
    paired_concentration: float             # of the adapter over the samples that the source saw too
    source_concentration: float
    source_entropy: float
    source_confidence: float

    @property
    def finite(self) -> bool:
        """True if every signal is finite."""
        return all(map(math.isfinite, vars(self).values()))


class Sums:
    """Fading float64 sums over samples, on their device: nothing waits for the device until `read`.

    `window` [C + 3], over all samples: summed prediction, entropy, confidence and count. `pairs` [2 C + 7], over those that
    the source saw too: the same four of the adapter, the first three of the source, the number of labels that differ and the
    summed entropy of the predictions without views. Both are empty before the first batch. `length` is how many samples the
    sums reach back.
    """

    def __init__(self) -> None:
        self.window, self.pairs = torch.empty(0), torch.empty(0)
        self.looks = 0                      # comparisons in `pairs`

    def add(self, logits: Tensor, length: int) -> None:
        """Add a batch of the adapter's logits [N, C]."""
        if not len(self.window):
            classes = logits.shape[1]
            self.window = torch.zeros(classes + 3, dtype=torch.float64, device=logits.device)
            self.pairs = self.window.new_zeros(2 * classes + 7)
        self.window.mul_((1 - 1 / length) ** len(logits)).add_(_totals(logits))

    def compare(self, logits: Tensor, plain: Tensor, source: Tensor, length: int, every: int) -> None:
        """Add one batch in `every` that the source saw too: logits [N, C] with and without views, and the source's."""
        differ = (logits.argmax(1) != source.argmax(1)).double().sum()
        both = torch.stack([differ, F.entropy(plain).double().sum()])
        fading = max((1 - 1 / length) ** (every * len(logits)), STEADY)
        self.pairs.mul_(fading).add_(torch.cat([_totals(logits), _totals(source)[:-1], both]))
        self.looks += 1

    def read(self, norms: Tensor) -> Reading:
        """Every signal as a number, `norms` being distance and update: the one place that waits for the device."""
        classes = len(self.window) - 3
        numbers = torch.cat([self.window, self.pairs, norms]).cpu()
        seen, _, ours, totals, theirs, rest = torch.split(numbers, [classes, 3, classes, 3, classes, 6])
        entropy, confidence, count = totals.tolist()
        source_entropy, source_confidence, differ, plain_entropy, distance, update = rest.tolist()
        return Reading(
            concentration=concentration(seen),
            entropy=entropy / count,
            confidence=confidence / count,
            disagreement=differ / count,
            distance=distance,
            update=update,
            drift=(plain_entropy - source_entropy) / count / math.log(max(classes, 2)),
            paired_concentration=concentration(ours),
            source_concentration=concentration(theirs),
            source_entropy=source_entropy / count,
            source_confidence=source_confidence / count,
        )

    def clear(self) -> None:
        """Forget everything seen."""
        self.window.zero_()
        self.pairs.zero_()
        self.looks = 0


def _totals(logits: Tensor) -> Tensor:
    """Summed prediction, entropy, confidence and count of a batch, [C + 3] in double precision."""
    rows = torch.cat([logits.softmax(1), F.entropy(logits)[:, None], F.confidence(logits)[:, None]], 1).double().sum(0)
    return torch.cat([rows, rows.new_full((1,), logits.shape[0])])


def concentration(summed: Tensor) -> float:
    """1 - H(p) / log(classes) of a summed prediction [C].

    >>> concentration(torch.tensor([5.0, 5.0])), concentration(torch.tensor([3.0, 0.0]))
    (0.0, 1.0)
    """
    p = summed / summed.sum()
    most = math.log(len(p))
    return float(1 + torch.special.xlogy(p, p).sum() / most) if most else 0.0


class Strangers:
    """How far some images of a batch pull its statistics away from where most of them are.

    Each layer that normalises by batch statistics is given images with a mean and a variance of their own. Where a few are
    unlike the rest, the mean over images lies away from their median, in all layers; a new domain moves both. Measured in
    standard deviations by the median deviation, the root mean square over channels, and of all layers the lowest: another
    kind of picture looks strange to early layers, other classes to late ones, and neither of these is an attack.
    """

    def __init__(self, count: int) -> None:
        self.count = count                  # images of the batch; others may be looked at with them
        self.found: list[Tensor] = []

    @contextmanager
    def watching(self, network: nn.Module) -> Iterator[None]:
        """In here the layers of a network say what they are given."""
        layers = [layer for _, layer in batch_norms(network) if layer.running_mean is None]
        handles = [layer.register_forward_pre_hook(self._look) for layer in layers if self.count >= FEW]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look(self, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        means, own = of_images(inputs[0].detach()[: self.count].double())
        values = torch.cat([means, (own + 1e-6).log()], 1) if inputs[0].dim() > 2 else means
        center = median(values)
        usual = 1.4826 * median((values - center).abs()) + 1e-9
        self.found.append(((values.mean(0) - center) / usual).square().clamp(max=4.0).mean().sqrt())

    def read(self) -> float:
        """The lowest of all layers; 0 where nothing was looked at. Waits for the device."""
        return float(torch.stack(self.found).amin()) if self.found else 0.0


def distance(here: Mapping[str, Tensor], there: Mapping[str, Tensor], scale: list[Tensor] | None) -> Tensor:
    """Root mean square of the difference in units of `scale`, or relative to the length of `there` if that is None."""
    ends = [there[name] for name in here]
    way = list(torch._foreach_sub(list(here.values()), ends))
    if scale is not None:
        torch._foreach_div_(way, scale)
    squares = torch.stack(torch._foreach_norm(way)).double().square().sum()
    if scale is not None:
        return (squares / sum(w.numel() for w in way)).sqrt()
    return (squares / torch.stack(torch._foreach_norm(ends)).double().square().sum().clamp(min=1e-30)).sqrt()
