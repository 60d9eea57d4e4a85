"""Draw every corruption at every severity into one picture.

    python tools/make_contact_sheet.py [SOURCE] [--index 3 8 21] [--profile cifar] [--out corruptions.png]

The picture goes to docs/guides/images/corruptions.png unless --out says otherwise.

SOURCE is an image file, an .npz file with an array of 8-bit images [N, H, W, 3] (the first such array is taken), or a
Python file with a function load("test", count) that returns such an array first. Without it a made-up picture is used.
"""

import argparse
import runpy
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from petal.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, corrupt, image_keys

PICTURE = Path(__file__).parents[1] / "docs" / "guides" / "images" / "corruptions.png"
GAP, LABEL, HEAD = 6, 170, 26


def synthetic(side: int = 32) -> torch.Tensor:
    """A sun over hills, a striped ball, and rings of all colours."""
    y, x = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0, 1, side), indexing="ij")
    sky = torch.stack((0.4 + 0.4 * y, 0.6 + 0.2 * y, 0.9 - 0.1 * y))
    hills = y > 0.65 + 0.12 * torch.sin(7 * x)
    landscape = torch.where(hills, torch.stack((0.15 + 0.2 * x, 0.45 - 0.2 * y, 0.1 + 0 * x)), sky)
    sun = (x - 0.75) ** 2 + (y - 0.22) ** 2 < 0.02
    landscape = torch.where(sun, torch.tensor([1.0, 0.9, 0.4])[:, None, None], landscape)
    inside = (x - 0.5) ** 2 + (y - 0.55) ** 2 < 0.12
    stripes = torch.sin(30 * (x + 0.4 * y)) > 0
    red, white = torch.tensor([0.85, 0.15, 0.1]).view(3, 1, 1), torch.tensor([0.95, 0.95, 0.9]).view(3, 1, 1)
    ball = torch.where(stripes, red, white)
    ball = torch.where(inside, ball, torch.stack((0.3 + 0.3 * y, 0.3 + 0.3 * y, 0.35 + 0.3 * y)))
    radius = torch.hypot(x - 0.5, y - 0.5)
    rings = torch.stack([0.5 + 0.5 * torch.sin(18 * radius + phase) for phase in (0.0, 2.1, 4.2)])
    return torch.stack((landscape, ball, rings))


def read(source: Path, index: list[int]) -> torch.Tensor:
    if source.suffix == ".py":
        levels = runpy.run_path(str(source))["load"]("test", max(index) + 1)[0][index]
    elif source.suffix == ".npz":
        with np.load(source) as arrays:
            found = [arrays[name] for name in arrays.files if arrays[name].ndim == 4 and arrays[name].shape[-1] == 3]
        if not found:
            raise SystemExit(f"{source} holds no array of images [N, H, W, 3]")
        levels = found[0][index]
    else:
        levels = np.asarray(Image.open(source).convert("RGB"))[None]
    return torch.from_numpy(np.ascontiguousarray(levels)).permute(0, 3, 1, 2).float() / 255


def tile(images: torch.Tensor, scale: int) -> Image.Image:
    """The images side by side."""
    row = torch.cat(list(images), dim=2).mul(255).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(row)
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)


def sheet(images: torch.Tensor, profile: str) -> Image.Image:
    scale = max(1, 64 // images.shape[-2])
    clean = tile(images, scale)
    names = CORRUPTIONS + VALIDATION_CORRUPTIONS
    size = (LABEL + 6 * (clean.width + GAP), HEAD + len(names) * (clean.height + GAP))
    out = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(out), ImageFont.load_default(size=15)
    for column, title in enumerate(("clean", *(f"severity {s}" for s in range(1, 6)))):
        pen.text((LABEL + column * (clean.width + GAP), 4), title, fill="black", font=font)
    for row, name in enumerate(names):
        top = HEAD + row * (clean.height + GAP)
        pen.text((6, top + clean.height // 2 - 9), name.replace("_", " "), fill="black", font=font)
        out.paste(clean, (LABEL, top))
        for severity in range(1, 6):
            keys = image_keys(0, name, severity, range(len(images)))
            done = corrupt(images, name, severity, profile, keys=keys, quantize=True)
            out.paste(tile(done, scale), (LABEL + severity * (clean.width + GAP), top))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw every corruption at every severity into one picture.")
    parser.add_argument("source", nargs="?", type=Path)
    parser.add_argument("--index", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--profile", choices=("cifar", "imagenet"), default="cifar")
    parser.add_argument("--out", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    images = synthetic() if arguments.source is None else read(arguments.source, arguments.index)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    sheet(images, arguments.profile).save(arguments.out, optimize=True)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
