import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import petal
from networks import images, network
from parallel.program import BATCHES, CASES, ENGINES, VIEWS, make_petal, results
from petal import parallel


def start(what: str, size: int, out: Path) -> list[tuple[int, str]]:
    """Run the program in `size` ranks; the exit code of each and what it said."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("program.py")), what, str(out)]
    paths = os.pathsep.join(path for path in sys.path if path)
    processes = [
        subprocess.Popen(command, env={**common, "RANK": str(r), "PYTHONPATH": paths}, stderr=subprocess.PIPE, text=True)
        for r in range(size)
    ]
    said = [process.communicate(timeout=120)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def loaded(out: Path, size: int) -> list[dict[str, Any]]:
    return [torch.load(out / f"rank-{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Tensor]]:
    return {f"{name}/{engine}": results(make, engine) for name, make in CASES.items() for engine in ENGINES}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_give_the_bits_of_one_process(size: int, alone: dict[str, dict[str, Tensor]], tmp_path: Path) -> None:
    """5 views: 3 and 2 of them on two ranks, 2, 2 and 1 on three. Predictions, weights, optimizer and random numbers."""
    assert VIEWS % size
    assert start("compare", size, tmp_path) == [(0, "")] * size
    for found in loaded(tmp_path, size):
        assert found["realigned"] == 0
        assert found["results"].keys() == alone.keys()
        for case, expected in alone.items():
            for key, value in expected.items():
                assert torch.equal(found["results"][case][key], value), f"{case}: {key}"


def test_the_cases_go_every_way(alone: dict[str, dict[str, Tensor]]) -> None:
    used = {case: [bool(out[f"views {n}"]) for n in range(BATCHES)] for case, out in alone.items()}
    assert {True, False} == set(used["cotta, whole batches/eager"])
    assert sum(all(v) for v in used.values()) > 4
    assert alone["petal, augment of one's own/auto"]["calls"] == BATCHES * VIEWS


def test_trouble(tmp_path: Path) -> None:
    """Small differences are evened out; great ones, NaN, another batch and a rank that dies are errors."""
    (code, said), (other_code, _) = start("trouble", 2, tmp_path)
    assert (code, said, other_code) == (0, "", 3)
    found = torch.load(tmp_path / "rank-0.pt")
    assert found["realigned"] == 1
    adapter = make_petal(confidence=2)
    for number in range(3):
        adapter(images(8, seed=number))
    for little in (torch.load(tmp_path / f"little-{rank}.pt") for rank in range(2)):
        assert all(torch.equal(little[key], value) for key, value in adapter.state_dict().items())
    assert "the ranks' weights have gone apart" in found["a lot"]
    assert "the ranks' weights have gone apart (their norms are " in found["no number"]
    assert "nan" in found["no number"]
    assert found["realigned in the end"] == 1
    assert "rank 1 is at batch 1 with 7 samples, and rank 0 at batch 1 with 8" in found["another batch"]
    assert found["lost"] == "rank 0 of 2 has lost another rank: it ended, or was silent for 60 seconds"
    assert found["as before"] is True


class Fake:
    """Three ranks, as far as `parallelize` looks."""

    size = 3

    def meet(self, *_: object) -> None: ...


def test_what_cannot_be_shared_out_is_refused() -> None:
    ranks: Any = Fake()
    with pytest.raises(petal.ConfigError, match="Tent has no views"):
        petal.parallelize(petal.Tent(network()), ranks)  # type: ignore[type-var]
    adapter = make_petal()
    adapter.views = 2
    with pytest.raises(petal.ConfigError, match="2 views cannot be shared out over 3 ranks: start at most 2"):
        petal.parallelize(adapter, ranks)
    assert adapter.sharing is None
    adapter.views = 3
    petal.parallelize(adapter, ranks)
    with pytest.raises(petal.ConfigError, match="already"):
        petal.parallelize(adapter, ranks)


def test_one_process_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parallel.join() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert parallel.join() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(petal.ConfigError, match="timeout"):
        parallel.join(timeout=0)
    with pytest.raises(parallel.ParallelError, match="the ranks cannot meet"):
        parallel.join(timeout=1)
