"""Container file, manifests and unit: they are what their tools take, and the options in them are those of the command."""

import io
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from deploy.schema import problems
from petal.cli import app
from petal.serve import Settings, read_toml

DEPLOY = Path(__file__).parents[2] / "deploy"
KINDS = {"PersistentVolumeClaim": "V1PersistentVolumeClaim", "ConfigMap": "V1ConfigMap", "Deployment": "V1Deployment",
         "Service": "V1Service", "InferenceService": "V1beta1InferenceService"}  # fmt: skip


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def modules() -> tuple[Any, ...]:
    return pytest.importorskip("kserve").models, pytest.importorskip("kubernetes").client


@pytest.mark.parametrize("name", ["kubernetes.yaml", "inferenceservice.yaml"])
def test_manifests_fit_the_schemas(name: str, modules: tuple[Any, ...]) -> None:
    found = [(one["kind"], problem) for one in manifests(name) for problem in problems(one, KINDS[one["kind"]], modules)]
    assert found == []


def test_the_schemas_notice_mistakes(modules: tuple[Any, ...]) -> None:
    def wrong(change: Any) -> list[str]:
        one = manifests("inferenceservice.yaml")[0]
        change(one["spec"]["predictor"])
        return problems(one, "V1beta1InferenceService", modules)

    unknown, = wrong(lambda p: p.update(minReplica=1))
    assert unknown == ".spec.predictor.minReplica: a V1beta1PredictorSpec has no such field"
    assert wrong(lambda p: p.update(minReplicas="1")) == [".spec.predictor.minReplicas: '1' is no int"]
    assert "name" in wrong(lambda p: p["containers"][0].pop("name"))[0]
    probe = "containers[0].readinessProbe.httpGet.pth: a V1HTTPGetAction has no such field"
    assert probe in wrong(lambda p: p["containers"][0]["readinessProbe"]["httpGet"].update(pth="/"))[0]


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each container of the manifests, with the pod that it is in."""
    for one in [*manifests("kubernetes.yaml"), *manifests("inferenceservice.yaml")]:
        pod = one["spec"].get("template", {}).get("spec") or one["spec"].get("predictor") if "spec" in one else None
        for container in (pod or {}).get("containers", ()):
            yield container, pod


def test_pods_are_consistent_in_themselves() -> None:
    claims = {one["metadata"]["name"] for one in manifests("kubernetes.yaml")}
    found = list(containers())
    assert len(found) == 2
    for container, pod in found:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        assert volumes["state"]["persistentVolumeClaim"]["claimName"] in claims
        assert volumes["settings"]["configMap"]["name"] in claims
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["path"] in ("/v2/health/ready", "/v2/health/live")
        settings = Settings()
        assert pod["terminationGracePeriodSeconds"] > settings.drain_seconds + 5
    assert manifests("kubernetes.yaml")[2]["spec"]["replicas"] == 1
    predictor = manifests("inferenceservice.yaml")[0]["spec"]["predictor"]
    assert predictor["minReplicas"] == predictor["maxReplicas"] == 1


def test_the_settings_in_the_manifest_are_settings(tmp_path: Path) -> None:
    text = next(one for one in manifests("kubernetes.yaml") if one["kind"] == "ConfigMap")["data"]["serve.toml"]
    (tmp_path / "serve.toml").write_text(text)
    assert Settings().updated(read_toml(tmp_path / "serve.toml")).guard == tomllib.loads(text)["guard"]


def options() -> set[str]:
    command = typer.main.get_command(app)
    serve = command.commands["serve"]           # type: ignore[attr-defined]
    return {flag for p in serve.params for flag in (*p.opts, *p.secondary_opts)}


def test_commands_use_options_that_there_are() -> None:
    known = options()
    assert "--folder" in known
    texts = {"Containerfile": " ".join(map(str, (instruction("ENTRYPOINT"), instruction("CMD")))),
             "petal.service": unit()["ExecStart"]}  # fmt: skip
    texts |= {f"container {n}": " ".join(c["args"]) for n, (c, _) in enumerate(containers())}
    used = {name: set(re.findall(r"--[\w-]+", text)) for name, text in texts.items()}
    assert sum(map(len, used.values())) >= 5
    for name, flags in used.items():
        assert flags <= known, name


# The container file


def parsed() -> list[dict[str, Any]]:
    content = io.BytesIO((DEPLOY / "Containerfile").read_bytes())
    found: list[dict[str, Any]] = pytest.importorskip("dockerfile_parse").DockerfileParser(fileobj=content).structure
    return found


def instruction(name: str) -> str:
    found = [one["value"] for one in parsed() if one["instruction"] == name]
    return found[-1] if found else ""


KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT",
         "CMD", "COMMENT"}  # fmt: skip


def test_the_container_file_is_one_and_keeps_the_rules() -> None:
    found = parsed()
    assert {one["instruction"] for one in found} <= KNOWN
    assert found[[one["instruction"] != "COMMENT" for one in found].index(True)]["instruction"] == "FROM"
    image, tag = instruction("FROM").rsplit(":", 1)
    assert tag != "latest"
    assert image.endswith("/python")
    root = Path(__file__).parents[2]
    for one in found:
        if one["instruction"] == "COPY":
            assert all((root / source).exists() for source in one["value"].split()[:-1]), one["value"]
        if one["instruction"] == "RUN" and "apt-get install" in one["value"]:
            assert "--no-install-recommends" in one["value"]
            assert "rm -rf /var/lib/apt/lists" in one["value"]
    assert instruction("USER") not in ("", "root", "0")
    assert instruction("STOPSIGNAL") == "SIGTERM"
    for name in ("ENTRYPOINT", "CMD"):
        assert isinstance(yaml.safe_load(instruction(name)), list), "as a list, so that signals reach the server"
    ports = set(map(int, instruction("EXPOSE").split()))
    assert ports == {Settings().http_port, Settings().grpc_port}, "not the admin port"


# The systemd unit


def unit() -> dict[str, str]:
    lines = (line.partition("=") for line in (DEPLOY / "petal.service").read_text().splitlines() if "=" in line)
    return {key: value for key, _, value in lines if not key.startswith("#")}


def test_the_unit_waits_for_the_last_checkpoint_and_starts_again() -> None:
    found = unit()
    assert float(found["TimeoutStopSec"]) > Settings().drain_seconds + 10
    assert found["Restart"] == "on-failure"
    assert found["KillSignal"] == "SIGTERM"
    assert found["StateDirectory"] in found["ExecStart"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    text = (DEPLOY / "petal.service").read_text()
    assert "/opt/petal/bin/petal" in text

    def said(content: str) -> str:
        copy = tmp_path / "petal.service"
        copy.write_text(content.replace("/opt/petal/bin/petal", sys.executable))
        done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    if "petal.service" in (mistake := said("[Service]\nExecStart=/opt/petal/bin/petal\nRestrt=always\n")):
        assert "Restrt" in mistake
        assert "petal.service" not in said(text)
    else:
        pytest.skip(f"systemd-analyze does not work here: {mistake.strip()[:200]}")
