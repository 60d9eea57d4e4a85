"""The recursion of the prior: image by image, in double precision, so that batches of any size give the same answers."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Track(NamedTuple):
    """What is known of one source of images.

    recent [E, C]: a row for each expert: moving averages of past answers, of what the network says, and a uniform one.
    mean [T, C]: the mean of the network's probabilities at each temperature.
    belief [T, E]: how much each expert is believed at each temperature; they sum to 1.
    """

    recent: Array
    mean: Array
    belief: Array


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
    window: float = 500.0                   # images over which the mean of the network's probabilities is taken
    doubt: float = 0.1
    switch: float = 0.001

    def rates(self) -> Array:
        """How far each expert moves toward the last answer: [E]."""
        return np.array([*[1 / k for k in self.scales] * len(self.floors), 1 / self.null, 0.0])

    def shares(self) -> Array:
        """The share of the uniform distribution in each forecast: [E]."""
        return np.array([*np.repeat(self.floors, len(self.scales)), self.floors[0], self.floors[0]])

    def prior(self) -> Array:
        """The first beliefs [T, E]."""
        belief = np.zeros((len(self.temperatures), len(self.scales) * len(self.floors) + 2))
        belief[:, :-2] = self.doubt / belief[:, :-2].size
        belief[0, -2:] = (1 - self.doubt) / 2
        return belief

    def start(self, classes: int) -> Track:
        """What is known before the first image."""
        belief = self.prior()
        recent, mean = (np.full((count, classes), 1 / classes) for count in reversed(belief.shape))
        return Track(recent, mean, belief)


def follow(experts: Experts, track: Track, probabilities: Array) -> tuple[Array, Array, Track]:
    """Answers [N, C], forecasts [N, C] made before each image, and what is known after the last.

    `probabilities` [N, T, C] are the network's at each temperature, all above zero.

    An image says p(x|y) / p(x) = p(y|x) / p(y): the network's probabilities over their mean. The expectation of it under a
    forecast is how well the image was foreseen, p(x|past) / p(x), and by Bayes' rule the next belief in who made it. It
    needs no labels, and compares temperatures too: one too low pays for all images of which the network is sure and wrong.
    """
    rates, shares, prior = experts.rates()[:, None], experts.shares()[:, None], experts.switch * experts.prior()
    keep, uniform = 1 - experts.switch, shares / probabilities.shape[2]
    recent, mean, belief = (array.copy() for array in track)
    answers, forecasts = np.empty_like(probabilities[:, 0]), np.empty_like(probabilities[:, 0])
    target = np.empty_like(recent)
    for p, answer, forecast in zip(probabilities, answers, forecasts, strict=True):
        likely = p / mean                                       # [T, C]
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
        recent += rates * (target - recent)
        mean += (p - mean) / experts.window
    return answers, forecasts, Track(recent, mean, belief)
