"""A sweep by Optuna on a real Slurm, with nobody logged in: each trial is told once."""

import json
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from slurm_cluster import SlurmCluster, missing, wait_until

pytest.importorskip("optuna")
sys.path.insert(0, str(Path(__file__).parent))
from test_slurm import ON_SLURM, SECONDS, User

from launcher.submit.points import JOURNAL

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}"),
]

SWEEP = (
    *("-m", *ON_SLURM, "cluster.gpus=2", "run.id=s", "train.checkpoint.every_steps=25"),
    *("hydra/sweeper=optuna", "optimizer.learning_rate=interval(0.001,0.1)"),
)
ASK, TELL, NOTE = 4, 6, 8  # kinds of the journal's lines
COMPLETE, FAIL = 1, 3


class Sweep:
    """A sweep of so many trials, submitted; the process that did so has ended."""

    def __init__(self, user: User, trials: int, at_a_time: int, *words: str) -> None:
        self.slurm, self.trials, self.at_a_time = user.slurm, trials, at_a_time
        self.folder = user.folder / "multirun" / "s"
        many = (f"hydra.sweeper.n_trials={trials}", f"cluster.slurm.array={at_a_time}")
        self.submission = user.launcher(*SWEEP, *many, *words)

    def lines(self, kind: int) -> list[dict]:
        path = self.folder / JOURNAL
        found = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [line for line in found if line["op_code"] == kind]

    def notes(self, name: str) -> dict[int, str | int]:
        """The last note of this name, by trial."""
        noted = ((line["trial_id"], line["user_attr"]) for line in self.lines(NOTE))
        return {trial: note[name] for trial, note in noted if name in note}

    def step(self, place: int) -> int:
        path = self.folder / f"s-{place}" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def kill(self, place: int, all_of_it: bool) -> None:
        """SIGKILL for the launcher of an element, or for its batch script, too."""
        for process in self.slurm.left():
            with suppress(psutil.Error):
                environ, words = process.environ(), process.cmdline()
                is_task = "SLURM_PROCID" in environ and words[1:3] == ["-m", "launcher"]
                if environ.get("SLURM_ARRAY_TASK_ID") == str(place) and (is_task or all_of_it):
                    os.kill(process.pid, signal.SIGKILL)

    def running(self) -> int:
        return len(self.slurm.run("squeue", "-h", "-r", "-t", "R", check=False).split("\n"))

    def end(self) -> str:
        """Wait for the end; returns the output of all elements."""
        most = 0

        def ended() -> bool:
            nonlocal most
            most = max(most, self.running())
            return not self.slurm.run("squeue", "-h", check=False)

        wait_until(ended, 3 * SECONDS)
        assert most <= self.at_a_time
        return "\n".join(path.read_text() for path in self.folder.glob("s-*/logs/slurm-*.out"))


def test_trials_are_told_once_whatever_happens_after_logout(tmp_path: Path) -> None:
    with SlurmCluster() as slurm:
        user = User(slurm, tmp_path)
        sweep = Sweep(user, 12, 3, "train.steps=600")
        assert sweep.submission.returncode == 0, sweep.submission.stderr
        wait_until(lambda: sweep.step(0) > 5, SECONDS)
        sweep.kill(0, all_of_it=False)  # its script requeues it, and its trial goes on
        slurm.fail_controller()
        slurm.start()
        saved = "s-3/checkpoints/[0-9]*"
        wait_until(lambda: len([*sweep.folder.glob(saved)]) > 1, SECONDS)  # the first is whole
        sweep.kill(3, all_of_it=True)  # nobody is left to tell of it
        output = sweep.end()
        told = Counter(line["trial_id"] for line in sweep.lines(TELL))
        assert told == dict.fromkeys(range(13), 1), output
        states = {line["trial_id"]: line["state"] for line in sweep.lines(TELL)}
        places = sweep.notes("place")
        [lost] = [trial for trial, state in states.items() if state == FAIL]
        assert places[lost] == 3
        assert sorted(places.values()) == list(range(12))  # that of the second one is in its ASK
        [second] = [line["user_attrs"] for line in sweep.lines(ASK) if line.get("user_attrs")]
        assert second["place"] == 3
        assert f"trial {lost} failed: its job" in output
        assert output.count("this element comes back for it") == 1
        assert "resuming run s-3 at step" in output
        status = user.launcher("task=sweep_status", f"sweep.dir={sweep.folder}")
        assert status.returncode == 0, status.stderr
        assert status.stdout.count(" done") == 12
        again = Sweep(user, 12, 3, "train.steps=600").submission
        assert (again.returncode, "have ended" in again.stdout) == (0, True), again.stderr


def test_a_sweep_of_two_nodes_goes_on_when_it_is_submitted_again(tmp_path: Path) -> None:
    with SlurmCluster() as slurm:
        user = User(slurm, tmp_path)
        words = ("train.steps=3000", "cluster.hosts=2", "cluster.gpus=4")
        first = Sweep(user, 1, 1, *words)
        assert first.submission.returncode == 0, first.submission.stderr
        wait_until(lambda: first.step(0) > 5, SECONDS)
        refused = Sweep(user, 1, 1, *words).submission
        assert refused.returncode == 2
        assert "run.id=s is a sweep whose job " in refused.stderr
        slurm.run("scancel", "--name=s")
        wait_until(lambda: not slurm.run("squeue", "-h"), SECONDS)
        status = user.launcher("task=sweep_status", f"sweep.dir={first.folder}")
        assert "1 of 1 trials have no result, and no job is left: submit" in status.stdout
        second = Sweep(user, 1, 1, *words)
        assert second.submission.returncode == 0, second.submission.stderr
        output = second.end()
        assert Counter(line["trial_id"] for line in second.lines(TELL)) == {0: 1}, output
        assert second.lines(TELL)[0]["state"] == COMPLETE
        assert "resuming run s-0 at step" in output
