import io
import os
import pickle
import re
import struct
import zipfile
from itertools import islice

import numpy as np
import pytest
import torch

from petal.data import Cifar, CifarC, npz, streams
from petal.data.cifar import read_batch
from petal.errors import DataError

N = 6


@pytest.fixture
def cifar_c(tmp_path):
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("fog", "snow"):
        np.save(folder / f"{name}.npy", rng.integers(0, 256, (5 * N, 32, 32, 3), dtype=np.uint8))
    np.save(folder / "labels.npy", np.tile(np.arange(N), 5))
    return folder


# -- CIFAR-10-C --------------------------------------------------------------------------------------------------------


def test_severities_are_stacked(cifar_c):
    data = CifarC(cifar_c)
    raw = np.load(cifar_c / "snow.npy")
    assert len(data) == N
    assert data.name == "cifar10-c"
    assert data.classes[3] == "cat"
    assert data.corruptions == ("fog", "snow")
    for severity in range(1, 6):
        x, y = data.corrupted("snow", severity).batch([2, 5])
        rows = [(severity - 1) * N + 2, (severity - 1) * N + 5]
        np.testing.assert_array_equal(x.numpy(), raw[rows].transpose(0, 3, 1, 2).astype(np.float32) / 255)
        assert y.tolist() == [2, 5]


def test_streams_read_the_published_files(cifar_c):
    stream = streams.continual(CifarC(cifar_c), ["snow", "fog"], severity=2, batch_size=4)
    batches = list(stream)
    assert [len(batch) for batch in batches] == [4, 2, 4, 2]
    raw = np.load(cifar_c / "fog.npy")[N : 2 * N]
    x = torch.cat([batch.x for batch in batches if batch.domain == "fog"])
    np.testing.assert_array_equal((x * 255).round().byte().permute(0, 2, 3, 1).numpy(), raw)


def test_class_count_by_folder_name(cifar_c):
    hundred = cifar_c.with_name("CIFAR-100-C")
    cifar_c.rename(hundred)
    assert CifarC(hundred).name == "cifar100-c"
    assert CifarC(hundred, classes=10).name == "cifar10-c"


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def _labels(values):
    return lambda folder: np.save(folder / "labels.npy", np.asarray(values))


def _fog(shape, dtype=np.uint8):
    return lambda folder: np.save(folder / "fog.npy", np.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (lambda f: (f / "labels.npy").unlink(), "labels.npy", "no such file"),
        (lambda f: (f / "fog.npy").unlink(), "fog.npy", "no such file"),
        (lambda f: _truncate(f / "fog.npy"), "fog.npy", "not a whole NumPy array"),
        (lambda f: _truncate(f / "labels.npy"), "labels.npy", "not a whole NumPy array"),
        (lambda f: (f / "fog.npy").write_bytes(b""), "fog.npy", "not a whole NumPy array"),
        (lambda f: np.save(f / "fog.npy", np.array([{}], object)), "fog.npy", "objects"),
        (_labels(np.tile(np.arange(N), 5) + 5), "labels.npy", "0..9; found 10"),
        (_labels(np.tile(np.arange(N), 5) - 1), "labels.npy", "found -1"),
        (_labels(np.arange(5 * N - 1) % 5), "labels.npy", "multiple of 5"),
        (_labels(np.tile(np.arange(N + 1), 5)), "fog.npy", "expected uint8 [35, 32, 32, 3]"),
        (_labels(np.tile(np.arange(N), 5)[::-1]), "labels.npy", None),
        (_labels(np.roll(np.repeat(np.arange(N), 5), 1)), "labels.npy", "same 6 labels"),
        (_labels(np.tile(np.arange(N), 5).astype(float)), "labels.npy", "whole-number"),
        (_fog((5 * N, 3, 32, 32)), "fog.npy", "expected uint8 [30, 32, 32, 3]"),
        (_fog((5 * N, 32, 32, 3), np.float32), "fog.npy", "found float32"),
        (_fog((4 * N, 32, 32, 3)), "fog.npy", "found uint8 [24, 32, 32, 3]"),
    ],
)
def test_damaged_files_are_named(cifar_c, damage, file, message):
    damage(cifar_c)
    if message is None:                     # reversed, but alike at every severity: nothing to object to
        CifarC(cifar_c).corrupted("fog", 1)
        return
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        CifarC(cifar_c).corrupted("fog", 1)
    assert str(cifar_c / file) in str(caught.value)


@pytest.mark.parametrize("severity", [0, 6, 2.0, True])
def test_severity_out_of_range(cifar_c, severity):
    with pytest.raises(DataError, match="1 to 5"):
        CifarC(cifar_c).corrupted("fog", severity)


def test_no_name_leaves_the_folder(cifar_c):
    np.save(cifar_c.parent / "outside.npy", np.zeros((5 * N, 32, 32, 3), np.uint8))
    with pytest.raises(DataError, match="no such file"):
        CifarC(cifar_c).corrupted("../outside", 1)


def _anonymous_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_ten_gigabytes_stream_in_flat_memory(tmp_path):
    n = 660_000                             # 5 n images: 10.1 GB, none of them on disk
    images = np.lib.format.open_memmap(tmp_path / "fog.npy", "w+", np.uint8, (5 * n, 32, 32, 3))
    images[3 * n + 200_000] = 255
    del images
    np.lib.format.open_memmap(tmp_path / "labels.npy", "w+", np.uint8, (5 * n,))
    assert (tmp_path / "fog.npy").stat().st_size > 10e9
    before = _anonymous_mb()
    stream = streams.continual(CifarC(tmp_path, classes=10), ["fog"], severity=4)
    assert _anonymous_mb() - before < 50
    assert len(stream) == n // 200
    seen, used = 0, []
    for start in (0, 950, 2000, 3200):
        for batch in islice(stream.at(start), 100):
            seen += int((batch.x > 0).sum())
            used.append(_anonymous_mb() - before)
    assert seen == 3072
    assert max(used) < 50                   # mapped pages do not count; copies of them would
    assert used[-1] < max(used[:100]) + 10


# -- Python batches ----------------------------------------------------------------------------------------------------


def _write(path, content, protocol=2):
    path.write_bytes(pickle.dumps(content, protocol=protocol))


@pytest.fixture
def cifar_10(tmp_path):
    rng = np.random.default_rng(1)
    for k, name in enumerate(["test_batch", *(f"data_batch_{k}" for k in range(1, 6))]):
        images = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
        _write(tmp_path / name, {b"data": images, b"labels": [k, 1, 2, 3], b"filenames": [b"a.png"] * 4})
    return tmp_path


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_python_batches(cifar_10, protocol):
    images = np.random.default_rng(2).integers(0, 256, (4, 3072), dtype=np.uint8)
    _write(cifar_10 / "test_batch", {"data": images, "labels": [0, 9, 1, 2]}, protocol)
    data = Cifar(cifar_10)
    x, y = data.batch([1, 3])
    np.testing.assert_array_equal(x.numpy(), images[[1, 3]].reshape(2, 3, 32, 32).astype(np.float32) / 255)
    assert y.tolist() == [9, 2]
    assert len(data) == 4


def test_arrays_stored_by_columns(cifar_10):
    images = np.random.default_rng(4).integers(0, 256, (4, 3072), dtype=np.uint8)
    _write(cifar_10 / "test_batch", {"data": np.asfortranarray(images), "labels": [0, 1, 2, 3]})
    x, _ = Cifar(cifar_10).batch(range(4))
    np.testing.assert_array_equal((x * 255).round().byte().flatten(1).numpy(), images)


@pytest.mark.parametrize("shape", [b"K\x03", b"J\xff\xff\xff\xff", b"K\x01"])
def test_array_whose_shape_and_bytes_disagree(tmp_path, shape):
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01(" + shape + b"tcnumpy\ndtype\n(X\x02\x00\x00\x00u1tR\x89"
        b"C\x02abtb"
    )
    (tmp_path / "batch").write_bytes(b"\x80\x03}X\x01\x00\x00\x00a" + array + b"s.")
    with pytest.raises(DataError, match=r"an array of shape .* with 2 bytes"):
        read_batch(tmp_path / "batch")


def test_only_latin1_is_decoded(tmp_path):
    (tmp_path / "batch").write_bytes(b"c_codecs\nencode\n(Vaa\nVhex\ntR.")
    with pytest.raises(DataError, match="other than latin1"):
        read_batch(tmp_path / "batch")


def test_training_split_joins_its_files(cifar_10):
    train = Cifar(cifar_10, split="train")
    assert len(train) == 20
    assert train.labels.tolist() == [v for k in range(1, 6) for v in (k, 1, 2, 3)]
    assert train.name == "cifar10-train"


def test_pickles_as_python_2_wrote_them(tmp_path):
    """The published files: byte strings for text, numpy.core names, a state whose data is a byte string."""
    raw = bytes(range(256)) * 24                                            # two images

    def text(value):
        return b"U" + bytes([len(value)]) + value

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR(K\x01(K\x02M\x00\x0ct"
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2
        + b"K\x00tb\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )
    content = b"\x80\x02}(" + text(b"data") + array + text(b"fine_labels") + b"](K\x07K\x63e" + b"u."
    (tmp_path / "test").write_bytes(content)
    (tmp_path / "meta").write_bytes(b"")
    data = Cifar(tmp_path)
    assert data.name == "cifar100-test"
    x, y = data.batch([0, 1])
    assert y.tolist() == [7, 99]
    assert (x.flatten() * 255).round().byte().numpy().tobytes() == raw


class Hostile:
    """Pickles to a call of whatever it is given."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "system"),
        (exec, "exec"),
        (eval, "eval"),
        (getattr, "getattr"),
        (__import__, "__import__"),
        (np.load, "load"),
        (np.frombuffer, "frombuffer"),
        (pickle.loads, "loads"),
        (io.open, "open"),
        (torch.load, "load"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_in_a_hostile_pickle_runs(cifar_10, function, name, protocol):
    proof = cifar_10 / "proof"
    command = f"open({str(proof)!r}, 'w')" if function in (exec, eval) else f"touch {proof}"
    _write(cifar_10 / "test_batch", {"data": Hostile(function, command), "labels": []}, protocol)
    with pytest.raises(DataError, match=f"asks for .*{name}, which no CIFAR batch needs"):
        len(Cifar(cifar_10))
    assert not proof.exists()


def test_a_hostile_pickle_does_not_import_what_it_names(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "batch").write_bytes(b"ctrap\nanything\n.")
    with pytest.raises(DataError, match=r"trap\.anything"):
        read_batch(tmp_path / "batch")


@pytest.mark.parametrize(
    "content",
    [
        b"cnumpy\ndtype\n(V__module__\nVx\ntR.",                                                 # not a dictionary
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}(X\x01\x00\x00\x00aK\x01u\x86b.",      # attributes set
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",                                       # a frame of 2^63 bytes
        b"(" * 200_000,
        b"",
        b"\x00\x01garbage",
    ],
)
def test_broken_pickles_are_data_errors(tmp_path, content):
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(DataError, match="batch"):
        read_batch(tmp_path / "batch")


def test_attributes_set_by_one_pickle_do_not_reach_the_next(cifar_10):
    (cifar_10 / "bad").write_bytes(
        b"\x80\x02(cnumpy.core.multiarray\n_reconstruct\nN}(X\x0c\x00\x00\x00__defaults__K\x01u\x86bd."
    )
    with pytest.raises(DataError):
        read_batch(cifar_10 / "bad")
    assert len(Cifar(cifar_10)) == 4


GOOD = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": GOOD, "labels": [0]}, "expected 2 labels"),
        ({"data": GOOD, "labels": [0, 10]}, "0..9; found 10"),
        ({"data": GOOD, "labels": [0, -1]}, "found -1"),
        ({"data": GOOD, "labels": [0, "1"]}, "whole numbers"),
        ({"data": GOOD, "labels": [0, True]}, "whole numbers"),
        ({"data": GOOD}, "'labels'"),
        ({"labels": [0]}, "'data'"),
        ({"data": GOOD[:, :-1], "labels": [0, 1]}, "[2, 3071]"),
        ({"data": [[0] * 3072], "labels": [0]}, "found list"),
        ({"data": GOOD.astype(np.float32), "labels": [0, 1]}, "not plain uint8"),
        ({"data": np.array([print, 1], object), "labels": [0, 1]}, "asks for"),
        ({"data": np.array([[1, "x"]], object), "labels": [0, 1]}, "not plain uint8"),
        ([GOOD], "expected a dictionary"),
    ],
)
def test_wrong_batches_are_refused(cifar_10, content, message):
    _write(cifar_10 / "test_batch", content)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        len(Cifar(cifar_10))
    assert str(cifar_10 / "test_batch") in str(caught.value)


def test_truncated_batch(cifar_10):
    _truncate(cifar_10 / "test_batch")
    with pytest.raises(DataError, match=r"test_batch: .*truncated"):
        len(Cifar(cifar_10))


def test_missing_batch(cifar_10):
    (cifar_10 / "data_batch_3").unlink()
    with pytest.raises(DataError, match="data_batch_3: no such file"):
        Cifar(cifar_10, split="train")
    with pytest.raises(DataError, match="looked for test_batch"):
        Cifar(cifar_10 / "elsewhere")
    with pytest.raises(DataError, match="'train' and 'test'"):
        Cifar(cifar_10, split="val")


# -- npz ---------------------------------------------------------------------------------------------------------------

IMAGES = np.random.default_rng(3).integers(0, 256, (7, 5, 6, 3), dtype=np.uint8)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("images", [IMAGES, IMAGES.astype(np.float64) / 255, np.asfortranarray(IMAGES)])
def test_npz(tmp_path, save, images):
    save(tmp_path / "pack.npz", labels=np.arange(7), images=images, other=np.zeros(3))
    data = npz(tmp_path / "pack.npz", classes=[str(k) for k in range(7)])
    x, y = data.batch([6, 2])
    np.testing.assert_allclose(x.numpy(), IMAGES[[6, 2]].transpose(0, 3, 1, 2) / 255, atol=1e-7)
    assert y.tolist() == [6, 2]
    assert data.name == "pack"
    assert isinstance(data._images, np.memmap) == (save is np.savez)


def test_npz_mapped_behind_an_odd_local_header(tmp_path):
    """Zip writers may pad the local header so that it differs from the directory's."""
    buffer = io.BytesIO()
    np.save(buffer, IMAGES)
    with zipfile.ZipFile(tmp_path / "pack.npz", "w") as archive:
        with archive.open("images.npy", "w", force_zip64=True) as member:
            member.write(buffer.getvalue())
        buffer = io.BytesIO()
        np.save(buffer, np.arange(7))
        archive.writestr("labels.npy", buffer.getvalue())
    x, _ = npz(tmp_path / "pack.npz").batch([5])
    np.testing.assert_array_equal((x * 255).round().byte()[0].permute(1, 2, 0).numpy(), IMAGES[5])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": IMAGES}, "images and labels, found images"),
        ({"images": IMAGES, "labels": np.arange(6)}, "expected 7 labels"),
        ({"images": IMAGES, "labels": np.arange(7) - 1}, "found -1"),
        ({"images": IMAGES[..., 0], "labels": np.arange(7)}, "colour images"),
        ({"images": IMAGES.astype(np.int64), "labels": np.arange(7)}, "expected uint8"),
        ({"images": np.array([{}] * 7, object), "labels": np.arange(7)}, "objects"),
    ],
)
def test_wrong_npz(tmp_path, arrays, message):
    np.savez(tmp_path / "pack.npz", **arrays)
    with pytest.raises(DataError, match=message) as caught:
        npz(tmp_path / "pack.npz")
    assert str(tmp_path / "pack.npz") in str(caught.value)


def test_truncated_or_missing_npz(tmp_path):
    np.savez(tmp_path / "pack.npz", images=IMAGES, labels=np.arange(7))
    _truncate(tmp_path / "pack.npz")
    for name in ("pack.npz", "none.npz"):
        with pytest.raises(DataError, match=name):
            npz(tmp_path / name)
