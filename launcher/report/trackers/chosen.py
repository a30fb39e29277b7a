"""The trackers that `report.trackers` names: ours, and the user's by the names of their classes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from launcher.base.libraries import lacking
from launcher.config.errors import ConfigError
from launcher.report.trackers.mlflow_tracker import MlflowTracker
from launcher.report.trackers.registry import Opener
from launcher.report.trackers.tensorboard_tracker import TensorBoardTracker
from launcher.report.trackers.wandb_tracker import open_wandb

OURS: dict[str, Opener] = {
    "wandb": open_wandb,
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
}
# The modules that a tracker needs and not every installation has.
_NEEDS = {"tensorboard": ("tensorboardX",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}


def check_libraries(names: Sequence[str]) -> None:
    """Check that the libraries of trackers are here.

    Raises:
        ConfigError: one is missing; it says how to install it.
    """
    for name in names:
        if command := lacking(*_NEEDS.get(name, ())):
            raise ConfigError(
                f"report.trackers names {name}, and what it needs is not installed",
                f"Install it with: {command}.",
                ["report.trackers"],
            )


def openers(names: Sequence[str]) -> dict[str, Opener]:
    """Return what opens each tracker, by its name; a user's class is imported.

    Raises:
        ConfigError: there is no such class, or its module cannot be imported.
    """
    return {name: OURS[name] if name in OURS else _own(name) for name in names}


def _own(name: str) -> Opener:
    module, _, last = name.rpartition(".")
    try:
        found: Opener = getattr(import_module(module), last)
        if not callable(found):
            raise TypeError(f"{last} is not a class or function")
    except Exception as error:
        problem = f"report.trackers names {name}, which cannot be loaded: {error}"
        raise ConfigError(
            problem, "It is a class that takes a TrackedRun.", ["report.trackers"]
        ) from error
    return found
