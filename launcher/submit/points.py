"""Place the points of a sweep, and keep them and their results in its folder's `sweep.json`.

A sweep that resumes asks for its points again. Those that are done are answered from here.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from launcher.base import DamagedError, make_private, read_json, write_whole
from launcher.base.reading import read
from launcher.config.compose import Point, to_written
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.config.sections import Run
from launcher.driver.folder.folder import hold

FILE = "sweep.json"
JOURNAL = "optuna.journal"  # of a sweep by Optuna
_FOLDER = "multirun"  # unless run.dir says otherwise
RUNNING, DONE, FAILED = "running", "done", "failed"


def place_sweep(points: Sequence[Point]) -> tuple[str, Path]:
    """Return the sweep's id and folder, from run.id and run.dir if they are set.

    Raises:
        ConfigError: run.id or run.dir is swept.
    """
    runs = {(point.config.run.id, point.config.run.dir) for point in points}
    if len(runs) > 1:
        raise ConfigError(
            "run.id and run.dir cannot be swept",
            "In a sweep run.id names the whole sweep; its runs are <run.id>-0, -1, ….",
        )
    [(run_id, run_dir)] = runs
    sweep_id = run_id or f"sweep-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return sweep_id, Path(_FOLDER if run_dir == Run().dir else run_dir) / sweep_id


def make_sweep(folder: Path, shared: bool) -> None:
    """Make the sweep's folder; only its user may read it, unless the runs are `shared`.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        if shared:
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():
            make_private(folder)
    except OSError as error:
        raise ConfigError(
            f"The sweep's folder {folder} cannot be made: {error.strerror}",
            "Set run.dir to a folder that you may write.",
        ) from None


def members(points: Sequence[Point], sweep_id: str, folder: Path) -> list[Config]:
    """Return the settings of the runs of a sweep, each with a folder of its own."""
    return [member(point.config, sweep_id, folder, n) for n, point in enumerate(points)]


def member(config: Config, sweep_id: str, folder: Path, number: int) -> Config:
    """Return the settings of one run of a sweep."""
    name = f"{sweep_id}-{number}"
    run = replace(config.run, id=name, dir=str(folder), mirror=mirror_of(config, name))
    return replace(
        config, run=run, wandb=replace(config.wandb, group=config.wandb.group or sweep_id)
    )


def mirror_of(config: Config, run_id: str) -> str | None:
    """Return the place of a run's mirror, below that of its sweep; None without one."""
    return config.run.mirror and f"{config.run.mirror.rstrip('/')}/{run_id}"


@dataclass(frozen=True)
class PointNote:
    """A point.

    Attributes:
        number: its place among the sweep's points.
        swept: the settings that the sweeper chose.
        settings: a digest of all its settings; "" if they are wrong.
        run: the id of its run.
        same_as: the number of an earlier point with the same settings and the same run.
        state: `running` (or cut off), `done` or `failed`.
        value: its objective.
    """

    number: int
    swept: tuple[str, ...]
    settings: str
    run: str
    same_as: int | None = None
    state: str = RUNNING
    value: float | None = None

    @property
    def label(self) -> str:
        """Return what sets the point apart from the others."""
        return " ".join(self.swept) or "the only run"


@dataclass(frozen=True)
class _File:
    points: tuple[PointNote, ...]


class Points:
    """The points of a sweep, in the order in which they were first asked for."""

    def __init__(self, folder: Path, noted: Sequence[PointNote] = ()) -> None:
        self._path = folder / FILE
        self._all = list(noted)
        self._claimed: list[int] = []

    def __iter__(self) -> Iterator[PointNote]:
        return iter(self._all)

    def __getitem__(self, number: int) -> PointNote:
        return self._all[number]

    def claim(self, swept: Sequence[str], settings: str, sweep_id: str) -> PointNote:
        """Return the point that the sweeper asks for, as it was noted or new.

        A point that failed before this process began is to be run again.

        Args:
            swept: the settings that the sweeper chose.
            settings: the digest of all settings, "" if they are wrong.
            sweep_id: the sweep's id.

        Raises:
            ConfigError: it was noted with other settings.
        """
        for point in self._all:
            if point.number in self._claimed or point.swept != tuple(swept):
                continue
            if settings != point.settings != "":
                raise ConfigError(
                    f"{point.label} has run in this sweep with other settings: {self._path}",
                    "Choose another run.id for a sweep of these.",
                )
            if point.state == FAILED:
                point = replace(point, state=RUNNING)
            self._claimed.append(point.number)
            return point
        number = len(self._all)
        same = (one for one in self._all if one.settings == settings and one.same_as is None)
        twin = next(same, None) if settings else None
        point = PointNote(
            number=number,
            swept=tuple(swept),
            settings=settings,
            run=twin.run if twin else f"{sweep_id}-{number}",
            same_as=twin.number if twin else None,
        )
        self._claimed.append(number)
        self._all.append(point)
        self.write()
        return point

    def note(self, point: PointNote) -> None:
        """Store the present state of a point."""
        self._all[point.number] = point
        self.write()

    def write(self) -> None:
        """Write all points, whole or not at all."""
        text = json.dumps(asdict(_File(tuple(self._all))), indent=1, allow_nan=False)
        write_whole(self._path, text + "\n")


@contextmanager
def open_points(folder: Path) -> Iterator[Points]:
    """Give the points of the sweep in a folder that exists, to this process alone.

    Raises:
        ConfigError: the sweep is running, or its file is damaged.
    """
    with (
        open(folder / "lock", "wb") as lock,
        hold(lock, folder, "is a sweep that is running right now"),
    ):
        yield Points(folder, read_points(folder))


def read_points(folder: Path) -> tuple[PointNote, ...]:
    """Return the points that `sweep.json` holds; none if there is no such file.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        points = read(_File, read_json(folder / FILE)).points
        for place, point in enumerate(points):
            if point.number != place:
                raise DamagedError("its points are not numbered 0, 1, …")
            if Path(point.run).name != point.run or point.run in ("", ".."):
                raise DamagedError(f"run is {point.run!r}, not a folder's name")
            if point.same_as is not None and not 0 <= point.same_as < place:
                raise DamagedError(f"same_as is {point.same_as}, not an earlier point")
        return points
    except FileNotFoundError:
        return ()
    except ValueError as error:
        raise ConfigError(
            f"{folder / FILE} is damaged: {error}",
            "Choose another run.id, or delete that file to run all points again.",
        ) from None


def settings_digest(config: Config) -> str:
    """Return a digest of the settings that decide the result of a run."""
    tree = to_written(config)
    del tree["sweep"], tree["wandb"]
    tree["cluster"].pop("slurm", None)
    for name in ("id", "dir", "resume", "shared", "mirror"):
        del tree["run"][name]
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]
