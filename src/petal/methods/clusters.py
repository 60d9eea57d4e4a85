"""Domains found in a stream by the style of its batches (ReservoirTTA, Section 3)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from petal.functional import entropy
from petal.methods.state import optimizer_state, optimizer_to_load


class Clusters:
    """Centroids of styles, which move so that styles are assigned with certainty and all centroids are used.

    A style farther than `threshold` from all centroids opens a new one where it lies. Centroids are `mean` + `delta`; every
    style moves them by one step of AdamW down the mean entropy of the assignments softmax(-distance) less the entropy of
    their mean, over this style and a sample of those before, of `room` for each centroid. The sample is a reservoir whose
    count starts again at its size after ten times as many, so that it forgets slowly. Styles are vectors [D].
    """

    def __init__(self, room: int, lr: float) -> None:
        self.room, self.lr = room, lr
        self.clear()

    def clear(self) -> None:
        """No centroid, nothing seen."""
        self.mean: Tensor | None = None
        self.delta = nn.Parameter(torch.zeros(0, 0))
        self.sample = torch.zeros(0, 0)
        self.seen = 0
        self.threshold: Tensor | None = None

    def begin(self, mean: Tensor) -> None:
        """One centroid."""
        self.mean, self.sample = mean.clone(), mean.new_zeros(0, len(mean))
        self._place(mean.new_zeros(1, len(mean)))

    def distances(self, style: Tensor) -> Tensor:
        """From a style to every centroid [k]."""
        assert self.mean is not None
        return _distances(style[None], self.mean + self.delta.detach())[0]

    def open(self, style: Tensor) -> None:
        """Another centroid."""
        assert self.mean is not None
        self._place(torch.cat([self.delta.detach(), (style - self.mean)[None]]))

    def learn(self, style: Tensor, generator: torch.Generator) -> None:
        """Move the centroids, and perhaps take the style into the sample."""
        assert self.mean is not None
        with torch.enable_grad():
            assigned = (-_distances(torch.cat([self.sample, style[None]]), self.mean + self.delta)).log_softmax(1)
            mean = assigned.exp().mean(0)
            loss = entropy(assigned).mean() + (mean * (mean + 1e-8).log()).sum()
            (self.delta.grad,) = torch.autograd.grad(loss, [self.delta])
        self.optimizer.step()
        size = self.room * len(self.delta)
        if len(self.sample) < size:
            self.sample = torch.cat([self.sample, style[None]])
        else:
            drawn = torch.rand((), dtype=torch.float64, device=style.device, generator=generator) * self.seen
            chosen = torch.arange(size, device=style.device) == drawn.long()
            self.sample = torch.where(chosen[:, None], style, self.sample)
            self.seen = size if self.seen > 10 * size else self.seen
        self.seen += 1

    def state(self) -> dict[str, Tensor]:
        """Copies of all that changes, once there is a centroid."""
        if self.mean is None:
            return {}
        found = {"mean": self.mean, "delta": self.delta.detach(), "sample": self.sample}
        found |= {} if self.threshold is None else {"threshold": self.threshold}
        copies = {name: value.clone() for name, value in found.items()}
        return copies | {"seen": torch.tensor(self.seen)} | optimizer_state(self.optimizer, {"delta": self.delta})

    def problems(self, state: Mapping[str, Tensor], domains: int) -> list[str]:
        """What is wrong with a state, of so many domains."""
        if not state:
            return []
        missing = [f"missing {name!r}" for name in ("mean", "delta", "sample", "seen") if name not in state]
        if missing:
            return missing
        (width,) = state["mean"].shape if state["mean"].dim() == 1 else (0,)
        shapes = {"delta": [domains, width], "sample": [len(state["sample"]), width], "threshold": [], "seen": []}
        wrong = [f"{key!r} is {list(state[key].shape)} instead of {shape}"
                 for key, shape in shapes.items() if key in state and list(state[key].shape) != shape]  # fmt: skip
        if not wrong:
            parameter = nn.Parameter(state["delta"].clone())
            optimizer_to_load(self._fresh(parameter), {"delta": parameter}, state, wrong)
        return wrong + [f"unexpected {key!r}" for key in state if key not in (*shapes, "mean") and "optimizer." not in key]

    def load(self, state: Mapping[str, Tensor], like: Tensor) -> None:
        """Continue from a state without problems."""
        self.clear()
        if not state:
            return
        self.mean, self.sample = (state[name].to(like.device, copy=True) for name in ("mean", "sample"))
        self.seen = int(state["seen"])
        self.threshold = state["threshold"].to(like.device, copy=True) if "threshold" in state else None
        self._place(state["delta"].to(like.device, copy=True))
        self.optimizer.load_state_dict(optimizer_to_load(self.optimizer, {"delta": self.delta}, state, []))

    def _place(self, delta: Tensor) -> None:
        self.delta = nn.Parameter(delta)
        self.optimizer = self._fresh(self.delta)

    def _fresh(self, delta: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.AdamW([delta], lr=self.lr)


def spread(styles: Tensor, quantile: float) -> Tensor | None:
    """A quantile of the distances between styles [n, D] of one domain, within which it lies. None if they are all equal."""
    distances = nn.functional.pdist(styles.double())
    distances = distances[distances > 0]
    return torch.quantile(distances, quantile).to(styles.dtype) if len(distances) else None


def _distances(styles: Tensor, centroids: Tensor) -> Tensor:
    return torch.cdist(styles, centroids, compute_mode="donot_use_mm_for_euclid_dist")
