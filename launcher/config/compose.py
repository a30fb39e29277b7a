"""Compose YAML files and the command line to one checked `Config` by Hydra.

`load` serves one run, `load_points` a sweep, `to_dict`/`from_dict` carry a resolved configuration
to disk and to other processes. Neither JAX nor Ray is imported here: a wrong setting is refused in
well under a second.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.base import DamagedError
from launcher.base.reading import read_table, read_yaml
from launcher.config.environment import (
    COMMAND_LINE_ONLY,
    below,
    check_environment,
    check_sizes,
    commands_in,
    not_allowed,
    noted,
    resolved,
    unresolved,
)
from launcher.config.errors import ConfigError, Fix, advice, closest
from launcher.config.fields import Place, key_of
from launcher.config.folders import find_groups, search_folders
from launcher.config.hub import with_commits
from launcher.config.hydra_compat import composed, searching
from launcher.config.overrides import COMMAND_LINE, all_for_hydra, parse, refuse_sweeps
from launcher.config.reader import from_dict, setting_keys
from launcher.config.schema import Config
from launcher.config.sources import (
    ON_COMMAND_LINE,
    Origin,
    Source,
    Tree,
    choices,
    refuse_unread,
    refuse_useless,
    short,
    with_runs_settings,
    without_leftovers,
)

PRIMARY = "config"  # the file that composing begins with
# Settings that only files of earlier versions hold.
_DELETED = (("sweep", "resubmit"), ("sweep", "stop_early"))
# Groups of Hydra's own about running a job: more files to read and merge than ours. Its
# sweeper stays, as files may choose one for `-m`.
_NOTHING_OF_HYDRA = tuple(
    f"~hydra/{group}"
    for group in ["env", "help", "hydra_help", "hydra_logging", "job_logging", "launcher", "output"]
)


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        overrides: the command line of the run.
        label: the swept settings.
        config: its configuration.
    """

    overrides: tuple[str, ...]
    label: str
    config: Config


@dataclass(frozen=True)
class Asked:
    """A point that a sweeper asks for.

    Attributes:
        swept: the settings that it chose, as `key=value`.
        overrides: the command line of this point, in its order.
    """

    swept: tuple[str, ...]
    overrides: tuple[str, ...]

    @property
    def label(self) -> str:
        """The swept settings in one line."""
        return " ".join(self.swept) or "the only run"


def load(argv_overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> Config:
    """Return the configuration of one run.

    Args:
        argv_overrides: `group=option` and `key=value` arguments, in Hydra's grammar.
        config_dirs: the user's own folders of YAML files, searched before the project's.

    Raises:
        ConfigError: anything wrong with a setting, a name, a file or a folder of settings.
    """
    folders = search_folders(config_dirs)
    overrides = parse(argv_overrides)
    refuse_sweeps(overrides)
    return _load(overrides, folders)


def load_points(
    asked: Sequence[Asked], config_dirs: Sequence[str] = ()
) -> tuple[list[Point], dict[str, ConfigError]]:
    """Return the runs of a sweep, and the errors of wrong ones by label.

    Args:
        asked: the points that a sweeper asks for.
        config_dirs: as of `load`.

    Raises ConfigError where there are several points, and all are wrong in the same way.
    """
    folders = search_folders(config_dirs)
    points: list[Point] = []
    wrong: dict[str, ConfigError] = {}
    for one in asked:
        try:
            config = _load(parse(one.overrides), folders, in_sweep=True)
            points.append(Point(one.overrides, one.label, config))
        except ConfigError as error:
            wrong[one.label] = error
    if not points and len(set(map(str, wrong.values()))) == 1:
        raise next(iter(wrong.values()))
    return points, wrong


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
        tree = read_yaml(path)
    except (OSError, DamagedError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--frozen {path} cannot be read: {' '.join(str(error).split())}",
            "Name the config.yaml of a run.",
        ) from None
    try:
        texts: dict[Place, str] = {}
        if isinstance(tree, dict):
            tree |= _allowed(overrides)
            for section, name in _DELETED:
                if isinstance(tree.get(section), dict):
                    tree[section].pop(name, None)
            if "${" in str(tree):
                tree, texts = resolved(OmegaConf.create(tree))
        config = _from_files(tree, texts)
        if not config.allow_commands and (command := next(commands_in(config), None)):
            raise not_allowed(command)
        return config
    except ConfigError as error:
        in_file = not set(error.keys) & set(COMMAND_LINE_ONLY)
        raise error.located(f"in {short(path)}" if in_file else COMMAND_LINE) from None
    except (OmegaConfBaseException, RecursionError) as error:
        raise translated(error, overrides, ()).located(f"in {short(path)}") from None


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

    Values from the environment are written as their interpolations.
    """
    return unresolved(to_dict(config), config.from_environment)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that only OmegaConf, which reads users' files, takes for numbers: 12e5."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    [*"-+.0123456789"],
)


def to_yaml(tree: Any) -> str:
    """Return plain data as YAML for a file of settings."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def redacted(config: Config) -> dict[str, Any]:
    """Return `to_written` for a file that others may read.

    Values of `cluster.slurm.env`, such as keys and tokens, are masked.
    """
    tree = to_written(config)
    if slurm := tree["cluster"].get("slurm"):
        slurm["env"] = dict.fromkeys(slurm["env"], "***")
    return tree


def _from_files(tree: Mapping[str, Any], texts: Mapping[Place, str]) -> Config:
    """Return the configuration of a tree, with the interpolations of its environment's values."""
    config = from_dict(tree)
    if texts:
        config = dataclasses.replace(config, from_environment=noted(to_dict(config), texts))
        check_environment(config, texts)
    return config


def _load(overrides: Sequence[Override], folders: Sequence[Path], in_sweep: bool = False) -> Config:
    groups = find_groups(folders)
    said = [*all_for_hydra(overrides, folders), *_NOTHING_OF_HYDRA]
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
        origin = Origin(sources, overrides, groups)
        refuse_unread(tree, origin)
        tree = with_runs_settings(tree, sources, overrides)
        tree, texts = resolved(OmegaConf.create(tree))
        tree = with_commits(tree, texts)
        _refuse_misplaced(tree, groups, sources)
        check_sizes(texts)
        config = _from_files(tree | allowed, texts)
        for command in () if config.allow_commands else commands_in(config):
            if origin.rank(command) != ON_COMMAND_LINE:
                raise not_allowed(command)
        _check_switches(config, origin, in_sweep)
        return config
    except ConfigError as raised:
        error = raised
    except Exception as raised:  # Hydra asserts that a file holds settings
        error = translated(raised, overrides, folders)
    raise error.located(Origin(sources, overrides, groups).of(error.keys)) from None


def _allowed(overrides: Sequence[Override]) -> dict[str, Any]:
    """Return `COMMAND_LINE_ONLY` as the command line sets it; a file's values are ignored."""
    said = {override.key_or_group: override.value() for override in overrides}
    return {name: said.get(name, getattr(Config(), name)) for name in COMMAND_LINE_ONLY}


def sources_of(defaults: Iterable[ResultDefault], folders: Sequence[Path]) -> Iterator[Source]:
    """Yield the files that Hydra's defaults list stands for, without Hydra's own."""
    for default in defaults:
        name = str(default.config_path).removesuffix(".yaml")  # Hydra accepts it, too
        if (path := _file_of(name, folders)) is not None:
            is_own = path == folders[-1] / f"{name}.yaml"
            yield Source(path, default.package or "", is_own)
        elif not name.startswith("hydra/"):
            raise ConfigError(f"There is no {name}.yaml among the files of settings")


def _file_of(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of settings of this name, in the first folder that has one."""
    paths = (folder / f"{name}.yaml" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def _refuse_misplaced(
    tree: Mapping[Any, Any], groups: Mapping[str, Sequence[str]], sources: Sequence[Source]
) -> None:
    """Refuse a recipe without its package line, which fills a section that does not exist."""
    misplaced = (groups.keys() & tree.keys()) - Config.__dataclass_fields__.keys()
    for source in sources:
        if source.package in misplaced:
            raise ConfigError(
                f"{short(source.path)} sets {source.package}.*, which is not a section",
                "Begin the file with the line '# @package _global_'.",
            )


# Settings that only a sweep reads. A file may hold them: it serves single runs, too.
_OF_SWEEPS = ("sweep.objective", "sweep.jobs")


def _check_switches(config: Config, origin: Origin, in_sweep: bool = False) -> None:
    """Raise ConfigError for the first setting that has no effect given another one (`Switch`).

    A setting counts if it is on the command line, or in a user's file with another value than its
    default. A file's setting below the place that turns the switch is passed over: a recipe's
    `eval_batches` is no contradiction to `train.eval_every=0` on the command line.
    """
    for key in () if in_sweep else _OF_SWEEPS:
        if origin.rank(key) == ON_COMMAND_LINE:
            remedy = "Leave it out, or add -m."
            raise ConfigError(f"{key} has no effect: this is one run", remedy, code="no_effect")
    sections = (getattr(config, field.name) for field in dataclasses.fields(config))
    for switch in (s for section in sections for s in getattr(section, "switches", ())):
        if switch.is_on(config):
            continue
        turned = max(origin.rank(key) for key in switch.by)
        for key in (key for key in setting_keys() if below(key, switch.keys)):
            rank = origin.rank(key)
            is_set = rank == ON_COMMAND_LINE or (
                origin.is_users(key) and _value(config, key) not in (None, _default(config, key))
            )
            if is_set and rank >= turned:
                fixes = [] if rank == ON_COMMAND_LINE else _said_again(config, switch.by)
                raise ConfigError(
                    f"{key} has no effect: {switch.off}",
                    f"Leave it out, or {switch.remedy}.",
                    [key],
                    code="no_effect",
                    fixes=fixes,
                )


def _said_again(config: Config, keys: Sequence[str]) -> list[Fix]:
    """Return the changes that say a switch's settings as they are, but on the command line."""
    values = {key: to_yaml(_value(config, key)).partition("\n")[0] for key in keys}
    return [{key: value} for key, value in values.items()]


def _value(config: Config, key: str) -> Any:
    """Return the value of a setting; None if its variant has no such setting."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _default(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    fields = {f.name: f for f in dataclasses.fields(_value(config, section) if section else config)}
    if name not in fields:
        return None
    factory = fields[name].default_factory
    return fields[name].default if factory is dataclasses.MISSING else factory()


# OSError and ValueError: a settings file that cannot be read, or holds no text or no YAML.
_HYDRA_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError)


def translated(
    error: BaseException, overrides: Sequence[Override], folders: Sequence[Path]
) -> ConfigError:
    """Return the ConfigError for an error of Hydra, OmegaConf or PyYAML; raise any other."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error, error.missing_cfg_file, overrides, folders)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        place = f"{short(Path(mark.name))}:{mark.line + 1}"
        return ConfigError(f"{place} is not YAML: {error.problem}", keys=(), code="file")
    if isinstance(error, HydraException) and not str(error) and error.__cause__ is not None:
        return translated(error.__cause__, overrides, folders)
    if isinstance(error, OmegaConfBaseException):  # its first line is the problem
        key = error.full_key or ""
        if lost := re.search(r"Environment variable '(.+?)' not found", str(error)):
            return ConfigError(
                f"{key} asks for the environment variable {lost[1]}, which is not set",
                f"Set it, or say what stands in for it: ${{oc.env:{lost[1]},VALUE}}.",
                [key.partition("[")[0]],
            )
        what = str(error).strip().splitlines()[0]
        return ConfigError(f"{key}: {what}" if key else what, keys=[key.partition("[")[0]])
    if lost := re.search(r"In '(.+)': Could not override '(.+?)'", str(error)):
        return _missing_group(lost[1], lost[2], folders)
    if isinstance(error, RecursionError):
        return ConfigError(
            "The files that were chosen are nested too deeply, or choose one another in a circle",
            "In its defaults a file may name another one of its group (- mine), not itself.",
        )
    if not isinstance(error, _HYDRA_ERRORS):
        raise error
    text = " ".join(str(error).split())
    return ConfigError(f"The settings cannot be composed: {text}", code="file")


def _missing_group(file: str, group: str, folders: Sequence[Path]) -> ConfigError:
    """Return the error for a defaults list that overrides a group that does not exist."""
    return ConfigError(
        f"There is no group {group} for 'override /{group}' to choose from",
        advice(group, list(find_groups(folders)), "Groups"),
        where=f"in {short(_file_of(file, folders) or Path(file))}",
        code="file",
        fixes=(),
    )


def _missing_option(
    error: MissingConfigException,
    wanted: str,
    overrides: Sequence[Override],
    folders: Sequence[Path],
) -> ConfigError:
    group, _, option = wanted.rpartition("/")
    typed_as = ((o.key_or_group, o.get_value_element_as_str()) for o in overrides)
    asked = (key for key, value in typed_as if f"{key}/{value}" == wanted)
    if typed := next(asked, ""):
        group, option, where = typed, wanted.removeprefix(f"{typed}/"), COMMAND_LINE
    else:
        # Hydra names the file with the defaults list, not the one that overrides it.
        files = (file for folder in folders for file in sorted(folder.rglob("*.yaml")))
        choosing = (file for file in files if choices(read_table(file)).get(group) == option)
        where = next((f"in {short(file)}" for file in choosing), "")
    options = list(error.options or ()) or list(find_groups(folders).get(group, ()))
    if not options:
        return ConfigError(f"There is no {wanted}.yaml", where=where, code="unknown_option")
    return no_option(group, option, options, where)


def no_option(group: str, option: str, options: Sequence[str], where: str) -> ConfigError:
    """Return the error for an option that a group does not have, with the nearest one."""
    remedy = advice(option, options, f"Options of {group}")
    near = closest(option, options) or next((o for o in options if o.startswith(option)), None)
    fixes: list[Fix] = [{group: near}] if near else []
    problem = f"There is no {group}={option}"
    return ConfigError(problem, remedy, (), where, code="unknown_option", fixes=fixes)
