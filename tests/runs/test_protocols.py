"""Protocols: one name fixes a stream, and what contradicts it is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from petal import evaluate
from petal.errors import ConfigError
from petal.recipes import recipe
from petal.runs import PROTOCOLS, Experiment, make_manifest, open_run, protocol, run_job
from runs.parts import job, opened, without_time


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_makes_an_experiment(name: str) -> None:
    known = PROTOCOLS[name]
    experiment = Experiment((known.recipes or ("digits",))[0], protocol=name)
    assert experiment.orders() == list(known.orders or experiment.chosen.numbers)
    assert replace(experiment, data="digits").protocol == name       # it agrees with itself


def test_it_sets_what_its_name_says() -> None:
    found = Experiment("digits", protocol="dirichlet-0.1-batch-10-50")
    assert (found.label_correlation, found.batch_size, found.images, found.severity) == (0.1, 10, 50, 5)
    assert Experiment("cifar10", protocol="table1-s3-2000").severity == 3
    assert Experiment("digits", protocol="recurring-10").visits == 10
    assert Experiment("digits", protocol="equal-time").rate == 1.0


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("images", 500, "--images 500: it has all images"), ("severity", 3, "--severity 3: it has 5"),
     ("batch_size", 64, "--batch-size 64: it has 200"), ("visits", 2, "--visits 2: it has none"),
     ("label_correlation", 0.1, "--label-correlation 0.1"), ("mean_run", 3.0, "--mean-run 3.0"),
     ("frames", 4, "--frames 4"), ("shuffle", True, "--shuffle True: it has none"), ("rate", 0.5, "--rate 0.5"),
     ("after", True, "--after True"), ("reset_per_domain", True, "--reset-per-domain True")],
)  # fmt: skip
def test_what_contradicts_is_refused_by_name(option: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"protocol table1 contradicts {said}"):
        Experiment("cifar10", protocol="table1", **{option: value})


def test_a_contradiction_to_what_it_turns_on() -> None:
    with pytest.raises(ConfigError, match="--reset-per-domain False: it has True"):
        Experiment("digits", protocol="reset-per-domain", reset_per_domain=False)


def test_what_agrees_may_be_said_too() -> None:
    assert Experiment("cifar10", protocol="table1-2000", images=2000, severity=5, batch_size=200).images == 2000


def test_orders() -> None:
    assert Experiment("imagenet", protocol="imagenet-c").orders() == list(range(1, 11))
    assert Experiment("imagenet", protocol="imagenet-c").orders([3, 4]) == [3, 4]
    with pytest.raises(ConfigError, match="contradicts --order 2: its orders are 1"):
        Experiment("cifar10", protocol="table1").orders([2])


@pytest.mark.parametrize("name", ["tabel1", "table1-0", "table1-s9", "table1-", "-5"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(ConfigError, match="no protocol"):
        protocol(name)


def test_of_another_recipe() -> None:
    with pytest.raises(ConfigError, match="table1 is one of cifar10, not of digits"):
        Experiment("digits", protocol="table1")
    with pytest.raises(ConfigError, match="that of cifar10-gradual is gradual"):
        Experiment("cifar10-gradual", protocol="recurring-10")
    with pytest.raises(ConfigError, match="all severities"):
        protocol("gradual-s3").fixes(recipe("cifar10-gradual"))


def test_it_is_in_the_manifest_and_a_folder_has_one(source: Path, tmp_path: Path) -> None:
    def manifest(name: str | None) -> dict[str, Any]:
        settings = {"images": 16, "batch_size": 50} if name is None else {"images": None, "batch_size": None}
        return make_manifest(opened(source, protocol=name, **settings), [job("source")])

    first = manifest("continual-16")
    assert first["protocol"] == "continual-16"
    assert first["images"] == 16
    assert first["preprocessing"] == "corrupted here (cifar profile)"
    open_run(tmp_path, first)
    with pytest.raises(ConfigError, match="protocol was 'continual-16' and is None"):
        open_run(tmp_path, manifest(None))


def test_every_method_starts_anew_if_all_are_reset(source: Path, tmp_path: Path) -> None:
    reset = run_job(job("tent"), tmp_path / "reset", opened(source, reset_per_domain=True))
    told = run_job(job("tent-online"), tmp_path / "told", opened(source))
    plain = run_job(job("tent"), tmp_path / "plain", opened(source))

    def bare(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in r.items() if k != "row"} for r in without_time(records)]

    assert bare(reset) == bare(told)
    assert bare(reset) != bare(plain)


def test_answers_of_after_the_update(source: Path, tmp_path: Path) -> None:
    o = opened(source, after=True)
    found = run_job(job("tent"), tmp_path / "after", o)
    expected = evaluate(o.adapter(job("tent").row), o.stream(1), after=True).records
    assert [r["nll"] for r in found] == [r.nll for r in expected]
    assert [r["nll"] for r in found] != [r["nll"] for r in run_job(job("tent"), tmp_path / "before", opened(source))]
