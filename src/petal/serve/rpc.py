"""The Open Inference Protocol over gRPC, by KServe's servicer."""

import logging
from typing import Any

import grpc
from grpc import aio

from petal.errors import ConfigError
from petal.serve._kserve import InferenceServicer, add_GRPCInferenceServiceServicer_to_server, pb
from petal.serve.http import address
from petal.serve.inputs import CLIENT
from petal.serve.settings import Settings
from petal.serve.wire import Plane, refusal

log = logging.getLogger(__name__)

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    503: grpc.StatusCode.UNAVAILABLE,
}


class Servicer(InferenceServicer):          # type: ignore[misc]
    """KServe's servicer with versions. Loading and unloading belong to the admin port, and are not offered here."""

    def __init__(self, plane: Plane) -> None:
        super().__init__(plane, None)
        self.plane = plane

    async def ModelReady(self, request: Any, context: Any) -> Any:
        """True if requests can name this version of the model."""
        self._check(request)
        return pb.ModelReadyResponse(ready=await self.plane.model_ready(request.name))

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """Inputs, outputs and versions of the model."""
        self._check(request)
        return pb.ModelMetadataResponse(**await self.plane.model_metadata(request.name))

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """Predict, and adapt unless told not to."""
        request.parameters[CLIENT].string_param = context.peer().rpartition(":")[0]        # ipv4:ADDRESS:PORT
        return await super().ModelInfer(request, context)

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        """Not offered."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "models are not loaded or unloaded here")

    RepositoryModelUnload = RepositoryModelLoad

    def _check(self, request: Any) -> None:
        self.plane.get_model_from_registry(request.name)
        if request.version:
            self.plane.model.target(request.version, {})


class Refusals(aio.ServerInterceptor):      # type: ignore[misc]
    """Errors as gRPC statuses, with the seconds after which to try again."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """The method with its errors told."""
        handler = await continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler
        inner = handler.unary_unary

        async def told(request: Any, context: Any) -> Any:
            try:
                return await inner(request, context)
            except aio.AbortError:
                raise
            except Exception as error:
                found = refusal(error)
                if found is None:
                    log.error("a request failed", exc_info=error)
                    await context.abort(grpc.StatusCode.INTERNAL, "internal error: see the server's log")
                    return None
                after = (("retry-after", str(found.retry_after)),) if found.retry_after is not None else ()
                code = CODES.get(found.status, grpc.StatusCode.INVALID_ARGUMENT)
                await context.abort(code, str(found), trailing_metadata=after)

        return grpc.unary_unary_rpc_method_handler(told, handler.request_deserializer, handler.response_serializer)


class Rpc:
    """A gRPC server on a host and port."""

    def __init__(self, plane: Plane, settings: Settings) -> None:
        self.server = aio.server(
            interceptors=[Refusals()],
            maximum_concurrent_rpcs=settings.connections,
            options=[
                ("grpc.max_receive_message_length", settings.body),
                ("grpc.max_connection_idle_ms", round(1000 * settings.idle_seconds)),
                ("grpc.so_reuseport", 0),
            ],
        )
        add_GRPCInferenceServiceServicer_to_server(Servicer(plane), self.server)
        try:
            self.port: int = self.server.add_insecure_port(address(settings.host, settings.grpc_port))
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {settings.host} port {settings.grpc_port}: give another --grpc-port, or --no-grpc"
            ) from error
