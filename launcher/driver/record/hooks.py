"""Functions of the user's that a run calls in the driver: after steps, evaluations and saves.

A module that `hooks` names has one or more of `on_step(step, metrics)`, `on_evaluation(step,
metrics)` and `on_save(step, path)`.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from launcher.recipes import InputError, users_module

if TYPE_CHECKING:
    from launcher.train.step_result import StepResult

_NAMES = "on_step", "on_evaluation", "on_save"


class HookError(Exception):
    """A hook has raised an exception; the run cannot go on as its user wants it to."""


class Hooks:
    """The hooks of a run, in their order.

    Args:
        names: the setting `hooks`.

    Raises:
        InputError: a module is not there, or has none of the functions.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._modules: list[ModuleType] = []
        for name in names:
            module = users_module("hooks", name, ())
            if not any(callable(getattr(module, function, None)) for function in _NAMES):
                raise InputError(
                    f"hooks=[{name}] has no function {', '.join(_NAMES[:-1])} or {_NAMES[-1]}; "
                    "write one of them"
                )
            self._modules.append(module)

    def stepped(self, result: StepResult, metrics: Mapping[str, float | None]) -> None:
        """Call the hooks of a step, and those of the evaluation after it if there was one.

        Raises:
            HookError: one failed.
        """
        self._call("on_step", result.step, dict(metrics))
        if "eval/loss" in metrics:
            self._call("on_evaluation", result.step, dict(metrics))

    def saved(self, step: int, path: Path) -> None:
        """Call the hooks of a save that is complete; raise like `stepped`."""
        self._call("on_save", step, path)

    def _call(self, function: str, step: int, given: Any) -> None:
        for module in self._modules:
            hook = getattr(module, function, None)
            if hook is None:
                continue
            try:
                hook(step, given)
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)[1:]
                where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
                text = str(error) or "no message"
                raise HookError(
                    f"hooks=[{module.__name__}]: {function} failed at step {step}: "
                    f"{type(error).__name__}: {text}{where}. The run ends; fix the hook, or leave "
                    "it out, and run the same command again with its run.id"
                ) from error
