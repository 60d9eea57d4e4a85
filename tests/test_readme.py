"""What the README shows works as it stands."""

import importlib.util
import re
from pathlib import Path

import pytest

import petal

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 11
    scope: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), scope)
    answer = scope["answer"]
    assert isinstance(answer, petal.Prediction)
    assert ((answer.probability > 0) & (answer.probability <= 1)).all()


@pytest.mark.parametrize("page", ["api", "methods"])
def test_a_reference_page_is_current(page: str, tmp_path: Path) -> None:
    script = README.parent / "tools" / f"make_{page}.py"
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    current, module.PAGE = module.PAGE.read_text(), tmp_path / "page.md"
    module.main()
    assert module.PAGE.read_text() == current, "run `make docs`"


def test_the_examples_of_the_guide_to_your_own_network_run() -> None:
    page = README.parent / "docs" / "guides" / "your-network.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    assert len(blocks) == 4
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), scope)
    assert scope["answer"].label.shape == (16,)


def test_the_examples_of_the_guide_to_applying_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = README.parent / "docs" / "guides" / "apply.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    assert len(blocks) == 2
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), scope)
    assert petal.models.preprocessing_of(scope["resnet"](3)).crop == (224, 224)
    assert scope["source"].config.class_names == ("cat", "dog", "bee", "ant")
