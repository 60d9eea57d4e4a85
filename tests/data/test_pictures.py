"""Images without labels: their order, what cannot be read, and real files of each kind."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from petal import DataError
from petal.data.pictures import Pictures, as_batch, open_pictures, prepared
from petal.models import Preprocessing
from petal.models.preprocessing import by_transformers


def noise(count: int, size: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def names(pictures: Pictures, size: int = 2, start: int = 0) -> list[list[str]]:
    return [[p.name for p in batch] for batch in pictures.batches(size, start)]


def ramp(width: int, height: int) -> Image.Image:
    """Every pixel says where it is."""
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([rows, columns, rows + columns], -1).astype(np.uint8))


def test_the_shorter_side_then_the_centre() -> None:
    out = prepared(ramp(80, 40), Preprocessing(resize=20, crop=(16, 12)))
    whole = np.asarray(ramp(80, 40).resize((40, 20), Image.Resampling.BILINEAR))
    assert (out == whole[2:18, 14:26]).all()
    tall = prepared(ramp(33, 50), Preprocessing(resize=20))
    assert tall.shape == (int(20 * 50 / 33), 20, 3)


def test_both_sides_and_the_interpolation() -> None:
    image = ramp(30, 20)
    for how in ("nearest", "bicubic"):
        out = prepared(image, Preprocessing(resize=(10, 12), interpolation=how))
        assert (out == np.asarray(image.resize((12, 10), Image.Resampling[how.upper()]))).all()


def test_without_steps_a_picture_stays_as_it_is() -> None:
    assert (prepared(ramp(9, 7).convert("L"), Preprocessing()) == np.asarray(ramp(9, 7).convert("L").convert("RGB"))).all()
    with pytest.raises(DataError, match="is 12x16, too small to cut 20x20"):
        prepared(ramp(12, 16), Preprocessing(crop=(20, 20)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, image in zip(("f2.png", "f10.png", "sub/f1.png", "f1.png"), noise(4), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / name)
    return tmp_path


def test_files_come_in_order_and_numbers_count_as_numbers(folder: Path) -> None:
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_bytes(b"")
    pictures = open_pictures(folder)
    assert names(pictures, 3) == [["f1.png", "f2.png", "f10.png"], ["sub/f1.png"]]
    assert names(pictures, 3, start=1) == [["sub/f1.png"]]
    assert (pictures.count, pictures.shape, pictures.left_out) == (4, (8, 8), ("notes.txt",))
    (batch,) = pictures.batches(4)
    x = as_batch(batch)
    assert torch.equal(x, torch.from_numpy(noise(4)[[3, 0, 1, 2]]).permute(0, 3, 1, 2).float() / 255)


def test_what_cannot_be_read_is_named_in_its_place(folder: Path) -> None:
    whole = (folder / "f2.png").read_bytes()
    (folder / "f2.png").write_bytes(whole[: len(whole) // 2])
    (folder / "f3.jpg").write_bytes(b"no image")
    Image.fromarray(noise(1, 6)[0]).save(folder / "f4.png")
    (batch,) = open_pictures(folder).batches(9)
    problems = {p.name: p.problem for p in batch if p.pixels is None}
    assert problems.keys() == {"f2.png", "f3.jpg", "f4.png"}
    assert "truncated" in problems["f2.png"]
    assert str(folder) not in "".join(problems.values())
    assert problems["f4.png"] == "is 6x6 where others are 8x8: say how to resize and crop"
    assert len(as_batch(batch)) == 3
    (batch,) = open_pictures(folder, Preprocessing(8, (8, 8))).batches(9)
    assert {p.name for p in batch if p.pixels is None} == {"f2.png", "f3.jpg"}


def test_a_folder_that_changes_has_another_fingerprint(folder: Path) -> None:
    before = open_pictures(folder).fingerprint()
    assert open_pictures(folder).fingerprint() == before
    (folder / "f1.png").rename(folder / "g1.png")
    assert open_pictures(folder).fingerprint() != before


@pytest.mark.parametrize("form", ["channels last", "channels first", "grey", "one channel", "float", "alone", "compressed"])
def test_arrays_in_every_form(form: str, tmp_path: Path) -> None:
    images = noise(5)
    expected = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    content = {
        "channels last": images, "channels first": images.transpose(0, 3, 1, 2), "grey": images[..., 0],
        "one channel": images[..., :1], "float": images.astype(np.float64) / 255, "alone": images, "compressed": images,
    }[form]  # fmt: skip
    named = {"pixels": content} if form == "alone" else {"images": content, "labels": np.zeros(5)}
    (np.savez_compressed if form == "compressed" else np.savez)(tmp_path / "a.npz", **named)
    pictures = open_pictures(tmp_path / "a.npz")
    assert names(pictures) == [["0", "1"], ["2", "3"], ["4"]]
    x = torch.cat([as_batch(batch) for batch in pictures.batches(2)])
    if form in ("grey", "one channel"):
        expected = expected[:, :1].expand(5, 3, 8, 8)
    torch.testing.assert_close(x, expected)


def test_arrays_are_resized_and_checked(tmp_path: Path) -> None:
    images = noise(3).astype(np.float32) / 255
    images[1, 0, 0, 0] = np.nan
    np.savez(tmp_path / "a.npz", images=images)
    (batch,) = open_pictures(tmp_path / "a.npz", Preprocessing(4, (4, 4))).batches(3)
    assert [p.problem for p in batch] == ["", "has values outside [0, 1]", ""]
    whole = np.asarray(Image.fromarray(noise(3)[0]).resize((4, 4), Image.Resampling.BILINEAR))
    assert (batch[0].pixels == whole).all()
    first = open_pictures(tmp_path / "a.npz").fingerprint()
    np.savez(tmp_path / "a.npz", images=images[::-1])
    assert open_pictures(tmp_path / "a.npz").fingerprint() != first


def write_video(path: Path, count: int) -> np.ndarray:
    cv2 = pytest.importorskip("cv2")
    frames = np.stack([np.full((48, 64, 3), (20 * n % 256, 80, 255 - 20 * n % 256), np.uint8) for n in range(count)])
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 48))
    assert writer.isOpened()
    for frame in frames:
        writer.write(frame[:, :, ::-1])         # OpenCV has blue first
    writer.release()
    return frames


def test_the_frames_of_a_video_in_order(tmp_path: Path) -> None:
    frames = write_video(tmp_path / "clip.avi", 7)
    pictures = open_pictures(tmp_path / "clip.avi")
    assert (pictures.count, pictures.shape) == (7, (48, 64))
    x = torch.cat([as_batch(batch) for batch in pictures.batches(3)])
    difference = (x - torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255).abs()
    assert difference.max() < 0.03              # MJPG is lossy; red and blue exchanged would be 0.5
    assert names(pictures, 3, 1) == [["clip.avi#3", "clip.avi#4", "clip.avi#5"], ["clip.avi#6"]]
    third = open_pictures(tmp_path / "clip.avi", Preprocessing(24, (24, 24)), every=3)
    assert names(third, 2) == [["clip.avi#0", "clip.avi#3"], ["clip.avi#6"]]
    assert (third.count, third.shape) == (3, (24, 24))
    assert third.fingerprint() != pictures.fingerprint()
    torch.testing.assert_close(as_batch(next(third.batches(3)))[1, :, 0, 0], x[3, :, 0, 0], atol=0.01, rtol=0)


def test_a_video_without_opencv_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(DataError, match=r"pip install opencv-python-headless, or 'petal-tta\[video\]'"):
        open_pictures(tmp_path / "clip.mp4")


def test_what_is_no_input_is_refused_with_what_is(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "bad.npz").write_bytes(b"PK no")
    np.savez(tmp_path / "two.npz", a=noise(1), b=noise(1))
    np.savez(tmp_path / "flat.npz", images=np.zeros((3, 4), np.uint8))
    np.savez(tmp_path / "whole.npz", images=np.zeros((3, 4, 4, 3), np.int64))
    for name, words in (
        ("nowhere", "no such file"), ("empty", "no images"), ("a.txt", "expected a folder"), ("bad.npz", "truncated"),
        ("two.npz", "found a, b"), ("flat.npz", r"got \[3, 4\]"), ("whole.npz", "got int64"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=words):
            open_pictures(tmp_path / name)
    with pytest.raises(DataError, match="no video"):
        open_pictures(folder, every=2)
    if pytest.importorskip("cv2"):
        (tmp_path / "bad.mp4").write_bytes(b"no video")
        with pytest.raises(DataError, match="cannot open it"):
            open_pictures(tmp_path / "bad.mp4")
    assert names(open_pictures(folder / "f2.png")) == [["f2.png"]]


def test_hugging_faces_own_processor_makes_the_same_pixels() -> None:
    """The real thing, where it is installed: its version by Pillow, to the last bit."""
    transformers = pytest.importorskip("transformers")
    image = Image.fromarray(noise(1, 50)[0]).resize((150, 110))
    for kind in ("ViTImageProcessorPil", "ConvNextImageProcessorPil", "DeiTImageProcessorPil"):
        processor = getattr(transformers, kind, None)
        if processor is None:
            continue                        # an earlier version names them otherwise
        made = processor()
        how = by_transformers(made.to_dict())
        assert how is not None
        theirs = made(image, return_tensors="pt", do_normalize=False, do_rescale=False)["pixel_values"][0]
        assert (theirs.permute(1, 2, 0).numpy() == prepared(image, how)).all()
