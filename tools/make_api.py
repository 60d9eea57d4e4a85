"""Write docs/reference/api.md from the docstrings of the public interface."""

import inspect
from pathlib import Path

import petal

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"


def signature(thing: object) -> str:
    try:
        return str(inspect.signature(thing)).replace("petal.", "")
    except (TypeError, ValueError):
        return ""


def section(name: str, thing: object) -> list[str]:
    lines = [f"## `{name}{signature(thing) if callable(thing) else ''}`", "", inspect.getdoc(thing) or "", ""]
    if inspect.isclass(thing) and thing.__module__.startswith("petal") and not issubclass(thing, Exception):
        for member, value in members(thing).items():
            if member.startswith("_") or not (inspect.isfunction(value) or isinstance(value, (classmethod, property))):
                continue
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            lines += [f"### `{name}.{member}{signature(function)}`", "", inspect.getdoc(function) or "", ""]
    return lines


def members(thing: type) -> dict[str, object]:
    """Its own, and those of bases that are part of no class with a section of its own."""
    public = {getattr(petal, name) for name in petal.__all__ if inspect.isclass(getattr(petal, name))}
    shown = {part for base in thing.__mro__[1:] if base in public for part in base.__mro__}
    ours = [part for part in thing.__mro__ if part.__module__.startswith("petal") and part not in shown]
    parts = [part for part in ours if part is thing or public.isdisjoint(part.__mro__)]
    return {member: value for part in parts for member, value in vars(part).items()} | vars(thing)


def main() -> None:
    lines = ["# The public interface", "", "Made from the docstrings by `make docs`.", ""]
    for name in petal.__all__:
        thing = getattr(petal, name)
        if inspect.ismodule(thing):
            for inner in getattr(thing, "__all__", []):
                if callable(getattr(thing, inner)):
                    lines += section(f"{name}.{inner}", getattr(thing, inner))
        elif callable(thing):
            lines += section(name, thing)
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    PAGE.write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()
