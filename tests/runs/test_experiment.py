from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from petal import ConfigError
from petal.runs import (
    Experiment,
    make_manifest,
    open_run,
)
from runs.parts import changed, job, known, opened


def test_posterior_and_severity_are_asked_for_by_name(source: Path) -> None:
    o = opened(source)
    with pytest.raises(ConfigError, match=r"PETAL \(FIM\) needs the source posterior"):
        replace(o, posterior=None).adapter(known()["petal"], 0)
    with pytest.raises(ConfigError, match="leave the severity out"):
        Experiment("cifar10-gradual", severity=3)


def test_labels_in_runs(source: Path, tmp_path: Path) -> None:
    o = opened(source, label_correlation=0.1, batch_size=1, images=40)
    labels = [int(batch.y) for batch in o.stream(1)]
    iid = [int(batch.y) for batch in changed(o, label_correlation=None).stream(1)]
    same = [sum(x == y for x, y in pairwise(sequence)) for sequence in (labels, iid)]
    assert same[0] > 2 * same[1]
    first = make_manifest(o, [job("bn")])
    assert (first["stream"], first["label_correlation"]) == ("correlated", 0.1)
    open_run(tmp_path, first)
    with pytest.raises(ConfigError, match=r"label_correlation was 0\.1 and is None"):
        open_run(tmp_path, make_manifest(changed(o, label_correlation=None), [job("bn")]))
    with pytest.raises(ConfigError, match="leave one of them out"):
        changed(o, visits=2)
    with pytest.raises(ConfigError, match="that of cifar10-gradual is gradual"):
        Experiment("cifar10-gradual", visits=2)
