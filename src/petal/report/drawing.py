"""What the figures share: style, the looks of the methods, and a figure with its title and caption.

Colours are those of `palette`, and no global state is changed.
"""

import base64
import io
import warnings
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from petal.errors import ConfigError
from petal.report.palette import COLOURS, DASHES, GRID, INK, KNOWN, MARKERS
from petal.report.rows import ResultRow
from petal.report.scores import Section
from petal.report.tables import short

FILE_TYPES = ("png", "svg", "pdf")

WIDTH = 9.0
FEW_LINES = 5           # colours and dashes tell so many apart, in greyscale too
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,
    "svg.hashsalt": "petal",
    "pdf.fonttype": 42,
}

@dataclass(frozen=True)
class Drawing:
    """A figure with its file name, title and caption. The caption is also the text for readers who cannot see it."""

    name: str
    title: str
    caption: str
    figure: Figure
    photographic: bool = False

    def render(self, kind: str = "png") -> bytes:
        """The figure as the bytes of a PNG (2x), SVG or PDF file."""
        if kind not in FILE_TYPES:
            raise ConfigError(f"figures are written as {', '.join(FILE_TYPES)}; not {kind!r}")
        stream = io.BytesIO()
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        with mpl.rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")
            self.figure.savefig(stream, format=kind, dpi=200, metadata=metadata)
        return stream.getvalue()

    @property
    def address(self) -> str:
        """The picture itself as a data: URL."""
        kind, mime = ("png", "image/png") if self.photographic else ("svg", "image/svg+xml")
        return f"data:{mime};base64,{base64.b64encode(self.render(kind)).decode('ascii')}"

    @property
    def share(self) -> int:
        """Per cent of a page's width: with it the letters of all figures have one size."""
        return min(100, round(100 * self.figure.get_figwidth() / WIDTH))


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, in inches, that renders without a screen."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def line_style(section: Section, row: ResultRow) -> dict[str, Any]:
    """Colour, dash and width of a row, the same in every figure."""
    twins = [other for other in section.rows if other.paper is not None and other.paper == row.paper]
    if row.paper in KNOWN and twins[0] is row:
        colour, dash, width = KNOWN[row.paper]
        return {"color": colour, "linestyle": dash, "linewidth": width}
    used = {KNOWN[other.paper][0] for other in section.rows if other.paper in KNOWN}
    free = [colour for colour in COLOURS if colour not in used] or list(COLOURS)
    others = [other for other in section.rows if other.paper not in KNOWN or _first(section, other) is not other]
    place = next(n for n, other in enumerate(others) if other is row)
    return {"color": free[place % len(free)], "linestyle": DASHES[(place + 3) % len(DASHES)], "linewidth": 1.6}


def marker(section: Section, row: ResultRow) -> str:
    """The marker of a row, the same in every figure."""
    place = next(n for n, other in enumerate(section.rows) if other is row)
    return MARKERS[place % len(MARKERS)]


def sparse_markers(section: Section, row: ResultRow, count: int) -> dict[str, Any]:
    """Where there are many lines, a marker on each about ten times, at other points than those of its neighbours."""
    if len(section.rows) <= FEW_LINES:
        return {}
    every, place = max(1, count // 10), next(n for n, other in enumerate(section.rows) if other is row)
    return {"marker": marker(section, row), "markersize": 4.5, "markevery": (place * every // len(section.rows), every)}


def _first(section: Section, row: ResultRow) -> ResultRow:
    return next(other for other in section.rows if other.paper == row.paper)


def legible(label: str) -> str:
    """A label that matplotlib shows: it leaves out those that start with an underscore."""
    return f" {label}" if label.startswith("_") else label


def brief(domain: str) -> str:
    """The name of a domain, cut to 20 characters."""
    name = short(domain)
    return name if len(name) <= 20 else f"{name[:19]}…"


def legend(figure: Figure, handles: list[Line2D]) -> None:
    """The legend below all panels."""
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, max(1, len(handles))), frameon=False,
                  handlelength=3.2)  # fmt: skip
