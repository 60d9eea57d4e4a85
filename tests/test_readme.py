"""What the README shows works as it stands."""

import re
from pathlib import Path

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


def test_the_api_page_is_current(tmp_path: Path) -> None:
    import importlib.util

    script = README.parent / "tools" / "make_api.py"
    spec = importlib.util.spec_from_file_location("make_api", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    current, module.PAGE = module.PAGE.read_text(), tmp_path / "api.md"
    module.main()
    assert module.PAGE.read_text() == current, "run `make docs`"
