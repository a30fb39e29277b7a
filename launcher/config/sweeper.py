"""Sweeps by Hydra's plug-ins: a sweeper, its own or an installed one, asks for points to be run.

What runs them is a Hydra launcher plug-in, which hands each batch of points to a function of ours.
A sweeper sees the swept settings only: what the command line says beside them stays as typed.

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
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from launcher.config.errors import ConfigError, advice
from launcher.config.folders import search_folders
from launcher.config.overrides import COMMAND_LINE, parse, quoted
from launcher.config.schema import MAXIMIZED
from launcher.config.search_path import searching

_GROUP = "hydra/sweeper"
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
    with searching(search_folders(config_dirs)) as loader, tempfile.TemporaryDirectory() as scratch:
        overrides = parse(ours, loader)
        node = _settings(of_sweeper, overrides, loader, Path(scratch))
        learns = not node.hydra.sweeper._target_.endswith(".BasicSweeper")
        swept = [one for one in overrides if one.is_sweep_override()]
        if not learns:
            _refuse_unlisted(swept)
        total = _total(node)
        raised: list[BaseException] = []

        def launch(jobs: Sequence[Sequence[str]]) -> Sequence[JobReturn]:
            asked = [Asked(tuple(job), _point(overrides, job)) for job in jobs]
            try:
                return [_returned(o) for o in run(Batch(asked, total or len(asked), learns))]
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


def _settings(
    of_sweeper: Sequence[str], overrides: Sequence[Override], loader: ConfigLoader, scratch: Path
) -> DictConfig:
    """Return Hydra's own settings: of no file of settings, only what the command line says."""
    said = [text.lstrip("+") for text in of_sweeper]
    options = {text.partition("=")[2].strip() for text in said if text.startswith(f"{_GROUP}=")}
    known = sorted(loader.get_group_options(_GROUP))
    for option in options - set(known):
        hint = ": pip install 'launcher[sweep]'" if option == "optuna" else ""
        raise ConfigError(
            f"There is no {_GROUP}={option}",
            f"It is not installed{hint}." if hint else advice(option, known, "Installed are"),
            where=COMMAND_LINE,
        )
    ours = f"hydra.sweep.dir={quoted(str(scratch))}"
    try:
        node = loader.load_configuration(None, [ours, *of_sweeper], RunMode.MULTIRUN)
    except (HydraException, OmegaConfBaseException) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"Hydra's sweeper: {problem}", where=COMMAND_LINE) from None
    _fill_in(node.hydra.sweeper, said, overrides)
    return node


def _fill_in(sweeper: DictConfig, said: Sequence[str], overrides: Sequence[Override]) -> None:
    """Set what the launcher knows better than the plug-in, unless the command line says it.

    As many points at a time as `sweep.jobs`; a point that fails stops no other; and the same
    points each time, so that a sweep can go on after it was killed.
    """
    if "storage" in sweeper and sweeper.storage is not None:
        raise ConfigError(
            "hydra.sweeper.storage would hold each point twice once the sweep goes on",
            "Leave it out: sweep.json in the sweep's folder holds its points.",
            where=COMMAND_LINE,
        )
    ours = {one.key_or_group: one.value() for one in overrides if not one.is_sweep_override()}
    seed = ours.get("run.seed", 0)
    jobs = ours.get("sweep.jobs", 1)
    wanted = {"n_jobs": jobs, "num_workers": jobs, "max_failure_rate": 1.0, "seed": seed}
    for place, prefix in ((sweeper, ""), (sweeper.get("sampler"), "sampler.")):
        for name, value in wanted.items() if isinstance(place, DictConfig) else ():
            is_said = any(text.startswith(f"hydra.sweeper.{prefix}{name}=") for text in said)
            if name in place and not is_said:
                with open_dict(place):
                    place[name] = value
    objective = str(ours.get("sweep.objective", ""))
    if "direction" in sweeper and not any("direction=" in text for text in said):
        sweeper.direction = "maximize" if objective in MAXIMIZED else "minimize"


def _total(node: DictConfig) -> int | None:
    """Return how many points a sweeper that learns will ask for, where it says so."""
    for name in ("n_trials", "budget", "max_trials"):  # Optuna, Nevergrad, Ax
        if isinstance(found := OmegaConf.select(node, f"hydra.sweeper.{name}"), int):
            return found
    return None


def _refuse_unlisted(swept: Sequence[Override]) -> None:
    """Raise ConfigError for what the basic sweeper cannot list value by value."""
    for override in swept:
        try:
            list(override.sweep_string_iterator())
        except HydraException:
            raise ConfigError(
                f"{override.input_line} cannot be listed value by value",
                "Write the values with commas, range(start,stop,step) or choice(a,b).",
                where=COMMAND_LINE,
            ) from None


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
