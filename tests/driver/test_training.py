"""A run in its folder, up to and after the workers: what is read, kept and told of it."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher import checkpoint
from launcher.base import Clock
from launcher.checkpoint import layout
from launcher.checkpoint.pieces import Holding, Moment
from launcher.cluster.devices import emulated_pool
from launcher.cluster.errors import WorkerError
from launcher.cluster.slurm.allocation import Allocation, read_attempts
from launcher.cluster.slurm.rendezvous import Rendezvous
from launcher.config.cluster import Emulated
from launcher.config.compose import load, load_frozen, to_dict
from launcher.config.errors import ConfigError
from launcher.driver import training
from launcher.driver.failures import FailedError
from launcher.driver.folder import folder
from launcher.driver.folder.folder import LostFolderError
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.planning.prepare import Prepared
from launcher.driver.record import run_log
from launcher.driver.record.step_log import DivergedError, Pace, SpikeError
from launcher.hardware import HostReport
from launcher.plan import Plan, PlanError, local_shape
from launcher.report import TRACKERS
from launcher.report.console import make_console
from launcher.report.jsonl import read_metrics
from launcher.stop import Stop
from launcher.train.program import build_program


@pytest.fixture(scope="module")
def plan():
    config = load(["model=mlp", "dataset=synthetic", "parallel=data", "cluster=emulated"])
    shape = local_shape(2, 1, "cpu")
    return plan_of(config.parallel, build_program(config).train, shape)


DIED = WorkerError("worker_1", "it was killed", Path("worker_1.log"), died=True)


class Run:
    """A run of two hosts without workers: its attempts end as `outcomes` say, errors or None."""

    def __init__(self, tmp_path, plan, monkeypatch, outcomes=(), words=()):
        words = ["model=mlp", "dataset=synthetic", "wandb.mode=disabled", *words]
        self.config = load([*words, f"run.dir={tmp_path}/outputs", "run.id=mine"])
        self.path = tmp_path / "outputs" / "mine"
        self.checkpoints = self.path / "checkpoints"
        cluster = Emulated(gpus=2, hosts=2)
        self.ready = Prepared(emulated_pool(cluster), plan, 0.0)
        self.stop, self.jobs, remaining = Stop(), [], iter(outcomes)

        def attempt(job):
            home = job._home
            position = job._rolled_back.get(home.finished_steps, home.next_batch)
            self.jobs.append((home.finished_steps, home.damaged, position))
            if (error := next(remaining)) is not None:
                job.run_log.step_log.finished_steps = 9
                raise error

        monkeypatch.setattr(training._Job, "_attempt", attempt)
        monkeypatch.setattr("time.sleep", lambda seconds: None)

    def save(self, step):
        self.checkpoints.joinpath(str(step), "default").mkdir(parents=True)
        path = self.checkpoints / str(step)
        described = {"config": to_dict(self.config), "data": {"next_batch": step}, "plan": {}}
        described["metrics"] = {"next_step": step + 1}
        text = json.dumps({"custom_metadata": described})
        (path / "_CHECKPOINT_METADATA").write_text(text)
        (path / "default" / "arrays").write_text("numbers")
        files = layout.files_below(path)
        layout.write_checksums(path, step, layout.checksums(path, files))

    def damage(self, step):
        (self.checkpoints / str(step) / "default" / "arrays").write_text("NUMBERS")

    def train(self, rendezvous=None):
        home = folder.RunFolder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        console = make_console()
        return training.train_in(home, self.config, self.ready, console, self.stop, rendezvous)

    @property
    def reason(self):
        return json.loads((self.path / "summary.json").read_text())["exit_reason"]


def two_nodes():
    allocation = Allocation("7", restarts=0, max_requeues=3, nodes=("a", "b"), index=0)
    return Rendezvous(allocation, "127.0.0.1", None, timeout=1000.0)


def test_workers_trace_for_the_gpus_that_the_driver_planned_for(tmp_path, plan, monkeypatch):
    attempt, told = training._Job._attempt, []

    def submit(name, config, *rest):
        told.append((name, *rest))
        raise KeyboardInterrupt

    run = Run(tmp_path, plan, monkeypatch)
    monkeypatch.setattr(training._Job, "_attempt", attempt)
    monkeypatch.setattr(training._Job, "_start_workers", lambda *_: SimpleNamespace(submit=submit))
    monkeypatch.setattr(training._Job, "_compare_hosts", lambda *_: None)
    gpus = dataclasses.replace(run.ready.pool, kind="gpu", compute_capability=8.6)
    run.ready = dataclasses.replace(run.ready, pool=gpus)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert [each[:2] for each in told] == [("build", 8.6)]


@pytest.mark.parametrize("damaged", [False, True])
def test_an_end_at_once_reads_no_checkpoint_through(tmp_path, plan, monkeypatch, damaged):
    run = Run(tmp_path, plan, monkeypatch, [KeyboardInterrupt()])
    run.save(6)
    (run.checkpoints / "8.partial-x").mkdir()
    if damaged:
        run.damage(6)  # not seen, and so left where it is
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.reason.endswith(", not saved since step 6")
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["6", "8.partial-x"]


def test_an_end_at_once_during_a_restart_tells_what_is_lost(tmp_path, plan, monkeypatch):
    def attempt(job):
        if job.restarts:
            raise KeyboardInterrupt
        job.run_log.step_log.finished_steps = 9
        raise DIED

    run = Run(tmp_path, plan, monkeypatch)
    monkeypatch.setattr(training._Job, "_attempt", attempt)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.reason.endswith(", not saved since step 0")


def test_a_roll_back_reports_a_damaged_checkpoint_and_passes_over_the_bad_batch(
    tmp_path, plan, monkeypatch
):
    error = DivergedError("train/loss", float("nan"), 9)
    run = Run(tmp_path, plan, monkeypatch, [error, None], ["train.non_finite=rollback"])
    run.save(4)
    run.save(6)
    run.damage(6)
    chosen = []
    monkeypatch.setattr(folder, "_choose", counted(folder._choose, chosen))
    assert run.train() == 0
    (_, _, _), (finished, (line,), next_batch) = run.jobs
    assert (finished, next_batch) == (4, 9)
    assert "6 is damaged and not used" in line
    assert len(chosen) == 1  # every file of it is read


def spike(step):
    values = {"train/loss": 7.0, "train/grad_norm": 3.0, "train/spike_score": 11.0}
    return SpikeError(values, step)


def test_a_spike_drops_what_may_hold_it_and_passes_over_three_batches(tmp_path, plan, monkeypatch):
    """Met again it passes over three more; met a third time it ends the run, with their numbers."""
    errors = [spike(9), DIED, spike(10), spike(8)]
    words = ["train.spikes=rollback", "cluster.max_restarts=9"]
    run = Run(tmp_path, plan, monkeypatch, errors, words)
    for step in (4, 6, 7, 8):
        run.save(step)
    anchors, attempt = [], training._Job._attempt

    def follow(job):
        anchors.append([job._next_batch(step) for step in range(5, 13)])
        attempt(job)

    monkeypatch.setattr(training._Job, "_attempt", follow)
    with pytest.raises(FailedError) as ended:
        run.train()
    assert str(ended.value) == (
        "train/loss is 7 and train/grad_norm is 3 at step 8: far above the steps before (score 11, "
        "a spike above 8)\nThe run is not restarted: passing over batches 6, 7, 8, 10, 11, 12 "
        "has not helped."
    )
    follows = [*range(9, 16)]
    assert anchors[:3] == [[*range(5, 13)], [5, *follows], [5, *follows]]
    assert anchors[3] == [5, 9, *range(13, 19)]
    assert checkpoint.steps_in(run.checkpoints) == [4, 6]


def test_the_plan_follows_the_hosts_that_are_there(tmp_path, plan, monkeypatch):
    """The same plan takes the same hosts again; without one, the run ends with the reason."""
    run, fewer, used = Run(tmp_path, plan, monkeypatch), dataclasses.replace(plan), []

    def on_fewer(hosts):
        if not fewer:
            raise PlanError("on 1 host there is no plan: nothing divides")
        return fewer

    ready = dataclasses.replace(run.ready, on_fewer=on_fewer)
    about = folder.RunFolder(tmp_path), run.config, ready, make_console(), run.stop, None
    job = training._Job(*about)
    session = SimpleNamespace(missing=("b",), pool=run.ready.pool, use=used.append)
    assert job._adapt(session, 2) == ""
    pace = job.run_log.step_log.callbacks.of(Pace)
    for step in range(10, 20):
        pace.on_step(step, {"perf/step_seconds": 2.0})
    line = job._adapt(session, 1)
    assert pace.limit(20) is None  # one host may take more than ten times as long
    assert line.startswith("1 of 2 hosts is left, without b: 1 stage of 2x1, ")
    assert line.endswith(" by its prediction")
    assert job.plan is job.run_log._plan is fewer
    assert (job._adapt(session, 1), used) == ("", [1, 1])
    assert job._adapt(session, 2).startswith("all 2 hosts are there again: 1 stage of 2x1, ")
    assert job.plan is job.run_log._plan is plan
    fewer = None
    with pytest.raises(
        FailedError, match=r"1 of 2 hosts is left, without b: on 1 .* nothing divides"
    ):
        job._adapt(session, 1)


def counted(function, calls):
    def call(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return call


def measured(jax):
    """Workers of two hosts, the second of which is half as fast, or of another JAX."""
    reports = [
        HostReport(str(k), {"jax": one}, {}, {"rate of products": (1.0 / (1 + k),)})
        for k, one in enumerate(("0.12.0", jax))
    ]
    return SimpleNamespace(
        submit=lambda method, folder: SimpleNamespace(each=lambda: reports),
        clocks=lambda: [Clock(), Clock(offset=-3_000_000_000)],
    )


@pytest.mark.parametrize(
    ("error", "held", "resumed"),
    [
        (DIED, [[6, 9], [8, 9]], 9),
        (DIED, [[8, 11], [8, 11]], 8),  # step 11 was not recorded
        (DIED, [[6], [9]], 4),  # the checkpoint of step 7 is damaged
        (DIED, [[6, 9], [6, 8]], 6),
        (DIED, [[4, 7], [4, 7]], 7),  # memory is faster
        (DIED, [[6], [9]], None),  # both checkpoints are
        (DivergedError("train/loss", float("nan"), 9), [[6, 8], [6, 8]], 4),
    ],
    ids=["newest", "recorded", "not of all", "damaged", "same step", "nothing", "rollback"],
)
def test_a_restart_resumes_from_what_all_workers_hold_or_else_from_the_disk(
    tmp_path, plan, monkeypatch, caplog, error, held, resumed
):
    """A roll-back takes no snapshot, which may be of what led astray. The files of a checkpoint are
    read where no snapshot is newer alone."""
    run, steps = Run(tmp_path, plan, monkeypatch, words=["train.non_finite=rollback"]), []
    run.save(4)
    run.save(7)
    run.damage(7)
    if resumed is None:
        run.damage(4)
    caplog.set_level("INFO", training.__name__)

    own = [Holding({"x": (), "y": ()}, [(name, ())]) for name in "xy"]
    found = [{Moment(n, 0): own[k] for n in each} for k, each in enumerate(held)]
    monkeypatch.setattr(training.in_memory, "_each", lambda *called: found)
    monkeypatch.setattr(training.in_memory, "_places", lambda workers: [])
    monkeypatch.setattr(training.in_memory, "keep", lambda workers, moment: True)

    def attempt(job):
        workers = SimpleNamespace(submit=lambda *called: SimpleNamespace(result=lambda: None))
        finished = job._resumed(workers)
        steps.append((finished, job._next_batch(finished) - finished))
        job._in_memory = job._snapshots(workers, steps[-1][0]) is not None
        if len(steps) == 1:
            job.run_log.step_log.finished_steps = 9
            raise error

    monkeypatch.setattr(training._Job, "_attempt", attempt)
    if resumed is None:  # and not as for a wrong setting, with which it could not have begun
        with pytest.raises(FailedError, match=r"not restarted: .* no checkpoint in .* is intact"):
            run.train()
        return
    assert run.train() == 0
    assert steps == [(0, 0), (resumed, 5 if isinstance(error, DivergedError) else 0)]
    where = "memory" if resumed > 4 else f"{tmp_path}/outputs/mine/checkpoints/4"
    line = f"resuming run mine at step {resumed} from {where}"
    assert caplog.messages[-1] == line + (
        f"; steps to repeat: {9 - resumed}" if resumed < 9 else ""
    )
    assert (run.checkpoints / "7").exists() == (resumed >= 7)


@pytest.mark.parametrize("is_anew", [False, True])
def test_a_later_start_that_chooses_kernels_anew_says_so(
    tmp_path, plan, monkeypatch, caplog, is_anew
):
    run = Run(tmp_path, plan, monkeypatch)
    run.path.mkdir(parents=True)
    home, console = folder.RunFolder(run.path), make_console()
    job = training._Job(home, run.config, run.ready, console, run.stop, None)
    monkeypatch.setattr(training, "compile_everywhere", lambda *args: 0.0)
    monkeypatch.setattr(training, "write_plan_alone", lambda *args: None)

    def submit(method, *args):
        answer = method == "chose_anew" and is_anew
        return SimpleNamespace(result=lambda advance=None: answer, each=list)

    workers = SimpleNamespace(submit=submit, infos=lambda *args: [])
    job._set_up(workers, submit("build"), finished=3)
    said = [line for line in caplog.messages if "XLA chose kernels anew" in line]
    assert len(said) == is_anew
    assert all(f"{run.path}/autotune/" in line for line in said)


@pytest.mark.parametrize("excluded", [None, "node[3,5]"])
def test_the_hosts_are_compared_before_a_run(tmp_path, plan, monkeypatch, caplog, excluded):
    """The advice is taken as it is shown."""
    words = ["cluster=slurm", "cluster.gpus=2", "cluster.hosts=2"]
    words += [f"cluster.slurm.exclude='{excluded}'"] if excluded else []
    run = Run(tmp_path, plan, monkeypatch, words=words)
    home, console = folder.RunFolder(tmp_path), make_console()
    job = training._Job(home, run.config, run.ready, console, run.stop, two_nodes())
    job._compare_hosts(measured("0.12.0"))
    clock, slow, advice = caplog.messages
    assert clock == "b: its clock is 3.0 s behind the driver's"
    assert slow == "b: its rate of products is 67% of the median of all hosts"
    (word,) = shlex.split(advice.removeprefix("to do without: "))
    wanted = f"{excluded},b" if excluded else "b"
    assert load(["cluster=slurm", word]).cluster.slurm.exclude == wanted
    with pytest.raises(ConfigError, match=r"hosts differ: jax 0.12.0 on a and 0.11.1 on b\. Give"):
        job._compare_hosts(measured("0.11.1"))


def test_several_nodes_are_started_again_and_a_lost_one_is_not_waited_for_as_long(
    tmp_path, plan, monkeypatch
):
    error = WorkerError("worker_1", "killed", tmp_path / "log", host=1, died=True)
    waits = []

    def attempt(job):
        waits.append(job._rendezvous.timeout)
        job.run_log.step_log.finished_steps = 9
        if not job.restarts:
            raise error

    run = Run(tmp_path, plan, monkeypatch)
    monkeypatch.setattr(training._Job, "_attempt", attempt)
    assert run.train(two_nodes()) == 0
    assert waits == [1000.0, 120.0]


def test_what_is_not_started_again_is_reported_in_full(tmp_path, plan, monkeypatch):
    error = WorkerError("worker_1", "killed", tmp_path / "log", host=1, died=True)
    run = Run(tmp_path, plan, monkeypatch, [error])
    run.stop.requested = 15
    with pytest.raises(FailedError) as raised:
        run.train()
    assert str(raised.value).splitlines()[:2] == [
        "worker_1 died: killed",
        f"  after step 9 of {run.config.train.steps}",
    ]
    assert len(run.jobs) == 1


def test_a_disk_that_is_full_from_the_start_leaves_an_account(tmp_path, plan, monkeypatch):
    run = Run(tmp_path, plan, monkeypatch)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "write_plan", full)
    with pytest.raises(OSError, match="No space left"):
        run.train(two_nodes())
    assert "No space left" in run.reason
    (attempt,) = read_attempts(run.path)
    assert (attempt.exit_code, attempt.exit_reason) == (1, run.reason)


def test_a_restart_on_a_full_disk_keeps_the_metrics_that_wait_for_room(tmp_path, plan, monkeypatch):
    run = Run(tmp_path, plan, monkeypatch)

    write = None

    def attempt(job):
        nonlocal write
        job.run_log.open(job._home.finished_steps)
        if job.restarts:
            job.run_log._metrics._write = write
            return
        run.save(1)
        write = job.run_log._metrics._write
        job.run_log._metrics._write = full
        job.run_log._log(1, {})
        raise WorkerError("worker_1", "killed", tmp_path / "log", host=1, died=True)

    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training._Job, "_attempt", attempt)
    assert run.train() == 0
    assert [record["step"] for record in read_metrics(run.path / "metrics.jsonl")] == [1]


def test_a_restart_with_nothing_to_go_on_from_reports_the_failure_and_why(
    tmp_path, plan, monkeypatch
):
    error = WorkerError("worker_1", "killed", tmp_path / "log", host=1, died=True)
    run = Run(tmp_path, plan, monkeypatch, [error])
    run.save(6)
    run.damage(6)
    with pytest.raises(FailedError) as raised:
        run.train()
    first, *_, last = str(raised.value).splitlines()
    assert first == "worker_1 died: killed"
    assert last.startswith("The run is not restarted: run.id=mine cannot be resumed: no checkpoint")


@pytest.mark.parametrize("env", ["{}", "{API_KEY: s3cret}"])
def test_settings_that_hold_values_of_the_jobs_environment_are_their_users_alone(
    tmp_path, plan, env
):
    words = ["cluster=slurm", "cluster.gpus=1", f"cluster.slurm.env={env}"]
    config = load(["model=mlp", "dataset=synthetic", *words])
    path = tmp_path / "config.yaml"
    path.touch(0o644)
    folder.write_plan(folder.RunFolder(tmp_path), config, plan)
    assert ("s3cret" in path.read_text()) == ("s3cret" in env)
    assert (path.stat().st_mode & 0o077 == 0) == ("s3cret" in env)


def test_a_tracker_is_told_no_value_of_the_jobs_environment(tmp_path, plan, monkeypatch):
    told = []
    monkeypatch.setitem(TRACKERS, "mine", lambda run: told.append(run.config))
    words = ["cluster=slurm", "cluster.gpus=2", "cluster.slurm.env={API_KEY: s3cret}"]
    run = Run(tmp_path, plan, monkeypatch, words=words)
    monkeypatch.setattr(training._Job, "_attempt", lambda job: job.run_log.open(0))
    assert run.train() == 0
    assert told[0]["cluster"]["slurm"]["env"] == {"API_KEY": "***"}


class Lost(Run):
    """A run whose folder something happens to after step 2 of 4."""

    def __init__(self, tmp_path, plan, monkeypatch, happens):
        super().__init__(tmp_path, plan, monkeypatch)

        def attempt(job):
            job.run_log.open(0)
            for step in range(1, 5):
                job.run_log.step_log.finished_steps = step
                job.run_log._log(step, {"train/loss": 1.0})
                if step == 2:
                    happens(self.path)

        monkeypatch.setattr(training._Job, "_attempt", attempt)

    def train(self, rendezvous=None):
        with folder.claim(self.config) as home:
            return training.train_in(
                home, self.config, self.ready, make_console(), self.stop, rendezvous
            )


@pytest.mark.parametrize("rendezvous", [None, two_nodes()])
def test_a_folder_that_is_renamed_ends_the_run_and_holds_all_of_it(
    rendezvous, tmp_path, plan, monkeypatch
):
    moved = tmp_path / "outputs" / "moved"
    run = Lost(tmp_path, plan, monkeypatch, lambda path: path.rename(moved))
    with pytest.raises(LostFolderError) as raised:
        run.train(rendezvous)
    assert str(raised.value) == (
        f"the run folder {run.path} was renamed to {moved} while the run trained: the run ends. "
        "Rename it back to resume from its newest checkpoint."
    )
    assert not run.path.exists()
    assert [record["step"] for record in read_metrics(moved / "metrics.jsonl")] == [1, 2]
    told = json.loads((moved / "summary.json").read_text())
    assert (told["exit_reason"], told["steps"]) == (str(raised.value), 2)
    assert all((moved / name).is_file() for name in ("config.yaml", "plan.json"))
    assert not rendezvous or read_attempts(moved)[0].exit_code == 1


@pytest.mark.parametrize("rendezvous", [None, two_nodes()])
@pytest.mark.parametrize("taken", [False, True])
def test_of_a_folder_that_is_deleted_nothing_that_is_known_is_lost(
    taken, rendezvous, tmp_path, plan, monkeypatch, capsys
):
    def delete(path):
        shutil.rmtree(path)
        if taken:  # by another run
            path.mkdir()
            (path / ".lock").touch()

    run = Lost(tmp_path, plan, monkeypatch, delete)
    with pytest.raises(LostFolderError, match=f"{run.path} was deleted while the run trained"):
        run.train(rendezvous)
    again = run.path.with_name("mine.damaged") if taken else run.path
    err = capsys.readouterr().err
    assert f"settings, plan and metrics of the run are written again, to {again}\n" in err
    assert [record["step"] for record in read_metrics(again / "metrics.jsonl")] == [1, 2]
    told = json.loads((again / "summary.json").read_text())
    assert ("was deleted while the run trained" in told["exit_reason"], told["steps"]) == (True, 2)
    assert load_frozen(again / "config.yaml").run.id == again.name
    assert Plan.from_dict(json.loads((again / "plan.json").read_text())) == plan
    assert not taken or [path.name for path in run.path.iterdir()] == [".lock"]


@pytest.mark.parametrize("replaced", [False, True])
def test_metrics_whose_file_is_taken_away_are_written_again(
    replaced, tmp_path, plan, monkeypatch, said
):
    def remove(path):
        (path / "metrics.jsonl").unlink()
        if replaced:
            (path / "metrics.jsonl").write_text("something else")

    run = Lost(tmp_path, plan, monkeypatch, remove)
    assert run.train() == 0
    assert [record["step"] for record in read_metrics(run.path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert said[-1].endswith("was removed while the run trained: it is written again")
    assert (run.path / "metrics.jsonl.damaged").exists() == replaced


def test_no_save_makes_a_lost_folder_again(tmp_path, plan, monkeypatch):
    run = Lost(tmp_path, plan, monkeypatch, lambda path: None)
    with folder.claim(run.config) as home:
        record = run_log.RunLog(home, run.config, plan, 0.0, make_console(), None)
        shutil.rmtree(run.path)
        with pytest.raises(LostFolderError):
            record.sync()
        with pytest.raises(LostFolderError):  # nor does another start begin from step 0
            folder.reload(home, run.config)


def test_workers_stand_by_after_as_long_as_the_first_start_and_others_after_as_long(monkeypatch):
    now, begun = 100.0, []
    monkeypatch.setattr("time.monotonic", lambda: now)
    standbys = training.Standbys()

    def begun_by(seconds):
        nonlocal now
        now = seconds
        standbys.on_step(1, {})
        return len(begun)

    assert begun_by(100.0) == 0
    standbys.arm(10.0, lambda: begun.append(now))
    assert [begun_by(109.0), begun_by(111.0), begun_by(119.0), begun_by(150.0)] == [0, 1, 1, 2]
    assert begun_by(200.0) == 2
    standbys.arm(1.0, lambda: begun.append(now))  # after a restart, which is short
    assert [begun_by(209.0), begun_by(211.0)] == [2, 3]
    standbys.disarm()
    assert begun_by(300.0) == 3
    assert standbys.armed
