"""Copy checkpoints to a run's mirror beside training, in processes of the lowest priority.

A thread of the driver looks at the folder of checkpoints each second and starts a process after a
save: a step waits for neither, and no worker knows of them. The process ends when all is mirrored,
or with what prevents it, so that each save tries anew, with the credentials of then. It reads what
it is to do from its input, and writes a line of JSON for its progress, and one for its result.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.base import DamagedError, end_with_parent, stores
from launcher.checkpoint.layout import is_step, steps_in
from launcher.checkpoint.mirror import Mirror, SupersededError, unmirrored
from launcher.stop import ENDINGS

_LOOK_SECONDS = 1.0
_KILL_SECONDS = 0.1
_NICENESS = 19
_PROGRAM = f"from {__name__} import upload_all; upload_all()"


class Mirroring:
    """Has each new checkpoint of a run mirrored, in a thread that starts and hears the processes.

    Args:
        url: the mirror.
        home: the run's folder.
        owner: this run.
        keep: how many checkpoints to keep besides those that stay.
        texts: see `Mirror`.
        say: called with each line for the user, in the thread.

    Attributes:
        progress: the bytes sent of the checkpoint under way, and all its bytes.
        mirrored: the newest step, while nothing is left to do.
    """

    def __init__(
        self,
        url: str,
        home: Path,
        owner: str,
        keep: int,
        texts: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._url, self._home, self._say = url, home.absolute(), say
        about = {"url": url, "home": str(self._home), "owner": owner, "keep": keep, "texts": texts}
        self._about: dict[str, Any] = about
        self._log = self._home / "logs" / "mirror.log"
        self._log.parent.mkdir(exist_ok=True)
        self.progress: tuple[int, int] | None = None
        self.mirrored = 0
        self._failed = ""  # the kind of the last failure; the same again is not reported
        self._last, self._ended = threading.Event(), False
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="mirroring", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Have what is left mirrored, and then end."""
        self._last.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end; return whether all has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """End now."""
        self._ended = True
        self._last.set()
        while not self.wait(_KILL_SECONDS):
            if self._process is not None:
                self._process.kill()

    def _run(self) -> None:
        # The processes inherit it: these signals are for the driver.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
        tried = None
        while not self._ended:
            is_last, saved = self._last.is_set(), self._saved()
            if saved and (saved != tried or (is_last and not self.mirrored)):
                tried, self.mirrored = saved, 0
                try:
                    failure = self._upload()
                except OSError as error:  # no log, or no process
                    failure = type(error).__name__, error.strerror or str(error)
                self._report(saved[0], failure)
            if is_last:
                return
            self._last.wait(_LOOK_SECONDS)

    def _saved(self) -> tuple[int, int] | None:
        """Return the newest step and its folder's inode, which differs if it is saved again."""
        try:
            with os.scandir(self._home / "checkpoints") as found:
                steps = [(int(one.name), one.inode()) for one in found if is_step(one.name)]
        except OSError:
            return None
        return max(steps, default=None)

    def _upload(self) -> tuple[str, str] | None:
        """Start the process and wait for its end; return the kind and the text of its failure."""
        result: dict[str, Any] = {}
        with (
            open(self._log, "a") as log,
            subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                text=True,
                start_new_session=True,
            ) as self._process,
        ):
            _give_way(self._process.pid)
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError), self._process.stdin as pipe:  # seen by nobody else
                json.dump(self._about, pipe)
            for line in self._process.stdout:
                result = json.loads(line)
                self.progress = result.get("progress", self.progress)
                self._about |= {name: result[name] for name in {"start"} & set(result)}
        self.mirrored = result.get("mirrored", 0)
        if code := self._process.returncode:
            return "killed", f"the process for it ended ({code}); see {self._log}"
        return result.get("failure")

    def _report(self, step: int, failure: tuple[str, str] | None) -> None:
        if self.mirrored and self._failed:
            self._say(f"step {self.mirrored} is mirrored to {self._url} again")
            self._failed = ""
        if self._ended or failure is None or failure[0] == self._failed:
            return
        self._failed, text = failure
        self._ended = self._failed == SupersededError.__name__
        later = "; no checkpoint is any more" if self._ended else "; the next save tries again"
        self._say(f"step {step} is not mirrored: {text}{later}")


def _give_way(process: int) -> None:
    """Leave a process, the first of its session, what all others leave of the processors."""
    os.setpriority(os.PRIO_PROCESS, process, _NICENESS)
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
            # The kernel may give sessions equal shares, whatever is set of their processes.
            Path(f"/proc/{process}/autogroup").write_text(str(_NICENESS))


def upload_all() -> None:
    """Mirror what the mirror lacks: the whole process."""
    end_with_parent()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    about = json.load(sys.stdin)
    home = Path(about["home"])
    try:
        mirror = Mirror(stores.Store(about["url"]), about.get("start"), about["texts"])
        if not mirror.own(about["owner"]):
            raise SupersededError(f"{about['url']} belongs to another run now")
        if mirror.start is None:
            newest, there = max(steps_in(home / "checkpoints"), default=0), mirror.copies()
            if there and there[0].step > newest:
                # An upload deletes copies of later steps, as the run has gone back: it has not.
                text = f"it has step {there[0].step}, later than this disk: start again to fetch it"
                raise stores.StoreError(text)
            _tell(start=mirror.begin())
        while True:
            newest = max(steps_in(home / "checkpoints"), default=0)
            left = unmirrored(home, mirror.copies())
            if not left:
                break
            mirror.upload(home, left[0], about["keep"], lambda *done: _tell(progress=done))
        _tell(mirrored=newest)
    except FileNotFoundError:  # the run has saved another and deleted this one: that one is next
        return
    except (stores.StoreError, OSError, DamagedError) as error:
        _tell(failure=(type(error).__name__, getattr(error, "strerror", None) or str(error)))


def _tell(**message: Any) -> None:
    print(json.dumps(message), flush=True)
