"""The order of the stream as evidence, around any method."""

from collections.abc import Mapping

from torch import Tensor

from petal.errors import ConfigError
from petal.methods.base import Adapter
from petal.methods.inputs import check_number
from petal.methods.wrapper import Wrapper
from petal.order import Keys, TemporalPrior
from petal.order.keys import rows_by_key


class Ordered(Wrapper):
    """Corrects a method's answers by the order in which images come (`TemporalPrior`); what it learns stays the same.

    Images come one by one, as in the batch: the answers are the same for batches of any size if the method's own are.
    `stream` in a call names their source, each with a prior of its own, up to `streams` of them. With `look_back`, answers
    also use the images of the batch that come after. `shuffled` switches it off: say so where the order means nothing.

    Weights that are put back, as a guard does in a collapse, take the answers of those before them along: it begins anew.
    """

    prefix = "order."
    ordered = True

    def __init__(self, adapter: Adapter, streams: int = 64, look_back: bool = False, shuffled: bool = False) -> None:
        super().__init__(adapter)
        if adapter.ordered:
            raise ConfigError(f"{adapter.kind} uses the order of the stream already: leave one of the two out")
        check_number("streams", streams, low=1, whole=True)
        self.shuffled = shuffled
        self.prior = TemporalPrior(streams, look_back)

    def forward(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict and adapt; then correct the answers, and learn from them what comes next."""
        self._check(x, stream)
        with self.handing_on(lambda logits: logits if self.shuffled else self.prior.answers(logits, stream)):
            logits = self.uncorrected = self.adapter(x, stream=stream)
        return logits if self.shuffled else self.prior(logits, stream)

    def predict(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict a batch: what a call would return next, with nothing changed."""
        self._check(x, stream)
        logits = self.uncorrected = self.adapter.predict(x, stream)
        return logits if self.shuffled else self.prior.answers(logits, stream)

    def observe(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Answer without learning, and follow the order."""
        self._check(x, stream)
        logits = self.uncorrected = self.adapter.observe(x, stream)
        return logits if self.shuffled else self.prior(logits, stream)

    def load_weights(self, weights: Mapping[str, Tensor], fresh: bool = True) -> None:
        """Put all that adapts to these values; the prior begins anew, unless the weights were only moved a little."""
        self.adapter.load_weights(weights, fresh)
        if fresh:
            self.prior.reset()

    def vitals(self) -> dict[str, float]:
        """With how far the order is believed."""
        return self.adapter.vitals() | ({} if self.shuffled else self.prior.vitals())

    def describe(self) -> dict[str, str]:
        """What it does, and what the adapter inside does."""
        how = f"a prior for the next label, for up to {self.prior.streams} streams"
        how += ", looks back over the batch" * self.prior.look_back
        return self.adapter.describe() | {"order": "off: the stream is shuffled" if self.shuffled else how}

    def _check(self, x: Tensor, stream: Keys) -> None:
        """Refuse keys before anything changes. What is wrong with the batch, the method says."""
        if isinstance(x, Tensor) and x.dim():
            rows_by_key(stream, len(x))

    # The state

    def reset_own(self) -> None:
        """Forget all answers."""
        self.prior.reset()

    def own_state(self) -> dict[str, Tensor]:
        """The prior's."""
        return self.prior.state_dict()

    def own_kept(self) -> dict[str, Tensor]:
        """After a collapse it begins anew."""
        return TemporalPrior().state_dict()

    def check_own_state(self, state: Mapping[str, Tensor]) -> list[str]:
        """What is wrong with a state of the prior."""
        return self.prior.problems(state, self.prefix)

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checked state."""
        self.prior.load_state_dict(state)
