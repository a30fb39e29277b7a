"""Tasks that the launcher does on this machine by checked settings, and their registry."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from launcher.config import sections
from launcher.config.errors import ConfigError
from launcher.stop import Stop

if TYPE_CHECKING:
    from launcher.cluster.slurm.rendezvous import Rendezvous
    from launcher.config.schema import Config
    from launcher.report.console import RunConsole


@dataclass(frozen=True)
class TaskKind(ABC):
    """A value of the setting `task`.

    Attributes:
        name: the value.
        answers: whether standard output is the answer alone, and progress goes to standard error.
        interruptible: whether a signal ends it at once; if not, it handles signals itself.
        reads: the settings and sections that it reads from the command line, where others are
            refused; None: all.
        stop: the signals received.
        rendezvous: with the other tasks of the Slurm job that this process belongs to.
        compose: returns the settings of the command line with further words, and raises
            ConfigError; None: they are not from a command line.
    """

    name: ClassVar[str]
    answers: ClassVar[bool] = False
    interruptible: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...] | None] = None
    stop: Stop = field(default_factory=Stop)
    rendezvous: Rendezvous | None = None
    compose: Callable[[Sequence[str]], Config] | None = None

    @abstractmethod
    def run(self, config: Config, console: RunConsole) -> int:
        """Do the task by checked settings; return the exit code.

        Raises:
            ConfigError: a setting is wrong.
            launcher.recipes.InputError: the data or a user's module cannot be used.
            OSError: a file cannot be read or written.
        """


class CheckpointTask(TaskKind):
    """A task that needs a run's checkpoint, by the section of the settings with its name.

    Attributes:
        verb: in "run.id=… cannot …", where the checkpoint does not fit.
    """

    verb: ClassVar[str]

    def run(self, config: Config, console: RunConsole) -> int:
        """Find the checkpoint and use it; return the exit code."""
        from launcher import checkpoint  # imports JAX
        from launcher.inference.stored_model import refused, stored_model

        asked = getattr(config, self.name)
        source, home = stored_model(config, asked.step, asked.best, self.name)
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax's warnings do not apply here
        try:
            return self.use(config, console, source, home)
        except checkpoint.Mismatch as error:
            raise refused(config, f"cannot {self.verb}: {source}: {error}", self.name) from None

    @abstractmethod
    def use(self, config: Config, console: RunConsole, source: Path, home: Path) -> int:
        """Use the checkpoint `source` of the run in the folder `home`; return the exit code."""


def new_path(key: str, named: str, what: str = "file") -> Path:
    """Return the file or folder that a setting names, which a task may make: it must not exist.

    Raises:
        ConfigError: it exists, or its folder does not.
    """
    path = Path(named).expanduser()
    if os.path.lexists(path):
        problem, remedy = "exists already", f"Name another {what}, or delete it first."
    elif not path.parent.is_dir():
        problem, remedy = f"cannot be made: {path.parent} is not a folder", "Make it first."
    else:
        return path
    raise ConfigError(f"{key}={named} {problem}", remedy)


TASKS: dict[str, type[TaskKind] | str] = {  # a dotted name is imported when the task runs
    "train": "launcher.driver.run.TrainTask",
    "plan": "launcher.driver.run.PlanOnly",
    "preflight": "launcher.driver.run.Preflight",
    "calibrate": "launcher.driver.tasks.calibrate.Calibrate",
    "evaluate": "launcher.driver.tasks.evaluate.EvaluateTask",
    "export": "launcher.driver.tasks.export.ExportTask",
    "generate": "launcher.driver.tasks.generate.GenerateTask",
    "prepare_data": "launcher.driver.tasks.prepare_data.PrepareData",
    "tokenize": "launcher.driver.tasks.prepare_data.TokenizeTask",
}


def register(task: type[TaskKind]) -> type[TaskKind]:
    """Register a task by its name, a value of the setting `task`, as a decorator of its class."""
    TASKS[task.name] = task
    sections.TASKS[task.name] = task.reads
    return task


def task_named(name: str) -> type[TaskKind]:
    """Return the class of a task; import it if need be."""
    found = TASKS[name]
    if isinstance(found, str):
        module, _, last = found.rpartition(".")
        found = getattr(import_module(module), last)
    assert not isinstance(found, str)
    return found
