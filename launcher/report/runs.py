"""The runs below folders: all of them, or those that names mean. Reads folders only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.config.errors import ConfigError, advice
from launcher.report.run_record import (
    FOLDERS,
    STATUS,
    SUMMARY,
    RunRecord,
    find_runs,
    read_run,
)


def runs(dir: str | os.PathLike[str] | Sequence[str] = FOLDERS) -> list[dict[str, Any]]:
    """Return all runs below a folder, newest first, as `pandas.DataFrame` takes them.

    Args:
        dir: the folder, or several; by default those of runs and of sweeps, in this one.

    Returns:
        The fields of `RunRecord` of each run, by name.

    Example:
        >>> launcher.runs("outputs")
        []
    """
    roots = [dir] if isinstance(dir, str | os.PathLike) else list(dir)
    return [record.to_dict() for record in read_runs([Path(root) for root in roots])]


def read_runs(roots: Sequence[Path]) -> list[RunRecord]:
    """Return the runs below folders, newest first."""
    found = [read_run(folder) for folder in find_runs(roots)]
    return sorted(found, key=lambda record: -(record.updated_at or 0.0))


def runs_of(roots: Sequence[Path], name: str) -> list[Path]:
    """Return the runs of a sweep that a folder's name gives, or the one run that it names."""
    for folder in (Path(name), *(root / name for root in roots)):
        inner = sorted(find_runs([folder]), key=_by_number) if folder.is_dir() else []
        if inner and not any((folder / file).exists() for file in (STATUS, SUMMARY)):
            return inner
    return [one_run(roots, [name]).folder]


def _by_number(folder: Path) -> tuple[str, int]:
    name, _, number = folder.name.rpartition("-")
    return (name, int(number)) if number.isdecimal() else (folder.name, -1)


def one_run(roots: Sequence[Path], names: Sequence[str]) -> RunRecord:
    """Return the run of this name; see `runs_named`."""
    found = runs_named(roots, names)
    if len(found) > 1:
        raise ConfigError("launcher runs: one run is expected here", "Name only one.")
    return found[0]


def runs_named(roots: Sequence[Path], names: Sequence[str]) -> list[RunRecord]:
    """Return the runs of these names: folders, ids, or the beginnings of ids that are clear."""
    if not names:
        raise ConfigError("launcher runs: no run is named", "launcher runs lists them.")
    folders = {folder.name: folder for folder in find_runs(roots)}
    found = []
    for name in names:
        path = Path(name)
        if name in folders:
            found.append(read_run(folders[name]))
        elif os.sep in name and list(find_runs([path.parent])).count(path):
            found.append(read_run(path))
        else:
            begins = [known for known in folders if known.startswith(name)]
            if len(begins) != 1:
                remedy = (
                    f"It may be {', '.join(sorted(begins)[:5])}."
                    if begins
                    else advice(name, sorted(folders)[-20:], "Newest")
                    if folders
                    else f"There are none below {' and '.join(map(str, roots))}."
                )
                raise ConfigError(f"There is no run {name}", remedy)
            found.append(read_run(folders[begins[0]]))
    return found
