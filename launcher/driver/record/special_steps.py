"""Steps that are evaluated or profiled, and steps with untypical times."""

from __future__ import annotations

from collections.abc import Set

from launcher.config.training import Train


def is_evaluated(step: int, settings: Train) -> bool:
    """Return whether an evaluation follows `step`: every so many steps, and after the last one."""
    every = settings.eval_every
    return every > 0 and (step % every == 0 or step == settings.steps)


def profiled_step(steps: int, finished: int, recorded: Set[int] = frozenset()) -> int | None:
    """Return the step that is run task by task to time the stages.

    It is the second, which is warm; or the next one that is not `recorded`, and None if there is
    none.
    """
    last = min(finished + 2, steps)
    return next((k for k in (*range(last, steps + 1), finished + 1) if k not in recorded), None)


def warm_up(finished: int, dry_steps: int = 0) -> range:
    """Return the first steps after a start at `finished`, whose times are not representative.

    The first is cold, unless dry steps came before it; the second is profiled, and the third was
    queued behind the second.
    """
    return range(finished + (2 if dry_steps else 1), finished + 4)
