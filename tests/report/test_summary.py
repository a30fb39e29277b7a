"""summary.json holds the contract's keys and is whole; what is printed can be copied."""

import dataclasses
import io
import json
import math

import pytest

from launcher.report.console import make_console
from launcher.report.summary import Summary, print_summary, write_summary

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
