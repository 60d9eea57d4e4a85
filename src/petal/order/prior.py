"""A prior for the next label, from the order in which images come: a value with state, one for each source of images."""

import json
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from petal.errors import ConfigError, InputError
from petal.order.follow import Array, Experts, Track, follow
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
    its own state, up to `streams` of them: the one not heard of for longest is forgotten.

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

    def __call__(self, logits: Tensor, stream: Keys = None) -> Tensor:
        """Corrected predictions [N, C] as logits, and learn from them."""
        answers, tracks = self._followed(logits, stream)
        for key, track in tracks.items():
            self._tracks[key] = track
            self._tracks.move_to_end(key)
        while len(self._tracks) > self.streams:
            self._tracks.popitem(last=False)
        return answers

    def answers(self, logits: Tensor, stream: Keys = None) -> Tensor:
        """What a call would return next, with nothing changed."""
        return self._followed(logits, stream)[0]

    # The state

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all that changes, as a flat dict of tensors."""
        keys = np.frombuffer(json.dumps(list(self._tracks)).encode(), np.uint8)
        state = {"keys": torch.from_numpy(keys.copy())}
        if self._tracks:
            stacked = [np.stack(arrays) for arrays in zip(*self._tracks.values(), strict=True)]
            state |= {name: torch.from_numpy(array) for name, array in zip(Track._fields, stacked, strict=True)}
        return state

    def problems(self, state: Mapping[str, Tensor]) -> list[str]:
        """What is wrong with a state, if anything is."""
        try:
            keys = _decoded(state["keys"])
        except (LookupError, ValueError, TypeError):
            return ["'keys' is missing or no list of names"]
        names = {"keys", *Track._fields} if keys else {"keys"}
        found = [f"missing {name!r}" for name in sorted(names - state.keys())]
        found += [f"unexpected {name!r}" for name in sorted(state.keys() - names)]
        if keys and not found:
            expected = self.experts.start(state["recent"].shape[-1])
            for name, array in zip(Track._fields, expected, strict=True):
                shape = [len(keys), *array.shape]
                if list(state[name].shape) != shape:
                    found.append(f"{name!r} is {list(state[name].shape)} instead of {shape}")
        if len(keys) > self.streams:
            found.append(f"'keys' names {len(keys)} sources of images instead of up to {self.streams}")
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state exactly; one that does not fit is refused and changes nothing."""
        if problems := self.problems(state):
            raise ConfigError(f"this state does not fit {type(self).__name__}: {'; '.join(problems)}")
        arrays = [state[name].cpu().double().numpy().copy() for name in Track._fields if name in state]
        keys = _decoded(state["keys"])
        self._tracks = OrderedDict((key, Track(*(array[i] for array in arrays))) for i, key in enumerate(keys))

    # The parts

    def _followed(self, logits: Tensor, stream: Keys) -> tuple[Tensor, dict[Key, Track]]:
        """Answers to a batch, and what is then known of the sources that it came from."""
        if logits.dim() != 2 or not len(logits):
            raise InputError(f"the prior takes logits [N, classes] of at least one image, got {list(logits.shape)}")
        given = logits.detach().cpu().double()                      # the one wait for the device
        probabilities, finite = self._probabilities(given), given.isfinite().all(1).numpy()
        answers, tracks = given.numpy().copy(), {}
        for key, rows in rows_by_key(stream, len(given)).items():
            track, rows = self._track(key, given.shape[1]), rows[finite[rows]]
            answers[rows], tracks[key] = self._answered(track, probabilities[rows])
        return torch.from_numpy(answers).to(logits), tracks

    def _probabilities(self, logits: Tensor) -> Array:
        """[N, T, C], at each temperature; none is zero."""
        temperatures = logits.new_tensor(self.experts.temperatures)
        probabilities = (logits[:, None] / temperatures[:, None]).softmax(2)
        array: Array = probabilities.mul_(1 - SMALLEST).add_(SMALLEST / logits.shape[1]).numpy()
        return array

    def _track(self, key: Key, classes: int) -> Track:
        track = self._tracks.get(key) or self.experts.start(classes)
        if track.recent.shape[1] != classes:
            raise InputError(f"the logits are of {classes} classes and those before of {track.recent.shape[1]}")
        return track

    def _answered(self, track: Track, probabilities: Array) -> tuple[Array, Track]:
        """Logarithms of the answers of one source, and what is then known of it."""
        answers, _, after = follow(self.experts, track, probabilities)
        if self.look_back:
            start = self.experts.start(probabilities.shape[2])
            _, backward, _ = follow(self.experts, start._replace(mean=after.mean, belief=after.belief), probabilities[::-1])
            answers = answers * backward[::-1]
            answers /= answers.sum(1, keepdims=True)
        return np.log(answers), after


def _decoded(keys: Tensor) -> list[Key]:
    return list(json.loads(bytes(keys.cpu().tolist())))
