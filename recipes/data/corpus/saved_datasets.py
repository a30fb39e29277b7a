"""The Arrow files of a Hugging Face dataset on disk, as `datasets` saves it (`save_to_disk`).

A dataset is a folder with `state.json`, which lists its files; others that lie there are caches. A
dictionary of splits is a folder with `dataset_dict.json`, and a dataset in a folder for each split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from launcher.base import DamagedError, read_json
from launcher.recipes import InputError

_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_TRAIN = "train"
_AGAIN = "save the dataset again"


class ChosenSplit(NamedTuple):
    """The split that is read, and the names of all."""

    name: str
    names: list[str]


def saved_files(folder: Path, source: str) -> list[Path]:
    """Return the Arrow files of the dataset that a folder holds.

    Those of a folder that `datasets` did not write are all below it, by name.

    Args:
        folder: the folder.
        source: what the user named, as `dataset.path=…`.

    Raises:
        InputError: what the folder says of itself cannot be read, or names what is not there.
    """
    split = _split_of(folder, source)
    if split is not None:
        folder = folder / split.name
        if not folder.is_dir():
            raise InputError(f"{source} names the split {split.name}, and lacks {folder}; {_AGAIN}")
    if (folder / _STATE).is_file():
        return _listed(folder, source)
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            found += saved_files(path, source)
        elif path.suffix == ".arrow" and path.is_file():
            found.append(path)
    return found


def read_splits(path: str) -> list[ChosenSplit]:
    """Return the split to read from each dictionary of splits below `dataset.path`.

    It is `train`, or the only one.

    Raises:
        InputError: none is the one, or a folder's list of them cannot be read.
    """
    folder, source = Path(path).expanduser(), f"dataset.path={path}"
    folders = (file.parent for file in sorted(folder.rglob(_SPLITS)))
    return [split for each in folders if (split := _split_of(each, source))]


def _split_of(folder: Path, source: str) -> ChosenSplit | None:
    if not (folder / _SPLITS).is_file():
        return None
    names = _names(folder / _SPLITS, source, lambda tree: tree["splits"])
    if _TRAIN not in names and len(names) != 1:
        raise InputError(
            f"{source} holds the splits {', '.join(names) or 'none'}, and none is {_TRAIN}; "
            "name the folder of the one to train on"
        )
    return ChosenSplit(_TRAIN if _TRAIN in names else names[0], names)


def _listed(folder: Path, source: str) -> list[Path]:
    """Return the files that `state.json` lists."""
    names = _names(
        folder / _STATE, source, lambda tree: [file["filename"] for file in tree["_data_files"]]
    )
    for path in (folder / name for name in names):
        if not path.is_file():
            raise InputError(f"{source}: {path} is missing, which {_STATE} lists; {_AGAIN}")
    return [folder / name for name in names]


def _names(file: Path, source: str, names_in: Any) -> list[str]:
    try:
        names = names_in(read_json(file))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DamagedError("it lists no names")
        return names
    except (DamagedError, LookupError, TypeError) as error:
        why = error if isinstance(error, DamagedError) else "it lists no names"
        raise InputError(f"{source}: {file} is damaged: {why}; {_AGAIN}") from None
