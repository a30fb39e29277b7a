"""Saving as the driver sees it: what goes into a checkpoint, and what follows from one that fails.

`loop` says when to save, the workers write; `training` makes a `Saving` and asks it how it went.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cluster.errors import HungError
from launcher.config.compose import redacted
from launcher.config.schema import Checkpoint, Config
from launcher.driver.identity import fingerprints
from launcher.plan import Plan
from launcher.train.checkpoint import SaveError, clear_partial

if TYPE_CHECKING:
    from launcher.driver.workers import Answers, Workers

FORMAT = 1  # of what `contents` returns
_POLL_SECONDS = 0.5  # in which a worker that writes answers that it still does
_LIMIT_SECONDS = 7200.0  # for one save; each process's part has `write` wait 1800 s for it


def contents(config: Config, plan: Plan, step: int, passed_over: int = 0) -> dict[str, Any]:
    """What a checkpoint after `step` steps holds beside the arrays, as JSON can hold it.

    Args:
        passed_over: how many batches no step took, as they had led to what is not finite.
    """
    settings = redacted(config)
    settings["run"]["id"] = config.run.id  # whose it is, whatever variable named it
    # And what decides whether it stays, which no variable of a later start is to change.
    settings["train"]["checkpoint"]["every_steps"] = config.train.checkpoint.every_steps
    return {
        "format": FORMAT,
        "config": settings,
        "fingerprints": fingerprints(config),
        "plan": plan.to_dict(),
        "data": {"next_batch": step + passed_over},
        "metrics": {"next_step": step + 1},
    }


class Saving:
    """Saves to `folder` what the workers hold.

    A save fails where the disk does not take it: its message goes to `warn` and the run goes on.
    Where `settings.on_error` says so, and for the last save of a run, SaveError is raised.

    Args:
        describe: the metadata of the state after so many steps.
        sync: puts what is recorded of the steps before on the disk.
        failures: a line for each save that failed is added to it.
    """

    def __init__(
        self,
        workers: Workers,
        folder: Path,
        settings: Checkpoint,
        describe: Callable[[int], dict[str, Any]],
        warn: Callable[[str], None],
        failures: list[str],
        sync: Callable[[], None] = lambda: None,
    ) -> None:
        self._workers, self._folder, self._settings = workers, folder.absolute(), settings
        self._describe, self._warn = describe, warn
        self._failures, self._sync = failures, sync

    def __call__(self, step: int) -> Answers:
        """Begin to save the newest state, that after `step` steps, when the one before is written;
        training goes on as soon as it is copied, which is what the result waits for.

        Raises SaveError for the save before, where it failed and that ends the run.
        """
        self.finish(final=False)
        self._sync()
        token = secrets.token_hex(4)
        return self._workers.submit("save", str(self._folder), step, self._describe(step), token)

    def finish(self, final: bool) -> None:
        """Wait until all is written; `final`: it is the last thing that the run does.

        A worker that writes for longer than `cluster.step_timeout` is not hung: it answers that it
        does, and is asked again. Raises SaveError, and HungError after `_LIMIT_SECONDS`.
        """
        waited = 0.0  # in calls, not by the clock; see `WorkerGroup`
        while any(self._workers.submit("writing", _POLL_SECONDS).each()):
            waited += _POLL_SECONDS
            if waited >= _LIMIT_SECONDS:
                told = f"a save to {self._folder} takes longer than {_LIMIT_SECONDS:g} s"
                raise HungError(f"{told}: see whether the disk is in order", {})
        problem = self._workers.submit("saved").result()
        if problem is None:
            return
        clear_partial(self._folder)  # what other processes wrote after the first gave up
        self._failures.append(problem)
        if final or self._settings.on_error == "stop":
            raise SaveError(problem)
        self._warn(f"{problem} Training goes on.")
