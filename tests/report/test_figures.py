"""Figures: all there, not empty, drawn from the records; and the page that holds them."""

import base64
import importlib
import io
import json
import re
import warnings
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from petal.errors import ConfigError, DataError
from petal.report import FIGURES, METRICS, domain_table, draw, load, palette, write_figures, write_html
from petal.report.curves import _running
from petal.report.drawing import FEW_LINES, Drawing, line_style, marker, sparse_markers

from .fakes import DOMAINS, write_run
from .test_formats import NASTY

ONCE = [name for name in FIGURES if name != "visits"]   # those of a stream that does not recur


@pytest.fixture(scope="module")
def drawings(run: Path) -> dict[str, Drawing]:
    return {drawing.name: drawing for drawing in draw(load(run).sections[0])}


@pytest.fixture(scope="module")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_html(run, tmp_path_factory.mktemp("out") / "deep" / "report.html", paper=True).read_text(encoding="utf-8")


def test_every_figure_is_there(drawings: dict[str, Drawing]) -> None:
    assert list(drawings) == ONCE
    for drawing in drawings.values():
        assert len(drawing.caption) > 40


@pytest.mark.parametrize("name", ONCE)
def test_pictures_are_not_trivial(drawings: dict[str, Drawing], name: str) -> None:
    picture = np.asarray(Image.open(io.BytesIO(drawings[name].render("png"))).convert("RGB"))
    assert picture.shape[1] >= 1400   # at least seven inches at 200 dots
    inked = (picture < 250).any(2)
    assert 0.01 < inked.mean() < 0.95
    assert inked[:, : picture.shape[1] // 2].any()
    assert len(np.unique(picture.reshape(-1, 3)[::37], axis=0)) > 20
    assert (picture[0] == 255).all()   # nothing is cut off at the top
    assert (picture[-1] == 255).all()


def test_vector_files_are_the_same_every_time(drawings: dict[str, Drawing]) -> None:
    assert drawings["heatmap"].render("svg") == drawings["heatmap"].render("svg")
    assert b"<svg" in drawings["heatmap"].render("svg")
    assert drawings["heatmap"].render("pdf").startswith(b"%PDF")
    with pytest.raises(ConfigError, match="png, svg, pdf; not 'gif'"):
        drawings["heatmap"].render("gif")


def test_stream_shows_the_records(run: Path, drawings: dict[str, Drawing]) -> None:
    axes = drawings["stream"].figure.axes[0]
    lines = [json.loads(line) for line in (run / "jobs/source-standard-15-0/records.jsonl").read_text().splitlines()]
    source = next(line for line in axes.get_lines() if line.get_label() == "Source")
    np.testing.assert_array_equal(source.get_xdata(), 1 + np.arange(24))
    # six batches a domain: the running mean has width one, so the line is the errors themselves
    np.testing.assert_allclose(source.get_ydata(), [100 * line["error"] for line in lines])
    words = [text.get_text() for text in axes.texts]
    assert words == ["Gaussian", "shot", "fog", "jpeg"]


def test_heatmap_is_the_table(run: Path, drawings: dict[str, Drawing]) -> None:
    section = load(run).sections[0]
    axes = drawings["heatmap"].figure.axes[0]
    values = np.asarray(axes.images[0].get_array())
    expected = [[100 * row.stat("error", domain).mean for domain in (*DOMAINS, None)] for row in section.rows]
    np.testing.assert_allclose(values, expected)


def test_reliability_is_the_counts(run: Path, drawings: dict[str, Drawing]) -> None:
    row = load(run).sections[0].rows[0]
    axes = drawings["reliability"].figure.axes[0]
    counts = row.calibration
    many = counts[0] >= 20
    drawn = axes.get_lines()[1]
    np.testing.assert_allclose(drawn.get_xdata(), counts[1][many] / counts[0][many])
    np.testing.assert_allclose(drawn.get_ydata(), counts[2][many] / counts[0][many])


def test_methods_look_different(run: Path) -> None:
    section = load(run).sections[0]
    styles = [line_style(section, row) for row in section.rows]
    assert len({(str(style["color"]), str(style["linestyle"])) for style in styles}) == len(section.rows)


def test_many_methods_differ_without_colours(run: Path, drawings: dict[str, Drawing]) -> None:
    section = load(run).sections[0]
    looks = [(str(line_style(section, row)["linestyle"]), marker(section, row)) for row in section.rows]
    assert len(set(looks)) == len(section.rows) > FEW_LINES
    lines = [line for line in drawings["stream"].figure.axes[0].get_lines() if not line.get_label().startswith("_child")]
    assert [line.get_marker() for line in lines] == [look for _, look in looks]
    assert len({line.get_markevery() for line in lines}) > 1
    few = replace(section, rows=section.rows[:FEW_LINES])
    assert sparse_markers(few, few.rows[0], 100) == {}


def test_every_colour_is_of_the_palette() -> None:
    used = set()
    for name in ("drawing", "curves", "panels"):
        code = Path(importlib.import_module(f"petal.report.{name}").__file__).read_text()
        used |= set(re.findall(r"#[0-9a-fA-F]{6}", code))
    assert not used
    okabe_ito = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"}
    assert okabe_ito == set(palette.COLOURS) - {palette.GREY}


def test_the_axis_of_cost_has_numbers(drawings: dict[str, Drawing]) -> None:
    axes = drawings["cost"].figure.axes[0]
    low, high = axes.get_xlim()
    shown = [label.get_text() for label in axes.get_xticklabels(which="both") if label.get_text()]
    numbers = [float(text) for text in shown]
    assert any(low <= number <= high for number in numbers)


def test_unknown_rows_look_different_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source", "petal-fim", "cotta", "bn"), batches=1, n=5, orders=(("1", ("fog",)),))
    manifest = json.loads((run / "manifest.json").read_text())
    for number, job in enumerate(manifest["jobs"]):
        job["row"] = job["label"] = f"_variant {number}"
    (run / "manifest.json").write_text(json.dumps(manifest))
    section, = load(run).sections
    assert len({str(line_style(section, row)["color"]) for row in section.rows}) == 4
    stream = next(drawing for drawing in draw(section) if drawing.name == "stream").figure
    assert len(stream.legends[0].get_texts()) == 4


def test_running_mean() -> None:
    values, weights = np.array([0.0, 1.0, 2.0, 9.0, np.nan]), np.array([1.0, 1.0, 1.0, 3.0, 1.0])
    np.testing.assert_allclose(_running(values, weights, 1)[:4], values[:4])
    np.testing.assert_allclose(_running(values, weights, 3), [1.0, 1.0, 30 / 5, 29 / 4, 29 / 4])


def test_figures_that_have_nothing_to_show_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source", "bn"), batches=1, n=5)
    names = [drawing.name for drawing in draw(load(run).sections[0])]
    assert names == ["cost", "stream", "heatmap", "reliability", "confidence"]


@pytest.mark.parametrize("kind", ["gradual", "recurring", "single", "unfinished", "orders"])
def test_other_streams_draw(tmp_path: Path, kind: str) -> None:
    settings: dict = {
        "gradual": {"severities": (1, 5, 1)},
        "recurring": {"orders": (("1", DOMAINS * 12),), "batches": 1},
        "single": {"orders": (("1", ("fog",)),), "batches": 1},
        "unfinished": {"unfinished": ("cotta-standard-15-0",)},
        "orders": {"orders": (("1", DOMAINS), ("2", DOMAINS[::-1]))},
    }[kind]
    settings = {"batches": 2, "n": 8, "samples": kind == "single"} | settings
    run = write_run(tmp_path / "run", ("source", "cotta"), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawings = draw(load(run).sections[0])   # lays each figure out: that is where labels would not fit
    cost = ["cost"] if kind != "unfinished" else []                     # one finished row compares with nobody
    first = [*cost, "stream", "heatmap", "reliability"]
    assert [drawing.name for drawing in drawings][:len(first)] == first


def test_write_figures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source",), batches=1, n=10, orders=(("1", DOMAINS[:1]),))
    written = write_figures(load(run), tmp_path / "a" / "b", ["svg", "pdf"])
    names = ["stream", "heatmap", "reliability", "confidence"]
    assert [path.name for _, path in written["cifar10"]] == [f"cifar10-{name}.svg" for name in names]
    assert {path.suffix for path in (tmp_path / "a" / "b").iterdir()} == {".svg", ".pdf"}
    assert len(list((tmp_path / "a" / "b").iterdir())) == 8
    with pytest.raises(ConfigError, match="not gif"):
        write_figures(load(run), tmp_path, ["gif"])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be made"):
        write_figures(load(run), tmp_path / "file")


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps the tables, pictures, ids and links."""

    VOID = frozenset({"meta", "img", "br", "hr", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.seen: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.headers: list[dict] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        given = dict(attrs)
        self.seen.append(tag)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "img":
            self.images.append(given)
        if tag == "a":
            self.links.append(given["href"])
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "th":
            self.headers.append(given)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def test_page_parses_and_has_the_tables(run: Path, page: str) -> None:
    parsed = Page(page)
    table = domain_table(load(run).sections[0], "error")
    shown = next(one for one in parsed.tables if one[0] == ["Method", *table.columns])
    assert shown[1:] == [[line.label, *(cell.plain for cell in line.cells)] for line in table.lines]
    for how in METRICS.values():
        assert f"{how.title} by domain" in page
    assert "The paper's Table 1" in unescape(page)


def test_page_stands_alone(page: str) -> None:
    parsed = Page(page)
    assert not {"script", "link", "iframe", "object", "base"} & set(parsed.seen)
    assert not re.search(r"https?:|@import|url\(", re.sub(r'src="data:[^"]*"', "", page))
    assert len(parsed.images) == len(ONCE)
    for image in parsed.images:
        head, data = image["src"].split(",", 1)
        assert head in ("data:image/svg+xml;base64", "data:image/png;base64")
        assert len(base64.b64decode(data, validate=True)) > 5000


def test_page_is_accessible(page: str) -> None:
    parsed = Page(page)
    assert '<html lang="en">' in page
    assert 'name="viewport"' in page
    assert all(len(image["alt"]) > 40 for image in parsed.images)
    assert all(header.get("scope") in ("col", "row") for header in parsed.headers)
    assert page.count("<caption>") == len(parsed.tables)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert {link.removeprefix("#") for link in parsed.links} <= set(parsed.ids)
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_page_is_honest(page: str) -> None:
    assert "Unfinished, and in no average: PETAL (FIM), order standard-15, seed 2" in page
    assert "One run only, so no standard deviation: Source, BN Adapt" in page
    assert "19 of 20 runs finished" in page
    for said in ("ab" * 32, "cd" * 32, "ef" * 32, "2.13.0", "NVIDIA H200", "petal run cifar10", "restore=fisher:0.03"):
        assert said in page


def test_page_escapes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source", "bn"), batches=1, n=10, orders=(("1", ("fog", NASTY)),), samples=True,
                    manifest={"classes": [NASTY] * 10, "command": "<script>alert(1)</script>", "title": NASTY})  # fmt: skip
    page = write_html([run], tmp_path / "report.html", title="<b>").read_text(encoding="utf-8")
    parsed = Page(page)
    assert not {"script", "i", "b"} & set(parsed.seen)
    assert "<title>&lt;b&gt;</title>" in page


def test_page_of_several_benchmarks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("source",), batches=1, n=5)
    other = write_run(tmp_path / "other", ("source",), batches=1, n=5, manifest={"recipe": "digits", "title": "Digits"})
    page = write_html([run, other], tmp_path / "report.html").read_text(encoding="utf-8")
    parsed = Page(page)
    assert {"s1", "s2", "run"} <= set(parsed.ids)
    assert "Digits, severity 5" in page


def test_page_that_cannot_be_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_html(run, tmp_path / "file" / "report.html")
