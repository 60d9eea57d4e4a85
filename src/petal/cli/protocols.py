"""`petal protocols`: the names of the ways to evaluate."""

from rich.console import Console
from rich.table import Table

from petal.runs import PROTOCOLS


def protocols() -> None:
    """List the protocols of `petal run RECIPE --protocol NAME`: each fixes everything about the stream.

    Behind a name may stand a severity and how many images of each domain to take: table1-2000, continual-s3, table1-s3-500.
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "recipes", "orders", "what it is"):
        table.add_column(heading, no_wrap=heading != "what it is")
    for known in PROTOCOLS.values():
        orders = "the recipe's" if known.orders is None else ", ".join(map(str, known.orders))
        table.add_row(known.name, ", ".join(known.recipes) or "any continual", orders, known.about)
    Console().print(table)
