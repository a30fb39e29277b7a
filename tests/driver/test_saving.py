"""Saving as the driver sees it, with real writers in threads of this process."""

import json
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import pytest

from launcher import checkpoint
from launcher.checkpoint.train_state import TrainState
from launcher.cluster.errors import HungError
from launcher.config.compose import load
from launcher.config.sections import Checkpoint
from launcher.driver import loop as saving
from launcher.driver.folder import folder
from launcher.driver.loop import Saving
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import local_shape
from launcher.train.program import build_program

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from halves import part_of


class Workers:
    """Workers that each write their own half of a state. Those of `late` begin after `polls`
    questions whether they are still writing."""

    def __init__(self, count, late=(), polls=3):
        self._count, self._late, self._polls = count, late, polls
        self._threads = ThreadPoolExecutor(count)
        self._saves, self._left = [], 0
        self.asked_too_early = False

    def submit(self, method, *arguments):
        return Answered(getattr(self, method)(*arguments))

    def save(self, folder, step, metadata, token):
        self._saves, self._left = [Future() for _ in range(self._count)], self._polls
        for index in range(self._count):
            if index not in self._late:
                self._start(index, folder, step, metadata, token)
        self._begin = lambda index: self._start(index, folder, step, metadata, token)
        return [None] * self._count

    def writing(self, seconds):
        self._left -= 1
        if self._saves and self._left == 0:
            for index in self._late:
                self._begin(index)
        return [not isinstance(ended(save, seconds), tuple) for save in self._saves]

    def saved(self):
        self.asked_too_early |= any(not save.done() for save in self._saves)
        answers, self._saves = [ended(save, 60)[0] for save in self._saves], []
        return answers or [None]

    def _start(self, index, folder, step, metadata, token):
        writers = checkpoint.Writers(index, self._count, token)

        def write():
            try:
                part = half(step, index, self._count)
                checkpoint.save(Path(folder), step, part, metadata, writers=writers)
                self._saves[index].set_result((None,))
            except checkpoint.SaveError as error:
                self._saves[index].set_result((str(error),))

        self._threads.submit(write)


class Answered:
    def __init__(self, answers):
        self._answers = answers

    def result(self):
        return self._answers[0]

    def each(self):
        return self._answers


def ended(save, seconds):
    try:
        return save.result(seconds)
    except TimeoutError:
        return None


def half(step, index, count):
    state = TrainState(jnp.int32(step), {"w": jnp.ones(9), "b": jnp.ones(3)}, {}, jnp.zeros(2))
    return part_of(checkpoint.copy_to_host(state), index, count)


def make(workers, folder, **settings):
    return Saving(workers, folder, Checkpoint(**settings), lambda step: {}, [])


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(saving, "_POLL_SECONDS", 0.01)


def test_a_worker_that_writes_for_long_is_asked_again_and_again(tmp_path, said):
    """No call waits for the disk, so that none comes to `cluster.step_timeout`."""
    workers = Workers(1, late=[0], polls=5)
    save = make(workers, tmp_path)
    save(3).result()
    save(4).result()  # waits for the one before, in the same way
    assert checkpoint.newest(tmp_path).step == 3
    save.finish(final=True)
    assert checkpoint.newest(tmp_path).step == 4
    assert (workers.asked_too_early, said) == (False, [])


def test_a_save_that_never_ends_is_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_LIMIT_SECONDS", 0.05)
    save = make(Workers(1, late=[0], polls=-1), tmp_path)
    save(3)
    with pytest.raises(HungError, match=f"a save to {tmp_path} takes longer than 0.05 s"):
        save.finish(final=True)


def test_a_process_that_writes_on_after_the_first_gave_up_leaves_nothing(
    tmp_path, said, monkeypatch
):
    monkeypatch.setattr("launcher.driver.loop.secrets.token_hex", lambda size: "t")
    (tmp_path / "3.partial-t" / "default").mkdir(parents=True)
    (tmp_path / "3.partial-t" / "default" / "ocdbt.process_0").write_text("in the way")
    save = make(Workers(2, late=[1]), tmp_path)
    save(3)
    save.finish(final=False)
    [line] = said
    assert line.startswith(f"cannot save step 3 in {tmp_path}: ")
    assert list(tmp_path.iterdir()) == []
    save(4)
    save.finish(final=True)
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_metrics_are_on_the_disk_before_a_save_begins(tmp_path):
    done = []
    workers = Workers(1)
    workers.save = lambda *arguments: done.append("saved") or [None]
    sync = lambda: done.append("synced")  # noqa: E731
    Saving(workers, tmp_path, Checkpoint(), lambda step: {}, [], sync)(3)
    assert done == ["synced", "saved"]


def test_a_checkpoint_holds_no_value_of_the_jobs_environment():
    words = ["cluster=slurm", "cluster.gpus=1", "cluster.slurm.env={API_KEY: s3cret}"]
    config = load(["model=mlp", "dataset=synthetic", "parallel=data", *words])
    plan = plan_of(config.parallel, build_program(config).train, local_shape(1, 1, "cpu"))
    described = folder.contents(config, plan.to_dict(), 3)
    assert described["config"]["cluster"]["slurm"]["env"] == {"API_KEY": "***"}
    assert "s3cret" not in json.dumps(described)
