"""The settings that must not change when a run is resumed, as it would be another run.

A checkpoint holds the settings that it was saved with. Values from the environment are stored as
their interpolation (see `launcher.config.environment`) and as a fingerprint, which shows that a
value has changed but not what it is.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import secrets
from pathlib import Path

from launcher.checkpoint import RunMetadata
from launcher.config.compose import to_dict
from launcher.config.environment import dotted, unresolved
from launcher.config.errors import ConfigError, shown
from launcher.config.schema import Config
from launcher.recipes import fingerprint_dataset
from launcher.report.text import flat

_FIXED = (
    "model",
    "dataset",
    "optimizer",
    "train.global_batch_size",
    "train.precision",
    "run.seed",
)


def fingerprints(config: Config) -> dict[str, str]:
    """Return the fingerprints of fixed settings that come from the environment, by their keys."""
    places = [dotted(place) for place in config.from_environment]
    return {
        key: _fingerprint(json.dumps(value))
        for key, value in flat(to_dict(config)).items()
        if _is_fixed(key) and any(f"{place}.".startswith(f"{key}.") for place in places)
    }


def check_same_run(path: Path, step: int, stored: RunMetadata, config: Config) -> None:
    """Check that the settings fit the checkpoint that the run is to resume from.

    Args:
        path: the run's folder.
        step: the checkpoint's step.
        stored: what the checkpoint says of its run.
        config: the settings now.

    Raises:
        ConfigError: a setting that must not change has changed, or the data has.
        launcher.recipes.InputError: the data cannot be used.
    """
    before, now = flat(stored.config), flat(to_dict(config))
    for key in filter(_is_fixed, sorted(before.keys() | now.keys())):
        value = now.get(key)
        if key in stored.fingerprints:
            is_same = _matches(stored.fingerprints[key], json.dumps(value))
        else:
            is_same = before.get(key) == unresolved({key: value}, {})[key]
        if not is_same:
            raise ConfigError(
                f"{key}={shown(value)} does not fit run.id={path.name}, which reached step {step} "
                f"with {key}={shown(before.get(key))}",
                "Set it back to resume that run, or choose another run.id.",
                [key],
            )
    if stored.data and stored.data != fingerprint_dataset(config.dataset):
        raise ConfigError(
            f"the data of dataset={config.dataset.name} has changed since run.id={path.name} "
            f"reached step {step}: its files hold something else",
            "Put the files back to resume that run, or choose another run.id.",
            ["run.id"],
        )


def _is_fixed(key: str) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in _FIXED)


@functools.cache  # slow on purpose, and called at every save
def _fingerprint(text: str) -> str:
    salt = secrets.token_hex(16)
    return f"{salt}:{_digest(text, salt)}"


def _matches(fingerprint: str, text: str) -> bool:
    salt, _, digest = fingerprint.partition(":")
    return hmac.compare_digest(_digest(text, salt), digest)


def _digest(text: str, salt: str) -> str:
    """Return a digest that takes 50 ms to compute, so that nobody can try many values."""
    return hashlib.scrypt(text.encode(), salt=salt.encode(), n=2**14, r=8, p=1, dklen=32).hex()
