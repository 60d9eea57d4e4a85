"""Doctests of a docstring as blocks of code: in Markdown a line that begins with >>> is a quotation.

`make_api.py` and `make_methods.py` use `fenced`, the site the extension.
"""

import re

import griffe


def fenced(text: str) -> str:
    """The text with its doctests, from their first line to the next empty one, between fences.

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


class Doctests(griffe.Extension):
    """Fences the doctests of every docstring that the site shows."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called for everything that is loaded."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
