"""Copy checkpoints to a run's mirror beside training, in a process of the lowest priority.

The process looks at the folder of checkpoints each second, and at nothing else of the run: a step
waits for none of it, and no worker knows of it. It writes a line of JSON for each thing that the
user should know, and for its progress once the run waits for it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from launcher.base import Store, StoreError, end_with_parent
from launcher.checkpoint.layout import files_below, steps_in
from launcher.checkpoint.mirror import Mirror, RunIdentity, SupersededError, unmirrored
from launcher.stop import ENDINGS

_LOOK_SECONDS = 1.0
_AGAIN_SECONDS = 5.0  # before a process that was killed is replaced
_MOST_STARTS = 5
_TELL_SECONDS = 0.5
_NICENESS = 19
_PROGRAM = f"from {__name__} import serve_mirror; serve_mirror()"


class Mirroring:
    """The process that mirrors a run, and a thread that listens to it and replaces it.

    Args:
        url: the mirror.
        home: the run's folder.
        owner: this run.
        keep: how many checkpoints to keep besides those that stay.
        say: called with each line for the user, in the thread.

    Attributes:
        progress: of the checkpoint under way, the bytes sent, its bytes and its step.
        mirrored: the newest step, once nothing is left to do.
        left: the steps that the mirror lacks; None until the process has ended by itself.
    """

    def __init__(
        self, url: str, home: Path, owner: RunIdentity, keep: int, say: Callable[[str], None]
    ) -> None:
        about = {"url": url, "home": str(home.absolute()), "owner": asdict(owner), "keep": keep}
        self._about, self._say = json.dumps(about), say
        self._log = home.absolute() / "logs" / "mirror.log"
        self._log.parent.mkdir(exist_ok=True)
        self.progress: tuple[int, int, int] | None = None
        self.mirrored = 0
        self.left: list[int] | None = None
        self._closing, self._killed = threading.Event(), False
        self._process = self._start()
        self._thread = threading.Thread(target=self._listen, name="mirroring", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Have the process mirror what is left, and then end."""
        self._closing.set()
        _close(self._process.stdin)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """End the process now."""
        self._killed = True
        self.finish()
        self._process.kill()
        self._thread.join()

    def _listen(self) -> None:
        for _ in range(_MOST_STARTS):
            assert self._process.stdout is not None
            for line in self._process.stdout:
                message = json.loads(line)
                if "say" in message:
                    self._say(message["say"])
                self.progress = message.get("progress", self.progress)
                self.mirrored = message.get("mirrored", self.mirrored)
                self.left = message.get("left")
            code = self._process.wait()
            _close(self._process.stdout)
            if self._killed or self.left is not None:
                break
            self._say(f"the process that mirrors checkpoints ended ({code}); see {self._log}")
            self._closing.wait(_AGAIN_SECONDS)
            _close(self._process.stdin)
            self._process = self._start()
            if self._closing.is_set():
                _close(self._process.stdin)

    def _start(self) -> subprocess.Popen[str]:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with open(self._log, "a") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, self._about],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ,
                process_group=0,
                text=True,
            )


def _close(pipe: IO[str] | None) -> None:
    with suppress(OSError):
        if pipe:
            pipe.close()


def serve_mirror() -> None:
    """Mirror checkpoints until standard input ends and all are mirrored: the whole program."""
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)  # they are for the driver
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    closing = threading.Event()

    def listen() -> None:
        while os.read(0, 1):
            pass
        closing.set()

    threading.Thread(target=listen, daemon=True).start()
    about = json.loads(sys.argv[1])
    uploads = _Uploads(
        about["url"], Path(about["home"]), RunIdentity(**about["owner"]), about["keep"]
    )
    _tell(left=uploads.run(closing))


def _tell(**message: Any) -> None:
    print(json.dumps(message), flush=True)


class _Uploads:
    """Uploads what a mirror lacks; arguments as of `Mirroring`."""

    def __init__(self, url: str, home: Path, owner: RunIdentity, keep: int) -> None:
        self._url, self._home, self._owner, self._keep = url, home, owner, keep
        self._step = self._sent = self._size = 0
        self._told_at = 0.0
        self._told: type[Exception] | None = None  # the kind of the failure that was reported
        self._lock = threading.Lock()

    def run(self, closing: threading.Event) -> list[int]:
        """Upload each new checkpoint until `closing`; return the steps that are left."""
        seen, left = -1, list[int]()
        while True:
            is_last, changed = closing.is_set(), self._changed()
            if changed != seen or (is_last and left):  # a new save, or the last try
                seen, left = changed, self._upload()
            if is_last:
                return left
            closing.wait(_LOOK_SECONDS)

    def _changed(self) -> int:
        try:
            return (self._home / "checkpoints").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _upload(self) -> list[int]:
        """Upload what the mirror lacks; return the steps that could not be uploaded."""
        left = steps_in(self._home / "checkpoints")[-1:]
        if not left:
            return []
        newest = left[0]
        try:
            mirror = Mirror(Store(self._url))  # reads the credentials anew
            if not mirror.own(self._owner):
                raise SupersededError(f"{self._url} belongs to another run now")
            while left := unmirrored(self._home, mirror.commits()):
                self._begin(left[0])
                mirror.upload(self._home, left[0], self._keep, self._count)
                if self._told:
                    _tell(say=f"step {left[0]} is mirrored to {self._url} again")
                self._told = None
            _tell(mirrored=newest)
        except FileNotFoundError:  # the run has deleted it meanwhile
            return []
        except SupersededError as error:
            _tell(say=f"no checkpoint is mirrored any more: {error}", left=left)
            sys.exit()
        except (StoreError, OSError) as error:
            if self._told is not type(error):
                text = error if isinstance(error, StoreError) else error.strerror
                _tell(say=f"step {left[0]} is not mirrored: {text}; the next save tries again")
            self._told = type(error)
        return left

    def _begin(self, step: int) -> None:
        files = files_below(self._home / "checkpoints" / str(step))
        self._step, self._sent, self._size = step, 0, sum(path.stat().st_size for path in files)
        self._count(0)

    def _count(self, size: int) -> None:
        with self._lock:
            self._sent = min(self._sent + size, self._size)
            if time.monotonic() - self._told_at > _TELL_SECONDS:
                self._told_at = time.monotonic()
                _tell(progress=(self._sent, self._size, self._step))
