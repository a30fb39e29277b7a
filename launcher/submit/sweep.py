"""Start a sweep (`-m`): a check of all points, jobs on Slurm, or runs on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launcher.base import answer, complain
from launcher.cluster.kinds import kind_of
from launcher.config.compose import Point, load_points
from launcher.config.errors import ConfigError
from launcher.config.sweep import Batch, Outcome, SweeperError, run_sweeper
from launcher.driver.planning.check import check
from launcher.stop import Stop
from launcher.submit.local_sweep import LocalSweep, StoppedError, local_sweep
from launcher.submit.points import members, place_sweep


class _EndedError(Exception):
    """The sweep is over before its sweeper knows any outcome.

    Attributes:
        code: the exit code.
    """

    def __init__(self, code: int) -> None:
        self.code = code


def run_sweep(arguments: Sequence[str], config_dirs: Sequence[str], stop: Stop) -> int:
    """Run the sweep of a command line and return the exit code.

    Args:
        arguments: settings and options, swept ones among them, and those of Hydra's sweeper.
        config_dirs: the values of `--config-dir`.
        stop: ends a submission.

    Raises:
        ConfigError: a setting is wrong.
        KeyboardInterrupt: a signal ended a submission; `stop` has the exit code.
    """
    with ExitStack() as stack:
        one = _Sweep(config_dirs, stop, stack)
        try:
            run_sweeper(arguments, config_dirs, one.run, one.results)
        except _EndedError as ended:
            return ended.code
        except StoppedError:
            pass
        except SweeperError as error:
            if one.local is None:
                raise ConfigError(f"Hydra's sweeper cannot begin: {error}") from None
            if one.is_any_done:
                complain(f"Hydra's sweeper failed: {error}")
                one.local.close()
                return 1
        assert one.local is not None
        return one.local.close()


class _Sweep:
    """Takes the batches of a sweeper.

    Attributes:
        local: the sweep on this machine, from its first batch on.
        is_any_done: whether any point has an objective.
    """

    def __init__(self, config_dirs: Sequence[str], stop: Stop, stack: ExitStack) -> None:
        self.local: LocalSweep | None = None
        self.is_any_done = False
        self._dirs, self._stop, self._stack = config_dirs, stop, stack

    def run(self, batch: Batch) -> Sequence[Outcome]:
        """Run the points of a batch, of the first one only if it may begin."""
        if self.local is None:
            points, wrong = load_points(batch.points, self._dirs)
            self._begin(batch, points, wrong)
            self.local = self._stack.enter_context(local_sweep(points, self._dirs))
        else:
            try:
                points, wrong = load_points(batch.points, self._dirs)
            except ConfigError as error:  # all of them, in the same way
                points, wrong = [], {one.label: error for one in batch.points}
        outcomes = self.local.run(batch, points, wrong)
        self.is_any_done |= any(not outcome.problem for outcome in outcomes)
        return outcomes

    def results(self) -> Path:
        """Return the folder for the sweeper's own files."""
        assert self.local is not None
        return self.local.folder

    def _begin(self, batch: Batch, points: Sequence[Point], wrong: dict[str, ConfigError]) -> None:
        """Raise for a sweep that does not run here, or may not begin."""
        if points and all(point.config.task == "check" for point in points):
            raise _EndedError(_check_sweep(points, wrong))
        if wrong and not (batch.learns and points):
            for label, error in wrong.items():
                complain(f"{label}: {error}")
            raise _EndedError(2)
        if (submission := _submission(points)) is not None:
            if batch.learns:
                raise ConfigError(
                    "A sweeper that learns waits for its runs, but nothing waits for jobs on Slurm",
                    "Leave hydra/sweeper out, or start the sweep in a job, with cluster=local.",
                    ["cluster.kind"],
                )
            with self._stop.interruptible():
                raise _EndedError(submission.submit_sweep(points, self._stop))


def _submission(points: Sequence[Point]) -> Any:
    """Return the module by which the points are submitted; None if they all run here."""
    found = (kind_of(point.config.cluster).submission() for point in points)
    return next(filter(None, found), None)


def _check_sweep(points: Sequence[Point], wrong: Mapping[str, ConfigError]) -> int:
    """Check every run of a sweep as `task=check` does, and print all problems.

    Args:
        points: the runs whose settings could be composed.
        wrong: the errors of the others, by label.

    Returns:
        The exit code, 2 if any setting is wrong.
    """
    configs = members(points, *place_sweep(points))
    if (submission := _submission(points)) is not None:
        submission.check_jobs(configs)
    verdicts = [check(config, os.environ) for config in configs]
    problems = {label: str(error) for label, error in wrong.items()}
    problems |= {
        point.label: verdict.problem
        for point, verdict in zip(points, verdicts, strict=True)
        if verdict.problem
    }
    for label, problem in problems.items():
        complain(f"{label}: {problem}")
    if problems:
        return max([2 for _ in wrong] + [verdict.code for verdict in verdicts])
    lines = dict.fromkeys(line for verdict in verdicts for line in verdict.lines)
    return answer("\n".join([f"The settings of all {len(points)} runs are fine.", *lines]))
