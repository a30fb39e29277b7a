"""Read the command line by Hydra's override grammar, once and strictly.

Hydra tells apart settings that some YAML file holds (`key=`) and settings that none holds
(`+key=`). Here the schema decides what exists, so each value override becomes a `++key=`, and a
key that the schema lacks is refused afterwards however it was written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from launcher.base import setting_word, to_type
from launcher.config.errors import ConfigError, shown
from launcher.config.folders import PARTS, find_groups
from launcher.config.reader import text_keys

COMMAND_LINE = "on the command line"
# A user's `config.yaml` may name packages to Hydra as further folders; Hydra imports them before
# the file has been checked. This override comes first.
NO_OTHER_FOLDERS = "hydra.searchpath=[]"
_LONGEST = 1000  # characters of an argument that a message repeats


def parse(texts: Sequence[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Parse each `group=option`, `key=value`, `+key=value`, `++key=value` and `~key`.

    Args:
        texts: the arguments as the shell handed them over.
        loader: Hydra's config loader, which sweeps over `glob(…)` ask for the options of a group.
    """
    parser = OverridesParser.create(config_loader=loader)
    return [_parse_one(parser, text) for text in texts]


def _parse_one(parser: OverridesParser, text: str) -> Override:
    try:
        override = parser.parse_overrides([text])[0]
    except (OverrideParseException, ValueError, RecursionError):  # these of thousands of signs
        key, equals, value = text.partition("=")
        if len(text) > _LONGEST:
            remedy = "Write what is as long as that in a file of settings."
        elif equals:
            inner = value.strip()
            is_list = inner[:1] == "[" and inner[-1:] == "]"
            items = [item.strip() for item in inner[1:-1].split(",")]
            quoted = to_type((key, items if is_list else value))
            remedy = f"Quote special characters, for example {quoted}"
        else:
            remedy = "Settings are written key=value, for example train.steps=100."
        problem = f"{shown(text)} cannot be read as key=value"
        raise ConfigError(problem, remedy, where=COMMAND_LINE, code="command_line") from None
    _refuse_useless(override, text)
    return override


def _refuse_useless(override: Override, text: str) -> None:
    """Refuse overrides of Hydra's grammar that would have no effect here."""
    if not override.key_or_group:
        problem, remedy = f"{text!r} has no name before its =", "Write key=value."
    elif override.key_or_group.split(".")[0].split("/")[0] == "hydra":
        problem = f"{override.key_or_group} is Hydra's own setting, which has no effect here"
        remedy = "Runs are placed by run.dir and run.id; sweeps are asked for with -m."
    elif override.is_delete():
        problem = f"{text} takes away a setting, but each has a value"
        remedy = "Set it instead, to null where it may be."
    elif override.package is not None:
        problem = f"{text} puts a group into another section than its own"
        remedy = f"Write {override.key_or_group}=OPTION."
    elif _has_leading_zero(override):
        problem = f"{text} has a 0 in front of a number"
        remedy = "Write numbers with decimal digits; text goes in quotes."
    else:
        return
    raise ConfigError(problem, remedy, where=COMMAND_LINE, code="command_line")


def _has_leading_zero(override: Override) -> bool:
    """Return whether a number has a leading 0, which YAML reads in base 8 and Hydra in base 10.

    Text stays as typed.
    """
    key, value = override.key_or_group, (override.input_line or "").partition("=")[2].strip()
    return "." in key and key not in text_keys() and bool(re.fullmatch(r"[+-]?0[0-9_]+", value))


def all_for_hydra(overrides: Sequence[Override], folders: Sequence[Path]) -> list[str]:
    """Return the command line as Hydra is to see it, which looks into no other folder."""
    groups, own = find_groups(folders), find_groups(folders[-1:])
    return [*(_for_hydra(override, groups, own) for override in overrides), NO_OTHER_FOLDERS]


def _for_hydra(
    override: Override, groups: Mapping[str, Sequence[str]], own_groups: Collection[str]
) -> str:
    """Return the override as Hydra is to see it: options chosen, values forced in.

    An unquoted word for an option or a text setting is taken as typed: `run.id=1e3` means "1e3",
    not 1000.0. `+recipe=x` is `recipe=x`, because the defaults list has each of `own_groups`;
    a further group of the user's stays as written.
    """
    key, value = override.key_or_group, (override.input_line or "").partition("=")[2].strip()
    if key in PARTS:
        raise ConfigError(
            f"{key}={value} is not an option by itself: files of the group {PARTS[key]} use it",
            f"Name it there: defaults: [/{key}@_here_: {value}, _self_].",
            where=COMMAND_LINE,
        )
    said = override.value()
    is_scalar = isinstance(said, bool | int | float)
    if key not in groups or isinstance(said, dict):
        is_text = is_scalar and key in text_keys()
        return setting_word(f"++{key}", value) if is_text else f"++{key}={value}"
    if isinstance(said, list) or ".." in value or value.lstrip("'\"").startswith("/"):
        raise ConfigError(
            f"{key}={value} is not the name of one option",
            f"{key} has: {', '.join(groups[key])}.",
            [key],
            where=COMMAND_LINE,
            code="unknown_option",
        )
    name = key if key in own_groups else override.get_key_element()
    return setting_word(name, value) if is_scalar or said is None else f"{name}={value}"


def refuse_sweeps(overrides: Sequence[Override]) -> None:
    """Raise ConfigError for several values of one setting in a single run."""
    for override in overrides:
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line} gives several values to one run",
                f"Add -m to run each of them, or write {override.key_or_group}=[…] for a list.",
                where=COMMAND_LINE,
                code="command_line",
            )
