"""The rules for `report.trackers`: names of ours, and classes that the user allows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.config.errors import ConfigError, advice
from launcher.config.schema import Config

KNOWN = ("wandb", "tensorboard", "mlflow")


def check_trackers(config: Config) -> Iterator[ConfigError]:
    """Check that each tracker is one of ours or a class that the command line allows to load."""
    key = "report.trackers"
    names = config.report.trackers or []
    for name in names:
        module = name.rpartition(".")[0]
        if name in KNOWN:
            continue
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
            yield ConfigError(
                f"{key}: {name!r} is not a tracker",
                f"{advice(name, KNOWN)} One of your own is written my_pkg.MyTracker.",
                [key],
            )
        elif not any(f"{module}.".startswith(f"{allowed}.") for allowed in config.allow_modules):
            yield ConfigError(
                f"{key}: {name} is code that this run is not allowed to load",
                f"If you trust it, add allow_modules=[{module}] on the command line.",
                [key],
            )
    if len(set(names)) < len(names):
        yield ConfigError(f"{key} names a tracker twice", "Name each once.", [key])
