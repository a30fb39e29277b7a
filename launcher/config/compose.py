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
from typing import Any, cast

import yaml
from hydra import compose
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from launcher.config.build import build
from launcher.config.checks import check
from launcher.config.errors import ConfigError
from launcher.config.files import refuse_useless
from launcher.config.folders import find_groups, search_folders
from launcher.config.origin import Origin, Source, short
from launcher.config.overrides import COMMAND_LINE, for_hydra, parse, refuse_sweeps, sweep_points
from launcher.config.schema import GPT, Config
from launcher.config.search_path import searching
from launcher.config.sizes import fill_size
from launcher.config.translate import translated

_PRIMARY = "config"


@dataclass(frozen=True)
class Point:
    """One run of a sweep: what the command line says for it, and the configuration it yields."""

    overrides: tuple[str, ...]
    config: Config


def load(argv_overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> Config:
    """The configuration of one run.

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


def load_points(argv_overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[Point]:
    """Every run of a sweep, all of them checked. Arguments and errors are those of `load`."""
    folders = search_folders(config_dirs)
    with searching(folders) as loader:
        points = sweep_points(parse(argv_overrides, loader))
    return [Point(point, _load(parse(point), folders)) for point in points]


def load_frozen(path: Path, argv_overrides: Sequence[str] = ()) -> Config:
    """The settings that a run's `config.yaml` holds, resolved.

    Only `allow_modules` does not come from there but from `argv_overrides`, which hold nothing
    else. Raises ConfigError.
    """
    overrides = parse(argv_overrides)
    if any(override.key_or_group != "allow_modules" for override in overrides):
        raise ConfigError(
            "--frozen takes all settings from its file",
            "Leave out the others, but for allow_modules=[…].",
        )
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--frozen {path} cannot be read: {' '.join(str(error).split())}",
            "Name the config.yaml of a run.",
        ) from None
    try:
        if isinstance(tree, dict):
            tree["allow_modules"] = _allowed(overrides)
        return from_dict(tree)
    except ConfigError as error:
        where = COMMAND_LINE if error.keys == ("allow_modules",) else f"in {short(path)}"
        raise error.said(where) from None
    except RecursionError:
        raise ConfigError(
            f"--frozen {path} has an anchor inside what it stands for, which has no end",
            "Write out what is meant.",
        ) from None


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as a plain tree that YAML and JSON can hold."""
    return dataclasses.asdict(config)


def redacted(config: Config) -> dict[str, Any]:
    """`to_dict` for where others may read it: of `cluster.slurm.env`, where keys and tokens are
    handed to a job, only the names."""
    tree = to_dict(config)
    slurm = tree["cluster"]["slurm"]
    slurm["env"] = dict.fromkeys(slurm["env"], "***")
    return tree


def from_dict(tree: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`, as strict as `load`."""
    config = build(Config, tree)
    if isinstance(config.model, GPT):
        config = dataclasses.replace(config, model=fill_size(config.model))
    check(config)
    return config


def _load(overrides: Sequence[Override], folders: Sequence[Path]) -> Config:
    groups = find_groups(folders)
    said = [for_hydra(override, groups, find_groups(folders[-1:])) for override in overrides]
    sources: list[Source] = []
    try:
        with searching(folders) as loader:
            defaults = loader.compute_defaults_list(_PRIMARY, said, RunMode.RUN).defaults
            sources += _sources(defaults, folders)
            for source in sources:
                if not source.path.is_relative_to(folders[-1]):
                    refuse_useless(source)
            tree = cast(
                dict[str, Any], OmegaConf.to_container(compose(_PRIMARY, said), resolve=True)
            )
        _refuse_misplaced(tree, groups, sources)
        tree["allow_modules"] = _allowed(overrides)
        return from_dict(tree)
    except ConfigError as raised:
        error = raised
    except Exception as raised:  # of a file that is no settings Hydra says so by an assertion, too
        error = translated(raised, overrides, folders, sources)
    raise error.said(Origin(sources, overrides, groups).of(error.keys)) from None


def _allowed(overrides: Sequence[Override]) -> Any:
    """`allow_modules` as the command line has it: however a file says it, it does not count."""
    said = [override for override in overrides if override.key_or_group == "allow_modules"]
    return said[-1].value() if said else []


def _sources(defaults: Iterable[ResultDefault], folders: Sequence[Path]) -> Iterator[Source]:
    """The files that Hydra's defaults list stands for; not Hydra's own, which lie elsewhere."""
    for default in defaults:
        files = (folder / f"{default.config_path}.yaml" for folder in folders)
        path = next((file for file in files if file.is_file()), None)
        if path is not None:
            yield Source(path, default.package or "")


def _refuse_misplaced(
    tree: Mapping[Any, Any], groups: Mapping[str, Sequence[str]], sources: Sequence[Source]
) -> None:
    """A recipe without its package line fills a section `recipe`, which sets nothing."""
    names = {field.name for field in dataclasses.fields(Config)}
    for source in sources:
        if source.package in groups and source.package in tree and source.package not in names:
            raise ConfigError(
                f"{short(source.path)} sets {source.package}.*, which is no section",
                "Begin the file with the line '# @package _global_'.",
            )
