"""Records of runs, read from their folders alone, and runs found by name.

Folders may be damaged, half written, or another user's: files are read up to a limit, and the
record names those that cannot be read.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launcher.base import DamagedError, parse_json, read_text
from launcher.config.errors import ConfigError, advice

STATUS, SUMMARY, NOTE = "status.json", "summary.json", "note.txt"
FOLDERS = ("outputs", "multirun")  # where runs are by default; of a sweep, a level deeper
ENDED = ("done", "planned", "failed", "interrupted", "preempted", "died")
STOPPED_EARLY = "stopped early"  # before a colon, and why
_LARGEST = 2**20  # bytes of a file that is read here
_FRESH = 60.0  # seconds that a status of another host may be old while its run lives
_KINDS = {"str | None": str, "str": str, "int | None": int, "float | None": float}
_LONGEST_NOTE = 500  # characters


@dataclass(frozen=True)
class RunRecord:
    """A run by the files of its folder. None is not known.

    Attributes:
        id: its id, the folder's name.
        folder: its folder.
        state: a phase such as `training` while it runs; how it ended: `done`, `planned`, `failed`,
            `interrupted`, `preempted`, or `died` where its process is gone without a word;
            `submitted`, a batch job that has not begun; `unknown`.
        phase_done: how much of that phase is done, where it tells.
        phase_total: of how much; 1 where it is a share.
        phase_unit: what is counted, such as programs.
        step: number of finished steps.
        steps: the steps that it is to make.
        loss: the newest loss.
        eval_loss: the newest one on held-out data.
        step_seconds: of the newest step while it runs, afterwards the median.
        predicted_step_seconds: the plan's.
        eta_seconds: time left.
        restarts: restarts after failures.
        plan: the plan in words.
        exit_reason: the full reason of its end.
        slow: what slows it or, once it has ended, has slowed it the most, with its cost.
        host: the host of its driver.
        forked_from: the checkpoint of another run that it began with, `<folder>@<step>`.
        job_id: its Slurm job.
        updated_at: the last update, in seconds since the epoch.
        note: the user's note.
        problem: the files that cannot be read.
    """

    id: str
    folder: Path
    state: str = "unknown"
    phase_done: float | None = None
    phase_total: float | None = None
    phase_unit: str = ""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    step_seconds: float | None = None
    predicted_step_seconds: float | None = None
    eta_seconds: float | None = None
    restarts: int | None = None
    plan: str | None = None
    exit_reason: str | None = None
    slow: str | None = None
    host: str | None = None
    forked_from: str | None = None
    job_id: str | None = None
    updated_at: float | None = None
    note: str | None = None
    problem: str | None = None

    @property
    def is_live(self) -> bool:
        """Whether it is under way."""
        return self.state not in (*ENDED, "unknown", "submitted", "lost")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON or a table."""
        return {**dataclasses.asdict(self), "folder": str(self.folder)}


def find_runs(roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the folders of runs below these folders, and below those of sweeps in them."""
    for root in roots:
        for folder in _folders(root):
            if _is_run(folder):
                yield folder
            else:
                yield from (inner for inner in _folders(folder) if _is_run(inner))


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder."""
    problems: list[str] = []
    status, summary = (_read(folder / name, problems) for name in (STATUS, SUMMARY))
    state = _state(folder, status, summary)
    far = status if state == status.get("phase") else {}  # a dead run has no progress
    renamed = {"loss": "final_loss", "step": "steps", "step_seconds": "step_seconds_median"}
    known: dict[str, Any] = {}
    for field in dataclasses.fields(RunRecord):
        kind = _KINDS.get(str(field.type))
        source = far if field.name.startswith("phase_") else status
        of_summary = summary.get(renamed.get(field.name, field.name))
        if kind and (value := _of(kind, of_summary, source.get(field.name))) is not None:
            known[field.name] = value
    own = {
        "id": folder.name,
        "state": state,
        "job_id": _of(str, status.get("job_id"), summary.get("job_id")),
        "steps": _of(int, status.get("steps")),
        "updated_at": _of(float, status.get("updated_at"))
        or _modified(folder / SUMMARY)
        or _modified(folder),
        "note": _read_note(folder),
        "problem": f"damaged: {'; '.join(problems)}" if problems else None,
    }
    return RunRecord(folder=folder, **{**known, **own})


def _read_note(folder: Path) -> str | None:
    """Return the user's note on a run."""
    try:
        return read_text(folder / NOTE, _LARGEST)[:_LONGEST_NOTE].strip() or None
    except (OSError, DamagedError):
        return None


def ending_of(reason: str) -> str:
    """Return the state that an `exit_reason` stands for.

    A sentence says why a run has failed, or that `train.stop_early` has ended it, as it was to do.
    """
    if reason.startswith(f"{STOPPED_EARLY}:"):
        return "done"
    word = reason.split(",")[0]
    return word if word in ENDED else "failed"


def ended_well(reason: str | None) -> bool:
    """Return whether a run of this `exit_reason` ended successfully."""
    return reason is not None and ending_of(reason) in ("done", "planned")


def _state(folder: Path, status: dict[str, Any], summary: dict[str, Any]) -> str:
    phase = _of(str, status.get("phase"))
    if phase is None:
        reason = _of(str, summary.get("exit_reason"))
        if reason is None:
            return "submitted" if (folder / "job.json").exists() else "unknown"
        return ending_of(reason)
    if phase in ENDED:
        return str(phase)
    if status.get("host") == socket.gethostname():
        return phase if _lives(status.get("pid"), status.get("process_started")) else "died"
    age = time.time() - (_of(float, status.get("updated_at")) or 0.0)
    return phase if age < _FRESH else "lost"


def _lives(pid: Any, started: Any) -> bool:
    """Return whether a process is still the one that began then."""
    if type(pid) is not int or not isinstance(started, int | float):
        return False
    try:
        process = psutil.Process(pid)
        return bool(abs(process.create_time() - started) < 1 and process.status() != "zombie")
    except (psutil.Error, ValueError, OverflowError):
        return False


def _read(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        found = parse_json(read_text(path, _LARGEST))
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror})")
        return {}
    except DamagedError as error:
        problems.append(f"{path.name}: {error}")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} is not a table")
        return {}
    return found


def _of(kind: type, *values: Any) -> Any:
    """Return the first value that is of a kind; a number is none of `bool`."""
    kinds = (int, float) if kind is float else kind
    return next((v for v in values if isinstance(v, kinds) and not isinstance(v, bool)), None)


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _folders(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            return [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", STATUS, SUMMARY, "job.json"))


def runs(dir: str | os.PathLike[str] | Sequence[str] = FOLDERS) -> list[dict[str, Any]]:
    """Return all runs below a folder, newest first, as `pandas.DataFrame` takes them.

    Args:
        dir: the folder, or several; by default those of runs and of sweeps, in this one.

    Returns:
        The fields of `RunRecord` of each run, by name.

    Example:
        >>> launcher.runs("outputs")
        []
    """
    roots = [dir] if isinstance(dir, str | os.PathLike) else list(dir)
    return [record.to_dict() for record in read_runs([Path(root) for root in roots])]


def read_runs(roots: Sequence[Path]) -> list[RunRecord]:
    """Return the runs below folders, newest first."""
    found = [read_run(folder) for folder in find_runs(roots)]
    return sorted(found, key=lambda record: -(record.updated_at or 0.0))


def runs_of(roots: Sequence[Path], name: str) -> list[Path]:
    """Return the runs of a sweep that a folder's name gives, or the one run that it names."""
    for folder in (Path(name), *(root / name for root in roots)):
        inner = sorted(find_runs([folder]), key=by_number) if folder.is_dir() else []
        if inner and not any((folder / file).exists() for file in (STATUS, SUMMARY)):
            return inner
    return [one_run(roots, [name]).folder]


def by_number(folder: Path) -> tuple[str, int]:
    """Return the key that sorts the runs of a sweep, `<sweep id>-<n>`, by their numbers."""
    name, _, number = folder.name.rpartition("-")
    return (name, int(number)) if number.isdecimal() else (folder.name, -1)


def one_run(roots: Sequence[Path], names: Sequence[str]) -> RunRecord:
    """Return the run of this name; see `runs_named`."""
    found = runs_named(roots, names)
    if len(found) > 1:
        raise ConfigError("launcher runs: one run is expected here", "Name only one.")
    return found[0]


def runs_named(roots: Sequence[Path], names: Sequence[str]) -> list[RunRecord]:
    """Return the runs of these names: folders, ids, or the beginnings of ids that are clear."""
    if not names:
        raise ConfigError("launcher runs: no run is named", "launcher runs lists them.")
    folders = {folder.name: folder for folder in find_runs(roots)}
    found = []
    for name in names:
        path = Path(name)
        if name in folders:
            found.append(read_run(folders[name]))
        elif os.sep in name and list(find_runs([path.parent])).count(path):
            found.append(read_run(path))
        else:
            begins = [known for known in folders if known.startswith(name)]
            if len(begins) != 1:
                remedy = (
                    f"It may be {', '.join(sorted(begins)[:5])}."
                    if begins
                    else advice(name, sorted(folders)[-20:], "Newest")
                    if folders
                    else f"There are none below {' and '.join(map(str, roots))}."
                )
                raise ConfigError(f"There is no run {name}", remedy)
            found.append(read_run(folders[begins[0]]))
    return found
