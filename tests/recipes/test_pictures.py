"""`pictures`: folders, lists, tar and .npz files; bad ones; the same rows everywhere."""

import io
import os
import struct
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from launcher.arrays.npz import read_arrays
from launcher.recipes import (
    InputError,
    build_dataset,
    check_dataset,
    fingerprint_dataset,
    needs_preparing,
    prepare_dataset,
)
from launcher.recipes.datasets.pictures import Pictures, decode
from launcher.recipes.datasets.pictures import index as index_module
from launcher.recipes.datasets.pictures.decode import Fitting
from launcher.train.feed import own_rows, shapes_of

VIT = SimpleNamespace(name="vit", image_size=8, channels=3, num_classes=3)
UNET = SimpleNamespace(name="unet", image_size=8, channels=3)
CLASSES = "bird", "cat", "dog"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def png(number, size=(8, 8)):
    """A picture of one colour, which is its number."""
    file = io.BytesIO()
    Image.new("RGB", size, (number, 2 * number, 0)).save(file, "PNG")
    return file.getvalue()


def made_by(format, root, count=30):
    """Pictures 0 … count - 1, of which each third is of a class; the path to name."""
    if format == "folder":
        for i in range(count):
            (root / CLASSES[i % 3]).mkdir(exist_ok=True, parents=True)
            (root / CLASSES[i % 3] / f"{i:03}.png").write_bytes(png(i))
        return root
    root.mkdir()
    if format == "list":
        lines = []
        for i in range(count):
            (root / f"{i:03}.png").write_bytes(png(i))
            lines.append(f"{i:03}.png,{CLASSES[i % 3]}")
        (root / "all.csv").write_text("\n".join(["file_name,label", *lines]) + "\n")
        return root / "all.csv"
    if format == "npz":
        images = np.stack([np.asarray(Image.open(io.BytesIO(png(i)))) for i in range(count)])
        for name, part in {"a": slice(0, 11), "b": slice(11, count)}.items():
            np.savez(root / f"{name}.npz", image=images[part], label=np.arange(count)[part] % 3)
        return root
    for name, part in {"a": range(11), "b": range(11, count)}.items():
        with tarfile.open(root / f"{name}.tar", "w") as archive:
            for i in part:
                words = {f"{i:03}.png": png(i), f"{i:03}.cls": str(i % 3).encode()}
                if format == "tar_folders":
                    words = {f"./{CLASSES[i % 3]}/{i:03}.png": png(i)}
                for member, content in words.items():
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
    return f"{root}/*.tar"


def options(path, format="folder", **changes):
    of = {"list": "folder", "tar_folders": "tar"}.get(format, format)
    return Pictures(path=str(path), format=of, **changes)


def numbers_in(batch):
    return np.rint(batch["image"][:, 0, 0, 0] * 255).astype(int)


@pytest.mark.parametrize("format", ["folder", "list", "tar", "tar_folders", "npz"])
def test_every_format_gives_its_pictures_and_classes(tmp_path, format):
    path = made_by(format, tmp_path / "data")
    given = options(path, format, validation_fraction=0.2)
    check_dataset(given, VIT, validation=True)
    dataset = build_dataset(given, VIT, 6, 0)
    train = [dataset.train(k) for k in range(4)]
    held = [dataset.validation(k) for k in range(1)]
    assert dataset.validation.num_rows == 6
    for batch in (*train, *held):
        assert (batch["image"].shape, batch["image"].dtype) == ((6, 8, 8, 3), np.float32)
        assert batch["label"].dtype == np.int32
        np.testing.assert_array_equal(batch["label"], numbers_in(batch) % 3)
        np.testing.assert_allclose(batch["image"][..., 1], 2 * batch["image"][..., 0], rtol=1e-6)
    seen = np.concatenate([numbers_in(batch) for batch in (*train, *held)])
    assert sorted(seen) == list(range(30))
    assert "24 pictures of 3 classes, 6 held out" in dataset.describe


def test_a_batch_is_the_same_in_whole_and_by_rows_and_after_a_resume(tmp_path):
    path = made_by("tar", tmp_path / "data")
    given = options(path, "tar", smallest_crop=0.3, flip=True)
    whole = build_dataset(given, VIT, 8, 3).train
    shapes = shapes_of(whole, 8)
    wanted = [whole(k) for k in range(9)]
    again = build_dataset(given, VIT, 8, 3).train  # as another process, which begins later
    for k in (8, 5, 2):
        np.testing.assert_array_equal(again(k)["image"], wanted[k]["image"])
        parts = [own_rows(again, shapes, np.arange(a, a + 2))(k) for a in range(0, 8, 2)]
        for name in ("image", "label"):
            summed = sum(part[name] for part in parts)
            np.testing.assert_array_equal(summed, wanted[k][name])


def test_random_parts_are_drawn_anew_in_each_pass(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(256, size=(20, 30, 3), dtype=np.uint8)).save(root / "a.png")
    plain, drawn = (
        build_dataset(options(root, validation_fraction=0.0, **changes), UNET, 1, 0).train
        for changes in ({}, {"smallest_crop": 0.3, "flip": True})
    )
    np.testing.assert_array_equal(plain(0)["image"], plain(1)["image"])
    made = {drawn(k)["image"].tobytes() for k in range(6)}
    assert len(made) == 6
    np.testing.assert_array_equal(drawn(4)["image"], drawn(4)["image"])
    assert "label" not in plain(0)


def test_pictures_are_cropped_padded_or_stretched_and_normalised():
    left, right = Image.new("RGB", (8, 8), "white"), Image.new("RGB", (8, 8), "black")
    wide = Image.new("RGB", (16, 8))
    wide.paste(left, (0, 0))
    wide.paste(right, (8, 0))
    crop, pad, stretch = (
        Fitting(8, 1, fit, mean=0.5, std=0.5).array(wide, None)[..., 0]
        for fit in ("crop", "pad", "stretch")
    )
    assert crop[:, :3].min() == 1
    assert crop[:, 5:].max() == -1
    assert pad[0].max() == pad[7].max() == -1  # the bars
    assert pad[3, :3].min() == 1
    assert stretch[0, 0] == stretch[7, 0] == 1
    assert Fitting(4, 4, "crop").array(left, None).shape == (4, 4, 4)
    mirrored = Fitting(8, 3, "stretch", flip=True)
    found = {mirrored.array(wide, np.random.default_rng(i))[0, 0, 0] for i in range(8)}
    assert found == {0, 1}


def test_a_picture_is_turned_as_its_camera_was_held(tmp_path):
    wide = Image.new("L", (8, 4))
    wide.paste(255, (0, 0, 4, 4))  # white on its left
    exif = wide.getexif()
    exif[0x0112] = 6  # is to be turned by 90 degrees to the right: white at its top
    wide.save(tmp_path / "a.png", exif=exif)
    points = Fitting(8, 1, "stretch").array(Image.open(tmp_path / "a.png"), None)[..., 0]
    assert points[0].min() == 1
    assert points[7].max() == 0


def test_a_damaged_tag_of_a_whole_picture_is_passed_over(tmp_path):
    wide = Image.new("L", (8, 4))
    wide.paste(255, (0, 0, 4, 4))
    turned, damaged = (0x0112, 3, 1, 6, 0), (0x0100, 2, 4)  # the width is text
    exif = b"Exif\0\0MM\0*" + struct.pack(">LH", 8, 2) + struct.pack(">HHLHH", *turned)
    exif += struct.pack(">HHL", *damaged) + b"abc\0" + bytes(4)
    wide.save(tmp_path / "a.jpg", exif=exif, quality=100)
    picture = Image.open(tmp_path / "a.jpg")
    decode.check_whole(picture)
    points = Fitting(8, 1, "stretch").array(Image.open(tmp_path / "a.jpg"), None)[..., 0]
    assert points[0].min() > 0.9


def spoil(format, path):
    """Make picture 4 of a source bad; what is said of it."""
    if format == "folder":
        file = path / "cat" / "004.png"
        file.write_bytes(png(4)[:40])
        return str(file), "004.png: "
    if format == "list":
        (path.parent / "004.png").unlink()
        return f"{path}, line 6", "004.png: no such file or directory"
    file = str(path).replace("*", "a")
    with open(file, "r+b") as archive:
        content = archive.read()
        at = content.index(png(4))
        archive.seek(at + 20)
        archive.write(bytes(30))
    return f"{file}, 004.png", ": "


@pytest.mark.parametrize("format", ["folder", "list", "tar"])
def test_a_bad_picture_is_refused_by_file_and_place_or_skipped_and_counted(tmp_path, format):
    path = made_by(format, tmp_path / "data")
    place, why = spoil(format, path)
    given = options(path, format, validation_fraction=0.0)

    def read_all():
        train = build_dataset(given, VIT, 10, 0).train
        for k in range(3):
            train(k)

    with pytest.raises(InputError) as error:
        read_all()
    said = str(error.value)
    assert place in said
    assert why in said
    assert said.endswith("fix it, or leave bad pictures out with dataset.bad=skip")
    given = options(path, format, validation_fraction=0.0, bad="skip")
    assert needs_preparing(given)
    line = prepare_dataset(given, 1, lambda share: None)
    assert f"29 pictures are in {path} (1 bad ones are left out, first {place}" in line
    assert not needs_preparing(given)
    dataset = build_dataset(given, VIT, 29, 0)
    assert sorted(numbers_in(dataset.train(0))) == [i for i in range(30) if i != 4]
    assert "29 pictures of 3 classes (1 bad ones are left out" in dataset.describe


def test_the_next_good_picture_stands_in_for_one_that_turns_bad_later(tmp_path, caplog):
    path = made_by("folder", tmp_path / "data")
    given = options(path, "folder", validation_fraction=0.0, bad="skip", flip=True)
    prepare_dataset(given, 1, lambda share: None)
    before = build_dataset(given, VIT, 30, 0).train
    wanted = [before(k) for k in range(2)]
    (path / "cat" / "004.png").write_bytes(b"none")
    (path / "cat" / "007.png").write_bytes(b"none")
    whole = build_dataset(given, VIT, 30, 0).train
    found = [whole(k) for k in range(2)]
    for one, other in zip(wanted, found, strict=True):
        # Numbers of pictures are by class: birds 0, 3, … and then cats 1, 4, 7, 10, …
        numbers = [10 if n in (4, 7) else n for n in numbers_in(one)]
        assert numbers_in(other).tolist() == numbers
        np.testing.assert_array_equal(other["label"], np.array(numbers) % 3)
    again = build_dataset(given, VIT, 30, 0).train  # as another process, which begins later
    rows = own_rows(again, shapes_of(again, 30), np.arange(10, 20))(1)
    np.testing.assert_array_equal(rows["image"][10:20], found[1]["image"][10:20])
    assert "bad pictures so far in this process: 2" in caplog.records[1].getMessage()


def test_what_is_wrong_in_tar_and_npz_files_is_named(tmp_path):
    path = made_by("tar", tmp_path / "data")
    whole = (tmp_path / "data" / "a.tar").read_bytes()
    cut = whole[: whole.index(png(10)) + 20]
    (tmp_path / "data" / "a.tar").write_bytes(cut)
    with pytest.raises(InputError, match=r"a\.tar, 010\.png: it is cut short: [\d,]+ bytes of"):
        build_dataset(options(path, "tar"), VIT, 4, 0)
    (tmp_path / "data" / "a.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(InputError, match=r"a\.tar: it is not a whole, uncompressed tar file"):
        build_dataset(options(path, "tar"), VIT, 4, 0)
    with tarfile.open(tmp_path / "data" / "a.tar", "w") as archive:
        info = tarfile.TarInfo("7.cls")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"1"))
    with pytest.raises(InputError, match=r"a\.tar, 7: it has no picture"):
        build_dataset(options(path, "tar"), VIT, 4, 0)
    np.savez(tmp_path / "x.npz", image=np.zeros((3, 4, 4, 3)), label=np.arange(3))
    with pytest.raises(InputError, match=r"x\.npz: 'image' is float64 \[3, 4, 4, 3\], and pict"):
        build_dataset(options(tmp_path / "x.npz", "npz"), VIT, 4, 0)


def test_odd_files_are_refused_in_words(tmp_path, monkeypatch):
    grey = SimpleNamespace(name="unet", image_size=4, channels=1)
    (tmp_path / "flat").mkdir()
    Image.new("F", (4, 4)).save(tmp_path / "flat" / "x.tiff")
    given = options(tmp_path / "flat", validation_fraction=0.0)
    with pytest.raises(InputError, match=r"x\.tiff: its points are of Pillow's mode F"):
        build_dataset(given, grey, 1, 0).train(0)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7)
    with pytest.raises(InputError, match=r"x\.tiff: Image size \(16 pixels\) exceeds limit"):
        build_dataset(given, grey, 1, 0).train(0)
    listed = tmp_path / "all.csv"
    for content, text in (
        (b"file_name,label\na\0.png,x\n", "embedded null"),
        (b"file_name,label\n\xe9.png,x\n", "no such file"),
        (b"file_name,label\n" + b"a" * 200_000 + b",x\n", "field larger than field limit"),
    ):
        listed.write_bytes(content)
        with pytest.raises(InputError, match=rf"all\.csv, line \d: .*{text}"):
            build_dataset(options(listed), grey, 1, 0)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("cat/1.png")
        info.type, info.linkname = tarfile.LNKTYPE, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(InputError, match=r"a\.tar, cat/1\.png: it is a link, which is not fol"):
        build_dataset(options(tmp_path / "a.tar", "tar"), VIT, 4, 0)
    np.savez(tmp_path / "x.npz", image=np.zeros((2, 4, 4, 3), np.uint8), label=np.array([0, -1]))
    with pytest.raises(InputError, match=r"x\.npz, row 1: its class is -1"):
        build_dataset(options(tmp_path / "x.npz", "npz"), VIT, 4, 0)


def test_a_list_with_a_byte_order_mark_and_odd_names_of_folders_are_read(tmp_path):
    path = made_by("list", tmp_path / "listed")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert sorted(numbers_in(build_dataset(options(path), VIT, 29, 0).train(0)))
    folder = made_by("folder", tmp_path / "data")
    (folder / "dog").rename(folder / os.fsdecode(b"d\xf6g"))
    dataset = build_dataset(options(folder, validation_fraction=0.0), VIT, 30, 0)
    assert sorted(numbers_in(dataset.train(0))) == list(range(30))


def test_threads_read_an_npz_file_once(tmp_path, monkeypatch):
    path, reads, all_ask = made_by("npz", tmp_path / "data"), [], threading.Barrier(4)

    def read(file, names):
        reads.append(file)
        time.sleep(0.05)  # in which the others would begin, too
        return read_arrays(file, names)

    def ask(_):
        all_ask.wait(10)
        return decode.open_picture(str(path / "a.npz"), 0, 0, "npz")

    monkeypatch.setattr(decode, "read_arrays", read)
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(ask, range(4)))) == 4
    assert reads == [path / "a.npz"]


def test_points_of_16_bits_are_read_with_their_eight_highest(tmp_path):
    values = (np.arange(16).reshape(4, 4) * 4096).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "x.png")
    grey = SimpleNamespace(name="unet", image_size=4, channels=1)
    batch = build_dataset(options(tmp_path, validation_fraction=0.0), grey, 1, 0).train(0)
    assert np.allclose(batch["image"][0, ..., 0], (values >> 8) / 255)


@pytest.mark.parametrize(
    ("model", "words", "text"),
    [
        (SimpleNamespace(name="mlp", input_size=4), {}, "model.name=mlp does not take pictures"),
        (SimpleNamespace(**{**vars(VIT), "channels": 2}), {}, "takes 2 channels"),
        (SimpleNamespace(**{**vars(VIT), "num_classes": 2}), {}, "set model.num_classes=3"),
        (VIT, {"path": "none"}, "dataset.path=none does not exist; name a file"),
        (VIT, {"path": "none", "format": "tar"}, "dataset.path=none does not exist; name a file"),
        (VIT, {"path": "/dev/null", "format": "tar"}, r"path=/dev/null is neither a file nor"),
        (VIT, {"validation_fraction": 0.0}, "holds out no picture to evaluate on"),
        (VIT, {"validation_path": "other"}, "has the class 'fish', which"),
        (VIT, {"path": "flat"}, "has no class, and model.name=vit learns classes"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, model, words, text):
    monkeypatch.chdir(tmp_path)
    made_by("folder", tmp_path / "data")
    for folder in ("other/fish", "flat"):
        os.makedirs(folder)
        (tmp_path / folder / "a.png").write_bytes(png(1))
    with pytest.raises(InputError, match=text):
        check_dataset(Pictures(**{"path": "data"} | words), model, validation=True)


def test_an_index_is_made_once_and_again_when_files_change(tmp_path, monkeypatch):
    path, scans = made_by("tar", tmp_path / "data"), []
    scanned = index_module.scanned
    monkeypatch.setattr(index_module, "scanned", lambda *given: scans.append(1) or scanned(*given))
    given = options(path, "tar")
    assert needs_preparing(given)
    for _ in range(3):
        build_dataset(given, VIT, 4, 0)
    assert len(scans) == 2  # files, once
    made_by("tar", tmp_path / "more", 12)
    os.replace(tmp_path / "more" / "b.tar", tmp_path / "data" / "b.tar")
    assert needs_preparing(given)
    assert "12 pictures" in prepare_dataset(given, 1, lambda share: None)
    assert len(scans) == 4


def test_a_class_is_a_folder_with_all_below_it_and_none_is_lost_in_silence(tmp_path):
    for i in range(6):
        place = tmp_path / "data" / "only" / CLASSES[i % 2] / ("deeper" if i % 4 else "")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i}.png").write_bytes(png(i))
    (tmp_path / "data" / "only" / "dog").mkdir()
    (tmp_path / "data" / "only" / "dog" / "0.heic").write_bytes(b"x")
    given = options(tmp_path / "data", validation_fraction=0.0)
    dataset = build_dataset(given, VIT, 6, 0)
    assert dataset.describe.startswith(f"{tmp_path}/data: 6 pictures of 2 classes, none held out")
    assert "left out: 1 *.heic (" in dataset.describe
    assert dataset.describe.endswith("; no picture is in dog")
    batch = dataset.train(0)
    np.testing.assert_array_equal(batch["label"], numbers_in(batch) % 2)
    place = tmp_path / "data" / "only" / "dog" / "deep"
    place.mkdir()
    (place / "6.png").write_bytes(png(6))  # the index that is kept is not that of today
    assert "7 pictures of 3 classes" in build_dataset(given, VIT, 6, 0).describe
    (place.parent.parent / "7.png").write_bytes(png(7))
    with pytest.raises(InputError, match=r"only/7\.png has no class, and model"):
        build_dataset(given, VIT, 6, 0)


def test_a_picture_that_is_replaced_in_place_is_read_as_it_is(tmp_path):
    path = made_by("folder", tmp_path / "data", 3)
    given = options(path, validation_fraction=0.0)
    for size in ((8, 8), (9, 40), (8, 8)):
        (path / "cat" / "001.png").write_bytes(png(1, size))
        assert sorted(numbers_in(build_dataset(given, VIT, 3, 0).train(0))) == [0, 1, 2]


@pytest.mark.parametrize("format", ["folder", "tar", "npz"])
def test_the_fingerprint_is_of_the_content_wherever_it_lies(tmp_path, format):
    first = fingerprint_dataset(options(made_by(format, tmp_path / "a"), format))
    assert first == fingerprint_dataset(options(made_by(format, tmp_path / "b"), format))
    path = made_by(format, tmp_path / "c")
    if format == "folder":
        (path / "cat" / "004.png").write_bytes(png(4, (8, 9)))  # in place: no folder changes
    elif format == "tar":
        spoil("tar", path)
    else:
        np.savez(path / "a.npz", image=np.ones((11, 8, 8, 3), np.uint8), label=np.arange(11) % 3)
    assert fingerprint_dataset(options(path, format)) != first
