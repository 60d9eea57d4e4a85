"""The pages: their links lead somewhere, and what they say about the code is what the code says."""

import json
import re
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest

import petal

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def written(page: Path) -> str:
    """A page's Markdown; of a notebook that of its cells of text."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def prose(page: Path) -> str:
    """A page without its blocks and spans of code, where brackets are no links."""
    text = re.sub(r"^```.*?^```$", "", written(page), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", written(page), flags=re.M | re.S)
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.M):
        name = re.sub(r"[^\w\- ]", "", heading.replace("\\", "").lower()).replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)


def links(page: Path) -> list[str]:
    text = prose(page)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES + TUTORIALS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_what_the_guide_of_methods_names_is_there() -> None:
    page = (ROOT / "docs" / "guides" / "adding-a-method.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`petal((?:\.\w+)+)", page))
    assert len(names) > 30
    for name in names:
        attrgetter(name[1:])(petal)
        assert attrgetter(name[1:])(petal).__doc__, name


def test_links_are_found() -> None:
    assert len(links(ROOT / "README.md")) > 8
    assert "images/serve-phone.png" in links(ROOT / "docs" / "guides" / "serving.md")
    assert "three-million-images" in anchors(ROOT / "docs" / "guides" / "lifelong.md")


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached = [ROOT / "README.md"]
    for page in reached:
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
        reached += [t for t in dict.fromkeys(targets) if t.suffix in (".md", ".ipynb") and t not in reached]
    assert set(PAGES + TUTORIALS) <= set(reached)


def test_the_architecture_page_has_the_layers_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = [re.split(r"\s*[:|]\s*", layer) for layer in next(c for c in contracts if c["type"] == "layers")["layers"]]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block, = re.findall(r"^```layers\n(.*?)^```$", page, flags=re.M | re.S)
    drawn = [re.split(r"\s{3,}", line)[0].split() for line in block.splitlines()]
    assert [sorted(names) for names in drawn] == [sorted(names) for names in layers]
