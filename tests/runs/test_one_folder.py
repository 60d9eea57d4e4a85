"""What must be the same for jobs to share a folder: all that their numbers depend on and that is not a job's own."""

import json
from pathlib import Path

import pytest

from petal import PetalError
from runs.command import FEW, call, of

OTHER = {
    "recipe": "cifar10", "fidelity": "paper", "device": "cuda", "engine": "eager", "stream": "gradual", "stream_seed": 7,
    "severity": 3, "batch_size": 10, "images": 17, "network": "wrn-28-10", "visits": 2, "label_correlation": 0.1,
}  # fmt: skip


def test_a_folder_of_another_stream_is_refused(source: Path, tmp_path: Path) -> None:
    more = ["run", "digits", *FEW, *of(source), "-q", "--out", tmp_path, "-m"]
    call(*more, "source")
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    for key, value in OTHER.items():
        assert manifest[key] != value
        changed = json.dumps({**manifest, key: value})
        path.write_text(changed)
        with pytest.raises(PetalError, match=f"{key} was {value!r} and is {manifest[key]!r}"):
            call(*more, "bn")
        assert path.read_text() == changed
    assert [place.name for place in (tmp_path / "jobs").iterdir()] == ["source-o1-s0"]
    path.write_text(json.dumps(manifest))
    call(*more, "bn")
    assert len(json.loads(path.read_text())["jobs"]) == 2
