"""Requests to tensors, checked against NumPy and Pillow; what is refused is in test_hostile.py."""

import base64
import io
import struct
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from petal.serve.inputs import Refused, decode, read_request, samples
from petal.serve.settings import Settings

SETTINGS = Settings(input=(3, 4, 6), batch_size=5)


def request(tensor: dict[str, Any], raw: bytes = b"", **more: Any) -> Any:
    head = orjson.dumps({"inputs": [tensor], **more})
    return read_request(head + raw, str(len(head)) if raw else None, "m", None)


def test_binary_and_json_tensors_are_the_same() -> None:
    x = np.random.default_rng(0).random((2, 3, 4, 6), np.float32)
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32"}
    flat = samples(request({**tensor, "data": x.reshape(-1).tolist()}), SETTINGS, True)
    nested = samples(request({**tensor, "data": x.tolist()}), SETTINGS, True)
    raw = samples(request({**tensor, "parameters": {"binary_data_size": x.nbytes}}, x.tobytes()), SETTINGS, True)
    for got in (flat, nested, raw):
        assert np.array_equal(got.numpy(), x)
        assert got.numpy().flags.writeable


def test_bytes_after_the_last_tensor_are_refused() -> None:
    x = np.zeros((1, 3, 4, 6), np.float32)
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    with pytest.raises(Refused, match="3 bytes follow the tensors"):
        request(tensor, x.tobytes() + b"abc")


def test_bytes_are_pixels_of_255() -> None:
    x = np.random.default_rng(0).integers(0, 256, (1, 3, 4, 6), np.uint8)
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "UINT8"}
    raw = samples(request({**tensor, "parameters": {"binary_data_size": x.nbytes}}, x.tobytes()), SETTINGS, True)
    text = samples(request({**tensor, "data": x.reshape(-1).tolist()}), SETTINGS, True)
    assert np.allclose(raw.numpy(), x / 255, atol=1e-7)
    assert np.array_equal(raw.numpy(), text.numpy())


@pytest.mark.parametrize(("value", "taken"), [(-0.12, False), (-0.08, True), (1.08, True), (1.12, False), (1.9, False)])
def test_pixels_may_overshoot_a_tenth_as_resampling_does(value: float, taken: bool) -> None:
    x = np.full((1, 3, 4, 6), 0.5, np.float32)
    x[0, 1, 2, 3] = value
    tensor = {"name": "input", "shape": [1, 3, 4, 6], "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    assert np.array_equal(samples(request(tensor, x.tobytes()), SETTINGS, False).numpy(), x)       # of other inputs
    with nullcontext() if taken else pytest.raises(Refused, match=r"pixels are numbers in \[0, 1\]"):
        assert np.array_equal(samples(request(tensor, x.tobytes()), SETTINGS, True).numpy(), x)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_stop_here(value: float) -> None:
    x = np.zeros((2, 3, 4, 6), np.float32)
    x[1, 2, 3, 4] = value
    tensor = {"name": "input", "shape": [2, 3, 4, 6], "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    with pytest.raises(Refused, match="1 of 2 samples have NaN or Inf"):
        samples(request(tensor, x.tobytes()), SETTINGS, False)


def test_only_networks_for_pixels_ask_for_pixels() -> None:
    x = np.full((1, 3, 4, 6), -3.0, np.float32)
    asked = request({"name": "input", "shape": [1, 3, 4, 6], "datatype": "FP32", "data": x.reshape(-1).tolist()})
    assert samples(asked, SETTINGS, False).min() == -3
    with pytest.raises(Refused, match=r"pixels are numbers in \[0, 1\]"):
        samples(asked, SETTINGS, True)


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1"])
def test_images_of_every_mode(mode: str) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)).convert(mode)
    pixels, count = decode(encoded(picture, "PNG"), SETTINGS, 1000)
    assert count == 24
    assert np.allclose(pixels, np.asarray(picture.convert("RGB")).transpose(2, 0, 1) / 255, atol=1e-6)
    gray, _ = decode(encoded(picture, "PNG"), Settings(input=(1, 4, 6)), 1000)
    assert np.allclose(gray[0], np.asarray(picture.convert("L")) / 255, atol=1e-6)


def test_images_of_another_size() -> None:
    """Scaled to cover, and the middle cut out: a picture with a bright middle keeps it."""
    array = np.zeros((40, 120, 3), np.uint8)
    array[:, 30:90] = 255                    # 60 x 40 in the middle: exactly what is left
    pixels, _ = decode(encoded(Image.fromarray(array), "PNG"), SETTINGS, 10_000)
    assert pixels.shape == (3, 4, 6)
    assert (pixels[:, :, 1:-1] == 1).all()
    assert pixels.min() > 0.8                # the edges are mixed with what was cut off
    with pytest.raises(Refused, match="images are 6 x 4, got 120 x 40"):
        decode(encoded(Image.fromarray(array), "PNG"), Settings(input=(3, 4, 6), resize=False), 10_000)


def test_the_pixels_of_all_images_count_together() -> None:
    file = base64.b64encode(encoded(Image.new("RGB", (6, 4)), "JPEG")).decode()
    asked = request({"name": "input", "shape": [3], "datatype": "BYTES", "data": [file] * 3,
                     "parameters": {"content_type": "image/jpeg"}})  # fmt: skip
    assert samples(asked, Settings(input=(3, 4, 6), max_pixels=72), True).shape == (3, 3, 4, 6)
    with pytest.raises(Refused, match="may have 71 pixels"):
        samples(asked, Settings(input=(3, 4, 6), max_pixels=71), True)


def test_a_bytes_tensor_with_wrong_lengths() -> None:
    for raw in (struct.pack("<I", 10) + b"abc", b"\x01", struct.pack("<I", 2**32 - 1)):
        asked = request({"name": "input", "shape": [1], "datatype": "BYTES",
                         "parameters": {"content_type": "image", "binary_data_size": len(raw)}}, raw)  # fmt: skip
        with pytest.raises(Refused, match="cut off"):
            samples(asked, SETTINGS, True)


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        ({"datatype": "UINT8", "data": [300] * 72}, "got 300 to 300"),
        ({"datatype": "UINT8", "data": [0.5] * 72}, "got 0.5 to 0.5"),
        ({"data": np.zeros((1, 4, 6, 3)).tolist()}, r"shape is \[1, 3, 4, 6\], and the data is nested as \[1, 4, 6, 3\]"),
        ({"datatype": "BYTES", "shape": [1], "data": ["aaaa"], "parameters": {"content_type": "gif"}}, "got 'gif'"),
        ({"datatype": "BYTES", "shape": [1], "data": ["aaaa"], "parameters": {"content_type": "image"}}, "not PNG or JPEG$"),
        ({"parameters": {"binary_data_size": "288"}}, "a number of bytes, got '288'"),
    ],
)  # fmt: skip
def test_a_refusal_names_what_was_given(tensor: dict[str, Any], match: str) -> None:
    with pytest.raises(Refused, match=match):
        samples(request({"name": "input", "shape": [1, 3, 4, 6], "datatype": "FP32"} | tensor), SETTINGS, True)


@pytest.mark.parametrize("key", ["binary_data", "binary_data_output"])
def test_binary_outputs_are_asked_for_by_true_or_false(key: str) -> None:
    tensor = {"name": "input", "shape": [1, 3, 4, 6], "datatype": "FP32", "data": [0.0] * 72}
    wanted = {"parameters": {key: "false"}}
    with pytest.raises(Refused, match="is true or false, got 'false'"):
        request(tensor, **(wanted if key == "binary_data_output" else {"outputs": [{"name": "label"} | wanted]}))


@given(st.binary(max_size=300), st.one_of(st.none(), st.text(max_size=5), st.integers(-5, 400).map(str)))
def test_any_bytes_are_a_request_or_refused(body: bytes, head: str | None) -> None:
    with suppress(Refused):                     # and nothing else is raised
        samples(read_request(body, head, "m", None), SETTINGS, True)


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TENSOR = st.fixed_dictionaries(
    {}, optional={"name": st.just("input") | JSON, "shape": st.just([1, 3, 4, 6]) | JSON, "data": JSON, "parameters": JSON,
                  "datatype": st.sampled_from(["FP32", "UINT8", "BYTES"]) | JSON}
)  # fmt: skip


MORE: dict[str, Any] = {"outputs": JSON, "id": JSON, "parameters": JSON}


@given(st.fixed_dictionaries({"inputs": st.lists(TENSOR | JSON, max_size=2)}, optional=MORE))
def test_any_json_is_a_request_or_refused(content: dict[str, Any]) -> None:
    try:
        body = orjson.dumps(content)
    except (TypeError, orjson.JSONEncodeError):
        return                                  # integers beyond 64 bits, half characters: not JSON for this library
    with suppress(Refused):
        samples(read_request(body, None, "m", None), SETTINGS, True)
