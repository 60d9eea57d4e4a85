"""What no client should send: each is refused, the adapter's state stays bit-identical, and memory comes back."""

import base64
import gzip
import io
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from serve.running import Running, infer_path, json_body

Array = NDArray[np.float32]


@pytest.fixture
def unharmed(server: Running, x: Array) -> Iterator[Running]:
    """The server, whose state is the same afterwards and which still answers."""
    before = server.digest()
    yield server
    assert server.digest() == before
    assert server.infer(x[:2], adapt=False)["label"].shape == (2,)


def binary(x: NDArray[Any], datatype: str = "FP32", shape: list[int] | None = None, size: int | None = None) -> Any:
    """A body with a binary tensor, and its headers."""
    raw = x.tobytes()
    tensor = {"name": "input", "shape": list(x.shape) if shape is None else shape, "datatype": datatype}
    tensor["parameters"] = {"binary_data_size": len(raw) if size is None else size}
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + raw, {"Inference-Header-Content-Length": str(len(head))}


def text(data: Any = (), **changes: Any) -> Any:
    tensor: dict[str, Any] = {"name": "input", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": list(data)}
    return json.dumps({"inputs": [tensor | changes]}).encode(), {}


def picture(data: bytes, kind: str = "image") -> Any:
    return text([base64.b64encode(data).decode()], shape=[1], datatype="BYTES", parameters={"content_type": kind})


def png(width: int, height: int) -> bytes:
    """A PNG of one colour that is far smaller than its pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes((3 * width + 1) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def small_png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 10, 10)).save(buffer, "PNG")
    return buffer.getvalue()


def text_bomb() -> bytes:
    """A small picture with a compressed comment of 100 MB."""
    buffer, about = io.BytesIO(), PngImagePlugin.PngInfo()
    about.add(b"zTXt", b"a\0\0" + zlib.compress(bytes(100 * 2**20), 9))
    Image.new("RGB", (32, 32)).save(buffer, "PNG", pnginfo=about)
    return buffer.getvalue()


def sixteen_bits() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((32, 32), np.uint16)).save(buffer, "PNG")
    return buffer.getvalue()


GOOD = np.zeros((1, 3, 32, 32), np.float32)


def with_value(value: float) -> Array:
    x = GOOD.copy()
    x[0, 1, 2, 3] = value
    return x


CASES: dict[str, tuple[Any, int]] = {
    "NaN": (binary(with_value(np.nan)), 400),
    "Inf": (binary(with_value(np.inf)), 400),
    "beyond float32": (text([1e39] * 3072), 400),
    "NaN in JSON": ((json_body(with_value(np.nan)).encode(), {}), 400),
    "bytes as floats": (binary(GOOD + 200), 400),
    "float64": (binary(GOOD.astype(np.float64), "FP64"), 400),
    "an unknown type": (binary(GOOD, "FP8"), 400),
    "no such shape": (binary(np.zeros((1, 3, 8, 8), np.float32)), 400),
    "no batch dimension": (binary(GOOD[0]), 400),
    "no samples": (binary(GOOD[:0]), 400),
    "a negative shape": (text([0.0] * 3072, shape=[-1, 3, 32, 32]), 400),
    "an endless shape": (text([0.0], shape=[2**62, 3, 32, 32]), 413),
    "a shape of words": (text([0.0], shape=["a", 3, 32, 32]), 400),
    "too many samples": (binary(np.zeros((51, 3, 32, 32), np.float32)), 413),
    "too few numbers": (text([0.0] * 3071), 400),
    "numbers as words": (text(["0"] * 3072), 400),
    "nothing as numbers": (text([None] * 3072), 400),
    "ragged lists": (text([[0.0], [0.0, 1.0]]), 400),
    "huge numbers": (text([10**400] * 3072), 400),
    "UINT8 out of range": (text([256] * 3072, datatype="UINT8"), 400),
    "another name": (text([0.0] * 3072, name="image"), 400),
    "no input": ((b'{"inputs": []}', {}), 400),
    "two inputs": ((b'{"inputs": [{}, {}]}', {}), 400),
    "no JSON": ((b"\x00\x01\x02", {}), 400),
    "an empty body": ((b"", {}), 400),
    "a list": ((b"[1, 2, 3]", {}), 400),
    "deep lists": ((b'{"inputs": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", {}), 400),
    "a wrong output": ((json.dumps({"inputs": [], "outputs": [{"name": "soul"}]}).encode(), {}), 400),
    "adapt maybe": ((json_body(GOOD, adapt="maybe").encode(), {}), 400),
    "a truncated tensor": (binary(GOOD, size=GOOD.nbytes + 1), 400),
    "bytes left over": (binary(GOOD, size=GOOD.nbytes - 4), 400),
    "a tensor of another size": (binary(GOOD, shape=[2, 3, 32, 32]), 400),
    "a head beyond the body": ((b"{}", {"Inference-Header-Content-Length": "999"}), 400),
    "a negative head": ((b"{}", {"Inference-Header-Content-Length": "-1"}), 400),
    "a head of words": ((b"{}", {"Inference-Header-Content-Length": "\xb2"}), 400),
    "a head of five thousand digits": ((b"{}", {"Inference-Header-Content-Length": "1" * 5000}), 400),
    "data nested in another order": (text(GOOD.transpose(0, 2, 3, 1).tolist()), 400),
    "binary perhaps": ((json_body(GOOD, adapt=False, binary_data_output="false").encode(), {}), 400),
    "an oversized body": ((b" " * 1_600_000, {}), 413),
    "a compressed body": ((gzip.compress(bytes(2**20)), {"Content-Encoding": "gzip"}), 415),
    "BYTES without saying what": (text(["aaaa"], shape=[1], datatype="BYTES"), 400),
    "no base64": (text(["%%%"], shape=[1], datatype="BYTES", parameters={"content_type": "image"}), 400),
    "no image": (picture(b"not an image"), 400),
    "a truncated PNG": (picture(small_png()[:60]), 400),
    "a PNG that is said to be a JPEG": (picture(small_png(), "image/jpeg"), 400),
    "sixteen bits": (picture(sixteen_bits()), 400),
    "pixels over the limit": (picture(png(400, 400)), 413),
    "a decompression bomb": (picture(png(15_000, 15_000)), 413),
    "a comment that is a bomb": (picture(text_bomb()), 400),
    "a GIF": (picture(b"GIF89a" + bytes(100)), 400),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_a_reason(unharmed: Running, name: str) -> None:
    (body, headers), expected = CASES[name]
    try:
        status, _, answer = unharmed.request("POST", infer_path(), body, headers)
    except (BrokenPipeError, ConnectionResetError):
        assert len(body) > 1_500_000, "only a body that is too long may see its connection closed before all of it is sent"
        return
    assert status == expected, answer
    assert json.loads(answer)["error"]


@pytest.mark.parametrize("path", ["/v2/models/nobody/infer", "/v2/models/digits/versions/77777/infer",
                                  "/v2/models/digits/versions/x/infer", "/v2/models/digits/versions/-1/infer"])  # fmt: skip
def test_models_and_versions_that_are_not_there(unharmed: Running, path: str) -> None:
    status, _, answer = unharmed.request("POST", path, json_body(GOOD))
    assert status == 404
    assert "does not exist" in json.loads(answer)["error"] or "there is no version" in json.loads(answer)["error"]


def test_nobody_can_unload_the_model(unharmed: Running) -> None:
    assert unharmed.request("POST", "/v2/repository/models/digits/unload")[0] == 404
    assert unharmed.request("GET", "/v2/models/digits/ready")[0] == 200


def test_bad_requests_among_good_ones_reach_nobody_else(unharmed: Running, x: Array) -> None:
    """Good and bad requests at once: the good ones get what they get alone (from the source, so that it is known)."""
    alone = unharmed.infer(x[:6], "source")["logits"]
    wrong: list[str] = []

    def good(number: int) -> None:
        for _ in range(10):
            got = unharmed.infer(x[number : number + 1], "source", request_id=f"n{number}")
            if got["id"] != f"n{number}" or not np.allclose(got["logits"][0], alone[number], atol=1e-4):
                wrong.append(f"n{number}")

    def bad() -> None:
        for name in ("NaN", "a truncated tensor", "too few numbers", "no image", "Inf") * 4:
            (body, headers), expected = CASES[name]
            if unharmed.request("POST", infer_path("source"), body, headers)[0] != expected:
                wrong.append(name)

    threads = [threading.Thread(target=good, args=(n,)) for n in range(6)] + [threading.Thread(target=bad)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def opened(server: Running, data: bytes) -> socket.socket:
    out = socket.create_connection(("127.0.0.1", server.http), timeout=30)
    out.sendall(data)
    return out


def ending(connection: socket.socket) -> bytes:
    """All that the server says until it closes the connection."""
    said = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            said += part
    return said


def refused(said: bytes, status: bytes) -> bool:
    """The status, or a connection closed without a word."""
    return said == b"" or said.startswith(b"HTTP/1.1 " + status)


HEAD = b"POST " + infer_path().encode() + b" HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"


def test_a_body_that_ends_early(unharmed: Running) -> None:
    connection = opened(unharmed, HEAD + b"Content-Length: 500\r\n\r\n" + b'{"inputs": ')
    connection.shutdown(socket.SHUT_WR)
    said = ending(connection)
    assert refused(said, b"400")


@pytest.mark.parametrize("apart", [False, True])
def test_a_request_for_another_protocol(unharmed: Running, apart: bool) -> None:
    """As `curl --http2` and Java's HttpClient send it. uvicorn then drops the body, which is not to be taken for none."""
    asked = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    body = b'{"version": 0}'
    told = b"Content-Length: %d\r\n\r\n" % len(body)
    roll_back = b"POST /api/rollback HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer " + unharmed.token.encode() + b"\r\n"
    for port, head in ((unharmed.http, HEAD), (unharmed.admin, roll_back)):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(head + asked + told + (b"" if apart else body))
            if apart:
                time.sleep(0.2)
                with suppress(OSError):
                    connection.sendall(body)
            said = ending(connection)
        assert said.startswith(b"HTTP/1.1 400")
        assert b"leave the header Upgrade out" in said


def test_a_chunked_body_without_end(unharmed: Running) -> None:
    connection = opened(unharmed, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with suppress(OSError):                     # the server closes it, rightly
        for _ in range(40):
            connection.sendall(chunk)
    assert refused(ending(connection), b"413")


def test_a_head_without_end(unharmed: Running) -> None:
    connection = opened(unharmed, HEAD)
    with suppress(OSError):
        for number in range(3000):
            connection.sendall(b"X-%d: " % number + b"a" * 60 + b"\r\n")
    assert refused(ending(connection), b"400")


def test_a_hundred_slow_connections(unharmed: Running, x: Array) -> None:
    """Half of them slow with their head, half with their body: others are served meanwhile, and they are let go."""
    slow = [opened(unharmed, HEAD[:20]) for _ in range(50)]
    slow += [opened(unharmed, HEAD + b"Content-Length: 1000\r\n\r\n{") for _ in range(50)]
    for _ in range(3):
        for connection in slow:
            connection.sendall(b" ")            # a byte now and then
        assert unharmed.infer(x[:1], adapt=False)["label"].shape == (1,)
        time.sleep(0.2)
    for connection in slow:
        assert refused(ending(connection), b"408")
        connection.close()


def test_memory_comes_back(unharmed: Running, x: Array) -> None:
    """After two hundred hostile requests of all kinds the process is hardly larger than after the first forty."""
    names = ("a decompression bomb", "a comment that is a bomb", "numbers as words", "too many samples", "deep lists",
             "an oversized body", "pixels over the limit", "a truncated PNG")  # fmt: skip

    def round_of_requests() -> None:
        for name in names:
            (body, headers), expected = CASES[name]
            with suppress(BrokenPipeError, ConnectionResetError):     # refused before all of it was sent
                assert unharmed.request("POST", infer_path(), body, headers)[0] == expected

    for _ in range(5):
        round_of_requests()
    unharmed.infer(x[:1], adapt=False)
    before = unharmed.memory()
    for _ in range(25):
        round_of_requests()
    unharmed.infer(x[:1], adapt=False)
    assert unharmed.memory() - before < 24 * 2**20
