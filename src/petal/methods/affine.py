"""What TENT and the methods that come from it share: they adapt the scale and shift of normalisation layers only."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from petal import functional as F
from petal.errors import ConfigError
from petal.methods.base import Adapter, OptimizerFactory, Rates
from petal.methods.inputs import check_choice
from petal.norm import affine_parameters

ENTROPIES = {"entropy": F.entropy, "come": F.opinion_entropy}
TOP_LAYERS = ("*layer4*", "*blocks.9*", "*blocks.10*", "*blocks.11*", "*norm.*", "norm")    # of ResNets, and timm's ViT


class AffineAdapter(Adapter):
    """Adapts the affine parameters of BatchNorm, GroupNorm and LayerNorm, with batch statistics.

    Layers whose name fits a pattern of `frozen`, such as "layer4*", keep theirs.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: Rates = 1e-3,
        *,
        frozen: Sequence[str] = (),
        optimizer: OptimizerFactory | None = None,
        steps: int = 1,
        episodic: bool = False,
        seed: int | torch.Generator = 0,
    ) -> None:
        super().__init__(model, batch_statistics=True, steps=steps, episodic=episodic, seed=seed)
        parameters = norm_parameters(self)
        if isinstance(frozen, str) or not all(isinstance(pattern, str) for pattern in frozen):
            raise ConfigError(f"frozen must be a sequence of patterns for names of layers, got {frozen!r}")
        free = {
            name: parameter for name, parameter in parameters.items()
            if not any(fnmatchcase(name.rpartition(".")[0], pattern) for pattern in frozen)
        }  # fmt: skip
        if not free:
            raise ConfigError(f"frozen={tuple(frozen)} leaves no normalisation layer to adapt: give fewer patterns")
        self.frozen = tuple(frozen)
        self.adapt(free, lr, optimizer)
        with torch.inference_mode(False):
            self.start = self.origin()

    def apart(self, keep: Tensor) -> Tensor:
        """Which samples go through the network as a batch of their own: those to keep, as the field's code has it.

        All of them if one alone is left and the network has batch norms of vectors, which cannot normalise it by itself.
        """
        chosen = keep.nonzero().squeeze(1)
        lonely = len(chosen) == 1 and any(isinstance(layer, nn.BatchNorm1d) for layer in self.model.modules())
        return torch.arange(len(keep), device=keep.device) if lonely else chosen


def norm_parameters(adapter: Adapter) -> dict[str, nn.Parameter]:
    """Scale and shift of the normalisation layers of a method's network; an error if it has none."""
    parameters = affine_parameters(adapter.model)
    if not parameters:
        raise ConfigError(
            f"{type(adapter).__name__} adapts the scale and shift of normalisation layers and this network has none: "
            "use CoTTA or Petal, which adapt every parameter"
        )
    return parameters


def entropy_by(loss: str) -> Callable[[Tensor], Tensor]:
    """What is minimised, by name: the entropy of the prediction, or "come", that of the opinion behind it."""
    check_choice("loss", loss, ENTROPIES)
    return ENTROPIES[loss]
