"""Jobs on Ray: this machine, or a cluster by its address. A job whose process or machine is lost is begun again."""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from petal.errors import ConfigError
from petal.sweep.jobs import Outcome, Part, Ready, Task, prepare, work

POLL = 0.5              # seconds between looks
ANSWER = 10.0           # seconds in which a cluster must be reached

T = TypeVar("T")


@dataclass(frozen=True)
class Resources:
    """What each job gets, how often it is begun again, and where Ray is: `address` None is a Ray of our own."""

    cpus: float = 1
    gpus: float = 0
    retries: int = 3
    address: str | None = None
    local_cpus: int | None = None           # of a Ray of our own; None: all there are


def import_ray() -> Any:
    """Ray; if it is not installed, an error that says how to get it and how to do without."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "petal sweep runs on Ray, which is not installed: pip install 'petal-tta[sweep]', or give --sequential to run "
            "one after the other without it"
        ) from error
    return ray


@contextmanager
def connected(resources: Resources) -> Iterator[Any]:
    """Ray, joined or started; what was started here is ended here."""
    ray = import_ray()
    ours = not ray.is_initialized()
    if ours:
        address = resources.address or os.environ.get("RAY_ADDRESS") or "local"
        local = {"num_cpus": resources.local_cpus, "include_dashboard": False} if address == "local" else {}
        try:
            _check_answers(address)
            _start(ray, tries=2 if local else 1, address=address, **local)
        except Exception as error:  # Ray raises just that where it took too long to start
            raise ConfigError(f"no Ray at {address}: {error}") from error
    try:
        _check_fits(ray, resources)
        yield ray
    finally:
        if ours:
            ray.shutdown()


def _start(ray: Any, tries: int, **options: Any) -> None:
    """Ray gives its own processes half a minute: too little for their first start on a machine that is busy."""
    for left in reversed(range(tries)):
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
            return
        except Exception:
            if not left:
                raise


def _check_answers(address: str) -> None:
    """Somebody listens at HOST:PORT: Ray itself waits for many minutes, and says nothing."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), ANSWER).close()


def _check_fits(ray: Any, resources: Resources) -> None:
    largest = {name: max((node["Resources"].get(name, 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
               for name in ("CPU", "GPU")}  # fmt: skip
    for name, wanted in (("CPU", resources.cpus), ("GPU", resources.gpus)):
        if wanted > largest[name]:
            raise ConfigError(f"a run asks for {wanted:g} {name}s; the largest machine of this Ray has {largest[name]:g}")


def on_ray(ray: Any, tasks: Sequence[Task], resources: Resources, tick: Callable[[], None]) -> Iterator[Outcome]:
    """Outcomes as they come in. `tick` is called twice a second or more."""
    wanted = {task.name: task for task in tasks}
    for name, found in _scattered(ray, work, wanted, resources, tick):
        yield found if isinstance(found, Outcome) else Outcome(name, failed=str(found))


def prepare_on_ray(ray: Any, parts: Sequence[Part], resources: Resources, tick: Callable[[], None]) -> list[Ready]:
    """The parts made ready where the jobs will run: there, and perhaps only there, are the GPUs."""
    wanted = {part.name: part for part in parts}
    found = dict(_scattered(ray, prepare, wanted, resources, tick))
    return [f if isinstance(f := found[name], Ready) else Ready(failed=str(f)) for name in wanted]


def _scattered(
    ray: Any, function: Callable[[Any], T], arguments: dict[str, Any], resources: Resources, tick: Callable[[], None]
) -> Iterator[tuple[str, T | Exception]]:
    """Call a function for each argument, anywhere, and yield what comes back by name, as it comes."""
    remote = ray.remote(
        num_cpus=resources.cpus, num_gpus=resources.gpus, max_retries=resources.retries, retry_exceptions=True
    )(function)
    pending = {remote.remote(argument): name for name, argument in arguments.items()}
    try:
        while pending:
            done, _ = ray.wait(list(pending), timeout=POLL)
            tick()
            for reference in done:
                name = pending.pop(reference)
                try:
                    yield name, ray.get(reference)
                except Exception as error:  # whatever a job raises, the others go on
                    yield name, error
    finally:
        for reference in pending:
            with suppress(Exception):
                ray.cancel(reference, force=True)
