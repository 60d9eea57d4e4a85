"""The recursion of the prior: image by image, in double precision, so that batches of any size give the same answers."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Track(NamedTuple):
    """What is known of one source of images.

    recent [E, C]: moving averages of past answers, of what the network says, and a uniform one; one row for each expert.
    mean [T, C]: the mean of the network's probabilities at each temperature.
    belief [T, E]: how much each expert is believed at each temperature; they sum to 1.
    """

    recent: Array
    mean: Array
    belief: Array


@dataclass(frozen=True)
class Experts:
    """Who forecasts the next label: averages of the past answers over each of `scales`, and two nulls.

    The nulls answer for streams whose order says nothing. One is uniform; the other averages what the network says over
    `null` images, which explains a biased network: it looks as if its labels came in runs. The nulls take the network at
    its word; the others take it at each of `temperatures`, the first of which is 1.
    """

    scales: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    temperatures: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0)
    null: float = 100.0
    window: float = 500.0                   # images over which the mean of the network's probabilities is taken
    floor: float = 0.02                     # share of the uniform distribution in every forecast
    switch: float = 0.001                   # share of the first beliefs that returns with every image

    def rates(self) -> Array:
        """How far each expert moves toward the last answer: [E]."""
        return np.array([*(1 / k for k in self.scales), 1 / self.null, 0.0])

    def prior(self) -> Array:
        """The first beliefs [T, E]: the same for every expert, shared out over its temperatures."""
        belief = np.zeros((len(self.temperatures), len(self.scales) + 2))
        belief[:, :-2] = 1 / len(self.temperatures)
        belief[0, -2:] = 1.0
        belief /= belief.sum()
        return belief

    def start(self, classes: int) -> Track:
        """What is known before the first image."""
        count = len(self.scales) + 2
        recent, mean = np.full((count, classes), 1 / classes), np.full((len(self.temperatures), classes), 1 / classes)
        return Track(recent, mean, self.prior())


def follow(experts: Experts, track: Track, probabilities: Array) -> tuple[Array, Array, Track]:
    """Answers [N, C], forecasts [N, C] made before each image, and what is known after the last.

    `probabilities` [N, T, C] are the network's at each temperature, all above zero.

    An image says p(x|y)/p(x) = p(y|x)/p(y), the network's probabilities over their mean. The expectation of it under an
    expert's forecast is how well that expert foresaw the image: a likelihood, by Bayes' rule the next belief in it. It needs
    no labels, and compares temperatures too: one that is too low is punished by images where the network is sure and wrong.
    """
    rates, prior = experts.rates()[:, None], experts.switch * experts.prior()
    keep, floor = 1 - experts.switch, experts.floor / probabilities.shape[2]
    recent, mean, belief = (array.copy() for array in track)
    answers, forecasts = np.empty_like(probabilities[:, 0]), np.empty_like(probabilities[:, 0])
    target = np.empty_like(recent)
    for p, answer, forecast in zip(probabilities, answers, forecasts, strict=True):
        likely = p / mean                                       # [T, C]
        expected = (1 - experts.floor) * recent + floor         # [E, C]
        joint = belief @ expected                               # [T, C]
        np.add.reduce(joint, 0, out=forecast)
        np.einsum("tc,tc->c", joint, likely, out=answer)
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
