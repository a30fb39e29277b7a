"""What a run's checkpoint says of itself: whose it is, and where its data goes on.

Read strictly, since a run goes on by it: `choose` asks, `folder` and `training` use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.files import DamagedError
from launcher.train.checkpoint.layout import METADATA, read_metadata


@dataclass(frozen=True)
class Account:
    """Attributes:
    run_id: the run that saved it. config: its settings. fingerprints: of those that came from
        the environment, by their names.
    next_batch: which batch comes next, from 0.
    """

    run_id: str
    config: dict[str, Any]
    fingerprints: dict[str, str]
    next_batch: int


def read_account(folder: Path, step: int) -> Account:
    """The account of `folder/<step>`. Raises OSError, and DamagedError with what is wrong with it
    in a few words."""
    try:
        told = read_metadata(folder, step)
        config, next_batch = told["config"], told["data"]["next_batch"]
        prints = told.get("fingerprints", {})
        next_step, run_id = told["metrics"]["next_step"], config["run"]["id"]
    except (ValueError, KeyError, TypeError):
        raise DamagedError(f"{METADATA} is not a run's") from None
    if not isinstance(config, dict) or not isinstance(run_id, str):
        raise DamagedError(f"{METADATA} names no run")
    if not isinstance(prints, dict) or not all(isinstance(x, str) for x in prints.values()):
        raise DamagedError(f"{METADATA} holds no fingerprints of settings")
    if next_step != step + 1:
        raise DamagedError(f"{METADATA} goes on at step {next_step!r}, not {step + 1}")
    if type(next_batch) is not int or next_batch < step:
        raise DamagedError(f"{METADATA} goes on at batch {next_batch!r}, after {step} steps")
    return Account(run_id, config, prints, next_batch)
