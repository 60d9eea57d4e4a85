import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from petal import corruptions
from petal.data import digits, from_arrays, image_folder, imagenet_c, open_dataset, streams, write, write_corrupted
from petal.errors import DataError

from .fakes import toy


def levels(x):
    """A stream's pixels as bytes, exactly."""
    scaled = x * 255
    assert torch.allclose(scaled, scaled.round(), atol=1e-4)
    return scaled.round().byte()


def class_folders(root, labels, size=16, suffix="png"):
    for k, label in enumerate(labels):
        (root / label).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(k).integers(0, 256, (size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / label / f"image {k:02}.{suffix}")
    return root


def snapshot(root):
    return {p.relative_to(root): (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["cifar", "imagenet"])
def test_npy_has_the_images_of_a_stream(tmp_path, profile):
    names = ("gaussian_noise", "glass_blur", "frost", "jpeg_compression")
    write_corrupted(digits(), tmp_path / "c", names=names, profile=profile, seed=7, images=11, batch_size=4)
    read = open_dataset(tmp_path / "c")
    assert len(read) == 11
    for severity in (1, 5):
        made = streams.continual(digits(), names, severity=severity, images=11, batch_size=6, seed=7, profile=profile)
        filed = streams.continual(read, names, severity=severity, batch_size=6)
        for a, b in zip(made, filed, strict=True):
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.y, b.y)
            assert (a.domain, a.severity) == (b.domain, b.severity)


def test_npy_is_the_published_layout(tmp_path):
    data = digits()
    done = write_corrupted(data, tmp_path, names=["fog", "contrast"], images=6)
    assert (done.layout, done.profile, done.images) == ("npy", "cifar", 6)
    assert done.made == ("fog.npy", "contrast.npy")
    labels, fog = np.load(tmp_path / "labels.npy"), np.load(tmp_path / "fog.npy")
    assert (labels.dtype, fog.dtype, fog.shape) == (np.uint8, np.uint8, (30, 32, 32, 3))
    np.testing.assert_array_equal(labels, np.tile(data.labels[:6].numpy(), 5))
    x, _ = data.batch(range(6))
    for severity in range(1, 6):        # straight from the corruption, not through a stream
        keys = corruptions.image_keys(0, "fog", severity, range(6))
        expected = np.floor(corruptions.corrupt(x, "fog", severity, keys=keys).numpy() * np.float32(255)).astype(np.uint8)
        np.testing.assert_array_equal(fog[6 * (severity - 1) : 6 * severity], expected.transpose(0, 2, 3, 1))


def test_folders_have_the_images_of_a_stream(tmp_path):
    clean = class_folders(tmp_path / "clean", ["cat", "ant", "bee", "cat", "ant"])
    done = write_corrupted(image_folder(clean), tmp_path / "c", names=["fog", "shot_noise"], severities=[5, 2], seed=3)
    assert done.layout == "folders"
    assert done.made == ("fog/2", "fog/5", "shot_noise/2", "shot_noise/5")
    assert sorted(p.name for p in (tmp_path / "c" / "fog").iterdir()) == ["2", "5"]
    assert (tmp_path / "c" / "fog" / "5" / "cat" / "image 03.png").is_file()
    for read in (open_dataset(tmp_path / "c"), imagenet_c(tmp_path / "c", size=None)):
        assert read.classes == ("ant", "bee", "cat")
        made = streams.continual(image_folder(clean), ["fog", "shot_noise"], severity=2, seed=3, batch_size=2)
        for a, b in zip(made, streams.continual(read, ["fog", "shot_noise"], severity=2, batch_size=2), strict=True):
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.y, b.y)


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (["c0", "c1", "c2", "c3"], ["c0", "c1", "c2", "c3"]),
        (["zebra", "ant eater", "../bee", "cat"], ["0_zebra", "1_ant_eater", "2__bee", "3_cat"]),
        (None, ["0", "1", "2", "3"]),
    ],
)
def test_class_folders_keep_the_labels(tmp_path, classes, expected):
    images = torch.rand(9, 3, 16, 16)
    labels = torch.tensor([3, 1, 3, 3, 0, 1, 0, 1, 3])          # no image of class 2, and of the first three none of 0
    data = from_arrays(images, labels, classes=classes)
    write_corrupted(data, tmp_path, layout="folders", names=["contrast"], severities=[1], images=3)
    read = open_dataset(tmp_path)
    assert list(read.classes) == expected[: 4 if classes else labels.max() + 1]
    assert read.labels.tolist() == [1, 3, 3]
    assert [p.stem for p in sorted((tmp_path / "contrast" / "1").glob("*/*"))] == ["1", "0", "2"]


def test_jpeg_files_are_near(tmp_path):
    smooth = torch.nn.functional.interpolate(torch.rand(3, 3, 4, 4), size=(32, 32), mode="bilinear")
    data = from_arrays(smooth, [0, 0, 0])
    write_corrupted(data, tmp_path, layout="folders", names=["brightness"], severities=[3], image_format="jpg")
    x, _ = open_dataset(tmp_path).corrupted("brightness", 3).batch([0, 1, 2])
    exact = next(iter(streams.single(data, "brightness", severity=3))).x
    assert 0 < (x - exact).abs().mean() < 0.03
    assert (tmp_path / "brightness" / "3" / "0" / "2.jpg").is_file()


def test_a_part_of_the_severities(tmp_path):
    write_corrupted(digits(), tmp_path, names=["fog"], severities=[5, 3], images=4)
    read = open_dataset(tmp_path)
    made = next(iter(streams.single(digits(), "fog", severity=3, images=4))).x
    assert torch.equal(read.corrupted("fog", 3).batch(range(4))[0], made)
    assert len(np.load(tmp_path / "fog.npy")) == 20
    with pytest.raises(DataError, match="written without severity 1"):
        read.corrupted("fog", 1)


def test_other_sizes_and_classes_are_read_back(tmp_path):
    data = from_arrays(torch.rand(3, 3, 24, 40), [11, 0, 5], name="mine")
    write_corrupted(data, tmp_path, names=["pixelate"])
    read = open_dataset(tmp_path)
    assert read.name == "mine-c"
    assert read.classes is None
    assert read.corrupted("pixelate", 1).batch([0])[0].shape == (1, 3, 24, 40)
    write_corrupted(digits(), tmp_path / "digits", names=["pixelate"], images=2)
    assert open_dataset(tmp_path / "digits").classes == tuple("0123456789")     # and not airplane, automobile, ...


@pytest.mark.parametrize(("side", "profile"), [(96, "cifar"), (97, "imagenet")])
def test_profile_by_size(tmp_path, side, profile):
    data = from_arrays(torch.rand(1, 3, 16, side), [0])
    assert write_corrupted(data, tmp_path, names=["contrast"]).profile == profile


def test_memory_stays_bounded(tmp_path, monkeypatch):
    """Never more than a batch of images is read or corrupted at a time."""
    seen = []
    genuine = corruptions.corrupt
    monkeypatch.setattr(corruptions, "corrupt", lambda x, *a, **k: seen.append(len(x)) or genuine(x, *a, **k))
    write_corrupted(digits(), tmp_path, names=["contrast"], images=50, batch_size=8)
    assert max(seen) == 8
    assert sum(seen) == 5 * 50


def test_progress(tmp_path):
    calls = []
    write_corrupted(digits(), tmp_path, names=["fog", "contrast"], images=5, batch_size=3, progress=calls.append)
    assert [c.done for c in calls if c.corruption == "fog"] == [0, 3, 6, 9, 12, 15, 17, 19, 21, 23, 25]
    assert {c.total for c in calls} == {50}
    assert calls[-1] == write.WriteProgress("contrast", 50, 50)


# -- whole or not at all, and again ------------------------------------------------------------------------------------


class Stopped(BaseException):
    """As KeyboardInterrupt is: not an Exception."""


@pytest.mark.parametrize("layout", ["npy", "folders"])
def test_an_interrupted_run_is_repeated(tmp_path, layout):
    arguments = {"names": ["contrast", "brightness", "pixelate"], "images": 6, "batch_size": 4, "layout": layout}

    def stop(now):
        if now.corruption == "brightness" and now.done > 35:
            raise Stopped

    with pytest.raises(Stopped):
        write_corrupted(digits(), tmp_path / "a", progress=stop, **arguments)
    left = snapshot(tmp_path / "a")
    assert not [path for path in left if "brightness" in str(path) or "tmp" in str(path)]
    assert not list((tmp_path / "a").rglob("*.tmp"))
    done = write_corrupted(digits(), tmp_path / "a", **arguments)
    assert {unit.partition("/")[0].removesuffix(".npy") for unit in done.kept} == {"contrast"}
    assert {unit.partition("/")[0].removesuffix(".npy") for unit in done.made} == {"brightness", "pixelate"}
    after = snapshot(tmp_path / "a")
    assert {path: after[path] for path in left} == left              # not touched
    write_corrupted(digits(), tmp_path / "b", **arguments)
    assert {p: v[1] for p, v in after.items()} == {p: v[1] for p, v in snapshot(tmp_path / "b").items()}
    assert write_corrupted(digits(), tmp_path / "a", **arguments).made == ()


@pytest.mark.parametrize("layout", ["npy", "folders"])
def test_what_a_killed_run_left_is_cleared_away(tmp_path, layout):
    write_corrupted(digits(), tmp_path, names=["contrast"], images=3, layout=layout)
    dead = max(int(p) for p in os.listdir("/proc") if p.isdecimal()) if os.path.isdir("/proc") else 1
    while write._alive(dead):
        dead += 1
    mine = tmp_path if layout == "npy" else tmp_path / "fog"
    mine.mkdir(exist_ok=True)
    left, working = mine / f".x.{dead}.tmp", mine / f".x.{os.getppid()}.tmp"
    left.mkdir()
    (left / "half").write_bytes(b"0")
    working.write_bytes(b"0")
    write_corrupted(digits(), tmp_path, names=["fog"], images=3, layout=layout)
    assert not left.exists()
    assert working.exists()


@pytest.mark.parametrize("layout", ["npy", "folders"])
def test_corruptions_may_be_added(tmp_path, layout):
    write_corrupted(digits(), tmp_path, names=["contrast"], images=3, layout=layout)
    done = write_corrupted(digits(), tmp_path, names=["contrast", "saturate"], images=3, layout=layout)
    assert {unit[:8] for unit in done.made} == {"saturate"}
    assert open_dataset(tmp_path).corruptions == ("contrast", "saturate")


def test_severities_may_be_added_in_folders(tmp_path):
    first = write_corrupted(digits(), tmp_path, names=["fog"], images=3, layout="folders", severities=[5])
    second = write_corrupted(digits(), tmp_path, names=["fog"], images=3, layout="folders", severities=[1, 5])
    assert (first.made, second.made, second.kept) == (("fog/5",), ("fog/1",), ("fog/5",))
    write_corrupted(digits(), tmp_path / "npy", names=["fog"], images=3, severities=[5])
    with pytest.raises(DataError, match=r"severities was \[5\] and is \[1, 5\]"):
        write_corrupted(digits(), tmp_path / "npy", names=["fog"], images=3, severities=[1, 5])


@pytest.mark.parametrize("layout", ["npy", "folders"])
def test_overwrite(tmp_path, layout):
    def go(names, seed, **more):
        return write_corrupted(digits(), tmp_path / "c", names=names, images=3, layout=layout, seed=seed, **more)

    go(["gaussian_noise", "fog"], 0)
    before = snapshot(tmp_path / "c")
    with pytest.raises(DataError, match="seed was 0 and is 1"):
        go(["gaussian_noise", "fog"], 1)
    with pytest.raises(DataError, match=r"seed was 0 and is 1.*fog.* would stay"):
        go(["gaussian_noise"], 1, overwrite=True)
    assert snapshot(tmp_path / "c") == before
    assert go(["gaussian_noise"], 0, overwrite=True).kept == ()
    again = snapshot(tmp_path / "c")
    assert {p: v[1] for p, v in again.items()} == {p: v[1] for p, v in before.items()}
    assert any(again[p][0] != before[p][0] for p in again if "gaussian" in str(p))

    def stop(now):
        raise Stopped

    with pytest.raises(Stopped):
        go(["gaussian_noise", "fog"], 1, overwrite=True, progress=stop)
    go(["gaussian_noise", "fog"], 1)                             # the old ones do not pass for the new
    made = next(iter(streams.single(digits(), "gaussian_noise", images=3, seed=1)))
    read = open_dataset(tmp_path / "c").corrupted("gaussian_noise", 5)
    if layout == "npy":
        assert torch.equal(read.batch(range(3))[0], made.x)
    else:
        order = [int(path.stem) for path in read.paths]
        assert torch.equal(read.batch(range(3))[0], made.x[order])


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_foreign_files_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(DataError, match=r"notes\.txt, which petal did not write"):
            write_corrupted(digits(), tmp_path, names=["fog"], images=2, overwrite=overwrite)
    assert os.listdir(tmp_path) == ["notes.txt"]
    with pytest.raises(DataError, match="is a file"):
        write_corrupted(digits(), tmp_path / "notes.txt", names=["fog"], images=2)


def test_a_published_benchmark_is_never_overwritten(tmp_path):
    np.save(tmp_path / "labels.npy", np.zeros(10, np.uint8))
    np.save(tmp_path / "fog.npy", np.zeros((10, 32, 32, 3), np.uint8))
    before = snapshot(tmp_path)
    with pytest.raises(DataError, match="did not write"):
        write_corrupted(digits(), tmp_path, names=["fog"], images=2, overwrite=True)
    assert snapshot(tmp_path) == before


def test_odd_files_in_an_own_folder(tmp_path):
    write_corrupted(digits(), tmp_path / "n", names=["fog"], images=2)
    np.save(tmp_path / "n" / "snow.npy", np.zeros((3, 32, 32, 3), np.uint8))
    with pytest.raises(DataError, match=r"snow\.npy: is not what petal would write there"):
        write_corrupted(digits(), tmp_path / "n", names=["fog", "snow"], images=2)
    (tmp_path / "n" / "snow.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match=r"snow\.npy: not a whole NumPy array"):
        write_corrupted(digits(), tmp_path / "n", names=["fog", "snow"], images=2)
    os.remove(tmp_path / "n" / "snow.npy")
    np.save(tmp_path / "n" / "labels.npy", np.zeros(10, np.uint8))
    with pytest.raises(DataError, match=r"labels\.npy: holds other labels"):
        write_corrupted(digits(), tmp_path / "n", names=["fog"], images=2)

    write_corrupted(digits(), tmp_path / "f", names=["fog"], images=2, layout="folders", severities=[1])
    (next((tmp_path / "f" / "fog" / "1").glob("*/*.png"))).unlink()
    with pytest.raises(DataError, match=r"fog/1: is not what petal would write there: .*png is missing"):
        write_corrupted(digits(), tmp_path / "f", names=["fog"], images=2, layout="folders", severities=[1])
    with pytest.raises(DataError, match="layout was 'folders' and is 'npy'"):
        write_corrupted(digits(), tmp_path / "f", names=["fog"], images=2, layout="npy", overwrite=True)


def test_a_damaged_manifest(tmp_path):
    write_corrupted(digits(), tmp_path, names=["fog"], images=2)
    for text in ("{", "[]", json.dumps({"size": 3})):
        (tmp_path / "petal.json").write_text(text)
        with pytest.raises(DataError, match=r"petal\.json: not what petal writes"):
            open_dataset(tmp_path)


@pytest.mark.parametrize("layout", ["npy", "folders"])
def test_disk_space_is_checked_before_anything_is_written(tmp_path, monkeypatch, layout):
    usage = shutil._ntuple_diskusage(10**12, 10**12, 10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"about \d+ MB are needed and 100 MB are free"):
        write_corrupted(digits(), tmp_path / "c", layout=layout)
    assert not (tmp_path / "c").exists()
    assert write_corrupted(digits(), tmp_path / "c", layout=layout, names=["fog"], images=2).made


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"cannot write \(No space left on device"):
        write_corrupted(digits(), tmp_path, names=["fog"], images=2)
    assert sorted(os.listdir(tmp_path)) == ["labels.npy", "petal.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["mist"]}, "mist"),
        ({"names": []}, "at least one corruption"),
        ({"severities": [6]}, "1 to 5"),
        ({"severities": []}, "one severity"),
        ({"layout": "zip"}, "layout is"),
        ({"profile": "mnist"}, "profile is"),
        ({"image_format": "gif"}, "image_format is"),
        ({"images": 798}, "has 797"),
        ({"images": 0}, "at least 1"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        write_corrupted(digits(), tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


def test_data_that_cannot_be_corrupted(tmp_path):
    write_corrupted(digits(), tmp_path / "c", names=["fog"], images=2)
    with pytest.raises(DataError, match="already corrupted"):
        write_corrupted(open_dataset(tmp_path / "c"), tmp_path / "cc")
    with pytest.raises(DataError, match="no images"):
        write_corrupted(from_arrays(torch.rand(0, 3, 8, 8), np.empty(0, np.int64)), tmp_path / "d")
    with pytest.raises(DataError):
        write_corrupted(toy(size=4), tmp_path / "d")                # too small for a corruption: known before the start
    assert not (tmp_path / "d").exists()


def test_folders_of_mixed_sizes_and_names(tmp_path):
    clean = class_folders(tmp_path / "clean", ["a", "a", "b"])
    class_folders(clean / "x", ["b"], size=20)
    shutil.move(clean / "x" / "b" / "image 00.png", clean / "b" / "z.png")
    shutil.rmtree(clean / "x")
    for batch_size in (3, 4):
        with pytest.raises(DataError, match="size"):
            write_corrupted(image_folder(clean), tmp_path / "c", names=["contrast"], batch_size=batch_size)
    assert write_corrupted(image_folder(clean, size=16), tmp_path / "d", names=["contrast"]).images == 4
    shutil.copy(clean / "b" / "z.png", clean / "b" / "z.jpg")
    with pytest.raises(DataError, match=r"two images would be written as b/z\.png"):
        write_corrupted(image_folder(clean, size=16), tmp_path / "e", names=["contrast"])


def test_the_earlier_name_of_progress_still_works():
    from petal import data

    with pytest.warns(DeprecationWarning, match="WriteProgress"):
        assert data.Progress is write.WriteProgress
    with pytest.raises(AttributeError, match="nothing"):
        _ = data.nothing
