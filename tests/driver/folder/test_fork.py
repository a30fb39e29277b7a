"""A run that begins with the state of another: its parent, settings and place in the data."""

import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from launcher import checkpoint
from launcher.checkpoint import layout
from launcher.checkpoint.choose import read_run_metadata
from launcher.checkpoint.train_state import TrainState
from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.driver.folder import folder
from launcher.driver.planning.init_from import check_parent_state, find_start
from launcher.recipes import build_dataset, fingerprint_dataset, rows_taken
from launcher.recipes.datasets.documents.prepare import prepare_corpus, train_tokenizer
from launcher.train.program import build_program

WORDS = ("model=mlp", "dataset=synthetic", "train.global_batch_size=8", "train.steps=12")
MIXED = ("model=gpt", "model.sequence_length=7", "model.vocab_size=64", "dataset=mixture")
PARTS = "dataset.parts={a: {path: a.bin}, b: {path: b.bin, weight: 3}}"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, first in {"a": 0, "b": 7, "c": 9}.items():
        (np.arange(first, first + 400) % 60).astype(np.uint16).tofile(f"{name}.bin")


def saved(*words, run_id="a", state=None):
    """A run with two checkpoints."""
    config = load([*words, f"run.id={run_id}"])
    state = state or TrainState(jnp.int32(1), {"w": jnp.ones(2)}, (), jnp.zeros(2, jnp.uint32))
    for step in (4, 8):
        data = {"next_batch": step, "fingerprint": fingerprint_dataset(config.dataset)}
        about = folder.contents(config, {}, step, data)
        path = Path("outputs", run_id, "checkpoints")
        checkpoint.save(path, step, checkpoint.copy_to_host(state), about)
    return path


def fork(*words, run="a@8", run_id="b"):
    with folder.claim(load([*WORDS, f"run.fork={run}", f"run.id={run_id}", *words])) as home:
        return home


def links(home):
    return {os.stat(file).st_nlink for file in layout.files_below(home.checkpoints)}


def test_a_fork_needs_its_parent_only_to_begin(tmp_path, said):
    path = saved(*WORDS)
    chosen = Path("autotune/T4/set/a.textproto")
    (path.parent / chosen).parent.mkdir(parents=True)
    for half in ("", ".0123.partial"):
        path.parent.joinpath(f"{chosen}{half}").write_text(f"by its parent{half}")
    home = fork(run="outputs/a@4")
    assert (home.path / chosen).read_text() == "by its parent"
    assert len(os.listdir((home.path / chosen).parent)) == 1
    began = f"{tmp_path}/outputs/a@4"
    assert (home.finished_steps, home.next_batch, home.forked_from) == (4, 4, began)
    assert 2 in links(home)  # it takes no room
    assert links(fork("run.shared=true", run_id="s")) == {1}  # nor files of its parent's user alone
    assert read_run_metadata(path, 4).run_id == "a"
    shutil.rmtree(path.parent)
    for run in ("outputs/a@4", "null"):
        again = fork(run=run)
        assert (again.finished_steps, again.forked_from) == (4, began)
    find_start(load([*WORDS, "run.fork=a", "run.id=b"]), 4)
    assert "run.fork is not used: run b resumes from its own step 4" in said
    assert fork(run="b", run_id="d").forked_from == f"{tmp_path}/outputs/b@4"


def test_a_checkpoint_has_several_names_and_a_damaged_one_is_passed_over(said):
    path = saved(*WORDS)
    checkpoint.write_best(path, 4, "eval_loss", 1.0)
    names = {"outputs/a": 8, "a@latest": 8, "a@4": 4, "a@best": 4}
    assert {name: folder.check(load([*WORDS, f"run.fork={name}"])) for name in names} == names
    next(file for file in layout.files_below(path / "8" / "default")).write_text("x")
    assert fork(run="a").finished_steps == 4
    assert any("checkpoints/8 is damaged" in line for line in said)
    with pytest.raises(ConfigError, match="is damaged"):
        fork(run_id="e")
    assert not Path("outputs/e").exists()


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["run.fork=outputs/x@8"], "run.fork=outputs/x@8 does not exist"),
        (["run.fork=mlp_aa@8"], r"run.fork=mlp_aa@8 does not exist \(.*outputs/mlp_a does\)"),
        (["run.fork=outputs/mlp_aa"], r"run.fork=outputs/mlp_aa does not exist \(.*/mlp_a does\)"),
        (["run.fork=a@5"], "run.fork=a@5 does not exist. .* of its checkpoints: 4, 8"),
        (["run.fork=a@best"], "run.fork=a@best does not exist"),
        (["run.fork=a@8", "train.steps=8"], "train.steps=8 leaves nothing to train: run.fork=a@8"),
        (["run.fork=a@8", "model=resnet"], "run.fork=a@8 does not fit: .*model.name was 'mlp'"),
        (["run.fork=a@8", "optimizer=sgd"], "run.fork=a@8 does not fit: .*optimizer.name was"),
    ],
)
def test_wrong_parents_and_settings_are_refused_in_one_line(words, problem):
    saved(*WORDS)
    Path("outputs/mlp_a").mkdir()
    config = load([*WORDS, *words])
    with pytest.raises(ConfigError, match=problem) as error:
        find_start(config, folder.check(config))
    assert "\n" not in str(error.value)
    assert sorted(os.listdir("outputs")) == ["a", "mlp_a"]


def test_the_settings_that_differ_are_listed(said):
    saved(*WORDS)
    words = ["run.fork=a", "optimizer.learning_rate=1e-4", "train.global_batch_size=6"]
    assert folder.check(load([*WORDS, *words])) == 8
    changes = ["optimizer.learning_rate: 0.003 -> 0.0001", "train.global_batch_size: 8 -> 6"]
    assert said[1:] == [f"  {change}" for change in changes]


def test_a_state_of_other_shapes_is_refused_by_the_keys_that_changed():
    words = [*WORDS, "model.hidden_size=16"]
    program = build_program(load(words))
    saved(*words, state=program.init(program.seed))
    check_parent_state(load([*words, "run.fork=a", "optimizer.b2=0.5"]), program.state)
    for word, problem in {
        "model.hidden_size=24": r"is \(.*\) there and \(.*; model.hidden_size was 16\.",
        "optimizer.ema=0.9": r"ema\..* is missing there .*; optimizer.ema was null\.",
    }.items():
        other = load([*words, "run.fork=a", f"run.id={word[:5]}", word])
        match = f"run.fork=a does not fit: .*{problem}"
        with folder.claim(other), pytest.raises(ConfigError, match=match):
            check_parent_state(other, build_program(other).state)


def test_data_of_another_tokenizer_are_refused(monkeypatch):
    """Also where the parent has settings from the environment."""
    monkeypatch.setenv("EVERY", "5")
    Path("a.jsonl").write_text("\n".join(f'{{"text": "number {i}"}}' for i in range(200)))
    words = ["model=gpt", "dataset=jsonl", "dataset.path=a.jsonl"]
    prepare_corpus(load(words).dataset, 1)
    train_tokenizer(load(words).dataset, 290, Path("other.json"))
    saved(*words, "train.log_every=${oc.env:EVERY}")
    with pytest.raises(ConfigError, match=r"tokens are made by bytes, and these by other\.json"):
        find_start(load([*words, "dataset.tokenizer=other.json", "run.fork=a"]), 8)


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        (["train.global_batch_size=6"], 11),  # of 64 rows; two are left out
        (["train.global_batch_size=32"], 2),
        (["dataset=digits", "model.input_size=64", "model.output_size=10"], 0),
    ],
)
def test_no_row_is_taken_twice_whatever_the_size_of_the_batch(words, batch, monkeypatch):
    monkeypatch.setenv("SIZE", "8")
    saved(*WORDS, "train.global_batch_size=${oc.env:SIZE}")
    monkeypatch.setenv("SIZE", "9")
    assert fork(*words).next_batch == batch


def test_a_mixture_goes_on_in_each_part_where_it_was():
    """Whatever its weights and parts become; a part that is other tokens begins anew."""
    saved(*MIXED, PARTS, "train.global_batch_size=8")
    words = [*MIXED, "train.steps=12", "run.fork=a@8", "run.id=b", "train.global_batch_size=5"]
    parts = "{c: {path: c.bin}, b: {path: b.bin}, a: {path: a.bin, weight: 2}}"
    config, before = load([*words, f"dataset.parts={parts}"]), load([*MIXED, PARTS])
    with folder.claim(config) as home:
        assert (home.next_batch, home.taken) == (0, {"a": 16, "b": 48})
    one = build_dataset(before.dataset, before.model, 8, 0).train
    other = build_dataset(config.dataset, config.model, 5, 0).after(home.taken)
    whole, rest = (np.concatenate([x.numbers(k) for k in range(40)]) for x in (one, other))
    for was, now, taken in ((0, 2, 16), (1, 1, 48)):  # a part has 54 rows
        follow = rest[rest // 54 == now][:20] % 54
        np.testing.assert_array_equal(follow, whole[whole // 54 == was][taken:][:20] % 54)
        assert len(follow) == 20
    shutil.copy("c.bin", "b.bin")
    was = {"name": "mixture", "parts": before.dataset.parts}
    data = read_run_metadata(Path("outputs/a/checkpoints"), 8).data
    assert rows_taken(config.dataset, was, data, 64, {}) == {"a": 16, "b": 0}
