"""Records a run with Weights & Biases, without ever standing in its way.

Everything wandb writes goes below the run folder, its own chatter is off, and any failure of it
(no network, a full disk, a dead service process) is said once and then ends the recording, never
the training. wandb is imported only when a run is recorded. `launcher.train` is the user.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from launcher.config.schema import Wandb
from launcher.report.plan_record import Rows
from launcher.report.tracker import Metrics

Mode = Literal["online", "offline"]
ONLINE_TIMEOUT = 10  # seconds that reaching the server may delay the start of a run
UPLOAD_TIMEOUT = 60  # seconds that the last uploads may delay its end; what is left stays on disk


def open_wandb(
    settings: Wandb,
    *,
    run_id: str,
    config: Mapping[str, Any],
    run_dir: Path,
    warn: Callable[[str], None],
) -> WandbTracker | None:
    """Start recording, or return None where it is disabled or cannot be started.

    A run of the same `run_id` is continued. Online falls back to offline, with a warning, where
    nobody is logged in or the server does not answer.

    Args:
        settings: the `wandb` section. `mode` None is what WANDB_MODE says, else online where the
            user is logged in, else offline.
        config: the resolved settings of the run, which are uploaded: `redacted`.
        run_dir: the run folder; wandb's files go to `wandb/` below it.
        warn: says one line to the user.
    """
    asked = settings.mode or os.environ.get("WANDB_MODE", "")
    if asked not in ("", "online", "offline"):
        if asked != "disabled":
            warn(f"WANDB_MODE={asked} is none of online, offline, disabled: wandb is left out")
        return None
    mode: Mode = "offline" if asked == "offline" else "online"
    try:
        import wandb

        wandb.setup(wandb.Settings(silent=True, mode=mode))
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            if asked:
                warn("wandb: nobody is logged in, recording offline (to log in: wandb login)")
            mode = "offline"
    except Exception as error:
        # A missing or broken installation, or a key that is none.
        warn(f"wandb: {_first_line(error)}; recording offline")
        mode = "offline"
    attempts: tuple[Mode, ...] = ("online", "offline") if mode == "online" else ("offline",)
    for attempt in attempts:
        try:
            return WandbTracker(settings, attempt, run_id, config, run_dir, warn)
        except Exception as error:
            _teardown()
            outcome = "recording offline" if attempt == "online" else "not recording"
            warn(f"wandb: cannot go {attempt} ({_first_line(error)}); {outcome}")
    return None


class WandbTracker:
    """One wandb run. `open_wandb` makes it."""

    def __init__(
        self,
        settings: Wandb,
        mode: Mode,
        run_id: str,
        config: Mapping[str, Any],
        run_dir: Path,
        warn: Callable[[str], None],
    ) -> None:
        import wandb

        self._warn = warn
        self._run: wandb.Run | None = wandb.init(
            id=run_id,
            name=settings.name or run_id,
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            config=dict(config),
            dir=run_dir,
            mode=mode,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=ONLINE_TIMEOUT,
                finish_timeout=UPLOAD_TIMEOUT,
            ),
        )
        self.url: str | None = None
        """Where the run is to be seen; None where it is recorded offline."""
        self.sync_command: str | None = None
        """The command that uploads an offline run; None where it is online."""
        if mode == "online":
            self.url = self._run.url
        else:
            self.sync_command = f"wandb sync {shlex.quote(str(run_dir / 'wandb'))}/offline-run-*"

    def log(self, metrics: Metrics) -> None:
        step = int(metrics["step"] or 0)
        known = {key: value for key, value in metrics.items() if value is not None}
        self._attempt(lambda run: run.log(known, step=step))

    def message(self, text: str) -> None:
        pass

    def tables(self, tables: Mapping[str, Rows]) -> None:
        """Record tables beside the step that comes next."""

        def add(run: Any) -> None:
            import wandb

            found = {
                name: wandb.Table(columns=[*t.columns], data=t.rows) for name, t in tables.items()
            }
            run.log(found, commit=False)

        self._attempt(add)

    def pictures(self, paths: Sequence[Path]) -> None:
        """Record PNG files, each under `plots/<its name>`."""

        def add(run: Any) -> None:
            import wandb

            found = {f"plots/{path.stem}": wandb.Image(str(path)) for path in paths}
            run.log(found, commit=False)

        self._attempt(add)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send `summary`, wait for the uploads (bounded), and end wandb's service process."""
        if self._run is None:
            return
        known = {key: value for key, value in summary.items() if value is not None}
        failed = summary.get("exit_reason", "done") != "done"
        self._attempt(lambda run: run.summary.update(known))
        self._attempt(lambda run: run.finish(exit_code=int(failed)))
        self._run = None
        _teardown()

    def _attempt(self, action: Callable[[Any], None]) -> None:
        """Do `action` with the run; a failure is said and ends the recording."""
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            self._run = None
            self._warn(f"wandb: {_first_line(error)}; the run is no longer recorded there")
            _teardown()


def _teardown() -> None:
    """End wandb's service process, which otherwise stays until this one exits."""
    # A service that died takes the connection with it, or hands on its exit code by SystemExit.
    with suppress(Exception, SystemExit):
        import wandb

        wandb.teardown()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
