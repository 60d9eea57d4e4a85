"""`petal run --gpus N`: the same command again, in N processes that share out the views, watched by torch's launcher."""

import logging
import os
import signal
import sys
import uuid

import torch

from petal.cli.codes import LOST, REFUSED
from petal.errors import ConfigError
from petal.parallel import ParallelError

SAID = (REFUSED, LOST)  # exit codes of a command that has said what is wrong


def launch(count: int, device: torch.device) -> None:
    """Run this process's command line in `count` ranks and wait for them. A rank that is lost ends the others."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if device.type == "cuda" and torch.cuda.device_count() < count:
        raise ConfigError(f"--gpus {count}: there are {torch.cuda.device_count()} here")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what happened is said below
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "petal", *sys.argv[1:])
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        refused = all(code in (REFUSED, -signal.SIGTERM) for code in codes.values())
        raise (ConfigError if refused else ParallelError)(what_happened(codes, count)) from error


def what_happened(codes: dict[int, int], count: int) -> str:
    """A sentence from the exit codes of the ranks that failed. Those ended by the launcher are not the cause.

    >>> what_happened({1: -9, 0: 2}, 2)
    'rank 1 of 2 was ended by SIGKILL, and the run with it; repeat the command to continue at its last checkpoint'
    >>> what_happened({0: 2}, 2)
    'rank 0 of 2 failed for the reason above'
    """
    told = [rank for rank, code in codes.items() if code in SAID]
    others = {r: c for r, c in codes.items() if r not in told and c != -signal.SIGTERM} or codes
    rank, code = next(iter(others.items()))
    if code in SAID:
        return f"rank {rank} of {count} failed for the reason above"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    return f"rank {rank} of {count} {how}, and the run with it; repeat the command to continue at its last checkpoint"
