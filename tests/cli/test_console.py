"""Where commands print: as wide as there is room, and names whole in a pipe."""

import os
import pty
import struct
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
import rich.console

from petal.cli.common import PIPED, make_console


def test_a_pipe_is_wide_enough_for_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert make_console().width == PIPED
        monkeypatch.setenv("COLUMNS", "99")
        assert make_console().width == 99


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_a_terminal_is_used_as_wide_as_it_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", kind)
    master, slave = pty.openpty()
    try:
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 157, 0, 0))
        with os.fdopen(slave, "w") as terminal:
            monkeypatch.setattr(sys, "stdout", terminal)
            monkeypatch.setattr(rich.console, "_STD_STREAMS", (slave,))    # where rich asks for the size
            assert make_console().width == 157
    finally:
        os.close(master)
