"""What is known of a method, for tables and for those who choose one."""

from dataclasses import dataclass

AFFINE = "scale and shift of norm layers"


@dataclass(frozen=True)
class Card:
    """A method's paper, what it adapts and needs, and the streams that it suits."""

    title: str                              # as in tables: "ROID"
    paper: str                              # authors, title, venue
    year: int
    adapts: str                             # "all weights"
    needs: tuple[str, ...] = ()             # of "batch norm", "posterior", "prototypes", "fisher", "source data"
    small_batches: bool = False             # works for batches of a few images
    correlated_labels: bool = False         # works where labels come in runs
    random: bool = True                     # draws random numbers: several seeds give several results

    def cells(self) -> tuple[str, str, str, str]:
        """What it adapts and needs, and if it suits small batches and correlated labels, as text for a table."""
        needs = ", ".join(self.needs) or "-"
        return self.adapts, needs, "yes" if self.small_batches else "-", "yes" if self.correlated_labels else "-"
