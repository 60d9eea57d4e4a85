"""What a refusal looks like over HTTP."""

import asyncio
import json
from typing import Any

import pytest

from petal.serve.admin import Bearer
from petal.serve.inputs import Refused
from petal.serve.rest import refused


@pytest.mark.parametrize("status", [400, 404, 408, 413, 415, 503])
def test_a_connection_whose_body_may_be_unread_is_closed(status: int) -> None:
    answer = refused(Refused("no", status))
    assert answer.status_code == status
    assert json.loads(answer.body) == {"error": "no"}
    assert answer.headers.get("connection") == ("close" if status in (408, 413, 415) else None)
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize(("reason", "closed"), [("closing", "close"), ("upgrade", "close"), ("busy", None)])
def test_so_it_is_where_the_server_ends_or_the_protocol_changes(reason: str, closed: str | None) -> None:
    answer = refused(Refused("no", 503, reason, retry_after=7))
    assert (answer.headers.get("connection"), answer.headers["retry-after"]) == (closed, "7")


@pytest.mark.parametrize(
    ("given", "status"),
    [([], 401), ([b"Bearer wrong"], 401), ([b"Bearer token"], 200), ([b"Bearer token", b"Bearer wrong"], 401),
     ([b"Bearer wrong", b"Bearer token"], 401), ([b"Bearer token", b"Bearer token"], 401)],
)  # fmt: skip
def test_a_request_has_one_token(given: list[bytes], status: int) -> None:
    """Of two it is not clear which counts: proxies and servers take different ones."""
    sent: list[dict[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    scope = {"type": "http", "path": "/api/status", "headers": [(b"authorization", value) for value in given]}
    asyncio.run(Bearer(inner, "token")(scope, receive, send))
    assert sent[0]["status"] == status
