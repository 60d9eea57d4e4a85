"""A load of inference requests over HTTP: closed loop (so many clients) or open loop (so many requests per second).

Requests are prepared before the clock starts, and the client does as little as it can: it shares the machine with the
server it measures.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Check = Callable[[int, bytes], bool]        # number of the request, body of its answer: is it the right one?


@dataclass
class LoadOutcome:
    """What became of a load's requests; times in seconds."""

    seconds: float = 0.0
    answered: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)      # 503
    failed: int = 0                         # any other status, or a connection that broke
    wrong: int = 0                          # answers that belong to another request
    unsent: int = 0                         # no connection was free in time

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.answered) / self.seconds if self.seconds else 0.0

    def quantile(self, q: float, refused: bool = False) -> float:
        """Milliseconds."""
        times = self.refused if refused else self.answered
        return 1000 * float(np.quantile(times, q)) if times else float("nan")


class Client:
    """Connections to one address that send prepared requests."""

    def __init__(self, port: int, path: str, make: Callable[[int], tuple[bytes, dict[str, str]]], check: Check) -> None:
        self.port, self.path, self.make, self.check = port, path, make, check
        self.numbers = itertools.count()
        self.outcome = LoadOutcome()
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def prepared(self, number: int) -> bytes:
        """The bytes of a request."""
        body, headers = self.make(number)
        lines = [f"POST {self.path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode() + body

    async def send(self, number: int, data: bytes, since: float | None = None) -> None:
        """Send one request and note what became of it; time counts from `since`, when it was due."""
        began = time.perf_counter() if since is None else since
        try:
            reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(data)
            status, body, keep = await _answer(reader)
        except (OSError, asyncio.IncompleteReadError, ValueError):
            self.outcome.failed += 1
            return
        took = time.perf_counter() - began
        if keep:
            self.idle.append((reader, writer))
        else:
            writer.close()
        if status == 503:
            self.outcome.refused.append(took)
        elif status != 200:
            self.outcome.failed += 1
        else:
            self.outcome.answered.append(took)
            self.outcome.wrong += not self.check(number, body)

    async def closed_loop(self, clients: int, seconds: float) -> LoadOutcome:
        """So many clients, each of which waits for its answer and sends the next request."""
        end = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                number = next(self.numbers)
                await self.send(number, self.prepared(number))

        return await self._measured(asyncio.gather(*(client() for _ in range(clients))))

    async def open_loop(self, rate: float, seconds: float, most: int = 200) -> LoadOutcome:
        """So many requests per second, whatever becomes of those before, on at most `most` connections."""
        data = [(number, self.prepared(number)) for number in range(min(int(rate * seconds), 20_000))]
        tasks: set[asyncio.Task[None]] = set()

        async def all_of_them() -> None:
            began = time.perf_counter()
            for place, (number, request) in enumerate(data):
                due = began + place / rate
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                if len(tasks) >= most:
                    self.outcome.unsent += 1
                    continue
                task = asyncio.create_task(self.send(number, request, due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)

        return await self._measured(all_of_them())

    async def _measured(self, work: "asyncio.Future[object] | object") -> LoadOutcome:
        began = time.perf_counter()
        await work                          # type: ignore[misc]
        self.outcome.seconds = time.perf_counter() - began
        for _, writer in self.idle:
            writer.close()
        return self.outcome


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    body = await reader.readexactly(int(fields.get("content-length", "0")))
    return int(lines[0].split(" ")[1]), body, fields.get("connection") != "close"


def binary_requests(x: NDArray[np.float32], adapt: bool) -> Callable[[int], tuple[bytes, dict[str, str]]]:
    """Requests of the Open Inference Protocol with one sample of `x` each, in turn, and their number as id."""
    raw = [one.tobytes() for one in x]
    tensor = {
        "name": "input", "datatype": "FP32", "shape": [1, *x.shape[1:]], "parameters": {"binary_data_size": len(raw[0])},
    }  # fmt: skip
    fixed = json.dumps([tensor])

    def make(number: int) -> tuple[bytes, dict[str, str]]:
        head = f'{{"id":"{number}","parameters":{{"adapt":{str(adapt).lower()}}},"inputs":{fixed}}}'.encode()
        return head + raw[number % len(raw)], {"Inference-Header-Content-Length": str(len(head))}

    return make


def id_check(logits: NDArray[np.float32] | None = None) -> Check:
    """The answer has the id of its request and, where they are known, the logits of its sample."""

    def check(number: int, body: bytes) -> bool:
        answer = json.loads(body)
        if answer["id"] != str(number):
            return False
        if logits is None:
            return True
        return bool(np.allclose(answer["outputs"][0]["data"], logits[number % len(logits)], atol=1e-3))

    return check
