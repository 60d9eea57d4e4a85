"""What is installed is what is said: bounds, pins, and files of the distribution."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def pins(name: str) -> dict[str, Version]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    given = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {package.lower().replace("_", "-"): Version(version) for package, _, version in given}


def requirements() -> dict[str, list[Requirement]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"core": project["dependencies"], **project["optional-dependencies"]}
    found = {name: [Requirement(text) for text in texts] for name, texts in groups.items()}
    return {name: [r for r in group if r.name != "petal-tta"] for name, group in found.items()}


def lower(requirement: Requirement) -> Version:
    bound, = (Version(s.version) for s in requirement.specifier if s.operator == ">=")
    return bound


def test_the_lowest_set_is_that_of_the_bounds() -> None:
    """torch aside, of which one version has a CPU wheel on the index."""
    lowest = pins("constraints-lowest.txt")
    for requirement in requirements()["core"]:
        if requirement.name != "torch":
            assert lowest[requirement.name] == lower(requirement), requirement.name
    for requirement in requirements()["dev"]:
        if requirement.name in lowest:
            assert lowest[requirement.name].release[:2] == (*lower(requirement).release, 0)[:2], requirement.name


@pytest.mark.parametrize("group", ["core", "sweep", "serve", "dev"])
def test_the_tested_set_pins_all_of_it_within_the_bounds(group: str) -> None:
    tested = pins("constraints.txt")
    for requirement in requirements()[group]:
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(tested[name]), requirement.name
        assert requirement.url is None, "nothing from elsewhere than the index"


def test_extras_are_used() -> None:
    """What an extra asks for by name, the code imports."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for group in ("core", "sweep", "serve"):
        for requirement in requirements()[group]:
            module = {"pillow": "PIL", "scikit-learn": "sklearn"}.get(requirement.name, requirement.name)
            assert re.search(rf"^\s*(?:from|import) {module}\b", code, flags=re.M), requirement.name


def test_the_security_page_says_what_there_is() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)", page):
        assert (ROOT / link).exists(), link
    for path in re.findall(r"`((?:tests|docs)/[^`]+|constraints[^`]*)`", page):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    assert set(re.findall(r"`make ([\w-]+)`", page)) <= targets
