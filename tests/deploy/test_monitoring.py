"""Dashboard and alert rules: every metric and label in them is one that a running server exports."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("prometheus_client")
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import petal
from networks import images
from serve.parts import WAIT, tent, worker

DEPLOY = Path(__file__).parents[2] / "deploy"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    return found


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def expressions() -> dict[str, str]:
    """All of PromQL there is, by where it is."""
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for panel in dashboard()["panels"]:
        found |= {f"{panel['title']} {target['refId']}": target["expr"] for target in panel.get("targets", ())}
    return found


def plain(expression: str) -> str:
    """Without Grafana's variables."""
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".*")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of samples with their labels, as /metrics of a server that has worked gives them."""
    def make() -> petal.Adapter:
        return petal.Guard(petal.SmallBatch(tent(), memory=8, every=4), every=1)

    one = worker(tmp_path_factory.mktemp("exported"), make, compare_seconds=0.0)
    one.start()
    for seed in range(3):
        one.submit(images(6, seed=seed)).result(WAIT)
    one.act("digest", "test").result(WAIT)
    one.close()
    one.join(WAIT)
    metrics = one.watch.metrics
    metrics.requests.labels("rest", "adapt", "ok").inc()            # what the ports and rare events would have counted
    metrics.latency.labels("adapt").observe(0.1)
    metrics.refused.labels("busy").inc()
    metrics.unlearned.labels("error").inc()
    metrics.alarms.labels("entropy", "rollback").inc()
    out: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            out.setdefault(sample.name, set()).update(sample.labels)
    return out


def test_every_metric_and_label_is_exported(exported: dict[str, set[str]]) -> None:
    assert len(exported) > 40
    used = set()
    for where, expression in expressions().items():
        for name, braces in re.findall(r"\b(petal_\w+)(\{[^}]*\})?", expression):
            assert name in exported, f"{where}: {name}"
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", braces)) - {"instance"}
            assert labels <= exported[name], f"{where}: {name}{braces}"
            grouped = {label for inner in re.findall(r"\bby \(([^)]*)\)", expression) for label in inner.split(", ")}
            assert grouped - {"instance"} <= set().union(*(exported[n] for n in re.findall(r"petal_\w+", expression)))
            used.add(name)
    base = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in used}
    all_of_them = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in exported} - {"petal_info"}
    assert all_of_them - base == set(), "what the server exports is shown"


def test_annotations_name_labels_that_there_are(exported: dict[str, set[str]]) -> None:
    for rule in rules():
        (name, *_) = [*re.findall(r"petal_\w+", rule["expr"]), "up"]
        for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
            assert label in exported.get(name, set()) | {"instance", "job"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        page = (DEPLOY.parent / "docs" / "guides" / "operations.md").read_text(encoding="utf-8")
        assert f"`{rule['alert']}`" in page, "what to do about it is told"


def test_the_dashboard_is_one() -> None:
    board = dashboard()
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps([p.get("targets") for p in panels]))) - {"__rate_interval"} <= variables
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, f"{panel['title']} lies on another"
        taken |= cells
        assert panel["type"] == "row" or (panel["targets"] and panel["fieldConfig"]["defaults"]["unit"])


def promtool(*arguments: str) -> "subprocess.CompletedProcess[str]":
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60)


def test_prometheus_takes_rules_and_queries(tmp_path: Path) -> None:
    done = promtool("check", "rules", str(DEPLOY / "alerts.yml"))
    assert done.returncode == 0, done.stderr
    records = [{"record": f"r{number}", "expr": plain(e)} for number, e in enumerate(expressions().values())]
    (tmp_path / "all.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": records}]}))
    done = promtool("check", "rules", str(tmp_path / "all.yml"))
    assert done.returncode == 0, done.stderr
    assert f"{len(records)} rules found" in done.stdout
    (tmp_path / "bad.yml").write_text((DEPLOY / "alerts.yml").read_text().replace("petal_ready == 0", "petal_ready === 0"))
    assert promtool("check", "rules", str(tmp_path / "bad.yml")).returncode != 0


SERIES: dict[str, dict[str, str]] = {       # what an alert has to see; of the other ones none fires on it
    "PetalNotReady": {'petal_ready{instance="a"}': "0x20"},
    "PetalFailedBatches": {'petal_failed_batches_total{instance="a"}': "0+1x20"},
    "PetalRefusing": {'petal_refused_total{instance="a",reason="busy"}': "0+10x20",
                      'petal_requests_total{instance="a"}': "0+100x20"},
    "PetalGuardAlarm": {'petal_guard_alarms_total{instance="a",signal="entropy",action="rollback"}': "_x12 1x7"},
    "PetalUnlearned": {'petal_unlearned_batches_total{instance="a",reason="error"}': "0+1x20"},
    "PetalOutOfMemory": {'petal_out_of_memory_updates{instance="a"}': "0+1x20"},
    "PetalUnlikeSource": {'petal_source_disagreement_ratio{instance="a"}': "0.7x20"},
    "PetalCheckpointOld": {'petal_checkpoint_age_seconds{instance="a"}': "600+60x20",
                           'petal_samples_total{instance="a",target="adapt"}': "0+10x20"},
}  # fmt: skip
QUIET = {'petal_ready{instance="a"}': "1x20", 'petal_failed_batches_total{instance="a"}': "0x20",
         'petal_checkpoint_age_seconds{instance="a"}': "600+60x20",         # nothing comes: nothing to save
         'petal_samples_total{instance="a",target="adapt"}': "5x20", 'petal_out_of_memory_updates{instance="a"}': "3x20",
         'petal_refused_total{instance="a",reason="busy"}': "0+1x20",
         'petal_requests_total{instance="a"}': "0+100x20"}  # fmt: skip


def cases() -> Iterator[tuple[str, dict[str, str], bool]]:
    for alert, series in SERIES.items():
        yield alert, series, True
        yield alert, QUIET, False


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    tests = []
    for alert, series, fires in cases():
        rule = next(rule for rule in rules() if rule["alert"] == alert)
        tests.append({
            "interval": "1m", "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [{
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})', "eval_time": "18m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }],
        })  # fmt: skip
        assert rule
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yml")], "tests": tests}))
    done = promtool("test", "rules", str(tmp_path / "tests.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
