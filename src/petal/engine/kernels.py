"""Triton kernels of the engine. Each has a plain-torch twin beside the function that calls it (`passes`, `views`)."""

import math
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter runs kernels on CPU tensors
BLOCK = 1024


def _grid(count: int, block: int = BLOCK) -> tuple[int]:
    return (triton.cdiv(count, block),)


@triton.jit
def _total_gradient(
    grad, parameter, mean, var, ok, unscale, count, weight, damping, PRIOR: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(grad + at, inside, other=0.0)
    if SCALED:
        g *= tl.load(unscale)
    if PRIOR:
        p = tl.load(parameter + at, inside, other=0.0)
        m = tl.load(mean + at, inside, other=0.0)
        v = tl.load(var + at, inside, other=1.0)
        g += weight * (p - m) / (v + damping)
    tl.store(grad + at, g, inside)
    bits = g.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if tl.max(bits, 0) >= 0x7F800000:
        tl.store(ok, 0)


def total_gradient(
    grad: Tensor, parameter: Tensor, mean: Tensor | None, var: Tensor | None, weight: float, damping: float, ok: Tensor,
    unscale: Tensor | None,
) -> None:  # fmt: skip
    """`passes.total_gradient_`."""
    prior = mean is not None and var is not None and weight != 0
    count = grad.numel()
    _total_gradient[_grid(count)](
        grad, parameter, mean if prior else grad, var if prior else grad, ok, grad if unscale is None else unscale, count,
        weight, damping, PRIOR=prior, SCALED=unscale is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _chosen(counts, rank, PASSES: tl.constexpr):
    """The leading digits of the order statistic, four bits a pass: the pivots that have at most `rank` values below."""
    key = 0
    for number in tl.static_range(PASSES):
        below = tl.load(counts + number * 16 + tl.arange(0, 16))
        digit = tl.sum(((below <= rank) & (tl.arange(0, 16) > 0)).to(tl.int32), 0)
        key += digit << (28 - 4 * number)
    return key


@triton.jit
def _count_below(values, counts, task, PASS: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr):
    """How many |v|, as bits, lie below each of fifteen pivots: the digits found so far, followed by 1..15.

    `task` holds how many values there are, the rank sought, and whether there is anything to do.
    """
    count, rank = tl.load(task), tl.load(task + 1)
    start = tl.program_id(0) * (BLOCK * LOOPS)
    if (tl.load(task + 2) != 0) & (start < count):
        key = _chosen(counts, rank, PASS)
        pivots = key + (tl.arange(0, 16) << (28 - 4 * PASS))
        total = tl.zeros([16, BLOCK], dtype=tl.int32)
        for i in range(LOOPS):
            at = start + i * BLOCK + tl.arange(0, BLOCK)
            bits = tl.load(values + at, at < count, other=float("nan")).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            if PASS == 0:  # the highest digit has three bits: pivots beyond them are negative as int32
                total += ((bits[None, :] < pivots[:, None]) | (pivots[:, None] < 0)).to(tl.int32)
            else:
                total += (bits[None, :] < pivots[:, None]).to(tl.int32)
        tl.atomic_add(counts + PASS * 16 + tl.arange(0, 16), tl.sum(total, 1), sem="relaxed")


@triton.jit
def _neighbour(values, counts, found, task, BLOCK: tl.constexpr, LOOPS: tl.constexpr):
    """The order statistic itself, how many |v| are not above it, and the smallest one above it."""
    count, rank = tl.load(task), tl.load(task + 1)
    start = tl.program_id(0) * (BLOCK * LOOPS)
    if (tl.load(task + 2) != 0) & (start < count):
        key = _chosen(counts, rank, 8)
        total = tl.zeros([BLOCK], dtype=tl.int32)
        least = tl.full([BLOCK], 0x7FFFFFFF, dtype=tl.int32)
        for i in range(LOOPS):
            at = start + i * BLOCK + tl.arange(0, BLOCK)
            bits = tl.load(values + at, at < count, other=float("nan")).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            total += (bits <= key).to(tl.int32)
            least = tl.minimum(least, tl.where(bits > key, bits, 0x7FFFFFFF))
        tl.store(found, key)
        tl.atomic_add(found + 1, tl.sum(total, 0), sem="relaxed")
        tl.atomic_min(found + 2, tl.min(least, 0), sem="relaxed")


@triton.jit
def _keep_between(values, low, high, kept, tally, count, ROOM: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr):
    """Collect the |v| between two bounds, in any order, and count them and those below."""
    low_bits, high_bits = tl.load(low), tl.load(high)
    below = tl.zeros([BLOCK], dtype=tl.int32)
    start = tl.program_id(0) * (BLOCK * LOOPS)
    for i in range(LOOPS):
        at = start + i * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(values + at, at < count, other=float("nan"))
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        below += (bits < low_bits).to(tl.int32)
        wanted = ((bits >= low_bits) & (bits <= high_bits)).to(tl.int32)
        slot = tl.atomic_add(tally + 1, tl.sum(wanted, 0), sem="relaxed") + tl.cumsum(wanted, 0) - 1
        tl.store(kept + slot, value, (wanted != 0) & (slot < ROOM))
    tl.atomic_add(tally, tl.sum(below, 0), sem="relaxed")


ROOM = 1 << 21  # values that fit between the bounds
SAMPLE = 1 << 15


def _order_statistics(values: Tensor, task: Tensor, count: int) -> Tensor:
    """Key, number not above it, and next larger one, as bits, for the rank in `task`: digit by digit, four bits a pass."""
    counts = torch.zeros(8, 16, dtype=torch.int32, device=values.device)
    found = torch.zeros(3, dtype=torch.int32, device=values.device)
    found[2:].fill_(0x7FFFFFFF)
    loops = 16 if count > ROOM else 1
    grid = _grid(count, 1024 * loops)
    for number in range(8):
        _count_below[grid](values, counts, task, PASS=number, BLOCK=1024, LOOPS=loops, num_warps=8)
    _neighbour[grid](values, counts, found, task, BLOCK=1024, LOOPS=loops, num_warps=8)
    return found


def squared_quantile(grad: Tensor, q: float, sample: int = SAMPLE, room: int = ROOM) -> Tensor:
    """`passes.squared_quantile`, exact. Squaring keeps the order: the statistics of g² are those of |g|, squared.

    A sample gives bounds that almost surely hold the statistic between them; one pass collects what lies there, and the
    search by digits works on that alone. If the bounds miss, or too much lies between them, the search over all values,
    launched as well but idle otherwise, does its work: the host never needs to know.
    """
    count, device = grad.numel(), grad.device
    rank = q * (count - 1)
    lower = int(rank)
    everything = torch.ones(3, dtype=torch.int32, device=device)
    everything[0:1].fill_(count)
    everything[1:2].fill_(lower)
    if count <= 4 * sample:
        found, before = _order_statistics(grad, everything, count), torch.zeros_like(everything[:1])
    else:
        drawn = grad[:: (count // sample) | 1].abs().view(torch.int32).sort().values
        margin = 6 * math.sqrt(len(drawn) * q * (1 - q)) + 2
        first, last = int(q * len(drawn) - margin), int(q * len(drawn) + margin)
        low = drawn[first : first + 1] if first >= 0 else torch.zeros_like(drawn[:1])
        high = drawn[last : last + 1] if last < len(drawn) else torch.full_like(drawn[:1], 0x7F800000)
        kept = torch.empty(room, dtype=torch.float32, device=device)
        tally = torch.zeros(2, dtype=torch.int32, device=device)
        _keep_between[_grid(count, 1024 * 8)](
            grad, low, high, kept, tally, count, ROOM=room, BLOCK=1024, LOOPS=8, num_warps=4
        )
        inside = lower - tally[:1]
        hit = (inside >= 0) & (inside + 1 < tally[1:]) & (tally[1:] <= room)
        part = torch.cat([tally[1:], inside, hit.to(torch.int32)])
        everything[2:] = (~hit).to(torch.int32)
        found = torch.where(hit, _order_statistics(kept, part, room), _order_statistics(grad, everything, count))
        before = torch.where(hit, tally[:1], 0)
    values = found.view(torch.float32).square()
    low_value = values[:1]
    if rank == lower:
        return low_value
    upper = torch.where(found[1:2] + before > lower + 1, low_value, values[2:])
    return low_value + (upper - low_value) * (rank - lower)


@triton.jit
def _update(
    grad, parameter, teacher, teacher_low, source, first, second, uniform, numbers, threshold, ok, restored, rates,
    count, lr, beta1, beta2, eps, probability,
    KIND: tl.constexpr, RATES: tl.constexpr, NESTEROV: tl.constexpr, TEACHER: tl.constexpr, LOW: tl.constexpr,
    RESTORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(ok) != 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(grad + at, inside, other=0.0)
        p = tl.load(parameter + at, inside, other=0.0)
        if KIND == 0:  # Adam
            m = tl.load(first + at, inside, other=0.0)
            v = tl.load(second + at, inside, other=0.0)
            m += (g - m) * (1 - beta1)
            v = v * beta2 + g * g * (1 - beta2)
            tl.store(first + at, m, inside)
            tl.store(second + at, v, inside)
            way = m / (tl.sqrt(v) * tl.load(numbers + 1) + eps) * tl.load(numbers)
        elif KIND == 1:  # SGD with momentum
            m = tl.load(first + at, inside, other=0.0) * beta1 + g
            tl.store(first + at, m, inside)
            way = lr * (g + beta1 * m if NESTEROV else m)
        else:
            way = lr * g
        if RATES:
            way *= tl.load(rates + at, inside, other=0.0)
        p -= way
        if TEACHER:
            t = tl.load(teacher + at, inside, other=0.0)
            t += (p - t) * tl.load(numbers + 2)
            tl.store(teacher + at, t, inside)
            if LOW:
                tl.store(teacher_low + at, t.to(teacher_low.dtype.element_ty), inside)
        if RESTORE > 0:
            if RESTORE == 1:
                back = (g * g < tl.load(threshold)) & inside
            else:
                back = (tl.load(uniform + at, inside, other=1.0) < probability) & inside
            p = tl.where(back, tl.load(source + at, inside, other=0.0), p)
            tl.atomic_add(restored, tl.sum(back.to(tl.int32), 0), sem="relaxed")
        tl.store(parameter + at, p, inside)


def update(
    rule: Any, grad: Tensor, parameter: Tensor, teacher: Tensor | None, source: Tensor | None, state: list[Tensor],
    numbers: Tensor, threshold: Tensor | None, uniform: Tensor | None, probability: float, ok: Tensor,
    teacher_low: Tensor | None, restored: Tensor, rates: Tensor | None,
) -> None:  # fmt: skip
    """`passes.update_`."""
    none = grad  # a pointer for what is not read
    count = grad.numel()
    restore = 0 if source is None else 1 if threshold is not None else 2 if uniform is not None else 0
    _update[_grid(count)](
        grad, parameter, none if teacher is None else teacher, none if teacher_low is None else teacher_low,
        none if source is None else source, state[0] if state else none, state[1] if len(state) > 1 else none,
        none if uniform is None else uniform, numbers, none if threshold is None else threshold, ok, restored,
        none if rates is None else rates, count, rule.lr, rule.beta1, rule.beta2, rule.eps, probability,
        KIND=0 if rule.kind == "adam" else 1 if state else 2, RATES=rates is not None, NESTEROV=rule.nesterov,
        TEACHER=teacher is not None, LOW=teacher_low is not None, RESTORE=restore, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _gray(r, g, b):
    return 0.2989 * r + 0.587 * g + 0.114 * b


@triton.jit
def _unit(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _hue_channel(n, h6, v, chroma):
    k = n + h6
    k = k - tl.floor(k / 6.0) * 6.0
    return v - chroma * tl.minimum(tl.maximum(tl.minimum(k, 4.0 - k), 0.0), 1.0)


@triton.jit
def _colour(r, g, b, op, factor, mean):
    """One colour change of a pixel: brightness, contrast, saturation, hue or gamma."""
    if op == 0:
        r, g, b = _unit(r * factor), _unit(g * factor), _unit(b * factor)
    elif op == 1:
        shift = mean * (1 - factor)
        r, g, b = _unit(r * factor + shift), _unit(g * factor + shift), _unit(b * factor + shift)
    elif op == 2:
        shift = _gray(r, g, b) * (1 - factor)
        r, g, b = _unit(r * factor + shift), _unit(g * factor + shift), _unit(b * factor + shift)
    elif op == 3:
        v = tl.maximum(tl.maximum(r, g), b)
        spread = v - tl.minimum(tl.minimum(r, g), b)
        d = tl.where(spread == 0, 1.0, spread)
        # by order and not by equality with v: the compiler may round r, g and b differently in the two places
        h6 = tl.where(g >= b, 2.0 + (b - r) / d, 4.0 + (r - g) / d)
        h6 = tl.where((r >= g) & (r >= b), (g - b) / d, h6) + 6.0 * factor
        r, g, b = _hue_channel(5.0, h6, v, spread), _hue_channel(3.0, h6, v, spread), _hue_channel(1.0, h6, v, spread)
    else:
        r = tl.exp2(factor * tl.log2(tl.maximum(r, 1e-8)))
        g = tl.exp2(factor * tl.log2(tl.maximum(g, 1e-8)))
        b = tl.exp2(factor * tl.log2(tl.maximum(b, 1e-8)))
    return r, g, b


@triton.jit
def _pixels(base, inside, pixels):
    r, g = tl.load(base, inside, other=0.0), tl.load(base + pixels, inside, other=0.0)
    return _unit(r), _unit(g), _unit(tl.load(base + 2 * pixels, inside, other=0.0))


@triton.jit
def _view_colours(x, order, factors, means, out, images, rows, pixels, GRAYS: tl.constexpr, BLOCK: tl.constexpr):
    """The colour chain of every image of every view; with GRAYS, its mean grey at the moment its contrast is changed."""
    view, image = tl.program_id(0) // images, tl.program_id(0) % images
    row = view * rows + (image if rows > 1 else 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pixels
    r, g, b = _pixels(x + image * 3 * pixels + at, inside, pixels)
    mean = 0.0 if GRAYS else tl.load(means + tl.program_id(0))
    waiting = 1
    for slot in tl.static_range(5):
        op = tl.load(order + view * 5 + slot)
        if GRAYS:
            waiting = tl.where(op == 1, 0, waiting)
        if waiting == 1:
            r, g, b = _colour(r, g, b, op, tl.load(factors + row * 5 + op), mean)
    if GRAYS:
        total = tl.sum(tl.where(inside, _gray(r, g, b), 0.0), 0)
        tl.atomic_add(means + tl.program_id(0), total / pixels, sem="relaxed")
    else:
        base = out + tl.program_id(0).to(tl.int64) * 3 * pixels + at
        tl.store(base, r, inside)
        tl.store(base + pixels, g, inside)
        tl.store(base + 2 * pixels, b, inside)


@triton.jit
def _view_resample(x, affine, out, images, rows, height, width, MARGIN: tl.constexpr, BLOCK: tl.constexpr):
    """Bilinear samples at affine positions, with a margin; edge pixels repeat."""
    view, image = tl.program_id(0) // images, tl.program_id(0) % images
    matrix = affine + (view * rows + (image if rows > 1 else 0)) * 6
    wide = width + 2 * MARGIN
    pixels = (height + 2 * MARGIN) * wide
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pixels
    u = (at % wide).to(tl.float32) - MARGIN - (width - 1) / 2
    v = (at // wide).to(tl.float32) - MARGIN - (height - 1) / 2
    sx = tl.load(matrix) * u + tl.load(matrix + 1) * v + tl.load(matrix + 2) + (width - 1) / 2
    sy = tl.load(matrix + 3) * u + tl.load(matrix + 4) * v + tl.load(matrix + 5) + (height - 1) / 2
    sx = tl.minimum(tl.maximum(sx, 0.0), width - 1.0)
    sy = tl.minimum(tl.maximum(sy, 0.0), height - 1.0)
    x0, y0 = tl.floor(sx), tl.floor(sy)
    fx, fy = sx - x0, sy - y0
    left, top = x0.to(tl.int32), y0.to(tl.int32)
    right, bottom = tl.minimum(left + 1, width - 1), tl.minimum(top + 1, height - 1)
    for channel in tl.static_range(3):
        base = x + (tl.program_id(0).to(tl.int64) * 3 + channel) * height * width
        upper = tl.load(base + top * width + left, inside, other=0.0) * (1 - fx)
        upper += tl.load(base + top * width + right, inside, other=0.0) * fx
        lower = tl.load(base + bottom * width + left, inside, other=0.0) * (1 - fx)
        lower += tl.load(base + bottom * width + right, inside, other=0.0) * fx
        target = out + (tl.program_id(0).to(tl.int64) * 3 + channel) * pixels + at
        tl.store(target, upper * (1 - fy) + lower * fy, inside)


@triton.jit
def _view_finish(x, taps, noise, out, images, rows, height, width, strength, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """Blur, noise and clip; written in channels-last order."""
    view, image = tl.program_id(0) // images, tl.program_id(0) % images
    weights = taps + (view * rows + (image if rows > 1 else 0)) * TAPS
    wide = width + TAPS - 1
    pixels = height * width
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pixels
    column, line = at % width, at // width
    for channel in tl.static_range(3):
        plane = tl.program_id(0).to(tl.int64) * 3 + channel
        base = x + plane * (height + TAPS - 1) * wide + line * wide + column
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for i in tl.static_range(TAPS):
            row_total = tl.zeros([BLOCK], dtype=tl.float32)
            for j in tl.static_range(TAPS):
                row_total += tl.load(base + i * wide + j, inside, other=0.0) * tl.load(weights + j)
            total += row_total * tl.load(weights + i)
        total += strength * tl.load(noise + plane * pixels + at, inside, other=0.0)
        tl.store(out + (tl.program_id(0).to(tl.int64) * pixels + at) * 3 + channel, _unit(total), inside)


def make_views(
    x: Tensor, order: Tensor, factors: Tensor, affine: Tensor, taps: Tensor, noise: Tensor, strength: float
) -> Tensor:
    """`views.make_views`: [K, N, 3, H, W] in channels-last order from float32 images [N, 3, H, W]."""
    views, rows = factors.shape[:2]
    images, _, height, width = x.shape
    x = x.contiguous()
    margin = taps.shape[-1] // 2
    block = 1024
    programs = views * images
    means = torch.zeros(programs, dtype=torch.float32, device=x.device)
    coloured = torch.empty(views, images, 3, height, width, dtype=torch.float32, device=x.device)
    grid = (programs, triton.cdiv(height * width, block))
    arguments = (order.to(torch.int32), factors.contiguous(), means)
    for grays in (True, False):
        _view_colours[grid](x, *arguments, coloured, images, rows, height * width, GRAYS=grays, BLOCK=block)
    high, wide = height + 2 * margin, width + 2 * margin
    sampled = torch.empty(views, images, 3, high, wide, dtype=torch.float32, device=x.device)
    _view_resample[(programs, triton.cdiv(high * wide, block))](
        coloured, affine.contiguous(), sampled, images, rows, height, width, MARGIN=margin, BLOCK=block
    )
    out = torch.empty(views, images, height, width, 3, dtype=torch.float32, device=x.device)
    _view_finish[grid](
        sampled, taps.contiguous(), noise, out, images, rows, height, width, strength, TAPS=taps.shape[-1], BLOCK=block
    )
    return out.permute(0, 1, 4, 2, 3)


@triton.jit
def _normalise(x, mean, rstd, weight, bias, out, rows, channels, STEP: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.program_id(0) * STEP + tl.arange(0, STEP)
    centre, shift = tl.load(mean + channel)[None, :], tl.load(bias + channel)[None, :]
    scale = (tl.load(rstd + channel) * tl.load(weight + channel))[None, :]
    # last pixels first: the convolution before wrote them last and the next one reads them last, so they are in the cache
    row = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at, inside = row[:, None] * channels + channel[None, :], (row < rows)[:, None]
    value = (tl.load(x + at, inside, other=0.0).to(tl.float32) - centre) * scale + shift
    tl.store(out + at, tl.maximum(value, 0.0).to(out.dtype.element_ty), inside)


def normalise(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`relu((x - mean) * rstd * weight + bias)` of channels-last images, for multiples of 32 channels."""
    out = torch.empty_like(x, memory_format=torch.channels_last)
    channels, step, block = x.shape[1], 32, 64
    rows = x.numel() // channels
    _normalise[(channels // step, triton.cdiv(rows, block))](
        x, mean, rstd, weight, bias, out, rows, channels, STEP=step, BLOCK=block, num_warps=4
    )
    return out
