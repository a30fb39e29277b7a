"""Callbacks: observers of a run, the launcher's own and those that the setting `hooks` names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from launcher.base import not_run, told
from launcher.recipes import InputError, users_code, users_module

Event = Literal["on_start", "on_step", "on_evaluation", "on_save", "on_restart", "on_end"]
_Kind = TypeVar("_Kind", bound="Callback")

_log = logging.getLogger(__name__)


class Callback:
    """Observes a run, in the driver. The methods of this class do nothing: override some.

    `hooks=[my_pkg.hook.Mine] allow_modules=[my_pkg]` adds a class of yours, or an instance. An
    exception of a method ends the run, except for `on_end`.
    """

    def on_start(self, step: int, folder: Path) -> None:
        """Begin a run, or resume it after `step` finished steps, in its folder."""

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Take the metrics of a finished step, by the keys of `metrics.jsonl`."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Take the metrics of a step with an evaluation, after its `on_step`."""

    def on_save(self, step: int, path: Path) -> None:
        """Take the folder of the complete checkpoint after `step` steps."""

    def on_restart(self, step: int, why: str) -> None:
        """Return to the state after `step` steps, because of a failure."""

    def on_end(self, step: int, reason: str) -> None:
        """End the run after `step` steps; `reason` is the summary's `exit_reason`."""


class HookError(Exception):
    """A user's callback raised an exception, which ends the run."""


class Callbacks:
    """The callbacks of a run, in their order.

    Args:
        own: the launcher's own; None is left out.
    """

    def __init__(self, *own: Callback | None) -> None:
        self._named = [("", each) for each in own if each]

    def add_hooks(self, names: Sequence[str]) -> None:
        """Add users' callbacks, the setting `hooks`.

        Raises:
            InputError: one is not there, is no callback, or cannot be made.
        """
        for name in names:
            found = find_hook(name)
            made = users_code(f"hooks=[{name}]", found)() if isinstance(found, type) else found
            self._named.append((name, made))

    def add(self, own: Callback) -> None:
        """Add a callback of the launcher's own."""
        self._named.append(("", own))

    def of(self, kind: type[_Kind]) -> _Kind | None:
        """Return the callback of a class, if there is one."""
        return next((each for _, each in self._named if isinstance(each, kind)), None)

    def call(self, event: Event, step: int, about: Any) -> None:
        """Call a method of all callbacks.

        Args:
            event: the method's name.
            step: its first argument.
            about: its second argument.

        Raises:
            HookError: a user's callback failed. At the end of a run that is a warning.
        """
        for name, callback in self._named:
            try:
                if wrong := not_run(getattr(callback, event)(step, about)):
                    raise TypeError(f"it returns {wrong}")
            except Exception as error:
                if not name:
                    raise
                said = f"hooks=[{name}]: {event} failed at step {step}: {told(error, name)}"
                if event != "on_end":
                    raise HookError(
                        f"{said}. The run ends; fix the hook, or "
                        "leave it out, and run the same command again with its run.id"
                    ) from error
                _log.warning(said)


def find_hook(name: str) -> Callback | type[Callback]:
    """Return the class or instance that `hooks` names.

    Raises:
        InputError: it is not there, cannot be imported, or is no `Callback`.
    """
    module, _, last = name.rpartition(".")
    found = getattr(users_module("hooks", module or name, ()), last, None)
    if isinstance(found, Callback) or (isinstance(found, type) and issubclass(found, Callback)):
        return found
    raise no_callback(name)


def no_callback(name: str) -> InputError:
    """Return the error for a hook that names no callback."""
    return InputError(
        f"hooks=[{name}] is no callback; name a class or an instance of launcher.driver.Callback, "
        f"such as {name.rpartition('.')[0] or name}.MyCallback"
    )
