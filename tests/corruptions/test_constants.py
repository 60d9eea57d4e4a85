"""The constants, transcribed once more from the published tables, as text."""

import re

import pytest

from petal.corruptions.constants import CONSTANTS

PUBLISHED = """
gaussian_noise | .04 .06 .08 .09 .10 | .08 .12 .18 .26 .38
shot_noise | 500 250 100 75 50 | 60 25 12 5 3
impulse_noise | .01 .02 .03 .05 .07 | .03 .06 .09 .17 .27
speckle_noise | .06 .1 .12 .16 .2 | .15 .2 .35 .45 .6
gaussian_blur | .4 .6 .7 .8 1 | 1 2 3 4 6
glass_blur | (.05,1,1) (.25,1,1) (.4,1,1) (.25,1,2) (.4,1,2) | (.7,1,2) (.9,2,1) (1,2,3) (1.1,3,2) (1.5,4,2)
defocus_blur | (.3,.4) (.4,.5) (.5,.6) (1,.2) (1.5,.1) | (3,.1) (4,.5) (6,.5) (8,.5) (10,.5)
motion_blur | (6,1) (6,1.5) (6,2) (8,2) (9,2.5) | (10,3) (15,5) (15,8) (15,12) (20,15)
zoom_blur | (7,.01) (12,.01) (16,.01) (21,.01) (26,.01) | (12,.01) (16,.01) (11,.02) (13,.02) (11,.03)
snow | (.1,.2,1,.6,8,3,.95) (.1,.2,1,.5,10,4,.9) (.15,.3,1.75,.55,10,4,.9) (.25,.3,2.25,.6,12,6,.85) \
(.3,.3,1.25,.65,14,12,.8) | (.1,.3,3,.5,10,4,.8) (.2,.3,2,.5,12,4,.7) (.55,.3,4,.9,12,8,.7) \
(.55,.3,4.5,.85,12,8,.65) (.55,.3,2.5,.85,12,12,.55)
frost | (1,.2) (1,.3) (.9,.4) (.85,.4) (.75,.45) | (1,.4) (.8,.6) (.7,.7) (.65,.7) (.6,.75)
fog | (.2,3) (.5,3) (.75,2.5) (1,2) (1.5,1.75) | (1.5,2) (2,2) (2.5,1.7) (2.5,1.5) (3,1.4)
spatter | (.62,.1,.7,.7,.5,0) (.65,.1,.8,.7,.5,0) (.65,.3,1,.69,.5,0) (.65,.1,.7,.69,.6,1) (.65,.1,.5,.68,.6,1) | \
(.65,.3,4,.69,.6,0) (.65,.3,3,.68,.6,0) (.65,.3,2,.68,.5,0) (.65,.3,1,.65,1.5,1) (.67,.4,1,.65,1.5,1)
brightness | .05 .1 .15 .2 .3 | .1 .2 .3 .4 .5
contrast | .75 .5 .4 .3 .15 | .4 .3 .2 .1 .05
saturate | (.3,0) (.1,0) (1.5,0) (2,.1) (2.5,.2) | (.3,0) (.1,0) (2,0) (5,.1) (20,.2)
elastic_transform | (0,0,.08) (.05,.2,.07) (.08,.06,.06) (.1,.04,.05) (.1,.03,.03) | \
(2,.7,.1) (2,.08,.2) (.05,.01,.02) (.07,.01,.02) (.12,.01,.02)
pixelate | .95 .9 .85 .75 .65 | .6 .5 .4 .3 .25
jpeg_compression | 80 65 58 50 40 | 25 18 15 10 7
"""
OURS = {"frost": 1, "elastic_transform": 1}  # numbers of our own at the end of a setting (shrink of the ice; unit)


@pytest.mark.parametrize("line", PUBLISHED.strip().splitlines(), ids=lambda line: line.split()[0])
def test_constants_are_the_published_ones(line: str) -> None:
    name, *columns = (part.strip() for part in line.split("|"))
    for profile, column in zip(("cifar", "imagenet"), columns, strict=True):
        published = [[float(v) for v in re.findall(r"[\d.]+", part)] for part in column.split()]
        settings = [s if isinstance(s, tuple) else (s,) for s in CONSTANTS[profile][name]]
        assert [[float(v) for v in s[: len(s) - OURS.get(name, 0)]] for s in settings] == published


def test_our_own_numbers() -> None:
    assert {s[-1] for s in CONSTANTS["cifar"]["frost"]} == {5}
    assert {s[-1] for s in CONSTANTS["imagenet"]["frost"]} == {1}
    assert {s[-1] for s in CONSTANTS["cifar"]["elastic_transform"]} == {1.0}
    assert {round(s[-1] * 224, 9) for s in CONSTANTS["imagenet"]["elastic_transform"]} == {244.0}
