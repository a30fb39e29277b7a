"""Sweeps by Hydra's own sweeper, which lists all points, and by Optuna.

A point is the command line with the swept settings replaced; the rest of it stays as typed. For
Optuna, the settings of the search are read here (`Space`). A file may describe a sweep, too:

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
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from launcher.config.compose import PRIMARY, Asked, no_option, sources_of, translated
from launcher.config.errors import ConfigError
from launcher.config.folders import search_folders
from launcher.config.hydra_compat import BasicSweeper, searching
from launcher.config.overrides import COMMAND_LINE, all_for_hydra, parse
from launcher.config.search import OPTUNA, Space, read_space, refuse_unknown, typed
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

MakePoint = Callable[[Sequence[str]], Asked]  # of the settings that the sweeper chose


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of a command line for us, and those for Hydra's sweeper."""
    of_sweeper = [text for text in arguments if _OF_SWEEPER.match(text)]
    return [text for text in arguments if text not in of_sweeper], of_sweeper


def run_sweeper(
    arguments: Sequence[str],
    config_dirs: Sequence[str],
    run: Callable[[Sequence[Asked]], int],
    search: Callable[[Space, MakePoint], int],
) -> int:
    """Run the points of a command line, or search by Optuna; return the exit code.

    Args:
        arguments: the command line: settings, options, and those of `hydra/sweeper`.
        config_dirs: the values of `--config-dir`.
        run: runs all points that Hydra's own sweeper lists.
        search: searches a space, given the function that makes its points.

    Raises:
        ConfigError: the command line is wrong.
        Exception: whatever `run` and `search` raise.
    """
    ours, of_sweeper = split_arguments(arguments)
    folders = search_folders(config_dirs)
    with searching(folders) as loader:
        overrides = parse(ours, loader)
        node, sources = _sweeper_settings(of_sweeper, overrides, folders, loader)
        try:
            swept = _swept(node, overrides, loader)
            if node.get("_target_") == OPTUNA:
                found: Space | list[list[str]] = read_space(node, swept)
            else:
                found = _list(node, swept)
        except ConfigError as error:
            where = _place(error.keys[0], overrides, sources) if error.keys else ""
            raise error.located(where) from None

        def point(job: Sequence[str]) -> Asked:
            return Asked(tuple(job), _point(overrides, job))

        return search(found, point) if isinstance(found, Space) else run([*map(point, found)])


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


def _sweeper_settings(
    of_sweeper: Sequence[str],
    overrides: Sequence[Override],
    folders: Sequence[Path],
    loader: ConfigLoader,
) -> tuple[DictConfig, list[Source]]:
    """Return `hydra.sweeper`, as the command line and users' files have it, and the files.

    Args:
        of_sweeper: the sweeper's part of the command line.
        overrides: the rest of it.
        folders: the folders of settings.
        loader: Hydra's loader, which searches them.

    Raises:
        ConfigError: they are wrong.
    """
    chosen = []
    for text in of_sweeper:
        word = text.lstrip("+")
        name, _, option = word.partition("=")
        is_group = name.startswith(SWEEPER_GROUP)
        if is_group and option not in (known := sorted(loader.get_group_options(name))):
            raise no_option(name, option, known, COMMAND_LINE)
        chosen.append(word if is_group else f"++{word}")  # what does not exist is refused by name
    fixed = [one for one in overrides if not one.is_sweep_override()]
    words = all_for_hydra(fixed, folders)
    sources = _sources([*words, *chosen], fixed, folders, loader)
    is_in_files = any(
        is_of_sweeper(key, group) for source in sources for key, group, _ in scalars(source)
    )
    # Files are merged only if they set something of the sweeper.
    primary, words = (PRIMARY, words) if is_in_files else (None, [])
    try:
        node = loader.load_configuration(primary, [*words, *chosen], RunMode.MULTIRUN)
    except (AssertionError, HydraException, OmegaConfBaseException) as error:
        said_of = _FULL_KEY.search(str(error))
        problem = str(error).partition("\n    full_key")[0].rpartition("composing config:\n")[2]
        where = (said_of and _place_of(sources, said_of[1])) or COMMAND_LINE
        raise ConfigError(f"Hydra's sweeper: {' '.join(problem.split())}", where=where) from None
    sweeper: DictConfig = node.hydra.sweeper
    return sweeper, sources


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
            if f"{found}.".startswith(f"{key}.") or group == key:
                return source.place(node)
    return ""


def _place(key: str, overrides: Sequence[Override], sources: Sequence[Source]) -> str:
    """Return the place of a swept setting, or of one of the sweeper."""
    is_typed = any(one.get_key_element() == key for one in overrides)
    in_files = key if key.startswith(f"{SWEEPER}.") else f"{SWEPT}.{key}"
    return ("" if is_typed else _place_of(sources, in_files)) or COMMAND_LINE


def _swept(
    sweeper: DictConfig, overrides: Sequence[Override], loader: ConfigLoader
) -> list[Override]:
    """Return what is swept: `hydra.sweeper.params` that the command line lacks, and its own.

    Raises:
        ConfigError: values cannot be read.
    """
    tables = [sweeper.get(name) or {} for name in ("params", "search_space")]
    if not all(isinstance(each, dict | DictConfig) for each in tables):
        raise ConfigError(f"{SWEPT} is not a table", "Write KEY: VALUES, as after -m.", [SWEPT])
    texts = tables[0] or {name: typed(name, said) for name, said in tables[1].items()}
    said = {one.get_key_element() for one in overrides}
    found = []
    for name in [name for name in texts if name not in said]:
        text = f"{name}={texts[name]}"
        try:
            found += parse([text], loader)
        except ConfigError:
            remedy = "Write KEY: VALUES, as after -m."
            problem = f"{SWEPT}: {text} cannot be read"
            raise ConfigError(problem, remedy, [f"{SWEPT}.{name}"]) from None
    return [*found, *(one for one in overrides if one.is_sweep_override())]


def _list(sweeper: DictConfig, swept: Sequence[Override]) -> list[list[str]]:
    """Return all points of a sweep by Hydra's own sweeper, as lists of `key=value`.

    Raises:
        ConfigError: it is another sweeper, or values cannot be listed one by one.
    """
    target = sweeper.get("_target_")
    if not str(target).endswith(f".{BasicSweeper.__name__}"):
        raise ConfigError(
            f"{SWEEPER}._target_ is {target}, and tested sweepers are Hydra's own and Optuna's",
            f"Choose {SWEEPER_GROUP}=basic or {OPTUNA}.",
            [f"{SWEEPER}._target_"],
        )
    refuse_unknown(sweeper, ("_target_", "max_batch_size", "params"))
    if sweeper.max_batch_size is not None:
        raise ConfigError(
            f"{SWEEPER}.max_batch_size has no effect here",
            "Say how many runs go at a time by sweep.jobs, on Slurm by cluster.slurm.array.",
            [f"{SWEEPER}.max_batch_size"],
        )
    for override in swept:
        try:
            empty = override.is_sweep_override() and not [*override.sweep_string_iterator()]
        except (HydraException, ValueError):  # a range whose step is 0
            empty = True
        if empty:  # or a glob that nothing matches
            raise ConfigError(
                f"{override.input_line} cannot be listed value by value",
                "Write the values with commas, range(start,stop,step) or choice(a,b).",
                [override.get_key_element()],
                code="wrong_value",
            )
    [points] = BasicSweeper.split_arguments([*swept], None)
    return points
