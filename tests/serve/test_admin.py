"""The admin port: nothing without the token, everything with it, and the token in no log."""

import json
import re
import stat
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from petal.errors import ConfigError
from petal.serve.admin import ACTIONS, read_token
from petal.serve.settings import Settings
from serve.parts import until
from serve.running import Running

Array = NDArray[np.float32]
PATHS = [("GET", f"/api/{name}") for name in ("status", "versions", "audit", "live", "digest")]
PATHS += [("POST", f"/api/{name}") for name in ACTIONS]


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic dXNlcjpwYXNz"},
     {"Cookie": "token=TOKEN"}, {"Authorization": "TOKEN"}, {"Authorization": "Bearer TOKENx"},
     {"Authorization": "bearer TOKEN\xe9"}],
    ids=lambda h: " ".join(h.values()) or "nothing",
)  # fmt: skip
def test_without_the_token_nothing_is_possible(server: Running, headers: dict[str, str]) -> None:
    before, audited = server.digest(), (server.folder / "audit.jsonl").read_bytes()
    headers = {key: value.replace("TOKEN", server.token) for key, value in headers.items()}
    for method, path in PATHS:
        status, answered, body = server.request(method, path, None, headers, server.admin)
        assert status == 401, path
        assert answered["www-authenticate"] == "Bearer"
        assert json.loads(body) == {"error": "the admin token is missing or wrong"}
        status, _, _ = server.request(method, f"{path}?token={server.token}", None, headers, server.admin)
        assert status == 401
    assert server.digest() == before
    assert (server.folder / "audit.jsonl").read_bytes() == audited


def test_the_public_port_has_no_admin(server: Running) -> None:
    headers = {"Authorization": f"Bearer {server.token}"}
    for method, path in PATHS:
        assert server.request(method, path, None, headers)[0] == 404


def test_the_actions_do_what_they_say(server: Running, x: Array) -> None:
    server.ask("POST", "/api/thaw")
    server.infer(x[:8])
    kept = server.ask("POST", "/api/snapshot")["version"]
    at_kept = server.digest()
    assert server.ask("POST", "/api/freeze")["frozen"]
    assert server.infer(x[:8])["parameters"] == {"adapted": False}
    assert server.digest() == at_kept
    assert not server.ask("POST", "/api/thaw")["frozen"]
    assert server.infer(x[:8])["parameters"] == {"adapted": True}
    assert server.digest() != at_kept
    assert server.ask("POST", "/api/rollback", {"version": kept})["version"] == kept
    assert server.digest() == at_kept
    listed = server.ask("GET", "/api/versions")
    assert listed["current"] == kept
    assert {0, kept, kept + 1} <= {v["number"] for v in listed["versions"]}
    assert server.ask("POST", "/api/reset")["version"] == 0
    assert server.infer(x[:8])["model_version"] == "0"
    assert server.ask("POST", "/api/checkpoint")["written"]
    done = [entry["action"] for entry in server.ask("GET", "/api/audit?count=6")["audit"]]
    assert done == ["reset", "rollback", "thaw", "freeze", "snapshot", "thaw"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("rollback", '{"version": 987654}', 404), ("rollback", '{"version": "x"}', 400), ("rollback", "[]", 400),
     ("rollback", "{", 400), ("rollback", '{"version": -1}', 400), ("explode", "", 404), ("rollback", '{"v": 1}', 400)],
)  # fmt: skip
def test_actions_that_make_no_sense(server: Running, path: str, body: str, status: int) -> None:
    before = server.digest()
    got, _, answer = server.request("POST", f"/api/{path}", body, {"Authorization": f"Bearer {server.token}"}, server.admin)
    assert got == status
    assert json.loads(answer)["error"]
    assert server.digest() == before


def test_the_status_tells_where_the_server_stands(server: Running, x: Array) -> None:
    server.infer(x[:4])
    until(lambda: server.ask("GET", "/api/live")["images"] is not None)      # compared after the answer
    live = server.ask("GET", "/api/live")
    assert live["status"]["version"] == server.digest()["version"]
    assert live["status"]["totals"]["samples"] >= 4
    assert live["fields"][0] == "time"
    assert sum(row[live["fields"].index("samples")] for row in live["history"]) >= 4
    assert live["images"][0]["png"]

    def again() -> dict[str, Any]:
        now = server.ask("GET", "/api/live")
        return server.ask("GET", f"/api/live?seen={now['seen']}&since={now['history'][-1][0]}")

    until(lambda: again()["images"] is None)        # what the page has is not sent again, once all is compared
    assert len(again()["history"]) <= 2


def test_the_token_is_in_no_log_and_only_its_owner_can_read_it(server: Running) -> None:
    for path in server.folder.rglob("*"):
        if path.is_file() and path.name != "admin.token":
            assert server.token.encode() not in path.read_bytes(), path
    assert stat.S_IMODE((server.folder / "admin.token").stat().st_mode) == 0o600
    assert "admin.token" in (server.folder / "out.txt").read_text()


def test_logs_are_json_lines(server: Running) -> None:
    lines = [line for line in server.log.read_text().splitlines() if line.strip() and "serving" not in line]
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(entries) >= len(lines) - 2, "besides the progress of the demo's training"
    one = next(e for e in entries if e["logger"] == "petal.serve.access" and e["port"] == "public")
    assert {"time", "level", "message", "method", "path", "status", "ms", "client"} <= one.keys()
    assert not [e for e in entries if e["level"] in ("error", "critical")]


def test_the_page_needs_nothing_from_elsewhere(server: Running) -> None:
    status, headers, _ = server.request("GET", "/", port=server.admin)
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    for name in ("page.html", "page.css", "page.js"):
        text = files("petal.serve").joinpath("page", name).read_text()
        links = [link for link in re.findall(r"https?://[^\"'\s)]+", text) if "www.w3.org/2000/svg" not in link]
        assert links == []
    assert server.request("GET", "/page.js", port=server.admin)[0] == 200
    assert server.request("GET", "/../settings.py", port=server.admin)[0] == 404


def test_a_token_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-ones-own\n")
    file.chmod(0o600)
    assert read_token(Settings(token_file=file, folder=tmp_path)) == ("a-token-of-ones-own", file)
    file.write_text("short")
    with pytest.raises(ConfigError, match="16 characters"):
        read_token(Settings(token_file=file, folder=tmp_path))
    with pytest.raises(ConfigError, match="cannot read the admin token"):
        read_token(Settings(token_file=tmp_path / "none", folder=tmp_path))
    made, where = read_token(Settings(folder=tmp_path))
    assert (read_token(Settings(folder=tmp_path))) == (made, where), "the second time it is the same"
    assert len(made) >= 40
