"""Plans on trial: a training runs each for some steps on its workers, and takes the fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from launcher.cluster.errors import HungError, WorkerError
from launcher.driver.workers import Workers
from launcher.plan import (
    Plan,
    Trial,
    describe_plan,
    fastest,
    keep_trial,
    kept_trial,
    trial_of,
)
from launcher.report.console import Phase, status, table_of
from launcher.report.text import seconds_text

_ROUNDS = 4
_ROUND = 0.5  # seconds
_MOST_STEPS = 20  # of a round

_log = logging.getLogger(__name__)


class Tries:
    """The plans that a training tries before it takes one.

    A plan that crashes the workers is dropped; the rest run on new workers.

    Args:
        plans: the plans, the best by its prediction first.
        console: where progress and the result are shown.
        knows: whether to use trials of earlier runs.
    """

    def __init__(self, plans: Sequence[Plan], console: Console, knows: bool) -> None:
        self._plans, self._console = tuple(plans), console
        known = [kept_trial(plan) if knows else None for plan in plans]
        self._trials = {k: trial for k, trial in enumerate(known) if trial}

    def run(self, workers: Workers) -> bool:
        """Try the remaining plans on workers that have built the program.

        Returns:
            Whether the workers are usable; if not, new ones have to try the rest.

        Raises:
            RayEndedError: Ray ended.
        """
        left = [k for k in range(len(self._plans)) if k not in self._trials]
        with status(self._console, f"trying {len(left)} plans", Phase.TRYING):
            for k in left:
                if not self._try(k, workers):
                    return False
            workers.submit("begin_trial", None).result()
        return True

    def _try(self, k: int, workers: Workers) -> bool:
        plan, usable, seconds, failure = self._plans[k], True, None, ""
        try:
            workers.submit("begin_trial", plan.to_dict()).result()
            seconds = timed_rounds(lambda steps: max(workers.submit("run_trial", steps).each()))
        except HungError as error:
            failure, usable = str(error).splitlines()[0], False
        except WorkerError as error:  # the other workers may wait for the one that failed
            failure, usable = error.summary, not error.died and len(workers.handles) == 1
        self._trials[k] = trial_of(plan, seconds, failure)
        if usable:  # a crash may have another cause
            keep_trial(plan, self._trials[k])
        return usable

    def choose(self) -> Plan:
        """Return the fastest plan, and show all results; the first plan if each failed."""
        trials = [self._trials[k] for k in range(len(self._plans))]
        self._console.print(_table(trials))
        for trial in trials:
            if trial.failure:
                _log.warning(f"{trial.plan} is dropped: {trial.failure}")
        chosen = fastest(self._plans, trials)
        if chosen is None:
            _log.warning("no plan that was tried could run; the best by its prediction is taken")
            return replace(self._plans[0], tried=tuple(trials))
        _log.info(f"the fastest is taken: {describe_plan(chosen)}")
        return chosen


def timed_rounds(timed: Callable[[int], float]) -> float:
    """Return the seconds of a step: of the fastest round, as other work counts little there.

    Args:
        timed: runs so many steps and returns the seconds of one.
    """
    timed(1)  # opens connections and allocates
    steps = min(max(1, int(_ROUND / timed(1))), _MOST_STEPS)
    return min(timed(steps) for _ in range(_ROUNDS))


def _table(trials: Sequence[Trial]) -> Table:
    rows = [
        (
            trial.plan,
            seconds_text(trial.predicted_step_seconds),
            "failed" if trial.failure else seconds_text(trial.measured_step_seconds),
        )
        for trial in trials
    ]
    return table_of(("plan", "predicted", "measured"), rows, ("plan",))
