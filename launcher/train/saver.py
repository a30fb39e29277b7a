"""The saves of one worker: its part of the state is copied, then written beside the training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from launcher import checkpoint
from launcher.base import SpanRecorder
from launcher.checkpoint.train_state import TrainState


class Saver:
    """Writes this process's part of a state, one save at a time.

    Args:
        spans: records copying and writing.
    """

    def __init__(self, spans: SpanRecorder) -> None:
        self._spans = spans
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._process: checkpoint.Background | None = None
        self._save: Future[None] | None = None

    def start_process(self) -> None:
        """Start the process of low priority that writes the saves from now on."""
        self._process = checkpoint.Background()

    def begin(
        self,
        folder: Path,
        step: int,
        state: TrainState,
        metadata: dict[str, Any],
        keep: int,
        writers: checkpoint.Writers,
    ) -> None:
        """Begin to write a state; return once it is copied.

        `finish` must have been called for the save before.

        Args:
            folder: the folder of checkpoints.
            step: the number of finished steps.
            state: the state after them.
            metadata: JSON-able metadata of the checkpoint.
            keep: how many of the newest checkpoints to keep.
            writers: the processes that write it together.
        """
        assert self._save is None
        # A save at the end of a run holds nothing up, so it is not worth starting a process.
        writer = self._process or checkpoint  # both have `copy_to_host` and `save`
        with self._spans.span("save", f"copy of the state after step {step}"):
            copy = writer.copy_to_host(state)
        self._save = self._thread.submit(
            self._write, writer.save, folder, step, copy, metadata, keep, writers
        )

    def _write(self, save: Callable[..., None], folder: Path, step: int, *rest: Any) -> None:
        with self._spans.span("save", f"state after step {step}"):
            save(folder, step, *rest)

    def is_writing(self, seconds: float) -> bool:
        """Wait for up to `seconds`; return whether the save is still being written."""
        return bool(self._save and wait([self._save], seconds).not_done)

    def finish(self) -> str | None:
        """Wait for the save in progress; return why it failed, or None if it did not."""
        save, self._save = self._save, None
        try:
            if save is not None:
                save.result()
        except checkpoint.SaveError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Stop the thread and the process, once the save in progress is written."""
        self._thread.shutdown()
        if self._process is not None:
            self._process.close()
