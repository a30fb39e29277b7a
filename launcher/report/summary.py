"""The end of a run: measured figures, `summary.json`, and the closing summary on the console."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from launcher.base import write_whole
from launcher.report.jsonl import METRICS, json_number
from launcher.report.run_record import ended_well
from launcher.report.text import (
    bytes_text,
    clock_text,
    count_text,
    loss_text,
    percent_text,
    rate_text,
    seconds_text,
    shown_path,
)

if TYPE_CHECKING:
    from launcher.plan import Plan

FILE_NAME = "summary.json"
REPORT = "report.html"


@dataclass(frozen=True)
class Summary:
    """The result of one run. Times are in seconds; None is not measured.

    Losses are over all of the run's logged steps. Times, rates and memory are over the steps since
    its last start; the predictions are those of the plan in use since then.

    Attributes:
        run_id: the run's id.
        exit_reason: `done`, `planned` (`task=plan`), `interrupted`, `preempted`, or a sentence that
            says what failed.
        steps: number of finished steps.
        peak_memory_bytes: the most on any device, arrays and temporaries; of emulated devices as
            counted in the compiled programs.
        memory_bytes: on any device after the newest step; None of emulated ones.
        failed_saves: number of checkpoints that could not be saved.
        save_error: why the newest of `failed_saves` failed.
        mfu_with_remat: model FLOPs utilisation that counts recomputation, too.
        goodput: the share of the run's wall time in which it trained, over all of its starts.
        goodput_seconds: that wall time by activity: see `Goodput`.
        cost: what the devices cost for it, where `cluster.price_per_device_hour` is set.
        predicted_cost: what all steps cost, if each takes what was predicted.
        expected_goodput: the share of the time that trains, of all steps with saves and faults.
        expected_seconds: the time that all steps take then.
        accounting: measured minus predicted seconds of a step, of each of its parts.
        differs: where the measured step differs from the predicted one by over 25 %: why.
        slow: what has slowed the run the most, with its cost; "" if nothing was found.
        forked_from: the checkpoint of another run that it began with, `<folder>@<step>`.
        job_id: the id of the Slurm job, None outside of one.
        nodes: the nodes of the Slurm job.
    """

    run_id: str
    exit_reason: str
    steps: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    eval_loss: float | None = None
    step_seconds_median: float | None = None
    predicted_step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    mfu_with_remat: float | None = None
    bubble_fraction: float | None = None
    predicted_bubble_fraction: float | None = None
    peak_memory_bytes: int | None = None
    memory_bytes: int | None = None
    predicted_samples_per_second: float | None = None
    predicted_peak_memory_bytes: int | None = None
    num_parameters: int | None = None
    plan_seconds: float | None = None
    compile_seconds: float | None = None
    time_to_first_step_seconds: float | None = None
    total_seconds: float | None = None
    goodput: float | None = None
    goodput_seconds: dict[str, float] = field(default_factory=dict)
    cost: float | None = None
    predicted_cost: float | None = None
    expected_goodput: float | None = None
    expected_seconds: float | None = None
    accounting: dict[str, float] = field(default_factory=dict)
    differs: str = ""
    slow: str = ""
    restarts: int = 0
    skipped_steps: int = 0
    failed_saves: int = 0
    save_error: str | None = None
    forked_from: str | None = None
    job_id: str | None = None
    nodes: tuple[str, ...] = ()
    wandb_url: str | None = None
    wandb_sync_command: str | None = None

    @property
    def ending(self) -> str:
        """How the run ended, after how many steps and how long."""
        steps = f"{self.exit_reason.rstrip('.')}: {self.steps} step{'' if self.steps == 1 else 's'}"
        return f"{steps} in {clock_text(self.total_seconds)}" if self.total_seconds else steps

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name for JSON: a number that is not finite becomes None."""
        fields = dataclasses.asdict(self)
        return {k: json_number(v) if isinstance(v, float) else v for k, v in fields.items()}


def write_summary(run_dir: Path, summary: Summary) -> Path:
    """Write `summary.json` whole or not at all.

    Returns:
        Its path.

    Raises:
        OSError: the file cannot be written.
    """
    path = run_dir / FILE_NAME
    write_whole(path, json.dumps(summary.to_dict(), indent=2, allow_nan=False) + "\n")
    return path


def print_summary(
    console: Console, run_dir: Path, summary: Summary, resume_command: str | None = None
) -> None:
    """Print the results of a run and where to find more.

    Long paths and commands are never broken, so that they can be copied.

    Args:
        console: the console to print to.
        run_dir: the run's folder.
        summary: the summary of the run.
        resume_command: the command that resumes the run, where there is one.
    """
    style = "bold green" if ended_well(summary.exit_reason) else "bold red"
    console.print()
    console.print(summary.ending, style=style, soft_wrap=True)
    lines = [
        (name, f"{value} ({note})" if note else value) for name, value, note in results(summary)
    ]
    for name, value in [
        *lines,
        *_mishaps(summary),
        *_whereabouts(run_dir, summary, resume_command),
    ]:
        console.print(Text.assemble((f"  {name:<10}  ", "dim"), value), soft_wrap=True)


def results(summary: Summary) -> list[tuple[str, str, str]]:
    """Return the results of a run: the name of each, its value, and what to know beside it."""
    lines = []
    predicted = summary.predicted_step_seconds
    if summary.steps:
        final = "not finite" if summary.final_loss is None else loss_text(summary.final_loss)
        lines.append(("loss", final, f"from {loss_text(summary.first_loss)}"))
    if summary.eval_loss is not None:
        lines.append(("eval loss", loss_text(summary.eval_loss), ""))
    if summary.step_seconds_median is not None:
        note = f"predicted {seconds_text(predicted)}" if predicted else ""
        lines.append(("step time", seconds_text(summary.step_seconds_median), note))
    if summary.samples_per_second is not None:
        lines.append(("throughput", _throughput(summary), ""))
    if summary.bubble_fraction is not None:
        note = f"predicted {percent_text(summary.predicted_bubble_fraction)}"
        lines.append(("bubble", percent_text(summary.bubble_fraction), note))
    if summary.num_parameters is not None:
        size, note = f"{count_text(summary.num_parameters)} parameters", ""
        if summary.peak_memory_bytes is not None:
            size += f", {bytes_text(summary.peak_memory_bytes)} at most on a device"
            if summary.predicted_peak_memory_bytes is not None:
                note = f"predicted {bytes_text(summary.predicted_peak_memory_bytes)}"
        lines.append(("model", size, note))
    return lines + _of_the_run(summary)


def _of_the_run(summary: Summary) -> list[tuple[str, str, str]]:
    """Return where a run's time has gone and will go, like `results`."""
    lines = []
    if summary.goodput is not None:
        lines.append(("goodput", *_goodput(summary)))
    if summary.slow:
        lines.append(("slow", summary.slow, ""))
    if summary.expected_goodput is not None and summary.exit_reason != "done":
        lines.append(("expected", *expected_text(summary)))
    if summary.cost is not None:
        lines.append(("cost", f"{summary.cost:,.2f}", ""))
    return lines


def _mishaps(summary: Summary) -> list[tuple[str, str]]:
    """Return restarts, skipped updates and failed saves as (name, value) lines."""
    lines = []
    if summary.restarts:
        lines.append(("restarts", str(summary.restarts)))
    if summary.skipped_steps:
        lines.append(("skipped", f"{summary.skipped_steps} updates, not finite"))
    if summary.failed_saves:
        lines.append(("not saved", f"{summary.failed_saves} times; {summary.save_error}"))
    return lines


def _whereabouts(
    run_dir: Path, summary: Summary, resume_command: str | None
) -> list[tuple[str, str]]:
    """Return the run's files and the next commands as (name, value) lines."""
    folder = shown_path(run_dir)
    lines = [("run folder", folder)]
    for name, file in (("metrics", METRICS), ("report", REPORT)):
        if (run_dir / file).exists():
            lines.append((name, os.path.join(folder, file)))
    if pictures := ", ".join(sorted(path.name for path in run_dir.glob("plots/*.png"))):
        lines.append(("plots", f"{os.path.join(folder, 'plots')} ({pictures})"))
    if any((run_dir / "checkpoints").glob("*")):
        lines.append(("checkpoint", os.path.join(folder, "checkpoints")))
    if summary.wandb_url:
        lines.append(("wandb", summary.wandb_url))
    if summary.wandb_sync_command:
        lines.append(("wandb", f"offline; to upload: {summary.wandb_sync_command}"))
    if resume_command:
        lines.append(("resume", resume_command))
    return lines


def _goodput(summary: Summary) -> tuple[str, str]:
    """Return the share of the wall time that trained, and other phases of 1 % or more."""
    spent = summary.goodput_seconds
    wall = sum(spent.values())
    rest = [(s, name) for name, s in spent.items() if name != "training" and s >= 0.01 * wall]
    words = ", ".join(f"{name} {seconds_text(s)}" for s, name in sorted(rest, reverse=True))
    return f"{percent_text(summary.goodput)} of {clock_text(wall)} trained", words


def expected_text(summary: Summary) -> tuple[str, str]:
    """Return the time that all steps are expected to take, and what is counted."""
    share = percent_text(summary.expected_goodput)
    return (
        f"{clock_text(summary.expected_seconds or 0.0)} for all steps",
        f"goodput {share}, with faults",
    )


def _throughput(summary: Summary) -> str:
    rates = [rate_text(summary.samples_per_second or 0, "samples")]
    if summary.tokens_per_second is not None:
        rates.append(rate_text(summary.tokens_per_second, "tokens"))
    if summary.mfu is not None:
        rates.append(f"{percent_text(summary.mfu)} MFU")
    return ", ".join(rates)


def performance(
    step_seconds: float, plan: Plan, samples: int, tokens: int | None
) -> dict[str, float | None]:
    """Return the `perf/...` metrics of one step.

    Args:
        step_seconds: the duration of the step.
        plan: the plan that it followed.
        samples: samples in the global batch.
        tokens: tokens in the global batch, None where samples have none.

    Returns:
        `perf/step_seconds`, `perf/samples_per_second`, `perf/tokens_per_second` and `perf/mfu`
            (model FLOPs utilization, a fraction of one); None is unknown.
    """
    flops, peak = plan.flops_per_step, plan.cluster["peak_flops"]
    mfu = flops / (step_seconds * plan.num_devices * peak) if flops and peak else None
    return {
        "perf/step_seconds": step_seconds,
        "perf/samples_per_second": samples / step_seconds,
        "perf/tokens_per_second": None if tokens is None else tokens / step_seconds,
        "perf/mfu": mfu,
    }


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known and finite; None where there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


def measured(
    records: Sequence[Mapping[str, Any]],
    rates: Callable[[float], Mapping[str, float | None]],
    earlier: int = 0,
    warm_up: Collection[int] = (),
) -> dict[str, Any]:
    """Return the fields of `Summary` that follow from a run's logged steps.

    Losses are the first and the last logged ones, None where they were not finite. The step's time
    is a median, so that one slow step does not distort it, and the rates are those of that time.

    Args:
        records: the logged steps, as `read_metrics` returns them.
        rates: returns the `performance` of a step that takes so many seconds.
        earlier: number of steps taken before, perhaps by another plan on other devices. Times,
            rates and memory are those of the later steps, if any was logged.
        warm_up: the steps whose times count only where no other was logged, the newest of them.
    """
    newer = [record for record in records if record["step"] > earlier] or records
    steady = [record for record in newer if record["step"] not in warm_up] or newer[-1:]
    seconds = median(record.get("perf/step_seconds") for record in steady)
    at_rate = rates(seconds) if seconds else {}

    def column(key: str) -> list[Any]:
        of = newer if key.startswith(("perf/", "pipeline/")) else records
        return [record[key] for record in of if record.get(key) is not None]

    return {
        "steps": records[-1]["step"] if records else 0,
        "first_loss": records[0].get("train/loss") if records else None,
        "final_loss": records[-1].get("train/loss") if records else None,
        "eval_loss": (column("eval/loss") or [None])[-1],
        "step_seconds_median": seconds,
        "samples_per_second": at_rate.get("perf/samples_per_second"),
        "tokens_per_second": at_rate.get("perf/tokens_per_second"),
        "mfu": at_rate.get("perf/mfu"),
        "bubble_fraction": median(column("pipeline/bubble_fraction")),
        "skipped_steps": int(sum(column("train/skipped"))),
        "peak_memory_bytes": max(column("perf/peak_memory_bytes"), default=None),
        "memory_bytes": (column("perf/memory_bytes") or [None])[-1],
    }
