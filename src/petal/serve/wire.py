"""The model as KServe knows it: a request in, an answer or a refusal out."""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from petal._version import __version__
from petal.errors import InputError, PetalError
from petal.serve import inputs
from petal.serve._kserve import (
    DataPlane,
    InferenceModel,
    InferOutput,
    InferRequest,
    InferResponse,
    InvalidInput,
    ModelNotFound,
    ModelRepository,
)
from petal.serve.inputs import Refused
from petal.serve.queue import ADAPT, PREDICT, SOURCE, Answer, Busy, Closed
from petal.serve.settings import Settings
from petal.serve.versions import NoVersion
from petal.serve.watch import Watch
from petal.serve.worker import Worker

INLINE = 64 * 1024                          # bytes of a request that is decoded without a thread of its own
TYPES = {"logits": "FP32", "probabilities": "FP32", "label": "INT64", "entropy": "FP32"}


def refusal(error: Exception) -> Refused | None:
    """What a client is told, or None if the error is the server's own."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, (Busy, Closed)):
        return Refused(str(error), 503, "busy" if isinstance(error, Busy) else "closing", error.retry_after)
    if isinstance(error, (NoVersion, ModelNotFound)):
        return Refused(str(error), 404, "not found")
    if isinstance(error, (InputError, InvalidInput)):
        return Refused(str(error))
    return None


class AdaptiveModel(InferenceModel):        # type: ignore[misc]
    """The worker behind KServe's interface of a model."""

    def __init__(self, worker: Worker, settings: Settings, watch: Watch) -> None:
        super().__init__(settings.name)
        self.worker, self.settings, self.watch = worker, settings, watch
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="petal-decode")
        self.ready = True

    async def healthy(self) -> bool:
        """True while requests are accepted."""
        return self.worker.is_alive() and not self.worker.closing

    def get_input_types(self) -> list[dict[str, Any]]:
        """The input by the protocol; images in BYTES go in its place."""
        return [{"name": inputs.NAME, "datatype": "FP32", "shape": [-1, *self.settings.input]}]

    def get_output_types(self) -> list[dict[str, Any]]:
        """The outputs by the protocol."""
        shapes = {"logits": [-1, self.worker.served.classes], "probabilities": [-1, self.worker.served.classes]}
        return [{"name": name, "datatype": TYPES[name], "shape": shapes.get(name, [-1])} for name in inputs.OUTPUTS]

    def versions(self) -> list[str]:
        """What can be asked for by version: the source, what is kept, and what is in service."""
        kept = {v.number for v in self.worker.versions.list()} | {self.worker.version}
        return [SOURCE, *map(str, sorted(kept))]

    def target(self, version: str | None, parameters: Mapping[str, Any]) -> str:
        """Which weights are to answer, and whether they are to adapt."""
        adapt = parameters.get("adapt", True)
        if not isinstance(adapt, bool):
            raise Refused(f"the parameter adapt is true or false, got {adapt!r:.40}")
        if not version:
            return ADAPT if adapt else PREDICT
        if version == SOURCE:
            return SOURCE
        if version.isascii() and version.isdecimal() and len(version) < 19 and self.worker.has_version(int(version)):
            return str(int(version))
        raise NoVersion(f"there is no version {version!r:.40} (there are: {', '.join(self.versions())})")

    async def __call__(
        self, body: InferRequest, headers: Mapping[str, str] | None = None, verb: Any = None
    ) -> tuple[InferResponse, dict[str, str]]:
        """Check, queue and answer a request."""
        began = time.monotonic()
        protocol = "grpc" if body.from_grpc else "rest"
        target, status = "none", "error"
        try:
            parameters = inputs.plain(body.parameters)
            target, stream = self.target(body.model_version, parameters), inputs.stream(parameters)
            inputs.check_outputs(body)
            answer = await self.answer(body, target, stream)
            status = "ok"
            return self.response(body, answer), {}
        except PetalError as error:
            found = refusal(error)
            if found is not None:
                status = found.reason
                self.watch.refused(found.reason)
            raise
        finally:
            shown = target if target in (ADAPT, PREDICT, SOURCE, "none") else "version"
            self.watch.metrics.requests.labels(protocol, shown, status).inc()
            self.watch.metrics.latency.labels(shown).observe(time.monotonic() - began)

    async def answer(self, request: InferRequest, target: str, stream: str | int | None) -> Answer:
        """The worker's answer, within the time there is."""
        self.worker.check_room()
        arguments = (request, self.settings, self.worker.served.unit_pixels)
        if _size(request) > INLINE:
            x = await asyncio.get_running_loop().run_in_executor(self.pool, inputs.samples, *arguments)
        else:
            x = inputs.samples(*arguments)
        future = asyncio.wrap_future(self.worker.submit(x, target, stream))
        try:
            return await asyncio.wait_for(future, self.settings.answer_seconds)
        except TimeoutError:
            raise Refused("no answer in time: try again", 503, "timeout", self.worker.retry_after()) from None

    def response(self, request: InferRequest, answer: Answer) -> InferResponse:
        """The answer in the protocol's words; the version in service is that of the weights that answered."""
        wanted = {o.name for o in request.request_outputs or ()} or set(inputs.OUTPUTS)
        outputs = []
        for name in inputs.OUTPUTS:
            if name in wanted:
                data = getattr(answer, name)
                output = InferOutput(name, list(data.shape), TYPES[name], data=data)
                if request.from_grpc:       # gRPC clients read raw outputs only
                    output.set_data_from_numpy(data, binary_data=True)
                outputs.append(output)
        return InferResponse(
            request.id or "", self.name, outputs, model_version=answer.version, from_grpc=request.from_grpc,
            parameters={"adapted": answer.adapted}, use_binary_outputs=request.use_binary_outputs is True,
            requested_outputs=request.request_outputs,
        )  # fmt: skip


def _size(request: InferRequest) -> int:
    """Roughly how much work decoding is: bytes, or numbers as JSON; images always count as much."""
    size = 0
    for tensor in request.inputs:
        if tensor.datatype == "BYTES":
            return INLINE + 1
        size += len(tensor._raw_data) if tensor._raw_data is not None else 8 * len(tensor.data or ())
    return size


class Plane(DataPlane):                     # type: ignore[misc]
    """KServe's data plane with this one model, its versions and its readiness."""

    def __init__(self, model: AdaptiveModel) -> None:
        registry = ModelRepository()
        registry.update(model)
        super().__init__(registry)
        self.model = model

    def metadata(self) -> dict[str, Any]:
        """Name, version, and what is served beyond the required protocol."""
        return {"name": "petal", "version": __version__, "extensions": ["binary_tensor_data"]}

    async def live(self) -> dict[str, str]:
        """Alive as long as the worker is, or rightly at its end."""
        alive = self.model.worker.is_alive() or self.model.worker.closing
        return {"status": "alive" if alive else "dead"}

    async def ready(self) -> bool:
        """True while requests are accepted."""
        return await self.model.healthy()

    async def model_metadata(self, model_name: str) -> dict[str, Any]:
        """Inputs, outputs and versions."""
        found: dict[str, Any] = await super().model_metadata(model_name)
        return {**found, "platform": "petal", "versions": self.model.versions()}
