"""Write docs/reference/methods.md from the cards and docstrings of the methods."""

import inspect
from pathlib import Path

import petal
from petal.recipes import WRAPPERS

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "methods.md"
HEAD = """# The methods

Made from the methods' cards and docstrings by `make docs`; `petal methods` prints the same table. "Small batches": works for
batches of a few images. "Correlated labels": works where labels come in runs. `petal+small` makes any method work on small
batches (`petal.SmallBatch`). `...+asr` and `...+reservoir` go around a method that adapts one network: `eta+asr`,
`eata+reservoir`.

| name | method | year | adapts | needs | small batches | correlated labels |
| --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    around = {f"...+{name}": wrapper for name, wrapper in WRAPPERS.items() if wrapper.card is not None}
    known = {**petal.METHODS, **around}
    cards = {name: method.card for name, method in known.items()}
    rows = [f"| `{name}` | {' | '.join([card.title, str(card.year), *card.cells()])} |" for name, card in cards.items()]
    parts = []
    for name, method in known.items():
        signature = str(inspect.signature(method)).replace("petal.", "")
        heading = f"## {cards[name].title}"
        call = f"`petal.{method.__name__}{signature}`"
        parts += ["", heading, "", call, "", f"{cards[name].paper}.", "", inspect.getdoc(method)]
    PAGE.write_text(HEAD + "\n".join(rows + parts) + "\n")


if __name__ == "__main__":
    main()
