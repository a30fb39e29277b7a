"""Translate errors of Hydra, OmegaConf and PyYAML into messages for the user."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from launcher.base.files import DamagedError
from launcher.config.bounded import tree_of
from launcher.config.errors import ConfigError, advice
from launcher.config.files import choices, misshapen, unusable
from launcher.config.folders import find_groups
from launcher.config.origin import Source, short
from launcher.config.overrides import COMMAND_LINE

PRIMARY = "config"  # the file that composing begins with

# OSError and UnicodeDecodeError: a settings file that cannot be read, or holds no table.
_HYDRA_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    OSError,
    UnicodeDecodeError,
)


def translated(
    error: BaseException,
    overrides: Sequence[Override],
    folders: Sequence[Path],
    sources: Sequence[Source],
) -> ConfigError:
    """Return the ConfigError that says what `error` means to the user; raises an unknown one.

    `sources`: as many files as were found to take part.
    """
    if "Cannot merge" in str(error) and (found := misshapen(sources)) is not None:
        return found
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error, error.missing_cfg_file, overrides, folders)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return ConfigError(f"{short(Path(mark.name))}:{mark.line + 1} is not YAML: {error.problem}")
    if isinstance(error, HydraException) and not str(error) and error.__cause__ is not None:
        return translated(error.__cause__, overrides, folders, sources)
    if isinstance(error, OmegaConfBaseException):  # its first line says what, the others how typed
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
    chosen = [f"{o.key_or_group}/{o.value()}" for o in overrides if "." not in o.key_or_group]
    if (found := unusable([PRIMARY, *chosen], folders)) is not None:
        return found
    if isinstance(error, RecursionError):
        return ConfigError(
            "The files that were chosen choose one another in a circle",
            "In its defaults a file may name another one of its group (- mine), not itself.",
        )
    if not isinstance(error, _HYDRA_ERRORS):
        raise error
    return ConfigError(f"The settings cannot be composed: {' '.join(str(error).split())}")


def _missing_group(file: str, group: str, folders: Sequence[Path]) -> ConfigError:
    """Return the error for a file whose defaults list overrides a group that there is not."""
    path = next((f / f"{file}.yaml" for f in folders if (f / f"{file}.yaml").is_file()), Path(file))
    return ConfigError(
        f"There is no group {group} for 'override /{group}' to choose from",
        advice(group, list(find_groups(folders)), "Groups"),
        where=f"in {short(path)}",
    )


def _missing_option(
    error: MissingConfigException,
    wanted: str,
    overrides: Sequence[Override],
    folders: Sequence[Path],
) -> ConfigError:
    group, _, option = wanted.rpartition("/")
    if any(override.key_or_group == group for override in overrides):
        where = COMMAND_LINE
    else:
        # Hydra names the file with the defaults list, not the one that overrides it.
        files = (file for folder in folders for file in sorted(folder.rglob("*.yaml")))
        where = next((f"in {short(file)}" for file in files if _chooses(file, group, option)), "")
    options = list(error.options or ())
    if not options:
        return ConfigError(f"There is no {wanted}.yaml", where=where)
    return ConfigError(
        f"There is no {group}={option}", advice(option, options, f"Options of {group}"), where=where
    )


def _chooses(file: Path, group: str, option: str) -> bool:
    """Return whether the file's defaults list has `group: option` or `override /group: option`."""
    try:
        content = tree_of(file)
    except (yaml.YAMLError, OSError, DamagedError):
        return False
    return choices(content).get(group) == option
