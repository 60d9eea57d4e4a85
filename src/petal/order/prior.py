"""A prior for the next label, from the order in which images come: a value with state, one for each source of images."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petal.errors import ConfigError, InputError
from petal.order.follow import Array, Bias, Experts, Track, follow, likelihoods
from petal.order.keys import Key, Keys, rows_by_key

SMALLEST = 1e-6                             # share of the uniform distribution in every prediction, so that none is zero


class TemporalPrior:
    """Corrects predictions by what the order of the stream says: labels that come in runs foretell the next one.

    Call it with the logits [N, C] of a batch, in the order of the images; it returns the logarithms of the corrected
    probabilities. It is causal: an answer depends on its own image and those before it, and not on how they were batched.
    What the order says is weighed against the network's word by Bayes' rule, among averages of the past answers over several
    time scales and nulls, for which the order says nothing; so there is nothing to tune, and little to lose on streams
    without order. A network that is too sure of itself is tempered as far as that makes its predictions agree with the
    order (see `Experts`). Logits that are not finite come back as they are and are not learned from.

    Order means order within one source of images. `stream` names it, one key for the batch or one for each image; each has
    its own past, up to `streams` of them: the one not heard of for longest is forgotten. How the network is biased is
    learned from all of them.

    With `look_back`, the answers of a batch also take the images after them into account, as far as the batch goes. What is
    learned is the same.

    >>> prior = TemporalPrior()
    >>> run = torch.tensor([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0], [0.0, 0.1]])    # the last one is in doubt
    >>> prior(run).argmax(1).tolist()
    [0, 0, 0, 0]
    """

    def __init__(self, streams: int = 64, look_back: bool = False, experts: Experts | None = None) -> None:
        if isinstance(streams, bool) or not isinstance(streams, int) or streams < 1:
            raise ConfigError(f"streams must be a whole number from 1, got {streams!r}")
        self.streams, self.look_back = streams, look_back
        self.experts = Experts() if experts is None else experts
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._tracks: OrderedDict[Key, Track] = OrderedDict()       # those heard of last come last
        self._bias: Bias | None = None

    def __call__(self, logits: Tensor, stream: Keys = None) -> Tensor:
        """Corrected predictions [N, C] as logits, and learn from them."""
        answers, self._bias, tracks = self._followed(logits, stream)
        for key, track in tracks.items():
            self._tracks[key] = track
            self._tracks.move_to_end(key)
        while len(self._tracks) > self.streams:
            self._tracks.popitem(last=False)
        return answers

    def answers(self, logits: Tensor, stream: Keys = None) -> Tensor:
        """What a call would return next, with nothing changed."""
        return self._followed(logits, stream)[0]

    def unordered(self, count: int, stream: Keys = None, after: Tensor | None = None) -> float:
        """How much it believes that the order says nothing, from 0 to 1; of the sources of the next images the least.

        Of a source that nothing is known of it believes nothing. With `after`, logits of these images, what it would
        believe after them.
        """
        known = self._tracks if after is None else self._followed(after, stream)[2]
        tracks = [known.get(key) for key in rows_by_key(stream, count)]
        return min(0.0 if track is None else float(track.belief[:, -2:].sum()) for track in tracks)

    def vitals(self) -> dict[str, float]:
        """How far the order is believed (`order`), on the mean over the sources heard of, of which there are `streams`."""
        believed = [1.0 - float(track.belief[:, -2:].sum()) for track in self._tracks.values()]
        return {"order": sum(believed) / len(believed) if believed else 0.0, "streams": float(len(believed))}

    # The state

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all that changes, as a flat dict of tensors."""
        state: dict[str, NDArray[Any]] = {"keys": np.frombuffer(json.dumps(list(self._tracks)).encode(), np.uint8)}
        if self._bias is not None:
            recent, belief, seen = (np.stack(arrays) for arrays in zip(*self._tracks.values(), strict=True))
            state |= {"mean": self._bias.mean, "images": np.array([self._bias.seen])}
            state |= {"recent": recent, "belief": belief, "seen": seen}
        return {name: torch.from_numpy(array.copy()) for name, array in state.items()}

    def problems(self, state: Mapping[str, Tensor], prefix: str = "") -> list[str]:
        """What is wrong with a state whose names begin with a prefix, if anything is."""
        try:
            keys = _decoded(state["keys"])
        except (LookupError, ValueError, TypeError):
            return [f"missing '{prefix}keys', a list of names as bytes"]
        shapes: dict[str, tuple[int, ...]] = {"keys": tuple(state["keys"].shape)}
        if keys:
            classes = state["mean"].shape[-1] if "mean" in state else 1
            bias, track = self.experts.unbiased(classes), self.experts.start(classes)
            shapes |= {"mean": bias.mean.shape, "images": (1,), "seen": (len(keys),)}
            shapes |= {"recent": (len(keys), *track.recent.shape), "belief": (len(keys), *track.belief.shape)}
        found = [f"missing '{prefix}{name}'" for name in sorted(shapes.keys() - state.keys())]
        found += [f"unexpected '{prefix}{name}'" for name in sorted(state.keys() - shapes.keys())]
        found += [
            f"'{prefix}{name}' is {list(state[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in state and state[name].shape != shape
        ]
        if len(keys) > self.streams:
            found.append(f"'{prefix}keys' names {len(keys)} sources of images instead of up to {self.streams}")
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state exactly; one that does not fit is refused and changes nothing."""
        if problems := self.problems(state):
            raise ConfigError(f"this state does not fit {type(self).__name__}: {'; '.join(problems)}")
        arrays = {name: value.cpu().numpy().copy() for name, value in state.items()}
        self.reset()
        for number, key in enumerate(_decoded(state["keys"])):
            self._bias = Bias(arrays["mean"], int(arrays["images"][0]))
            self._tracks[key] = Track(arrays["recent"][number], arrays["belief"][number], int(arrays["seen"][number]))

    # The parts

    def _followed(self, logits: Tensor, stream: Keys) -> tuple[Tensor, Bias, dict[Key, Track]]:
        """Answers to a batch, and what is then known of the network and of the sources that the batch came from."""
        if logits.dim() != 2 or not len(logits):
            raise InputError(f"the prior takes logits [N, classes] of at least one image, got {list(logits.shape)}")
        given = logits.detach().cpu().double()                      # the one wait for the device
        classes, finite = given.shape[1], given.isfinite().all(1).numpy()
        bias = self._bias or self.experts.unbiased(classes)
        if bias.mean.shape[1] != classes:
            raise InputError(f"the logits are of {classes} classes and those before of {bias.mean.shape[1]}")
        likely = np.ones((len(given), *bias.mean.shape))
        likely[finite], bias = likelihoods(self.experts, bias, self._probabilities(given)[finite])
        answers, tracks = given.numpy().copy(), {}
        for key, rows in rows_by_key(stream, len(given)).items():
            track, rows = self._tracks.get(key) or self.experts.start(classes), rows[finite[rows]]
            answers[rows], tracks[key] = self._answered(track, likely[rows])
        return torch.from_numpy(answers).to(logits), bias, tracks

    def _probabilities(self, logits: Tensor) -> Array:
        """[N, T, C], at each temperature; none is zero."""
        temperatures = logits.new_tensor(self.experts.temperatures)
        probabilities = (logits[:, None] / temperatures[:, None]).softmax(2)
        array: Array = probabilities.mul_(1 - SMALLEST).add_(SMALLEST / logits.shape[1]).numpy()
        return array

    def _answered(self, track: Track, likely: Array) -> tuple[Array, Track]:
        """Logarithms of the answers of one source, and what is then known of it."""
        answers, _, after = follow(self.experts, track, likely)
        if self.look_back:                  # as if the images came in the other order, by what is believed at the end
            start = self.experts.start(likely.shape[2])._replace(belief=after.belief)
            answers = answers * follow(self.experts.without_null(), start, likely[::-1])[1][::-1]
            answers /= answers.sum(1, keepdims=True)
        return np.log(answers), after


def _decoded(keys: Tensor) -> list[Key]:
    return list(json.loads(bytes(keys.cpu().tolist())))
