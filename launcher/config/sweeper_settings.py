"""The settings of Hydra's sweeper: its own defaults, users' files, ours, and the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from launcher.base.libraries import installing
from launcher.config.compose import NO_OTHER_FOLDERS, sources_of
from launcher.config.errors import ConfigError, advice
from launcher.config.files import refuse_useless, scalars
from launcher.config.folders import find_groups
from launcher.config.origin import Source, short
from launcher.config.overrides import COMMAND_LINE, for_hydra, parse, quoted
from launcher.config.schema import MAXIMIZED
from launcher.config.sweep_files import GROUP, PARAMS, SECTION, is_of_sweeper
from launcher.config.translate import PRIMARY

_FULL_KEY = re.compile(r"full_key: (\S+)")


def sweeper_settings(
    of_sweeper: Sequence[str],
    overrides: Sequence[Override],
    folders: Sequence[Path],
    loader: ConfigLoader,
    scratch: Path,
) -> DictConfig:
    """Return Hydra's own settings, as the command line and users' files have them.

    Args:
        of_sweeper: what the command line says of the sweeper.
        overrides: what else it says.
        folders: the folders of settings.
        loader: Hydra's loader, which searches them.
        scratch: a folder for what the sweeper writes.

    Raises:
        ConfigError: they are wrong.
    """
    said = [text.lstrip("+") for text in of_sweeper]
    _refuse_missing(
        {t.partition("=")[2].strip() for t in said if t.startswith(f"{GROUP}=")}, loader
    )
    fixed = [one for one in overrides if not one.is_sweep_override()]
    groups, own = find_groups(folders), find_groups(folders[-1:])
    words = [*(for_hydra(one, groups, own) for one in fixed), NO_OTHER_FOLDERS]
    sources = _sources([*words, *of_sweeper], of_sweeper, fixed, folders, loader)
    in_files = frozenset(_said_in(sources))
    ours = f"hydra.sweep.dir={quoted(str(scratch))}"
    try:
        # Only where files say something of the sweeper do they have to be merged for it.
        primary, words = (PRIMARY, words) if in_files else (None, [])
        node = loader.load_configuration(primary, [ours, *words, *of_sweeper], RunMode.MULTIRUN)
    except (HydraException, OmegaConfBaseException) as error:
        said_of = _FULL_KEY.search(str(error))
        problem = str(error).partition("\n    full_key")[0].rpartition("composing config:\n")[2]
        where = (said_of and _place_of(sources, said_of[1])) or COMMAND_LINE
        raise ConfigError(f"Hydra's sweeper: {' '.join(problem.split())}", where=where) from None
    sweeper = node.hydra.sweeper
    if not isinstance(OmegaConf.select(node, f"{SECTION}._target_"), str):
        raise ConfigError(
            f"{SECTION} names no class of a sweeper (_target_)",
            f"Choose {GROUP}=basic, or an installed one.",
            where=COMMAND_LINE,
        )
    _fill_in(sweeper, said, in_files, _values(fixed, node))
    _settle_params(sweeper, overrides, sources, loader)
    return node


def is_learning(node: DictConfig) -> bool:
    """Return whether the sweeper's next points depend on what came of those before."""
    return not node.hydra.sweeper._target_.endswith(".BasicSweeper")


def points_in_all(node: DictConfig) -> int | None:
    """Return how many points a sweeper that learns will ask for, where it says so."""
    for name in ("n_trials", "budget", "max_trials"):  # Optuna, Nevergrad, Ax
        if isinstance(found := OmegaConf.select(node, f"{SECTION}.{name}"), int):
            return found
    return None


def _refuse_missing(options: set[str], loader: ConfigLoader, where: str = COMMAND_LINE) -> None:
    """Raise ConfigError for a sweeper that is not installed."""
    known = sorted(loader.get_group_options(GROUP))
    for option in options - set(known):
        how = f"Install it with: {installing('hydra_plugins.hydra_optuna_sweeper')}."
        raise ConfigError(
            f"There is no {GROUP}={option}",
            how if option == "optuna" else advice(option, known, "Installed are"),
            where=where,
        )


def _sources(
    words: Sequence[str],
    of_sweeper: Sequence[str],
    fixed: Sequence[Override],
    folders: Sequence[Path],
    loader: ConfigLoader,
) -> list[Source]:
    """Return the users' files that take part.

    Where something else is wrong, which is the points' to say, these are the sweeper's alone.

    Raises:
        ConfigError: the sweeper that a file chooses is not there, or the file may run code.
    """
    if len(folders) == 1:
        return []
    try:
        found = _users_files(PRIMARY, words, folders, loader)
    except MissingConfigException as error:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        if group == GROUP:
            _refuse_missing({option}, loader, "in a file of settings")
        found = _users_files(None, of_sweeper, folders, loader)
    except ConfigError:
        raise
    except Exception:
        found = _users_files(None, of_sweeper, folders, loader)
    allowed = any(one.key_or_group == "allow_commands" and one.value() is True for one in fixed)
    for source in found:
        refuse_useless(source, allowed)
    return found


def _users_files(
    primary: str | None, words: Sequence[str], folders: Sequence[Path], loader: ConfigLoader
) -> list[Source]:
    defaults = loader.compute_defaults_list(primary, list(words), RunMode.MULTIRUN).defaults
    return [source for source in sources_of(defaults, folders) if not source.is_own]


def _said_in(sources: Sequence[Source]) -> Iterator[str]:
    """Yield what users' files say of the sweeper: settings by their keys, and groups."""
    for source in sources:
        if not source.is_own:
            for key, group, _ in scalars(source):
                if is_of_sweeper(key, group):
                    yield group or key


def _place_of(sources: Sequence[Source], key: str) -> str:
    """Return in words where a file says a setting of the sweeper; "" if none does."""
    for source in reversed(sources):
        for found, group, node in scalars(source):
            if key in (found, group):
                return f"in {short(source.path)}:{node.start_mark.line + 1}"
    return ""


def _values(fixed: Sequence[Override], node: DictConfig) -> Mapping[str, Any]:
    """Return what the sweep's sampler and its direction follow from, where it is said."""
    found = {one.key_or_group: one.value() for one in fixed}
    for key in ("run.seed", "sweep.jobs", "sweep.objective"):
        value = OmegaConf.select(node, key, throw_on_resolution_failure=False)
        if key not in found and value is not None:
            found[key] = value
    return found


def _fill_in(
    sweeper: DictConfig, said: Sequence[str], in_files: frozenset[str], ours: Mapping[str, Any]
) -> None:
    """Set what the launcher knows better than the plug-in, unless somebody says it.

    As many points at a time as `sweep.jobs`; a point that fails stops no other; and the same
    points each time, so that a sweep can go on after it was killed.
    """
    if "storage" in sweeper and sweeper.storage is not None:
        raise ConfigError(
            "hydra.sweeper.storage would hold each point twice once the sweep goes on",
            "Leave it out: sweep.json in the sweep's folder holds its points.",
            where=COMMAND_LINE,
        )
    seed = ours.get("run.seed", 0)
    jobs = ours.get("sweep.jobs", 1)
    wanted = {"n_jobs": jobs, "num_workers": jobs, "max_failure_rate": 1.0, "seed": seed}
    for place, prefix in ((sweeper, ""), (sweeper.get("sampler"), "sampler.")):
        for name, value in wanted.items() if isinstance(place, DictConfig) else ():
            key = f"{SECTION}.{prefix}{name}"
            is_said = key in in_files or any(text.startswith(f"{key}=") for text in said)
            if name in place and not is_said:
                with open_dict(place):
                    place[name] = value
    objective = str(ours.get("sweep.objective", ""))
    is_said = f"{SECTION}.direction" in in_files or any("direction=" in text for text in said)
    if "direction" in sweeper and not is_said:
        sweeper.direction = "maximize" if objective in MAXIMIZED else "minimize"


def _settle_params(
    sweeper: DictConfig,
    overrides: Sequence[Override],
    sources: Sequence[Source],
    loader: ConfigLoader,
) -> None:
    """Leave out of `hydra.sweeper.params` what the command line says; check the rest.

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
        text, where = f"{name}={values}", _place_of(sources, f"{PARAMS}.{name}") or COMMAND_LINE
        try:
            (override,) = parse([text], loader)
        except ConfigError:
            problem, remedy = f"{text} cannot be read", "Write KEY: VALUES, as after -m."
            raise ConfigError(f"{PARAMS}: {problem}", remedy, where=where) from None
        if not is_learning(OmegaConf.create({"hydra": {"sweeper": sweeper}})):
            refuse_unlisted([override], where)


def refuse_unlisted(swept: Sequence[Override], where: str = COMMAND_LINE) -> None:
    """Raise ConfigError for what the basic sweeper cannot list value by value."""
    for override in swept:
        try:
            if override.is_sweep_override():
                list(override.sweep_string_iterator())
        except HydraException:
            raise ConfigError(
                f"{override.input_line} cannot be listed value by value",
                "Write the values with commas, range(start,stop,step) or choice(a,b).",
                where=where,
            ) from None
