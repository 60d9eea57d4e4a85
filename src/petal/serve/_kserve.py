"""The parts of KServe's SDK that are used, in one place: its import reads the command line, which is petal's own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _no_arguments() -> Iterator[None]:
    """KServe parses sys.argv when it is imported, and would exit on options it takes for its own."""
    before, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = before


with _no_arguments():
    from kserve import InferInput, InferOutput, InferRequest, InferResponse, ModelRepository
    from kserve.errors import InvalidInput, ModelNotFound
    from kserve.model import InferenceModel
    from kserve.protocol.dataplane import DataPlane
    from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
    from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
    from kserve.protocol.grpc.servicer import InferenceServicer
    from kserve.protocol.infer_type import RequestedOutput
    from kserve.protocol.rest import v2_datamodels as schema
    from kserve.protocol.rest.v2_endpoints import V2Endpoints

__all__ = [
    "DataPlane",
    "InferInput",
    "InferOutput",
    "InferRequest",
    "InferResponse",
    "InferenceModel",
    "InferenceServicer",
    "InvalidInput",
    "ModelNotFound",
    "ModelRepository",
    "RequestedOutput",
    "V2Endpoints",
    "add_GRPCInferenceServiceServicer_to_server",
    "pb",
    "schema",
]
