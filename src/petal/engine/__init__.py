"""How a step is executed, apart from what it computes: precision, layout, compilation, CUDA graphs.

`accelerate(adapter, "auto")` changes the execution of an adapter's calls and nothing else; `accelerate(adapter, "eager")`
goes back to the plain torch code of `petal.methods`, which is the reference that the tests compare with.
"""

import logging
import shutil
from collections.abc import Sequence
from typing import TypeVar

import torch

from petal._memory import keep_freed_memory
from petal.engine.engine import Engine
from petal.engine.policy import Policy
from petal.errors import ConfigError
from petal.methods import Adapter, Wrapper

log = logging.getLogger(__name__)

ENGINES = ("auto", "eager")

A = TypeVar("A", bound=Adapter)


CPU_COMPILE_AFTER = 20  # compiling takes a CPU some ten seconds: only for a shape that keeps coming


def policy_for(device: torch.device, batch_shape: Sequence[int] | None = None, sizes: Sequence[int] = ()) -> Policy:
    """The policy that "auto" means on a device; with a batch shape, that one, at further `sizes` too, is compiled alone."""
    each = [] if batch_shape is None else [(size, *batch_shape[1:]) for size in (batch_shape[0], *sizes)]
    shapes = frozenset(map(torch.Size, each)) or None
    if device.type == "cuda":
        # a residual sum is written once and not added up again by everyone who reads it
        realize = {"realize_reads_threshold": 1}
        return Policy(
            low=torch.float16, compile=True, shapes=shapes, inference_options=realize, measured_options=fusing(),
            view_streams=4,
        )  # fmt: skip
    able: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of torch do not tell
    multiplies = able.get("avx512_bf16") or able.get("amx_bf16")  # without instructions for it bfloat16 is slower
    return Policy(
        low_views=torch.bfloat16 if multiplies else None, compile=bool(shutil.which("g++") or shutil.which("clang++")),
        compile_after=CPU_COMPILE_AFTER, shapes=shapes, view_threads=torch.get_num_threads(),
    )  # fmt: skip


def fusing() -> dict[str, object]:
    """What makes the compiler fuse convolutions with what follows them, if its interface is the one we know."""
    try:
        from petal.engine.fusion import FuseConvolutions  # here, since it takes seconds to import
    except ImportError as error:
        log.info("convolutions are not fused: %s", error)
        return {}
    return {"post_grad_custom_post_pass": FuseConvolutions()}


def accelerate(
    adapter: A, engine: str = "auto", batch_shape: Sequence[int] | None = None, policy: Policy | None = None
) -> A:
    """Choose how an adapter's calls are executed: "auto" (fast for its device) or "eager" (plain torch). Returns it.

    `batch_shape` is the shape of the batches to come, if it is known: it is then compiled at once, and other shapes are
    not. Otherwise a shape is compiled when it keeps coming. `policy` overrides the choices of "auto". Any method runs on it,
    a subclass or one of the user's own too; a network in float64 stays eager.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine must be one of {', '.join(map(repr, ENGINES))}, got {engine!r}")
    if isinstance(adapter, Wrapper):  # what goes around a method is plain code: the method inside is made fast
        accelerate(adapter.adapter, engine, adapter.inner_shape(batch_shape), policy)
        return adapter
    fast = engine == "auto" and adapter.dtype == torch.float32
    if engine == "auto" and not fast:
        log.info("a network in %s runs eager", adapter.dtype)
    with torch.inference_mode(False):
        chosen = policy or policy_for(adapter.device, batch_shape, adapter.batch_sizes)
        adapter.execute_with(Engine(adapter, chosen) if fast else None)
    return adapter


__all__ = ["ENGINES", "Engine", "Policy", "accelerate", "keep_freed_memory", "policy_for"]
