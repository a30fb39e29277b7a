"""Saving as the driver sees it: what goes into a checkpoint, and what follows from one that fails.

`loop` says when to save, the workers write; `training` makes a `Saving` and asks it how it went.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.compose import to_dict
from launcher.config.schema import Checkpoint, Config
from launcher.plan import Plan
from launcher.train.checkpoint import SaveError

if TYPE_CHECKING:
    from launcher.train.crew import Answers, Crew

FORMAT = 1  # of what `contents` returns


def contents(config: Config, plan: Plan, step: int, passed_over: int = 0) -> dict[str, Any]:
    """What a checkpoint after `step` steps holds beside the arrays, as JSON can hold it.

    Args:
        passed_over: how many batches no step took, as they had led to what is not finite.
    """
    return {
        "format": FORMAT,
        "config": to_dict(config),
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
        failures: a line for each save that failed is added to it.
    """

    def __init__(
        self,
        crew: Crew,
        folder: Path,
        settings: Checkpoint,
        describe: Callable[[int], dict[str, Any]],
        warn: Callable[[str], None],
        failures: list[str],
    ) -> None:
        self._crew, self._folder, self._settings = crew, str(folder.absolute()), settings
        self._describe, self._warn = describe, warn
        self._failures = failures

    def __call__(self, step: int) -> Begun:
        """Begin to save the newest state, that after `step` steps; training goes on meanwhile."""
        token = secrets.token_hex(4)
        answers = self._crew.submit("save", self._folder, step, self._describe(step), token)
        return Begun(self, answers)

    def finish(self, final: bool) -> None:
        """Wait until all is written; `final`: it is the last thing that the run does.

        Raises SaveError.
        """
        self.note(self._crew.submit("saved").result(), final)

    def note(self, problem: str | None, final: bool = False) -> None:
        """Take in how a save went. Raises SaveError."""
        if problem is None:
            return
        self._failures.append(problem)
        if final or self._settings.on_error == "stop":
            raise SaveError(problem)
        self._warn(f"{problem} Training goes on.")


@dataclass(frozen=True)
class Begun:
    """A save that was begun; what its `result` waits for is the copy, not the disk."""

    saving: Saving
    answers: Answers

    def result(self) -> None:
        """Wait until the state is copied. Raises SaveError for the save before, where it failed and
        that ends the run."""
        self.saving.note(self.answers.result())
