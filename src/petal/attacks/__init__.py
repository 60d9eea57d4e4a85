"""Attacks on methods that learn from what they are sent, as streams around any stream.

    adapter = petal.adapt(model)
    stream = petal.attacks.Poisoned(stream, petal.attacks.Invade(eps=16 / 255), share=0.2, victim=adapter)
    petal.evaluate(adapter, stream)             # scores of the benign images

`ATTACKS` names them, for `petal attack`. An attack of one's own is an object with `images(scene)`: see `Scene`.
"""

from collections.abc import Callable
from functools import partial

from petal.attacks.gradient import Gate, Invade, Update
from petal.attacks.measure import Outcome, measure
from petal.attacks.poisoned import Poisoned
from petal.attacks.scene import Attack, Scene
from petal.attacks.simple import Flood, Honest, Outside, Picture, Repeat

ATTACKS: dict[str, Callable[[], Attack]] = {
    "none": Honest,
    "white": partial(Picture, "white"),
    "black": partial(Picture, "black"),
    "stripes": partial(Picture, "stripes"),
    "checkerboard": partial(Picture, "checkerboard"),
    "repeat": Repeat,
    "outside": Outside,
    "bright": partial(Outside, 3.0),
    "flood": Flood,
    "bend": partial(Flood, in_a_row=True),
    "dia": Invade,
    "dia-wide": partial(Invade, eps=40 / 255),
    "dia-free": partial(Invade, eps=None),
    "margin": partial(Invade, eps=None, knows="source", loss="margin"),
    "gate-open": Gate,
    "gate-close": partial(Gate, opens=False),
    "update": Update,
}

__all__ = [
    "ATTACKS", "Attack", "Flood", "Gate", "Honest", "Invade", "Outcome", "Outside", "Picture", "Poisoned", "Repeat", "Scene",
    "Update", "measure",
]  # fmt: skip
