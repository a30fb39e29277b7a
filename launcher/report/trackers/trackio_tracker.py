"""Record a run with trackio, in the project "launcher".

`trackio show --project launcher` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.report.text import flat
from launcher.report.trackers.tracker import Metrics, TrackedRun, Tracker

if TYPE_CHECKING:
    from trackio.run import Run

PROJECT = "launcher"


class TrackioTracker(Tracker):
    """One trackio run, with the run's id as its name; the run's files are not copied.

    trackio takes seconds to import: that begins with the first call, which is not on the thread of
    the training.

    Args:
        run: the run to record.
    """

    needs = ("trackio",)

    def __init__(self, run: TrackedRun) -> None:
        self._tracked, self._newest = run, 0
        self._begun: Run | None = None

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table."""
        from trackio import Table

        cells = [["" if cell is None else cell for cell in row] for row in rows]
        self._open().log({name: Table(columns=[*columns], data=cells)}, step=self._newest)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the known metrics of a step; a step that is done again is left out."""
        run = self._open()
        if step > self._newest:  # what is logged cannot be taken back
            self._newest = step
            run.log({key: value for key, value in metrics.items() if value is not None}, step=step)

    def image(self, name: str, path: Path) -> None:
        """Record a PNG file."""
        from trackio import Image

        self._open().log({name: Image(path)}, step=self._newest)

    def alert(self, title: str, text: str) -> None:
        """Alert the user, by trackio's webhook where one is set."""
        self._open().alert(title, text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the summary and end the run."""
        known = {f"summary/{key}": value for key, value in summary.items() if value is not None}
        self._open().log(known, step=self._newest)
        self._open().finish()

    def _open(self) -> Run:
        if self._begun is None:
            import trackio
            from trackio.sqlite_storage import SQLiteStorage

            tracked, again = self._tracked, bool(self._tracked.earlier)
            if again:  # a run of the same name elsewhere is another one
                logs = SQLiteStorage.get_logs(PROJECT, tracked.id)
                self._newest = max((int(one["step"]) for one in logs), default=0)
            self._begun = trackio.init(
                PROJECT,
                tracked.id,
                config=flat(tracked.config),
                resume="allow" if again else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            for record in tracked.earlier if again else ():
                self.log(record["step"], record)
        return self._begun
