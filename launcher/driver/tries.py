"""The best few plans are run for some steps each before a training, which takes the fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from launcher.cluster.errors import HungError, WorkerError
from launcher.driver.workers import Workers
from launcher.plan import Plan, Trial, describe_plan
from launcher.plan.profile.trials import fastest, keep_trial, kept_trial, trial_of
from launcher.report.console import Phase, plain_table, status
from launcher.report.text import seconds_text

_ROUNDS = 4
_ROUND = 0.5  # seconds
_MOST_STEPS = 20  # of a round

_log = logging.getLogger(__name__)


class Tries:
    """The plans that a training tries before it takes one.

    A plan that ends the workers falls out, and the others are tried by new ones.

    Args:
        plans: the plans, the best by its prediction first.
        console: where progress and the result are shown.
        knows: whether to take what was measured before.
    """

    def __init__(self, plans: Sequence[Plan], console: Console, knows: bool) -> None:
        self._plans, self._console = tuple(plans), console
        known = [kept_trial(plan) if knows else None for plan in plans]
        self._trials = {k: trial for k, trial in enumerate(known) if trial}

    def run(self, workers: Workers) -> bool:
        """Try what is left on workers that have built the program.

        Returns:
            Whether the workers can go on; if not, new ones have to try the rest.

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
        plan, can_go_on, seconds, failure = self._plans[k], True, None, ""
        try:
            workers.submit("begin_trial", plan.to_dict()).result()
            seconds = timed_rounds(lambda steps: max(workers.submit("run_trial", steps).each()))
        except HungError as error:
            failure, can_go_on = str(error).splitlines()[0], False
        except WorkerError as error:  # the other workers may wait for the one that failed
            failure, can_go_on = error.summary, not error.died and len(workers.handles) == 1
        self._trials[k] = trial_of(plan, seconds, failure)
        if can_go_on:  # what ended the workers may have been something else
            keep_trial(plan, self._trials[k])
        return can_go_on

    def choose(self) -> Plan:
        """Return the fastest plan, and show what came of all; the first one if each failed."""
        trials = [self._trials[k] for k in range(len(self._plans))]
        self._console.print(_table(trials))
        for trial in trials:
            if trial.failure:
                _log.warning(f"{trial.plan} falls out: {trial.failure}")
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
    table = plain_table()
    for name in ("plan", "predicted", "measured"):
        table.add_column(name, justify="right" if table.columns else "left")
    for trial in trials:
        measured = trial.measured_step_seconds
        table.add_row(
            trial.plan,
            seconds_text(trial.predicted_step_seconds),
            "failed" if measured is None else seconds_text(measured),
        )
    return table
