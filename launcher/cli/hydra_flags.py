"""Hydra's own flags: `--info`, `--cfg hydra`, `--hydra-help`, and tab completion.

Hydra's code answers, given our folders of settings. Its entry point is not called: it ends with
code 1 for a wrong setting, where a wrong setting ends with 2 here, and composes without the schema.

The scripts for bash, zsh and fish, `completion.*`, are custom: Hydra's know no `python -m`, and in
zsh they call what only bash has. The words come from Hydra, by `-sc query`.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra

from launcher.config.compose import PRIMARY, load
from launcher.config.errors import ConfigError
from launcher.config.folders import search_folders
from launcher.config.hydra_compat import Hydra, get_args_parser, searching
from launcher.config.overrides import all_for_hydra, parse
from launcher.config.sweep import split_arguments

SHELLS = ("bash", "zsh", "fish")


@contextmanager
def _hydra(folders: Sequence[Path]) -> Iterator[Hydra]:
    """Yield Hydra with these folders; restore the logging that it sets up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with searching(folders):
        sys.argv[0] = "launcher"  # Hydra names the program by it, as it is not under `python -m`
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            yield hydra
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)


def _checked(arguments: Sequence[str], config_dirs: Sequence[str]) -> list[str]:
    """Return the command line as Hydra is to see it; raise ConfigError if a setting is wrong."""
    ours, of_sweeper = split_arguments(arguments)
    load(ours, config_dirs)
    return [*all_for_hydra(parse(ours), search_folders(config_dirs)), *of_sweeper]


def print_info(info: str, arguments: Sequence[str], config_dirs: Sequence[str]) -> None:
    """Print what `--info` asks for.

    Raises:
        ConfigError: a setting is wrong.
    """
    said = _checked(arguments, config_dirs)
    with _hydra(search_folders(config_dirs)) as hydra:
        hydra.show_info(info, PRIMARY, said)


def print_hydras_settings(
    arguments: Sequence[str], config_dirs: Sequence[str], package: str | None, resolve: bool
) -> None:
    """Print Hydra's own settings, or the section `package` of them.

    Raises:
        ConfigError: a setting is wrong, or there is no such section.
    """
    said = _checked(arguments, config_dirs)
    with _hydra(search_folders(config_dirs)) as hydra:
        try:
            hydra.show_cfg(PRIMARY, said, "hydra", package, resolve)
        except SystemExit:  # it has printed that there is no such section
            raise ConfigError(f"--package {package} is not a section of Hydra's settings") from None


def print_hydra_help() -> None:
    """Print Hydra's help: its flags and groups."""
    with _hydra(search_folders(())) as hydra:
        hydra.hydra_help(None, get_args_parser(), Namespace(overrides=[]))


def complete(commands: Sequence[str]) -> None:
    """Do what `-sc install=SHELL`, `uninstall=SHELL` or `query=SHELL` asks for.

    `query` prints what may follow the line in the variable `COMP_LINE`.

    Raises:
        ConfigError: it is none of these.
    """
    asked = [tuple(text.split("=", 1)) for text in commands]
    known = ("install", "uninstall", "query")
    if len(asked) != 1 or len(asked[0]) != 2 or asked[0][0] not in known:
        raise ConfigError(
            "-sc takes one of install=SHELL, uninstall=SHELL and query=SHELL",
            'In bash: eval "$(launcher -sc install=bash)".',
        )
    [(command, shell)] = asked
    if shell not in SHELLS:
        raise ConfigError(f"-sc {command}={shell}: no such shell", f"Use {', '.join(SHELLS)}.")
    if command != "query":
        script = "completion." if command == "install" else "completion.uninstall."
        sys.stdout.write(Path(__file__).with_name(f"{script}{shell}").read_text())
        return
    line = os.environ.get("COMP_LINE", "")
    if not line:
        raise ConfigError("-sc query is for a shell, which sets COMP_LINE", "Use -sc install.")
    typed, config_dirs = _typed(line)
    os.environ["COMP_LINE"] = typed  # read by Hydra's plug-ins
    try:
        with _hydra(search_folders(config_dirs)) as hydra:
            hydra.shell_completion(PRIMARY, list(commands))
    except (SystemExit, Exception):
        return  # a line that is not yet right has no completion: a message would end up in the line


def _typed(line: str) -> tuple[str, list[str]]:
    """Return a line that is being typed without flags, and its values of `--config-dir`.

    Hydra reads no settings behind a flag.
    """
    kept: list[str] = []
    folders: list[str] = []
    before = ""
    for word in line.split():
        if before in ("-cd", "--config-dir"):
            folders.append(word)
        elif word.startswith("--config-dir="):
            folders.append(word.partition("=")[2])
        elif not word.startswith("-"):
            kept.append(word)
        before = word
    is_new_word = line.endswith(" ") or before.startswith("-")
    text = " ".join(kept) + (" " if is_new_word else "")
    return text, [folder for folder in folders if Path(folder).is_dir()]
