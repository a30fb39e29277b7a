"""A run that begins with the state of another: its parent, settings and place in the data."""

import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from launcher import checkpoint
from launcher.base.output import lines_to
from launcher.checkpoint import layout
from launcher.checkpoint.train_state import TrainState
from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.driver.folder import folder
from launcher.driver.planning.init_from import check_parent_state, find_start
from launcher.recipes import Dataset, build_dataset, fingerprint_dataset, rows_taken
from launcher.train.feed import after
from launcher.train.program import build_program

WORDS = ("model=mlp", "dataset=synthetic", "train.global_batch_size=8", "train.steps=12")
MIXED = ("model=gpt", "model.sequence_length=7", "model.vocab_size=64", "dataset=mixture")
PARTS = "dataset.parts={a: {path: a.bin}, b: {path: b.bin, weight: 3}}"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, first in {"a": 0, "b": 7, "c": 9}.items():
        (np.arange(first, first + 400) % 60).astype(np.uint16).tofile(f"{name}.bin")


def saved(*words, run_id="a", steps=(4, 8), state=None):
    """A run with checkpoints."""
    config = load([*words, f"run.id={run_id}"])
    state = state or TrainState(jnp.int32(1), {"w": jnp.ones(2)}, (), jnp.zeros(2, jnp.uint32))
    for step in steps:
        data = {"next_batch": step, "fingerprint": fingerprint_dataset(config.dataset)}
        about = folder.contents(config, {}, step, data)
        path = Path("outputs", run_id, "checkpoints")
        checkpoint.save(path, step, checkpoint.copy_to_host(state), about)
    return path


def claimed(*words):
    with folder.claim(load(words)) as home:
        return home


def fork(*words, run="outputs/a@8"):
    return claimed(*WORDS, f"run.fork={run}", "run.id=b", *words)


def test_a_fork_needs_its_parent_only_to_begin(tmp_path):
    path = saved(*WORDS)
    arrays = {file: os.stat(file).st_ino for file in layout.files_below(path / "4" / "default")}
    home = fork(run="outputs/a@4")
    began = f"{tmp_path}/outputs/a@4"
    assert (home.finished_steps, home.next_batch, home.forked_from) == (4, 4, began)
    copied = layout.files_below(home.checkpoints / "4" / "default")
    assert {os.stat(file).st_ino for file in copied} == {*arrays.values()}
    assert checkpoint.checkpoint_named(path, "4").run.run_id == "a"
    shutil.rmtree(path.parent)
    for run in ("outputs/a@4", "a", "null"):  # the same command, and any that resumes
        again = fork(run=run)
        assert (again.finished_steps, again.forked_from) == (4, began)
    saved(*WORDS, run_id="c")
    for run in ("outputs/c@4", "outputs/a@8"):
        with pytest.raises(ConfigError, match=r"does not fit run\.id=b, which began with .*a@4"):
            fork(run=run)
    of_fork = claimed(*WORDS, "run.fork=b", "run.id=d")
    assert of_fork.forked_from == f"{tmp_path}/outputs/b@4"


def test_a_shared_fork_takes_no_file_that_is_its_parents_users_alone():
    saved(*WORDS)
    home = fork("run.shared=true")
    assert {os.stat(file).st_nlink for file in layout.files_below(home.checkpoints)} == {1}


@pytest.mark.parametrize(
    ("name", "step"), [("outputs/a", 8), ("a@latest", 8), ("a@4", 4), ("a@best", 4)]
)
def test_a_checkpoint_has_several_names(name, step):
    checkpoint.write_best(saved(*WORDS), 4, "eval_loss", 1.0)
    assert fork(run=name).finished_steps == step


def test_a_damaged_checkpoint_is_passed_over_with_a_line():
    path, said = saved(*WORDS), []
    next(file for file in layout.files_below(path / "8" / "default")).write_text("x")
    with lines_to(said.append):
        assert fork(run="a").finished_steps == 4
    assert any("checkpoint 8 of outputs/a is damaged" in line for line in said)
    with pytest.raises(ConfigError, match="has a damaged checkpoint 8: "):
        claimed(*WORDS, "run.fork=a@8", "run.id=e")
    assert not Path("outputs/e").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["run.fork=outputs/x@8"], "run.fork=outputs/x@8 does not exist"),
        (["run.fork=empty"], "run.fork=empty has no checkpoint latest"),
        (["run.fork=a@5"], "run.fork=a@5 has no checkpoint 5, of 4, 8"),
        (["run.fork=a@best"], "run.fork=a@best has no checkpoint best, of 4, 8"),
        (["run.fork=a@-1"], "run.fork=a@-1 has no checkpoint -1, of 4, 8"),
        (["run.fork=a@8", "run.resume=must", "run.id=b"], "run.fork=a@8 begins a new run, and"),
        (["run.fork=a@8", "train.steps=8"], "train.steps=8 leaves nothing to train: run.fork=a@8"),
        (["run.fork=a@8", "model=resnet"], "model.name='resnet' does not fit run.fork=a@8, a run"),
        (["run.fork=a@8", "optimizer=sgd"], "optimizer.name='sgd' does not fit run.fork=a@8, a"),
        (["run.fork=a@8", "run.id=a"], "run.fork=a@8 does not fit run.id=a, which began afresh"),
    ],
)
def test_wrong_parents_and_settings_are_refused_in_one_line(words, problem):
    saved(*WORDS)
    Path("empty").mkdir()
    for door in (folder.check, lambda config: folder.claim(config).__enter__()):
        with pytest.raises(ConfigError) as error:
            door(load([*WORDS, *words]))
        assert str(error.value).startswith(problem)
        assert "\n" not in str(error.value)
    assert sorted(os.listdir("outputs")) == ["a"]


def test_the_settings_that_differ_are_listed_and_secrets_are_not(monkeypatch):
    monkeypatch.setenv("EVERY", "4711")
    saved(*WORDS, "train.log_every=${oc.env:EVERY}")
    monkeypatch.setenv("EVERY", "4712")
    said = []
    words = ["run.fork=a", "optimizer.learning_rate=1e-4", "train.global_batch_size=6"]
    with lines_to(said.append):
        assert folder.check(load([*WORDS, "train.log_every=${oc.env:EVERY}", *words])) == 8
    assert said[1:] == [
        "  optimizer.learning_rate: 0.003 -> 0.0001",
        "  train.global_batch_size: 8 -> 6",
    ]


def test_a_state_of_other_shapes_is_refused_by_the_keys_that_changed():
    words = [*WORDS, "model.hidden_size=16"]
    program = build_program(load(words))
    saved(*words, state=program.init(program.seed))
    same = load([*words, "run.fork=a", "optimizer.learning_rate=1e-4", "optimizer.b2=0.5"])
    check_parent_state(same, find_start(same, 8), build_program(same).state)
    for word, problem in {
        "model.hidden_size=24": r"is \(.*\) there and \(.*; model.hidden_size was 16\.",
        "optimizer.ema=0.9": r"it has no ema\..*; optimizer.ema was null\.",
    }.items():
        other = load([*words, "run.fork=a", word])
        with pytest.raises(ConfigError, match=f"run.fork=a does not fit this state: .*{problem}"):
            check_parent_state(other, find_start(other, 8), build_program(other).state)


def rows_from(batches, count, size):
    """The first rows of numbered batches."""
    return np.concatenate([batches.numbers(k) for k in range(-(-count // size))])[:count]


def test_another_batch_size_takes_no_row_twice_and_leaves_none_out():
    saved(*WORDS)
    home = fork("train.global_batch_size=6")
    assert (home.next_batch, home.taken) == (0, {"": 64})
    data = [build_dataset(load(WORDS).dataset, load(WORDS).model, size, 0) for size in (8, 6)]
    whole = rows_from(data[0].train, 64 + 30, 8)
    rest = rows_from(after(data[1], home.taken, 6), 30, 6)
    np.testing.assert_array_equal(rest, whole[64:])
    made = after(Dataset(lambda k: {"x": np.arange(6 * k, 6 * k + 6)}, None, ""), {"": 64}, 6)
    np.testing.assert_array_equal(made(1)["x"], np.arange(70, 76))


def test_a_mixture_goes_on_in_each_part_where_it_was(tmp_path):
    """Whatever its weights and parts become; a part that is other tokens begins anew."""
    saved(*MIXED, PARTS, "train.global_batch_size=8")
    words = [*MIXED, "train.steps=12", "run.fork=a@8", "run.id=b", "train.global_batch_size=5"]
    parts = "{c: {path: c.bin}, b: {path: b.bin}, a: {path: a.bin, weight: 2}}"
    config = load([*words, f"dataset.parts={parts}"])
    with folder.claim(config) as home:
        pass
    assert (home.next_batch, home.taken) == (0, {"a": 16, "b": 48})
    before = load([*MIXED, PARTS])
    one = build_dataset(before.dataset, before.model, 8, 0).train
    other = after(build_dataset(config.dataset, config.model, 5, 0), home.taken, 5)
    size = 54  # the rows of each part
    assert size <= rows_from(one, 64, 8).max() < 2 * size

    def order(batches, count, number):
        rows = rows_from(batches, count, len(batches.numbers(0)))
        return rows[rows // size == number] % size

    for was, now, taken in ((0, 2, 16), (1, 1, 48)):
        whole = order(one, 400, was)
        rest = order(other, 100, now)
        np.testing.assert_array_equal(rest, whole[taken : taken + len(rest)])
        assert len(rest)
    shutil.copy("c.bin", "b.bin")
    changed = rows_taken(
        config.dataset,
        {"name": "mixture", "parts": before.dataset.parts},
        checkpoint.checkpoint_named(Path("outputs/a/checkpoints"), "8").run.data,
        64,
        {},
    )
    assert changed == {"a": 16, "b": 0}


def test_other_data_begins_at_its_first_row():
    saved(*WORDS)
    assert fork("dataset=digits", "model.input_size=64", "model.output_size=10").taken == {"": 0}


def test_the_place_in_the_data_is_kept_by_later_saves():
    taken = {"": 64}
    data = {"next_batch": 2, "fingerprint": "", "taken": taken}
    state = TrainState(jnp.int32(10), {"w": jnp.ones(2)}, (), jnp.zeros(2, jnp.uint32))
    path = Path("outputs/b/checkpoints")
    named = load([*WORDS, "run.id=b"])
    checkpoint.save(path, 10, checkpoint.copy_to_host(state), folder.contents(named, {}, 10, data))
    home = claimed(*WORDS, "run.id=b")
    assert (home.finished_steps, home.next_batch, home.taken) == (10, 2, taken)
