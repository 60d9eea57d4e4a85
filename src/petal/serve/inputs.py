"""Requests to tensors. Everything that can be wrong with a request is found here, before it meets any other.

KServe's own reader of binary bodies turns each number into a Python object and takes the sizes in a request on trust; this
one looks at the sizes first and then takes the bytes as they are.
"""

import base64
import binascii
import io
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from petal.errors import PetalError
from petal.serve._kserve import InferInput, InferRequest, RequestedOutput
from petal.serve.settings import Settings

NAME = "input"                              # of the input tensor
CLIENT = "petal-client"                     # the parameter in which a port notes the address of a client
LONGEST_KEY = 128                           # characters of the name of a source of images
IMAGE_TYPES = ("image", "image/png", "image/jpeg")
OUTPUTS = ("logits", "probabilities", "label", "entropy")
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
_SLACK = 0.1                                # resampling overshoots [0, 1] a little


class Refused(PetalError):
    """A request that is not let in: an HTTP status, and a reason for the metrics."""

    def __init__(self, message: str, status: int = 400, reason: str = "invalid", retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after = status, reason, retry_after


def too_large(message: str) -> Refused:
    """The refusal of what is over a limit."""
    return Refused(message, 413, "too large")


# -- the body of a REST request ------------------------------------------------------------------------------------------


def read_request(body: bytes, head: str | None, model_name: str, version: str | None) -> InferRequest:
    """A request from its body: JSON, or JSON of `head` bytes with the binary tensors after it."""
    length = len(body)
    if head is not None:
        if not head.isascii() or not head.isdecimal() or len(head) > 18 or int(head) > len(body):
            raise Refused(f"Inference-Header-Content-Length is that of the JSON part, at most {len(body)}; got {head!r:.40}")
        length = int(head)
    try:
        content = orjson.loads(memoryview(body)[:length])
    except orjson.JSONDecodeError as error:
        raise Refused(f"the request is not JSON: {error}") from error
    content = _checked(content, dict, "the request")
    inputs = _checked(content.get("inputs"), list, "'inputs'")
    outputs = content.get("outputs")
    identity = content.get("id")
    start, tensors = length, []
    for entry in inputs:
        tensor, start = _input(_checked(entry, dict, "an input"), body, start)
        tensors.append(tensor)
    if start != len(body):
        raise Refused(f"{len(body) - start} bytes follow the tensors that the request tells of")
    asked = [
        RequestedOutput(
            _checked(_checked(o, dict, "an output").get("name"), str, "the name of an output"), _parameters(o, "an output")
        )
        for o in _checked(outputs, list, "'outputs'")
    ] if outputs is not None else None  # fmt: skip
    return InferRequest(
        model_name, tensors, request_id=None if identity is None else _checked(identity, str, "'id'"),
        parameters=_parameters(content, "the request"), request_outputs=asked or None, model_version=version,
    )  # fmt: skip


def _input(entry: dict[str, Any], body: bytes, start: int) -> tuple[InferInput, int]:
    name = _checked(entry.get("name"), str, "the name of an input")
    datatype = _checked(entry.get("datatype"), str, f"the datatype of {name!r}")
    shape = _checked(entry.get("shape"), list, f"the shape of {name!r}")
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        raise Refused(f"the shape of {name!r} is a list of whole numbers, got {shape!r:.100}")
    parameters = _parameters(entry, f"the input {name!r}")
    tensor = InferInput(name, shape, datatype, parameters=parameters)
    size = parameters.pop("binary_data_size", None)
    if "data" in entry:
        tensor.data = _checked(entry["data"], list, f"the data of {name!r}")
        return tensor, start
    if size is None:
        raise Refused(f"{name!r} has neither data nor a binary_data_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise Refused(f"the binary_data_size of {name!r} is a number of bytes, got {size!r:.40}")
    if start + size > len(body):
        raise Refused(f"the request ends within {name!r}: {len(body) - start} of its {size} bytes are there")
    tensor._raw_data = body[start : start + size]
    return tensor, start + size


def _parameters(entry: Mapping[str, Any], what: str) -> dict[str, Any]:
    found = entry.get("parameters")
    if found is None:
        return {}
    found = _checked(found, dict, f"the parameters of {what}")
    for key, value in found.items():
        if not isinstance(value, (str, int, float)):
            raise Refused(f"the parameter {key!r:.60} of {what} is a number, a text, true or false")
        if key in ("binary_data", "binary_data_output") and not isinstance(value, bool):
            raise Refused(f"the parameter {key!r} of {what} is true or false, got {value!r:.40}")
    return dict(found)


def _checked(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        words = {"dict": "an object", "list": "a list", "str": "a text"}
        raise Refused(f"{what} must be {words[kind.__name__]}, got {'nothing' if value is None else type(value).__name__}")
    return value


def plain(parameters: Any) -> dict[str, Any]:
    """Parameters as plain values; gRPC has those of a request as messages."""
    out = {}
    for key, value in (parameters or {}).items():
        which = value.WhichOneof("parameter_choice") if hasattr(value, "WhichOneof") else None
        out[key] = value if which is None else getattr(value, which)
    return out


def stream(parameters: Mapping[str, Any]) -> str | int | None:
    """The source of images that a request is from: its parameter `stream`, and else its client."""
    key: str | int | None = parameters.get("stream", parameters.get(CLIENT))
    if key is not None and (isinstance(key, bool) or not isinstance(key, (str, int)) or len(str(key)) > LONGEST_KEY):
        raise Refused(f"the parameter stream is a text of at most {LONGEST_KEY} characters or a number, got {key!r:.40}")
    return key


# -- the samples of a request --------------------------------------------------------------------------------------------


def check_outputs(request: InferRequest) -> None:
    """Refuse a request for outputs that there are not."""
    for output in request.request_outputs or ():
        if output.name not in OUTPUTS:
            raise Refused(f"there is no output {output.name!r:.60} (there are: {', '.join(OUTPUTS)})")


def samples(request: InferRequest, settings: Settings, unit_pixels: bool) -> Tensor:
    """The request's samples as float32 [n, *input], checked: type, shape, size, finite, and in [0, 1] for images."""
    if len(request.inputs) != 1 or request.inputs[0].name != NAME:
        names = ", ".join(repr(i.name)[:40] for i in request.inputs[:4])
        raise Refused(f"a request has one input, {NAME!r}; got {names or 'none'}")
    tensor = request.inputs[0]
    shape = list(tensor.shape)
    if not shape or shape[0] < 1:
        raise Refused(f"the input has no samples: its shape is {shape!r:.100}")
    if shape[0] > settings.samples:
        raise too_large(f"a request may have {settings.samples} samples, got {shape[0]}: send several requests")
    if tensor.datatype == "BYTES":
        kind = (tensor.parameters or {}).get("content_type", plain(request.parameters).get("content_type"))
        x = _images(tensor, shape, settings, kind)
    else:
        if shape[1:] != list(settings.input):
            raise Refused(f"the input has shape [n, {', '.join(map(str, settings.input))}], got {shape!r:.100}")
        x = _numbers(tensor, shape)
    if not np.isfinite(x).all():
        bad = int((~np.isfinite(x)).reshape(len(x), -1).any(1).sum())
        raise Refused(f"{bad} of {len(x)} samples have NaN or Inf", reason="not finite")
    if unit_pixels and (x.min() < -_SLACK or x.max() > 1 + _SLACK):
        raise Refused(
            f"pixels are numbers in [0, 1] (or UINT8 in 0..255), got {x.min():.3g} to {x.max():.3g}", reason="out of range"
        )
    return torch.from_numpy(x)


def _numbers(tensor: InferInput, shape: list[int]) -> NDArray[np.float32]:
    types: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "UINT8": np.dtype("u1")}
    if tensor.datatype not in types:
        raise Refused(f"the input is FP32, UINT8 or images in BYTES; got {tensor.datatype!r:.40}", reason="datatype")
    count = int(np.prod([int(n) for n in shape], dtype=object))
    if tensor._raw_data is not None:
        kind = types[tensor.datatype]
        if len(tensor._raw_data) != count * kind.itemsize:
            raise Refused(
                f"{tensor.datatype} of shape {shape} takes {count * kind.itemsize} bytes, got {len(tensor._raw_data)}"
            )
        values: NDArray[Any] = np.frombuffer(tensor._raw_data, kind)
    else:
        try:
            values = np.asarray(tensor.data)
        except (ValueError, OverflowError) as error:
            raise Refused(f"the data is not a regular list of numbers: {error}") from error
        if values.dtype.kind not in "iuf":
            raise Refused("the data is not a regular list of numbers")
        if values.size != count:
            raise Refused(f"shape {shape} takes {count} numbers, got {values.size}")
        if values.ndim == len(shape) and list(values.shape) != shape:
            raise Refused(f"the shape is {shape}, and the data is nested as {list(values.shape)}")
        if tensor.datatype == "UINT8" and (values.dtype.kind == "f" or values.min() < 0 or values.max() > 255):
            raise Refused(f"UINT8 data are whole numbers in 0..255, got {values.min()} to {values.max()}")
    with np.errstate(over="ignore"):
        x = values.astype(np.float32).reshape(shape)
    return x / np.float32(255) if tensor.datatype == "UINT8" else x


def _images(tensor: InferInput, shape: list[int], settings: Settings, kind: Any) -> NDArray[np.float32]:
    if not isinstance(kind, str) or kind not in IMAGE_TYPES:
        got = "" if kind is None else f"; got {kind!r:.40}"
        raise Refused(
            f'BYTES are images: say so with the parameter content_type = "image" (PNG or JPEG){got}', reason="datatype"
        )
    if len(settings.input) != 3 or settings.input[0] not in (1, 3):
        raise Refused("this model does not take images", reason="datatype")
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] != 1):
        raise Refused(f"images have shape [n], got {shape!r:.100}")
    files = _files(tensor, shape[0])
    left = settings.max_pixels
    out = np.empty((len(files), *settings.input), np.float32)
    for number, data in enumerate(files):
        pixels, used = decode(data, settings, left, kind)
        out[number] = pixels
        left -= used
    return out


def _files(tensor: InferInput, count: int) -> list[bytes]:
    """The bytes of each image: as they are in a binary tensor or gRPC, in base64 as JSON."""
    files: list[bytes] = []
    if tensor._raw_data is not None:
        raw, start = tensor._raw_data, 0
        while start < len(raw):
            if start + 4 > len(raw):
                raise Refused("a BYTES tensor is cut off")
            (length,) = struct.unpack_from("<I", raw, start)
            start += 4
            if start + length > len(raw):
                raise Refused("a BYTES tensor is cut off")
            files.append(raw[start : start + length])
            start += length
    else:
        for entry in tensor.data:
            if isinstance(entry, list) and len(entry) == 1:
                entry = entry[0]
            if isinstance(entry, str):
                try:
                    entry = base64.b64decode(entry, validate=True)
                except (binascii.Error, ValueError) as error:
                    raise Refused(f"images in JSON are base64: {error}") from error
            if not isinstance(entry, bytes):
                raise Refused("images in JSON are texts in base64")
            files.append(entry)
    if len(files) != count:
        raise Refused(f"shape says {count} images, got {len(files)}")
    return files


def decode(data: bytes, settings: Settings, most_pixels: int, kind: str = "image") -> tuple[NDArray[np.float32], int]:
    """A PNG or JPEG as float32 [C, H, W] in [0, 1], and its number of pixels, which is checked before any is decoded."""
    formats = {"image/png": ("PNG",), "image/jpeg": ("JPEG",)}.get(kind, ("PNG", "JPEG"))
    channels, height, width = settings.input
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            pixels = image.width * image.height
            if pixels > most_pixels:
                size = f"{image.width} x {image.height}"
                raise too_large(f"the images of a request may have {settings.max_pixels} pixels, this one is {size}")
            if image.mode not in _MODES:
                raise Refused(f"images have 8 bits a channel, this one is {image.mode}", reason="image")
            if image.size != (width, height) and not settings.resize:
                raise Refused(f"images are {width} x {height}, got {image.width} x {image.height}", reason="image")
            picture = image.convert("L" if channels == 1 else "RGB")
    except Image.DecompressionBombError as error:
        raise too_large(f"the image is too large: {error}") from error
    except Refused:
        raise
    except Exception as error:              # Pillow's readers fail in many ways on damaged files
        why = "" if isinstance(error, UnidentifiedImageError) else f": {error}"      # that one tells of our buffer
        raise Refused(f"truncated, or not {' or '.join(formats)}{why}"[:300], reason="image") from error
    if picture.size != (width, height):
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    array = np.asarray(picture, np.float32) / np.float32(255)
    return array.reshape(height, width, channels).transpose(2, 0, 1), pixels
