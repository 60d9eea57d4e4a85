"""Convolutions that add a residual and take a batch norm's sums on the way, on GPUs of the Hopper kind (H100, H200).

cuDNN multiplies by tiles of widths that do not divide 160 or 320 channels, and what follows a convolution reads its result
from memory again: to add the residual, and for the statistics of the batch. The kernel in `convolution.cu` has tiles that
fit and does both before it writes. It is CUDA and not Triton, whose tiles have powers of two for sides; NVRTC, which torch
brings along, compiles it where it is needed.

The operator `petal::convolution` has a second body in plain torch, for CPU tensors, which the tests compare the kernel with.
"""

import ctypes
import glob
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

ROWS = 256                       # output pixels of a tile; at the end there are tiles of half as many
CHANNELS = 32                    # input channels of a block, and output channels that are written at a time
STEP = 16                        # input channels of one product
COLUMNS = (160, 128, 96, 64)     # output channels of a tile
SHARED = 232_448                 # bytes of shared memory that a block of threads can have
LEAST = 1 << 17                  # bytes: some drivers describe smaller tensors wrongly to the copy engine
DTYPES = {torch.float16: 6, torch.bfloat16: 9}   # the driver's numbers for them


class KernelError(RuntimeError):
    """The kernel cannot be compiled or started here."""


_library = torch.library.Library("petal", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "convolution(Tensor x, Tensor weight, Tensor? residual, int stride, int[] padding, bool statistics, int columns)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
)


#: conv(x, weight) + residual in x's precision, and sums of it and of its square over groups of pixels: [groups, 2, C].
#: Everything is channels-last. `columns` is the width of the kernel's tiles. Without `statistics` there are no groups.
convolution: Callable[..., tuple[Tensor, Tensor]] = torch.ops.petal.convolution


def fits(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """True if the kernel can make `out` of these: their precision, layout, size, and numbers of channels."""
    return (
        x.dtype in DTYPES
        and weight.dtype == x.dtype
        and x.dim() == weight.dim() == 4
        and x.shape[1] == weight.shape[1]
        and x.shape[1] % STEP == 0
        and weight.shape[0] % CHANNELS == 0
        and all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
        and min(x.nbytes, out.nbytes) >= LEAST
        and bool(widths(weight))
    )


def widths(weight: Tensor) -> list[int]:
    """The tiles' widths that come into question: few columns are multiplied in vain."""
    outputs = weight.shape[0]
    exactly = weight.nbytes < LEAST  # described as larger than it is, so nothing beyond it may be asked for
    return [c for c in COLUMNS if (outputs % c == 0 if exactly else -(-outputs // c) * c <= 1.25 * outputs)]


def _results(
    x: Tensor, weight: Tensor, residual: Tensor | None, stride: int, padding: Sequence[int], statistics: bool, columns: int
) -> tuple[Tensor, Tensor]:
    """Tensors of the shape and layout of the results."""
    size = [(x.shape[2 + i] + 2 * padding[i] - weight.shape[2 + i]) // stride + 1 for i in range(2)]
    shape = (x.shape[0], weight.shape[0], *size)
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    groups = 2 * sum(_row_tiles(out, columns)) if statistics else 0
    return out, torch.empty(groups, 2, weight.shape[0], dtype=torch.float32, device=x.device)


def _row_tiles(out: Tensor, columns: int) -> tuple[int, int]:
    """How many tiles of 256 and of 128 pixels a result is made of, so that the last ones keep many multiprocessors busy."""
    pixels, column_tiles = out.numel() // out.shape[1], -(-out.shape[1] // columns)
    count = -(-pixels // ROWS)
    processors = _processors(out.device)
    whole = count * column_tiles // processors * processors // column_tiles
    halves = -(-(pixels - whole * ROWS) // (ROWS // 2))
    rounds = -(-count * column_tiles // processors)
    half = 0.6  # of the time of a whole one, about: half of the products, and more than half of the rest
    with_halves = count * column_tiles // processors + half * -(-halves * column_tiles // processors)
    return (whole, halves) if with_halves < rounds else (count, 0)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _plain(
    x: Tensor, weight: Tensor, residual: Tensor | None, stride: int, padding: Sequence[int], statistics: bool, columns: int
) -> tuple[Tensor, Tensor]:
    out, sums = _results(x, weight, residual, stride, padding, statistics, columns)
    out.copy_(F.conv2d(x, weight, stride=stride, padding=list(padding)))
    if residual is not None:
        out.add_(residual)
    if statistics:
        pixels = out.permute(0, 2, 3, 1).flatten(0, 2).float()
        group = -(-len(pixels) // len(sums))
        pixels = F.pad(pixels, (0, 0, 0, len(sums) * group - len(pixels))).view(len(sums), group, -1)
        sums.copy_(torch.stack([pixels.sum(1), pixels.square().sum(1)], 1))
    return out, sums


def _launch(
    x: Tensor, weight: Tensor, residual: Tensor | None, stride: int, padding: Sequence[int], statistics: bool, columns: int
) -> tuple[Tensor, Tensor]:
    """The kernel, on the current stream."""
    blocks = -(-x.shape[1] // CHANNELS)
    try:
        function, shared = _function(x.device.index, columns, (x.shape[1] - (blocks - 1) * CHANNELS) // STEP, x.dtype)
    except KernelError as error:  # a network that was compiled where this was possible
        log.warning("a convolution runs in plain torch: %s", error)
        return _plain(x, weight, residual, stride, padding, statistics, columns)
    out, sums = _results(x, weight, residual, stride, padding, statistics, columns)
    x, weight = _aligned(x), _aligned(weight)
    residual = None if residual is None else _aligned(residual.contiguous(memory_format=torch.channels_last))
    count, channels, height, width = x.shape
    outputs, _, taps_y, taps_x = weight.shape
    rows, column_tiles = out.numel() // outputs, -(-outputs // columns)
    whole, halves = _row_tiles(out, columns)
    tiles = (whole + halves) * column_tiles
    images = _described(
        x, (channels, width, height, count), CHANNELS, ROWS // 2, (1, stride, stride, 1),
        corners=([-padding[1], -padding[0]], [padding[1] - taps_x + 1, padding[0] - taps_y + 1]),
    )  # fmt: skip
    described = max(outputs, -(-LEAST // weight[0].nbytes))
    filters = _described(weight, (channels, taps_y * taps_x, described), CHANNELS, columns, (1, 1, 1))
    others = filters if residual is None else _described(residual, (outputs, rows), CHANNELS, ROWS // 2, (1, 1))
    one = _identity(x.device, x.dtype)
    identity = _described(one, one.shape, CHANNELS, columns, (1, 1))
    numbers = (
        *out.shape[2:], stride, *padding, taps_y * taps_x, taps_x, blocks, rows, outputs, column_tiles, whole, tiles
    )  # fmt: skip
    results = _described(out, (outputs, rows), CHANNELS, 64, (1, 1))
    arguments: list[Any] = [images, filters, others, identity, results]
    pointers = (0 if residual is None else residual.data_ptr(), sums.data_ptr() if statistics else 0)
    arguments += map(ctypes.c_void_p, pointers)
    arguments += map(ctypes.c_int, numbers)
    places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    grid = min(tiles, _processors(x.device))
    with torch.cuda.device(x.device):
        _ask(_cuda(), "cuLaunchKernel", function, grid, 1, 1, 384, 1, 1, shared, stream, places, None)
    return out, sums


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, where the copy engine can read it: a view into a buffer may begin anywhere."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


@cache
def _identity(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The filter that leaves residuals as they are."""
    return torch.eye(512, dtype=dtype, device=device)


_library.impl("convolution", _plain, "CPU")  # type: ignore[no-untyped-call]
_library.impl("convolution", _launch, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("petal::convolution", _results, lib=_library)


# What the driver and the compiler are told


class _Map(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 16),)


def _described(
    tensor: Tensor, size: Sequence[int], channels: int, box: int, strides: Sequence[int],
    corners: tuple[list[int], list[int]] | None = None,
) -> Any:  # fmt: skip
    """A tensor for the copy engine: its dimensions, innermost first, and the box that it copies at a time.

    With the corners of the box that the first tap of a filter moves in, rows of the box are pixels of an image.
    """
    room = ctypes.create_string_buffer(192)  # the driver wants its address to be a multiple of 64
    here = ctypes.addressof(room)
    place = _Map.from_buffer(room, -here % 64)
    rank = len(size)
    steps, step = [], tensor.element_size()
    for extent in size[:-1]:
        step *= extent
        steps.append(step)
    common = (
        ctypes.byref(place), DTYPES[tensor.dtype], rank, ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*size), (ctypes.c_uint64 * (rank - 1))(*steps),
    )  # fmt: skip
    layout = ((ctypes.c_uint32 * rank)(*strides), 0, 2, 2, 0)  # no interleaving, 64 bytes swizzled, by lines of 128, zeros
    if corners is None:
        _ask(_cuda(), "cuTensorMapEncodeTiled", *common, (ctypes.c_uint32 * rank)(channels, *[1] * (rank - 2), box), *layout)
    else:
        lower, upper = ((ctypes.c_int * 2)(*corner) for corner in corners)
        _ask(_cuda(), "cuTensorMapEncodeIm2col", *common, lower, upper, channels, box, *layout)
    return place


@cache
def _function(device: int, columns: int, tail: int, dtype: torch.dtype) -> tuple[Any, int]:
    """The compiled kernel, loaded for a device, and the bytes of shared memory that it needs."""
    rest = ROWS * columns * 2 + 8 * 2 * columns * 4 + 256
    stage = (ROWS + columns) * CHANNELS * 2
    stages = (SHARED - rest) // stage
    shared = stages * stage + rest
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # there is a context
        _ask(_cuda(), "cuModuleLoadData", ctypes.byref(module), _compiled(columns, tail, stages, dtype))
        _ask(_cuda(), "cuModuleGetFunction", ctypes.byref(function), module, b"convolution")
        _ask(_cuda(), "cuFuncSetAttribute", function, 8, shared)  # the most dynamic shared memory
    return function, shared


@cache
def _compiled(columns: int, tail: int, stages: int, dtype: torch.dtype) -> bytes:
    source = kernel_source(columns, tail, stages, dtype).encode()
    call, program = partial(_ask, _nvrtc()), ctypes.c_void_p()
    call("nvrtcCreateProgram", ctypes.byref(program), source, b"convolution.cu", 0, None, None)
    options = (b"--gpu-architecture=sm_90a", b"--std=c++17")
    call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    call("nvrtcGetCUBINSize", program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    call("nvrtcGetCUBIN", program, code)
    call("nvrtcDestroyProgram", ctypes.byref(program))
    return code.raw


def kernel_source(columns: int, tail: int, stages: int, dtype: torch.dtype) -> str:
    """The kernel's text with its constants, and with the registers of one product spelled out."""
    registers = columns // 2
    constants: dict[str, Any] = {"BN": columns, "TAIL": tail, "STAGES": stages, "BF16": int(dtype == torch.bfloat16)}
    quoted = {"COLUMNS": columns, "LEFT": registers, "RIGHT": registers + 1, "ADD": registers + 2}
    constants |= {name: f'"{number}"' for name, number in quoted.items()}
    constants["ACCUMULATORS"] = '"{' + ", ".join(f"%{i}" for i in range(registers)) + '}"'
    constants["OPERANDS(d)"] = ", ".join(f'"+f"(d[{i}])' for i in range(registers))
    text = Path(__file__).with_name("convolution.cu").read_text()
    return "".join(f"#define {name} {value}\n" for name, value in constants.items()) + text


@cache
def _nvrtc() -> Any:
    """torch's own copy of the run-time compiler."""
    name = f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}"
    beside = Path(torch.__file__).parents[1] / "nvidia"
    for candidate in (name, *sorted(glob.glob(f"{beside}/*/lib/{name}"))):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise KernelError(f"{name} is not to be found")


@cache
def _cuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError(str(error)) from error


def _ask(library: Any, name: str, *arguments: Any) -> None:
    """A call of the driver or the compiler, which answer 0 if all is well."""
    if code := getattr(library, name)(*arguments):
        raise KernelError(f"{name} answered {code}")
