"""The checkpoint or file that a new run takes its model from: `train.init_from`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.train import checkpoint

_KEY = "train.init_from"

_RUNS_REMEDY = "Use the model settings of the run that saved it; they are in its config.yaml."
_ARRAYS_REMEDY = (
    "An array has the name and the shape of a leaf of the model's; task=export writes such a file "
    "of a run."
)

_log = logging.getLogger(__name__)


def find_start(config: Config, finished: int, thorough: bool = True) -> Path | None:
    """Return the checkpoint or `.npz` file to start from, or None for a fresh start.

    It is None, too, if the run resumes from a checkpoint of its own.

    Args:
        config: the settings.
        finished: how many steps of its own the run has finished.
        thorough: whether to read all files and compare their checksums.

    Raises:
        ConfigError: `train.init_from` is no intact checkpoint and no file of arrays.
    """
    named = config.train.init_from
    if named is None:
        return None
    if finished:
        _log.warning(
            f"{_KEY} is not used: run {config.run.id} resumes from its own step {finished}"
        )
        return None
    try:
        path, damaged = checkpoint.resolve(Path(named), thorough)
    except checkpoint.InitError as error:
        raise ConfigError(
            f"{_KEY}={named} {error}",
            "Name a checkpoint (<run folder>/checkpoints/<step>), the folder of a run, or an .npz "
            "file of arrays.",
            [_KEY],
        ) from None
    for line in damaged:
        _log.warning(line)
    _log.info(f"parameters from {path}")
    return path.absolute()


def check_start(named: str | None, path: Path, model: Mapping[str, Any]) -> None:
    """Check that what a checkpoint or a file holds of a model fits this one.

    Args:
        named: `train.init_from`, for the message.
        path: the checkpoint, or the `.npz` file.
        model: the model's parts (`TrainState.model`), trees of `jax.ShapeDtypeStruct`.

    Raises:
        ConfigError: they differ in names, shapes or, of a file, kinds of numbers.
    """
    try:
        checkpoint.check_model(path, model)
    except checkpoint.Mismatch as error:
        raise ConfigError(
            f"{_KEY}={named} does not fit the model: {error}",
            _ARRAYS_REMEDY if path.is_file() else _RUNS_REMEDY,
            [_KEY],
        ) from None
