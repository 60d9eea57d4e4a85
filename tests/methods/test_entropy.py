"""Methods that minimise an entropy, or learn from labels of their own, against runs of the code of their authors or of the
collection: TENT with COME, ETA, EATA, RDumb, RPL, SAR and DeYO.

COME's code has the number of ImageNet's classes written into it: it was run with 10 in its place.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import petal
from methods.field import CASES, RATES, close, flat, inputs
from methods.golden import OPTIMIZERS, fast, read, small
from petal.destroy import Occlusion, Patches

REFERENCE = {
    "tent_come": petal.Tent, "rpl": petal.RPL,
    "eta": petal.ETA, "eta_strict": petal.ETA, "eta_come": petal.ETA, "eata": petal.EATA, "rdumb": petal.RDumb,
    "sar": petal.SAR, "sar_authors": petal.SAR, "sar_come": petal.SAR, "deyo": petal.DeYO, "deyo_patches": petal.DeYO,
}  # fmt: skip


def fixed(rows: int, columns: int, **_: Any) -> Tensor:
    """The numbers that the golden run of `Patches` drew."""
    return (torch.arange(rows * columns).reshape(rows, columns) * 7919 + 3) % 101


def made(name: str, norm: str, optimizer: str, dtype: torch.dtype, **options: Any) -> tuple[petal.Adapter, list[Tensor]]:
    """Our method with the settings of a golden file, and the batches."""
    _, settings = read(name)
    model, batches = inputs(norm, dtype)
    if name.startswith("deyo"):
        settings["destroy"] = Patches(3) if name == "deyo_patches" else Occlusion(4, 2, 1)
    known = []
    if name == "eata":
        source = list(small(norm, dtype)[1][5].split(8))
        known.append(petal.collect_statistics(model, source, ["fisher"]))
    settings = {"lr": RATES[optimizer], "optimizer": OPTIMIZERS[optimizer]} | settings | options
    return REFERENCE[name](model, *known, **settings), batches


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize(("norm", "optimizer"), CASES)
def test_it_is_the_reference(name: str, norm: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "deyo_patches":
        monkeypatch.setattr(torch, "rand", fixed)
    golden = {key.removeprefix(f"{norm}.{optimizer}."): value for key, value in read(name)[0].items()}
    adapter, batches = made(name, norm, optimizer, torch.float64)
    logits = torch.cat([adapter(x) for x in batches])
    assert close(logits, golden["logits"])
    assert close(flat(adapter.adapted), golden["weights"])
    if "mean" in golden:
        assert close(adapter.mean, golden["mean"])
    adapter, batches = made(name, norm, optimizer, torch.float32)
    rough = torch.cat([fast(adapter)(x) for x in batches])
    assert close(rough, golden["logits"], 2e-3 * golden["logits"].abs().max().item())
