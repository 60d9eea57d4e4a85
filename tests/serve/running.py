"""A server as users run it, in a process of its own, and a plain HTTP client."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

SECONDS = 90.0                              # until a server must be there, or gone
NAME = "digits"


class Running:
    """`petal serve --demo` with other ports; a context manager that ends it."""

    def __init__(self, folder: Path, options: Sequence[str] = (), demo: bool = True) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "serve.json").unlink(missing_ok=True)
        self.log = folder / "log.jsonl"
        ports = ["--http-port", "0", "--grpc-port", "0", "--admin-port", "0", "--folder", str(folder)]
        command = [sys.executable, "-c", "from petal.cli import main; main()", "serve"]
        command += [*(["--demo"] if demo else []), *ports, *options]
        with self.log.open("ab") as file, (folder / "out.txt").open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
        end = time.monotonic() + SECONDS
        while not (folder / "serve.json").exists():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"the server did not start: {self.log.read_text()[-3000:]}")
            time.sleep(0.05)
        self.at: dict[str, Any] = json.loads((folder / "serve.json").read_text())
        self.http, self.grpc, self.admin = self.at["http_port"], self.at["grpc_port"], self.at["admin_port"]
        self.token = Path(self.at["token_file"]).read_text().strip()

    def request(
        self, method: str, path: str, body: bytes | str | None = None, headers: dict[str, str] | None = None,
        port: int | None = None,
    ) -> tuple[int, dict[str, str], bytes]:  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", port or self.http, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def ask(self, method: str, path: str, content: Any = None, token: str | None = None) -> Any:
        """An admin request that goes well."""
        headers = {"authorization": f"Bearer {token or self.token}"}
        body = None if content is None else json.dumps(content)
        status, _, text = self.request(method, path, body, headers, self.admin)
        assert status == 200, text
        return json.loads(text)

    def infer(self, x: NDArray[np.float32], version: str = "", **parameters: Any) -> dict[str, Any]:
        """One request in JSON; outputs as arrays."""
        status, _, text = self.request("POST", infer_path(version), json_body(x, **parameters))
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        return answer | {o["name"]: np.array(o["data"]).reshape(o["shape"]) for o in answer["outputs"]}

    def digest(self) -> dict[str, Any]:
        out: dict[str, Any] = self.ask("GET", "/api/digest")
        return out

    def memory(self) -> int:
        """Resident bytes of the process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def logs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()


def infer_path(version: str = "") -> str:
    return f"/v2/models/{NAME}/versions/{version}/infer" if version else f"/v2/models/{NAME}/infer"


def json_body(x: NDArray[np.float32], request_id: str = "", **parameters: Any) -> str:
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.reshape(-1).tolist()}
    return json.dumps({"id": request_id, "parameters": parameters, "inputs": [tensor]})
