"""How far a job is, from its records on disk: so it can be watched from anywhere, through any number of new beginnings."""

import json
from pathlib import Path


class JobWatch:
    """Follows the records of one job. `position` counts its batches, `error` is over all images so far."""

    def __init__(self, place: Path, batches: int) -> None:
        self.path, self.batches = place / "records.jsonl", batches
        self.restarts = 0
        self._forget()

    def _forget(self) -> None:
        self.position, self._end, self._wrong, self._seen = 0, 0, 0.0, 0

    @property
    def error(self) -> float:
        """Share of the images so far that were predicted wrongly."""
        return self._wrong / max(self._seen, 1)

    def look(self) -> None:
        """Read what has been added. A file that was cut off, because the job began again, is read anew."""
        try:
            size = self.path.stat().st_size
            if size < self._end or not self._read():
                self.restarts += 1
                self._forget()
                self._read()
        except FileNotFoundError:
            self._forget()

    def _read(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break                   # it is being written
                try:
                    record = json.loads(line)
                    if record["position"] != self.position:
                        return False
                except (ValueError, KeyError, TypeError):
                    return False
                self.position += 1
                self._end += len(line)
                self._wrong += record["error"] * record["n"]
                self._seen += record["n"]
        return True
