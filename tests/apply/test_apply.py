"""Images without labels through an adapter into a file: the numbers, what it did, and going on after a break."""

import csv
import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import petal
from petal import ConfigError, ModelError, models
from petal.apply import Application, Applied, ApplyProgress, Opened, apply
from petal.data import digits
from petal.models import Preprocessing

NAMES = tuple("abcdefghij")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source folder, an .npz of digits and a folder of the same, one of which cannot be read."""
    folder = tmp_path_factory.mktemp("apply")
    model = models.build("small", 10, seed=0, width=8)
    petal.save_source(folder / "source", model, "small", options={"width": 8}, class_names=NAMES)
    images = digits("test").batch(range(40))[0]
    pixels = images.mul(255).round().byte().permute(0, 2, 3, 1).numpy()
    np.savez(folder / "digits.npz", images=pixels)
    (folder / "images").mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / "images" / f"{number}.png")
    (folder / "images" / "7.png").write_bytes(b"no image")
    return folder


def opened(place: Path, path: str = "digits.npz", **settings: object) -> Opened:
    given = {"source": str(place / "source"), "batch_size": 8, "flip": "method" in settings, **settings}
    return Application(**given).open(place / path, torch.device("cpu"))


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_answers_are_those_of_the_adapter(place: Path, tmp_path: Path) -> None:
    found = apply(opened(place, batch_size=40, shuffled=True, engine="eager"), tmp_path / "p.csv")
    adapter = petal.adapt(petal.load_source(place / "source").model, flip=False, shuffled=True, engine="eager")
    x = torch.from_numpy(np.load(place / "digits.npz")["images"]).permute(0, 3, 1, 2).float() / 255
    logits = torch.cat([adapter(batch) for batch in x.split(40)])
    rows = lines(tmp_path / "p.csv")
    assert [int(row["label"]) for row in rows] == logits.argmax(1).tolist()
    assert [row["name"] for row in rows] == [NAMES[n] for n in logits.argmax(1)]
    probability = np.exp(logits.double().numpy())
    probability /= probability.sum(1, keepdims=True)
    np.testing.assert_allclose([float(row["confidence"]) for row in rows], probability.max(1), atol=1e-5)
    spread = -(probability * np.log(probability)).sum(1)
    np.testing.assert_allclose([float(row["entropy"]) for row in rows], spread, atol=1e-5)
    assert [int(row["batch"]) for row in rows] == [0] * 40
    assert [row["image"] for row in rows] == [str(n) for n in range(40)]
    assert {row["did"] for row in rows} == {"adapted"}
    assert (found.images, found.did, found.done, found.unreadable) == (40, {"adapted": 40}, True, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.csv", "p.json"]


def test_what_cannot_be_read_is_in_the_file_and_in_the_summary(place: Path, tmp_path: Path) -> None:
    found = apply(opened(place, "images", method="bn"), tmp_path / "p.csv")
    rows = lines(tmp_path / "p.csv")
    (bad,) = (row for row in rows if not row["label"])
    assert (bad["image"], bad["batch"]) == ("7.png", "0")
    assert bad["did"].startswith("unreadable: truncated or not an image")
    assert found.unreadable.keys() == {"7.png"}
    assert found.did == {"unchanged": 39, "unreadable": 1}         # BN Adapt has no weights that move
    about = json.loads((tmp_path / "p.json").read_text())
    assert about["unreadable"].keys() == {"7.png"}
    assert (about["method"], about["images"], about["class_names"]) == ("bn", 40, list(NAMES))
    assert str(place) not in (tmp_path / "p.json").read_text()
    model = petal.load_source(place / "source").model
    paths = [place / "images" / f"{n}.png" for n in range(8) if n != 7]
    x = torch.stack([torch.from_numpy(np.array(Image.open(p))).permute(2, 0, 1).float() / 255 for p in paths])
    assert [int(row["label"]) for row in rows[:7]] == petal.BatchNorm(model)(x).argmax(1).tolist()


def numbers_of(rows: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    return [(row["label"], row["confidence"], row["entropy"]) for row in rows]


class Killed(Exception):
    pass


def dying(at: int):
    def progress(p: ApplyProgress) -> None:
        if p.batch == at and p.did:
            raise Killed

    return progress


@pytest.mark.parametrize(("method", "every", "at"), [(None, 2, 3), (None, 1, 4), ("rotta+guard", 3, 5), ("tent", 100, 2)])
def test_work_that_was_interrupted_goes_on_to_the_same_file(
    place: Path, tmp_path: Path, method: str | None, every: int, at: int
) -> None:
    own = {} if method is None else {"method": method}
    apply(opened(place, **own), tmp_path / "whole.csv")
    with pytest.raises(Killed):
        apply(opened(place, **own), tmp_path / "p.csv", checkpoint_every=every, progress=dying(at))
    assert not (tmp_path / "p.csv").exists()
    seen: list[ApplyProgress] = []
    apply(opened(place, **own), tmp_path / "p.csv", checkpoint_every=every, progress=seen.append)
    assert seen[0].batch == (at - 1) // every * every
    assert seen[0].resumed == (at > every)
    assert (tmp_path / "p.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert (tmp_path / "p.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert not (tmp_path / "p.progress").exists()


def killed_by_itself(place: Path, out: Path) -> None:
    def progress(p: ApplyProgress) -> None:
        if p.batch == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    apply(opened(place), out, checkpoint_every=1, progress=progress)


def test_kill_9_and_the_same_again(place: Path, tmp_path: Path) -> None:
    apply(opened(place), tmp_path / "whole.csv")
    process = multiprocessing.get_context("fork").Process(target=killed_by_itself, args=(place, tmp_path / "p.csv"))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "p.progress" / "lines.csv").exists()
    apply(opened(place), tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_stopped_and_done(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    half = apply(opened(place), out, stop=iter([False, True]).__next__)
    assert (half.done, half.images) == (False, 16)
    assert apply(opened(place), out).done
    before = out.stat().st_mtime_ns
    again = apply(opened(place), out)
    assert (again.was_done, again.images) == (True, 40)
    assert out.stat().st_mtime_ns == before
    (tmp_path / "p.csv").unlink()                       # its owner wants it again
    assert not apply(opened(place), out).was_done


def test_files_of_others_and_of_other_settings_stay(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="is not what petal wrote"):
        apply(opened(place), out)
    assert out.read_text() == "mine"
    out.unlink()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Killed):
        apply(opened(place), out, checkpoint_every=1, progress=dying(2))
    with pytest.raises(ConfigError, match=r"unfinished work with other settings: batch_size was 8 and is 4\. Give another"):
        apply(opened(place, batch_size=4), out)
    apply(opened(place), out)
    for other, words in (({"seed": 3}, "seed was 0 and is 3"), ({"method": "bn"}, 'method was "petal.adapt" and is "bn"')):
        with pytest.raises(ConfigError, match=words):
            apply(opened(place, **other), out)
    content = out.read_bytes()
    with pytest.raises(ConfigError, match="input was"):
        apply(opened(place, "images"), out)
    with pytest.raises(ConfigError, match=r"as \.csv"):
        apply(opened(place), tmp_path / "p.txt")
    assert out.read_bytes() == content
    out.write_bytes(content + b"x")
    with pytest.raises(ConfigError, match="is not what petal wrote"):
        apply(opened(place), out)


def test_every_option_changes_something(place: Path, tmp_path: Path) -> None:
    def made(name: str, path: str = "digits.npz", **settings: object) -> tuple[Applied, list[dict[str, str]]]:
        found = apply(opened(place, path, **settings), tmp_path / f"{name}.csv")
        return found, lines(tmp_path / f"{name}.csv")

    plain = made("plain")[1]
    numbers = numbers_of(plain)
    changed: dict[str, dict[str, object]] = {
        "flip": {"flip": True}, "batch": {"batch_size": 10}, "method": {"method": "tent"},
        "crop": {"crop": "24"}, "resize": {"resize": "20x24", "crop": "none"}, "mean": {"mean": "0.5", "std": "0.2,0.2,0.2"},
        "interpolation": {"resize": "40x40", "interpolation": "nearest"},
        "set": {"method": "tent", "set": ("tent.lr=0.05",)},
    }  # fmt: skip
    found = {name: numbers_of(made(name, **given)[1]) for name, given in changed.items()}
    assert [name for name, others in found.items() if others == numbers] == []
    assert found["set"] != found["method"]
    twice = np.load(place / "digits.npz")["images"].repeat(2, axis=0)           # two batches that are large
    np.savez(place / "twice.npz", images=twice)
    learning: dict[str, dict[str, object]] = {"plain": {}, "seed": {"seed": 1}, "colour": {"colour": False},
                                              "shuffled": {"shuffled": False}}  # fmt: skip
    last = {
        name: numbers_of(made(f"l-{name}", "twice.npz", **{"batch_size": 40, "shuffled": True, **given})[1])[40:]
        for name, given in learning.items()
    }
    assert [name for name in ("seed", "colour", "shuffled") if last[name] == last["plain"]] == []
    assert found["interpolation"] != numbers_of(made("bilinear", resize="40x40")[1])
    (tmp_path / "names.txt").write_text("\n".join("ABCDEFGHIJ"))
    assert {r["name"] for r in made("names", class_names=tmp_path / "names.txt")[1]} <= set("ABCDEFGHIJ")


def test_a_network_of_ones_own(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_net.py").write_text(
        "import torch\nfrom torch import nn\nfrom petal.models import Preprocessing\ndef net(classes):\n"
        "    torch.manual_seed(0)\n    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), "
        "nn.Linear(4 * 14 * 14, classes))\n"
        "    made.preprocessing = Preprocessing(16, (16, 16), mean=(0.5,) * 3, std=(0.25,) * 3)\n"
        "    return made.eval()\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = Application("own_net:net", classes=3, batch_size=20, method="source")
    here = settings.open(place / "digits.npz", torch.device("cpu"))
    assert here.preprocessing == Preprocessing(16, (16, 16), mean=(0.5,) * 3, std=(0.25,) * 3)
    apply(here, tmp_path / "p.csv")
    import own_net

    whole = np.load(place / "digits.npz")["images"]
    images = [Image.fromarray(image).resize((16, 16), Image.Resampling.BILINEAR) for image in whole]
    x = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 for image in images])
    with torch.no_grad():
        expected = own_net.net(3)((x - 0.5) / 0.25).argmax(1).tolist()
    assert [int(row["label"]) for row in lines(tmp_path / "p.csv")] == expected
    with pytest.raises(ConfigError, match="how many classes own_net:net has"):
        replace(settings, classes=None).open(place / "digits.npz", torch.device("cpu"))


def test_updates_that_are_skipped_are_told(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(petal.Tent):
        count = 0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.logits(self.model, x)
            self.count += 1
            self.descend(logits.sum() * (float("nan") if self.count == 2 else 1e-3))
            return logits

    monkeypatch.setattr(Opened, "adapter", lambda self: Broken(self.opened.model))
    apply(opened(place), tmp_path / "p.csv")
    assert [row["did"] for row in lines(tmp_path / "p.csv")[::8]] == ["adapted", "skipped", *["adapted"] * 3]


def test_alarms_and_rest_are_told(place: Path, tmp_path: Path) -> None:
    settings = ("tent.lr=1e30", "guard.every=1", "guard.cooldown=8")
    with pytest.warns(petal.PetalWarning):
        apply(opened(place, method="tent+guard", set=settings), tmp_path / "p.csv")
    did = [row["did"] for row in lines(tmp_path / "p.csv")[::8]]
    assert "alarm: rollback" in did
    assert did[did.index("alarm: rollback") + 1] == "frozen"


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"source": None}, ConfigError, "say which network"),
        ({"network": "small"}, ConfigError, "one of them"),
        ({"set": ("tent.lr=1",)}, ConfigError, "give --method too"),
        ({"method": "tent", "flip": False}, ConfigError, "are for petal.adapt"),
        ({"method": "tend"}, ConfigError, "did you mean tent"),
        ({"mean": "0.5"}, ConfigError, "belong together"),
        ({"mean": "a", "std": "1"}, ConfigError, "one number or three"),
        ({"resize": "0"}, ConfigError, "pixels, such as 224"),
        ({"source": None, "network": "small", "classes": 10}, ConfigError, "--source or --weights"),
        ({"source": None, "network": "small", "pretrained": True, "classes": 10}, ConfigError, "pretrained is for networks"),
        ({"source": "nowhere"}, ModelError, "no source at nowhere"),
    ],
)
def test_mistakes_are_said_before_anything_is_written(
    place: Path, tmp_path: Path, settings: dict[str, object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        apply(opened(place, **settings), tmp_path / "p.csv")
    assert list(tmp_path.iterdir()) == []


def test_names_must_be_as_many_as_classes(place: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("a\nb\n")
    with pytest.raises(ConfigError, match="2 class names for 10 classes"):
        opened(place, class_names=tmp_path / "names.txt")
