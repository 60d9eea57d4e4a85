"""What the commands share: devices and lists on the command line."""

import torch

from petal.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """The device a user asks for; "auto" is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here: use --device cpu")
    return device


def words(text: str) -> list[str]:
    """A list separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
