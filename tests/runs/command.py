"""`petal run` and `petal tune` in this process, on a few digits."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from petal.cli import app

FEW = ["--images", "16", "--batch-size", "8"]


def call(*arguments: object) -> str:
    """What a command says; its error is raised."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def of(source: Path) -> list[str]:
    """The options that name a folder's network and posterior."""
    return ["--weights", str(source / "network.safetensors"), "--posterior", str(source / "posterior.safetensors")]


def records(folder: Path, job: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "jobs" / job / "records.jsonl").read_text().splitlines()]
