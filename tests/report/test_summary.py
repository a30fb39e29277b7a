"""summary.json holds the contract's keys and is whole; what is printed can be copied."""

import dataclasses
import functools
import io
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.driver.record.step_log import warm_up
from launcher.report.console import make_console
from launcher.report.summary import (
    Summary,
    measured,
    median,
    performance,
    print_summary,
    write_summary,
)

CONTRACT = {
    "run_id",
    "steps",
    "final_loss",
    "step_seconds_median",
    "predicted_step_seconds",
    "compile_seconds",
    "plan_seconds",
    "time_to_first_step_seconds",
    "restarts",
    "exit_reason",
}

DONE = Summary(
    run_id="gpt-1",
    exit_reason="done",
    steps=200,
    first_loss=5.5512,
    final_loss=2.4133,
    eval_loss=2.51,
    step_seconds_median=0.0852,
    predicted_step_seconds=0.0791,
    samples_per_second=375.6,
    tokens_per_second=48076.0,
    bubble_fraction=0.29,
    predicted_bubble_fraction=0.325,
    peak_memory_bytes=123 << 20,
    num_parameters=421_888,
    total_seconds=43.2,
    wandb_sync_command="wandb sync outputs/gpt-1/wandb/offline-run-*",
)


def printed(run_dir, summary, resume_command=None):
    file = io.StringIO()
    print_summary(make_console(file), run_dir, summary, resume_command)
    return file.getvalue()


def test_memory_is_that_of_a_device_beside_what_was_predicted_of_one(tmp_path):
    text = printed(tmp_path, dataclasses.replace(DONE, predicted_peak_memory_bytes=45 << 20))
    assert "422 K parameters, 123 MiB at most on a device (predicted 45.0 MiB)" in text


def test_the_file_holds_the_contracts_keys(tmp_path):
    path = write_summary(tmp_path, DONE)
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_text()).keys() >= CONTRACT


def test_a_loss_that_is_not_finite_is_null(tmp_path):
    path = write_summary(tmp_path, Summary(run_id="r", exit_reason="x", final_loss=math.nan))
    assert json.loads(path.read_text())["final_loss"] is None


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    write_summary(tmp_path, DONE)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_summary(tmp_path, Summary(run_id="other", exit_reason="done"))
    assert json.loads((tmp_path / "summary.json").read_text())["run_id"] == "gpt-1"


def test_the_exact_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "outputs" / "gpt-1"
    for name in ("plots", "checkpoints/200"):
        (run_dir / name).mkdir(parents=True)
    for name in ("metrics.jsonl", "plots/loss.png", "plots/timeline.png"):
        (run_dir / name).touch()
    text = printed(run_dir, DONE, "python -m launcher run.id=gpt-1 train.steps=400")
    assert text == (
        """
done: 200 steps in 0:43
  loss        2.4133 (from 5.5512)
  eval loss   2.5100
  step time   85.2 ms (predicted 79.1 ms)
  throughput  376 samples/s, 48,076 tokens/s
  bubble      29.0% (predicted 32.5%)
  model       422 K parameters, 123 MiB at most on a device
  run folder  outputs/gpt-1
  metrics     outputs/gpt-1/metrics.jsonl
  plots       outputs/gpt-1/plots (loss.png, timeline.png)
  checkpoint  outputs/gpt-1/checkpoints
  wandb       offline; to upload: wandb sync outputs/gpt-1/wandb/offline-run-*
  resume      python -m launcher run.id=gpt-1 train.steps=400
"""
    )


def test_a_run_that_failed_at_once_claims_nothing(tmp_path):
    text = printed(tmp_path, Summary(run_id="r", exit_reason="worker 0 died"))
    assert text == f"\nworker 0 died: 0 steps\n  run folder  {tmp_path}\n"


def test_a_diverged_loss_is_named(tmp_path):
    summary = Summary(run_id="r", exit_reason="done", steps=3, first_loss=5.5, final_loss=None)
    assert "loss        not finite (from 5.5000)" in printed(tmp_path, summary)


def test_long_commands_stay_on_their_line(tmp_path):
    command = "python -m launcher " + "key=value " * 30
    assert f"  resume      {command}\n" in printed(tmp_path, DONE, command)


def plan_of(flops: float, peak_flops: float | None) -> Any:
    cluster = {"peak_flops": peak_flops}
    return SimpleNamespace(flops_per_step=flops, num_devices=4, cluster=cluster)


def test_rates_are_amounts_over_time():
    assert performance(0.5, plan_of(8e12, None), samples=32, tokens=4096) == {
        "perf/step_seconds": 0.5,
        "perf/samples_per_second": 64.0,
        "perf/tokens_per_second": 8192.0,
        "perf/mfu": None,
    }


def test_mfu_is_one_when_every_device_does_its_peak():
    figures = performance(2.0, plan_of(8e12, 1e12), samples=1, tokens=None)
    assert figures["perf/mfu"] == pytest.approx(1.0)


def test_median_ignores_what_is_unknown_or_not_finite():
    assert median([3.0, None, 1.0, math.nan, 2.0, math.inf]) == 2.0
    assert median([None]) is None


rates = functools.partial(performance, plan=plan_of(0.0, None), samples=8, tokens=None)


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
