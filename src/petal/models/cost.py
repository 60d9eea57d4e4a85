"""How large a network is and how much it computes."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call


def count_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """Number of parameters (a shared one counts once).

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable_only)


def flops(model: nn.Module, input_shape: Sequence[int]) -> int:
    """Floating-point operations of a forward pass: convolutions and matrix products, a multiply-add counting as two.

    `input_shape` is that of one image, `(3, 32, 32)`, or of a batch, `(200, 3, 32, 32)`. The model is not touched: the
    pass runs on tensors without data or, where the network cannot do that, through a copy.

    >>> flops(nn.Conv2d(3, 8, 3, padding=1), (3, 32, 32)) == 2 * 32 * 32 * 8 * 3 * 9
    True
    """
    shape = tuple(input_shape) if len(input_shape) == 4 else (1, *input_shape)
    state: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shadow = {name: value.detach().to("meta") for name, value in state.items()}
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, where there is one

    counter = FlopCounterMode(display=False)
    try:
        with counter:
            functional_call(model, shadow, (torch.empty(shape, dtype=dtype, device="meta"),))
    except (RuntimeError, NotImplementedError):  # tensors that are neither parameters nor buffers, data-dependent code
        device = next((value.device for value in state.values()), torch.device("cpu"))
        twin = copy.deepcopy(model)
        with FlopCounterMode(display=False) as counter:
            twin(torch.zeros(shape, dtype=dtype, device=device))
    return int(counter.get_total_flops())
