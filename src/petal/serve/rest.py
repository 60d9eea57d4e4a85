"""The public port: the Open Inference Protocol over HTTP, by KServe's endpoints, and the numbers for Prometheus."""

import asyncio
import logging
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRouter
from prometheus_client import CollectorRegistry, exposition
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from petal._version import __version__
from petal.errors import PetalError
from petal.serve import inputs
from petal.serve._kserve import InvalidInput, ModelNotFound, V2Endpoints, schema
from petal.serve.http import AccessLog, BodyMemory, read_body
from petal.serve.inputs import Refused
from petal.serve.queue import SOURCE, Busy, Closed
from petal.serve.settings import Settings
from petal.serve.wire import INLINE, AdaptiveModel, Plane, refusal

log = logging.getLogger(__name__)

HEAD = "inference-header-content-length"
CLOSING = frozenset({408, 413, 415})       # the body may be unread: what follows on the connection is not a request


class Door:
    """Turns requests away while the queue is full, before anything else is done for them."""

    def __init__(self, app: ASGIApp, model: AdaptiveModel) -> None:
        self.app, self.model = app, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith("/infer"):
            try:
                self.model.worker.check_room()
            except (Busy, Closed) as error:
                found = refusal(error)
                assert found is not None
                self.model.watch.refused(found.reason)
                await refused(found)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def refused(found: Refused) -> Response:
    """A refusal as {"error": text} with its status and headers."""
    headers = {"connection": "close"} if found.status in CLOSING or found.reason in ("closing", "upgrade") else {}
    if found.retry_after is not None:
        headers["retry-after"] = str(found.retry_after)
    return JSONResponse({"error": str(found)}, found.status, headers)


class Endpoints(V2Endpoints):               # type: ignore[misc]
    """KServe's endpoints with versions, limits, and bodies read by `inputs`."""

    def __init__(self, plane: Plane, settings: Settings) -> None:
        super().__init__(plane)
        self.settings = settings
        self.memory = BodyMemory(max(8 * settings.body, 64 * 2**20))

    async def live(self) -> Response:
        """True while the process does its work; if it does not, restart it."""
        alive = (await self.dataplane.live())["status"] == "alive"
        return JSONResponse({"live": alive}, 200 if alive else 503)

    async def ready(self) -> Response:
        """True while requests are accepted."""
        ready = await self.dataplane.ready()
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def model_metadata(self, model_name: str, model_version: str | None = None) -> schema.ModelMetadataResponse:
        """Inputs, outputs and versions of the model."""
        self._check(model_name, model_version)
        return schema.ModelMetadataResponse.model_validate(await self.dataplane.model_metadata(model_name))

    async def model_ready(self, model_name: str, model_version: str | None = None) -> Response:
        """True if requests can name this version of the model."""
        self._check(model_name, model_version)
        ready = await self.dataplane.model_ready(model_name)
        return JSONResponse({"name": model_name, "ready": ready}, 200 if ready else 503)

    async def infer(self, request: Request, model_name: str, model_version: str | None = None) -> Response:
        """Predict, and adapt unless told not to."""
        watch = self.dataplane.model.watch
        with self.memory.counted() as share:
            try:
                self._check(model_name, model_version)
                body = await read_body(request, self.settings, share)
                arguments = (body, request.headers.get(HEAD), model_name, model_version)
                if len(body) > INLINE:
                    pool = self.dataplane.model.pool
                    asked = await asyncio.get_running_loop().run_in_executor(pool, inputs.read_request, *arguments)
                else:
                    asked = inputs.read_request(*arguments)
            except Exception as error:
                found = refusal(error)
                if found is not None:
                    watch.refused(found.reason)
                raise
            del body
            asked.parameters[inputs.CLIENT] = request.client.host if request.client else "unknown"
            answer, _ = await self.dataplane.infer(model_name, asked)
        content, length = answer.to_rest()
        if length is None:
            return Response(orjson.dumps(content), media_type="application/json")
        return Response(content, media_type="application/octet-stream", headers={HEAD: str(length)})

    def _check(self, model_name: str, version: str | None) -> None:
        model = self.dataplane.model
        if model_name != model.name:
            raise ModelNotFound(model_name)
        if version is not None and version != SOURCE:
            model.target(version, {})


def public_app(plane: Plane, settings: Settings, registry: CollectorRegistry) -> FastAPI:
    """The application on the public port."""
    app = FastAPI(title="petal", version=__version__, docs_url=None, redoc_url=None)
    e = Endpoints(plane, settings)
    body = {"required": True, "content": {"application/json": {"schema": request_schema()}}}
    refused: dict[int | str, dict[str, Any]] = {
        status: {"description": text}
        for status, text in ((400, "Invalid"), (404, "No such model or version"), (408, "Slow"), (413, "Too large"),
                             (415, "Compressed"), (503, "Busy, with Retry-After"))
    }  # fmt: skip
    found: dict[int | str, dict[str, Any]] = {404: refused[404], 503: {"description": "Not ready"}}
    router = APIRouter(prefix="/v2")
    get: dict[str, Any] = {"methods": ["GET"]}
    router.add_api_route("", e.metadata, response_model=schema.ServerMetadataResponse, **get)
    router.add_api_route("/health/live", e.live, responses={503: {"description": "Dead"}}, response_model=None, **get)
    router.add_api_route("/health/ready", e.ready, responses={503: found[503]}, response_model=None, **get)
    router.add_api_route("/models", e.models, response_model=schema.ListModelsResponse, **get)
    for path in ("/models/{model_name}", "/models/{model_name}/versions/{model_version}"):
        router.add_api_route(path, e.model_metadata, response_model=schema.ModelMetadataResponse, responses=found, **get)
        router.add_api_route(f"{path}/ready", e.model_ready, response_model=None, responses=found, **get)
        router.add_api_route(
            f"{path}/infer", e.infer, methods=["POST"], response_model=None, responses=refused,
            openapi_extra={"requestBody": body},
        )  # fmt: skip
    app.include_router(router)
    app.add_api_route("/metrics", metrics_endpoint(registry), methods=["GET"], response_model=None)
    add_refusals(app)
    app.add_middleware(Door, model=plane.model)
    app.add_middleware(AccessLog, port="public")
    return app


def request_schema() -> Any:
    """KServe's schema of a request in one piece: references of its own would point nowhere in the whole document."""
    whole = schema.InferenceRequest.model_json_schema()
    parts = whole.pop("$defs")

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(one) for one in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(parts[node["$ref"].rpartition("/")[2]])
        return {key: inlined(value) for key, value in node.items()}

    return inlined(whole)


def metrics_endpoint(registry: CollectorRegistry) -> Any:
    """The numbers as Prometheus wants them."""

    async def metrics(request: Request) -> Response:
        try:
            encoder, kind = exposition.choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):     # a version that is no number
            encoder, kind = exposition.choose_encoder("")
        return Response(encoder(registry), headers={"content-type": kind})

    return metrics


def add_refusals(app: FastAPI) -> None:
    """Every refusal as {"error": text} with its status; anything else is logged and told as an internal error."""

    async def refuse(request: Request, error: Exception) -> Response:
        found = refusal(error)
        if found is None:
            log.error("a request failed", exc_info=error)
            return JSONResponse({"error": "internal error: see the server's log"}, 500)
        return refused(found)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    async def invalid(request: Request, error: Exception) -> Response:
        return await refuse(request, Refused(f"invalid request: {error}"[:300]))

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, refuse)
    for kind in (PetalError, InvalidInput, ModelNotFound):
        app.add_exception_handler(kind, refuse)

