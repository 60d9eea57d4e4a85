"""Clients that know nothing of petal, unmodified, against a real server."""

import asyncio
import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http
from numpy.typing import NDArray
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from petal import models
from petal.recipes import recipe
from petal.serve._kserve import InferInput, InferRequest
from serve.running import NAME, Running

OUTPUTS = ("logits", "probabilities", "label", "entropy")
Array = NDArray[np.float32]


@pytest.fixture(scope="module")
def expected(source: Path, x: Array) -> Array:
    """The source network's logits, computed without a server."""
    out: Array = source_network(source)(torch.from_numpy(x)).detach().numpy()
    return out


def source_network(folder: Path) -> torch.nn.Module:
    return models.build("small", 10, folder / "network.safetensors", **recipe("digits").network_options)


def check(outputs: dict[str, Any], expected: Array) -> None:
    """Every output against NumPy, from the logits."""
    p = np.exp(expected - expected.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    assert np.allclose(outputs["logits"], expected, atol=1e-4)
    assert np.allclose(outputs["probabilities"], p, atol=1e-4)
    assert np.array_equal(outputs["label"], expected.argmax(1))
    assert np.allclose(outputs["entropy"], -(p * np.log(p)).sum(1), atol=1e-4)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_tritonclient_over_http(server: Running, x: Array, expected: Array, binary: bool) -> None:
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(NAME)
    assert client.is_model_ready(NAME, "source")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    about = client.get_model_metadata(NAME)
    assert about["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 3, 32, 32]}]
    assert about["versions"][0] == "source"
    tensor = tritonclient.http.InferInput("input", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x, binary_data=binary)
    wanted = [tritonclient.http.InferRequestedOutput(name, binary_data=binary) for name in OUTPUTS]
    result = client.infer(NAME, [tensor], outputs=wanted, request_id="first", model_version="source")
    check({name: result.as_numpy(name) for name in OUTPUTS}, expected)
    assert result.get_response()["id"] == "first"
    assert result.get_response()["model_version"] == "source"
    one = client.infer(NAME, [tensor], outputs=wanted[2:3], parameters={"adapt": False}).get_response()
    assert [o["name"] for o in one["outputs"]] == ["label"]
    assert one["parameters"] == {"adapted": False}
    client.close()


def over_grpc(server: Running, folder: Path, arrays: dict[str, Any], questions: list[dict[str, Any]]) -> dict[str, Any]:
    """What tritonclient[grpc] gets, in its own process."""
    np.savez(folder / "arrays.npz", **arrays)
    command = [sys.executable, str(Path(__file__).with_name("grpc_client.py")), str(server.grpc), str(folder / "arrays.npz")]
    done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    out: dict[str, Any] = json.loads(done.stdout)
    return out


def test_tritonclient_over_grpc(server: Running, x: Array, expected: Array, tmp_path: Path) -> None:
    files = np.array([encoded(one, "PNG") for one in x[:4]], dtype=object)
    questions = [
        {"array": "x", "version": "source", "id": "second"},
        {"array": "x", "outputs": ["label"], "parameters": {"adapt": False}},
        {"array": "files", "version": "source", "parameters": {"content_type": "image"}},
        {"array": "x", "model": "nobody"},
        {"array": "x", "version": "999999"},
        {"array": "flat"},
        {"array": "x", "parameters": {"adapt": "perhaps"}},
    ]
    found = over_grpc(server, tmp_path, {"x": x, "files": files, "flat": x[0]}, questions)
    assert found["about"]["live"]
    assert found["about"]["ready"]
    assert found["about"]["model"]
    assert "source" in found["about"]["versions"]
    first, second, third, nobody, never, flat, perhaps = found["answers"]
    check(first, expected)
    assert (first["id"], first["version"], first["adapted"]) == ("second", "source", False)
    assert second.keys() == {"id", "version", "adapted", "label"}
    assert not second["adapted"]
    assert np.allclose(third["logits"], expected[:4], atol=0.05)
    assert "NOT_FOUND" in nobody["error"]
    assert "NOT_FOUND" in never["error"]
    assert "INVALID_ARGUMENT" in flat["error"]
    assert "[n, 3, 32, 32]" in flat["error"]
    assert "INVALID_ARGUMENT" in perhaps["error"]


def test_kserves_own_clients(server: Running, x: Array, expected: Array) -> None:
    from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig

    def request(binary: bool) -> InferRequest:
        tensor = InferInput("input", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x, binary_data=binary)
        return InferRequest(NAME, [tensor], request_id="third", parameters={"adapt": False})

    async def over_rest() -> None:
        client = InferenceRESTClient(RESTConfig(protocol="v2"))
        at = f"http://127.0.0.1:{server.http}"
        assert await client.is_server_ready(at)
        assert await client.is_model_ready(at, NAME)
        for binary in (True, False):
            answer = await client.infer(at, request(binary), model_name=NAME)
            assert answer.id == "third"
            assert answer.get_output_by_name("logits").as_numpy().shape == (len(x), 10)
            assert answer.parameters == {"adapted": False}
        await client.close()

    async def over_grpc() -> None:
        client = InferenceGRPCClient(f"127.0.0.1:{server.grpc}")
        assert await client.is_server_ready()
        asked = request(True)
        asked.model_version = "source"
        answer = await client.infer(asked)
        check({name: answer.get_output_by_name(name).as_numpy() for name in OUTPUTS}, expected)
        await client.close()

    asyncio.run(over_rest())
    asyncio.run(over_grpc())


def encoded(pixels: Array, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.round(pixels.transpose(1, 2, 0) * 255).astype(np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def test_images_by_the_parameter(server: Running, x: Array, expected: Array) -> None:
    """PNG is exact, so its answers are those of the tensors; as bytes and as base64 in JSON."""
    files = [encoded(one, "PNG") for one in x[:4]]
    http = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}")
    tensor = tritonclient.http.InferInput("input", [4], "BYTES")
    tensor.set_data_from_numpy(np.array(files, dtype=object))
    asked: dict[str, Any] = {"model_version": "source", "parameters": {"content_type": "image/png"}}
    answers = [http.infer(NAME, [tensor], **asked).as_numpy("logits")]
    texts = [base64.b64encode(file).decode() for file in files]
    plain = {"name": "input", "shape": [4], "datatype": "BYTES", "parameters": {"content_type": "image"}, "data": texts}
    status, _, body = server.request("POST", f"/v2/models/{NAME}/versions/source/infer", json.dumps({"inputs": [plain]}))
    assert status == 200, body
    answers.append(np.array(json.loads(body)["outputs"][0]["data"]).reshape(4, 10))
    for answer in answers:
        assert np.allclose(answer, expected[:4], atol=0.05)      # eight bits a pixel
    http.close()


def test_adaptation_happens_unless_it_is_not_wanted(server: Running, x: Array) -> None:
    before = server.digest()
    assert server.infer(x[:8], adapt=False)["parameters"] == {"adapted": False}
    assert server.infer(x[:8], "source")["model_version"] == "source"
    assert server.digest() == before
    answer = server.infer(x[:8])
    assert answer["parameters"] == {"adapted": True}
    after = server.digest()
    assert answer["model_version"] == str(before["version"])
    assert after["version"] == before["version"] + 1
    assert after["sha256"] != before["sha256"]


def test_a_version_that_was_kept_can_be_asked(server: Running, x: Array) -> None:
    server.ask("POST", "/api/snapshot")
    kept = str(server.digest()["version"])
    then = server.infer(x[:8], adapt=False)
    server.infer(x[8:16])
    assert kept in json.loads(server.request("GET", f"/v2/models/{NAME}")[2])["versions"]
    assert server.request("GET", f"/v2/models/{NAME}/versions/{kept}/ready")[0] == 200
    again = server.infer(x[:8], kept)
    assert again["model_version"] == kept
    now = server.infer(x[:8], adapt=False)
    gap = np.abs(again["logits"] - then["logits"]).max()         # of the fast engine and the plain code, on the same weights
    assert gap < 0.01
    assert np.abs(now["logits"] - then["logits"]).max() > 5 * gap


def test_curl_by_the_guide(server: Running, source: Path) -> None:
    """Each curl command as it stands, with the ports of this server."""
    root = Path(__file__).parents[2]
    section = (root / "docs" / "guides" / "serving.md").read_text().split("\n## ")[0]
    commands = re.findall(r"^    (curl .*(?:\n {8}.*)*)$", section, flags=re.M)
    assert len(commands) == section.count("curl -") == 7
    with Image.open(root / "examples/digit.png") as image:
        pixels = np.asarray(image.convert("RGB"), np.float32).transpose(2, 0, 1) / 255
    label = int(source_network(source)(torch.from_numpy(pixels[None])).argmax())
    for line in commands:
        line = line.replace(":8080", f":{server.http}").replace(":8082", f":{server.admin}")
        line = line.replace("runs/serve-demo/admin.token", server.at["token_file"])
        done = subprocess.run(["bash", "-c", line], cwd=root, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (line, done.stderr)
        assert '"error":' not in done.stdout, (line, done.stdout)
        if "/infer" in line:
            outputs = {o["name"]: o["data"] for o in json.loads(done.stdout)["outputs"]}
            assert len(outputs["probabilities"]) == 10
            if "/source/" in line:
                assert outputs["label"] == [label]


def test_prometheus_reads_the_metrics(server: Running, x: Array) -> None:
    server.infer(x[:5])
    status, headers, text = server.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert server.request("GET", "/metrics", headers={"Accept": "text/plain; version=x"})[0] == 200
    found = {f.name: f for f in text_string_to_metric_families(text.decode())}
    wanted = {
        "petal_requests", "petal_samples", "petal_queue_samples", "petal_request_seconds", "petal_batch_samples",
        "petal_batch_seconds", "petal_confidence", "petal_entropy_nats", "petal_source_disagreement_ratio",
        "petal_source_distance", "petal_restored_ratio", "petal_guard_alarms", "petal_guard_pulls",
        "petal_checkpoint_age_seconds", "petal_version", "petal_frozen", "petal_ready", "petal_refused",
    }  # fmt: skip
    assert wanted <= found.keys()

    def value(name: str, **labels: str) -> float:
        (sample,) = [s for f in found.values() for s in f.samples if s.name == name and labels.items() <= s.labels.items()]
        return float(sample.value)

    before = value("petal_samples_total", target="adapt")
    counted = value("petal_request_seconds_count", target="adapt")
    server.infer(x[:7])
    _, _, text = server.request("GET", "/metrics")
    found = {f.name: f for f in text_string_to_metric_families(text.decode())}
    assert value("petal_samples_total", target="adapt") == before + 7
    assert value("petal_request_seconds_count", target="adapt") == counted + 1
    assert value("petal_version") == server.digest()["version"]
    assert 0 < value("petal_confidence") <= 1
    assert value("petal_source_distance") > 0
    assert value("petal_ready") == 1


def test_the_example_client(server: Running) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "examples/serve_client.py"), str(root / "examples/digit.png")]
    command += ["--url", f"http://127.0.0.1:{server.http}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path, _, outputs = done.stdout.partition(" ")
    assert path.endswith("digit.png")
    assert {"'label'", "'entropy'"} <= set(re.findall(r"'\w+'", outputs)), outputs
    refused = subprocess.run([*command, "--model", "cats"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "refuses" in refused.stderr
