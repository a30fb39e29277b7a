"""The loop with a real worker in this process: a small pipeline trained, stopped and resumed."""

import shutil
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from launcher import checkpoint
from launcher.checkpoint import Saver
from launcher.config.sections import Checkpoint, Train
from launcher.driver.loop import SNAPSHOT_SHARE, Cadence, SnapshotCadence
from launcher.driver.record.accounting import WallClock
from launcher.driver.record.faults import Faults
from launcher.driver.record.step_log import DivergedError, is_evaluated
from launcher.inference.eval_step import make_eval_step
from launcher.recipes import build_dataset, build_model
from launcher.report.breakdown import Goodput
from launcher.train.program import build_program, build_steps
from launcher.train.step_result import StepResult

sys.path.insert(0, str(Path(__file__).parent))
from trained_here import Training

ONE_STAGE = "parallel.num_stages=null"  # or as many as the method says


def plain_training(config):
    """The same run with plain `jax.jit` on one device: training and evaluation losses."""
    program = build_program(config)
    model = build_model(config.model, config.train.precision)
    init, step = map(jax.jit, build_steps(config, model))
    evaluate = jax.jit(make_eval_step(model))
    state = init(program.seed)
    losses, evaluations = [], []
    for k in range(config.train.steps):
        state, metrics = step(state, program.dataset.train(k))
        losses.append(float(metrics["loss"]))
        if (k + 1) % config.train.eval_every == 0:
            batches = map(program.dataset.validation, range(config.train.eval_batches))
            found = [float(evaluate(state.model, batch)["loss"]) for batch in batches]
            evaluations.append(np.mean(found))
    return losses, evaluations


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Training(tmp_path_factory.mktemp("undisturbed")).run()


def test_a_run_is_what_plain_jax_makes_of_the_same_settings(undisturbed):
    losses, evaluations = plain_training(undisturbed.config)
    np.testing.assert_allclose(undisturbed.losses(), losses, rtol=1e-5)
    found = {line["step"]: line["eval/loss"] for line in undisturbed.lines if "eval/loss" in line}
    assert list(found) == [3, 6]
    np.testing.assert_allclose(list(found.values()), evaluations, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", ["adafactor", "adam", "sgd", "lion"])
def test_every_optimizer_runs_across_stages_as_on_one_device(optimizer, tmp_path):
    training = Training(tmp_path, f"optimizer={optimizer}").run()
    np.testing.assert_allclose(training.losses(), plain_training(training.config)[0], rtol=1e-5)


def test_every_step_is_logged_once_and_whole(undisturbed):
    assert [line["step"] for line in undisturbed.lines] == [1, 2, 3, 4, 5, 6]
    for line in undisturbed.lines:
        assert {
            "train/loss",
            "train/grad_norm",
            "train/learning_rate",
            "perf/step_seconds",
            "perf/peak_memory_bytes",
            "data/wait_seconds",
            "pipeline/bubble_fraction",
            "pipeline/stage_0_seconds",
            "pipeline/stage_1_seconds",
        } <= line.keys()
        assert all(isinstance(value, (int, float)) for value in line.values())
        assert line["perf/step_seconds"] > 0


def test_steps_are_sent_ahead_of_their_results_but_not_far(undisturbed):
    # Two steps, and an evaluation, a call for each of its batches, where one is due.
    assert undisturbed.handle.most_outstanding == 2 + undisturbed.config.train.eval_batches
    assert undisturbed.handle.outstanding == 0


def test_a_slow_disk_is_time_that_saves_hold_training_up(tmp_path, monkeypatch):
    """By a clock on which a second passes whenever the driver waits for a save."""
    write, writing = Saver._write, Saver.is_writing
    now, waited_for, is_asked = [0.0], [], threading.Semaphore(0)

    def late(self, *given):
        assert is_asked.acquire(timeout=60)
        write(self, *given)

    def asked(self, seconds):
        if self._save and self._save not in waited_for:
            waited_for.append(self._save)
            now[0] += 1.0
            is_asked.release()
        return writing(self, seconds)

    monkeypatch.setattr(Saver, "_write", late)
    monkeypatch.setattr(Saver, "is_writing", asked)
    training = Training(tmp_path, "train.checkpoint.every_steps=2")
    training.wall = WallClock(Goodput(), 0.0, lambda: now[0])
    wall = training.run().step_log.wall
    assert wall.steps == 6
    # The second save waits for the first. The third is at the end, which waits for the second, too.
    assert wall.good.saving_seconds == 3.0
    assert wall.held_up == 1.0
    assert wall.good.training_seconds == wall.good.evaluating_seconds == 0.0


def test_the_last_state_is_saved(undisturbed):
    assert checkpoint.newest(undisturbed.folder).step == 6


def test_an_interrupted_run_saves_and_goes_on_as_if_nothing_had_been(undisturbed, tmp_path):
    first = Training(tmp_path, stop_after=2).run()
    finished = len(first.lines)
    assert 2 <= finished <= 4  # what was under way is finished, nothing more is sent
    assert checkpoint.newest(tmp_path).step == finished
    second = Training(tmp_path).run()
    assert [line["step"] for line in second.lines] == list(range(finished + 1, 7))
    assert first.losses() + second.losses() == undisturbed.losses()


def test_states_are_saved_on_the_way_and_training_goes_on_from_any(undisturbed, tmp_path):
    Training(tmp_path, "train.checkpoint.every_steps=2").run()
    steps = sorted(int(path.name) for path in tmp_path.iterdir())
    assert steps == [2, 4, 6]
    for step in steps[1:]:  # as if the run had been killed after its first checkpoint
        shutil.rmtree(tmp_path / str(step))
    again = Training(tmp_path).run()
    assert again.losses() == undisturbed.losses()[steps[0] :]


@pytest.mark.slow
def test_a_save_that_fails_is_said_and_the_run_goes_on(undisturbed, tmp_path):
    training = Training(tmp_path / "checkpoints", "train.checkpoint.every_steps=2")
    training.folder.write_text("in the way")

    def say(text):
        training.said.append(text)
        if training.folder.is_file():
            training.folder.unlink()

    training.say = say
    training.run()
    assert training.losses() == undisturbed.losses()
    told = [f"{failure} Training continues." for failure in training.failures]
    assert training.said == told
    assert told[0].startswith(f"cannot save step 2 in {training.folder}: ")
    assert checkpoint.newest(training.folder).step == 6


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", [["train.checkpoint.on_error=stop"], []])
def test_a_save_that_fails_ends_the_run_where_that_is_asked_or_it_is_the_last(words, tmp_path):
    every = "train.checkpoint.every_steps=2" if words else "train.checkpoint.every_steps=0"
    training = Training(tmp_path / "checkpoints", every, *words)
    training.folder.write_text("in the way")
    with pytest.raises(checkpoint.SaveError, match=f"cannot save step {2 if words else 6} in "):
        training.run()
    assert len(training.lines) == 6 or words


@pytest.mark.stress
def test_the_last_step_is_saved_as_often_as_others_are_also_without_a_save_at_the_end(tmp_path):
    words = ("train.checkpoint.every_steps=3", "train.checkpoint.at_end=false")
    Training(tmp_path, *words).run()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [3, 6]


def test_when_to_save():
    never = Faults().save_interval
    cadence = Cadence(Checkpoint(every_steps=10, every_minutes=1.0), 0.0, lambda: never)
    assert not cadence.is_due(1, 59.0)
    assert cadence.is_due(2, 60.0)
    assert not cadence.is_due(3, 119.0)
    assert cadence.is_due(10, 119.0)
    assert not cadence.is_due(11, 178.0)  # the minutes count from the newest
    assert not Cadence(Checkpoint(every_minutes=0.0), 0.0, lambda: 1.0).is_due(1000, 1e6)
    assert not Cadence(Checkpoint(), 0.0, lambda: never).is_due(1000, 1e6)
    cadence = Cadence(Checkpoint(every_steps=10), 0.0, lambda: 60.0)
    assert [cadence.is_due(*at) for at in ((2, 59.0), (3, 60.0), (10, 90.0), (11, 149.0))] == [
        *(False, True, True),
        False,
    ]


def noted(step, *snapshots, **metrics):
    return StepResult(step, {"perf/step_seconds": 0.1, **metrics}, 0.0, snapshots=snapshots)


@pytest.mark.parametrize(("cost", "steps"), [(0.0, 333), (0.004, 125), (0.05, 10), (30.0, 1)])
def test_snapshots_take_one_percent_of_the_time_and_the_first_step_has_one(cost, steps):
    """Each takes `cost` seconds, which are known two steps later; a step takes 0.1 s."""
    snapshots, taken = SnapshotCadence(None), []
    for step in range(1, 1001):
        if snapshots.is_due(step):
            taken.append(step)
        known = {"perf/snapshot_seconds": cost} if taken and step == taken[-1] + 2 else {}
        complete = max([0, *(one for one in taken if one + 2 <= step)])
        snapshots.note(noted(step, complete, **known))
    assert taken[0] == 1
    assert cost * len(taken) <= SNAPSHOT_SHARE * 0.1 * 1000 or taken == [1]
    assert len(taken) == pytest.approx(steps, abs=1)


class Snapped(Training):
    """A training with a snapshot after each step."""

    snapshots = SnapshotCadence(1)


def test_snapshots_change_no_step_and_no_evaluation(tmp_path):
    plain, snapped = (made(tmp_path / made.__name__).run() for made in (Training, Snapped))
    assert snapped.losses() == plain.losses()
    evaluated = [[line.get("eval/loss") for line in one.lines] for one in (plain, snapped)]
    assert evaluated[0] == evaluated[1]
    assert [step for step, loss in enumerate(evaluated[1], 1) if loss] == [3, 6]


def test_snapshots_are_taken_as_often_as_is_set():
    snapshots, taken = SnapshotCadence(30), []
    for step in range(1, 100):
        taken += [step] if snapshots.is_due(step) else []
        snapshots.note(noted(step, step))
    assert taken == [30, 60, 90]


@pytest.mark.parametrize("every", [None, 4])
def test_a_snapshot_waits_for_the_one_before_in_every_process(every):
    """Else a process would write over what others still lack the like of."""
    snapshots = SnapshotCadence(every, taken=6)
    assert not snapshots.is_due(8)
    for process in ((8, 4), (8, 0), (6, 5)):
        snapshots.note(noted(9, *process))
        assert not snapshots.is_due(9)
    snapshots.note(noted(9, 6, 6))
    assert snapshots.is_due(9)
    assert not snapshots.is_due(12)


@pytest.fixture
def bad_batch(monkeypatch):
    """Makes the batch of step 3 one whose loss is not a number."""

    def spoiled(*arguments):
        dataset = build_dataset(*arguments)

        def batch_at(k):
            batch = dict(dataset.train(k))
            return {**batch, "x": batch["x"] * np.nan} if k == 2 else batch

        return dataset._replace(train=batch_at)

    monkeypatch.setattr("launcher.train.program.build_dataset", spoiled)


@pytest.mark.slow
def test_a_step_that_goes_wrong_is_never_saved(bad_batch, tmp_path):
    words = ("train.checkpoint.every_steps=1", "train.eval_every=100")
    training = Training(tmp_path, *words)
    with pytest.raises(DivergedError, match="step 3"):
        training.run()
    assert checkpoint.newest(tmp_path).step == 2
    assert [line["step"] for line in training.lines] == [1, 2, 3]


SKIPPING = [
    (),
    ("parallel=three_d", "parallel.pipeline=2", "parallel.model=2", ONE_STAGE, "cluster.gpus=4"),
    *((f"parallel={method}", ONE_STAGE) for method in ("data", "zero3")),
    ("parallel.schedule=zero_bubble",),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("words", SKIPPING)
def test_a_step_that_goes_wrong_is_skipped_as_on_one_device(words, bad_batch, tmp_path):
    training = Training(tmp_path, "train.non_finite=skip", *words).run()
    expected, _ = plain_training(training.config)
    assert np.isnan(expected[2])
    np.testing.assert_allclose(training.losses(), expected, rtol=1e-5)
    assert [line["train/skipped"] for line in training.lines] == [0, 0, 1, 0, 0, 0]
    assert training.said == ["step 3: train/loss is nan, the update is skipped"]
    # The schedule waits for the update that was skipped.
    rates = [line["train/learning_rate"] for line in training.lines]
    assert rates[2] == rates[3] != rates[4]
    assert checkpoint.newest(tmp_path).step == 6


@pytest.mark.sampled(5)
@pytest.mark.parametrize("words", SKIPPING)
def test_a_spike_is_skipped_as_on_one_device(words, bad_batch, monkeypatch, tmp_path):
    """As the limit is, each step after the first twenty, whose scores are not known, may be one."""
    monkeypatch.setattr("launcher.train.step.LIMIT", 0.0)
    monkeypatch.setattr("launcher.driver.record.step_log.LIMIT", 0.0)
    words = ("train.spikes=skip", "train.non_finite=skip", "train.steps=30", *words)
    training = Training(tmp_path, *words, "train.eval_every=30").run()
    expected, _ = plain_training(training.config)
    np.testing.assert_allclose(training.losses(), expected, rtol=1e-4)
    scores = [line["train/spike_score"] for line in training.lines]
    skipped = [line["train/skipped"] for line in training.lines]
    assert [score > 0 or k == 2 for k, score in enumerate(scores)] == [*map(bool, skipped)]
    assert 1 < sum(skipped) < 10
    assert not any(scores[:20])
    assert len(training.said) == sum(skipped)


@pytest.mark.stress
def test_one_step_on_one_stage_is_a_whole_run_and_saves_only_if_asked(tmp_path):
    words = ("train.steps=1", "parallel.num_stages=1", "train.checkpoint.at_end=false")
    training = Training(tmp_path, *words).run()
    assert [line["step"] for line in training.lines] == [1]
    assert training.lines[0]["pipeline/stage_0_seconds"] > 0
    assert checkpoint.newest(tmp_path).step is None


@pytest.mark.parametrize(
    ("every", "evaluated"), [(4, [4, 8, 10]), (5, [5, 10]), (20, [10]), (0, [])]
)
def test_the_last_step_is_always_evaluated(every, evaluated):
    settings = Train(steps=10, eval_every=every)
    assert [step for step in range(1, 11) if is_evaluated(step, settings)] == evaluated
