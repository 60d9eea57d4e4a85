"""What the figures share: style, colours and dashes of the methods, and a figure with its title and caption.

The colours are safe for colour-blind readers, lines also differ in their dashes, and no global state is changed.
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
from petal.report.rows import ResultRow
from petal.report.scores import Section
from petal.report.tables import short

FILE_TYPES = ("png", "svg", "pdf")

WIDTH = 9.0
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
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,
    "svg.hashsalt": "petal",
    "pdf.fonttype": 42,
}

# The colours of Okabe and Ito without yellow, which is not legible on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7A7A7A")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
_KNOWN: dict[str | None, tuple[str, Any, float]] = {
    "Source": ("#7A7A7A", _DASHES[2], 1.4),
    "BN Adapt": ("#56B4E9", _DASHES[1], 1.4),
    "Pseudo-label": ("#E69F00", _DASHES[3], 1.4),
    "TENT-online": ("#CC79A7", _DASHES[1], 1.4),
    "TENT-continual": ("#CC79A7", _DASHES[0], 1.4),
    "CoTTA": ("#009E73", _DASHES[0], 1.7),
    "PETAL (S-Res)": ("#0072B2", _DASHES[1], 1.9),
    "PETAL (FIM)": ("#D55E00", _DASHES[0], 2.2),
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
    if row.paper in _KNOWN and twins[0] is row:
        colour, dash, width = _KNOWN[row.paper]
        return {"color": colour, "linestyle": dash, "linewidth": width}
    used = {_KNOWN[other.paper][0] for other in section.rows if other.paper in _KNOWN}
    free = [colour for colour in _COLOURS if colour not in used] or list(_COLOURS)
    others = [other for other in section.rows if other.paper not in _KNOWN or _first(section, other) is not other]
    place = next(n for n, other in enumerate(others) if other is row)
    return {"color": free[place % len(free)], "linestyle": _DASHES[(place + 3) % len(_DASHES)], "linewidth": 1.6}


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
