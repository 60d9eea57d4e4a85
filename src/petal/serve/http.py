"""Connections: limits of time and size that hold before anything of a request is believed.

uvicorn times the pause between requests and nothing else, so a client that sends its head or its body a byte at a time could
hold a connection for ever; here both have to be there in time.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from petal.errors import ConfigError
from petal.serve.inputs import Refused, too_large
from petal.serve.settings import Settings

log = logging.getLogger(__name__)

HEAD_BYTES = 32 * 1024


def protocol(settings: Settings) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with limits for the head of a request: its time and its bytes, and the number of connections."""

    class Limited(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _head = 0                           # bytes of the head so far
        _in_head = True

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.connections:
                log.warning("too many connections", extra={"client": str(self.client)})
                transport.close()
            else:
                self._start_timer()

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                if self._timer is None:
                    self._start_timer()
                self._head += len(data)
            super().data_received(data)
            if self._in_head and self._head > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

        def on_headers_complete(self) -> None:
            self._stop_timer()
            self._in_head = False
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_head, self._head = True, 0

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(settings.read_seconds, self._too_slow)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            log.info("a connection sent no whole request head in time", extra={"client": str(self.client)})
            self._timer = None
            self.transport.close()

    return Limited


class BodyMemory:
    """The bytes of all bodies that are being read or decoded, bounded together."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    @contextmanager
    def counted(self) -> Iterator["Share"]:
        """What one request takes, given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self.used -= share.bytes


class Share:
    """A request's part of the memory."""

    def __init__(self, memory: BodyMemory) -> None:
        self.memory, self.bytes = memory, 0

    def add(self, count: int) -> None:
        """Take more, or refuse the request."""
        if self.memory.used + count > self.memory.limit:
            raise Refused("too many large requests at once: try again", 503, "busy", 1)
        self.memory.used += count
        self.bytes += count


async def read_body(request: Request, settings: Settings, share: Share) -> bytes:
    """The body, if it comes in time and within its limit."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused("compressed requests are not taken: leave Content-Encoding out", 415, "encoding")
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > settings.body:
        raise too_large(f"a request may have {settings.body} bytes, got {told}")
    parts: list[bytes] = []
    total = 0
    try:
        async with asyncio.timeout(settings.read_seconds):
            async for part in request.stream():
                total += len(part)
                if total > settings.body:
                    raise too_large(f"a request may have {settings.body} bytes")
                share.add(len(part))
                parts.append(part)
    except TimeoutError:
        raise Refused(f"the body did not come within {settings.read_seconds:g} s", 408, "slow") from None
    except ClientDisconnect:
        raise Refused("the connection was closed within the body", 400, "disconnected") from None
    if not total and "upgrade" in request.headers and (told.strip("0") or "transfer-encoding" in request.headers):
        raise Refused(      # uvicorn drops the body of a request that would rather speak another protocol
            "requests are HTTP/1.1: leave the header Upgrade out (curl --http1.1; Java's HttpClient: version HTTP_1_1)",
            reason="upgrade",
        )
    return b"".join(parts)


class AccessLog:
    """One line per request: method, path without its query, status, milliseconds. No header is ever logged."""

    def __init__(self, app: ASGIApp, port: str) -> None:
        self.app, self.port = app, port
        self.logger = logging.getLogger("petal.serve.access")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and log it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            client: Any = scope.get("client")
            about = {
                "port": self.port, "method": scope["method"], "path": scope["path"][:200], "status": status,
                "ms": round(1000 * (time.monotonic() - began), 2), "client": client[0] if client else None,
            }  # fmt: skip
            self.logger.info("request", extra=about)


class Server(uvicorn.Server):
    """A uvicorn server on a socket of ours, which leaves signals to us."""

    def __init__(self, app: ASGIApp, settings: Settings, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app, http=protocol(settings), ws="none", log_config=None, access_log=False, lifespan="off",
            timeout_keep_alive=max(1, round(settings.idle_seconds)), timeout_graceful_shutdown=3, server_header=False,
        )  # fmt: skip
        super().__init__(config)
        self.socket = listening
        self.port: int = listening.getsockname()[1]

    async def run_until_told(self) -> None:
        """Serve until `should_exit`."""
        await self._serve(sockets=[self.socket])


def address(host: str, port: int) -> str:
    """Host and port as they are in an address.

    >>> address("127.0.0.1", 8080), address("::1", 8080)
    ('127.0.0.1:8080', '[::1]:8080')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound(host: str, port: int) -> socket.socket:
    """A listening socket, or an error that says which port is taken."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        out = socket.socket(family, kind, proto)
        try:
            out.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            out.bind(address)
            out.listen(1024)
        except OSError:
            out.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; give another host or port") from error
    out.setblocking(False)
    return out
