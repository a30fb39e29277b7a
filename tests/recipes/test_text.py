"""`recipes/datasets/text/dataset.py`: sequences, the two parts, and the text of every refusal."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from launcher.recipes import InputError, build_dataset, check_dataset
from launcher.recipes.data.files import stdlib_folder

LENGTH = 4


def model(**changes):
    return SimpleNamespace(
        **{"name": "gpt", "vocab_size": 256, "sequence_length": LENGTH, **changes}
    )


def text(path, **changes):
    options = {"path": str(path), "pattern": "**/*.txt", "validation_fraction": 0.0, **changes}
    return SimpleNamespace(name="text", **options)


def refusal(options, model_options=None, validation=False):
    with pytest.raises(InputError) as error:
        check_dataset(options, model_options or model(), validation=validation)
    assert "\n" not in str(error.value)
    return str(error.value)


def rows(batch_of, steps):
    return {bytes(row.tolist()) for k in range(steps) for row in batch_of(k)["tokens"]}


def test_sequences_lie_one_after_the_other_and_targets_are_one_later(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(23)))
    dataset = build_dataset(text(tmp_path / "a.txt"), model(), global_batch_size=5, seed=0)
    batch = dataset.train(0)
    assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
        "tokens": ((5, LENGTH), np.int32),
        "targets": ((5, LENGTH), np.int32),
    }
    # 23 bytes hold five sequences of 4 + 1 that share a byte; the rest is left out.
    assert sorted(batch["tokens"].tolist()) == [list(range(k, k + 4)) for k in range(0, 20, 4)]
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    assert dataset.validation is None
    assert dataset.describe == (
        f"dataset.path={tmp_path / 'a.txt'}: 1 file, 23 bytes, none of it held out"
    )


def test_several_files_are_read_once_and_one_after_the_other(tmp_path):
    for name, first in (("a.txt", 0), ("b.txt", 9)):
        (tmp_path / name).write_bytes(bytes(range(first, first + 9)))
    train = build_dataset(text(tmp_path), model(), 4, seed=0).train
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).unlink()
    assert sorted(train(0)["tokens"].tolist()) == [list(range(k, k + 4)) for k in range(0, 16, 4)]


def test_batch_k_is_pure_and_passes_differ(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(81)))
    one = build_dataset(text(tmp_path), model(), 4, seed=1)
    other = build_dataset(text(tmp_path), model(), 4, seed=1)
    passes = [[one.train(5 * p + k)["tokens"].tolist() for k in range(5)] for p in range(3)]
    assert passes[2][3] == other.train(13)["tokens"].tolist()
    assert passes[0] != passes[1] != passes[2]
    assert rows(one.train, 5) == rows(lambda k: one.train(5 + k), 5)


def test_files_are_held_out_whole(tmp_path):
    for index in range(20):
        (tmp_path / f"{index}.txt").write_bytes(bytes([index]) * 40)
    options = text(tmp_path, validation_fraction=0.2)
    dataset = build_dataset(options, model(), 16, seed=0)
    train = {byte for row in rows(dataset.train, 40) for byte in row}
    held_out = {byte for row in rows(dataset.validation, 10) for byte in row}
    assert train | held_out == set(range(20))
    assert not train & held_out
    assert len(held_out) == 4
    assert dataset.describe == (
        f"dataset.path={tmp_path}: 20 files, 800 bytes, "
        "4 of them (160 bytes) held out for validation"
    )


def test_validation_does_not_depend_on_the_seed(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(250)))
    options = text(tmp_path / "a.txt", validation_fraction=0.4)
    one, other = (build_dataset(options, model(), 4, seed) for seed in (1, 2))
    assert one.validation(3)["tokens"].tolist() == other.validation(3)["tokens"].tolist()
    assert one.train(3)["tokens"].tolist() != other.train(3)["tokens"].tolist()


def test_a_single_file_is_held_out_at_its_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    dataset = build_dataset(text(tmp_path, validation_fraction=0.1), model(), 4, seed=0)
    assert max(max(row) for row in rows(dataset.train, 20)) < 180
    assert min(min(row) for row in rows(dataset.validation, 20)) >= 180
    assert dataset.describe == (
        f"dataset.path={tmp_path}: 1 file, 200 bytes, its last 20 bytes held out for validation"
    )


def test_the_standard_library_is_text():
    options = SimpleNamespace(name="stdlib_text", validation_fraction=0.05)
    dataset = build_dataset(options, model(sequence_length=64), 8, seed=0)
    characters = np.concatenate([dataset.train(k)["tokens"].ravel() for k in range(4)])
    assert np.mean((characters >= 32) & (characters < 127) | (characters == 10)) > 0.95
    assert dataset.validation(0)["tokens"].shape == (8, 64)
    assert dataset.describe.startswith(f"the standard library in {stdlib_folder()}: ")


@pytest.mark.parametrize(
    ("content", "name", "changes", "said"),
    [
        (None, "none.txt", {}, "dataset.path={} does not exist; name a text file, or a folder who"),
        (
            None,
            "/dev/null",
            {},
            "dataset.path={} is neither a file nor a folder; name a text file,",
        ),
        (b"", "a.txt", {}, "dataset.path={} is empty; name a file or folder with text in it"),
        (b"", "", {}, "dataset.path={} holds only empty files for **/*.txt; name a file or folder"),
        (None, "", {}, "dataset.pattern=**/*.txt fits no file below dataset.path={}; change eith"),
        (None, "", {"pattern": ""}, "dataset.pattern= is not a pattern for files below a folder ("),
        (b"", "", {"pattern": "/etc/*"}, "dataset.pattern=/etc/* is not a pattern for files belo"),
        (
            b"1234",
            "a.txt",
            {},
            "dataset.path={} holds 4 bytes, less than one sequence of 4 + 1 bytes; give more text",
        ),
        (
            bytes(20),
            "",
            {"validation_fraction": 0.8},
            "dataset.validation_fraction=0.8 leaves 4 bytes of dataset.path={} for training, less "
            "than one sequence of 4 + 1 bytes; lower it",
        ),
    ],
)
def test_text_that_cannot_be_used_is_refused(tmp_path, content, name, changes, said):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    assert refusal(text(tmp_path / name, **changes)).startswith(said.format(tmp_path / name))


def test_one_sequence_is_enough(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"12345")
    assert rows(build_dataset(text(tmp_path), model(), 2, 0).train, 1) == {b"1234"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_refuses_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("secret")
    path.chmod(0)
    assert refusal(text(path)) == (
        f"dataset.path={path}: you may not read {path}; change its permissions or name another path"
    )


def test_refuses_evaluation_without_held_out_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(20))
    options = text(tmp_path, validation_fraction=0.1)
    check_dataset(options, model(), validation=False)
    assert build_dataset(options, model(), 2, 0).validation is None
    assert refusal(options, validation=True) == (
        f"dataset.validation_fraction=0.1 of dataset.path={tmp_path} holds out no sequence of "
        "4 + 1 bytes to evaluate on (files are held out whole); raise it, give more text, "
        "or set train.eval_every=0"
    )


def test_refuses_a_model_that_cannot_take_bytes(tmp_path):
    assert refusal(text(tmp_path), model(vocab_size=128)) == (
        "model.vocab_size=128 is too small for text read as bytes; set model.vocab_size=256 or more"
    )
    assert refusal(text(tmp_path), SimpleNamespace(name="mlp")) == (
        "dataset.name=text holds text, which model.name=mlp does not take; "
        "choose model=gpt or dataset=synthetic"
    )


@pytest.mark.devices
def test_more_files_than_may_be_open_at_once(tmp_path):
    many = 300
    for i in range(many):
        (tmp_path / f"{i:04}.txt").write_text(f"file {i} " * 8)
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"
        "from launcher.recipes.models.gpt import GPTOptions\n"
        "from launcher.recipes.datasets.text import Text\n"
        "from launcher.recipes import build_dataset\n"
        f"data = build_dataset(Text(path={str(tmp_path)!r}), GPTOptions(sequence_length=16,"
        " vocab_size=256), 4, 0)\n"
        "print(data.train(0)['tokens'].shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "(4, 16)\n", done.stderr
