"""LAME: parameter-free online test-time adaptation (Boudiaf et al., 2022)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petal.augment import in_full
from petal.methods.base import Adapter
from petal.methods.card import Card
from petal.methods.inputs import check_choice, check_number

PATIENCE = 10       # rounds between two looks of the host at whether all is done


class LAME(Adapter):
    """Corrects the source's predictions so that neighbours in a batch agree; no weight and no statistic changes.

    Minimises eq. 6 by its concave-convex rounds, eq. 7: y ← softmax(log p + `weight` · W y), up to `iterations` of them, or
    until the energy changes by less than the share `tolerance`. W is the affinity of normalised features: "rbf" with a width
    of `sigma`, or the mean distance to the nearest number `neighbours` (itself counted) if None; "knn", 1 for the nearest
    `neighbours` others; "linear", their cosine. `symmetric` takes the mean of W and its transpose.

    Predictions and features are by the source's statistics. The authors' code returns probabilities; `answer="calibrated"`
    is their logarithm, whose softmax they are; "own" are the probabilities in the place of logits, as in the collection of
    the field's code: the same classes, with confidences that compare with nobody's. A batch of one image is its own
    neighbour, which sharpens its prediction (the authors' code has NaN there).
    """

    card = Card(
        title="LAME", year=2022, adapts="predictions of a batch", correlated_labels=True, random=False,
        paper="Boudiaf et al., Parameter-free online test-time adaptation, CVPR 2022",
    )  # fmt: skip
    alone = "it corrects the predictions of a batch and learns nothing"

    def __init__(
        self,
        model: nn.Module,
        affinity: str = "rbf",
        neighbours: int = 5,
        sigma: float | None = None,
        weight: float = 1.0,
        symmetric: bool = False,
        iterations: int = 100,
        tolerance: float = 1e-8,
        answer: str = "calibrated",
    ) -> None:
        check_choice("affinity", affinity, ("rbf", "knn", "linear"))
        check_number("neighbours", neighbours, low=1, whole=True)
        check_number("sigma", 1 if sigma is None else sigma, low=1e-12)
        check_number("weight", weight, low=0)
        check_number("iterations", iterations, low=1, whole=True)
        check_number("tolerance", tolerance, low=0)
        check_choice("answer", answer, ("own", "calibrated"))
        super().__init__(model, batch_statistics=False)
        self.affinity, self.neighbours, self.sigma, self.weight = affinity, neighbours, sigma, weight
        self.symmetric, self.iterations, self.tolerance, self.answer = symmetric, iterations, tolerance, answer

    def step(self, x: Tensor) -> Tensor:
        """Predict; nothing is learned."""
        return self.prediction(x)

    def prediction(self, x: Tensor) -> Tensor:
        """The corrected probabilities, in the form asked for."""
        with torch.no_grad():
            features, logits = (in_full(value) for value in self.features(self.model, x))
            near = self.affinities(F.normalize(features, dim=1))
            unary = -(logits.softmax(1) + 1e-10).log()
            log_y = self.agreed(unary, 0.5 * (near + near.T) if self.symmetric else near)
            return (log_y if self.answer == "calibrated" else log_y.exp()).to(self.dtype)

    def affinities(self, features: Tensor) -> Tensor:
        """W [N, N] of normalised features."""
        if self.affinity == "linear":
            return features @ features.T
        distance = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
        if self.affinity == "knn":
            nearest = distance.topk(min(self.neighbours + 1, len(features)), largest=False).indices[:, 1:]
            return torch.zeros_like(distance).scatter_(1, nearest, 1.0)
        sigma: Tensor | float | None = self.sigma
        if sigma is None:
            kth = distance.topk(min(self.neighbours, len(features)), largest=False).values[:, -1]
            sigma = kth.mean().clamp(min=torch.finfo(distance.dtype).tiny ** 0.25)          # of equal images it is zero
        return torch.exp(-distance.square() / (2 * sigma**2))

    def agreed(self, unary: Tensor, near: Tensor) -> Tensor:
        """The rounds. What has converged stays, and the host looks now and then if that is so."""
        log_y = (-unary).log_softmax(1)
        energy = unary.new_tensor(float("inf")).double()
        done = torch.zeros((), dtype=torch.bool, device=unary.device)
        for number in range(self.iterations):
            pull = self.weight * (near @ log_y.exp())
            new = (pull - unary).log_softmax(1)
            y = new.exp()
            now = (unary * y - pull * y + y * y.clamp(min=1e-20).log()).sum().double()
            log_y = log_y.where(done, new)
            if number > 1:
                done = done | ((now - energy).abs() <= self.tolerance * energy.abs())
            energy = now
            if number % PATIENCE == PATIENCE - 1 and bool(done):
                break
        return log_y
