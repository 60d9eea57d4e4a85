"""PETAL: probabilistic lifelong test-time adaptation with a self-training prior (Brahma and Rai, 2023)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from petal.augment import Augment
from petal.errors import ConfigError
from petal.methods.base import OptimizerFactory, Rates
from petal.methods.card import Card
from petal.methods.descent import Gaussian, Penalty, Prior
from petal.methods.executor import Executor
from petal.methods.inputs import check_number
from petal.methods.mean_teacher import MeanTeacher
from petal.methods.network import logits_of, mean_over
from petal.methods.rates import PosteriorRates
from petal.posterior import DiagonalGaussian, Posterior
from petal.posterior import Gaussian as AnyGaussian
from petal.restore import Fisher, Restore


class Petal(MeanTeacher):
    """Algorithm 2 of the paper; the defaults are the paper's for CIFAR-10.

    Student, teacher and source start at the posterior's mean (and its buffers, if any). The released code's behaviour is
    gate="batch", average="logits"; the paper's is the default. `confidence="auto"` is what the source's confidence on its
    own images exceeds but for 5 %, as the posterior knows it. The member "samples" of `target` and `answer` is the mean over
    so many networks drawn from the posterior, each moved along with the teacher.

    While the gate has never opened, teacher and student are the same network: the gradient of the consistency loss is
    then rounding noise, of which Adam makes full steps.
    """

    card = Card(
        title="PETAL", year=2023, adapts="all weights", needs=("posterior",),
        paper="Brahma and Rai, A probabilistic framework for lifelong test-time adaptation, CVPR 2023",
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior | None = None,
        lr: Rates | PosteriorRates = 1e-3,
        ema: float = 0.999,
        views: int = 32,
        confidence: float | str = 0.92,
        prior_weight: float = 1e-9,
        restore: Restore | None = Fisher(0.03),
        augment: Augment | None = None,
        gate: str = "sample",
        average: str = "probs",
        loss: str = "cross-entropy",
        learn: str = "plain",
        target: str = "teacher",
        answer: str = "teacher",
        warmup: float | None = None,
        calibrate: str | None = None,
        samples: int = 4,
        *,
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        check_number("prior_weight", prior_weight, low=0)
        check_number("samples", samples, low=1, whole=True)
        if posterior is None:
            sampled = any("samples" in str(names) for names in (target, answer, calibrate))
            wanted = {"the prior": bool(prior_weight), "PosteriorRates": isinstance(lr, PosteriorRates),
                      "the member samples": sampled}  # fmt: skip
            for what in (name for name, needed in wanted.items() if needed):
                without = ", or prior_weight=0" if what == "the prior" else ""
                raise ConfigError(f"{what} needs a posterior (petal.fit_swag, DiagonalGaussian): give one{without}")
        else:
            if not isinstance(posterior, Posterior):
                raise ConfigError(
                    f"Petal takes a posterior (petal.fit_swag, petal.DiagonalGaussian), got {type(posterior).__name__}"
                )
            posterior.check(model)
            like = next(model.parameters())
            posterior = posterior.to(like.device, like.dtype)
        if isinstance(lr, PosteriorRates):
            assert posterior is not None
            lr = lr.rates(posterior)
        super().__init__(
            model, lr=lr, ema=ema, views=views, confidence=_threshold(confidence, posterior), restore=restore,
            augment=augment, gate=gate, average=average, loss=loss, learn=learn, target=target, answer=answer, warmup=warmup,
            calibrate=calibrate, optimizer=optimizer, steps=steps, episodic=episodic, seed=seed,
            start=None if posterior is None else posterior.mean,
            buffers=None if posterior is None else posterior.buffers,
        )  # fmt: skip
        self.posterior = posterior
        self.prior_weight, self.samples = prior_weight, samples

    def penalties(self) -> list[Penalty]:
        """-α log q(θ) (Alg. 2, l. 10); the source network is at the mean."""
        q = self.posterior
        if q is None or not self.prior_weight:
            return []
        if isinstance(q, DiagonalGaussian):
            return [Gaussian(self.source, q.var, q.damping, self.prior_weight)]
        return [Prior(q, self.prior_weight)]

    def execute_with(self, executor: Executor | None) -> None:
        """A Gaussian goes along to the tensors that an executor works on: none is kept twice."""
        super().execute_with(executor)
        q = self.posterior
        if executor is not None and isinstance(q, AnyGaussian):
            groups: dict[str, Mapping[str, Tensor]] = {"mean": {n: p.detach() for n, p in self.source.named_parameters()}}
            if isinstance(q, DiagonalGaussian):         # its penalty works on one flat tensor
                groups["var"] = executor.together(q.var)
            self.posterior = q.moved(**groups)

    def sampled(self, x: Tensor) -> Tensor:
        """The mean prediction of networks that lie around the teacher as those drawn from the posterior around its mean."""
        q = self.posterior
        assert q is not None
        teacher = dict(self.teacher.named_parameters())

        def one(drawn: dict[str, Tensor]) -> Tensor:
            weights = {name: p + (drawn[name] - q.mean[name]) for name, p in teacher.items()}
            logits = logits_of(lambda x: functional_call(self.teacher, weights, (x,)), x)
            self.work.ran(logits)
            return logits

        with torch.no_grad():
            return mean_over((one(q.sample(self.generator)) for _ in range(self.samples)), self.samples, self.average)

    def describe(self) -> dict[str, str]:
        """What it does and with which settings."""
        prior = f"prior of weight {self.prior_weight:g}" if self.prior_weight else "no prior"
        start = "none: starts at the network" if self.posterior is None else "starts at its mean"
        return super().describe() | {"posterior": f"{start}; {prior}"}


def _threshold(confidence: float | str, posterior: Posterior | None) -> float:
    """τ as a number."""
    if confidence != "auto":
        check_number("confidence", confidence)  # type: ignore[arg-type]
        return float(confidence)
    known = None if posterior is None else posterior.confidence
    if known is None:
        raise ConfigError(
            'confidence="auto" needs a posterior that knows how sure the source is of its own images: fit one (petal fit, '
            "petal.fit_swag), or give a number"
        )
    return known
