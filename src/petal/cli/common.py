"""What the commands share: devices and lists on the command line."""

import os
import sys
from typing import Any

import torch
from rich.console import Console

from petal.engine import keep_freed_memory
from petal.errors import ConfigError
from petal.parallel import started

PIPED = 240     # columns where nobody looks at them: names stay whole


def make_console(stderr: bool = False, **options: Any) -> Console:
    """Where a command prints: as wide as the terminal, whatever it is, and wide where there is none."""
    console = Console(stderr=stderr, **options)
    if os.environ.get("COLUMNS", "").isdecimal() or (console.is_terminal and not console.is_dumb_terminal):
        return console                      # rich finds it out, and follows when a window changes
    try:
        size = os.get_terminal_size((sys.stderr if stderr else sys.stdout).fileno())
    except (OSError, ValueError, AttributeError):
        size = os.terminal_size((PIPED, 25))
    return Console(stderr=stderr, width=size.columns or PIPED, height=size.lines or 25, **options)


def choose_device(name: str) -> torch.device:
    """The device a user asks for, and this process made ready for it; "auto" is a GPU if there is one.

    Each rank of several takes its own GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here: use --device cpu")
    if device.type == "cuda" and device.index is None and started():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.cuda.device_count():
            raise ConfigError(f"local rank {device.index} has no GPU: start {torch.cuda.device_count()} ranks here")
        torch.cuda.set_device(device)
    if device.type == "cpu":
        keep_freed_memory()
    return device


def words(text: str) -> list[str]:
    """A list separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
