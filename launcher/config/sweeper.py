"""Sweeps by Hydra's plug-ins: a sweeper, its own or an installed one, asks for points to be run.

What runs them is a Hydra launcher plug-in, which hands each batch of points to a function of ours.
A sweeper sees the swept settings only: what the command line says beside them stays as typed. What
is swept may also stand in a file, under `hydra.sweeper.params`.

Hydra's own entry point is not used. It composes points without the schema, makes folders first, and
ends with code 1 whatever is wrong; here a wrong setting ends with code 2 before anything is made.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig

from launcher.config.folders import search_folders
from launcher.config.overrides import parse
from launcher.config.search_path import searching
from launcher.config.sweeper_settings import (
    is_learning,
    points_in_all,
    refuse_unlisted,
    sweeper_settings,
)

_OF_SWEEPER = re.compile(r"\+{0,2}hydra[./]sweeper\b")


@dataclass(frozen=True)
class Asked:
    """A point that a sweeper asks for.

    Attributes:
        swept: the settings that it chose, as `key=value`.
        overrides: all that the command line says for this point, in its order.
    """

    swept: tuple[str, ...]
    overrides: tuple[str, ...]

    @property
    def label(self) -> str:
        """Return what sets the point apart from the others."""
        return " ".join(self.swept) or "the only run"


@dataclass(frozen=True)
class Outcome:
    """What a sweeper is told of a point: its objective, or why it has none."""

    value: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Batch:
    """Points that a sweeper asks for at once.

    Attributes:
        points: the points.
        total: how many the sweep asks for in all.
        learns: whether the next batch depends on what comes of this one.
    """

    points: Sequence[Asked]
    total: int
    learns: bool


Run = Callable[[Batch], Sequence[Outcome]]


class SweeperError(Exception):
    """A sweeper that could not go on; the message is its own."""


class _PointError(Exception):
    """What a sweeper finds in place of the objective of a point that failed."""


class _Failed(JobReturn):
    """A point without an objective: Hydra's own would print a line of its own."""

    @property
    def return_value(self) -> Any:
        """Raise what the point failed of."""
        raise _PointError

    @return_value.setter
    def return_value(self, value: Any) -> None:
        del value


class PointLauncher(Launcher):
    """Hands the points that a sweeper asks for to a function of ours."""

    def __init__(self, run: Callable[[Sequence[Sequence[str]]], Sequence[JobReturn]]) -> None:
        self._run = run

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Do nothing: a point is a process of its own."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run a batch of points. Their numbers are those of the sweep's folder, not Hydra's."""
        del initial_job_idx
        return self._run(job_overrides)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what a command line says to us, and what to Hydra's sweeper."""
    of_sweeper = [text for text in arguments if _OF_SWEEPER.match(text)]
    return [text for text in arguments if text not in of_sweeper], of_sweeper


def run_sweeper(
    arguments: Sequence[str], config_dirs: Sequence[str], run: Run, results: Callable[[], Path]
) -> None:
    """Have Hydra's sweeper ask for points until it has enough.

    Args:
        arguments: the command line: settings, options, and those of `hydra/sweeper`.
        config_dirs: the values of `--config-dir`.
        run: runs a batch of points.
        results: returns the folder for what the sweeper itself writes.

    Raises:
        ConfigError: the command line is wrong.
        SweeperError: the sweeper failed.
        Exception: whatever `run` raises.
    """
    ours, of_sweeper = split_arguments(arguments)
    folders = search_folders(config_dirs)
    with searching(folders) as loader, tempfile.TemporaryDirectory() as scratch:
        overrides = parse(ours, loader)
        node = sweeper_settings(of_sweeper, overrides, folders, loader, Path(scratch))
        learns, number = is_learning(node), points_in_all(node)
        swept = [one for one in overrides if one.is_sweep_override()]
        if not learns:
            refuse_unlisted(swept)
        raised: list[BaseException] = []

        def launch(jobs: Sequence[Sequence[str]]) -> Sequence[JobReturn]:
            asked = [Asked(tuple(job), _point(overrides, job)) for job in jobs]
            try:
                return [_returned(o) for o in run(Batch(asked, number or len(asked), learns))]
            except BaseException as error:
                raised.append(error)
                raise

        with _plugged(PointLauncher(launch)):
            try:
                sweeper = _sweeper(node, loader)
                sweeper.sweep([one.input_line or "" for one in swept])
            except _PointError:
                pass  # `run` knows of it
            except Exception as error:
                if raised:
                    raise
                raise SweeperError(f"{type(error).__name__}: {error}") from error
        for file in set(Path(scratch).iterdir()) - {Path(scratch, "multirun.yaml")}:
            shutil.copy(file, results() / file.name)  # what it found, without Hydra's own settings


def _point(overrides: Sequence[Override], job: Sequence[str]) -> tuple[str, ...]:
    """Return all that the command line says for a point: what is swept stands where it was."""
    chosen = {text.partition("=")[0]: text for text in job}
    words = []
    for override in overrides:
        if not override.is_sweep_override():
            words.append(override.input_line or "")
        elif (text := chosen.pop(override.get_key_element(), None)) is not None:
            words.append(text)
    return (*words, *chosen.values())


def _returned(outcome: Outcome) -> JobReturn:
    if outcome.problem:
        return _Failed(status=JobStatus.FAILED)
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = outcome.value
    return returned


def _sweeper(node: DictConfig, loader: ConfigLoader) -> Sweeper:
    """Return Hydra's sweeper, made with the `PointLauncher` that is plugged in."""
    context = HydraContext(config_loader=loader, callbacks=Callbacks())
    sweeper = Plugins.instance().instantiate_sweeper(
        hydra_context=context, task_function=lambda config: None, config=node
    )
    # The schema decides what a point's settings are, not the files that hold some of them.
    sweeper.validate_batch_is_legal = lambda batch: None  # type: ignore[method-assign]
    logging.getLogger("optuna").setLevel(logging.WARNING)
    return sweeper


@contextmanager
def _plugged(launcher: PointLauncher) -> Iterator[None]:
    """Have sweepers be given `launcher` where they ask Hydra for its launcher.

    Hydra itself makes plug-ins of modules below `hydra_plugins` only, which are for packages that
    are installed beside it.
    """
    plugins = Plugins.instance()
    plugins.register(PointLauncher)
    own = plugins.instantiate_launcher
    plugins.instantiate_launcher = lambda **given: launcher  # type: ignore[method-assign]
    try:
        yield
    finally:
        plugins.instantiate_launcher = own  # type: ignore[method-assign]
