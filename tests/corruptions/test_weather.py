import numpy as np
import pytest
import torch
from scipy import ndimage

from petal.corruptions import corrupt, ice, linear, weather
from petal.corruptions.random import KeyedRandom


def loop_plasma(side: int, decay: float, noises: list[np.ndarray]) -> np.ndarray:
    """Diamond-square point by point; the noise of a level is (centres, tops, lefts)."""
    at = np.zeros((side, side))
    step = side
    for noise in noises:
        half = step // 2
        for i in range(0, side, step):
            for j in range(0, side, step):
                corners = [at[(i + a) % side, (j + b) % side] for a in (0, step) for b in (0, step)]
                at[i + half, j + half] = sum(corners) / 4 + noise[0, i // step, j // step]
        for i in range(0, side, step):
            for j in range(0, side, step):
                up, left = at[(i - half) % side, j + half], at[i + half, (j - half) % side]
                here, centre = at[i, j], at[i + half, j + half]
                right, below = at[i, (j + step) % side], at[(i + step) % side, j]
                at[i, j + half] = (up + centre + here + right) / 4 + noise[1, i // step, j // step]
                at[i + half, j] = (left + centre + here + below) / 4 + noise[2, i // step, j // step]
        step = half
    at -= at.min()
    return at / at.max()


@pytest.mark.parametrize("side,decay", [(32, 3.0), (16, 1.4)])
def test_plasma_is_diamond_square(side: int, decay: float) -> None:
    got = weather.plasma(side, decay, KeyedRandom(torch.arange(2)))
    draws = KeyedRandom(torch.arange(2))
    noises, wobble, cells = [], 100.0, 1
    while cells < side:
        noises.append(draws.uniform((3, cells, cells), -(wobble**2), wobble**2).double().numpy())
        wobble, cells = wobble / decay, cells * 2
    for i in range(2):
        np.testing.assert_allclose(got[i], loop_plasma(side, decay, [n[i] for n in noises]), atol=1e-5)


def test_fog_adds_cloud_and_keeps_the_range(pictures: torch.Tensor) -> None:
    cloud = weather.plasma(32, 1.75, KeyedRandom(torch.arange(7)))[:, None].numpy()
    x = pictures.numpy()
    top = x.max(axis=(1, 2, 3), keepdims=True)
    expected = ((x + 1.5 * cloud) * top / (top + 1.5)).clip(0, 1)
    np.testing.assert_allclose(corrupt(pictures, "fog", 5, keys=torch.arange(7)), expected, atol=1e-6)


@pytest.mark.parametrize("height,width", [(28, 28), (40, 33)])
def test_fog_takes_the_corner_of_a_larger_cloud(height: int, width: int) -> None:
    x = torch.full((2, 3, height, width), 0.5)
    side = 32 if height == 28 else 64
    cloud = weather.plasma(side, 3, KeyedRandom(torch.arange(2)))[:, None, :height, :width]
    assert torch.allclose(corrupt(x, "fog", 1, keys=torch.arange(2)), (0.5 + 0.2 * cloud).expand_as(x) * 0.5 / 0.7)


def test_snow_whitens_and_adds_symmetric_flakes(pictures: torch.Tensor) -> None:
    black = corrupt(torch.zeros(7, 3, 32, 32), "snow", 3, keys=torch.arange(7))
    veil = 0.1 * 0.5  # of a black picture: (1 - .9) (1.5 * 0 + .5)
    flakes = (black - veil).numpy()
    assert flakes.min() > -1e-6
    assert flakes.max() > 0.1
    np.testing.assert_allclose(flakes, flakes[..., ::-1, ::-1], atol=1e-6)
    x = pictures.double().numpy()
    grey = np.einsum("nchw,c->nhw", x, [0.299, 0.587, 0.114])[:, None]
    expected = 0.9 * x + 0.1 * np.maximum(x, 1.5 * grey + 0.5) + flakes
    dim = flakes.max(axis=(1, 2, 3)) < 0.9  # else the black picture's flakes were clipped
    assert dim.any()
    got = corrupt(pictures, "snow", 3, keys=torch.arange(7))
    np.testing.assert_allclose(got[torch.from_numpy(dim)], expected[dim].clip(0, 1), atol=1e-6)


def test_snow_flakes_follow_the_procedure() -> None:
    draws = KeyedRandom(torch.arange(1))
    layer = draws.normal((32, 32))[0].double().numpy() * 0.3 + 0.15
    angle = float(draws.uniform((), -135, -45)[0])
    middle = layer[6:25, 6:25]  # 32 / 1.75 -> 19 pixels, stretched to 33, trimmed to 32
    flakes = ndimage.zoom(middle, 1.75, order=1, mode="nearest")[:32, :32]
    flakes = np.where(flakes < 0.55, 0, flakes).clip(0, 1)
    weights = np.exp(-(np.arange(21) ** 2) / (2 * 4.0**2))
    blown = np.zeros((32, 32))
    for i, weight in enumerate(weights / weights.sum()):
        dx = int(np.ceil(i * np.cos(np.deg2rad(angle)) - 0.5))
        dy = int(np.ceil(i * np.sin(np.deg2rad(angle)) - 0.5))
        blown += weight * flakes[(np.arange(32) + dy).clip(0, 31)][:, (np.arange(32) + dx).clip(0, 31)]
    expected = (0.05 + blown + blown[::-1, ::-1]).clip(0, 1)
    got = corrupt(torch.zeros(1, 3, 32, 32), "snow", 3, keys=torch.arange(1))
    np.testing.assert_allclose(got[0, 0], expected, atol=1e-5)


def test_frost_is_a_weighted_crop_of_ice(pictures: torch.Tensor) -> None:
    got = corrupt(pictures, "frost", 1, keys=torch.arange(7))
    draws = KeyedRandom(torch.arange(7))
    textures = ice.ice_textures(5, torch.device("cpu"))
    which, top, left = draws.integers((), 0, 5), draws.integers((1,), 0, 128)[:, 0], draws.integers((1,), 0, 128)[:, 0]
    for i in range(7):
        crop = textures[which[i]].roll((-int(top[i]), -int(left[i])), (1, 2))[:, :32, :32]
        np.testing.assert_allclose(got[i], (pictures[i] + 0.2 * crop).clamp(0, 1), atol=1e-6)


def test_ice_is_five_different_bluish_periodic_panes() -> None:
    full, small = (ice.ice_textures(shrink, torch.device("cpu")) for shrink in (1, 5))
    assert full.shape == (5, 3, 640, 640)
    assert torch.equal(small, full[..., 2::5, 2::5])
    assert full.min() >= 0
    assert full.max() <= 1
    for pane in small:
        assert pane[2].mean() > pane[0].mean()
        inside = pane.diff(dim=1).abs().mean()
        assert (pane[:, 0] - pane[:, -1]).abs().mean() < 1.6 * inside  # no seam
    distance = torch.cdist(small.flatten(1), small.flatten(1)) + 1e3 * torch.eye(5)
    assert distance.min() > 10


def test_ice_varies_from_pane_to_pane_more_than_inside_a_crop() -> None:
    """As the benchmark's photographs do: crops of 32 pixels have these spreads (mean of the channels)."""
    crops = ice.ice_textures(5, torch.device("cpu")).mean(dim=1).unfold(1, 32, 32).unfold(2, 32, 32)
    assert crops.mean().item() == pytest.approx(0.636, abs=0.01)
    assert crops.mean(dim=(3, 4)).std().item() == pytest.approx(0.152, abs=0.015)
    assert crops.var(dim=(3, 4)).mean().sqrt().item() == pytest.approx(0.092, abs=0.01)
    neighbours = crops.diff(dim=3).abs().mean() + crops.diff(dim=4).abs().mean()
    assert neighbours.item() == pytest.approx(0.148, rel=0.1)


@pytest.mark.parametrize(("which", "photograph"), list(enumerate([0.72, 0.88, 0.88, 0.63, 0.91])))
def test_amplitudes_of_ice_fall_with_frequency(which: int, photograph: float) -> None:
    """As frequency ** -slope over the octaves from 1/64 to 1/2 a pixel; the slopes are those of the benchmark's pictures."""
    grey = ice.ice_textures(1, torch.device("cpu"))[which].mean(dim=0).double().numpy()
    power = np.abs(np.fft.fft2(grey - grey.mean())) ** 2
    frequency = np.hypot(np.fft.fftfreq(640)[:, None], np.fft.fftfreq(640))
    octaves = [2.0**-k for k in range(6, 0, -1)]
    levels = [np.log2(power[(low <= frequency) & (frequency < 2 * low)].mean()) / 2 for low in octaves[:-1]]
    slope = -np.polyfit(range(len(levels)), levels, 1)[0]
    assert slope == pytest.approx(photograph, abs=0.15)


def test_frost_works_on_pictures_larger_than_the_ice() -> None:
    out = corrupt(torch.full((1, 3, 150, 140), 0.3), "frost", 3, keys=torch.tensor([4]))
    assert out.shape == (1, 3, 150, 140)
    assert torch.equal(out[..., 128:, :12], out[..., :22, :12])


def test_mud_follows_the_procedure(pictures: torch.Tensor) -> None:
    layer = KeyedRandom(torch.arange(7)).normal((32, 32)).double().numpy() * 0.1 + 0.65
    got = corrupt(pictures, "spatter", 5, keys=torch.arange(7))
    for i in range(7):
        liquid = ndimage.gaussian_filter(layer[i], 0.5, mode="nearest", truncate=4)
        mask = ndimage.gaussian_filter((liquid > 0.68).astype(float), 0.6, mode="nearest", truncate=4)
        mask[mask < 0.8] = 0
        colour = np.array([63, 42, 20])[:, None, None] / 255
        np.testing.assert_allclose(got[i], pictures[i].numpy() * (1 - mask) + mask * colour, atol=1e-6)


def liquids(height: int, width: int) -> torch.Tensor:
    layers = []
    for i, (mean, spread, sigma) in enumerate(((0.62, 0.1, 0.7), (0.65, 0.3, 1.0), (0.65, 0.3, 3.0), (0.5, 0.01, 1.0))):
        layer = KeyedRandom(torch.tensor([i, i + 9])).normal((height, width)).mul(spread).add(mean)
        layers.append(linear.blur(layer, sigma))
    liquid = torch.cat(layers)
    return torch.where(liquid < 0.69, 0.0, liquid).clamp(max=1).mul(255).floor()


@pytest.mark.parametrize("height,width", [(32, 32), (90, 60)])
def test_the_parts_of_water_are_opencvs(height: int, width: int) -> None:
    cv2 = pytest.importorskip("cv2")
    liquid = liquids(height, width)
    edges = weather.canny(liquid, 50, 150)
    distance = weather.chamfer_distance(edges, 20)
    assert edges.any()
    for i in range(len(liquid)):
        expected = cv2.Canny(liquid[i].byte().numpy(), 50, 150)
        np.testing.assert_array_equal(edges[i], expected > 0)
        far = np.minimum(cv2.distanceTransform(255 - expected, cv2.DIST_L2, 5), 20)
        np.testing.assert_allclose(distance[i], far, atol=1e-4)
        levels = cv2.blur(far, (3, 3)).astype(np.uint8)
        boxed = weather._box3(torch.from_numpy(far)[None]).floor()
        np.testing.assert_array_equal(boxed[0], levels)
        np.testing.assert_array_equal(weather.equalise(boxed, 21)[0], cv2.equalizeHist(levels))


def test_chamfer_distance_is_a_shortest_path() -> None:
    edges = torch.zeros(1, 40, 40, dtype=torch.bool)
    edges[0, 20, 20] = edges[0, 3, 35] = True
    got = weather.chamfer_distance(edges, 20)[0].numpy()

    def along(dy: int, dx: int) -> float:  # in each octant: knight's moves, and straight or diagonal ones for the rest
        long, short = max(abs(dy), abs(dx)), min(abs(dy), abs(dx))
        if 2 * short <= long:
            return short * 2.1969 + (long - 2 * short)
        return (long - short) * 2.1969 + (2 * short - long) * 1.4

    expected = [[min(along(i - 20, j - 20), along(i - 3, j - 35), 20) for j in range(40)] for i in range(40)]
    np.testing.assert_allclose(got, expected, atol=1e-3)


def test_water_adds_the_lit_relief(pictures: torch.Tensor) -> None:
    cv2 = pytest.importorskip("cv2")
    got = corrupt(pictures, "spatter", 3, keys=torch.arange(7))
    layer = linear.blur(KeyedRandom(torch.arange(7)).normal((32, 32)).mul(0.3).add(0.65), 1.0).numpy()
    for i in range(7):
        liquid = (np.where(layer[i] < 0.69, 0, layer[i]) * np.float32(255)).astype(np.uint8)
        far = np.minimum(cv2.distanceTransform(255 - cv2.Canny(liquid, 50, 150), cv2.DIST_L2, 5), 20)
        levels = cv2.equalizeHist(cv2.blur(far, (3, 3)).astype(np.uint8))
        relief = cv2.filter2D(levels, cv2.CV_8U, np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]))
        drops = cv2.blur(relief, (3, 3)).astype(np.float64) * liquid
        drops *= 0.5 / drops.max()
        colour = np.array([175, 238, 238])[:, None, None] / 255
        np.testing.assert_allclose(got[i], (pictures[i].numpy() + drops * colour).clip(0, 1), atol=1e-5)


def test_a_dry_pane_leaves_the_picture_alone(pictures: torch.Tensor) -> None:
    out = weather.spatter(pictures, (0.3, 0.01, 1.0, 0.69, 0.5, False), KeyedRandom(torch.arange(7)))
    assert torch.equal(out, pictures)
