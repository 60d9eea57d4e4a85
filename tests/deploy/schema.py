"""Manifests against the models that the clients of Kubernetes and KServe ship, field by field."""

import re
from typing import Any

SIMPLE: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "float": (int, float), "bool": bool, "datetime": str, "object": object,
}  # fmt: skip


def problems(value: Any, kind: str, modules: tuple[Any, ...], where: str = "") -> list[str]:
    """What does not fit the type of that name, such as V1Deployment: unknown fields, wrong types, missing ones."""
    if kind == "IntOrString" or kind == "object":
        return []
    if kind in SIMPLE:
        wrong = not isinstance(value, SIMPLE[kind]) or (kind == "int" and isinstance(value, bool))
        return [f"{where}: {value!r} is no {kind}"] if wrong else []
    if found := re.fullmatch(r"list\[(.*)\]", kind, re.I):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        return [p for number, one in enumerate(value) for p in problems(one, found[1], modules, f"{where}[{number}]")]
    if found := re.fullmatch(r"dict[\[(](\w+), (.*)[\])]", kind, re.I):
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no mapping"]
        return [p for key, one in value.items() for p in problems(one, found[2], modules, f"{where}.{key}")]
    model = next((getattr(module, kind) for module in modules if hasattr(module, kind)), None)
    if model is None:
        return []                               # quantities and the like
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no {kind}"]
    names = {name: key for key, name in model.attribute_map.items()}
    out = [f"{where}.{name}: a {kind} has no such field" for name in value if name not in names]
    for name, one in value.items():
        if name in names:
            out += problems(one, model.openapi_types[names[name]], modules, f"{where}.{name}")
    try:
        model(**{names[name]: one for name, one in value.items() if name in names})
    except ValueError as error:                 # what is required and not there
        out.append(f"{where}: {error}")
    return out
