"""Batch norm's last part, `relu((x - mean) * rstd * weight + bias)`, at the speed of memory.

Left to the compiler, every number looks up its channel's four constants anew, and computes a square root from them. The
Triton kernel holds those of 32 channels for many pixels. The operator `petal::normalise` has a second body in plain torch,
which the tests compare with.
"""

import torch
from torch import Tensor

STEP = 32  # channels of a program

_library = torch.library.Library("petal", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "normalise(Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor bias) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
)


def fits(x: Tensor, *constants: Tensor) -> bool:
    """True if the kernel can normalise these: low precision, channels-last, constants in float32."""
    return (
        x.dtype in (torch.float16, torch.bfloat16)
        and x.dim() == 4
        and x.shape[1] % STEP == 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and all(c.dtype == torch.float32 and c.numel() == x.shape[1] for c in constants)
    )


def _plain(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean, rstd, weight, bias = (c.reshape(-1, 1, 1) for c in (mean, rstd, weight, bias))
    out = ((x - mean) * (rstd * weight) + bias).to(x.dtype).relu()
    return out.contiguous(memory_format=torch.channels_last)


def _launch(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from petal.engine import kernels  # here: where there is no GPU there may be no Triton

    return kernels.normalise(x, *(c.contiguous() for c in (mean, rstd, weight, bias)))


_library.impl("normalise", _plain, "CPU")  # type: ignore[no-untyped-call]
_library.impl("normalise", _launch, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    "petal::normalise", lambda x, *_: torch.empty_like(x, memory_format=torch.channels_last), lib=_library
)
