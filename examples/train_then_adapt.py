"""From a plain training loop to an adapting network: no framework, and the files that `petal fit` would have written.

    python examples/train_then_adapt.py --out source
    petal run digits --network small --weights source/network.safetensors --posterior source/posterior.safetensors -m petal

The loop is yours; what petal needs in the end is the trained network and, for PETAL with a prior, its posterior.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import petal


def digits(split: str) -> TensorDataset:
    """The digits of scikit-learn as tensors in [0, 1], enlarged to 32 x 32."""
    data = petal.data.digits(split)
    return TensorDataset(*data.batch(range(len(data))))


def train(model: nn.Module, loader: DataLoader, epochs: int) -> None:
    """SGD with a cosine schedule."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    model.train()
    for epoch in range(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    model.eval()


def main() -> None:
    """Train, write network and posterior, and compare the network as it is with what PETAL makes of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("source"), help="folder of the files")
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    torch.manual_seed(0)

    model = petal.models.build("small", classes=10, seed=0)              # or any network of your own
    loader = DataLoader(digits("train"), batch_size=64, shuffle=True)
    train(model, loader, arguments.epochs)

    posterior = petal.fit_swag(model, loader, epochs=1)                  # snapshots of a few more epochs of SGD; model stays
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), arguments.out / "network.safetensors")
    posterior.save(arguments.out / "posterior.safetensors")

    names = ["gaussian_noise", "fog", "contrast"]
    for adapter in (petal.Source(model), petal.Petal(model, posterior, views=4, augment=petal.Views(flip=0.0))):
        stream = petal.streams.continual(petal.data.digits("test"), names, batch_size=50, images=200)
        result = petal.evaluate(adapter, stream)
        print(f"{adapter.kind}: error {result.mean.error:.1%}, calibration error {result.mean.ece:.3f}")


if __name__ == "__main__":
    main()
