"""Limits of connections, memory and waiting, in this process."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petal.errors import ConfigError
from petal.serve._kserve import InferInput, InferRequest
from petal.serve.http import BodyMemory, Server, bound
from petal.serve.inputs import Refused
from petal.serve.queue import Busy, Closed
from petal.serve.rpc import CODES, Rpc
from petal.serve.settings import Settings
from petal.serve.versions import NoVersion
from petal.serve.wire import AdaptiveModel, Plane, refusal
from serve.parts import Echo, sample, settle, worker


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


def with_server(settings: Settings, use: Callable[[int], Awaitable[None]]) -> None:
    async def main() -> None:
        server = Server(hello, settings, bound("127.0.0.1", 0))
        task = asyncio.create_task(server.run_until_told())
        while not server.started:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(use(server.port), 60)
        server.should_exit = True
        await task

    asyncio.run(main())


GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


def test_connections_beyond_the_limit_are_closed() -> None:
    async def use(port: int) -> None:
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in streams:
            writer.write(GET)
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b"", "the third is closed without a word"
        streams[0][1].close()
        await streams[0][1].wait_closed()
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200"), "there is room again"

    with_server(Settings(connections=2, read_seconds=600.0), use)


def test_idle_and_silent_connections_are_closed() -> None:
    async def use(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await reader.readuntil(b"hi")
        silent, _ = await asyncio.open_connection("127.0.0.1", port)
        halves, half = await asyncio.open_connection("127.0.0.1", port)
        half.write(GET)
        await halves.readuntil(b"hi")
        half.write(GET[:10])                # the second request on a connection stops within its head
        assert await reader.read() == b""
        assert await silent.read() == b""
        assert await halves.read() == b""

    with_server(Settings(idle_seconds=1.0, read_seconds=0.5), use)


def test_a_port_that_is_taken_is_named() -> None:
    one = bound("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"port {one.getsockname()[1]}"):
        bound("127.0.0.1", one.getsockname()[1])
    one.close()


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_grpc_listens_where_http_does(tmp_path: Path, host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this system has no IPv6")
    one = worker(tmp_path, Echo)
    settings = Settings(host=host, grpc_port=0)

    async def main() -> None:
        assert Rpc(Plane(AdaptiveModel(one, settings, one.watch)), settings).port > 0

    asyncio.run(main())


def test_bodies_are_bounded_together() -> None:
    memory = BodyMemory(100)
    with memory.counted() as one:
        one.add(60)
        with memory.counted() as two:
            two.add(40)
            with pytest.raises(Refused) as error:
                two.add(1)
            assert (error.value.status, error.value.retry_after) == (503, 1)
        assert memory.used == 60
    assert memory.used == 0


def test_an_answer_that_takes_too_long_is_refused_and_its_request_not_learned_from(tmp_path: Path) -> None:
    one = worker(tmp_path, Echo, answer_seconds=0.1)
    model = AdaptiveModel(one, one.settings, one.watch)
    tensor = InferInput("input", [1, 3, 8, 8], "FP32")
    tensor._raw_data = sample(0.6).numpy().tobytes()
    with pytest.raises(Refused, match="no answer in time") as error:
        asyncio.run(model(InferRequest("petal", [tensor])))
    assert error.value.status == 503
    one.start()
    settle([one.submit(sample(0.7))])
    assert np.allclose(one.adapter.batches, [[0.7]])


def test_readiness_goes_with_the_worker(tmp_path: Path) -> None:
    one = worker(tmp_path, Echo)
    model = AdaptiveModel(one, one.settings, one.watch)
    assert not asyncio.run(model.healthy()), "not before it has started"
    one.start()
    assert asyncio.run(model.healthy())
    one.close()
    assert not asyncio.run(model.healthy())


@pytest.mark.parametrize("version", ["1", "\u0660", "\uff10", "\u00b2", "+0", "-0", " 0", "0.0", "0" * 19, "Source"])
def test_a_version_is_asked_for_in_plain_digits(version: str, tmp_path: Path) -> None:
    """Other digits than those from 0 to 9 are none, though Python reads them as numbers."""
    one = worker(tmp_path, Echo)
    model = AdaptiveModel(one, one.settings, one.watch)
    assert [model.target(known, {}) for known in ("0", "000", "source", None)] == ["0", "0", "source", "adapt"]
    with pytest.raises(NoVersion, match=r"there are: source, 0\)"):
        model.target(version, {})


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(Busy(3), 503, "UNAVAILABLE"), (Closed(), 503, "UNAVAILABLE"), (NoVersion("7"), 404, "NOT_FOUND"),
     (Refused("x"), 400, "INVALID_ARGUMENT")],
)  # fmt: skip
def test_refusals_over_both_protocols(error: Exception, status: int, code: str) -> None:
    found = refusal(error)
    assert found is not None
    assert (found.status, CODES[found.status].name) == (status, code)
    assert refusal(RuntimeError("a bug")) is None
