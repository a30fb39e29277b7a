"""Where the YAML files are: the project's own `conf/`, and the folders of `--config-dir`.

The same `conf/` is found from a checkout, an editable install and a wheel: it is inside the package
or, where that is a checkout, beside it, with a link inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.config.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_INSIDE = _PACKAGE / "conf"
CONF = _INSIDE.resolve() if _INSIDE.is_dir() else _PACKAGE.parent / "conf"  # disks without links


def search_folders(config_dirs: Sequence[str]) -> tuple[Path, ...]:
    """The folders to search, first match wins: the user's in the order given, then `conf/`."""
    folders = [Path(folder).absolute() for folder in config_dirs]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"--config-dir {folder} is not a folder",
                "Name a folder that holds groups of YAML files, such as my_conf with "
                "my_conf/recipe/mine.yaml in it.",
            )
    return (*folders, CONF)


def find_groups(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Every config group with its options, both sorted: `{"model": ["gpt", "mlp"], …}`."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}
