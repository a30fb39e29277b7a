"""Find the folders of YAML files: the project's own `conf/` and those of `--config-dir`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.base import CONF
from launcher.config.errors import ConfigError

# Folders whose files are parts of other files, not options, and the group of those files.
PARTS = {"device": "cluster"}


def search_folders(config_dirs: Sequence[str]) -> tuple[Path, ...]:
    """Return the folders to search: the user's in the order given, then `conf/`."""
    folders = [Path(folder).absolute() for folder in config_dirs]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"--config-dir {folder} is not a folder",
                "Name a folder that holds groups of YAML files, such as my_conf with "
                "my_conf/recipe/mine.yaml in it.",
                code="command_line",
            )
    return (*folders, CONF)


def find_groups(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Return every config group with its options, both sorted: `{"model": ["gpt", "mlp"], …}`."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            if file.parent.name not in PARTS:
                found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}
