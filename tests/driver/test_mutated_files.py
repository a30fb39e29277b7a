"""Whatever is wrong with the small files of a run and its checkpoints: every door answers with an
exit code and lines of words, soon. A slice by default, 1,000 files with `pytest -m stress`."""

import random
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from launcher import checkpoint
from launcher.__main__ import main
from launcher.base.output import complain
from launcher.checkpoint import write
from launcher.checkpoint.train_state import TrainState
from launcher.cluster.devices import emulated_pool
from launcher.cluster.slurm.allocation import Allocation, begin, finish
from launcher.cluster.slurm.rendezvous import Rendezvous
from launcher.config.compose import load
from launcher.config.parallel import Replay
from launcher.driver import training
from launcher.driver.folder import folder
from launcher.driver.planning.init_from import check_start, find_start
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.planning.prepare import Prepared
from launcher.driver.run import guarded
from launcher.plan import local_shape
from launcher.report.console import make_console
from launcher.report.jsonl import JsonlTracker
from launcher.report.summary import Summary, write_summary
from launcher.report.sweep import is_done, print_comparison
from launcher.stop import Stop
from launcher.submit.job import note_job, read_job
from launcher.train.program import build_program

sys.path.insert(0, str(Path(__file__).parent))
from mutations import mutate, seal

SECONDS = 30  # that no door may take
ALLOCATION = Allocation("7", restarts=0, max_requeues=3, nodes=("a", "b"), index=0)
WORDS = ["model=mlp", "dataset=synthetic", "parallel=data", "cluster=emulated", "cluster.gpus=2",
         "wandb.mode=disabled", "train.steps=20"]  # fmt: skip


class Doors:
    """A run with all its small files, and what reads them."""

    def __init__(self, root):
        self.outputs = root / "outputs"
        self.config = load([*WORDS, f"run.dir={self.outputs}", "run.id=mine"])
        self.home = self.outputs / "mine"
        self.whole = root / "whole"
        self.shape = local_shape(2, 1, "cpu")
        self.program = build_program(self.config)
        self.plan = plan_of(self.config.parallel, self.program.train, self.shape)
        self.ready = Prepared(emulated_pool(self.config.cluster), self.plan, 0.0)
        self._write()
        self.home.rename(self.whole)
        self.all = (self.look, self.frozen, self.replay, self.start, self.parts, self.train)

    def _write(self):
        self.home.mkdir(parents=True)
        folder.write_plan(folder.RunFolder(self.home), self.config, self.plan)
        params = {"w": jnp.ones(3)}
        for step in (3, 6):
            state = TrainState(jnp.int32(step), params, {}, jnp.zeros(2, jnp.uint32))
            about = folder.contents(self.config, self.plan.to_dict(), step)
            checkpoint.save(self.home / "checkpoints", step, checkpoint.copy_to_host(state), about)
        tracker = JsonlTracker(self.home / "metrics.jsonl")
        for step in range(1, 9):
            tracker.log(step, {"train/loss": 1 / step, "perf/step_seconds": 0.1})
        tracker.finish({})
        write_summary(self.home, Summary("mine", "done", steps=8, final_loss=0.5))
        for n in range(2):
            finish(self.home, begin(self.home, ALLOCATION, n), 75, "preempted", n)
        note_job(self.home, "7", self.home / "job.sbatch")
        partial = self.home / "checkpoints" / "9.partial-t"
        partial.mkdir()
        write._leave(partial, 1, write._Note({"default/d": (3, "ab")}))

    def damage(self, draw):
        """A fresh copy of the run with a few files damaged; says which and how."""
        if self.home.exists():
            shutil.rmtree(self.home)
        shutil.copytree(self.whole, self.home)
        files = [path for path in self.home.rglob("*") if path.is_file()]
        named = {str(path.relative_to(self.home)): path for path in sorted(files)}
        small = [name for name in named if "/d/" not in name and not name.endswith(".png")]
        told = {name: mutate(named[name], draw) for name in draw.sample(small, draw.choice([1, 2]))}
        for step in (3, 6):
            if draw.random() < 0.5:
                seal(self.home / "checkpoints" / str(step), step)
        return told

    def train(self):
        """Everything that the driver does of a job's run but start its workers."""
        rendezvous = Rendezvous(ALLOCATION, "127.0.0.1", None, timeout=1000.0)
        folder.check(self.config)
        with folder.claim(self.config) as home:
            console = make_console()
            return training.train_in(home, self.config, self.ready, console, Stop(), rendezvous)

    def replay(self):
        parallel = Replay(plan=str(self.home / "plan.json"))
        plan_of(parallel, self.program.train, self.shape)
        return 0

    def start(self):
        for named in (self.home, self.home / "checkpoints" / "6"):
            asked = replace(self.config, train=replace(self.config.train, init_from=str(named)))
            path = find_start(asked, 0)
            like = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
            check_start(str(named), path, {"params": like})
        return 0

    def parts(self):
        """The first process takes in what the second has left."""
        write._await_parts(self.home / "checkpoints" / "9.partial-t", write.Writers(0, 2, "t"))
        return 0

    def look(self):
        """What is told of a run that is over."""
        is_done(self.home)
        job = read_job(self.home)
        print_comparison(make_console(), [self.home], [str(job)])
        return 0

    def frozen(self):
        return main(["--frozen", str(self.home / "config.yaml"), "--cfg", "job"])


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    return Doors(tmp_path_factory.mktemp("mutated"))


def attempt(job):
    """One that trains two steps, without workers."""
    finished = job._home.finished_steps
    for line in job._home.damaged:
        complain(line)
    job.run_log.open(finished)
    for step in (finished + 1, finished + 2):
        job.run_log._log(step, {"train/loss": 0.5, "perf/step_seconds": 0.1})


SEEDS = [
    range(12),
    *(pytest.param(range(n, n + 97), marks=pytest.mark.stress) for n in range(12, 1000, 97)),
]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_every_door_answers_in_words(seeds, doors, monkeypatch, capsys):
    monkeypatch.setattr(training._Job, "_attempt", attempt)
    monkeypatch.setattr("launcher.driver.record.run_log.plot_timeline", lambda *_: None)
    monkeypatch.setattr("launcher.driver.record.run_log.plot_loss", lambda *_: None)
    monkeypatch.setattr("launcher.checkpoint.write._LIMIT_SECONDS", 0.0)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    faults = []
    try:
        for seed in seeds:
            told = doors.damage(random.Random(seed))
            capsys.readouterr()
            for door in doors.all:
                signal.alarm(SECONDS)
                where = f"seed {seed}, {door.__name__}, {told}"
                faults += [f"{where}: {fault}" for fault in wrong(door, capsys)]
                signal.alarm(0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not faults, "\n".join(faults)


def wrong(door, capsys):
    """What is wrong with a door's answer."""
    try:
        code = guarded(door)
    except BaseException as error:
        capsys.readouterr()
        return [f"{type(error).__name__}: {error}"]
    lines = capsys.readouterr().err.splitlines()
    faults = [line for line in lines if not line.startswith("launcher: ")]
    if code not in (0, 1, 2):
        faults.append(f"exit code {code}")
    if code and not lines:
        faults.append(f"exit code {code} without a word")
    return faults
