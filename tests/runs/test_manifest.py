import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from petal import ConfigError, PetalWarning
from petal.errors import StorageError
from petal.runs import (
    Job,
    make_manifest,
    open_run,
    read_manifest,
    run_job,
)
from runs.parts import changed, job, known, opened


def test_a_folder_of_another_run_is_refused_and_more_jobs_are_added(source: Path, tmp_path: Path) -> None:
    o = opened(source)
    o = changed(o, weights=str(source / "network.safetensors"), posterior=str(source / "posterior.safetensors"))
    first = make_manifest(o, [job("bn")])
    open_run(tmp_path, first)
    more = make_manifest(o, [job("petal", 1)])
    merged = open_run(tmp_path, more)
    assert [j["id"] for j in merged["jobs"]] == ["bn-o1-s0", "petal-o1-s1"]
    assert merged["seeds"] == [0, 1]
    assert read_manifest(tmp_path) == merged
    options = merged["jobs"][1]["options"]
    assert (options["restore"], options["learn"], options["steps"]) == ("Fisher(quantile=0.03)", "plain", 1)    # all as used
    for key, value in (("severity", 3), ("batch_size", 10), ("fidelity", "paper"), ("engine", "eager"), ("stream_seed", 1),
                       ("shuffle", True)):  # fmt: skip
        other = make_manifest(changed(o, **{key: value}), [job("bn")])
        with pytest.raises(ConfigError, match=f"{key} was .* and is {value!r}"):
            open_run(tmp_path, other)
    with pytest.raises(ConfigError, match="weights was"):
        open_run(tmp_path, make_manifest(changed(o, weights=str(source / "posterior.safetensors")), [job("bn")]))
    row = known()["petal"]
    other = Job(replace(row, options={**row.options, "ema": 0.5}), 1, 1)
    with pytest.raises(ConfigError, match=r"petal.ema was 0.99 and is 0.5"):
        open_run(tmp_path, make_manifest(o, [other]))
    assert read_manifest(tmp_path) == merged
    older = {**merged, "versions": {**merged["versions"], "torch": "1.0"}}
    (tmp_path / "manifest.json").write_text(json.dumps(older))
    with pytest.warns(PetalWarning, match="another version of torch"):
        open_run(tmp_path, first)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="format"):
        open_run(tmp_path, first)


def test_the_domains_of_an_order_that_is_added_are_named(source: Path, tmp_path: Path) -> None:
    o = opened(source)
    open_run(tmp_path, make_manifest(o, [job("bn")]))
    merged = open_run(tmp_path, make_manifest(o, [replace(job("bn"), order=4)]))
    assert merged["orders"] == [1, 4]
    assert merged["order_names"] == {str(n): list(o.recipe.order(n)) for n in (1, 4)}
    assert merged["order_names"]["1"] != merged["order_names"]["4"]


def test_jobs_added_by_two_at_once_are_all_there(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    o = opened(source)
    open_run(tmp_path, make_manifest(o, [job("bn")]))
    both = threading.Barrier(2)

    def read(folder: Path) -> dict[str, object]:
        found = read_manifest(folder)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)                  # until the other has read it too, if it can
        return found

    monkeypatch.setattr("petal.runs.manifest.read_manifest", read)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: open_run(tmp_path, make_manifest(o, [job(name)])), ["source", "tent"]))
    assert {j["row"] for j in read_manifest(tmp_path)["jobs"]} == {"bn", "source", "tent"}


def test_a_folder_that_cannot_be_made_is_named(source: Path, tmp_path: Path) -> None:
    o = opened(source)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*file.jobs: Not a directory"):
        open_run(tmp_path / "file", make_manifest(o, [job("bn")]))
    with pytest.raises(StorageError, match=r"cannot write .*file.jobs.bn-o1-s0: Not a directory"):
        run_job(job("bn"), tmp_path / "file", o)
    (tmp_path / "jobs" / "bn-o1-s0" / ".lock").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"cannot write .*\.lock: Is a directory"):
        run_job(job("bn"), tmp_path, o)


def test_files_that_jobs_are_added_with_are_noted(source: Path, tmp_path: Path) -> None:
    plain = opened(source)
    assert open_run(tmp_path, make_manifest(plain, [job("bn")]))["posterior"] == {}
    given = changed(plain, posterior=str(source / "posterior.safetensors"))
    merged = open_run(tmp_path, make_manifest(given, [job("petal")]))
    assert merged["posterior"] == make_manifest(given, [])["posterior"] != {}
    assert open_run(tmp_path, make_manifest(plain, [job("tent")]))["posterior"] == merged["posterior"]
    other = changed(plain, posterior=str(source / "network.safetensors"))
    with pytest.raises(ConfigError, match="posterior was"):
        open_run(tmp_path, make_manifest(other, [job("petal", 1)]))
