"""How the steps of an adapter are carried out other than by plain torch code."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from petal.methods.descent import Descent
from petal.methods.network import Network

if TYPE_CHECKING:
    from petal.methods.base import Adapter


class Executor(Protocol):
    """How steps are carried out other than by plain torch code (see `petal.engine`)."""

    @property
    def descent(self) -> Descent | None:
        """What takes the steps of the adapted parameters, if there are any."""
        ...

    def again(self) -> Callable[["Adapter"], "Executor"]:
        """What makes one like this for a copy of the adapter."""
        ...

    def run(self, body: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A step or a prediction, by `body`, which calls the networks and the descent of this executor."""
        ...

    def sure(self) -> bool:
        """True if what was computed of this batch so far stands; raises what `run` would raise of the batch."""
        ...

    def network(self, module: nn.Module) -> Network:
        """A network of the adapter, in the form in which it runs here."""
        ...

    def together(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors with the names of the adapted parameters, where they are worked on fastest."""
        ...
