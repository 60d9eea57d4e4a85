"""Snow, frost, fog and spatter."""

import torch
from torch import Tensor
from torch.nn import functional as F

from petal.corruptions import linear
from petal.corruptions.blur import motion_filter, zoom
from petal.corruptions.ice import ice_textures
from petal.corruptions.random import KeyedRandom

__all__ = ["canny", "chamfer_distance", "equalise", "fog", "frost", "plasma", "snow", "spatter"]

_WATER = (175 / 255, 238 / 255, 238 / 255)
_MUD = (63 / 255, 42 / 255, 20 / 255)
# dy, dx, weight: lights the drops from one corner
_RELIEF = ((-1, -1, -2.0), (-1, 0, -1.0), (0, -1, -1.0), (0, 0, 1.0), (0, 1, 1.0), (1, 0, 1.0), (1, 1, 2.0))
_CHAMFER = {(0, 1): 1.0, (1, 1): 1.4, (1, 2): 2.1969}  # what a step costs


def snow(x: Tensor, c: tuple[float, float, float, float, int, float, float], rng: KeyedRandom) -> Tensor:
    """A whitened picture with wind-blown flakes, and the same flakes turned by 180 degrees."""
    mean, spread, factor, threshold, radius, sigma, keep = c
    height, width = x.shape[-2:]
    flakes = zoom(rng.normal((1, height, width)).mul_(spread).add_(mean), factor)
    flakes = torch.where(flakes < threshold, 0.0, flakes).clamp_(max=1.0)
    flakes = motion_filter(flakes, radius, sigma, rng.uniform((), -135.0, -45.0))
    grey = 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
    white = torch.maximum(x, grey.mul_(1.5).add_(0.5)).mul_(1.0 - keep)
    return white.add_(x, alpha=keep).add_(flakes + flakes.flip(-2, -1))


def frost(x: Tensor, c: tuple[float, float, int], rng: KeyedRandom) -> Tensor:
    """a x + b ice, with a random crop of one of five ice textures. The textures are periodic: a crop may cross an edge."""
    a, b, shrink = c
    height, width = x.shape[-2:]
    textures = ice_textures(shrink, x.device)
    count, _, tall, wide = textures.shape
    which = rng.integers((), 0, count)
    top, left = rng.integers((1,), 0, tall), rng.integers((1,), 0, wide)
    rows = (top + torch.arange(height, device=x.device)) % tall
    columns = (left + torch.arange(width, device=x.device)) % wide
    ice = textures.permute(1, 0, 2, 3)[:, which[:, None, None], rows[:, :, None], columns[:, None, :]]
    return ice.transpose(0, 1).mul(b).add_(x, alpha=a)


def fog(x: Tensor, c: tuple[float, float], rng: KeyedRandom) -> Tensor:
    """Add a cloud and bring the picture back to its range."""
    amount, decay = c
    height, width = x.shape[-2:]
    brightest = x.amax(dim=(1, 2, 3), keepdim=True)
    side = 1 << (max(height, width) - 1).bit_length()
    cloud = plasma(side, decay, rng)[:, None, :height, :width]
    return (x + amount * cloud).mul_(brightest / (brightest + amount))


def plasma(side: int, decay: float, rng: KeyedRandom) -> Tensor:
    """A cloud in [0, 1] by the diamond-square scheme on a torus, float32 [N, side, side]; side is a power of two.

    Each new point is the mean of its four neighbours plus noise uniform in -w^2..w^2; w falls by `decay` per level.
    """
    height = torch.zeros(len(rng.keys), side, side, device=rng.keys.device)
    step, wobble = side, 100.0
    while step >= 2:
        half, cells = step // 2, side // step
        noise = rng.uniform((3, cells, cells), -(wobble**2), wobble**2)
        corner = height[:, ::step, ::step]
        across = corner + corner.roll(-1, dims=1)
        centre = (across + across.roll(-1, dims=2)) / 4 + noise[:, 0]
        height[:, half::step, half::step] = centre
        height[:, ::step, half::step] = (
            centre + centre.roll(1, dims=1) + corner + corner.roll(-1, dims=2)
        ) / 4 + noise[:, 1]
        height[:, half::step, ::step] = (
            centre + centre.roll(1, dims=2) + corner + corner.roll(-1, dims=1)
        ) / 4 + noise[:, 2]
        step, wobble = half, wobble / decay
    height -= height.amin(dim=(1, 2), keepdim=True)
    return height.div_(height.amax(dim=(1, 2), keepdim=True))


def spatter(x: Tensor, c: tuple[float, float, float, float, float, bool], rng: KeyedRandom) -> Tensor:
    """Drops of water (a lit relief of the liquid, added) or of mud (painted over)."""
    mean, spread, sigma, threshold, strength, mud = c
    height, width = x.shape[-2:]
    liquid = linear.blur(rng.normal((height, width)).mul_(spread).add_(mean), sigma)
    if mud:
        mask = linear.blur((liquid > threshold).float(), strength)[:, None]
        mask = torch.where(mask < 0.8, 0.0, mask)
        return x * (1.0 - mask) + mask * torch.tensor(_MUD, device=x.device).view(3, 1, 1)
    liquid = torch.where(liquid < threshold, 0.0, liquid).clamp_(max=1.0).mul_(255.0).floor_()
    distance = chamfer_distance(canny(liquid, 50, 150), 20)
    levels = equalise(_box3(distance).floor_(), 21)
    padded = F.pad(levels, (1, 1, 1, 1), mode="reflect")
    relief = torch.zeros_like(levels)
    for dy, dx, weight in _RELIEF:
        relief.add_(padded[:, 1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width], alpha=weight)
    drops = _box3(relief.clamp_(0, 255)).round_() * liquid
    top = drops.amax(dim=(1, 2), keepdim=True)
    drops = torch.where(top > 0, drops / top.clamp(min=1.0), 0.0).mul_(strength)[:, None]
    return x + drops * torch.tensor(_WATER, device=x.device).view(3, 1, 1)


def _box3(planes: Tensor) -> Tensor:
    """Mean of 3 x 3, mirrored at the border; planes [N, H, W]."""
    height, width = planes.shape[-2:]
    padded = F.pad(planes, (1, 1, 1, 1), mode="reflect").double()
    lines = padded[:, :height] + padded[:, 1 : height + 1] + padded[:, 2:]
    return ((lines[..., :width] + lines[..., 1 : width + 1] + lines[..., 2:]) * (1.0 / 9.0)).to(planes.dtype)


def canny(levels: Tensor, low: float, high: float) -> Tensor:
    """Edges of whole levels [N, H, W] as OpenCV's Canny finds them (3 x 3 Sobel, L1 gradient): bool [N, H, W]."""
    height, width = levels.shape[-2:]
    padded = F.pad(levels[:, None], (1, 1, 1, 1), mode="replicate")[:, 0].long()
    smooth = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    dx = smooth[..., 2:] - smooth[..., :-2]
    smooth = padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]
    dy = smooth[:, 2:] - smooth[:, :-2]
    size = dx.abs() + dy.abs()
    around = F.pad(size, (1, 1, 1, 1))

    def beside(down: int, right: int) -> Tensor:
        return around[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]

    # the gradient's direction, in sectors bounded by tan 22.5 and tan 67.5 degrees (in 2^-15)
    flat = dx.abs() * 13573
    steep = flat + (dx.abs() << 16)
    rise = dy.abs() << 15
    same_sign = (dx ^ dy) >= 0
    across = (size > beside(0, -1)) & (size >= beside(0, 1))
    along = (size > beside(-1, 0)) & (size >= beside(1, 0))
    falling = (size > beside(-1, -1)) & (size > beside(1, 1))
    rising = (size > beside(-1, 1)) & (size > beside(1, -1))
    slanted = torch.where(same_sign, falling, rising)
    thin = torch.where(rise < flat, across, torch.where(rise > steep, along, slanted)) & (size > low)

    # what is connected to a strong edge stays; checked every eight steps, so that the device is seldom waited for
    edges = (thin & (size > high)).float()
    allowed = thin.float()
    while True:
        before = edges
        for _ in range(8):
            edges = F.max_pool2d(edges[:, None], 3, stride=1, padding=1)[:, 0].mul_(allowed)
        if torch.equal(before, edges):
            return edges > 0


def chamfer_distance(edges: Tensor, cut: int) -> Tensor:
    """Distance of every pixel to the nearest edge, at most `cut`, float32 [N, H, W].

    Steps to the 16 nearest directions cost 1 (straight), 1.4 (diagonal) and 2.1969 (a knight's move), OpenCV's 5 x 5 mask
    in 16-bit fixed point. A shortest path takes its steps in any order, so multiples of one direction are allowed after
    the other, by doubling.
    """
    far_away = cut << 16
    distance = torch.where(edges, 0, far_away).int()
    height, width = edges.shape[-2:]
    for dy, dx in ((dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)):
        step = _CHAMFER.get((min(abs(dy), abs(dx)), max(abs(dy), abs(dx))))
        if step is None:
            continue
        cost = round(step * (1 << 16))
        times = 1
        while times * cost < far_away and times * abs(dy) < height and times * abs(dx) < width:
            rows, columns = times * dy, times * dx
            near = distance[:, max(rows, 0) : height + min(rows, 0), max(columns, 0) : width + min(columns, 0)]
            far = distance[:, max(-rows, 0) : height + min(-rows, 0), max(-columns, 0) : width + min(-columns, 0)]
            far.copy_(torch.minimum(far, near + times * cost))
            times *= 2
    return distance.float() / 65536.0


def equalise(levels: Tensor, bins: int) -> Tensor:
    """Histogram equalisation of whole levels 0..bins-1 [N, H, W] to 0..255, as OpenCV's: the lowest level becomes 0."""
    flat = levels.flatten(1).long()
    counts = torch.zeros(len(flat), bins, device=levels.device).scatter_add_(1, flat, torch.ones_like(flat).float())
    total = float(flat.shape[1])
    present = counts > 0
    lowest = present & (present.cumsum(dim=1) == 1)
    first = (counts * lowest).sum(dim=1, keepdim=True)
    scale = 255.0 / (total - first).clamp(min=1.0)
    table = ((counts.cumsum(dim=1) - first).clamp_(min=0.0) * scale).round_().clamp_(max=255.0)
    constant = torch.arange(bins, device=levels.device, dtype=table.dtype)
    return torch.where(first == total, constant, table).gather(1, flat).view_as(levels)
