"""A few images of each domain with what was predicted for them, kept beside a job's records."""

import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from petal._files import replacing, write_json, writing
from petal.data import Batch, Stream

SAMPLES = 4                                 # images kept of each domain


@dataclass
class Sample:
    """One image with what was made of it."""

    domain: str
    severity: int
    position: int
    index: int
    label: int
    predicted: int
    probability: float


class SampleWriter:
    """The first images of each domain, at its highest severity, with their predictions."""

    def __init__(self, place: Path, stream: Stream) -> None:
        self.place = place
        highest: dict[str, int] = {}
        for domain, severity in stream.domains:
            highest[domain] = max(severity, highest.get(domain, 0))
        self.wanted = set(highest.items())
        self.samples: list[Sample] = []
        self.images: list[np.ndarray[Any, Any]] = []
        self.written = 0

    def take(self, batch: Batch, logits: Tensor) -> None:
        """Keep some of a batch if it is the first of its domain."""
        if (batch.domain, batch.severity) not in self.wanted:
            return
        self.wanted.discard((batch.domain, batch.severity))
        probability, predicted = logits[:SAMPLES].softmax(1).max(1)
        images = batch.x[:SAMPLES].mul(255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
        for i, image in enumerate(images):
            self.images.append(image)
            self.samples.append(
                Sample(batch.domain, batch.severity, batch.position, int(batch.index[i]), int(batch.y[i]),
                       int(predicted[i]), float(probability[i]))
            )  # fmt: skip

    def write(self) -> None:
        """Both files, if there is anything new; the pictures first, so that every line has its picture."""
        if len(self.samples) == self.written:
            return
        path = self.place / "samples.npz"
        with writing(path), replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, images=np.stack(self.images))
        write_json(self.place / "samples.json", [asdict(sample) for sample in self.samples])
        self.written = len(self.samples)

    def resume(self, position: int) -> None:
        """Those taken before a position; what was taken later is taken again."""
        try:
            listed = json.loads((self.place / "samples.json").read_text(encoding="utf-8"))
            with np.load(self.place / "samples.npz", allow_pickle=False) as archive:
                images = archive["images"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return
        for entry, image in zip(listed, images, strict=False):
            if entry["position"] < position:
                self.samples.append(Sample(**entry))
                self.images.append(image)
                self.wanted.discard((entry["domain"], entry["severity"]))
