"""Adapt a network of your own to images of your own: labels are not needed, and the result goes back to plain PyTorch.

    python examples/adapt_your_network.py --out adapted.safetensors
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import petal


class Mine(nn.Module):
    """Stands for your network: anything that returns logits."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, classes] of images [N, 3, H, W] in [0, 1]."""
        return self.head(self.body(x).mean((2, 3)))


def trained(model: nn.Module, epochs: int = 5) -> nn.Module:
    """Stands for the training that you have behind you."""
    data = petal.data.digits("train")
    x, y = data.batch(range(len(data)))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def main() -> None:
    """Adapt to unlabelled foggy images, watch it, keep its state, and take the adapted network away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("adapted.safetensors"), help="where the adapted weights go")
    out = parser.parse_args().out
    torch.manual_seed(0)
    model = trained(Mine())

    clean, labels = petal.data.digits("test").batch(range(400))
    images = petal.corrupt(clean, "fog", severity=3)
    loader = DataLoader(images, batch_size=50)                       # your images; no labels

    adapter = petal.adapt(model, flip=False)                         # a mirrored digit is no digit
    print(adapter)
    answers = []
    for x in loader:
        answer = petal.predict(adapter, x)                           # predicts, and has adapted
        answers.append(answer.label)
        print(f"confidence {answer.probability.mean():.2f}, entropy {answer.entropy.mean():.2f}")

    with torch.no_grad():
        before = (model(images).argmax(1) != labels).float().mean()
    after = (torch.cat(answers) != labels).float().mean()
    print(f"error: {before:.1%} as it was, {after:.1%} adapting")

    petal.save(adapter, out.with_name(f"{out.stem}.state.safetensors"))  # to go on another day, with petal.load
    network = adapter.export(loader, path=out)                       # a Mine with adapted weights; --out net.onnx works too
    print(f"wrote {out}: {type(network).__name__}, {sum(p.numel() for p in network.parameters()):,} parameters")


if __name__ == "__main__":
    main()
