"""Where a new run's parameters come from: `train.init_from`. `prepare` asks beforehand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.train import checkpoint

_KEY = "train.init_from"


def find_start(
    config: Config, finished: int, say: Callable[[str], None], thorough: bool = True
) -> Path | None:
    """The checkpoint that the run takes its first parameters from; None where it draws them, or
    goes on after `finished` steps of its own.

    Args:
        thorough: read all of it, to see that it is whole.

    Raises ConfigError where `train.init_from` holds no checkpoint that is whole.
    """
    named = config.train.init_from
    if named is None:
        return None
    if finished:
        say(f"{_KEY} is not used: run {config.run.id} goes on from its own step {finished}")
        return None
    try:
        path, damaged = checkpoint.resolve(Path(named), thorough)
    except checkpoint.InitError as error:
        raise ConfigError(
            f"{_KEY}={named} {error}",
            "Name a checkpoint (<run folder>/checkpoints/<step>), or the folder of a run.",
            [_KEY],
        ) from None
    for line in damaged:
        say(line)
    say(f"parameters from {path}")
    return path.absolute()


def check_start(named: str | None, path: Path, params: Any) -> None:
    """Raises ConfigError where the parameters at `path` are not those of `params`, a tree of
    `jax.ShapeDtypeStruct`."""
    try:
        checkpoint.check_params(path, params)
    except checkpoint.Mismatch as error:
        raise ConfigError(
            f"{_KEY}={named} does not fit the model: {error}",
            "Use the model settings of the run that saved it; they are in its config.yaml.",
            [_KEY],
        ) from None
