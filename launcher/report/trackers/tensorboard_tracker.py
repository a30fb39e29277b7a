"""Record a run for TensorBoard, in the folder `tensorboard/` of the run's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.report.trackers.tracker import Metrics, TrackedRun, Tracker

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

FOLDER = "tensorboard"
_FLUSH = 10  # seconds of records that are lost with a process that is killed


class TensorBoardTracker(Tracker):
    """Writes event files, by tensorboardX.

    Tables are Markdown. Files of the run lie beside the folder and are not copied.

    Args:
        run: the run to record.
    """

    needs = ("tensorboardX",)

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.folder / FOLDER
        self._writer: SummaryWriter | None = None
        self._alerts = self._step = 0
        self._goes_on = self._folder.exists()
        self._config = run.config

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table as text."""
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        self._open().add_text(name, text, self._step)

    def rewind(self, first_step: int) -> None:
        """Have TensorBoard drop the steps from `first_step` on."""
        self._close()
        self._goes_on = False
        self._open(purge_step=first_step)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the known metrics of a step."""
        if self._goes_on:  # what the last start logged after the checkpoint is dropped
            self.rewind(step)
        writer = self._open()
        self._step = step
        for key, value in metrics.items():
            if value is not None:
                writer.add_scalar(key, value, step)

    def image(self, name: str, path: Path) -> None:
        """Record a PNG file."""
        from matplotlib.image import imread

        self._open().add_image(name, imread(path)[..., :3], self._step, dataformats="HWC")

    def alert(self, title: str, text: str) -> None:
        """Record an alert as text."""
        self._alerts += 1
        self._open().add_text(f"alerts/{self._alerts}", f"**{title}**\n\n{text}", self._step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the summary and close the file."""
        if summary:
            self._open().add_text("summary", _code(summary), self._step)
        self._close()

    def _open(self, purge_step: int | None = None) -> SummaryWriter:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            is_new = not self._folder.exists()
            number = len(list(self._folder.glob("events.*")))  # names have the second alone
            named = {"filename_suffix": f".{number}", "flush_secs": _FLUSH}
            self._writer = SummaryWriter(str(self._folder), purge_step=purge_step, **named)
            if is_new:
                self._writer.add_text("config", _code(self._config), 0)
        return self._writer

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|")


def _code(tree: Mapping[str, Any]) -> str:
    """Return a tree as a block of code in Markdown."""
    return "\n".join(f"    {line}" for line in json.dumps(tree, indent=2, default=str).splitlines())
