"""`sources.py`: which files of a dataset as `datasets` saves it are read."""

import json

import pyarrow as pa
import pytest

from launcher.recipes import InputError
from launcher.recipes.data.corpus.sources import find_sources
from launcher.recipes.data.file_access import FileAccess
from launcher.recipes.datasets.documents import Documents
from launcher.recipes.datasets.documents.dataset import prepare


def arrow(path, *texts):
    """Write texts as an Arrow stream."""
    table = pa.table({"text": list(texts)})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def saved(folder, *names):
    """Write a dataset of these files, and a cache beside them."""
    folder.mkdir(parents=True)
    for name in (*names, "cache-0123456789abcdef.arrow"):
        arrow(folder / name, f"{folder.name} {name}")
    state = {"_data_files": [{"filename": name} for name in names], "_split": folder.name}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def splits(folder, *names):
    """Write a dictionary of datasets."""
    for name in names:
        saved(folder / name, "data-00000-of-00001.arrow")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(names)}))
    return folder


def found(folder, pattern=None):
    paths = find_sources(str(folder), pattern, "arrow", FileAccess()).paths
    return [path.relative_to(folder).as_posix() for path in paths]


def refusal(folder):
    with pytest.raises(InputError) as error:
        find_sources(str(folder), None, "arrow", FileAccess())
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_dataset_is_the_files_that_it_lists(tmp_path):
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    assert found(saved(tmp_path / "a", *names)) == names
    saved(tmp_path / "b", names[0])
    assert found(tmp_path) == ["a/" + names[0], "a/" + names[1], "b/" + names[0]]
    assert len(found(tmp_path, pattern="*/*.arrow")) == 5  # a pattern takes what fits


def test_of_several_splits_train_is_read_or_the_only_one(tmp_path):
    three = splits(tmp_path / "data" / "three", "train", "validation", "test")
    assert found(three) == ["train/data-00000-of-00001.arrow"]
    assert found(splits(tmp_path / "data" / "one", "talks")) == ["talks/data-00000-of-00001.arrow"]
    assert found(three / "test") == ["data-00000-of-00001.arrow"]
    options = Documents(path=f"{tmp_path}/data", format="arrow", tokens=str(tmp_path / "out"))
    said = prepare(options, 1, lambda share: None)
    assert said.startswith("2 documents, ")
    for split in ("validation", "test"):
        assert f"2 of the split {split} ({three}/{split}/cache-0123456789abcdef.arrow, …)" in said
    assert f"2 not listed ({tmp_path}/data/one/talks/cache-0123456789abcdef.arrow, …)" in said


def test_what_does_not_tell_its_files_is_refused_by_name(tmp_path):
    others = splits(tmp_path / "others", "a", "b")
    assert refusal(others) == (
        f"dataset.path={others} holds the splits a, b, and none is train; name the folder of the "
        "one to train on"
    )
    gone = splits(tmp_path / "gone", "train")
    (gone / "train" / "data-00000-of-00001.arrow").unlink()
    assert "data-00000-of-00001.arrow is missing, which state.json lists; save the" in refusal(gone)
    (gone / "train" / "state.json").write_text("{")
    assert "train/state.json is damaged: it is not JSON" in refusal(gone)
    (gone / "train" / "state.json").write_text('{"_data_files": [3]}')
    assert "train/state.json is damaged: it lists no names; save the dataset again" in refusal(gone)
    (gone / "train").rename(gone / "other")
    assert f"names the split train, and lacks {gone}/train; save" in refusal(gone)
