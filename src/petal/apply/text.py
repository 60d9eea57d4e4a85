"""Options that are given as text."""

from petal.errors import ConfigError


def pixels(name: str, text: str) -> int | tuple[int, int] | None:
    """A side, or height and width.

    >>> pixels("--crop", "224"), pixels("--crop", "32x64"), pixels("--crop", "none")
    (224, (32, 64), None)
    """
    if text.strip().lower() == "none":
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.strip().isdecimal() and int(side) > 0 for side in sides):
        raise ConfigError(f"{name} is pixels, such as 224 or 224x320 (height x width), or none; got {text!r}")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def triple(name: str, text: str) -> tuple[float, ...]:
    """One number, or one for each colour.

    >>> triple("--mean", "0.5, 0.4, 0.3")
    (0.5, 0.4, 0.3)
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) not in (1, 3):
        raise ConfigError(f"{name} is one number or three with commas, such as 0.485,0.456,0.406; got {text!r}")
    return found
