import re

import pytest

from petal.data import order, order_names, resolve_order
from petal.errors import DataError

THREE_D = {
    "near_focus", "far_focus", "fog_3d", "flash", "color_quant", "low_light", "xy_motion_blur", "z_motion_blur",
    "iso_noise", "bit_error", "h265_abr", "h265_crf",
}
# The benchmark's own order, written out here a second time.
STANDARD = [
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
]


def test_standard_order():
    assert list(order()) == STANDARD
    assert list(order("standard-15", 1)) == STANDARD


@pytest.mark.parametrize("name", ["imagenet-c", "imagenet-3dcc", "cifar10-gradual"])
def test_ten_different_orders_of_the_same_corruptions(name):
    orders = [order(name, number) for number in range(1, 11)]
    assert len(set(orders)) == 10
    for one in orders:
        assert len(one) == len(set(one))
        assert set(one) == (THREE_D if name == "imagenet-3dcc" else set(STANDARD))


@pytest.mark.parametrize(
    ("name", "number", "start", "end"),
    [
        ("imagenet-c", 1, "brightness", "contrast"),
        ("imagenet-c", 7, "frost", "gaussian_noise"),
        ("imagenet-c", 10, "contrast", "brightness"),
        ("imagenet-3dcc", 1, "near_focus", "far_focus"),
        ("imagenet-3dcc", 8, "far_focus", "low_light"),
        ("cifar10-gradual", 2, "jpeg_compression", "motion_blur"),
    ],
)
def test_published_orders_are_numbered_from_one(name, number, start, end):
    assert order(name, number)[0] == start
    assert order(name, number)[-1] == end
    assert resolve_order(f"{name}:{number}") == order(name, number)


def test_every_published_family_is_there():
    assert order_names() == {"standard-15": 1, "imagenet-c": 10, "imagenet-3dcc": 10, "cifar10-gradual": 10}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: order("imagenet", 1), "imagenet-c (1..10)"),
        (lambda: order("imagenet-c", 0), "orders 1..10, not 0"),
        (lambda: order("imagenet-c", 11), "orders 1..10, not 11"),
        (lambda: order("standard-15", 2), "orders 1..1, not 2"),
        (lambda: order("imagenet-c", True), "not True"),
        (lambda: resolve_order("imagenet-c:x"), "imagenet-c:3"),
        (lambda: resolve_order("nothing:1"), "no published order"),
        (lambda: resolve_order([]), "empty"),
        (lambda: resolve_order([3]), "got 3"),
    ],
)
def test_errors_say_what_there_is(call, message):
    with pytest.raises(DataError, match=re.escape(message)):
        call()


def test_own_names_stay_as_they_are():
    assert resolve_order(["b", "a", "b"]) == ("b", "a", "b")
    assert resolve_order("fog") == ("fog",)
    assert resolve_order("standard-15") == order()
