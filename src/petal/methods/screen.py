"""Images that do not belong to a batch: refused, or set aside so that they cost the others nothing."""

import logging
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from petal.calls import taken
from petal.errors import InputError, PetalWarning
from petal.methods.base import Adapter
from petal.methods.inputs import check_choice, check_number
from petal.methods.network import logits_of
from petal.methods.wrapper import Wrapper, beginning
from petal.norm import plain_copy
from petal.norm.robust import distances, median
from petal.order import Keys

log = logging.getLogger(__name__)

Answers = Callable[..., Tensor]
OUTLIERS = ("refuse", "aside", "take")


class Screen(Wrapper):
    """Looks at the values of a batch before an adapter sees them. The other images keep their answers, whatever is sent.

    An image is an outlier if a value of it is not finite, or lies further outside the range of values given so far (and
    outside [0, 1]) than `margin` times that range; most images of a batch say what it is, so that a few cannot widen it.

        refuse      an InputError that says which images, and nothing changes
        aside       they never reach the adapter; the source with its own running statistics answers them
        take        as if there were no screen

    With `quarantine` an image is also kept from learning, and from the batch statistics of others, if its brightness,
    contrast and texture differ from those of the batch so many times as much as is usual in it (3 is little, 6 is much), or
    if it is the copy of another one in the batch. It is answered by the adapter in a second look at the whole batch. Where
    that would be half of a batch or more, nothing is.

    Another image of the batch takes the place of what is left out where the method goes by batches of one size.
    `aside` and `quarantined` count images. One wait for the device each batch.
    """

    prefix = "screen."

    def __init__(
        self, adapter: Adapter, outliers: str = "aside", margin: float = 3.0, quarantine: float | None = None
    ) -> None:
        super().__init__(adapter)
        check_choice("outliers", outliers, OUTLIERS)
        check_number("margin", margin, low=0)
        if quarantine is not None:
            check_number("quarantine", quarantine, low=1)
        self.outliers, self.margin, self.quarantine = outliers, margin, quarantine
        self._source: list[nn.Module] = []      # made when it is needed first; it is no part of the state
        self.reset_own()

    def reset_own(self) -> None:
        """Nothing given so far."""
        self.aside = self.quarantined = 0
        with torch.inference_mode(False):
            self._range = torch.full((2,), torch.nan, dtype=torch.float64)      # lowest and highest value given so far

    # What users call

    def forward(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict and adapt to those images that belong to the batch; answer all of them."""
        return self._screened(x, stream, "learn")

    def observe(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Answer without learning, and follow the stream."""
        return self._screened(x, stream, "observe")

    def predict(self, x: Tensor, stream: Keys = None) -> Tensor:
        """Predict a batch: what a call would return next, with nothing changed."""
        return self._screened(x, stream, "predict")

    def logits_with(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Logits by these parameters of the images that belong to the batch; of others the source's."""
        if not self._looks(x):
            return self.adapter.logits_with(parameters, x)
        x = x.detach()
        out = self._outside(x)[0]
        if not bool(out.any()) or bool(out.all()):
            return self._by_source(x) if bool(out.any()) else self.adapter.logits_with(parameters, x)
        logits = self.adapter.logits_with(parameters, x[self._places(out)])
        return self._filled(logits, x, out)

    def describe(self) -> dict[str, str]:
        """What it does, and what the adapter inside does."""
        what = {"refuse": "refuses", "aside": "sets aside", "take": "takes"}[self.outliers] + " images out of range"
        more = "" if self.quarantine is None else f"; quarantine at {self.quarantine:g} times the usual"
        return self.adapter.describe() | {"screen": what + more}

    # The parts

    def _looks(self, x: Tensor) -> bool:
        x = taken(x)
        usual = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and x.numel() > 0
        return usual and x.device == self.device and x.dtype == self.dtype

    def _screened(self, x: Tensor, stream: Keys, how: str) -> Tensor:
        calls: dict[str, Answers] = {
            "learn": self.adapter, "observe": self.adapter.observe, "predict": self.adapter.predict
        }  # fmt: skip
        call = calls[how]
        if not self._looks(x):
            return call(x, stream=stream)       # it says what is wrong with the batch, or takes it
        with self._lock, torch.inference_mode(False):
            x = x.clone() if x.is_inference() else x.detach()
            out, seen = self._outside(x)
            if self.outliers == "take":
                out = torch.zeros_like(out)
            odd = self._odd(x, out)
            if not bool((out | odd).any()):
                logits = call(x, stream=stream)
            else:
                if bool(out.any()) and self.outliers == "refuse":
                    raise self._refusal(out)
                logits = self._without(x, stream, call, out, odd)
            if how != "predict":
                self._range = seen
                self.aside, self.quarantined = self.aside + int(out.sum()), self.quarantined + int(odd.sum())
            return logits

    def _without(self, x: Tensor, stream: Keys, call: Answers, out: Tensor, odd: Tensor) -> Tensor:
        """Answers to all images, by an adapter that sees the usual ones; those in quarantine by a second look."""
        if bool(out.any()):
            self._tell(out)
        if bool(out.all()):
            return self._by_source(x)
        places = self._places(out | odd)
        second = None
        if bool(odd.any()):                     # first, since learning moves the weights
            around = self._places(out)
            second = self.adapter.predict(x[around], stream=_keys(stream, around, len(x)))
            second = self._spread(second, len(x), out)
        logits: Tensor = call(x[places], stream=_keys(stream, places, len(x)))
        answer = self._spread(logits, len(x), out | odd)
        if second is not None:
            answer = torch.where(odd[:, None], second, answer)
        return self._filled(answer, x, out, spread=False)

    def _outside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which images [N] are outliers, and the range of values after this batch [2]."""
        flat = x.flatten(1).double()
        finite = flat.isfinite().all(1)
        low, high = flat.amin(1), flat.amax(1)
        known = self._range.to(x.device)
        if not bool(finite.any()):
            return ~finite, self._range
        before = torch.stack([low[finite].median(), high[finite].median()])
        known = torch.where(known.isnan(), before, known)
        width = (known[1] - known[0]).clamp(min=1) * self.margin
        inside = finite & (low >= known[0].clamp(max=0) - width) & (high <= known[1].clamp(min=1) + width)
        if bool(inside.any()):
            here = torch.stack([low[inside].median(), high[inside].median()])
            known = torch.stack([torch.minimum(known[0], here[0]), torch.maximum(known[1], here[1])])
        return ~inside, known.cpu()

    def _odd(self, x: Tensor, out: Tensor) -> Tensor:
        """Which images [N] are to be in quarantine: less than half of those that are no outliers, or none."""
        none = torch.zeros_like(out)
        if self.quarantine is None or int((~out).sum()) < 4:
            return none
        values = features(x.where(~out.view(-1, *[1] * (x.dim() - 1)), 0.0))
        far = distances(values[~out])
        odd = none.clone()
        odd[~out] = (far > self.quarantine * far.median()) | again(values[~out])
        return odd if 2 * int(odd.sum()) < int((~out).sum()) else none

    def _places(self, out: Tensor) -> Tensor:
        """The numbers of the images that the adapter is given; as many as came, where it goes by batches of one size."""
        kept = (~out).nonzero().squeeze(1)
        if not self.adapter.by_batch:
            return kept
        places = torch.arange(len(out), device=out.device)
        places[out] = kept[torch.arange(int(out.sum()), device=out.device) % len(kept)]
        return places

    def _spread(self, logits: Tensor, count: int, out: Tensor) -> Tensor:
        """Answers of what the adapter was given, in the places of those images."""
        if len(logits) == count:
            return logits
        answer = logits.new_zeros(count, logits.shape[1])
        answer[~out] = logits
        return answer

    def _filled(self, logits: Tensor, x: Tensor, out: Tensor, spread: bool = True) -> Tensor:
        """The answers, with the source's in the places of those left out."""
        answer = self._spread(logits, len(x), out).clone() if spread else logits.clone()
        if bool(out.any()):
            answer[out] = self._by_source(x[out]).to(answer.dtype)
        return answer

    def _by_source(self, x: Tensor) -> Tensor:
        """The source's answers, image by image in its running statistics; all classes alike where it has none."""
        if not self._source:
            self._source.append(plain_copy(beginning(self.method), running=True).requires_grad_(False))
        finite = x.flatten(1).isfinite().all(1)
        with torch.no_grad():
            try:
                logits = logits_of(self._source[0], x.nan_to_num(0.0, 0.0, 0.0))
            except InputError:                  # one image has no statistics of its own
                both = torch.cat([x.nan_to_num(0.0, 0.0, 0.0), torch.zeros_like(x)])
                logits = logits_of(self._source[0], both)[: len(x)]
        return logits.where((finite & logits.isfinite().all(1))[:, None], 0.0)

    def _refusal(self, out: Tensor) -> InputError:
        low, high = self._range.tolist()
        given = f" ({low:.3g} to {high:.3g})" if low == low else ""
        return InputError(
            f"images {_numbers(out)} of the batch have values far outside those given so far{given}, or not finite: "
            'leave them out, or set outliers="aside"'
        )

    def _tell(self, out: Tensor) -> None:
        text = f"images {_numbers(out)} of a batch have values far outside those given so far, or not finite: set aside"
        if self.aside:
            log.info(text)
        else:
            warnings.warn(f"{text}, answered by the source; `aside` counts them from here on", PetalWarning, stacklevel=6)

    # The state

    def own_state(self) -> dict[str, Tensor]:
        """The range of values, and both counts."""
        return {"range": self._range.clone(), "counters": torch.tensor([self.aside, self.quarantined])}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checked state."""
        self._range = state["range"].to("cpu", torch.float64, copy=True)
        self.aside, self.quarantined = map(int, state["counters"].tolist())


def features(x: Tensor) -> Tensor:
    """What images [N, C, ...] look like: mean, and logarithms of contrast and of texture in each direction [N, ...]."""
    if x.dim() < 3:
        return x.flatten(1)
    pixels = tuple(range(2, x.dim()))
    parts = [x.mean(pixels), (x.var(pixels, correction=0) + 1e-4).log()]
    parts += [(x.diff(dim=d).square().mean(pixels) + 1e-4).log() for d in pixels if x.shape[d] > 1]
    return torch.cat(parts, 1)


def again(values: Tensor) -> Tensor:
    """Which rows of values [N, K] are those of an earlier row, but for a thousandth of how rows usually differ."""
    usual = (values - median(values)).abs()
    apart = (values[:, None] - values).abs() <= 1e-3 * median(usual)
    return apart.all(2).tril(-1).any(1)


def _keys(stream: Keys, places: Tensor, count: int) -> Keys:
    """The keys of the images in these places."""
    if stream is None or isinstance(stream, (str, int, np.integer)):
        return stream
    keys = stream.tolist() if isinstance(stream, (Tensor, np.ndarray)) else list(stream)
    return [keys[place] for place in places.tolist()] if len(keys) == count else keys


def _numbers(out: Tensor) -> str:
    found = out.nonzero().squeeze(1).tolist()
    return ", ".join(map(str, found[:5])) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
