"""Nothing in the project unpickles what it did not write; the one reader of pickles has a list of what it may make."""

import ast
from pathlib import Path

import petal

ROOT = Path(petal.__file__).parent
UNSAFE = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
KNOWN = {"data/cifar.py"}  # CIFAR's published batches: an unpickler that knows a uint8 array and no other name


def problems(name: str, text: str) -> list[str]:
    """Calls and imports by which a file could run code that lies in data."""
    found = []
    for node in ast.walk(ast.parse(text)):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if name not in KNOWN:
                found += [f"{where} imports {m}" for m in modules if m.split(".")[0] in UNSAFE]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if called == "torch.load" and given.get("weights_only") != "True":
            found.append(f"{where} calls torch.load without weights_only=True")
        if called.endswith(("np.load", "numpy.load", "read_array")) and given.get("allow_pickle", "False") != "False":
            found.append(f"{where} allows pickles")
        if called in ("pickle.load", "pickle.loads", "pickle.Unpickler"):
            found.append(f"{where} calls {called}")
        if called in ("eval", "exec", "yaml.load", "yaml.unsafe_load"):
            found.append(f"{where} calls {called}")
    return found


def test_nothing_unpickles_untrusted_data() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 50
    found = [p for f in files for p in problems(f.relative_to(ROOT).as_posix(), f.read_text(encoding="utf-8"))]
    assert not found


def test_the_search_finds_what_it_is_for() -> None:
    for text in (
        "import pickle", "from joblib import load", "torch.load(path)", "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)", "pickle.loads(b)", "eval(text)", "import numpy, dill",
    ):  # fmt: skip
        assert problems("some.py", text), text
    for text in ("torch.load(path, weights_only=True)", "np.load(path, allow_pickle=False)", "model.eval()", "np.load(p)"):
        assert not problems("some.py", text), text
    assert problems("data/cifar.py", "pickle.load(file)")
