"""`python -m launcher` in a process of its own, and what it leaves in its run folder.

Every launcher carries a mark in its environment, which its children inherit: whoever bears it
afterwards has been left behind.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

MARK = "LAUNCHER_TEST_MARK"
DEADLINE = 240  # seconds that no launcher of these tests needs
COMMAND = sys.executable, "-m", "launcher"


class Launcher:
    """One `python -m launcher` in a process group of its own."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        deadline: float = DEADLINE,
    ) -> None:
        self._folder, self._deadline = folder, deadline
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            cwd=folder,
            env={**os.environ, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, condition) -> None:
        """Wait until `condition()` holds; the launcher must still run by then."""
        deadline = time.monotonic() + self._deadline
        while not condition():
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def wait_for_handlers(self) -> None:
        """Wait until the launcher answers signals: from its first lines on."""

        def handles() -> bool:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            (caught,) = (line for line in status.splitlines() if line.startswith("SigCgt:"))
            return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

        self.wait_for(handles)

    def end(self, soon: float = 0) -> tuple[int, str, str]:
        """Wait for the end: exit code, standard output, standard error. Nothing is left then; soon
        after, where the launcher could not see to that itself.

        Args:
            soon: within how many seconds, for a signal at a moment when the launcher may have been
                where it can only leave, and what it had started follows.
        """
        out, err = self.process.communicate(timeout=self._deadline)
        if self.process.returncode == -signal.SIGKILL:
            soon = 30
        psutil.wait_procs(self.processes(), timeout=soon)
        # wandb's own looks now and then whether its parent is there.
        own = [process for process in self.processes() if "wandb-symon" in process.name()]
        psutil.wait_procs(own, timeout=10)
        left = [(process.pid, process.status(), process.cmdline()) for process in self.processes()]
        assert left == [], f"left after exit code {self.process.returncode}: {left}\n{out}\n{err}"
        return self.process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        """The launcher's process, where it still runs, and all that it has started."""
        return [process for process in psutil.process_iter() if mark_of(process) == self.mark]

    def workers(self) -> list[psutil.Process]:
        """The worker processes: those that a plan names, without any that stand by."""
        plans = [json.loads(path.read_text()) for path in self._folder.glob("outputs/*/plan.json")]
        named = {worker["process"] for plan in plans for worker in plan.get("workers") or ()}
        found = [p for p in self.processes() if command_of(p).startswith("ray::Worker")]
        return [p for p in found if p.pid in named] or found

    def worker(self) -> psutil.Process:
        """The one worker process."""
        (worker,) = self.workers()
        return worker


def mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except psutil.Error:  # another user's, or gone
        return None


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # gone, or about to be
        return ""


def typed(text: str) -> tuple[str, ...]:
    """Settings as they are typed."""
    return tuple(text.split())


def train(folder: Path, *words: str) -> str:
    """Run `python -m launcher` to a good end without a warning; returns its standard output."""
    code, out, err = Launcher(folder, *words).end()
    assert code == 0, f"{out}\n{err}"
    assert "launcher: " not in err, err
    return out


def lines(run: Path) -> list[dict]:
    """The whole lines of a run's metrics."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]


def losses(run: Path) -> list[float]:
    return [line["train/loss"] for line in lines(run)]


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())
