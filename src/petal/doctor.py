"""Is this installation in order, and how will a network run here? What `petal doctor` shows, as data.

`examine` looks at packages, machine and device, builds an adapter around a network, says what the engine chose for it and
why, and compares two of its steps with the plain code, which is the reference.
"""

import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor, nn

from petal._version import __version__
from petal.checkpoint import digest, load, save
from petal.engine import Engine, accelerate, policy_for
from petal.errors import PetalError
from petal.methods import Adapter, Wrapper
from petal.recommended import adapt

PURPOSES = {
    "torch": "networks", "numpy": "arrays", "safetensors": "files of weights and state", "torchmetrics": "scores",
    "pillow": "images", "typer": "the command", "rich": "tables and progress", "jinja2": "the report's page",
    "matplotlib": "figures", "scikit-learn": "the digits of the demo", "packaging": "this page",
    "ray": "petal sweep", "kserve": "petal serve", "triton": "kernels on a GPU; comes with torch's CUDA builds",
    "timm": "networks timm:NAME", "torchvision": "networks torchvision:NAME", "transformers": "networks transformers:NAME",
    "pandas": "records as frames", "pyarrow": "Parquet files", "onnx": "ONNX files", "onnxscript": "ONNX files",
    "tensorboard": "--track tensorboard", "wandb": "--track wandb", "mlflow": "--track mlflow",
    "opencv-python-headless": "petal apply on videos", "scipy": "tests",
}  # fmt: skip
EXTRAS = {          # of petal's own, and what they are for
    "sweep": ("ray",), "serve": ("kserve",), "frames": ("pandas", "pyarrow"), "onnx": ("onnx", "onnxscript"),
    "track": ("tensorboard", "wandb", "mlflow"), "video": ("opencv-python-headless",),
}  # fmt: skip
OTHERS = ("triton", "timm", "torchvision", "transformers")
STEPS = 2
CLOSE = 1e-3                                # largest difference of a probability where both multiply in full precision
CLOSE_LOW = 0.05                            # and where the engine multiplies in half


@dataclass(frozen=True)
class Finding:
    """Something to know: `ok` or a note that changes nothing (`note`) or what must be put in order (`problem`)."""

    about: str
    state: str
    text: str


@dataclass
class Examination:
    """What was found. `healthy` unless something is a problem."""

    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """True if nothing that was found is a problem."""
        return not any(found.state == "problem" for found in self.findings)

    def note(self, about: str, text: str, state: str = "note") -> None:
        """Add a finding."""
        self.findings.append(Finding(about, state, text))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"healthy": self.healthy, **asdict(self)}


def examine(
    network: nn.Module, shape: Sequence[int], device: torch.device, batch_size: int = 8, compiled: bool = True
) -> Examination:
    """Look at everything, with `network` on samples of `shape`; with `compiled`, try the compiler too, if there is one."""
    report = Examination()
    look_at_packages(report)
    look_at_machine(report, device)
    try:
        look_at_steps(report, network, (batch_size, *shape), device, compiled)
    except Exception as error:                  # whatever it is, it is what the reader wants to know
        known = str(error) if isinstance(error, PetalError) else f"{type(error).__name__}: {error}"
        report.note("steps", f"a step of this network fails here: {known}", "problem")
    return report


# Packages


def look_at_packages(report: Examination, requires: Sequence[str] | None = None) -> None:
    """Versions against what petal asks for; extras that are not installed, and what they are for."""
    report.versions |= {"petal": __version__, "python": platform.python_version()}
    try:
        requires = metadata.requires("petal-tta") or [] if requires is None else requires
    except metadata.PackageNotFoundError:
        report.note("packages", "petal is not installed but on the path: what it requires is not known")
        requires = []
    for requirement in map(Requirement, requires):
        extra = next((e for e in EXTRAS if requirement.marker and requirement.marker.evaluate({"extra": e})), None)
        if requirement.marker and extra is None and not requirement.marker.evaluate({"extra": ""}):
            continue                            # for development, or for other systems
        _look_at(report, requirement, extra)
    for name in OTHERS:
        if (version := _version(name)) is not None:
            report.versions[name] = version
        else:
            report.note("packages", f"{name} is not installed: {PURPOSES[name]}")


def _look_at(report: Examination, requirement: Requirement, extra: str | None) -> None:
    name = requirement.name.lower()
    if name == "petal-tta":
        return
    version, purpose = _version(name), PURPOSES.get(name, "petal")
    if version is not None:
        report.versions[name] = version
    if extra is not None and version is None:
        if name in EXTRAS[extra]:
            text = f"{name} of the extra {extra!r} is not installed: {purpose} (pip install 'petal-tta[{extra}]')"
            report.note("packages", text)
        return
    wanted = f"{name}{requirement.specifier}"
    if version is None:
        report.note("packages", f"{name} is missing ({purpose}): pip install '{wanted}'", "problem")
    elif not requirement.specifier.contains(version, prereleases=True):
        report.note("packages", f"{name} {version} is installed ({purpose}): pip install '{wanted}'", "problem")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# The machine


def look_at_machine(report: Examination, device: torch.device) -> None:
    """Cores, memory, compiler, GPUs."""
    memory = _memory()
    compiler = next((path for path in map(shutil.which, ("g++", "clang++")) if path), None)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report.machine |= {
        "system": platform.platform(), "processor": _processor(), "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": usable, "threads": torch.get_num_threads(), "compiler": compiler, "device": str(device),
        **{name: round(value / 2**30, 1) for name, value in memory.items()},
    }  # fmt: skip
    if compiler is None:
        report.note("compiler", "there is no C++ compiler: networks are not compiled on the CPU (apt install g++)")
    if memory.get("memory_available_gib", 2**40) < 2**30:
        report.note("memory", "less than 1 GiB is available: large networks will not fit")
    report.machine["gpus"] = gpus = [_gpu(number) for number in range(torch.cuda.device_count())]
    if not gpus and shutil.which("nvidia-smi"):
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch cannot use it"
        report.note("gpu", f"there is a driver for GPUs here and {why}: see pytorch.org for its CUDA builds")
    for gpu in gpus:
        if gpu["capability"] < 7.0:
            report.note("gpu", f"{gpu['name']} is older than Volta: compiled networks need 7.0, it has {gpu['capability']}")
    if gpus and _version("triton") is None:
        report.note("gpu", "triton is not installed: networks cannot be compiled for the GPU", "problem")


def _gpu(number: int) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return {"name": about.name, "capability": float(f"{about.major}.{about.minor}"), "cuda": torch.version.cuda,
            "memory_gib": round(total / 2**30, 1), "memory_free_gib": round(free / 2**30, 1)}  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory() -> dict[str, float]:
    """Bytes of memory as the system counts them, and the limit of a container."""
    found: dict[str, float] = {}
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {words[0].rstrip(":"): 1024.0 * int(words[1]) for words in lines}
        found = {"memory_gib": sizes["MemTotal"], "memory_available_gib": sizes["MemAvailable"]}
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return found if limit == "max" else found | {"memory_limit_gib": float(limit)}
    except (OSError, KeyError, ValueError, IndexError):
        return found


# The engine, and a step


def look_at_steps(
    report: Examination, network: nn.Module, shape: Sequence[int], device: torch.device, compiled: bool
) -> None:
    """The engine's choices for the recommended adapter of a network, and its steps beside those of the plain code."""
    network = network.to(device).eval()
    images = len(shape) == 4 and shape[1] in (1, 3)
    policy = policy_for(device, shape)
    if not compiled:
        policy.compile = False
    plain, fast = (adapt(network, images=images, engine="eager") for _ in range(2))
    with _told() as told:
        accelerate(fast, "auto", shape, policy)
        executor = inner(fast).executor
        x = torch.rand(STEPS, *shape, generator=torch.Generator().manual_seed(0)).to(device, inner(fast).dtype)
        torch._dynamo.utils.counters.clear()
        answers = [[adapter(batch) for batch in x] for adapter in (plain, fast)]
        breaks = dict(torch._dynamo.utils.counters["graph_break"])
    for text in told:
        report.note("engine", text)
    for reason, times in breaks.items():
        report.note("engine", f"part of the network runs eager ({times}): {str(reason).splitlines()[0]}")
    report.engine |= _choices(executor, policy, inner(fast))
    if isinstance(executor, Engine) and not executor.compiled:
        report.note("engine", f"nothing is compiled: {_why_not(report, device, compiled)}")
    low = isinstance(executor, Engine) and (executor.low or executor.low_views) is not None
    report.test |= _compared(answers, CLOSE_LOW if low else CLOSE)
    if not report.test["close"]:
        report.note("steps", "engine and plain code answer differently: use --engine eager, and tell us", "problem")
    report.test["checkpoint"] = _survives(fast, plain)
    if not report.test["checkpoint"]:
        report.note("steps", "a checkpoint does not give back the state that was saved", "problem")


def inner(adapter: Adapter) -> Adapter:
    """The method inside what goes around it."""
    return adapter.method if isinstance(adapter, Wrapper) else adapter


def _choices(executor: Any, policy: Any, adapter: Adapter) -> dict[str, Any]:
    network = adapter.describe()["network"]
    if not isinstance(executor, Engine):
        return {"network": network, "runs": f"eager: the engine is for float32, the network is in {_name(adapter.dtype)}"}
    return {
        "network": network,
        "runs": "engine",
        "precision": _name(executor.low or torch.float32),
        "precision of views": _name(executor.low or executor.low_views or torch.float32),
        "compiled batches": [list(shape) for shape in sorted(executor.compiled)],
        "recorded": "CUDA graphs" if executor.cuda else "nothing: there are no CUDA graphs on a CPU",
        "layout": "channels last" if executor.layout.channels_last else "as it is (group norm)",
        "descent": "plain" if executor.descent is None else "flat",
        "views at a time": policy.view_streams if executor.cuda else policy.view_threads,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _why_not(report: Examination, device: torch.device, compiled: bool) -> str:
    if not compiled:
        return "left out by --no-compile"
    return "no C++ compiler" if device.type == "cpu" and report.machine.get("compiler") is None else "see the notes above"


def _compared(answers: Sequence[Sequence[Tensor]], limit: float) -> dict[str, Any]:
    """The largest difference of a probability in the answers to the same batches."""
    plain, fast = (torch.stack(list(each)).softmax(-1).double().cpu() for each in answers)
    difference = float((plain - fast).abs().max())
    return {"steps": STEPS, "difference": difference, "limit": limit, "close": difference <= limit}


def _survives(adapter: Adapter, other: Adapter) -> bool:
    """True if a checkpoint of one adapter makes the other one equal to it."""
    with tempfile.TemporaryDirectory() as folder:
        save(adapter, Path(folder) / "state.safetensors")
        load(other, Path(folder) / "state.safetensors")
    return digest(adapter.state_dict()) == digest(other.state_dict())


@contextmanager
def _told() -> Iterator[list[str]]:
    """What the engine logs in here."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, keep = logging.getLogger("petal.engine"), Keep(logging.INFO)
    before = logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(keep)
        logger.setLevel(before)


def in_words(values: Mapping[str, Any]) -> dict[str, str]:
    """Values as people read them.

    >>> in_words({"cores": 2, "gpus": [], "compiler": None})
    {'cores': '2', 'gpus': 'none', 'compiler': 'none'}
    """
    return {name: "none" if value in (None, []) else str(value) for name, value in values.items()}
