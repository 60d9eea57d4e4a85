"""What the site adds to MkDocs: pages from outside docs/, notebooks as pages, the reference from the docstrings themselves.

The README is the start page. A link is written for the repository, where it leads from file to file, and is led to the page
of that file here. `docs/reference/api.md` is for readers of the repository; on the site mkdocstrings shows the same names at
the same address, with links between them, so that the site does not say everything twice.
"""

import base64
import inspect
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import petal

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(\]\()([^)\s]+)(\))|((?:src|href)=\")([^\"]+)(\")")
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", flags=re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/ and those of notebooks."""
    for name, page in OUTSIDE.items():
        if (ROOT / name).exists():
            files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = f"# examples/{path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, f"examples/{path.stem}.md", content=text))
    files.append(File.generated(config, "files/LICENSE.txt", content=(ROOT / "LICENSE").read_text(encoding="utf-8")))
    files.append(File.generated(config, "files/CITATION.cff", content=(ROOT / "CITATION.cff").read_text(encoding="utf-8")))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        add_notebook(files, config, file)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to pages; put mkdocstrings in the place of the generated reference."""
    here = page.file.src_uri
    if here == "reference/api.md":
        return reference()
    parts = CODE.split(fenced(markdown))
    return "".join(part if n % 2 else LINK.sub(lambda found: led(found, here), part) for n, part in enumerate(parts))


# Links


def led(found: re.Match[str], here: str) -> str:
    """A link or picture of a page as it is on the site."""
    before, link, after = (part for part in found.groups() if part is not None)
    if re.match(r"[a-z]+:|#|/", link):
        return found[0]
    path, mark, anchor = link.partition("#")
    target = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(here)), path)))
    return f"{before}{posixpath.relpath(target, posixpath.dirname(here) or '.')}{mark}{anchor}{after}"


def in_repository(page: str) -> str:
    """The file of a page, from the root of the repository."""
    return next((name for name, known in OUTSIDE.items() if known == page), f"docs/{page}")


def site_path(path: str) -> str:
    """The page of a file, from docs/."""
    path = OUTSIDE.get(path, path.removeprefix("docs/"))
    if path in {"LICENSE", "CITATION.cff"}:
        return {"LICENSE": "files/LICENSE.txt"}.get(path, f"files/{path}")
    return re.sub(r"^examples/(\w+)\.py$", r"examples/\1.md", path).replace(".ipynb", ".md")


# Notebooks


def add_notebook(files: Files, config: MkDocsConfig, file: File) -> None:
    """The page of a notebook and its pictures; the notebook itself can be downloaded."""
    page = file.src_uri.removesuffix(".ipynb")
    notebook = json.loads(file.content_string)
    parts = []
    for number, cell in enumerate(notebook["cells"]):
        text = "".join(cell["source"]).rstrip()
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            picture = output.get("data", {}).get("image/png")
            if picture:
                name = f"{page}-{number}.png"
                files.append(File.generated(config, name, content=base64.b64decode(picture)))
                parts.append(f"![What the code above draws]({posixpath.basename(name)})")
            elif shown := printed(output):
                parts.append(shown)
    name = posixpath.basename(file.src_uri)
    parts.insert(1, f'This page is a notebook: <a href="{name}" download>download it</a> and run it yourself.')
    files.append(File.generated(config, f"{page}.md", content="\n\n".join(parts) + "\n"))


def printed(output: dict[str, Any]) -> str:
    """The text of an output as Markdown."""
    data = output.get("data", {})
    if "text/markdown" in data:
        return "".join(data["text/markdown"])
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return f"``` {{.text .output}}\n{text}\n```" if text else ""


# The reference


def reference() -> str:
    """The page of the public interface, as directives for mkdocstrings."""
    functions: list[str] = []
    methods: list[str] = []
    values: list[str] = []
    errors: list[str] = []
    groups = {"Functions": functions, "Methods, and what goes around them": methods, "Values": values, "Errors": errors}
    for name in petal.__all__:
        thing = getattr(petal, name)
        if inspect.ismodule(thing):
            inner = [key for key in getattr(thing, "__all__", []) if callable(getattr(thing, key))]
            groups[f"petal.{name}"] = [directive(f"petal.{name}.{key}", getattr(thing, key)) for key in inner]
        elif inspect.isclass(thing):
            error, adapts = issubclass(thing, BaseException), issubclass(thing, petal.Adapter)
            (errors if error else methods if adapts else values).append(directive(f"petal.{name}", thing))
        elif callable(thing):
            functions.append(directive(f"petal.{name}", thing))
    parts = ["# The public interface", "From the docstrings."]
    for title, found in groups.items():
        if found:
            parts += [f"## {title}", *found]
    return "\n\n".join(parts)


def directive(name: str, thing: object) -> str:
    """What mkdocstrings is told: the public name, or where a thing is defined if a module has the same name."""
    if name not in sys.modules:
        return f"::: {name}"
    return f"::: {thing.__module__}.{thing.__qualname__}\n    options: {{heading: {name.rpartition('.')[2]}}}"


class Doctests(griffe.Extension):
    """Fences the doctests of every docstring that mkdocstrings shows: it loads this file too."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called for everything that is loaded."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with its doctests as blocks of code: in Markdown a line that begins with >>> is a quotation.

    >>> print(fenced("It adds.\\n\\n>>> 1 + 1\\n2\\n\\nAlways."))
    It adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    Always.
    """
    return re.sub(r"^>>> (?:.+\n?)+", lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text, flags=re.M)
