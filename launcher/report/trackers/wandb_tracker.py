"""Record a run with Weights & Biases, without ending or delaying it.

Everything wandb writes goes into the run folder, and its own output is off. wandb is imported only
when a run is recorded.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.base import DamagedError, first_line, read_json, to_type, write_whole
from launcher.config.sections import Wandb
from launcher.report.run_record import ended_well
from launcher.report.trackers.tracker import Metrics, TrackedRun, Tracker

if TYPE_CHECKING:
    import wandb

Mode = Literal["online", "offline"]
ONLINE_TIMEOUT = 10  # seconds that connecting to the server may delay the start of a run
AXES = ("step", "perf/tokens")  # what charts may be drawn against; the first one unless asked
UPLOAD_TIMEOUT = 60  # seconds that the last uploads may delay its end; the rest stays on disk

# Variables of wandb's without effect, as the arguments of `WandbTracker` decide it.
_OURS = (
    *("RUN_ID", "DIR", "RESUME", "REINIT", "SILENT", "CONSOLE", "X_DISABLE_META", "DISABLE_GIT"),
    *("SAVE_CODE", "INIT_TIMEOUT", "FINISH_TIMEOUT"),
)
# Files in the folder of a recording that hold its newest step: ours, and one of wandb online.
_FINISHED, _UPLOADED = "finished.json", "files/wandb-summary.json"

_log = logging.getLogger(__name__)


def open_wandb(run: TrackedRun) -> WandbTracker | None:
    """Start recording, as the section `wandb` of the settings says.

    A run of the same id is continued. Where `mode` is null, WANDB_MODE decides; where that is
    unset, too, a run is recorded online if the user is logged in, else offline. Online falls back
    to offline, with a warning, where nobody is logged in or the server does not answer.

    Returns:
        The tracker, or None where recording is disabled or cannot be started.
    """
    settings = Wandb(**run.config["wandb"])
    asked = settings.mode or os.environ.get("WANDB_MODE", "")
    if asked not in ("", "online", "offline", "disabled"):
        _log.warning(f"WANDB_MODE={asked} is none of online, offline, disabled: wandb is left out")
    if asked not in ("", "online", "offline"):
        return None
    mode: Mode = "offline" if asked == "offline" else "online"
    if ours := [f"WANDB_{name}" for name in _OURS if f"WANDB_{name}" in os.environ]:
        _log.warning(f"wandb: without effect, as each run decides this itself: {', '.join(ours)}")
    try:
        import wandb

        wandb.setup(wandb.Settings(silent=True, mode=mode))
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            if asked:
                _log.warning(
                    "wandb: nobody is logged in, recording offline (to log in: wandb login)"
                )
            mode = "offline"
    except Exception as error:
        # wandb is missing or broken, or the key is malformed.
        _log.warning(f"wandb: {first_line(error)}; recording offline")
        mode = "offline"
    modes: tuple[Mode, ...] = ("online", "offline")
    for attempt in modes[modes.index(mode) :]:
        try:
            return WandbTracker(settings, attempt, run)
        except Exception as error:
            _teardown()
            outcome = "recording offline" if attempt == "online" else "not recording"
            _log.warning(f"wandb: cannot go {attempt} ({first_line(error)}); {outcome}")
    return None


class WandbTracker(Tracker):
    """One wandb run.

    Methods raise what wandb raises; its service process is ended by then, and nothing more can be
    recorded.

    Args:
        settings: the section `wandb`.
        mode: online or offline, whatever the settings say.
        run: the run to record.

    Attributes:
        url: the address of the run's page; None where it is recorded offline.
        sync_command: the command that uploads an offline run; None where it is online.
    """

    def __init__(self, settings: Wandb, mode: Mode, run: TrackedRun) -> None:
        import wandb

        self._newest, self._earlier = _newest_recorded(run.folder / "wandb", mode), run.earlier
        self._run: wandb.Run | None = wandb.init(
            id=run.id,
            name=settings.name or os.environ.get("WANDB_NAME") or run.id,
            project=settings.project or os.environ.get("WANDB_PROJECT") or "launcher",
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags or None,
            config=dict(run.config),
            dir=run.folder,
            mode=mode,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                # Leave out the command line and the repository: they may hold secrets. The run's
                # settings are in its config.
                x_disable_meta=True,
                disable_git=True,
                save_code=False,
                init_timeout=ONLINE_TIMEOUT,
                finish_timeout=UPLOAD_TIMEOUT,
            ),
        )
        for axis in AXES:
            self._run.define_metric(axis)
        self._run.define_metric("*", step_metric="step")
        if mode == "online":  # the server tells what it has
            self._newest = max(self._newest, self._run.step - 1)
        command = f"{to_type('wandb', 'sync', str(run.folder / 'wandb'))}/offline-run-*"
        self.url = self._run.url if mode == "online" else None
        self.sync_command = None if mode == "online" else command

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table together with the next step, or with the last one after it."""
        with self._recording() as run:
            import wandb

            run.log({name: wandb.Table(columns=[*columns], data=[*rows])}, commit=False)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the known metrics of a step; a step that is done again is left out.

        The first call also records steps of earlier starts that were lost as these were killed.
        """
        earlier, self._earlier = self._earlier, ()
        for record in earlier:
            self.log(record["step"], record)
        if step <= self._newest:  # wandb accepts no step twice
            return
        self._newest = step
        known = {key: value for key, value in metrics.items() if value is not None}
        with self._recording() as run:
            run.log({"step": step, **known}, step=step)

    def image(self, name: str, path: Path) -> None:
        """Record a PNG file together with the last step."""
        with self._recording() as run:
            import wandb

            run.log({name: wandb.Image(str(path))}, commit=False)

    def artifact(self, name: str, path: Path) -> None:
        """Record a file or a folder as `<run id>-<name>`, by its place in the run's folder.

        Nothing is copied: an offline run is uploaded from where it lies.
        """
        with self._recording() as run:
            import wandb

            found = wandb.Artifact(f"{run.id}-{name}", type=name)
            if path.is_dir():
                found.add_dir(str(path), policy="immutable")
            else:
                found.add_file(str(path), policy="immutable")
            run.log_artifact(found)

    def alert(self, title: str, text: str) -> None:
        """Send an alert, which wandb passes on by mail or to Slack as the user has set it up."""
        with self._recording() as run:
            run.alert(title, text, level="WARN", wait_duration=0)

    def summary_fields(self) -> dict[str, str | None]:
        """Return the run's URL, or the command that uploads it."""
        return {"wandb_url": self.url, "wandb_sync_command": self.sync_command}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send `summary`, wait for the uploads (bounded), and end wandb's service process.

        A second call does nothing.
        """
        if self._run is None:
            return
        known = {key: value for key, value in summary.items() if value is not None}
        failed = not ended_well(summary.get("exit_reason", "done"))
        with self._recording() as run:
            run.summary.update(known)
            began, folder = time.monotonic(), Path(run.dir).parent
            run.finish(exit_code=int(failed))
            if time.monotonic() - began >= UPLOAD_TIMEOUT:
                command = to_type("wandb", "sync", "--include-online", str(folder))
                _log.warning(f"wandb: not all is uploaded after {UPLOAD_TIMEOUT} s; run {command}")
            write_whole(folder / _FINISHED, json.dumps({"step": self._newest}))
        self._run = None
        _teardown()

    @contextmanager
    def _recording(self) -> Iterator[wandb.Run]:
        """Yield the run; a failure ends wandb's service process."""
        if self._run is None:
            raise RuntimeError("the recording has ended")
        try:
            yield self._run
        except Exception:
            self._run = None
            _teardown()
            raise


def _newest_recorded(folder: Path, mode: Mode) -> int:
    """Return the newest step in the recordings of earlier starts, of which each has its folder.

    Where the server can tell, only those that are to be uploaded count.

    An offline one that was not finished is put aside: its last records are lost, and `wandb sync`
    uploads nothing at all where it cannot read one.
    """
    newest = 0
    for part in folder.glob("offline-run-*" if mode == "online" else "*run-[0-9]*"):
        is_offline = part.name.startswith("offline-")
        path = part / (_FINISHED if is_offline else _UPLOADED)
        try:
            newest = max(newest, int(read_json(path)["step"]))
        except (OSError, DamagedError, KeyError, TypeError):
            if is_offline:
                part.rename(part.with_name(f"unfinished-{part.name}"))
    return newest


def _teardown() -> None:
    """End wandb's service process, which otherwise stays until this one exits."""
    # The connection to a service that died is broken, or passes on its exit code by SystemExit.
    with suppress(Exception, SystemExit):
        import wandb

        wandb.teardown()
