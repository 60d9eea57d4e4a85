import warnings

from rich.console import Console

from petal import PetalWarning
from petal.cli.options import shown_warnings


def test_a_warning_is_shown_as_it_is() -> None:
    """A path may look like the markup of the terminal."""
    console = Console(record=True, width=80)
    with shown_warnings(console):
        warnings.simplefilter("always")
        warnings.warn("cannot write [/x] or [bold]", PetalWarning, stacklevel=1)
    assert console.export_text() == "warning: cannot write [/x] or [bold]\n"
