"""Source statistics against sums written out, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import petal
from networks import CLASSES, images, network
from petal import SourceStatistics, StatisticsError, collect_statistics
from petal.norm import affine_parameters

ONES = torch.ones(2, 3)


def batches(count: int = 4, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [(images(10, seed=s, dtype=dtype), torch.randint(CLASSES, (10,), generator=random)) for s in range(count)]


def in_training_form(batch_statistics: bool = True) -> nn.Module:
    """The network by batch statistics, by torch's own switch."""
    model = network("batch-norm", torch.float64)
    if batch_statistics:
        model.norm1.train(), model.norm2.train()
    return model


def test_fisher_is_the_mean_of_squared_batch_gradients() -> None:
    found = collect_statistics(network("batch-norm", torch.float64), batches(), ["fisher"], fisher_images=25).fisher
    model = in_training_form()
    names = list(affine_parameters(model))
    squares = []
    for x, _ in [batches()[0], batches()[1], (batches()[2][0][:5], None)]:         # 25 images
        p = model(x).softmax(1)
        loss = -p.amax(1).log().mean()                      # the cross-entropy on the network's own label
        model.zero_grad()
        loss.backward()
        squares.append({name: model.get_parameter(name).grad.square() for name in names})
    assert list(found) == names
    for name in names:
        assert torch.allclose(found[name], sum(s[name] for s in squares) / 3, atol=1e-12), name


@pytest.mark.parametrize("by_batch", [True, False])
@pytest.mark.parametrize("labels", ["given", "predicted"])
def test_prototypes_are_class_means_and_variances(labels: str, by_batch: bool) -> None:
    data = batches(5)
    found = collect_statistics(
        network("batch-norm", torch.float64), data, ["prototypes"], labels=labels, batch_statistics=by_batch
    )
    model = in_training_form(by_batch)
    seen: list[Tensor] = []
    model.fc.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    logits = torch.cat([model(x).detach() for x, _ in data])
    features = torch.cat(seen).numpy()
    known = (torch.cat([y for _, y in data]) if labels == "given" else logits.argmax(1)).numpy()
    for c in range(CLASSES):
        mine = features[known == c]
        assert found.counts[c] == len(mine)
        if len(mine) > 1:
            assert np.allclose(found.prototypes[c], mine.mean(0), atol=1e-12)
            assert np.allclose(found.variances[c], mine.var(0, ddof=1), atol=1e-12)


def test_a_class_of_no_images_has_zeros() -> None:
    found = collect_statistics(network(), [(images(8), torch.tensor([0, 1] * 4))], ["prototypes"])
    assert found.counts.tolist() == [4, 4, 0, 0, 0]
    assert not found.prototypes[2:].any()
    assert not found.fisher


def test_the_network_is_left_alone() -> None:
    model = network().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    collect_statistics(model, batches(dtype=torch.float32))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def collected() -> SourceStatistics:
    return collect_statistics(network(), batches(dtype=torch.float32))


def test_file(tmp_path: Path) -> None:
    first = collected()
    first.save(tmp_path / "s.safetensors")
    second = SourceStatistics.load(tmp_path / "s.safetensors")
    assert first.tensors().keys() == second.tensors().keys() == {"prototypes", "variances", "counts"} | {
        f"fisher.{name}" for name in affine_parameters(network())
    }
    assert all(torch.equal(value, second.tensors()[key]) for key, value in first.tensors().items())
    second.check(network(), "fisher", "prototypes")


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with pytest.raises(StatisticsError, match="cannot read statistics"):
        SourceStatistics.load(path)
    petal.DiagonalGaussian.isotropic(network(), std=0.1).save(path)
    with pytest.raises(StatisticsError, match="'petal-posterior-1'"):
        SourceStatistics.load(path)
    with pytest.raises(StatisticsError, match="cannot write"):
        collected().save(tmp_path / "missing" / "s.safetensors")


@pytest.mark.parametrize("change", [{"strange": torch.zeros(1)}, {"counts": None}])
def test_a_file_with_other_tensors_than_it_says_is_refused_by_name(tmp_path: Path, change: dict[str, Tensor | None]) -> None:
    path, found = tmp_path / "s.safetensors", collected().tensors()
    names = sorted(found)
    for told in (names, sorted({**found, **change})):
        tensors = {name: value for name, value in {**found, **change}.items() if value is not None}
        save_file(tensors, path, metadata={"format": "petal-statistics-1", "tensors": json.dumps(told)})
        with pytest.raises(StatisticsError, match=f"missing or unknown tensors: {next(iter(change))}"):
            SourceStatistics.load(path)


def test_what_does_not_fit_is_named() -> None:
    found = collected()
    with pytest.raises(StatisticsError, match=r"'norm1.weight' is \[8\] in the statistics and \[16\] in the network"):
        found.check(network("vit"))
    with pytest.raises(StatisticsError, match=r"'norm1\.weight' is only in the statistics"):
        found.check(nn.Linear(12, CLASSES))
    only = SourceStatistics(prototypes=found.prototypes, variances=found.variances, counts=found.counts)
    with pytest.raises(StatisticsError, match="no fisher: collect them with `petal fit --collect fisher`"):
        only.check(network(), "fisher")
    with pytest.raises(StatisticsError, match="5 classes and 12 features, and no linear layer is"):
        only.check(network("vit"), "prototypes")


@pytest.mark.parametrize(("given", "words"), [
    ({}, "statistics of nothing"),
    ({"prototypes": torch.zeros(2, 3)}, "belong together, got prototypes alone"),
    ({"prototypes": torch.zeros(2, 3), "variances": torch.zeros(2, 4), "counts": torch.ones(2)}, r"\[C, D\]"),
    ({"fisher": {"a": torch.tensor([1.0, float("nan")])}}, "fisher of 'a' has values that are not finite"),
    ({"fisher": {"a": torch.tensor([-1.0])}}, "fisher of 'a' has values below zero"),
    ({"prototypes": -ONES, "variances": -ONES, "counts": ONES[:, 0]}, "^variances has values below zero"),
    ({"prototypes": -ONES, "variances": ONES, "counts": -ONES[:, 0]}, "^counts has values below zero"),
])  # fmt: skip
def test_statistics_that_make_no_sense(given: dict, words: str) -> None:
    with pytest.raises(StatisticsError, match=words):
        SourceStatistics(**given)


@pytest.mark.parametrize(("loader", "options", "words"), [
    ([images(4)], {}, "prototypes need the labels"),
    ([], {}, "gave no batch"),
    ([(images(4), torch.tensor([0, 1, 2, 5]))], {}, "labels go from 0 to 5; there are 5 classes"),
    ([images(4)], {"wanted": ["mean"]}, "wanted must be one of"),
    ([images(4)], {"wanted": []}, "say which statistics"),
    ([images(4)], {"fisher_images": 0}, "fisher_images must be"),
])  # fmt: skip
def test_what_cannot_be_collected(loader: list, options: dict, words: str) -> None:
    with pytest.raises(petal.PetalError, match=words):
        collect_statistics(network(), loader, **options)


def test_fisher_needs_normalisation_layers_and_no_labels() -> None:
    with pytest.raises(StatisticsError, match="has none"):
        collect_statistics(nn.Linear(4, 3), [torch.rand(4, 4)], ["fisher"])
    found = collect_statistics(network("vit"), [images()], ["fisher"]).fisher
    assert found.keys() == affine_parameters(network("vit")).keys()


def test_fisher_is_by_the_statistics_of_the_batch_whatever_prototypes_are_by() -> None:
    data = batches(2, torch.float32)
    by_batch, by_source = (collect_statistics(network(), data, batch_statistics=chosen) for chosen in (True, False))
    assert not torch.equal(by_batch.prototypes, by_source.prototypes)
    for name, value in by_batch.fisher.items():
        assert torch.equal(value, by_source.fisher[name]), name


def test_in_another_precision_counts_stay_whole_numbers() -> None:
    found = collect_statistics(network(), batches(2, torch.float32)).to(dtype=torch.float64)
    kinds = {name: value.dtype for name, value in found.tensors().items()}
    assert kinds.pop("counts") == torch.int64
    assert set(kinds.values()) == {torch.float64}
