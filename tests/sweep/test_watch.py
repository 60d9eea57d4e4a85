import json
from pathlib import Path

from petal.sweep import JobWatch


def line(position: int, error: float = 0.5, n: int = 2) -> str:
    return json.dumps({"position": position, "error": error, "n": n}) + "\n"


def test_follows_a_file_through_a_new_beginning(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    watch = JobWatch(tmp_path, 10)
    watch.look()
    assert (watch.position, watch.restarts) == (0, 0)
    path.write_text(line(0, 0.0) + line(1, 1.0, 6) + line(2)[:9])
    watch.look()
    assert (watch.position, watch.error) == (2, 0.75)
    with path.open("a") as file:
        file.write(line(2, 1.0)[9:])
    watch.look()
    assert (watch.position, watch.error) == (3, 0.8)
    path.write_text(line(0, 0.0))  # the job was lost and began again at an earlier checkpoint
    watch.look()
    assert (watch.position, watch.error, watch.restarts) == (1, 0.0, 1)
    path.write_text(line(0, 1.0) + line(1, 1.0) + line(2, 1.0)[:-2])
    watch.look()
    assert (watch.position, watch.restarts) == (2, 1)
    path.write_text(" " * 200 + "\n" + line(0))  # longer than before, and not a continuation
    watch.look()
    assert (watch.position, watch.restarts) == (0, 2)
