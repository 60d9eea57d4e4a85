"""Weights & Biases: a run in PROJECT, online or as its environment variables say (WANDB_MODE=offline)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from petal.errors import ConfigError
from petal.track.tracker import Tracker

END = "end"


class WandB(Tracker):
    """Numbers as history, the scores of the whole as summary, settings as config; files in FOLDER/wandb.

    A run offline cannot be asked how far it is: with a key, a file FOLDER/wandb/KEY.steps says it. Of an interrupted run
    offline there are several folders with one id, which `wandb sync --append` puts together.
    """

    package: ClassVar[str] = "wandb"

    @property
    def steps(self) -> Path:
        """The positions that were written, one a line."""
        return self.folder / "wandb" / f"{self.key}.steps"

    def written(self) -> int:
        """The position after the last whole line."""
        lines = [line for line in self._lines() if line != END]
        return int(lines[-1]) + 1 if lines else 0

    def ended(self) -> bool:
        """True if the last line says so."""
        return self._lines()[-1:] == [END]

    def _lines(self) -> list[str]:
        text = self.steps.read_text(encoding="utf-8") if self.steps.is_file() else ""
        return text.split("\n")[:-1]

    def begin(self) -> None:
        """Begin a run, or go on with it."""
        wandb = self.needed("wandb")
        (self.folder / "wandb").mkdir(parents=True, exist_ok=True)
        group, _, name = self.name.rpartition("/")
        try:
            self.run: Any = wandb.init(
                project=self.project, name=name, group=group or None, config=self.settings, dir=str(self.folder),
                id=self.key, resume=None if self.key is None else "allow", reinit="create_new",
                settings=wandb.Settings(silent=True, console="off", disable_git=True),
            )  # fmt: skip
        except Exception as error:
            raise ConfigError(f"Weights & Biases cannot begin: {error}. Without an account: WANDB_MODE=offline") from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """A row of the history."""
        self.run.log(dict(values), step=step, commit=True)
        self._note(str(step))

    def write_end(self, step: int, values: Mapping[str, float]) -> None:
        """The summary."""
        self.run.summary.update(dict(values))
        self._note(END)

    def end(self) -> None:
        """End the run."""
        self.run.finish()

    def _note(self, line: str) -> None:
        if self.key is not None:
            with self.steps.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
