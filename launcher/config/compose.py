"""From YAML files and the command line to one checked `Config`. Hydra composes, the schema decides.

`load` serves one run, `load_points` a sweep, `to_dict`/`from_dict` carry a resolved configuration
to disk and to other processes. Neither JAX nor Ray is imported here: a wrong setting is answered
in well under a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.base.files import DamagedError
from launcher.config.bounded import tree_of
from launcher.config.build import build
from launcher.config.check_environment import check_environment, check_sizes
from launcher.config.checks import check
from launcher.config.commands import COMMAND_LINE_ONLY, commands_in, not_allowed
from launcher.config.errors import ConfigError
from launcher.config.fields import Place, key_of
from launcher.config.files import refuse_useless
from launcher.config.folders import find_groups, search_folders
from launcher.config.interpolation import noted, resolved, unresolved
from launcher.config.leftovers import Tree, without_leftovers
from launcher.config.machines import SlurmCluster
from launcher.config.origin import ON_COMMAND_LINE, Origin, Source, short
from launcher.config.overrides import (
    COMMAND_LINE,
    for_hydra,
    parse,
    refuse_sweeps,
)
from launcher.config.replayed import with_runs_settings
from launcher.config.schema import Config
from launcher.config.search_path import composed, searching
from launcher.config.switches import check_switches
from launcher.config.translate import PRIMARY, translated

if TYPE_CHECKING:
    from launcher.config.sweeper import Asked

# A user's `config.yaml` may name packages to Hydra as further folders; Hydra imports them before
# anybody has looked at the file. What is said here comes first.
NO_OTHER_FOLDERS = "hydra.searchpath=[]"
# What Hydra itself would do with a run, by groups of its own: more to read and merge than ours. Its
# sweeper stays, as files may choose one for `-m`.
_NOTHING_OF_HYDRA = tuple(
    f"~hydra/{group}"
    for group in (
        *("env", "help", "hydra_help", "hydra_logging"),
        *("job_logging", "launcher", "output"),
    )
)


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        overrides: what the command line says for it.
        label: what of that sets it apart from the other runs.
        config: the configuration that this makes.
    """

    overrides: tuple[str, ...]
    label: str
    config: Config


def load(argv_overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> Config:
    """Return the configuration of one run.

    Args:
        argv_overrides: `group=option` and `key=value` arguments, in Hydra's grammar.
        config_dirs: the user's own folders of YAML files, searched before the project's.

    Raises:
        ConfigError: anything wrong with a setting, a name, a file or a folder of settings.
    """
    return load_with_origin(argv_overrides, config_dirs)[0]


def load_with_origin(
    argv_overrides: Sequence[str], config_dirs: Sequence[str] = ()
) -> tuple[Config, Origin]:
    """Return `load`, and where each setting was said."""
    folders = search_folders(config_dirs)
    overrides = parse(argv_overrides)
    refuse_sweeps(overrides)
    return _load(overrides, folders)


def load_points(
    asked: Sequence[Asked], config_dirs: Sequence[str] = ()
) -> tuple[list[Point], dict[str, ConfigError]]:
    """Return the runs of a sweep, and by their labels the errors of those that are wrong.

    Args:
        asked: the points that a sweeper asks for.
        config_dirs: as of `load`.

    Raises ConfigError where there are several points, and all are wrong in the same way.
    """
    folders = search_folders(config_dirs)
    made: list[Point] = []
    wrong: dict[str, ConfigError] = {}
    for one in asked:
        try:
            config, _ = _load(parse(one.overrides), folders, in_sweep=True)
            made.append(Point(one.overrides, one.label, config))
        except ConfigError as error:
            wrong[one.label] = error
    if not made and len({str(error) for error in wrong.values()}) == 1:
        raise next(iter(wrong.values()))
    return made, wrong


def load_frozen(path: Path, argv_overrides: Sequence[str] = ()) -> Config:
    """Return the settings that a run's `config.yaml` holds, resolved.

    Only `allow_modules` and `allow_commands` do not come from there but from `argv_overrides`,
    which hold nothing else. Raises ConfigError.
    """
    overrides = parse(argv_overrides)
    if any(override.key_or_group not in COMMAND_LINE_ONLY for override in overrides):
        raise ConfigError(
            "--frozen takes all settings from its file",
            f"Leave out the others, but for {' and '.join(COMMAND_LINE_ONLY)}.",
        )
    try:
        tree = tree_of(path)
    except (OSError, DamagedError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--frozen {path} cannot be read: {' '.join(str(error).split())}",
            "Name the config.yaml of a run.",
        ) from None
    try:
        texts: dict[Place, str] = {}
        if isinstance(tree, dict):
            tree |= _allowed(overrides)
            if "${" in str(tree):
                tree, texts = resolved(OmegaConf.create(tree))
        config = from_dict(tree, texts)
        if not config.allow_commands and (command := next(commands_in(config), None)):
            raise not_allowed(command)
        return config
    except ConfigError as error:
        in_file = not set(error.keys) & set(COMMAND_LINE_ONLY)
        raise error.said(f"in {short(path)}" if in_file else COMMAND_LINE) from None
    except OmegaConfBaseException as error:
        raise translated(error, overrides, (), ()).said(f"in {short(path)}") from None


def to_dict(config: Config) -> dict[str, Any]:
    """Return the resolved configuration as a plain tree that YAML and JSON can hold.

    It is for another process of the run: it holds the values of variables.
    """
    tree = dataclasses.asdict(config)
    del tree["from_environment"]
    fields = dataclasses.fields(config.parallel)
    tree["parallel"] = {key_of(field): tree["parallel"][field.name] for field in fields}
    return tree


def to_written(config: Config) -> dict[str, Any]:
    """Return `to_dict` for a file, which `load_frozen` reads.

    What comes from the environment is the interpolation that asks for it.
    """
    return unresolved(to_dict(config), config.from_environment)


def redacted(config: Config) -> dict[str, Any]:
    """Return `to_written` for where others may read it.

    Of `cluster.slurm.env`, which hands keys and tokens to a job, it has only the names.
    """
    tree = to_written(config)
    if isinstance(config.cluster, SlurmCluster):
        slurm = tree["cluster"]["slurm"]
        slurm["env"] = dict.fromkeys(slurm["env"], "***")
    return tree


def from_dict(tree: Mapping[str, Any], texts: Mapping[Place, str] | None = None) -> Config:
    """Return the configuration of a tree by `to_dict`, as strictly as `load`.

    Args:
        tree: the settings.
        texts: of what comes from the environment, the text that asks for it.
    """
    config = build(Config, tree)
    config = dataclasses.replace(config, model=config.model.filled())
    if texts:
        config = dataclasses.replace(config, from_environment=noted(to_dict(config), texts))
        check_environment(config, texts)
    check(config)
    return config


def _load(
    overrides: Sequence[Override], folders: Sequence[Path], in_sweep: bool = False
) -> tuple[Config, Origin]:
    groups = find_groups(folders)
    said = [for_hydra(override, groups, find_groups(folders[-1:])) for override in overrides]
    said += NO_OTHER_FOLDERS, *_NOTHING_OF_HYDRA
    allowed = _allowed(overrides)
    sources: list[Source] = []

    def look(defaults: Sequence[ResultDefault]) -> None:
        sources.extend(sources_of(defaults, folders))
        for source in sources:
            if not source.is_own:
                refuse_useless(source, allowed["allow_commands"] is True)

    try:
        with searching(folders) as loader:
            tree = cast(Tree, OmegaConf.to_container(composed(loader, PRIMARY, said, look)))
        tree = without_leftovers(tree, sources, overrides, groups)
        tree = with_runs_settings(tree, sources, overrides)
        tree, texts = resolved(OmegaConf.create(tree))
        _refuse_misplaced(tree, groups, sources)
        check_sizes(texts)
        config = from_dict(tree | allowed, texts)
        origin = Origin(sources, overrides, groups)
        for command in () if config.allow_commands else commands_in(config):
            if origin.rank(command) != ON_COMMAND_LINE:
                raise not_allowed(command)
        check_switches(config, origin, in_sweep)
        return config, origin
    except ConfigError as raised:
        error = raised
    except Exception as raised:  # of a file that is no settings Hydra says so by an assertion, too
        error = translated(raised, overrides, folders, sources)
    raise error.said(Origin(sources, overrides, groups).of(error.keys)) from None


def _allowed(overrides: Sequence[Override]) -> dict[str, Any]:
    """Return what the command line allows: what a file says of it does not count."""
    said = {override.key_or_group: override.value() for override in overrides}
    return {name: said.get(name, getattr(Config(), name)) for name in COMMAND_LINE_ONLY}


def sources_of(defaults: Iterable[ResultDefault], folders: Sequence[Path]) -> Iterator[Source]:
    """Yield the files that Hydra's defaults list stands for, without Hydra's own."""
    for default in defaults:
        name = str(default.config_path).removesuffix(".yaml")  # with which Hydra takes it, too
        folder = next((one for one in folders if (one / f"{name}.yaml").is_file()), None)
        if folder is not None:
            yield Source(folder / f"{name}.yaml", default.package or "", folder == folders[-1])
        elif not name.startswith("hydra/"):
            raise ConfigError(f"There is no {name}.yaml among the files of settings")


def _refuse_misplaced(
    tree: Mapping[Any, Any], groups: Mapping[str, Sequence[str]], sources: Sequence[Source]
) -> None:
    """Refuse a recipe without its package line, which fills a section that sets nothing."""
    names = {field.name for field in dataclasses.fields(Config)}
    for source in sources:
        if source.package in groups and source.package in tree and source.package not in names:
            raise ConfigError(
                f"{short(source.path)} sets {source.package}.*, which is not a section",
                "Begin the file with the line '# @package _global_'.",
            )
