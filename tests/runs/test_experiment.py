import json
import shutil
from dataclasses import asdict, replace
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from petal import METHODS, ConfigError, Source, SourceStatistics, collect_statistics, models
from petal.checkpoint import fingerprint
from petal.cli import app
from petal.recipes.provenance import described
from petal.recipes.row import Row
from petal.recipes.rows import needs_statistics
from petal.runs import Experiment, OpenExperiment, make_manifest, open_run
from runs.parts import changed, job, known, opened


def test_posterior_and_severity_are_asked_for_by_name(source: Path) -> None:
    o = opened(source)
    with pytest.raises(ConfigError, match=r"PETAL \(FIM\) needs the source posterior"):
        replace(o, posterior=None).adapter(known()["petal"], 0)
    with pytest.raises(ConfigError, match="leave the severity out"):
        Experiment("cifar10-gradual", severity=3)


def test_statistics_go_to_methods_that_take_them(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Needs(Source):
        def __init__(self, model: nn.Module, statistics: SourceStatistics) -> None:
            super().__init__(model)
            statistics.check(model, "fisher")
            self.statistics = statistics

    class MayHave(Source):
        def __init__(self, model: nn.Module, statistics: SourceStatistics | None = None) -> None:
            super().__init__(model)
            self.statistics = statistics

    monkeypatch.setitem(METHODS, "needs", Needs)
    monkeypatch.setitem(METHODS, "may-have", MayHave)
    o, path = opened(source), tmp_path / "statistics.safetensors"
    with pytest.raises(ConfigError, match="needs needs source statistics: make them with `petal fit --collect"):
        o.adapter(Row("needs", "needs", "needs"))
    assert o.adapter(Row("may-have", "may-have", "may-have")).statistics is None
    collect_statistics(o.model, [o.images.batch(range(32))]).save(path)
    experiment = replace(o.experiment, weights=str(source / "network.safetensors"), statistics=str(path))
    with_them = experiment.open(torch.device("cpu"))
    for name in ("needs", "may-have"):
        adapter = with_them.adapter(Row(name, name, name))
        assert adapter.statistics.tensors().keys() == SourceStatistics.load(path).tensors().keys()
    manifest = make_manifest(with_them, [job("bn")])
    assert manifest["statistics"] == described(path)
    open_run(tmp_path / "run", manifest)
    other = collect_statistics(o.model, [o.images.batch(range(16))])
    other.save(path)
    with pytest.raises(ConfigError, match="statistics was"):
        open_run(tmp_path / "run", make_manifest(with_them, [job("bn")]))
    assert "statistics" not in make_manifest(o, [job("bn")])
    assert fingerprint(adapter) != fingerprint(replace(o, statistics=other).adapter(Row("needs", "needs", "needs")))


def test_a_built_in_recipe_collects_its_statistics(source: Path, tmp_path: Path) -> None:
    for name in ("network.safetensors", "posterior.safetensors", "fit.json"):
        shutil.copy(source / name, tmp_path)
    found = Experiment("digits").with_source(tmp_path, torch.device("cpu"))
    SourceStatistics.load(found.statistics).check(found.source_network(), "prototypes", "fisher")


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
    with pytest.raises(ConfigError, match="leave one of them out"):
        changed(o, mean_run=2.0)
    with pytest.raises(ConfigError, match="stretch changes a stream whose labels come in runs"):
        changed(o, label_correlation=None, stretch=10)
    with pytest.raises(ConfigError, match="that of cifar10-gradual is gradual"):
        Experiment("cifar10-gradual", visits=2)


@pytest.mark.parametrize(("setting", "value", "kind"), [
    ("stretch", 10, "correlated"), ("alternate", 1, "correlated"), ("sources", 2, "correlated"), ("mean_run", 4.0, "markov"),
])  # fmt: skip
def test_every_order_of_labels_is_another(source: Path, tmp_path: Path, setting: str, value: float, kind: str) -> None:
    plain = {"label_correlation": None} if kind == "markov" else {}
    o = opened(source, label_correlation=0.1, batch_size=20, images=40)
    other = changed(o, **plain, **{setting: value})
    labels, others = ([batch.y.tolist() for batch in each.stream(1)] for each in (o, other))
    assert labels != others
    assert sorted(chain(*labels)) == sorted(chain(*others))
    assert (next(iter(other.stream(1))).stream is not None) is (setting == "sources")
    manifest = make_manifest(other, [job("bn")])
    assert (manifest["stream"], manifest[setting]) == (kind, value)
    assert setting not in make_manifest(o, [job("bn")])
    open_run(tmp_path, manifest)
    with pytest.raises(ConfigError, match=rf"{setting} was {value} and is None"):
        open_run(tmp_path, {**manifest, setting: None})


def test_frames_are_images_of_the_data(source: Path) -> None:
    o = opened(source, images=40, batch_size=20)
    framed = replace(o.experiment, frames=10).open_data()
    assert len(framed) == 10 * len(o.images)
    assert framed.labels[:20].tolist() == [int(y) for y in o.images.labels[:2] for _ in range(10)]


def test_any_process_makes_the_same_of_it(source: Path) -> None:
    files = {"weights": str(source / "network.safetensors"), "posterior": str(source / "posterior.safetensors")}
    one = Experiment("digits", severity=3, images=16, batch_size=8, stream_seed=4, **files)
    two = Experiment(**json.loads(json.dumps(asdict(one))))
    assert two == one
    (row,) = one.rows(["petal+small"], ["petal.views=2", "petal.confidence=2", "small.memory=8"])
    a, b = (e.open(torch.device("cpu")) for e in (one, two))
    left, right = (o.adapter(row, 5) for o in (a, b))
    for x, y in zip(a.stream(2), b.stream(2), strict=True):
        assert (x.domain, x.severity, len(x.x)) == (y.domain, y.severity, 8)
        assert torch.equal(x.x, y.x)
        if x.position < 2:
            assert torch.equal(left(x.x), right(y.x))
    assert x.severity == 3


def test_images_are_shuffled_by_the_seed_of_the_stream(source: Path) -> None:
    def labels(**settings: object) -> list[int]:
        return next(iter(opened(source, images=None, batch_size=200, **settings).stream(1))).y.tolist()

    plain = labels()
    assert labels(stream_seed=1) == plain
    one, two = labels(shuffle=True), labels(shuffle=True, stream_seed=1)
    assert plain != one != two != plain
    assert one == labels(shuffle=True)


def test_a_network_of_ones_own_has_no_stream(source: Path) -> None:
    experiment = Experiment(network="small", classes=10, weights="w", input=(3, 32, 32), batch_size=4)
    o = OpenExperiment(experiment, models.build("small", 10, seed=0))
    (row,) = experiment.rows(["tent+guard"], ["guard.window=70"])
    assert o.adapter(row).window == 70
    assert o.batch_shape() == (4, 3, 32, 32)
    with pytest.raises(ConfigError, match="has a network and no images"):
        o.stream(1)
    with pytest.raises(ConfigError, match="name one, such as cifar10"):
        experiment.open_data()


def test_a_plugin_is_run_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    text = "import petal\nclass Mine(petal.Tent):\n    pass\npetal.METHODS['mine'] = Mine\n"
    text += f"open({str(tmp_path / 'times')!r}, 'a').write('x')\n"
    plugin.write_text(text)
    experiment = Experiment("digits", plugin=str(plugin))
    try:
        assert experiment.rows(["mine"])[0].method == "mine"
        first = experiment.load_plugin()
        assert first["methods"] == "mine"
        assert (tmp_path / "times").read_text() == "x"
        plugin.write_text(text + "# changed")
        assert experiment.load_plugin()["sha256"] != first["sha256"]
        assert (tmp_path / "times").read_text() == "xx"
        METHODS.pop("mine")
        assert "mine" in experiment.known_rows()
    finally:
        METHODS.pop("mine", None)


class Reached(Exception):
    pass


@pytest.mark.parametrize("command", ["run", "demo", "tune", "sweep", "serve"])
def test_all_commands_build_their_adapters_here(
    command: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(self: OpenExperiment, row: object, seed: int = 0) -> None:
        raise Reached

    monkeypatch.setattr(OpenExperiment, "plain_adapter", reached)
    shutil.copytree(source, tmp_path / "source")
    files = ["--weights", str(source / "network.safetensors"), "--posterior", str(source / "posterior.safetensors")]
    arguments = {
        "run": ["digits", *files, "--out", str(tmp_path / "run"), "-m", "bn"],
        "demo": ["--out", str(tmp_path), "--images", "8"],
        "tune": ["digits", *files, "--out", str(tmp_path / "tune.json")],
        "sweep": ["digits", *files, "--out", str(tmp_path / "sweep"), "-m", "bn", "--sequential"],
        "serve": ["--recipe", "digits", *files, "--folder", str(tmp_path / "serve")],
    }[command]
    if command == "serve":
        pytest.importorskip("kserve")
        monkeypatch.setattr("petal.serve.logs.configure", lambda level: None)
    result = CliRunner().invoke(app, [command, *arguments])
    assert isinstance(result.exception, Reached), result.output


def test_the_shape_of_a_whole_batch(source: Path) -> None:
    sizes = [({}, 8), ({"batch_size": 12}, 12), ({"batch_size": 100}, 16), ({"batch_size": 50, "images": None}, 50)]
    for settings, count in sizes:
        assert opened(source, **settings).batch_shape() == (count, 3, 32, 32)
    everything = opened(source, batch_size=10**6, images=None)
    assert everything.batch_shape() == (len(everything.images), 3, 32, 32)


def test_on_a_cpu_a_run_compiles_nothing(source: Path) -> None:
    """Whether a batch is compiled must not depend on how many came before it: a resumed run gives the same numbers."""
    adapter = opened(source).adapter(known()["petal"])
    assert adapter.executor is not None
    assert not adapter.executor.policy.compile


def test_another_stream_of_a_gradual_recipe_has_the_highest_severity() -> None:
    assert Experiment("cifar10-gradual").chosen.severity is None
    assert Experiment("cifar10-gradual", stream="continual").chosen.severity == 5


def test_every_row_of_the_recipe_can_be_made(source: Path) -> None:
    o = opened(source)
    for row in o.experiment.known_rows().values():
        if not needs_statistics(METHODS[row.method]):
            o.plain_adapter(row)
