"""The recursion of the prior: image by image, in double precision, so that batches of any size give the same answers."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Bias(NamedTuple):
    """What the network says on the whole: the mean [T, C] of its probabilities, for each temperature, of `seen` images."""

    mean: Array
    seen: int


class Track(NamedTuple):
    """What is known of one source of images.

    recent [E, C]: a row for each expert: moving averages of past answers, of what the network says, and a uniform one.
    belief [T, E]: how much each expert is believed at each temperature; they sum to 1.
    seen: how many images came.
    """

    recent: Array
    belief: Array
    seen: int


@dataclass(frozen=True)
class Experts:
    """Who forecasts the next label: averages of the past answers, and two nulls.

    An expert averages over one of `scales` (images), and mixes in one of the shares `floors` of the uniform distribution,
    for how often a run ends. The nulls answer for streams whose order says nothing. One is uniform; the other averages what
    the network says over `null` images, which explains a biased network: it looks as if its labels came in runs. The nulls
    take the network at its word, the others at each of `temperatures`, the first of which is 1. At first, and again by the
    share `switch` with every image, the nulls are believed but for `doubt`: an order has to be seen before it counts.
    """

    scales: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    floors: tuple[float, ...] = (0.02, 0.2, 0.6)
    temperatures: tuple[float, ...] = (1.0, 1.4, 2.0, 2.8)
    null: float = 100.0
    window: float = 500.0                   # images over which the network's bias is taken
    warmup: tuple[int, int] = (10, 50)      # images that the first values of null and bias count for
    doubt: float = 0.1
    switch: float = 0.001

    def rates(self) -> Array:
        """How far each expert moves toward the last answer, nulls aside: [E]."""
        return np.array([*[1 / k for k in self.scales] * len(self.floors), 0.0, 0.0])

    def shares(self) -> Array:
        """The share of the uniform distribution in each forecast: [E]."""
        return np.array([*np.repeat(self.floors, len(self.scales)), self.floors[0], self.floors[0]])

    def prior(self) -> Array:
        """The first beliefs [T, E]."""
        belief = np.zeros((len(self.temperatures), len(self.scales) * len(self.floors) + 2))
        belief[:, :-2] = self.doubt / belief[:, :-2].size
        belief[0, -2:] = (1 - self.doubt) / 2
        return belief

    def unbiased(self, classes: int) -> Bias:
        """What is known of the network before the first image."""
        return Bias(np.full((len(self.temperatures), classes), 1 / classes), 0)

    def start(self, classes: int) -> Track:
        """What is known of a source of images before the first one."""
        belief = self.prior()
        return Track(np.full((belief.shape[1], classes), 1 / classes), belief, 0)


def likelihoods(experts: Experts, bias: Bias, probabilities: Array) -> tuple[Array, Bias]:
    """What each image says, p(x|y) / p(x) [N, T, C], and what is known of the network after the last.

    That is p(y|x) / p(y): the network's probabilities at each temperature, all above zero, over their mean so far.
    """
    likely, mean, seen = np.empty_like(probabilities), bias.mean.copy(), bias.seen
    for p, ratio in zip(probabilities, likely, strict=True):
        np.divide(p, mean, out=ratio)
        mean += (p - mean) / min(seen + experts.warmup[1], experts.window)
        seen += 1
    return likely, Bias(mean, seen)


def follow(experts: Experts, track: Track, likelihoods: Array) -> tuple[Array, Array, Track]:
    """Answers [N, C], forecasts [N, C] made before each image, and what is known after the last.

    The expectation of p(x|y) / p(x) under a forecast is how well the image was foreseen, p(x|past) / p(x), and by Bayes'
    rule the next belief in who made the forecast. It needs no labels, and it compares temperatures too: one that is too low
    pays for all images of which the network is sure and wrong.
    """
    rates, shares, prior = experts.rates()[:, None], experts.shares()[:, None], experts.switch * experts.prior()
    keep, uniform = 1 - experts.switch, shares / likelihoods.shape[2]
    recent, belief, seen = track.recent.copy(), track.belief.copy(), track.seen
    answers, forecasts = np.empty_like(likelihoods[:, 0]), np.empty_like(likelihoods[:, 0])
    target = np.empty_like(recent)
    for likely, answer, forecast in zip(likelihoods, answers, forecasts, strict=True):      # likely [T, C]
        expected = (1 - shares) * recent + uniform              # [E, C]
        joint = belief @ expected                               # [T, C]
        joint.sum(0, out=forecast)
        (joint * likely).sum(0, out=answer)
        evidence = answer.sum()
        answer /= evidence
        belief *= likely @ expected.T
        belief *= keep / evidence
        belief += prior
        target[:] = answer
        target[-2] = likely[0] / likely[0].sum()
        rates[-2] = 1 / min(seen + experts.warmup[0], experts.null)
        recent += rates * (target - recent)
        seen += 1
    return answers, forecasts, Track(recent, belief, seen)
