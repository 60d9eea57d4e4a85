"""Logs as JSON lines, and the audit log of everything that changes how or whether the server adapts."""

import json
import logging
import os
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from petal.errors import ConfigError

log = logging.getLogger(__name__)

_PLAIN = {*logging.LogRecord("", 0, "", 0, "", None, None).__dict__, "message", "asctime", "color_message", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a record: time, level, logger, message, and what was given as `extra`.

    >>> record = logging.LogRecord("petal", logging.INFO, "", 1, "served %d", (3,), None)
    >>> sorted(json.loads(JsonLines().format(record)))
    ['level', 'logger', 'message', 'time']
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        out: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        out |= {key: value for key, value in record.__dict__.items() if key not in _PLAIN}
        if record.exc_info:
            out["exception"] = self.formatException(record.exc_info)
        return json.dumps(out, default=str)


def configure(level: int = logging.INFO) -> None:
    """All logs of this process as JSON lines on stderr; those of the libraries from warnings up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    logging.getLogger("petal").setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "kserve", "kserve.trace"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)


class Audit:
    """A file of JSON lines, each on the disk before the action it tells of is answered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        try:
            self.file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the audit log {path}: {error.strerror}") from error

    def write(self, action: str, by: str, **about: Any) -> dict[str, Any]:
        """Add a line. A full disk is told in the log, which has the line too; actions go on."""
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "action": action, "by": by, **about}
        with self.lock:
            try:
                self.file.write(json.dumps(entry, default=str) + "\n")
                self.file.flush()
                os.fsync(self.file.fileno())
            except OSError as error:
                log.warning("%s is not written: %s", self.path, error.strerror)
        log.info("audit: %s", action, extra={k: v for k, v in entry.items() if k != "time"})
        return entry

    def last(self, count: int) -> list[dict[str, Any]]:
        """The latest lines, the newest first."""
        with self.lock, self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 512 * count))
            lines = file.read().decode("utf-8", "replace").splitlines()[-count:]
        out = []
        for line in reversed(lines):
            try:
                out.append(json.loads(line))
            except ValueError:                # the first one may be cut
                continue
        return out

    def close(self) -> None:
        """Let go of the file."""
        with suppress(OSError):                 # what a full disk did not take has been told
            self.file.close()
