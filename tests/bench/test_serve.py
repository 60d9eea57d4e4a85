"""The load test in a second: its loads find the servers, its checks find answers that are wrong."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from petal.bench.load import Client, LoadOutcome, binary_requests, id_check
from petal.bench.serve import run
from recipes.source import make_source


def test_every_target_is_measured_and_every_answer_is_the_right_one(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    weights = tmp_path / "source" / "network.safetensors"
    rows = list(run(tmp_path, weights, seconds=0.7, clients=3, options=["--set=petal.views=1"]))
    assert len({row.target for row in rows}) == 4
    assert len(rows) == 11
    assert all(row.answered > 0 for row in rows)
    assert sum(row.wrong for row in rows) == 0
    assert sum(row.failed for row in rows) == 0
    halves = [row for row in rows if row.load.startswith("half")]
    assert [row.target for row in halves] == ["petal serve, adapt=false", "petal serve, adapting"]
    assert halves[0].load == halves[1].load
    over = rows[-1]
    assert over.load.startswith("twice")
    assert over.answered + over.refused + over.unsent > 0


def test_an_answer_to_another_request_is_noticed() -> None:
    logits = np.eye(3, 10, dtype=np.float32)
    right = json.dumps({"id": "4", "outputs": [{"data": logits[1].tolist()}]}).encode()
    assert id_check(logits)(4, right)
    assert not id_check(logits)(5, right), "another id"
    assert not id_check(logits)(4, right.replace(b"1.0", b"2.0")), "another sample's logits"


def test_what_became_of_the_requests_is_counted() -> None:
    """Against a server of three lines that answers, refuses and breaks in turn."""
    count = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            count += 1
            if count % 4 == 0:
                break
            status = b"503 Busy" if count % 4 == 1 else b"200 OK"
            said = json.dumps({"id": json.loads(body[: body.index(b"}]}") + 3])["id"] if count % 4 == 2 else "?"}).encode()
            writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
        writer.close()

    async def measure() -> LoadOutcome:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        make = binary_requests(np.zeros((1, 1, 1, 1), np.float32), True)
        client = Client(port, "/", make, id_check())
        for number in range(8):
            await client.send(number, client.prepared(number))
        server.close()
        return client.outcome

    outcome = asyncio.run(measure())
    assert (len(outcome.refused), len(outcome.answered), outcome.wrong, outcome.failed) == (2, 4, 2, 2)
    assert outcome.quantile(0.99) == pytest.approx(1000 * max(outcome.answered), rel=0.5)
