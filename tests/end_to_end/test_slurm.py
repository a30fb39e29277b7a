"""Runs on a real Slurm: submitted, preempted, cancelled, failed, and nothing left behind.

The cluster is this machine, under the names of two nodes. All runs are of one tiny model, so that
one undisturbed run in a process of its own says what the others must come to.
"""

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launched import lines, losses, summary, typed
from slurm_cluster import SEARCH, SlurmCluster, missing, wait_until

from launcher.cluster.slurm.commands import render, sbatch
from launcher.config.compose import load

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")

ROOT = Path(__file__).parents[2]
SECONDS = 600  # that no step of these tests needs, on however busy a machine
STEPS = 150
MODEL = typed(
    "model=mlp model.hidden_size=16 dataset=synthetic train.eval_every=0 "
    "train.global_batch_size=16 parallel=manual parallel.num_stages=2 wandb.mode=disabled "
    f"train.steps={STEPS}"
)
ON_SLURM = MODEL + typed(
    "cluster=slurm cluster.slurm.emulated=true cluster.slurm.exclusive=false cluster.slurm.time=10m"
)
TWO_NODES = (*ON_SLURM, "cluster.hosts=2", "cluster.gpus=4")
ENDLESS = "train.steps=1000000"
_LOOPBACK_STAYS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


class User:
    """Somebody who submits runs from a folder of the login node."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder

    def launcher(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launcher", *words],
            cwd=self.folder,
            env={**self.slurm.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * SECONDS,
        )

    def submit(self, name: str, *words: str) -> "Submitted":
        result = self.launcher(*words, f"run.id={name}")
        assert result.returncode == 0, result.stderr
        return Submitted(self.slurm, self.folder / "outputs" / name)


class Submitted:
    """A run and its job."""

    def __init__(self, slurm: SlurmCluster, home: Path) -> None:
        self.slurm, self.home = slurm, home
        self.job_id = json.loads((home / "job.json").read_text())["job_id"]

    @property
    def state(self) -> str:
        return self.slurm.job(self.job_id).get("JobState", "")

    @property
    def output(self) -> str:
        path = self.home / "logs" / f"slurm-{self.job_id}.out"
        return path.read_text() if path.exists() else ""

    def records(self) -> list[dict]:
        return lines(self.home)

    def losses(self) -> list[float]:
        """The loss of every step, each of which is there exactly once."""
        steps = [record["step"] for record in self.records()]
        assert steps == list(range(1, len(steps) + 1))
        return losses(self.home)

    def summary(self) -> dict:
        return summary(self.home)

    def attempts(self) -> list[dict]:
        files = sorted(self.home.glob("logs/attempt_*/attempt.json"))
        return [json.loads(file.read_text()) for file in files]

    def train_past(self, step: int) -> None:
        """Wait until the run has done more than `step` steps."""
        wait_until(lambda: len(self.records()) > step or self._failed(), SECONDS)
        assert len(self.records()) > step, self.output

    def end(self, state: str = "COMPLETED") -> None:
        """Wait for the job's end, after which none of its processes is left and no file in /tmp."""
        wait_until(lambda: self.state == state or self._failed(), SECONDS)
        assert self.state == state, self.output
        self.nothing_left()

    def nothing_left(self) -> None:
        wait_until(lambda: not self.slurm.left(), SECONDS)
        assert list(self.slurm.scratch.glob("launcher-*")) == []
        assert list(self.home.glob(".rendezvous*")) == []

    def _failed(self) -> bool:
        return self.state in ("FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "COMPLETED")


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def user(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> User:
    return User(slurm, tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def undisturbed(user: User) -> list[float]:
    """The losses of the run in one process, without Slurm."""
    words = ("cluster=emulated", "cluster.gpus=4", "run.id=undisturbed")
    result = user.launcher(*MODEL, *words)
    assert result.returncode == 0, result.stderr
    return losses(user.folder / "outputs" / "undisturbed")


@pytest.mark.slow
def test_two_nodes_train_as_one_process_does(
    user: User, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they leave is for their user alone, and holds no value of a variable."""
    monkeypatch.setitem(user.slurm.environ, "TOKEN_HERE", "s3cret-token")
    token = "cluster.slurm.env.TOKEN=${oc.env:TOKEN_HERE}"
    result = user.launcher(*TWO_NODES, "run.id=two", "cluster.slurm.wait=true", token)
    run = Submitted(user.slurm, user.folder / "outputs" / "two")
    assert result.returncode == 0, result.stderr
    for told in (f"submitted job {run.job_id}", "tail -F", f"done: {STEPS} steps"):
        assert told in result.stdout
    run.end()
    assert run.losses() == pytest.approx(undisturbed, rel=1e-5)
    assert run.summary()["nodes"] == ["node1", "node2"]
    stages = json.loads((run.home / "plan.json").read_text())["stages"]
    assert sorted(host for stage in stages for host in stage["hosts"]) == [0, 1]
    assert sorted(path.name for path in (run.home / "logs" / "attempt_0").glob("worker_*")) == [
        "worker_0.log",
        "worker_1.log",
    ]
    left = [run.home, *run.home.rglob("*")]
    assert [path for path in left if path.stat().st_mode & 0o077] == []
    files = [path for path in left if path.is_file()]
    assert [path for path in files if b"s3cret-token" in path.read_bytes()] == []


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("urgent", marks=pytest.mark.slow),
        pytest.param("requeue", marks=pytest.mark.slurm),
        pytest.param("signal", marks=pytest.mark.slurm),
    ],
)
def test_a_run_that_is_moved_goes_on_at_the_next_step(
    user: User, undisturbed: list[float], how: str
) -> None:
    run = user.submit(how, *TWO_NODES, "wandb.mode=offline")
    run.train_past(10)
    if how == "urgent":
        user.slurm.run("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true")
    elif how == "requeue":
        user.slurm.run("scontrol", "requeue", run.job_id)
    else:
        user.slurm.run("scancel", "--signal=USR2", run.job_id)
    run.end()
    assert run.losses() == pytest.approx(undisturbed, rel=1e-5)
    # Ray gives itself half a minute to come up, which is too little on a machine this busy.
    *too_slow, first, second = run.attempts()
    assert all("Ray did not come up" in attempt["exit_reason"] for attempt in too_slow)
    assert (first["exit_code"], first["exit_reason"]) == (75, "preempted")
    assert (second["exit_code"], second["exit_reason"], second["step"]) == (0, "done", STEPS)
    assert run.summary()["restarts"] == 1 + len(too_slow)
    recordings = list((run.home / "wandb").glob("offline-run-*"))
    assert {path.name.rpartition("-")[2] for path in recordings} == {how}


@pytest.mark.slurm
def test_a_cancelled_run_saves_and_stays_cancelled(user: User) -> None:
    run = user.submit("cancelled", *TWO_NODES, ENDLESS, "run.resume=never")
    run.train_past(5)
    user.slurm.run("scancel", run.job_id)
    run.end("CANCELLED")
    saved = [int(path.name) for path in (run.home / "checkpoints").iterdir()]
    assert saved == [len(run.losses())]
    assert run.summary()["exit_reason"] == "preempted"


@pytest.mark.slurm
def test_a_time_limit_is_only_an_interruption(user: User) -> None:
    """The controller looks at limits every half minute, so the notice comes early or late."""
    limit = ("cluster.slurm.time=1m", "cluster.slurm.signal=TERM@30")
    run = user.submit("limited", *TWO_NODES, ENDLESS, *limit)
    wait_until(lambda: len(run.attempts()) == 2, SECONDS)
    first, _ = run.attempts()
    assert (first["exit_code"], first["exit_reason"]) == (75, "preempted")
    run.train_past(first["step"])
    user.slurm.run("scancel", run.job_id)
    run.end("CANCELLED")
    run.losses()


@pytest.mark.slurm
def test_a_killed_worker_is_replaced_on_the_nodes_of_the_job(
    user: User, undisturbed: list[float]
) -> None:
    run = user.submit("killed-worker", *TWO_NODES, "train.checkpoint.every_steps=5")
    run.train_past(10)
    workers = [p for p in user.slurm.left() if " ".join(p.cmdline()).startswith("ray::Worker")]
    assert len(workers) == 2
    workers[1].kill()
    run.end()
    assert "Restart 1 of at most 3" in run.output
    assert run.losses() == pytest.approx(undisturbed, rel=1e-5)
    (attempt,) = run.attempts()
    assert (attempt["exit_code"], attempt["exit_reason"]) == (0, "done")
    assert run.summary()["restarts"] == 1


@pytest.mark.slurm
def test_those_that_stand_by_on_the_nodes_of_a_job_take_over(user: User) -> None:
    run = user.submit("stand-by", *TWO_NODES, ENDLESS)

    def up(name: str) -> list[psutil.Process]:
        found = [p for p in user.slurm.left() if name in " ".join(p.cmdline()[:1])]
        return sorted(found, key=psutil.Process.create_time)

    wait_until(lambda: len(up("ray::Worker")) == 6, SECONDS)  # two of each node
    nodes, step = up("raylet/raylet"), len(run.records())
    up("ray::Worker")[1].kill()
    wait_until(lambda: "resuming run stand-by at step" in run.output, SECONDS)
    assert "from memory" in run.output
    run.train_past(step + 1)
    assert up("raylet/raylet") == nodes  # Ray stayed
    user.slurm.run("scancel", run.job_id)
    run.end("CANCELLED")
    run.losses()


@pytest.mark.slurm
def test_a_run_that_is_preempted_twice_before_its_first_step_ends(user: User) -> None:
    """With the reason; other than by its own script it would come back ten times."""
    run = user.submit("in-vain", *TWO_NODES, ENDLESS)
    for attempt in range(2):
        wait_until(lambda n=attempt: run.output.count("made-up samples") > n, SECONDS)
        user.slurm.run("scancel", "--signal=USR2", run.job_id)
    run.end("FAILED")
    assert run.records() == []
    assert [attempt["exit_code"] for attempt in run.attempts()] == [75, 75]
    job = user.slurm.job(run.job_id)
    assert (job["ExitCode"], job["Restarts"]) == ("1:0", "1")
    assert "preempted twice in a row before its first step" in run.output


@pytest.mark.slurm
@pytest.mark.parametrize("how", ["dead", "down", "killed"])
def test_a_run_continues_without_a_node_that_is_lost(
    user: User, undisturbed: list[float], how: str
) -> None:
    """Whether Slurm takes the node out of the job or only its task is gone, the job ends as any."""
    words = "cluster.wait_for_host=30", "train.checkpoint.every_steps=5"
    run = user.submit(f"without-{how}", *TWO_NODES, *words)
    run.train_past(10)
    if how == "dead":
        user.slurm.fail_node("node2")
    elif how == "down":
        user.slurm.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    else:
        user.slurm.kill_tasks("node2")
    try:
        wait_until(lambda: run.state == "COMPLETED" or run._failed(), SECONDS)
        assert run.state == "COMPLETED", run.output
        assert user.slurm.job(run.job_id)["Restarts"] == "0", run.output
        assert re.search(r"1 of 2 hosts is left, without node2: 2 stages of 1x1, .*", run.output)
        assert run.losses() == pytest.approx(undisturbed, rel=1e-5)
        (attempt,) = run.attempts()
        assert (attempt["exit_code"], attempt["exit_reason"]) == (0, "done")
    finally:
        for of_the_lost in user.slurm.scratch.glob("launcher-*"):  # a later run sweeps it
            shutil.rmtree(of_the_lost)
        user.slurm.run("scontrol", "update", "nodename=node2", "state=resume", check=False)
        user.slurm.start()


@pytest.mark.slurm
def test_a_dead_node_is_noticed_and_the_run_comes_back(user: User) -> None:
    run = user.submit("dead-node", *TWO_NODES, ENDLESS, "cluster.wait_for_host=off")
    run.train_past(5)
    user.slurm.fail_node("node2")
    try:
        wait_until(lambda: run.attempts()[0]["exit_code"] is not None, SECONDS)
        assert "down" not in user.slurm.run("sinfo", "-h", "-n", "node2", "-o", "%T")
        assert re.search(
            r"^launcher: worker_1\b.* (died|is out of reach)", run.output, re.MULTILINE
        )
        reason = run.attempts()[0]["exit_reason"]  # whoever gives up first, Slurm or the driver
        assert reason.startswith("preempted") or "for node2: 1 of 2 nodes did not join" in reason
        wait_until(lambda: not user.slurm.left(), SECONDS)
        (of_the_dead,) = user.slurm.scratch.glob("launcher-*")  # a later run sweeps it
        shutil.rmtree(of_the_dead)
    finally:
        user.slurm.start()
    wait_until(lambda: len(run.attempts()) == 2, SECONDS)
    run.train_past(0)
    user.slurm.run("scancel", run.job_id)
    run.end("CANCELLED")


@pytest.mark.slurm
def test_a_dead_controller_is_waited_for(user: User, undisturbed: list[float]) -> None:
    run = user.submit("no-controller", *TWO_NODES)
    run.train_past(5)
    user.slurm.fail_controller()
    with subprocess.Popen(
        [sys.executable, "-m", "launcher", *TWO_NODES, "run.id=patient", "train.steps=1"],
        cwd=user.folder,
        env={**user.slurm.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as patient:
        assert patient.stderr is not None
        assert "Slurm's controller does not answer" in patient.stderr.readline()
        user.slurm.start()
        out, _ = patient.communicate(timeout=SECONDS)
    assert patient.returncode == 0
    assert "submitted job" in out
    run.end()
    assert run.losses() == pytest.approx(undisturbed, rel=1e-5)
    Submitted(user.slurm, user.folder / "outputs" / "patient").end()


@pytest.mark.slurm
def test_a_crash_is_tried_again_but_not_the_same_one_twice(user: User) -> None:
    rate = ("optimizer=sgd", "optimizer.learning_rate=1e38", "optimizer.clip_norm=null")
    run = user.submit("crash", *TWO_NODES, *rate, "optimizer.warmup_steps=0")
    run.end("FAILED")
    first, second = run.attempts()
    assert first["exit_reason"] == second["exit_reason"] != "done"
    assert first["step"] == second["step"]
    job = user.slurm.job(run.job_id)
    assert (job["ExitCode"], job["Restarts"]) == ("1:0", "1")


@pytest.mark.slow
def test_the_script_that_is_submitted_by_hand(user: User) -> None:
    """It trains; and a wrong setting, which is found inside the job, is final."""
    options = ("--gpus-per-node=0", "--nodes=2", "--time=5", f"--chdir={user.folder}")
    emulated = ("cluster.gpus=4", "cluster.slurm.emulated=true")
    script = str(ROOT / "slurm" / "train.sbatch")
    environ = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{SEARCH}"}

    def submit(*words: str) -> str:
        return user.slurm.run("sbatch", "--parsable", *options, script, *words, **environ)

    good = submit(*MODEL, *emulated, "train.steps=3")
    wrong = submit(*MODEL, *emulated, "train.stepz=3")
    wait_until(lambda: user.slurm.job(good)["JobState"] == "COMPLETED", SECONDS)
    trained = summary(user.folder / "outputs" / f"mlp-job-{good}")
    assert trained["nodes"] == ["node1", "node2"]
    wait_until(lambda: user.slurm.job(wrong)["JobState"] == "FAILED", SECONDS)
    job = user.slurm.job(wrong)
    assert (job["ExitCode"], job["Restarts"]) == ("2:0", "0")
    output = (user.folder / f"slurm-{wrong}.out").read_text()
    assert output.count("train.stepz is not a setting") == 1
    assert "Traceback" not in output


# For each variable of sbatch's manual that this Slurm heeds: a value that changes a job.
OF_SBATCH = """ACCOUNT=a ARRAY_INX=0-1 CONSTRAINT=x CORE_SPEC=1 DELAY_BOOT=9 CPUS_PER_GPU=2
DISTRIBUTION=cyclic ERROR=/tmp/e EXCLUSIVE= HINT= GPUS=1 GPUS_PER_NODE=1 GPUS_PER_TASK=1 GRES=gpu:1
INPUT=/tmp/i JOB_NAME=n MEM_PER_CPU=9 MEM_PER_GPU=9 MEM_PER_NODE=9 NETWORK=x NO_REQUEUE=
OPEN_MODE=truncate OUTPUT=/tmp/o OVERCOMMIT= QOS=q PARTITION=urgent POWER=level PROFILE=task
REQ_SWITCH=1 SIGNAL=2 RESERVATION=r SPREAD_JOB= THREAD_SPEC=1 THREADS_PER_CORE=1 TIMELIMIT=5
USE_MIN_NODES= WCKEY=w CONTAINER=/tmp/c NO_KILL= ACCTG_FREQ=9 BATCH=x EXPORT=NONE GET_USER_ENV=
GPU_BIND=none"""
OF_SRUN = ("MEM_PER_CPU", "CPU_BIND", "GRES", "TIMELIMIT", "EXPORT_ENV", "NTASKS_PER_GPU", "HINT")


@pytest.mark.slow
def test_no_variable_of_the_submitters_changes_a_job(
    user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the controller knows of it, and what its step sees, is as from a plain shell."""
    for name, value in user.slurm.environ.items():
        monkeypatch.setenv(name, value)

    def written(word: str, *extra: str) -> Path:
        cluster = load([*ON_SLURM, "cluster.gpus=2", "cluster.slurm.mem=1G", *extra]).cluster
        text = render(cluster, "j", tmp_path, tmp_path / "%j", [word])
        (tmp_path / word).write_text(text)
        return tmp_path / word

    def described(job_id: str) -> dict[str, str]:
        own = re.compile("JobId|.*Time|LastSchedEval|Priority")
        return {
            key: value.replace(f"{tmp_path}/{job_id}", "%j")
            for key, value in user.slurm.job(job_id).items()
            if not own.fullmatch(key) or key == "TimeLimit"
        }

    variables = dict(word.split("=") for word in OF_SBATCH.split())
    held, changing = written("true", "cluster.slurm.extra={hold: ''}"), set()
    plain = described(sbatch(held))
    for name, value in variables.items():
        with monkeypatch.context() as shell:
            shell.setenv(f"SBATCH_{name}", value)
            assert described(sbatch(held)) == plain
            own = {f"SBATCH_{name}": value}
            direct = user.slurm.run("sbatch", "--parsable", str(held), check=False, **own)
            if not direct or described(direct) != plain:
                changing.add(name)
    user.slurm.run("scancel", "--user", getpass.getuser())
    assert changing >= {"PARTITION", "TIMELIMIT", "MEM_PER_NODE", "EXCLUSIVE", "GRES", "ARRAY_INX"}
    assert len(changing) > 20, changing

    def seen(job_id: str) -> dict[str, str]:
        wait_until(lambda: user.slurm.job(job_id)["JobState"] == "COMPLETED", SECONDS)
        found = re.findall("(?m)^(SLURM_.*?)=(.*)", (tmp_path / job_id).read_text())
        own = re.compile(".*(JOBID|JOB_ID|PID|PORT|NODENAME|NODELIST|_TIME)")
        return {name: value for name, value in found if not own.fullmatch(name)}

    step = written("env")
    plain = seen(sbatch(step))
    assert plain["SLURM_MEM_PER_NODE"] == "1024"
    for name in [f"SBATCH_{name}" for name in variables] + [f"SLURM_{name}" for name in OF_SRUN]:
        monkeypatch.setenv(name, variables.get(name.partition("_")[2], "4096"))
    assert seen(sbatch(step)) == plain


@pytest.mark.slurm
def test_a_preflight_compares_the_nodes_of_a_job_and_ends(user: User) -> None:
    """Both nodes are this machine, so neither is slower; the run can then be trained."""
    words = ("run.id=preflight", "cluster.slurm.wait=true")
    result = user.launcher(*TWO_NODES, *words, "task=preflight")
    assert result.returncode == 0, result.stderr
    assert "nothing was found that sets these hosts apart: node1, node2" in result.stdout
    assert "exclude" not in result.stdout + result.stderr
    run = Submitted(user.slurm, user.folder / "outputs" / "preflight")
    assert run.summary()["steps"] == 0
    assert user.launcher(*TWO_NODES, *words, "train.steps=2").returncode == 0
    assert len(lines(run.home)) == 2


@pytest.mark.slurm
def test_a_run_that_is_a_job_already_is_refused(user: User) -> None:
    held = ("cluster.gpus=2", "run.id=held", "cluster.slurm.extra={hold: ''}")
    run = user.submit("held", *ON_SLURM, *held)
    twice = user.launcher(*ON_SLURM, *held)
    assert twice.returncode == 2
    assert f"run.id=held is already job {run.job_id}, which is PENDING" in twice.stderr
    user.slurm.run("scancel", run.job_id)


@pytest.mark.stress
def test_two_jobs_share_a_node_and_no_stranger_gets_in(user: User) -> None:
    on_one = ("cluster.gpus=2", "cluster.slurm.nodelist=node1")
    runs = [user.submit("alone", *ON_SLURM, ENDLESS, *on_one)]
    runs.append(spread := user.submit("spread", *TWO_NODES, ENDLESS))  # over that node, too
    for run in runs:
        run.train_past(2)
    servers = [p for p in user.slurm.left() if p.name() == "gcs_server"]
    assert len(servers) == 2
    for server in servers:
        token = Path(server.environ()["RAY_AUTH_TOKEN_PATH"])
        assert token.stat().st_mode & 0o777 == 0o600
        mine = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token.read_text()}
        assert _told_by_ray(server, mine) == "welcome"
        assert _told_by_ray(server, {**mine, "RAY_AUTH_TOKEN": "ab" * 32}) == "refused"
        assert _told_by_ray(server, {"RAY_AUTH_MODE": "disabled"}) == "refused"
    (rendezvous,) = spread.home.glob(".rendezvous*")
    assert rendezvous.stat().st_mode & 0o777 == 0o600
    for run in runs:
        user.slurm.run("scancel", run.job_id)
    for run in runs:
        wait_until(lambda run=run: run.state == "CANCELLED", SECONDS)
        assert run.summary()["exit_reason"] == "preempted"
    spread.nothing_left()


def _told_by_ray(server: psutil.Process, settings: dict[str, str]) -> str:
    """The answer of a Ray to a health check by another user of this machine."""
    ports = {c.laddr.port for c in server.net_connections("tcp") if c.status == "LISTEN"}
    words = {w.partition("=")[0]: w.partition("=")[2] for w in server.cmdline()}
    address = f"{words['--node-ip-address']}:{ports.pop()}"
    result = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "health-check", f"--address={address}"],
        # Without this word Ray takes 127.0.0.1 for this machine's address on the network.
        env={**os.environ, _LOOPBACK_STAYS: server.environ()[_LOOPBACK_STAYS], **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    if result.returncode == 0:
        return "welcome"
    return "refused" if "AuthenticationError" in result.stderr else result.stderr


@pytest.mark.slurm
@pytest.mark.parametrize("array", ["null", "2"])
def test_a_sweep_is_a_job_a_run_and_one_table(user: User, array: str) -> None:
    sweep = f"sweep-{array}"
    settings = (*ON_SLURM, "cluster.gpus=2", f"cluster.slurm.array={array}", "train.steps=3")
    result = user.launcher("-m", *settings, f"run.id={sweep}", "parallel.num_micro_batches=1,2,4")
    assert result.returncode == 0, result.stderr
    folder = user.folder / "multirun" / sweep
    runs = [Submitted(user.slurm, folder / f"{sweep}-{n}") for n in range(3)]
    assert len({run.job_id for run in runs}) == 3
    for run in runs:
        wait_until(lambda run=run: run.state == "COMPLETED", SECONDS)
    result = user.launcher("task=sweep_status", f"sweep.dir={folder}")
    assert result.returncode == 0, result.stderr
    for run in runs:
        assert f"{run.job_id} COMPLETED" in result.stdout
