"""Folders as corpora are published: what lies there is read, or said, by every dataset."""

import dataclasses
import io
import shlex
import tarfile
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from launcher.config.families import find_datasets
from launcher.config.overrides import parse
from launcher.recipes import InputError, build_dataset, prepare_dataset

MODEL = SimpleNamespace(
    name="any", vocab_size=300, sequence_length=4, image_size=8, channels=3, layers=1
)  # takes text, and pictures without classes


TABLE = pa.table({"text": ["some words"]})


def arrow(path):
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE)


def tar(path):
    Image.new("RGB", (8, 8)).save(file := io.BytesIO(), "PNG")
    with tarfile.open(path, "w") as archive:
        for name in ("a/0.png", "a/._0.png"):
            (member := tarfile.TarInfo(name)).size = len(file.getvalue())
            archive.addfile(member, io.BytesIO(file.getvalue()))


def npz(path):
    with path.open("wb") as file:
        np.savez(file, image=np.zeros((1, 8, 8, 3), np.uint8))


def words(path):
    path.write_text("some words")


def tokens(path):
    np.arange(8, dtype=np.uint16).tofile(path)


# Of each dataset, and each of its formats: the ending of a file, what writes one, and what is said
# where three are read. None: it takes one file and no folder.
ANSWERS = {
    "arrays": None,
    "documents jsonl": (".jsonl", lambda path: path.write_text('{"text": "a b"}'), "3 documents"),
    "documents parquet": (".parquet", lambda path: pq.write_table(TABLE, path), "3 documents"),
    "documents arrow": (".arrow", arrow, "3 documents"),
    "documents text": (".txt", words, "3 documents"),
    "mixture": (".bin", tokens, "5 examples"),
    "pictures folder": (
        ".png",
        lambda path: Image.new("RGB", (8, 8)).save(path, "PNG"),
        "3 pictures",
    ),
    "pictures tar": (".tar", tar, "3 pictures"),
    "pictures npz": (".npz", npz, "3 pictures"),
    "text": (".txt", words, "3 files"),
    "tokens": (".bin", tokens, "3 files"),
}
# Of each shape of a folder: where file `i` lies, what else does, and what is said of that.
LEFTOVERS = [".DS_Store", "._0{e}", "__MACOSX/0{e}", ".cache/0{e}", "_temporary/0{e}", "Thumbs.db"]
SHAPES = {
    "a folder deeper": ("more/{i}{e}", [], []),
    "deep, in capitals": ("a/b{i}/{i}{E}", [], []),
    "leftovers": ("{i}{e}", LEFTOVERS, ["6 hidden (", "/.DS_Store, …)"]),
    "cards": ("{i}{e}", ["README.md", "dataset_info.json", "LICENSE", "deep/SUMS.md"],
              ["2 *.md (", "1 *.json (", "1 without an ending (", "/LICENSE)"]),
}  # fmt: skip
SPLITS = {
    "folders": ("data/train/{i}{e}", ["data/test/9{e}"]),
    "shards": ("data/train-0000{i}-of-00003{e}", ["data/test-00000-of-00001{e}"]),
    "files with a name before": ("news.train.{i}{e}", ["news.val.0{e}", "news.test.0{e}"]),
}


def keys():
    for name, options in find_datasets().items():
        fields = {field.name: field for field in dataclasses.fields(options)}
        formats = fields["format"].metadata["choices"] if "format" in fields else [""]
        if {"path", "parts"} & fields.keys():
            yield from (f"{name} {format}".strip() for format in formats)


FOLDERS = [key for key in keys() if ANSWERS[key]]  # a new dataset needs an answer


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def options_of(key, path, **more):
    name, _, format = key.partition(" ")
    where = {"parts": {"a": {"path": str(path)}}} if name == "mixture" else {"path": str(path)}
    where |= {"format": format} if format else {}
    more |= {"tokens": f"{path.parent}/out"} if name == "documents" else {}
    return find_datasets()[name](**where, **more, validation_fraction=0.0)


def told(options):
    """What a user is told of the data; and how much of it was read."""
    said = f"{prepare_dataset(options, 1, lambda share: None)}\n"
    return said + build_dataset(options, MODEL, 1, 0).describe


def filled(root, key, place, others=(), count=3):
    """Write files of a dataset, and others with names that are its own or not."""
    ending, write, _ = ANSWERS[key]
    names = [place.format(i=i, e=ending, E=ending.upper()) for i in range(count)]
    for name in (*names, *(other.format(e=ending) for other in others)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (write if name.lower().endswith(ending) else words)(root / name)
    return root


@pytest.mark.sampled(3, rest="slow")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("key", FOLDERS)
def test_what_lies_in_a_folder_is_read_or_said(key, shape, tmp_path):
    place, others, parts = SHAPES[shape]
    more = {"pattern": "**/*.[tT][xX][tT]"} if key == "text" and "capitals" in shape else {}
    said = told(options_of(key, filled(tmp_path / "data", key, place, others), **more))
    assert ANSWERS[key][2] in said
    assert all(part in said for part in parts), said
    assert ("left out" in said) == bool(parts)
    with pytest.raises(InputError, match=r"left out: 1 \*\.md \("):
        told(options_of(key, filled(tmp_path / "none" / "x", key, "", ["a.md"], count=0)))


@pytest.mark.sampled(7, rest="slow")
@pytest.mark.parametrize("shape", SPLITS)
@pytest.mark.parametrize("key", FOLDERS)
def test_several_splits_are_not_read_as_one(key, shape, tmp_path):
    """Training on `train` alone is said; or splits are refused, with what to name instead."""
    if key == "pictures folder" and shape != "folders":
        return  # names of pictures say nothing
    data = filled(tmp_path / "data", key, *SPLITS[shape])
    try:
        said = told(options_of(key, data))
        assert "1 of the split test (" in said
    except InputError as error:
        words = shlex.split(str(error).partition("name what to read: ")[2])
        paths = {one.key_or_group.removeprefix("dataset."): one.value() for one in parse(words)}
        path = paths.pop("parts.a.path" if key == "mixture" else "path")
        assert paths.keys() == ({"validation_path"} if key != "mixture" else set())
        said = told(options_of(key, tmp_path / path, **paths))
    assert ANSWERS[key][2] in said


@pytest.mark.parametrize("key", FOLDERS)
def test_links_are_followed_once_and_broken_ones_are_errors(key, tmp_path):
    data = filled(tmp_path / "data", key, "{i}{e}", count=2)
    (data / "link").symlink_to(filled(tmp_path / "far", key, "{i}{e}", count=1))
    (data / "self").symlink_to(data)
    said = told(options_of(key, data))
    assert "1 links to folders that are read (" in said
    assert ANSWERS[key][2] in said or f"1 *.txt ({data}/link" in said
    (data / f"gone{ANSWERS[key][0]}").symlink_to(tmp_path / "nowhere")
    with pytest.raises((InputError, OSError), match="gone"):
        told(options_of(key, data))


def test_every_dataset_that_takes_a_path_has_an_answer():
    assert set(keys()) == ANSWERS.keys()
