"""How much a method computes: counted where networks run, so that nobody has to declare it."""

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook


class Work:
    """Samples that networks were given, and samples whose results had a gradient; each as often as it happened."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    def ran(self, *results: Tensor) -> None:
        """A network gave these for one batch: logits, perhaps after features. Their backward pass is counted when it comes.

        >>> import torch
        >>> work, x = Work(), torch.ones(4, 3, requires_grad=True)
        >>> work.ran(y := 2 * x)
        >>> y.sum().backward()
        >>> work.forwards, work.backwards
        (4, 4)
        """
        count = len(results[-1])
        self.forwards += count
        learned_from = [tensor for tensor in results if tensor.requires_grad]
        if learned_from:
            register_multi_grad_hook(learned_from, lambda gradient: self._back(count), mode="any")

    def counted(self, logits: Tensor) -> Tensor:
        """Logits that a network gave for one batch, once they are counted."""
        self.ran(logits)
        return logits

    def _back(self, count: int) -> None:
        self.backwards += count
