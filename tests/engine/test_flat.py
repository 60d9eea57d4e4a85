"""All parameters in one buffer: where each of them lies in it, and which networks have the same places."""

import pytest
import torch

from networks import network
from petal.engine.flat import Layout
from petal.engine.network import same_buffers

VALUES = {
    "conv": torch.arange(2 * 3 * 2 * 5.0).view(2, 3, 2, 5),
    "linear": torch.arange(100.0, 106.0).view(2, 3),
    "scalar": torch.tensor(7.0),
    "line": torch.arange(200.0, 204.0).view(1, 4, 1),
}


@pytest.mark.parametrize("last", [True, False])
def test_places_and_values_of_every_shape(last: bool) -> None:
    layout = Layout.of(VALUES, channels_last=last)
    flat = layout.pack(VALUES)
    conv = VALUES["conv"].permute(0, 2, 3, 1) if last else VALUES["conv"]
    assert flat.tolist() == [*conv.flatten().tolist(), *range(100, 106), 7, *range(200, 204)]
    for name, view in layout.views(flat).items():
        assert torch.equal(view, VALUES[name])
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_networks_with_the_names_and_shapes_fit_and_no_others() -> None:
    layout = Layout.of(VALUES)
    assert layout.fits(VALUES)
    assert layout.fits({**VALUES, "more": torch.zeros(1)})
    assert not layout.fits({name: value for name, value in VALUES.items() if name != "scalar"})
    assert not layout.fits({**VALUES, "linear": torch.zeros(3, 2)})
    assert not Layout.of({}).fits(VALUES)


def test_networks_share_programs_only_if_their_buffers_are_equal() -> None:
    one, other, more = network(), network(), network()
    assert same_buffers(one, other)
    other.norm1.running_mean[0] += 1
    assert not same_buffers(one, other)
    more.register_buffer("more", torch.zeros(1))
    assert not same_buffers(one, more)
    assert not same_buffers(network("vit"), network("group-norm"))
