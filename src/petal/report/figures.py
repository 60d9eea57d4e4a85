"""Every figure of a section, drawn from the records, and their files."""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib as mpl

from petal._files import replacing
from petal.errors import ConfigError, DataError
from petal.report.curves import confidence, stream, visits, weights
from petal.report.drawing import FILE_TYPES, STYLE, Drawing
from petal.report.panels import cost, heatmap, reliability, samples
from petal.report.scores import Report, Section

FIGURES: dict[str, Callable[[Section], Drawing | None]] = {
    "cost": cost,
    "visits": visits,
    "stream": stream,
    "heatmap": heatmap,
    "reliability": reliability,
    "weights": weights,
    "confidence": confidence,
    "samples": samples,
}


def draw(section: Section) -> list[Drawing]:
    """Every figure for which the records of a section have data."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")   # class names in scripts that the font does not have
        drawings = [drawing for make in FIGURES.values() if (drawing := make(section)) is not None]
        for drawing in drawings:   # laid out once, so that all files of a figure are equal
            drawing.figure.draw_without_rendering()
            drawing.figure.set_layout_engine("none")
    return drawings


def write_figures(
    report: Report, folder: str | Path, kinds: Iterable[str] = ("png",)
) -> dict[str, list[tuple[Drawing, Path]]]:
    """Write every figure. Returns the drawings of each section with the path of their first file."""
    kinds, folder = tuple(kinds), Path(folder)
    wrong = [kind for kind in kinds if kind not in FILE_TYPES]
    if wrong or not kinds:
        raise ConfigError(f"figures are written as {', '.join(FILE_TYPES)}; not {', '.join(wrong) or 'nothing'}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made: {error.strerror}") from None
    written: dict[str, list[tuple[Drawing, Path]]] = {}
    for section in report.sections:
        for drawing in draw(section):
            paths = [folder / f"{section.slug}-{drawing.name}.{kind}" for kind in kinds]
            for path, kind in zip(paths, kinds, strict=True):
                with replacing(path) as temporary:
                    temporary.write_bytes(drawing.render(kind))
            written.setdefault(section.slug, []).append((drawing, paths[0]))
    return written
