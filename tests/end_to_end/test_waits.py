"""A run of which a worker stands before the first step ends in time, and says who stands where.

One test holds up each call of a worker that a run waits for, in a run as users start it.
"""

import re
import signal
import sys
import time
from pathlib import Path

import pytest
from launched import Launcher, train, typed

from launcher.cluster.worker_group import wait_of

# As `python -m launcher`, with less patience.
PROGRAM = """
import sys
from launcher.__main__ import main
from launcher.cluster import worker_group

worker_group.STILL_SECONDS = 6.0
sys.exit(main(sys.argv[1:]))
"""
DATA = """
import time
from pathlib import Path

from launcher.recipes import Dataset
from launcher.recipes.datasets.synthetic.dataset import build as synthetic
from launcher.recipes.datasets.synthetic import Synthetic


def hold_up(method):
    from launcher.train.worker import TrainWorker

    does = getattr(TrainWorker, method)

    def first_stands(self, *arguments):
        if self._rank == 0:
            time.sleep(600)
        return does(self, *arguments)  # and waits for the first one, where it is to meet it

    setattr(TrainWorker, method, first_stands)


def check(options, model_options, validation):
    pass


def build(options, model_options, global_batch_size, seed):
    in_worker = Path("/proc/self/cmdline").read_text().startswith("ray::")
    held_up = Path("held_up").read_text() if in_worker else ""
    if held_up == "build":
        time.sleep(600)
    if held_up and held_up != "batch":
        hold_up(held_up)
    made = synthetic(Synthetic(), model_options, global_batch_size, seed)
    if held_up != "batch":
        return made

    asked = []

    def held(k):
        asked.append(k)
        if len(asked) > 1:  # the first one tells the shapes
            time.sleep(600)
        return made.train(k)

    return Dataset(train=held, validation=None, describe="held up")
"""
WORDS = typed(
    "model=mlp train.steps=3 train.eval_every=0 report=none cluster=emulated cluster.hosts=2 "
    "cluster.gpus=2 cluster.max_restarts=0 cluster.start_timeout=40 parallel=data "
    "parallel.cost=model run.id=one dataset=synthetic"
)
OWN_DATA = "dataset=custom", "dataset.module=held", "allow_modules=[held]"


def ended(running: Launcher) -> str:
    """What the run says; it ends with 1, and no process is left."""
    began = time.monotonic()
    code, _, err = running.end()
    assert code == 1, err
    assert time.monotonic() - began < 150
    return err


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launched.COMMAND", (sys.executable, "-c", PROGRAM))


@pytest.mark.stress
@pytest.mark.parametrize(
    ("held_up", "doing"),
    [
        ("build", "it reads the first data and traces the step"),
        ("batch", "it reads its first batch"),
    ],
)
def test_data_that_never_come(held_up: str, doing: str, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(DATA)
    (tmp_path / "held_up").write_text(held_up)
    err = ended(Launcher(tmp_path, *WORDS, *OWN_DATA))
    assert f"for 6 s, while {doing}" in err
    assert "no answer from worker_0, worker_1" in err


@pytest.mark.slow
@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "method", typed("compiled setup restore begin_setup create first_batch dry_step")
)
def test_a_worker_that_stands_in_a_call(method: str, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(DATA)
    words = (*WORDS, *OWN_DATA, "train.dry_steps=1", "cluster.step_timeout=8")
    if method == "restore":
        (tmp_path / "held_up").write_text("")
        train(tmp_path, *words)
        words = (*words, "train.steps=5")
    (tmp_path / "held_up").write_text(method)
    err = ended(Launcher(tmp_path, *words))
    limit = "8" if method == "dry_step" else "6"
    assert re.search(
        rf"no answer from .*worker_0.* for {limit} s, while {wait_of(method).words}", err
    )
    assert "held.py" in err  # where it stands


@pytest.mark.stress
def test_a_worker_that_is_stopped_while_it_starts(tmp_path: Path) -> None:
    running = Launcher(tmp_path, *WORDS)
    running.wait_for(lambda: len(running.workers()) == 2)
    running.workers()[-1].send_signal(signal.SIGSTOP)
    assert re.search(
        r"no answer from worker_\d.* for 6 s, while it"
        r"|Ray did not start the processes of worker_\d within 40 s \(cluster\.start_timeout\)",
        ended(running),
    )
