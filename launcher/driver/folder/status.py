"""`status.json`: the present state of a run, kept fresh in its folder by a thread of the driver.

It never ends a run: a disk that cannot be written costs one warning, and is tried again.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from launcher.base import first_line, write_whole
from launcher.driver.callback import Callback
from launcher.report.console import Phase
from launcher.report.jsonl import json_number
from launcher.report.run_record import STATUS, ending_of
from launcher.report.trackers.tracker import Metrics

BEAT = 4.0  # seconds after which an unchanged status is written again: it shows that we live
_SHORTEST = 1.0  # seconds from one writing to the next
_WINDOW = 50  # steps that the time left is estimated from

_log = logging.getLogger(__name__)


class Status(Callback):
    """Keeps `status.json` in a run's folder; a context, whose thread writes.

    Args:
        folder: the run's folder.
        steps: the steps that the run is to make.
        job_id: the Slurm job, if there is one.
    """

    def __init__(self, folder: Path, steps: int, job_id: str | None = None) -> None:
        self._path = folder / STATUS
        process = psutil.Process()
        self._fields: dict[str, Any] = {
            "run_id": folder.name,
            **_phase(Phase.STARTING),
            "step": 0,
            "steps": steps,
            "eta_seconds": None,
            "loss": None,
            "eval_loss": None,
            "step_seconds": None,
            "restarts": 0,
            "plan": None,
            "host": socket.gethostname(),
            "pid": process.pid,
            "process_started": process.create_time(),
            "job_id": job_id,
            "forked_from": None,
            "exit_reason": None,
            "slow": None,
        }
        self._made: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._lock = threading.Lock()
        self._changed, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._keep, name="status", daemon=True)
        self._was_written = True

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and self._fields["exit_reason"] is None:
            stopped = isinstance(error, KeyboardInterrupt)
            self.on_end(self._fields["step"], "interrupted" if stopped else first_line(error))
        self._over = True
        self._changed.set()
        self._thread.join()
        if self._path.parent.is_dir():  # else it was deleted, or never kept
            self._write()

    def tell(self, **fields: Any) -> None:
        """Change some of the fields, such as `phase`."""
        with self._lock:
            if any(self._fields[name] != value for name, value in fields.items()):
                self._fields.update(fields)
                self._changed.set()

    def phase(
        self, phase: Phase, done: float | None = None, total: float | None = None, unit: str = ""
    ) -> None:
        """Show the phase, and how much of it is done, of how much; None: not known."""
        self.tell(phase=str(phase), phase_done=done, phase_total=total, phase_unit=unit)

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Show a finished step."""
        self._made.append((time.monotonic(), step))
        (began, first), steps = self._made[0], self._fields["steps"]
        each = (self._made[-1][0] - began) / (step - first) if step > first else None
        evaluated = metrics.get("eval/loss")
        self.tell(
            **_phase(Phase.TRAINING),
            step=step,
            loss=json_number(metrics.get("train/loss")),
            step_seconds=json_number(metrics.get("perf/step_seconds")),
            eta_seconds=None if each is None else round(each * (steps - step), 1),
            **({} if evaluated is None else {"eval_loss": json_number(evaluated)}),
        )

    def restart(self, step: int) -> None:
        """Show that an attempt failed, and that `step` is the newest on the disk."""
        self._made.clear()
        restarts = self._fields["restarts"] + 1
        self.tell(**_phase(Phase.RESTARTING), step=step, restarts=restarts, eta_seconds=None)

    def on_restart(self, step: int, why: str) -> None:
        """Show the step after which another attempt begins."""
        self.tell(step=step)

    def on_end(self, step: int, reason: str) -> None:
        """Show how the run has ended."""
        self.tell(**_phase(ending_of(reason)), exit_reason=reason, eta_seconds=None)

    def _keep(self) -> None:
        while not self._over:
            self._changed.wait(BEAT)
            if not self._over:
                self._write()
                time.sleep(_SHORTEST)  # a step may take a millisecond

    def _write(self) -> None:
        with self._lock:
            self._changed.clear()
            content: Mapping[str, Any] = {**self._fields, "updated_at": time.time()}
        try:
            write_whole(self._path, json.dumps(content, indent=1) + "\n", durable=False)
            self._was_written = True
        except OSError as error:
            if self._was_written and not isinstance(error, FileNotFoundError):
                _log.warning(f"{STATUS} is not written ({error.strerror}); the run continues")
            self._was_written = False


def _phase(phase: str) -> dict[str, Any]:
    return {"phase": str(phase), "phase_done": None, "phase_total": None, "phase_unit": ""}
