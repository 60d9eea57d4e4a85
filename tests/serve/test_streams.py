"""Requests of several sources of images: each has its own past."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import petal
from networks import images, network
from petal.serve.inputs import CLIENT, Refused, stream
from petal.serve.queue import PREDICT
from serve import grpc_client
from serve.parts import WAIT, settle, worker
from serve.running import NAME, Running


def test_the_worker_hands_the_keys_on(tmp_path: Path) -> None:
    one = worker(tmp_path, lambda: petal.Ordered(petal.Source(network())), delay_ms=50.0)
    one.start()
    x, alone = images(6), petal.Ordered(petal.Source(network()))
    settle([one.submit(x[:2], stream="a"), one.submit(x[2:4], stream=7), one.submit(x[4:])])
    alone(x, stream=["a", "a", 7, 7, None, None])
    for key in ("a", 7, None, "another"):
        answer = one.submit(x[:2], PREDICT, key).result(WAIT)
        np.testing.assert_allclose(answer.logits, alone.predict(x[:2], stream=key).numpy(), atol=1e-6)
    one.close()


def test_a_request_names_its_stream_or_is_its_clients() -> None:
    assert stream({"stream": "camera-3", CLIENT: "10.0.0.1"}) == "camera-3"
    assert stream({"stream": 3}) == 3
    assert stream({CLIENT: "10.0.0.1"}) == "10.0.0.1"
    assert stream({}) is None
    for wrong in (1.5, True, "x" * 129, 10**200):
        with pytest.raises(Refused, match="stream is a text of at most 128"):
            stream({"stream": wrong})


def _body(x: NDArray[np.float32], **parameters: Any) -> str:
    tensor = {"name": "input", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
    return json.dumps({"inputs": [tensor], "parameters": parameters})


def test_both_ports_take_the_key_and_else_the_client(fresh_folder: Path, x: NDArray[np.float32], tmp_path: Path) -> None:
    with Running(fresh_folder, ["--method", "source+order", "--no-small-batch"]) as server:

        def ask(part: NDArray[np.float32], **parameters: Any) -> Any:
            status, _, body = server.request("POST", f"/v2/models/{NAME}/infer", _body(part, **parameters))
            content = json.loads(body)
            assert status == 200, content
            return next(o["data"] for o in content["outputs"] if o["name"] == "logits")

        same, other = np.repeat(x[:1], 20, 0), 0.5 * (x[:1] + x[1:2])
        ask(same, stream="a")
        known = ask(other, stream="a", adapt=False)
        fresh = ask(other, stream="b", adapt=False)
        assert known != fresh
        assert ask(other, adapt=False) == fresh                     # nobody without a key was here before
        ask(same)
        assert ask(other, adapt=False) != fresh
        assert ask(other, adapt=False, **{CLIENT: "b"}) != fresh    # the server says who a client is
        np.savez(tmp_path / "x.npz", other=other)
        keys: list[dict[str, str]] = [{"stream": "a"}, {"stream": "b"}, {}]
        questions = [{"array": "other", "parameters": {"adapt": False, **key}} for key in keys]
        command = [sys.executable, grpc_client.__file__, str(server.grpc), str(tmp_path / "x.npz")]
        done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, check=True)
        named, unnamed, client = (np.ravel(answer["logits"]) for answer in json.loads(done.stdout)["answers"])
        np.testing.assert_allclose(named - unnamed, np.subtract(ask(other, stream="a", adapt=False),
                                                                ask(other, stream="b", adapt=False)), atol=1e-4)  # fmt: skip
        assert np.abs(client - unnamed).max() < 1e-4                # its address is another than that over HTTP
