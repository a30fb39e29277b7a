"""`task=export`: write the weights of a run's checkpoint to one `.npz` file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from rich.console import Console

from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.private_files import private_files
from launcher.report.console import status
from launcher.train import checkpoint

_log = logging.getLogger(__name__)


def export(config: Config, console: Console) -> int:
    """Write the model of the run's newest checkpoint, or of `export.step`; return the exit code.

    Raises:
        ConfigError: there is no such checkpoint, or the file cannot be made where it is wanted.
        OSError: the file cannot be written.
    """
    assert config.run.id is not None
    home = Path(config.run.dir, config.run.id)
    source = _checkpoint(config, home)
    target = _target(config, home, source)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what does not matter here
    with private_files(config.run), status(console, f"writing {target}"):
        try:
            count = checkpoint.export_model(source, target, private=not config.run.shared)
        except checkpoint.Mismatch as error:
            raise _refused(config, f"cannot be exported: {source}: {error}") from None
    console.print(f"{count} arrays of {source} are in {target}", soft_wrap=True)
    return 0


def _checkpoint(config: Config, home: Path) -> Path:
    """Return the checkpoint to export, which is intact."""
    step = config.export.step
    named = home if step is None else home / "checkpoints" / str(step)
    try:
        path, damaged = checkpoint.resolve(named)
    except checkpoint.InitError as error:
        raise _refused(config, f"cannot be exported: {named} {error}") from None
    for line in damaged:
        _log.warning(line)
    return path


def _target(config: Config, home: Path, source: Path) -> Path:
    """Return the file to write; refuse to write over another than the run's own."""
    if config.export.path is None:
        return home / f"weights-{source.name}.npz"
    target = Path(config.export.path).expanduser()
    if os.path.lexists(target):
        problem, remedy = "is there already", "Name another file, or delete it first."
    elif not target.parent.is_dir():
        problem, remedy = f"cannot be made: {target.parent} is not a folder", "Make it first."
    else:
        return target
    raise ConfigError(f"export.path={config.export.path} {problem}", remedy, ["export.path"])


def _refused(config: Config, problem: str) -> ConfigError:
    return ConfigError(
        f"run.id={config.run.id} {problem}",
        "Check run.id, run.dir and export.step.",
        ["run.id", "run.dir", "export.step"],
    )
