"""The colours of all figures, and how lines differ besides: one palette, legible to colour-blind readers and in greyscale.

It is that of Okabe and Ito without yellow, which is not legible on white, and with a grey. No two rows of a section look the
same: their dashes or markers differ where a colour comes again.
"""

from typing import Any

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, ORANGE, BLACK, GREY = "#56B4E9", "#E69F00", "#000000", "#7A7A7A"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE, BLACK, GREY)
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

INK, RULE, GRID = "#444444", "#999999", "#dddddd"       # axes and text; boundaries; grid
SHARE, GAP = "#cfcfcf", "#F3C9A5"                       # areas in the reliability diagram: samples, and the gap
HEAT = "YlGnBu"                                         # of heat maps: its lightness falls steadily

KNOWN: dict[str | None, tuple[str, Any, float]] = {     # of the paper's rows: colour, dash, width
    "Source": (GREY, DASHES[2], 1.4),
    "BN Adapt": (SKY, DASHES[1], 1.4),
    "Pseudo-label": (ORANGE, DASHES[3], 1.4),
    "TENT-online": (PURPLE, DASHES[1], 1.4),
    "TENT-continual": (PURPLE, DASHES[0], 1.4),
    "CoTTA": (GREEN, DASHES[0], 1.7),
    "PETAL (S-Res)": (BLUE, DASHES[1], 1.9),
    "PETAL (FIM)": (VERMILION, DASHES[0], 2.2),
}
