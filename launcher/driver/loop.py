"""The training loop in the driver: the order of steps, evaluations and saves, and failed saves."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from launcher.checkpoint import SaveError, clear_partial_saves
from launcher.checkpoint.layout import read_metadata
from launcher.cluster.errors import HungError
from launcher.config.sections import Checkpoint, Train
from launcher.driver.record.best import Best
from launcher.driver.record.samples import Samples
from launcher.driver.record.slowness import Slowness
from launcher.driver.record.step_log import Pace, StepLog, is_evaluated, profiled_step
from launcher.report.text import shown_path
from launcher.stop import Stop

if TYPE_CHECKING:
    from launcher.driver.workers import Answers, Workers
    from launcher.train.step_result import StepResult

IN_FLIGHT = 2  # steps sent ahead of their results: the worker never waits for the driver
# The part of the time of training for copies of the state. The step beside a copy, which cannot
# update arrays in place, takes about as much longer: together that is 1 %.
SNAPSHOT_SHARE = 0.005
_POLL_SECONDS = 0.5  # how often a worker that writes is asked
_LIMIT_SECONDS = 7200.0  # for one save; `write` waits 1800 s for each process's part

_log = logging.getLogger(__name__)


def train(
    settings: Train,
    workers: Workers,
    step_log: StepLog,
    stop: Stop,
    finished: int,
    save: Saving,
    snapshots: SnapshotCadence | None = None,
) -> None:
    """Train from step `finished` + 1 to `settings.steps`, or until a signal asks to stop.

    Saves are written while training continues; all are complete on return. The last step is saved
    if it is due like any other, if `settings.checkpoint.at_end` is set, or if a signal ends the
    run, provided that a step was made. So is one whose evaluation is the best.

    Args:
        settings: the section `train`, with the number of batches of an evaluation.
        workers: the workers, with their state created or restored.
        step_log: takes the result of each step.
        stop: the signals received.
        finished: the number of steps already finished.
        save: `save(step)` begins to save the state after `step`.
        snapshots: says when the workers take snapshots; None if they keep none.

    Raises:
        DivergedError: a step's loss or gradient is not finite; nothing of that step is saved.
        ReplicaError: replicas differ after a step; nothing of that step is saved.
        SaveError: a save failed, and that ends the run.
        WorkerError: and the other errors of `Workers.result`.
    """
    profiled = profiled_step(settings.steps, finished, step_log.timelines.all)
    faults = step_log.wall.faults
    cadence = Cadence(settings.checkpoint, time.monotonic(), lambda: faults.save_interval)
    calls = _Calls(workers, step_log, snapshots)
    best, samples = step_log.callbacks.of(Best), step_log.callbacks.of(Samples)
    slowness = step_log.callbacks.of(Slowness)
    step = saved = finished
    while step < settings.steps and not stop.requested and not (best and best.reason):
        step += 1
        how = step == profiled, *step_log.timelines.start(step)
        watched = [True] if slowness and slowness.is_watched(step) else []
        calls.send("training", "step", step, *how, *watched)
        if is_evaluated(step, settings):
            for batch in range(settings.eval_batches or 0):
                calls.send("evaluating", "evaluate", batch)
            if best and best.follows:
                calls.finish()
        if samples and samples.is_due(step):
            calls.send("training", "flush")
            calls.send("sampling", "sample", step, samples.prompts, samples.most)
        if snapshots and step < settings.steps and snapshots.is_due(step):
            calls.send("training", "snapshot", step)
        is_best = bool(best and best.is_to_keep(step))
        if step < settings.steps and (cadence.is_due(step, time.monotonic()) or is_best):
            calls.finish()  # a step that diverged must not be saved
            calls.append(("saving", save(step, beside=True), 0))
            saved = step
        calls.record(IN_FLIGHT - 1)
    calls.finish()
    step_log.log_newest()
    at_end = settings.checkpoint.at_end or stop.requested
    # The last step may be due like any other; nothing has to overlap with its save.
    is_best = bool(best and best.is_to_keep(step))
    final = step > finished and bool(at_end or cadence.is_due(step, time.monotonic()) or is_best)
    if final and step != saved:
        save(step).result()
    save.finish(final)
    step_log.wall.lap("saving")


class _Calls(deque[tuple[str, "Answers", int]]):
    """Calls under way, the oldest first.

    Each is with what it is part of, a phase of `Goodput`, and the step by whose pace it is judged;
    0: by none.
    """

    def __init__(
        self, workers: Workers, step_log: StepLog, snapshots: SnapshotCadence | None
    ) -> None:
        super().__init__()
        self._workers, self._step_log, self._snapshots = workers, step_log, snapshots
        self._step, self._reads = 0, False  # the newest step; whether what it recorded is read

    def send(self, phase: str, method: str, *arguments: Any) -> None:
        """Call a method of all workers."""
        judged = method == "step" or (method == "flush" and not self._reads)
        if method == "step":
            self._step, _, record, trace_in, *_ = arguments
            self._reads |= bool(record or trace_in)
        elif method == "flush":
            self._reads = False
        answers = self._workers.submit(method, *arguments)
        self.append((phase, answers, self._step if judged else 0))

    def finish(self) -> None:
        """Wait for all calls that were sent, and record their results."""
        self.send("training", "flush")
        self.record(0)

    def record(self, most: int) -> None:
        """Wait for the oldest calls and record their results, until `most` are under way."""
        step_log, pace = self._step_log, self._step_log.callbacks.of(Pace)
        while len(self) > most:
            phase, answers, step = self.popleft()
            with step_log.timelines.spans.span("loop", "wait for the workers"):
                result = answers.result(limit=pace.limit(step) if pace and step else None)
            with step_log.timelines.spans.span("loop", "log"):
                if phase == "sampling":
                    step_log.lap("evaluating")
                    if samples := step_log.callbacks.of(Samples):
                        samples.take(result)
                else:
                    step_log.lap(phase, result)
                    step_log.record(result)
                    if self._snapshots and result is not None:
                        self._snapshots.note(result)


class Cadence:
    """The times at which the state is saved during training, in seconds.

    Args:
        settings: `train.checkpoint`.
        now: the time.
        interval: returns the time between saves that loses the least, for `every_minutes` None.
    """

    def __init__(self, settings: Checkpoint, now: float, interval: Callable[[], float]) -> None:
        self._settings, self._interval = settings, interval
        self._saved_at = now

    def is_due(self, step: int, now: float) -> bool:
        """Return whether to save after `step`; if so, `every_minutes` counts from `now`."""
        settings = self._settings
        by_step = settings.every_steps > 0 and step % settings.every_steps == 0
        minutes = settings.every_minutes
        every = self._interval() if minutes is None else 60 * minutes
        late = every > 0 and now - self._saved_at >= every
        if by_step or late:
            self._saved_at = now
        return by_step or late


class SnapshotCadence:
    """The steps after which the workers take snapshots.

    Args:
        every: the steps from one to the next; None for as often as `SNAPSHOT_SHARE` allows.
        taken: the step after which one is under way already; 0 if none is.
    """

    def __init__(self, every: int | None, taken: int = 0) -> None:
        self._every = every
        self._spent = self._newest = self._trained = 0.0  # seconds
        self._taken, self._complete = taken, 0  # steps

    def is_due(self, step: int) -> bool:
        """Return whether to take one after `step`: never before the last is complete."""
        if self._every is not None:
            is_due = step // self._every > self._taken // self._every
        else:
            is_due = self._spent + self._newest <= SNAPSHOT_SHARE * self._trained
        is_due &= self._complete >= self._taken
        self._taken = step if is_due else self._taken
        return is_due

    def note(self, result: StepResult) -> None:
        """Take a step's time, the newest snapshot of each process and what it has cost."""
        self._trained += result.metrics["perf/step_seconds"]
        self._newest = result.metrics.get("perf/snapshot_seconds", self._newest)
        self._spent += result.metrics.get("perf/snapshot_seconds", 0.0)
        self._complete = min(result.snapshots)


def resuming(
    run_id: str, checkpoints: Path, step: int, recorded: int = 0, in_memory: bool = False
) -> str:
    """Return the log line of a run that resumes.

    Args:
        run_id: the run.
        checkpoints: its folder of checkpoints.
        step: the step to resume from.
        recorded: the newest step of the attempt before; 0 without one.
        in_memory: whether the state is from a snapshot.
    """
    source = "memory" if in_memory else shown_path(checkpoints / str(step))
    line = f"resuming run {run_id} at step {step} from {source}"
    if recorded > step:
        line += f"; steps to repeat: {recorded - step}"
    before = here = jax.__version__
    if not in_memory:
        before = read_metadata(checkpoints, step)["plan"].get("jax_version")
    return line if before in (None, here) else f"{line} (saved with JAX {before}; this is {here})"


class Saving:
    """Saves the workers' state to a folder of checkpoints.

    A save that the disk refuses costs a warning, and training continues. SaveError is raised
    instead if `settings.on_error` is "stop", or if it was the last save of the run.

    Args:
        workers: the workers that hold the state.
        folder: the folder of checkpoints.
        settings: `train.checkpoint`.
        describe: returns the metadata of the state after so many steps.
        failures: the messages of all failed saves; new ones are appended.
        sync: forces the metrics of the steps before to the disk.
        saved: called with each step whose state is saved.
    """

    def __init__(
        self,
        workers: Workers,
        folder: Path,
        settings: Checkpoint,
        describe: Callable[[int], dict[str, Any]],
        failures: list[str],
        sync: Callable[[], None] = lambda: None,
        saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._saved, self._step = saved, 0
        self._workers, self._folder, self._settings = workers, folder.absolute(), settings
        self._describe, self._failures, self._sync = describe, failures, sync

    def __call__(self, step: int, beside: bool = False) -> Answers:
        """Begin to save the state after `step` steps, once the save before it is complete.

        Args:
            step: the number of finished steps.
            beside: whether training continues, so that another process is worth its start.

        Returns:
            The workers' answers, which arrive when the state is copied: training can then
                continue while it is written.

        Raises:
            SaveError: the save before failed, and that ends the run.
        """
        self.finish(final=False)
        self._sync()
        token, self._step = secrets.token_hex(4), step
        about = str(self._folder), step, self._describe(step), token
        return self._workers.submit("save", *about, *([True] if beside else []))

    def finish(self, final: bool) -> None:
        """Wait until the save under way is complete.

        A worker that writes for longer than `cluster.step_timeout` does not count as hung: it
        answers that it still writes, and is asked again.

        Args:
            final: whether it is the last save of the run.

        Raises:
            SaveError: it failed, and that ends the run.
            HungError: it takes longer than `_LIMIT_SECONDS`.
        """
        waited = 0.0  # counts calls, not the clock; see `WorkerGroup`
        while any(self._workers.submit("writing", _POLL_SECONDS).each()):
            waited += _POLL_SECONDS
            if waited >= _LIMIT_SECONDS:
                message = f"a save to {self._folder} takes longer than {_LIMIT_SECONDS:g} s"
                raise HungError(f"{message}: check the disk", {})
        problem = self._workers.submit("saved").result()
        step, self._step = self._step, 0
        if problem is None:
            if step:
                self._saved(step)
            return
        clear_partial_saves(self._folder)  # other processes may write after the first gave up
        self._failures.append(problem)
        if final or self._settings.on_error == "stop":
            raise SaveError(problem)
        _log.warning(f"{problem} Training continues.")
