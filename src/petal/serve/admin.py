"""The admin port: watch, list versions, roll back, freeze, thaw, reset. Local by default; everything of it needs the token.

Only the page itself (which holds no data), the health endpoints and the numbers for Prometheus are open.
"""

import asyncio
import base64
import hmac
import io
import logging
import os
import secrets
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from PIL import Image
from starlette.types import ASGIApp, Receive, Scope, Send

from petal._version import __version__
from petal.errors import ConfigError
from petal.serve.http import AccessLog, BodyMemory, read_body
from petal.serve.inputs import Refused
from petal.serve.rest import Endpoints, add_refusals, metrics_endpoint
from petal.serve.settings import Settings
from petal.serve.watch import FIELDS, Seen
from petal.serve.wire import Plane

log = logging.getLogger(__name__)

ACTIONS = ("freeze", "thaw", "reset", "rollback", "snapshot", "checkpoint")
THUMBNAIL = 96
SHORTEST = 16                               # characters of a token
_PAGE = {"": ("page.html", "text/html"), "page.css": ("page.css", "text/css"), "page.js": ("page.js", "text/javascript")}
_SAFE = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def read_token(settings: Settings) -> tuple[str, Path]:
    """The admin token and its file: the one that is given, or one made in the folder, readable to its owner only."""
    path = settings.token_file or settings.folder / "admin.token"
    if settings.token_file is None and not path.exists():
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the admin token at {path}: --token-file is a file with one line of ASCII") from error
    if len(token) < SHORTEST or not token.isprintable() or " " in token:
        raise ConfigError(f"the admin token in {path} must have {SHORTEST} characters or more, without spaces")
    if path.stat().st_mode & 0o077:
        log.warning("others can read the admin token: chmod 600 %s", path)
    return token, path


class Bearer:
    """Lets requests below /api through only with the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or not scope["path"].startswith("/api"):
            await self.app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) == 1 and hmac.compare_digest(given[0], self.expected):
            await self.app(scope, receive, send)
            return
        log.warning("an admin request without the right token", extra={"path": scope["path"][:200]})
        headers = {"www-authenticate": "Bearer", "connection": "close"}
        response = JSONResponse({"error": "the admin token is missing or wrong"}, 401, headers)
        await response(scope, receive, send)


class Admin:
    """What the admin port answers."""

    def __init__(self, plane: Plane, settings: Settings) -> None:
        self.plane, self.settings = plane, settings
        self.worker, self.watch = plane.model.worker, plane.model.watch
        self.began = time.time()
        self.memory = BodyMemory(2**20)
        self._encoded: tuple[float, list[dict[str, Any]]] = (0.0, [])

    async def page(self, name: str = "") -> Response:
        """The live page and its parts."""
        file, kind = _PAGE[name]
        return Response(files("petal.serve").joinpath("page", file).read_bytes(), media_type=kind, headers=_SAFE)

    async def status(self) -> dict[str, Any]:
        """Where the server stands."""
        w = self.worker
        return {
            "name": self.settings.name, "method": w.served.row, "guard": w.served.guard, "petal": __version__,
            "ready": await self.plane.ready(), "version": w.version, "newest": w.newest, "steps": w.steps,
            "frozen": w.frozen or w.resting, "queue": w.waiting, "queue_limit": self.settings.waiting,
            "batch_size": self.settings.batch_size, "checkpoint_age": time.time() - w.checkpointed,
            "unsaved": w.changed, "uptime": time.time() - self.began, "time": time.time(),
            "labels": list(self.settings.labels), "device": w.adapter.device.type, "totals": dict(self.watch.totals),
            "now": dict(self.watch.now), **self.settings.meta,
        }  # fmt: skip

    async def versions(self) -> dict[str, Any]:
        """The versions that are kept, and the one in service."""
        kept = [v.to_json() for v in self.worker.versions.list()]
        return {"current": self.worker.version, "versions": kept}

    async def audit(self, count: int = 20) -> dict[str, Any]:
        """The latest entries of the audit log, the newest first."""
        return {"audit": self.worker.audit.last(max(1, min(count, 200)))}

    async def digest(self, request: Request) -> Any:
        """SHA-256 of the adapter's whole state, as a checkpoint's content has it."""
        return await asyncio.wrap_future(self.worker.act("digest", _who(request)))

    async def live(self, since: float = 0.0, seen: float = 0.0) -> dict[str, Any]:
        """All that the page shows: history after `since`, and images if there are newer ones than `seen`."""
        images = [one for one in list(self.watch.images) if one.pixels.ndim == 3]
        newest = images[-1].time if images else 0.0
        if newest > self._encoded[0]:
            encode = asyncio.get_running_loop().run_in_executor
            self._encoded = newest, await encode(self.plane.model.pool, lambda: [shown(i) for i in reversed(images)])
        return {
            "status": await self.status(), **await self.versions(), **await self.audit(10),
            "fields": ["time", *FIELDS], "history": self.watch.history.since(since), "seen": newest,
            "images": self._encoded[1] if newest > seen else None,
        }  # fmt: skip

    async def action(self, request: Request, name: str) -> Any:
        """Do one of the admin actions; a roll back may name its version."""
        if name not in ACTIONS:
            raise Refused(f"there is no action {name!r:.40} (there are: {', '.join(ACTIONS)})", 404, "not found")
        arguments: dict[str, Any] = {}
        with self.memory.counted() as share:
            body = await read_body(request, self.settings, share)
        if name == "rollback" and body.strip():
            arguments["version"] = _version(body)
        return await asyncio.wrap_future(self.worker.act(name, _who(request), **arguments))


def admin_app(plane: Plane, settings: Settings, token: str) -> FastAPI:
    """The application on the admin port."""
    app = FastAPI(title="petal admin", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    admin, health = Admin(plane, settings), Endpoints(plane, settings)
    for name in _PAGE:
        app.add_api_route(f"/{name}", _static(admin, name), methods=["GET"], response_model=None)
    for path, endpoint in (
        ("/api/status", admin.status), ("/api/versions", admin.versions), ("/api/audit", admin.audit),
        ("/api/live", admin.live), ("/api/digest", admin.digest), ("/v2/health/live", health.live),
        ("/v2/health/ready", health.ready), ("/metrics", metrics_endpoint(admin.watch.metrics.registry)),
    ):  # fmt: skip
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    app.add_api_route("/api/{name}", admin.action, methods=["POST"], response_model=None)
    add_refusals(app)
    app.add_middleware(Bearer, token=token)
    app.add_middleware(AccessLog, port="admin")
    return app


def _static(admin: Admin, name: str) -> Any:
    async def part() -> Response:
        return await admin.page(name)

    return part


def _who(request: Request) -> str:
    return request.client.host if request.client else "unknown"


def _version(body: bytes) -> int:
    try:
        version = orjson.loads(body)["version"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise Refused('a roll back is {"version": number}, or nothing for the last one kept') from error
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise Refused(f"a version is a whole number, got {version!r:.40}")
    return version


def shown(seen: Seen) -> dict[str, Any]:
    """An image and its two predictions as plain data."""
    pixels = np.clip(seen.pixels * 255 + 0.5, 0, 255).astype(np.uint8).transpose(1, 2, 0)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {
        "png": base64.b64encode(buffer.getvalue()).decode("ascii"), "label": seen.label, "probability": seen.probability,
        "source_label": seen.source_label, "source_probability": seen.source_probability, "version": seen.version,
        "time": seen.time,
    }  # fmt: skip
