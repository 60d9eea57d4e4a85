"""The site is built without a warning, has every page, and loads nothing from other hosts."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_page_is_in_the_navigation() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"^ +- .*: (\S+\.md)$", settings.split("\nnav:")[1].split("\n\n")[0], flags=re.M))
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".md")) for kind in ("md", "ipynb")
             for path in (ROOT / "docs").rglob(f"*.{kind}") if ".ipynb_checkpoints" not in path.parts}  # fmt: skip
    assert listed - {"index.md", "changelog.md", "contributing.md", "security.md"} == pages, "add it to nav in mkdocs.yml"


class Loads(HTMLParser):
    """What a page loads when it is opened, and where its links lead."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag == "link" and known.get("rel") not in {"canonical", "next", "prev"}:
            self.loaded.append(known["href"] or "")
        if tag in {"script", "img", "iframe", "source", "video", "audio"} and known.get("src"):
            self.loaded.append(known["src"] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
    pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocstrings is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        for address in Loads(page).loaded:
            assert not re.match(r"(?:[a-z]+:)?//", address), f"{page.name} loads {address}"
            if page.name != "404.html" and not address.startswith("data:"):
                assert (page.parent / address.partition("?")[0]).exists(), f"{page.name}: {address} is not there"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8"))


def test_the_pages_have_what_they_are_made_of(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    assert "guides/serving.html" in start
    assert "tutorials/adapt-your-network.html" in start
    tutorial = (site / "tutorials" / "adapt-your-network.html").read_text(encoding="utf-8")
    assert "continues to the bit: True" in tutorial
    assert list((site / "tutorials").glob("adapt-your-network-*.png"))
    reference = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in ("petal.adapt", "petal.Petal", "petal.Adapter.reset", "petal.evaluate.evaluate", "petal.streams.continual"):
        assert f'id="{name}"' in reference, name
    assert "&gt;&gt;&gt;" not in re.sub(r"<code.*?</code>", "", reference, flags=re.S)      # doctests are code
    assert "my_method.html" in (site / "guides" / "adding-a-method.html").read_text(encoding="utf-8")


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[there](#page), [not there](#nowhere), [nor there](none.md)\n")
    kept = [part for part in settings.split("\n\n") if part.startswith(("# The site", "validation"))]
    (tmp_path / "mkdocs.yml").write_text("\n\n".join(kept))
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "#nowhere" in done.stderr
    assert "none.md" in done.stderr
