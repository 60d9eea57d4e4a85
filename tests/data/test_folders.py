import re

import numpy as np
import pytest
from PIL import Image

from petal.data import image_folder, imagenet_3dcc, imagenet_c, streams
from petal.data.folders import decode
from petal.errors import DataError

WNIDS = ("n01440764", "n01443537", "n02088364")


def picture(seed, width=224, height=224):
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height))


def as_bytes(image):
    return (image * 255).round().byte().permute(1, 2, 0).numpy()


def tree(root, corruptions, severities=(1, 5), size=224, per_class=2):
    for c, name in enumerate(corruptions):
        for severity in severities:
            for k, wnid in enumerate(WNIDS):
                folder = root / name / str(severity) / wnid
                folder.mkdir(parents=True)
                for i in range(per_class):
                    seed = 1000 * c + 100 * severity + 10 * k + i
                    picture(seed, size, size).save(folder / f"ILSVRC2012_val_{10 * k + i:08}.JPEG", quality=95)
    return root


def files(root, name, severity):
    return sorted((root / name / str(severity)).glob("*/*"))


# -- ImageNet-C and ImageNet-3DCC --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opener", "names"), [(imagenet_c, ["fog", "snow"]), (imagenet_3dcc, ["near_focus", "bit_error"])]
)
def test_trees(tmp_path, opener, names):
    data = opener(tree(tmp_path, names))
    assert len(data) == 6
    assert data.classes == WNIDS
    assert data.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.corruptions == tuple(sorted(names))
    x, y = data.corrupted(names[1], 5).batch([4, 1])
    assert y.tolist() == [2, 0]
    paths = files(tmp_path, names[1], 5)
    for image, path in zip(x, (paths[4], paths[1]), strict=True):
        np.testing.assert_array_equal(as_bytes(image), np.asarray(Image.open(path)))


def test_default_orders(tmp_path):
    with pytest.raises(DataError, match="gaussian_noise: no such corruption; there are fog"):
        streams.continual(imagenet_c(tree(tmp_path / "c", ["fog"])))
    with pytest.raises(DataError, match="near_focus: no such corruption"):
        streams.continual(imagenet_3dcc(tree(tmp_path / "3d", ["flash"])))


def test_corruptions_one_folder_deeper(tmp_path):
    tree(tmp_path / "weather", ["fog"])
    tree(tmp_path / "blur", ["zoom_blur"])
    data = imagenet_c(tmp_path)
    assert data.corruptions == ("fog", "zoom_blur")
    assert data.corrupted("zoom_blur", 1).batch([0])[0].shape == (1, 3, 224, 224)


def test_list_of_images(tmp_path):
    root = tree(tmp_path / "c", ["fog", "snow"])
    chosen = tmp_path / "ids.txt"
    chosen.write_text(f"# chosen\n{WNIDS[2]}/ILSVRC2012_val_00000021.JPEG\n\n{WNIDS[0]}/ILSVRC2012_val_00000000.JPEG\n")
    data = imagenet_c(root, ids=chosen)
    assert len(data) == 2
    assert data.labels.tolist() == [2, 0]
    x, _ = data.corrupted("snow", 1).batch([0])
    expected = np.asarray(Image.open(root / "snow" / "1" / WNIDS[2] / "ILSVRC2012_val_00000021.JPEG"))
    np.testing.assert_array_equal(as_bytes(x[0]), expected)
    batches = list(streams.continual(data, ["snow", "fog"], severity=1, batch_size=1))
    assert [b.y.item() for b in batches] == [2, 0, 2, 0]


@pytest.mark.parametrize("mark", [" ", "\t", ",", ", "])
def test_list_with_labels_of_its_own(tmp_path, mark):
    root = tree(tmp_path / "c", ["fog"])
    ids = tmp_path / "ids.txt"
    lines = [f"{WNIDS[0]}/ILSVRC2012_val_00000000.JPEG{mark}0", f"{WNIDS[2]}/ILSVRC2012_val_00000020.JPEG{mark}162"]
    ids.write_text("\n".join(lines))
    data = imagenet_c(root, ids=ids)
    assert data.labels.tolist() == [0, 162]
    assert data.classes is None             # 162 is not the place of a folder that is here
    assert data.corrupted("fog", 1).batch([1])[1].tolist() == [162]


def test_class_list_numbers_the_folders(tmp_path):
    names = ["a", WNIDS[2], "b", WNIDS[0], WNIDS[1]]
    data = imagenet_c(tree(tmp_path, ["fog"]), classes=names)
    assert data.classes == tuple(names)
    pairs = dict(zip(data.ids.images, data.labels.tolist(), strict=True))
    assert pairs[f"{WNIDS[2]}/ILSVRC2012_val_00000020.JPEG"] == 1
    assert pairs[f"{WNIDS[0]}/ILSVRC2012_val_00000000.JPEG"] == 3
    with pytest.raises(DataError, match=f"{WNIDS[2]}: a class folder that is not among the 2"):
        len(imagenet_c(tmp_path, classes=WNIDS[:2]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no image"),
        ("n0/x.JPEG", "line 1: n0 is not among the 3 classes"),
        ("x.JPEG", "line 1: expected class/file"),
        ("n01440764/../../secret", "line 1: expected class/file"),
        ("../secret", "line 1: expected class/file"),
        ("n01440764/x.JPEG one", "line 1: expected class/file"),
        ("n01440764/x.JPEG\nn01440764/x.JPEG", "line 2: n01440764/x.JPEG is listed more than once"),
        ("n01440764/x.JPEG 0\nn01440764/y.JPEG", "line 2: expected a label on every line or on none"),
        ("n01440764/x.JPEG\nn01440764/y.JPEG 0", "line 2: expected a label on every line or on none"),
        ("n01440764/x.JPEG 0\nn01440764/y.JPEG 1", "line 2: n01440764 has label 0, not 1"),
    ],
)
def test_wrong_lists(tmp_path, text, message):
    (tmp_path / "ids.txt").write_text(text)
    with pytest.raises(DataError, match=re.escape(f"ids.txt{', ' if 'line' in message else ': '}{message}")):
        imagenet_c(tree(tmp_path / "c", ["fog"], per_class=1), ids=tmp_path / "ids.txt")


def test_labels_must_agree_with_given_classes(tmp_path):
    (tmp_path / "ids.txt").write_text("n01443537/x.JPEG 2")
    with pytest.raises(DataError, match="n01443537 has label 1, not 2"):
        imagenet_c(tree(tmp_path / "c", ["fog"], per_class=1), ids=tmp_path / "ids.txt", classes=WNIDS)
    (tmp_path / "ids.txt").write_text("n9/x.JPEG 3")
    with pytest.raises(DataError, match=r"0\.\.2; found 3"):
        imagenet_c(tmp_path / "c", ids=tmp_path / "ids.txt", classes=WNIDS)


def test_missing_extra_and_truncated_files_are_named(tmp_path):
    data = imagenet_c(tree(tmp_path, ["fog", "snow"], per_class=1))
    gone = files(tmp_path, "snow", 5)[1]
    broken = files(tmp_path, "snow", 1)[2]
    broken.write_bytes(broken.read_bytes()[:300])
    assert data.corrupted("snow", 1).batch([0])[1].tolist() == [0]
    with pytest.raises(DataError, match=re.escape(f"{broken}: truncated")):
        data.corrupted("snow", 1).batch([1, 2])
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(DataError, match=re.escape(f"{gone}: missing; expected the same 3 images")):
        data.corrupted("snow", 5).batch([0])
    gone.write_bytes(content)
    extra = gone.with_name("more.JPEG")
    extra.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(f"{extra}: not in")):
        data.corrupted("snow", 5).batch([0])
    with pytest.raises(DataError, match="3: no such folder"):
        data.corrupted("snow", 3)


def test_missing_file_of_a_list(tmp_path):
    (tmp_path / "ids.txt").write_text(f"{WNIDS[0]}/none.JPEG")
    data = imagenet_c(tree(tmp_path / "c", ["fog"], per_class=1), ids=tmp_path / "ids.txt")
    with pytest.raises(DataError, match=r"none\.JPEG: no such image"):
        data.corrupted("fog", 1).batch([0])


def test_no_tree(tmp_path):
    with pytest.raises(DataError, match="no corruption; expected <corruption>/<severity"):
        imagenet_c(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        imagenet_c(tmp_path / "none")


# -- class folders and the transform -----------------------------------------------------------------------------------


def test_resize_and_centre_crop(tmp_path):
    """Against the same steps written with Pillow's own scaling of a box."""
    picture(1, 500, 375).save(tmp_path / "wide.png")
    picture(2, 300, 600).save(tmp_path / "high.png")
    picture(3, 224, 224).save(tmp_path / "ready.png")
    wide = np.asarray(picture(1, 500, 375).resize((341, 256), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(decode(tmp_path / "wide.png", 224), wide[16:240, 58:282])
    high = np.asarray(picture(2, 300, 600).resize((256, 512), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(decode(tmp_path / "high.png", 224), high[144:368, 16:240])
    np.testing.assert_array_equal(decode(tmp_path / "ready.png", 224), np.asarray(picture(3)))
    np.testing.assert_array_equal(decode(tmp_path / "wide.png"), np.asarray(picture(1, 500, 375)))


def test_grey_and_transparent_images_become_rgb(tmp_path):
    Image.new("L", (4, 4), 77).save(tmp_path / "grey.png")
    Image.new("RGBA", (4, 4), (1, 2, 3, 4)).save(tmp_path / "clear.png")
    assert (decode(tmp_path / "grey.png") == 77).all()
    assert decode(tmp_path / "clear.png")[0, 0].tolist() == [1, 2, 3]


def test_class_folders_sorted_or_given(tmp_path):
    for k, label in enumerate(["b", "a", "c"]):
        (tmp_path / label).mkdir()
        picture(k, 16, 16).save(tmp_path / label / "1.png")
        (tmp_path / label / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    data = image_folder(tmp_path)
    assert data.classes == ("a", "b", "c")
    assert data.labels.tolist() == [0, 1, 2]
    x, _ = data.batch([1])
    np.testing.assert_array_equal(as_bytes(x[0]), np.asarray(picture(0, 16, 16)))
    given = image_folder(tmp_path, classes=["c", "x", "b", "a"])
    assert sorted(given.labels.tolist()) == [0, 2, 3]
    assert given.paths[0].parent.name == "c"


def test_workers_keep_the_order(tmp_path):
    (tmp_path / "a").mkdir()
    for k in range(24):
        picture(k, 8, 8).save(tmp_path / "a" / f"{k:02}.png")
    picks = np.random.default_rng(0).permutation(24)
    one, _ = image_folder(tmp_path, workers=1).batch(picks)
    many, _ = image_folder(tmp_path, workers=6).batch(picks)
    assert (one == many).all()
    np.testing.assert_array_equal(as_bytes(many[0]), np.asarray(picture(picks[0], 8, 8)))


def test_sizes_that_differ(tmp_path):
    (tmp_path / "a").mkdir()
    picture(0, 16, 16).save(tmp_path / "a" / "1.png")
    picture(1, 20, 16).save(tmp_path / "a" / "2.png")
    with pytest.raises(DataError, match=r"2\.png: is 20x16 where .*1\.png is 16x16"):
        image_folder(tmp_path).batch([0, 1])
    assert image_folder(tmp_path, size=14).batch([0, 1])[0].shape == (2, 3, 14, 14)


def test_folders_without_images(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="no images"):
        image_folder(tmp_path)
    (tmp_path / "a" / "1.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"1\.png: truncated or not an image"):
        image_folder(tmp_path).batch([0])


def test_classes_may_have_numbers_for_names(tmp_path):
    for severity in "15":
        for label in "123":
            (tmp_path / "fog" / severity / label).mkdir(parents=True)
            picture(0, 32, 32).save(tmp_path / "fog" / severity / label / "a.png")
    data = imagenet_c(tmp_path, size=None)
    assert data.corruptions == ("fog",)
    assert data.classes == ("1", "2", "3")
    assert data.corrupted("fog", 5).batch([2])[1].tolist() == [2]
