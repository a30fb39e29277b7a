"""Which steps are logged, and what ends a run."""

import math

import pytest

from launcher.driver.record.step_log import MOST_SKIPPED, DivergedError, StepLog
from launcher.train.step_result import StepResult


def result(step, loss=1.0, grad_norm=2.0, **more):
    metrics = {"train/loss": loss, "train/grad_norm": grad_norm, "perf/step_seconds": 0.5, **more}
    return StepResult(step, metrics, completed_at=1000.0 + step)


def step_log(log_every=1):
    lines = []
    return StepLog(into(lines), log_every, lambda seconds: {"perf/rate": 1 / seconds}), lines


def into(lines):
    return lambda step, metrics: lines.append({"step": step, **metrics})


def test_a_line_holds_what_was_measured_and_what_follows_from_it():
    record, lines = step_log()
    record.record(None)
    record.record(result(5))
    measured = {"train/loss": 1.0, "train/grad_norm": 2.0, "perf/step_seconds": 0.5}
    assert lines == [{"step": 5, **measured, "perf/rate": 2.0}]
    assert (record.finished_steps, record.first_step_at) == (5, 1005.0)


def test_every_nth_step_is_logged_and_evaluations_and_the_last_one_once():
    record, lines = step_log(log_every=4)
    for step in range(1, 11):
        record.record(result(step, **({"eval/loss": 3.0} if step == 6 else {})))
    assert [line["step"] for line in lines] == [4, 6, 8]
    record.log_newest()
    record.log_newest()
    assert [line["step"] for line in lines] == [4, 6, 8, 10]
    assert record.first_step_at == 1001.0


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_logged_and_ends_the_run(key, value):
    record, lines = step_log(log_every=100)
    record.record(result(1))
    with pytest.raises(DivergedError) as error:
        record.record(result(2, **{key: value}))
    assert str(error.value) == (
        f"train/{key} is {value} at step 2; lower optimizer.learning_rate, or set "
        "optimizer.clip_norm or optimizer.warmup_steps"
    )
    assert [line["step"] for line in lines] == [2]


def test_a_skipped_step_is_logged_and_said_and_only_too_many_in_a_row_end_the_run(caplog):
    lines = []
    record = StepLog(into(lines), 100, lambda seconds: {}, skips=True)
    record.record(result(1))
    for step in range(2, 2 + MOST_SKIPPED):
        record.record(result(step, loss=math.inf))
    record.record(result(12))
    record.record(result(13, grad_norm=math.nan))
    assert [line["step"] for line in lines] == [*range(2, 12), 13]
    assert caplog.messages[0] == "step 2: train/loss is inf, the update is skipped"
    assert caplog.messages[-1] == "step 13: train/grad_norm is nan, the update is skipped"
    for step in range(14, 23):
        record.record(result(step, loss=math.nan))
    with pytest.raises(DivergedError, match="step 23"):
        record.record(result(23, loss=math.nan))


def test_a_recorder_that_begins_again_forgets_what_is_done_again():
    record, lines = step_log(log_every=4)
    for step in range(1, 7):
        record.record(result(step))
    record.begin(4)
    record.log_newest()
    assert record.finished_steps == 4
    assert [line["step"] for line in lines] == [4]
