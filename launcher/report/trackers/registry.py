"""Registry of the trackers that record a run beside its folder and the console.

`report.trackers` names ours and users' classes; a registered tracker is opened for every run. None
can end a run or hold it up: each is called on a thread of its own, one that fails is reported once
and gets no more calls, and one that is slow gets what its queue holds. A tracker's warnings go to a
logger below `launcher`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TypeVar

from launcher.base import lacking
from launcher.config.errors import ConfigError
from launcher.report.trackers.queued import QueuedTracker, first_line
from launcher.report.trackers.tracker import TrackedRun, Tracker

Opener = Callable[[TrackedRun], Tracker | None]
_AnyOpener = TypeVar("_AnyOpener", bound=Opener)

_log = logging.getLogger(__name__)

OURS = {  # imported when chosen
    "wandb": "launcher.report.trackers.wandb_tracker.open_wandb",
    "tensorboard": "launcher.report.trackers.tensorboard_tracker.TensorBoardTracker",
    "mlflow": "launcher.report.trackers.mlflow_tracker.MlflowTracker",
}
TRACKERS: dict[str, Opener] = {}
NONE_CHOSEN: Mapping[str, Opener] = {}


def register(name: str) -> Callable[[_AnyOpener], _AnyOpener]:
    """Register a tracker under a name, as a decorator.

    Args:
        name: the name for messages. A second tracker of the same name replaces the first.

    Returns:
        The decorator of a class or function that takes a `TrackedRun` and returns its `Tracker`, or
        None where the run is not to be recorded.
    """

    def decorate(opener: _AnyOpener) -> _AnyOpener:
        TRACKERS[name] = opener
        return opener

    return decorate


def openers(names: Iterable[str], users: bool = True) -> dict[str, Opener]:
    """Return the class or function that opens each tracker, by its name.

    Args:
        names: the setting `report.trackers`.
        users: whether to import users' classes, or to leave them out.

    Raises:
        ConfigError: there is no such class, its module cannot be imported, or a library that it
            needs is not installed; the message says how to install it.
    """
    return {name: _opener(name) for name in names if users or name in OURS}


def _opener(name: str) -> Opener:
    module, _, last = OURS.get(name, name).rpartition(".")
    try:
        opener: Opener = getattr(import_module(module), last)
        if not callable(opener):
            raise TypeError(f"{last} is not a class or function")
    except Exception as error:
        problem = f"report.trackers names {name}, which cannot be loaded: {error}"
        raise ConfigError(
            problem, "It is a class that takes a TrackedRun.", ["report.trackers"]
        ) from error
    if command := lacking(*getattr(opener, "needs", ())):
        raise ConfigError(
            f"report.trackers names {name}, and a library that it needs is not installed",
            f"Install it with: {command}.",
            ["report.trackers"],
        )
    return opener


def open_trackers(
    run: TrackedRun, chosen: Mapping[str, Opener] = NONE_CHOSEN
) -> tuple[Tracker, ...]:
    """Open trackers for a run; one that cannot be opened is reported.

    Args:
        run: the run.
        chosen: those that its settings choose, by name; the registered ones follow them.
    """
    opened = []
    for name, opener in {**chosen, **TRACKERS}.items():
        try:
            tracker = opener(run)
        except Exception as error:
            _log.warning(f"{name}: {first_line(error)}; the run is not recorded there")
            continue
        if tracker is not None:
            opened.append(QueuedTracker(name, tracker))
    return tuple(opened)
