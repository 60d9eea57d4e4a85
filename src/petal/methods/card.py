"""What is known of a method, for tables and for those who choose one."""

from dataclasses import dataclass

AFFINE = "scale and shift of norm layers"
NO_BATCH_NORM = "without batch norm"        # suits such streams where norms do not look at the batch


@dataclass(frozen=True)
class Card:
    """A method's paper, what it adapts and needs, and the streams that it suits."""

    title: str                              # as in tables: "ROID"
    paper: str                              # authors, title, venue
    year: int
    adapts: str                             # "all weights"
    needs: tuple[str, ...] = ()             # of "batch norm", "posterior", "prototypes", "fisher", "source data"
    small_batches: bool | str = False       # works for batches of a few images; a text says on which networks
    correlated_labels: bool | str = False   # works where labels come in runs; likewise
    random: bool = True                     # draws random numbers: several seeds give several results

    def cells(self) -> tuple[str, str, str, str]:
        """What it adapts and needs, and if it suits small batches and correlated labels, as text for a table."""
        suits = [("yes" if suited is True else suited or "-") for suited in (self.small_batches, self.correlated_labels)]
        return self.adapts, ", ".join(self.needs) or "-", suits[0], suits[1]
