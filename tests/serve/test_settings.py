"""Settings from options and TOML: every one arrives, every mistake is named."""

from pathlib import Path
from typing import Any

import pytest

from petal.errors import ConfigError
from petal.serve.settings import Settings, read_toml


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"batch_size": 0}, "batch_size"), ({"http_port": 70000}, "http_port"), ({"engine": "warp"}, "engine"),
        ({"delay_ms": -1.0}, "delay_ms"), ({"input": ()}, "input"), ({"input": (3, 0)}, "input"), ({"name": "a/b"}, "name"),
        ({"request_samples": 60}, "request_samples"), ({"drain_seconds": 60.0}, "drain_seconds"), ({"queue": 0}, "queue"),
        ({"snapshots": 0}, "snapshots"), ({"read_seconds": 0.0}, "read_seconds"), ({"max_body": 10}, "max_body"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Settings(**given)


def test_limits_follow_from_the_sizes() -> None:
    small = Settings(batch_size=8, input=(3, 4, 4))
    assert (small.samples, small.waiting, small.values) == (8, 8, 48)
    assert small.body == 2**20 + 8 * 48 * 24
    assert Settings(batch_size=8, request_samples=2, queue=20).samples == 2
    assert Settings(batch_size=200, input=(3, 512, 512)).body == 256 * 2**20
    assert Settings(max_body=5000).body == 5000


def test_a_toml_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'name = "mine"\nnetwork = "wrn-40-2"\nweights = "net.safetensors"\ninput = [3, 32, 32]\nset = ["petal.ema=0.9"]\n'
        "delay_ms = 5\nbatch_size = 20\nresize = false\nlabels = ['a', 'b']\nclasses = 2\n"
    )
    read = Settings().updated(read_toml(file))
    assert read == Settings(
        name="mine", network="wrn-40-2", weights=tmp_path / "net.safetensors", input=(3, 32, 32), set=("petal.ema=0.9",),
        delay_ms=5.0, batch_size=20, resize=False, labels=("a", "b"), classes=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("batchsize = 3", r"did you mean .*\bbatch_size\b.*\?"), ("batch_size = 'many'", "batch_size cannot be 'many'"),
        ("batch_size = true", "batch_size cannot be True"), ("input = ['a']", "input cannot be"), ("resize = 1", "resize"),
        ("x = ", "is not TOML"), ("meta = {a = 1}", "there is no setting 'meta'"), ("set = 'a'", "set cannot be 'a'"),
    ],
)  # fmt: skip
def test_a_toml_file_with_a_mistake(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=match):
        Settings().updated(read_toml(file))
    with pytest.raises(ConfigError, match="no settings at"):
        read_toml(tmp_path / "none.toml")
