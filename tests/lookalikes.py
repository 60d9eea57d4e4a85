"""Networks as other libraries write them: answers in objects, inputs by name, tokens, two inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from networks import CLASSES, ConvNet, network

WORDS, LENGTH = 40, 9


class Output(dict):
    """An answer as transformers has it: a mapping whose entries are attributes."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@dataclass
class Answer:
    logits: Tensor
    aux: Tensor


FORMS = {
    "mapping": lambda logits: Output(logits=logits, hidden_states=(logits,)),
    "dict": lambda logits: {"logits": logits, "features": logits.new_zeros(3)},
    "object": lambda logits: Answer(logits, logits[:, :2]),
    "tuple": lambda logits: (logits, logits[:, :2]),
    "list": lambda logits: [logits, None],
}


class Wrapped(nn.Module):
    """A network that answers in another form; its parameters keep their names."""

    def __init__(self, inner: nn.Module, form: str) -> None:
        super().__init__()
        self.form = form
        for name, child in inner.named_children():
            self.add_module(name, child)
        self.eval()

    def forward(self, x: Tensor) -> object:
        return FORMS[self.form](ConvNet.forward(self, x))  # type: ignore[arg-type]


class TextNet(nn.Module):
    """A text classifier as transformers writes them: tokens and a mask by name, logits in a mapping."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.norm = nn.LayerNorm(width)
        self.layer = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        hidden = self.norm(self.words(input_ids))
        hidden = self.norm2(hidden + self.layer(hidden).relu())
        weight = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weight = weight.to(hidden.dtype)[..., None]
        pooled = (hidden * weight).sum(1) / weight.sum(1)
        return Output(logits=4 * self.classifier(pooled))


class TwoInputs(nn.Module):
    """An image and a vector that belongs to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.more = network("group-norm"), nn.Linear(4, CLASSES)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        return self.inner(image) + self.more(vector)


def text_network() -> TextNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TextNet().eval()


def tokens(count: int = 12, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (count, 1), generator=generator)
    words = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    return {"input_ids": words, "attention_mask": (torch.arange(LENGTH) < lengths).long()}


def drop_words(batch: dict[str, Tensor], generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """A view of a batch of tokens: some words are hidden."""
    hidden = torch.rand(batch["input_ids"].shape, generator=generator) < 0.2
    return batch | {"input_ids": batch["input_ids"].masked_fill(hidden, 0)}
