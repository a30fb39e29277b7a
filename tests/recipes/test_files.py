"""`recipes/data/files.py`: which files are found, and which of them are held out."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.recipes.data.files import FileSlice, find_stdlib, find_text, split, total_size


def whole(sizes):
    return [FileSlice(name, Path(name), 0, size) for name, size in sizes.items()]


MANY = whole({f"{index}.txt": 100 + index for index in range(100)})


def test_the_split_does_not_depend_on_the_order_of_files():
    shuffled = MANY.copy()
    random.Random(0).shuffle(shuffled)
    assert split(shuffled, 0.1, 10) == split(MANY, 0.1, 10)


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.5, 0.9])
def test_files_stay_whole_and_validation_gets_about_its_fraction(fraction):
    train, validation = split(MANY, fraction, 10)
    assert sorted(train + validation) == sorted(MANY)
    share = total_size(validation) / total_size(MANY)
    assert fraction - 0.03 < share <= fraction


def test_names_decide_not_sizes_alone():
    renamed = [replace(piece, name=f"other/{piece.name}") for piece in MANY]
    chosen = {piece.path for piece in split(MANY, 0.5, 10)[1]}
    assert chosen != {piece.path for piece in split(renamed, 0.5, 10)[1]}


def test_few_files_hold_out_the_smallest_that_is_long_enough():
    train, validation = split(whole({"a": 1000, "b": 5, "c": 300, "d": 400}), 0.05, 100)
    assert [piece.name for piece in validation] == ["c"]
    assert [piece.name for piece in train] == ["a", "b", "d"]


def test_nothing_is_held_out_where_no_file_is_long_enough():
    assert split(whole({"a": 1000, "b": 5}), 0.05, 100)[1] == []
    assert split(whole({"a": 150, "b": 20}), 0.05, 100)[1] == []
    assert split(MANY, 0.0, 10)[1] == []


def test_a_single_file_is_cut_at_its_end():
    (piece,) = whole({"a": 1000})
    train, validation = split([piece], 0.05, 50)
    assert (train, validation) == ([replace(piece, stop=950)], [replace(piece, start=950)])
    assert split([piece], 0.05, 51) == ([piece], [])


def test_a_name_need_not_be_unicode(tmp_path):
    for name in (b"\xff.txt", b"a.txt"):
        (tmp_path / os.fsdecode(name)).write_bytes(bytes(100))
    assert len(split(find_text(str(tmp_path), "*.txt")[0], 0.5, 10)[1]) == 1


def test_the_standard_library_is_found_without_its_tests():
    names = [piece.name for piece in find_stdlib()]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    skipped = ("test/", "site-packages/", "dist-packages/")
    assert not [name for name in names if name.startswith(skipped) or "__pycache__" in name]
    assert total_size(find_stdlib()) > 5_000_000


def test_a_folder_gives_its_non_empty_files_that_fit_the_pattern(tmp_path):
    for name, text in {"b/c.txt": "xx", "a.txt": "yyy", "no.md": "z", "empty.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "folder.txt").mkdir()
    found, left_out = find_text(str(tmp_path), "**/*.txt")
    assert left_out == f"; left out: 1 *.md ({tmp_path}/no.md)"
    assert found == [
        FileSlice("a.txt", tmp_path / "a.txt", 0, 3),
        FileSlice("b/c.txt", tmp_path / "b/c.txt", 0, 2),
    ]


def test_a_path_may_start_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text("text")
    assert find_text("~/mine.txt", "**/*.txt")[0] == [
        FileSlice("mine.txt", tmp_path / "mine.txt", 0, 4)
    ]
