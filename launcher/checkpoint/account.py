"""The metadata that a run resumes by: which run a checkpoint belongs to, and its next batch.

It is read strictly: anything odd counts as damage.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.files import DamagedError
from launcher.checkpoint.layout import METADATA, read_metadata


@dataclass(frozen=True)
class Account:
    """The metadata of a checkpoint that a run resumes by.

    Attributes:
        run_id: the run that saved it.
        config: that run's settings.
        fingerprints: a fingerprint of each setting that came from the environment, by its key.
        next_batch: the index of the next batch, from 0.
        data: the fingerprint of the dataset's content; "" where it has none.
    """

    run_id: str
    config: dict[str, Any]
    fingerprints: dict[str, str]
    next_batch: int
    data: str = ""


def read_account(folder: Path, step: int) -> Account:
    """Read the metadata of `folder/<step>`.

    Raises:
        OSError: it cannot be read.
        DamagedError: it is not a run's, or is for another step; the text is a few words.
    """
    try:
        metadata = read_metadata(folder, step)
        config, next_batch = metadata["config"], metadata["data"]["next_batch"]
        data = metadata["data"].get("fingerprint", "")
        prints = metadata.get("fingerprints", {})
        next_step, run_id = metadata["metrics"]["next_step"], config["run"]["id"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError(f"{METADATA} is not a run's") from None
    if not isinstance(config, dict) or not isinstance(run_id, str):
        raise DamagedError(f"{METADATA} names no run")
    if not isinstance(prints, dict) or not all(isinstance(x, str) for x in prints.values()):
        raise DamagedError(f"{METADATA} holds no fingerprints of settings")
    if next_step != step + 1:
        raise DamagedError(f"{METADATA} goes on at step {next_step!r}, not {step + 1}")
    if type(next_batch) is not int or next_batch < step:
        raise DamagedError(f"{METADATA} goes on at batch {next_batch!r}, after {step} steps")
    if not isinstance(data, str):
        raise DamagedError(f"{METADATA} holds no fingerprint of its data")
    return Account(run_id, config, prints, next_batch, data)
