"""The performance figures are the definitions, written out."""

import functools
import math

import pytest

from launcher.driver.record.recorder import warm_up
from launcher.report.summary import Summary, measured, median, performance


def test_rates_are_amounts_over_time():
    assert performance(0.5, samples=32, tokens=4096) == {
        "perf/step_seconds": 0.5,
        "perf/samples_per_second": 64.0,
        "perf/tokens_per_second": 8192.0,
        "perf/mfu": None,
    }


def test_mfu_is_one_when_every_device_does_its_peak():
    figures = performance(2.0, samples=1, flops=8e12, devices=4, peak_flops=1e12)
    assert figures["perf/mfu"] == pytest.approx(1.0)


def test_median_ignores_what_is_unknown_or_not_finite():
    assert median([3.0, None, 1.0, math.nan, 2.0, math.inf]) == 2.0
    assert median([None]) is None


rates = functools.partial(performance, samples=8)


def test_measured_names_fields_of_the_summary():
    record = {"step": 3, "train/loss": 2.0, "perf/step_seconds": 0.1, "eval/loss": 2.5}
    values = measured([{**record, "step": 1, "train/loss": 4.0, "eval/loss": None}, record], rates)
    summary = Summary(run_id="r", exit_reason="done", **values)
    assert (summary.steps, summary.first_loss, summary.final_loss) == (3, 4.0, 2.0)
    assert (summary.eval_loss, summary.step_seconds_median) == (2.5, 0.1)
    assert summary.tokens_per_second is None


def test_times_are_of_the_steps_since_the_last_start():
    """Another plan may have taken the others, which nobody is to compare with this one's figures"""
    times = {"perf/step_seconds": 9.0, "pipeline/bubble_fraction": 0.0, "perf/peak_memory_bytes": 9}
    now = {"perf/step_seconds": 1.0, "pipeline/bubble_fraction": 0.5, "perf/peak_memory_bytes": 1}
    records = [{"step": step, "train/loss": 5.0 - step, **times} for step in (1, 2, 3)]
    newer = [*records, {"step": 4, "train/loss": 1.0, **now}]
    values = measured(newer, rates, earlier=3)
    assert (values["first_loss"], values["final_loss"]) == (4.0, 1.0)
    assert values["step_seconds_median"] == 1.0
    assert (values["bubble_fraction"], values["peak_memory_bytes"]) == (0.5, 1)
    assert measured(records, rates, earlier=3)["step_seconds_median"] == 9.0  # none taken since


@pytest.mark.parametrize(
    ("milliseconds", "median"),
    [
        ((81.0,), 81.0),  # there is nothing better
        ((81.0, 20.0), 20.0),
        ((81.0, 20.0, 11.0), 11.0),  # and not 46, halfway to the first
        ((81.0, 20.0, 5.0, 11.0), 11.0),
        ((81.0, 20.0, 5.0, 10.0, 12.0), 11.0),
    ],
)
def test_the_first_steps_after_a_start_are_left_out_and_rates_are_of_the_same_median(
    milliseconds, median
):
    records = [
        {"step": step, "train/loss": 1.0, "perf/step_seconds": ms / 1e3}
        for step, ms in enumerate(milliseconds, 1)
    ]
    values = measured(records, rates, warm_up=warm_up(0))
    assert values["step_seconds_median"] == pytest.approx(median / 1e3)
    assert values["samples_per_second"] == pytest.approx(8e3 / median)


def test_after_dry_steps_the_first_step_counts_too():
    assert [*warm_up(5)] == [6, 7, 8]
    assert [*warm_up(5, dry_steps=1)] == [7, 8]


def test_nothing_measured_is_nothing_claimed():
    values = measured([], rates)
    assert (values.pop("steps"), values.pop("skipped_steps")) == (0, 0)
    assert set(values.values()) == {None}
