"""Sweeps by Hydra's sweepers, its own or an installed one, and by Optuna.

A Hydra launcher plug-in hands each batch of points to the launcher. A sweeper sees the swept
settings only; the rest of the command line stays as typed. For Optuna, the settings of the search
are read here (`Space`). A file may describe a sweep, too:

    # @package _global_
    defaults:
      - override /hydra/sweeper: optuna
    hydra:
      sweeper:
        n_trials: 20
        params:
          optimizer.learning_rate: interval(1e-4, 1e-2)

Hydra's own entry point is not used: it composes points without the schema, makes folders first, and
ends with code 1 for a wrong setting, where the launcher ends with 2 before anything is made.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from launcher.base import setting_word
from launcher.config.compose import PRIMARY, Asked, no_option, sources_of, translated
from launcher.config.errors import ConfigError
from launcher.config.folders import search_folders
from launcher.config.hydra_compat import Callbacks, searching
from launcher.config.overrides import COMMAND_LINE, all_for_hydra, parse
from launcher.config.search import OPTUNA, Space, read_space
from launcher.config.sections import MAXIMIZED
from launcher.config.sources import (
    SWEEPER,
    SWEEPER_GROUP,
    SWEPT,
    Source,
    is_of_sweeper,
    refuse_useless,
    scalars,
)

_FULL_KEY = re.compile(r"full_key: (\S+)")
_OF_SWEEPER = re.compile(r"\+{0,2}hydra[./]sweeper\b")


@dataclass(frozen=True)
class Outcome:
    """Result of one sweep point: objective, or error."""

    value: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Batch:
    """Points that a sweeper asks for at once.

    Attributes:
        points: the points.
        total: how many the sweep asks for in all.
        learns: whether the next batch depends on the results of this one.
    """

    points: Sequence[Asked]
    total: int
    learns: bool


Run = Callable[[Batch], Sequence[Outcome]]
MakePoint = Callable[[Sequence[str]], Asked]  # of the settings that the sweeper chose
Search = Callable[[Space, MakePoint], None]


class SweeperError(Exception):
    """A sweeper that failed; the message is its own."""


class _PointError(Exception):
    """Raised where a sweeper asks for the objective of a point that failed."""


class _Failed(JobReturn):
    """A point without an objective: Hydra's own would print a line of its own."""

    @property
    def return_value(self) -> Any:
        """Raise the point's error."""
        raise _PointError

    @return_value.setter
    def return_value(self, value: Any) -> None:
        del value


class PointLauncher(Launcher):
    """Hands the points that a sweeper requests to the launcher."""

    def __init__(self, run: Callable[[Sequence[Sequence[str]]], Sequence[JobReturn]]) -> None:
        self._run = run

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Do nothing: a point is a process of its own."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run a batch of points. Their numbers are those of the sweep's folder, not Hydra's."""
        return self._run(job_overrides)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of a command line for us, and those for Hydra's sweeper."""
    of_sweeper = [text for text in arguments if _OF_SWEEPER.match(text)]
    return [text for text in arguments if text not in of_sweeper], of_sweeper


def run_sweeper(
    arguments: Sequence[str],
    config_dirs: Sequence[str],
    run: Run,
    search: Search,
    results: Callable[[], Path],
) -> None:
    """Have Hydra's sweeper ask for points until it has enough, or search a space by Optuna.

    Args:
        arguments: the command line: settings, options, and those of `hydra/sweeper`.
        config_dirs: the values of `--config-dir`.
        run: runs a batch of points.
        search: searches a space, given the function that makes its points.
        results: returns the folder for what the sweeper itself writes.

    Raises:
        ConfigError: the command line is wrong.
        SweeperError: the sweeper failed.
        Exception: whatever `run` and `search` raise.
    """
    ours, of_sweeper = split_arguments(arguments)
    folders = search_folders(config_dirs)
    with searching(folders) as loader, tempfile.TemporaryDirectory() as scratch:
        overrides = parse(ours, loader)
        node, sources = _sweeper_settings(of_sweeper, overrides, folders, loader, Path(scratch))
        learns, number = _is_learning(node), _points_in_all(node)
        swept = [one for one in overrides if one.is_sweep_override()]
        if node.hydra.sweeper["_target_"] == OPTUNA:
            try:
                space = read_space(node.hydra.sweeper, swept, loader)
            except ConfigError as error:
                keys = [each for key in error.keys for each in (key, f"{SWEPT}.{key}")]
                places = [*(_place_of(sources, key) for key in keys), COMMAND_LINE]
                raise error.located(next(filter(None, places)) if keys else "") from None
            return search(space, lambda job: Asked(tuple(job), _point(overrides, job)))
        if not learns:
            _refuse_unlisted(swept)
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
            shutil.copy(file, results() / file.name)  # its results, without Hydra's own settings


def _point(overrides: Sequence[Override], job: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a point, with swept settings in their original places."""
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
    # A point's settings are checked by the schema, not by the files that hold some of them.
    sweeper.validate_batch_is_legal = lambda batch: None  # type: ignore[method-assign]
    return sweeper


@contextmanager
def _plugged(launcher: PointLauncher) -> Iterator[None]:
    """Make Hydra hand `launcher` to sweepers.

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


def _sweeper_settings(
    of_sweeper: Sequence[str],
    overrides: Sequence[Override],
    folders: Sequence[Path],
    loader: ConfigLoader,
    scratch: Path,
) -> tuple[DictConfig, list[Source]]:
    """Return Hydra's own settings, as the command line and users' files have them, and the files.

    Args:
        of_sweeper: the sweeper's part of the command line.
        overrides: the rest of it.
        folders: the folders of settings.
        loader: Hydra's loader, which searches them.
        scratch: a folder for the sweeper's files.

    Raises:
        ConfigError: they are wrong.
    """
    said = [text.lstrip("+") for text in of_sweeper]
    known = sorted(loader.get_group_options(SWEEPER_GROUP))
    for text in said:
        group, _, option = text.partition("=")
        if group == SWEEPER_GROUP and option.strip() not in known:
            raise no_option(group, option.strip(), known, COMMAND_LINE)
    fixed = [one for one in overrides if not one.is_sweep_override()]
    words = all_for_hydra(fixed, folders)
    sources = _sources([*words, *of_sweeper], fixed, folders, loader)
    in_files = frozenset(
        group or key
        for source in sources
        for key, group, _ in scalars(source)
        if is_of_sweeper(key, group)
    )
    ours = setting_word("hydra.sweep.dir", str(scratch))
    try:
        # Files are merged only if they set something of the sweeper.
        primary, words = (PRIMARY, words) if in_files else (None, [])
        node = loader.load_configuration(primary, [ours, *words, *of_sweeper], RunMode.MULTIRUN)
    except (HydraException, OmegaConfBaseException) as error:
        said_of = _FULL_KEY.search(str(error))
        problem = str(error).partition("\n    full_key")[0].rpartition("composing config:\n")[2]
        where = (said_of and _place_of(sources, said_of[1])) or COMMAND_LINE
        raise ConfigError(f"Hydra's sweeper: {' '.join(problem.split())}", where=where) from None
    sweeper = node.hydra.sweeper
    if not isinstance(OmegaConf.select(node, f"{SWEEPER}._target_"), str):
        raise ConfigError(
            f"{SWEEPER} names no class of a sweeper (_target_)",
            f"Choose {SWEEPER_GROUP}=basic, or an installed one.",
            where=COMMAND_LINE,
        )
    _fill_in(sweeper, said, in_files, _values(fixed, node))
    _settle_params(sweeper, overrides, sources, loader, _is_learning(node))
    return node, sources


def _is_learning(node: DictConfig) -> bool:
    """Return whether the sweeper's next points depend on earlier results."""
    return not node.hydra.sweeper["_target_"].endswith(".BasicSweeper")


def _points_in_all(node: DictConfig) -> int | None:
    """Return the number of points that an adaptive sweeper will ask for, if it is configured."""
    names = ("budget", "max_trials")  # Nevergrad, Ax
    found = (OmegaConf.select(node, f"{SWEEPER}.{name}") for name in names)
    return next((count for count in found if isinstance(count, int)), None)


def _sources(
    words: Sequence[str], fixed: Sequence[Override], folders: Sequence[Path], loader: ConfigLoader
) -> list[Source]:
    """Return the users' files that will be merged.

    Raises:
        ConfigError: a file that one of them chooses does not exist, or a file may run code.
    """
    if len(folders) == 1:
        return []
    try:
        defaults = loader.compute_defaults_list(PRIMARY, list(words), RunMode.MULTIRUN).defaults
        found = [source for source in sources_of(defaults, folders) if not source.is_own]
    except ConfigError:
        raise
    except Exception as error:
        raise translated(error, fixed, folders) from None
    allowed = any(one.key_or_group == "allow_commands" and one.value() is True for one in fixed)
    for source in found:
        refuse_useless(source, allowed)
    return found


def _place_of(sources: Sequence[Source], key: str) -> str:
    """Return the place in the files of a setting of the sweeper; "" if there is none."""
    for source in reversed(sources):
        for found, group, node in scalars(source):
            if key in (found, group):
                return source.place(node)
    return ""


def _values(fixed: Sequence[Override], node: DictConfig) -> Mapping[str, Any]:
    """Return the settings that the sampler and its direction follow from."""
    found = {one.key_or_group: one.value() for one in fixed}
    for key in ("run.seed", "sweep.jobs", "sweep.objective"):
        value = OmegaConf.select(node, key, throw_on_resolution_failure=False)
        if value is not None:
            found.setdefault(key, value)
    return found


def _fill_in(
    sweeper: DictConfig, said: Sequence[str], in_files: frozenset[str], ours: Mapping[str, Any]
) -> None:
    """Set the plug-in's options that follow from ours, unless they are set.

    `sweep.jobs` points run at a time; a failed point stops no other; the points are the same each
    time, so that a killed sweep can be resumed.
    """
    if "storage" in sweeper and sweeper.storage is not None:
        raise ConfigError(
            "hydra.sweeper.storage would hold each point twice once the sweep is resumed",
            "Leave it out: sweep.json in the sweep's folder holds its points.",
            where=COMMAND_LINE,
        )
    seed, jobs = ours.get("run.seed", 0), ours.get("sweep.jobs", 1)
    best = "maximize" if ours.get("sweep.objective") in MAXIMIZED else "minimize"
    wanted = {"n_jobs": jobs, "num_workers": jobs, "max_failure_rate": 1.0, "seed": seed}
    for place, prefix in ((sweeper, ""), (sweeper.get("sampler"), "sampler.")):
        options = wanted if prefix else {**wanted, "direction": best}
        for name, value in options.items() if isinstance(place, DictConfig) else ():
            key = f"{SWEEPER}.{prefix}{name}"
            is_set = key in in_files or any(text.startswith(f"{key}=") for text in said)
            if name in place and not is_set:
                with open_dict(place):
                    place[name] = value


def _settle_params(
    sweeper: DictConfig,
    overrides: Sequence[Override],
    sources: Sequence[Source],
    loader: ConfigLoader,
    learns: bool,
) -> None:
    """Drop settings of the command line from `hydra.sweeper.params`; check the rest.

    Raises:
        ConfigError: values cannot be read, or the basic sweeper cannot list them.
    """
    params = sweeper.get("params")
    if not isinstance(params, DictConfig):
        return
    with open_dict(params):
        for one in overrides:
            params.pop(one.get_key_element(), None)
    for name, values in zip(map(str, params), params.values(), strict=True):
        text, where = f"{name}={values}", _place_of(sources, f"{SWEPT}.{name}") or COMMAND_LINE
        try:
            (override,) = parse([text], loader)
        except ConfigError:
            remedy = "Write KEY: VALUES, as after -m."
            raise ConfigError(f"{SWEPT}: {text} cannot be read", remedy, where=where) from None
        if not learns:
            _refuse_unlisted([override], where)


def _refuse_unlisted(swept: Sequence[Override], where: str = COMMAND_LINE) -> None:
    """Raise ConfigError for settings that the basic sweeper cannot list value by value."""
    for override in swept:
        try:
            empty = override.is_sweep_override() and not [*override.sweep_string_iterator()]
        except (HydraException, ValueError):  # a range whose step is 0
            empty = True
        if empty:  # or a glob that nothing matches
            raise ConfigError(
                f"{override.input_line} cannot be listed value by value",
                "Write the values with commas, range(start,stop,step) or choice(a,b).",
                where=where,
                code="wrong_value",
            )
