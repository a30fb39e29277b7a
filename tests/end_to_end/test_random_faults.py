"""SIGKILL, SIGSTOP and SIGTERM to whatever process of a run, at whatever moment, several in a row:
the run comes to the same bytes, nothing is left, and never is nothing heard of it for a minute.

    pytest -n 0 -m stress tests/end_to_end/test_random_faults.py

`FAULT_SEEDS=5-9` chooses the seeds.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from disturbed import SLOW, WORDS, assert_as_undisturbed
from launched import Launcher, command_of

FIRST, LAST = map(int, os.environ.get("FAULT_SEEDS", "0-29").split("-"))
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP, signal.SIGTERM)
ROUNDS = 3  # of faults, each of one to three in a row
MOST_STARTS = 2 * ROUNDS + 2
LONGEST_SILENCE = 60.0  # seconds
# A worker is found to hang after 4 s, before the first step after 40 s.
IMPATIENT = ("cluster.step_timeout=4", "cluster.start_timeout=50", "cluster.max_restarts=20")


class Watched:
    """A launcher of which something must be heard."""

    def __init__(self, folder: Path, start: int, *words: str) -> None:
        self._folder = folder
        self.output = folder / f"output_{start}"
        with self.output.open("w") as output:
            self.launcher = Launcher(folder, *words, stdout=output.fileno(), stderr=output.fileno())
        self._heard: tuple[object, float] = (None, time.monotonic())

    @property
    def ended(self) -> bool:
        return self.launcher.process.poll() is not None

    def listen(self) -> None:
        """Fail where nothing has been heard for too long."""
        sizes = [
            (str(path), path.stat().st_size)
            for pattern in ("output_*", "outputs/one/*", "outputs/one/logs/*")
            for path in self._folder.glob(pattern)
            if path.exists()
        ]
        if sizes != self._heard[0]:
            self._heard = sizes, time.monotonic()
        silence = time.monotonic() - self._heard[1]
        assert silence < LONGEST_SILENCE, self.output.read_text()

    def wait(self, until: Callable[[], object]) -> None:
        """Wait until `until()` holds or the launcher has ended."""
        while not self.ended and not until():
            self.listen()
            time.sleep(0.02)


def kind_of(process: psutil.Process, driver: int) -> str:
    """What the process is in the run."""
    words = command_of(process)
    if process.pid == driver:
        return "driver"
    for word in ("head.py", "gcs_server", "raylet/raylet", "ray::Worker", "Agent", "serve()"):
        if word in words:
            return word
    return "other"


def strike(watched: Watched, draw: random.Random) -> str:
    """A signal to a process of the run, the kinds of both drawn alike; says which."""
    driver = watched.launcher.process.pid
    kinds: dict[str, list[psutil.Process]] = {}
    for process in watched.launcher.processes():
        kinds.setdefault(kind_of(process, driver), []).append(process)
    if not kinds:
        return "nobody"
    kind = draw.choice(sorted(kinds))
    victim, signum = draw.choice(kinds[kind]), draw.choice(SIGNALS)
    try:
        victim.send_signal(signum)
        if signum == signal.SIGSTOP and victim.pid == driver:  # nothing could replace it
            time.sleep(draw.uniform(0, 2))
            victim.send_signal(draw.choice((signal.SIGCONT, signal.SIGKILL)))
        elif signum == signal.SIGSTOP and watched.ended:  # and no driver could end it
            victim.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        pass
    return f"{signum.name} {kind}"


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(FIRST, LAST + 1))
def test_whatever_is_killed_or_stopped_the_run_comes_to_the_same_bytes(
    undisturbed: Callable[..., Path],
    tmp_path: Path,
    seed: int,
) -> None:
    draw, run = random.Random(seed), tmp_path / "outputs" / "one"
    hosts = draw.choice((1, 2))
    words = (*WORDS, *SLOW, *IMPATIENT, f"cluster.hosts={hosts}")
    struck: list[str] = []
    code, start, rounds = 1, 0, 0
    watched = Watched(tmp_path, start, *words)
    while True:
        if rounds < ROUNDS:
            rounds += 1
            moment = time.monotonic() + draw.uniform(0, 20)
            watched.wait(lambda moment=moment: time.monotonic() > moment)
            if draw.random() < 0.5:
                watched.wait(lambda: list(run.glob("checkpoints/*.partial-*")))
            for _ in range(draw.randint(1, 3)):
                struck.append(strike(watched, draw))
                time.sleep(draw.uniform(0, 0.3))
        else:
            watched.wait(lambda: False)
        if watched.ended:
            code, _, _ = watched.launcher.end(soon=30)  # and nothing is left
            if code == 0 and rounds == ROUNDS:
                break
            start += 1
            assert start < MOST_STARTS, struck
            watched = Watched(tmp_path, start, *words)
    print(hosts, "hosts:", *struck, f"in {start + 1} starts", sep=", ")
    assert "Traceback" not in "".join(path.read_text() for path in tmp_path.glob("output_*"))
    assert_as_undisturbed(run, undisturbed(*WORDS, *SLOW, f"cluster.hosts={hosts}"))
