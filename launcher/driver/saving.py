"""Checkpoints, in the driver: their metadata, and the handling of saves that fail."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from launcher.checkpoint import SaveError, clear_partial_saves
from launcher.checkpoint.layout import read_metadata
from launcher.cluster.errors import HungError
from launcher.config.compose import redacted
from launcher.config.schema import Config
from launcher.config.sections import Checkpoint
from launcher.driver.folder.identity import fingerprints
from launcher.plan import Plan
from launcher.report.text import shown_path

if TYPE_CHECKING:
    from launcher.driver.workers import Answers, Workers

FORMAT = 1  # of the result of `contents`
_POLL_SECONDS = 0.5  # how often a worker that writes is asked
_LIMIT_SECONDS = 7200.0  # for one save; `write` waits 1800 s for each process's part

_log = logging.getLogger(__name__)


def contents(
    config: Config, plan: Plan, step: int, passed_over: int = 0, data: str = ""
) -> dict[str, Any]:
    """Return the JSON-able metadata of the checkpoint after `step` steps.

    Args:
        config: the run's settings.
        plan: its plan.
        step: the number of finished steps.
        passed_over: how many batches no step has taken, because they led to values that are not
            finite.
        data: the fingerprint of the dataset's content.
    """
    settings = redacted(config)
    settings["run"]["id"] = config.run.id  # resolved, even if it comes from a variable
    # Resolved as well: a variable of a later start must not change which checkpoints stay.
    settings["train"]["checkpoint"]["every_steps"] = config.train.checkpoint.every_steps
    return {
        "format": FORMAT,
        "config": settings,
        "fingerprints": fingerprints(config),
        "plan": plan.to_dict(),
        "data": {"next_batch": step + passed_over, "fingerprint": data},
        "metrics": {"next_step": step + 1},
    }


def resuming(run_id: str, checkpoints: Path, step: int) -> str:
    """Return the log line of a run that resumes from a checkpoint."""
    line = f"resuming run {run_id} at step {step} from {shown_path(checkpoints / str(step))}"
    before, here = read_metadata(checkpoints, step)["plan"].get("jax_version"), jax.__version__
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

    def __call__(self, step: int) -> Answers:
        """Begin to save the state after `step` steps, once the save before it is complete.

        Returns:
            The workers' answers, which arrive when the state is copied: training can then go on
                while it is written.

        Raises:
            SaveError: the save before failed, and that ends the run.
        """
        self.finish(final=False)
        self._sync()
        token, self._step = secrets.token_hex(4), step
        return self._workers.submit("save", str(self._folder), step, self._describe(step), token)

    def finish(self, final: bool) -> None:
        """Wait until the save under way is complete.

        A worker that writes for longer than `cluster.step_timeout` is not taken for hung: it
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
        clear_partial_saves(
            self._folder
        )  # parts that other processes wrote after the first gave up
        self._failures.append(problem)
        if final or self._settings.on_error == "stop":
            raise SaveError(problem)
        _log.warning(f"{problem} Training continues.")
