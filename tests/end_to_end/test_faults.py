"""Killed, stopped and starved: a run resumes as if nothing had happened, and leaves nothing behind.

Every run here has the same plan, so it must end with the very bytes of the undisturbed one.
"""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from disturbed import SLOW, STEPS, WORDS, assert_as_undisturbed, on_one_device
from launched import Launcher, command_of, lines, losses, summary, train

from launcher.cluster.ray.scratch import memory_folder
from launcher.config.compose import load

TWO_HOSTS = (*WORDS, *SLOW, "cluster.hosts=2")
FOREVER = "train.steps=1000000"


@pytest.mark.slow  # test_random_faults.py kills and stops all else, at any moment
@pytest.mark.sampled(2)
@pytest.mark.parametrize("snapshot", ["3", "off"])
def test_a_worker_is_killed_and_the_run_comes_to_the_same_bytes(
    undisturbed: Callable[..., Path], tmp_path: Path, snapshot: str
) -> None:
    run = tmp_path / "outputs" / "one"
    words = (f"train.snapshot={snapshot}", "train.checkpoint.every_steps=8")
    launcher = Launcher(tmp_path, *TWO_HOSTS, *words)
    launcher.wait_for(lambda: len(lines(run)) >= 14 and len(launcher.workers()) == 2)
    memory = memory_of(launcher)
    assert len(list(memory.glob("host_?/share.?.json"))) == (0 if snapshot == "off" else 4)
    launcher.workers()[-1].kill()
    code, out, err = launcher.end()
    assert code == 0, err
    assert "\nRestart 1 of at most 3 at once, from " in err
    assert err.startswith("launcher: worker_")
    in_memory = re.findall(r"resuming run one at step \d+ from memory", out)
    assert len(in_memory) == (snapshot != "off"), out
    assert summary(run)["restarts"] == 1
    assert_as_undisturbed(run, undisturbed(*TWO_HOSTS))
    assert not memory.exists()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGINT] * 2], ids=["kill", "leave"])
def test_nothing_stays_in_memory_after_the_launcher_has_left_at_once(
    tmp_path: Path, signals: list[signal.Signals]
) -> None:
    launcher = Launcher(tmp_path, *WORDS, FOREVER, "train.snapshot=1")
    launcher.wait_for(lambda: len(lines(tmp_path / "outputs" / "one")) >= 3)
    memory = memory_of(launcher)
    assert list(memory.glob("host_0/share.?.json"))
    for number in signals:
        launcher.process.send_signal(number)
        time.sleep(0.2)  # else two are one
    launcher.end(soon=30)
    assert not memory.exists()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "is_damaged"), [("zero3", False), ("manual", False), ("manual", True)]
)
def test_a_host_is_lost_with_its_memory_and_the_run_comes_to_the_same_bytes(
    method: str, is_damaged: bool, undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """The other host holds a copy of what was there alone; a damaged one is not taken."""
    run = tmp_path / "outputs" / "one"
    words = TWO_HOSTS
    if method == "zero3":
        words = (*(w for w in words if "parallel" not in w), "parallel=zero3")
    launcher = Launcher(tmp_path, *words, "train.checkpoint.every_steps=10", "train.snapshot=4")
    saved = run / "checkpoints" / "10"
    launcher.wait_for(lambda: lines(run))
    memory = memory_of(launcher)

    def is_kept() -> bool:
        return saved.exists() if is_damaged else any(memory.glob("host_0/copy.*.json"))

    launcher.wait_for(lambda: len(lines(run)) >= 18 and is_kept())
    launcher.workers()[-1].kill()
    shutil.rmtree((memory / "host_1").rename(memory / "lost"))  # so nobody writes there meanwhile
    for copy in (memory / "host_0").glob("copy.*.0") if is_damaged else ():
        with open(copy, "r+b") as file:
            first = file.read(1)[0]
            file.seek(0)
            file.write(bytes([first ^ 1]))
    code, out, err = launcher.end()
    assert code == 0, err
    resumed = re.search(r"resuming run one at step \d+ from (\S+?)(?:; .* (\d+))?\n", out)
    assert resumed is not None, out
    assert (resumed[1] == "memory") == (not is_damaged), out
    assert is_damaged or int(resumed[2] or 0) <= 8  # the newest may have been on its way
    assert_as_undisturbed(run, undisturbed(*words))
    assert not memory.exists()


def memory_of(launcher: Launcher) -> Path:
    """The folder of the workers' snapshots."""
    memory = memory_folder(launcher.workers()[0].environ())
    assert memory is not None
    assert memory.stat().st_mode & 0o777 == 0o700
    return memory


# As `python -m launcher`, with the next attempt's workers up after the first step.
STANDBYS_AT_ONCE = """
import sys
from launcher.__main__ import main
from launcher.cluster.ray.session import RaySession
from launcher.cluster.ray.worker import not_started
from launcher.driver.training import Standbys


def begin_and_wait(self, *made, **ahead):
    handles = begin(self, *made, **ahead)
    not_started(handles, 200.0)
    return handles


arm, begin = Standbys.arm, RaySession.begin
Standbys.arm = lambda self, seconds, begin: arm(self, 0.0, begin)
RaySession.begin = begin_and_wait
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("hosts", "moment"),
    [(2, "after two steps"), (1, "after two steps"), (2, "at once"), (2, "during recovery")],
)
def test_workers_that_stand_by_take_over_and_come_to_the_same_bytes(
    hosts: int,
    moment: str,
    undisturbed: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stand by on each host; the one that takes the place of the victim is killed in turn."""
    words = (*WORDS, *SLOW, "train.global_batch_size=2048", f"cluster.hosts={hosts}")
    run = tmp_path / "outputs" / "one"
    with monkeypatch.context() as at_once:
        at_once.setattr("launched.COMMAND", (sys.executable, "-c", STANDBYS_AT_ONCE))
        launcher = Launcher(tmp_path, *words)

    def up() -> list[psutil.Process]:
        return [p for p in launcher.processes() if command_of(p).startswith("ray::Worker")]

    def heads() -> list[int]:
        return [p.pid for p in launcher.processes() if p.name() == "raylet"]

    launcher.wait_for(lambda: len(lines(run)) >= 6 and len(up()) == 3 * hosts)
    before, victim = heads(), launcher.workers()[-1]
    output = os.readlink(f"/proc/{victim.pid}/fd/1")  # the log of its host
    others = (p for p in up() if p != victim and os.readlink(f"/proc/{p.pid}/fd/1") == output)
    heir = min(others, key=psutil.Process.create_time)
    victim.kill()
    if moment != "at once":
        launcher.wait_for(lambda: heir in launcher.workers())
    if moment == "after two steps":
        trained = len(lines(run))  # a second end at the same step would be taken for its fault
        launcher.wait_for(lambda: len(lines(run)) > trained + 2)
    heir.kill()
    again = len(lines(run))
    launcher.wait_for(lambda: len(lines(run)) > again + 1)
    assert heads() == before  # Ray stayed
    code, _, err = launcher.end()
    assert code == 0, err
    assert "\nRestart 1 of at most 3 at once, from " in err
    assert_as_undisturbed(run, undisturbed(*words))


@pytest.mark.slow
def test_a_stopped_worker_is_reported_with_its_stack_and_replaced(
    undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "outputs" / "one"
    launcher = Launcher(tmp_path, *TWO_HOSTS)  # cluster.step_timeout=auto
    launcher.wait_for(lambda: len(lines(run)) >= 12)
    stopped = launcher.workers()[0]
    stopped.send_signal(signal.SIGSTOP)
    code, _, err = launcher.end()
    assert code == 0, err
    assert err.startswith("launcher: no answer from worker_")
    waited = float(re.search(r" for ([\d.]+) s \(cluster.step_timeout\)", err)[1])
    slowest = max(line["perf/step_seconds"] for line in lines(run)[:12])
    assert 10 <= waited <= max(10, 10 * slowest)
    assert f"(process {stopped.pid} on this machine): stage" in err
    assert "its process was stopped (SIGSTOP, or a debugger); its stacks" in err
    assert "(most recent call first):" in err
    assert "default_worker.py" in err  # where the main thread of Ray's workers begins
    since = "the newest snapshot in memory, or else from the checkpoint at step"
    assert f"Restart 1 of at most 3 at once, from {since}" in err
    assert_as_undisturbed(run, undisturbed(*TWO_HOSTS))


SPOILED = """
import numpy as np
from launcher.recipes.datasets.synthetic import dataset as synthetic
check = synthetic.check

def build(*arguments):
    dataset = synthetic.build(*arguments)

    def train(k):
        return {n: v * (np.nan if k == 12 else 1) for n, v in dataset.train(k).items()}

    return dataset._replace(train=train)
"""
OPTIONS = "+dataset.options={num_samples: 4096, targets: network}"
OWN = ("dataset=custom", "dataset.module=own", OPTIONS)


@pytest.mark.slow
def test_a_run_is_rolled_back_and_passes_over_the_batches_that_led_astray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch 12, of step 13, is bad: the run goes back to step 10 and on with batch 13, also in a
    later process; its losses are those of one device."""
    (tmp_path / "own.py").write_text(SPOILED)
    words = tuple(word for word in WORDS if word != "dataset=synthetic")
    words += (*OWN, "allow_modules=[own]", "optimizer.decay=constant", "train.non_finite=rollback")
    code, _, err = Launcher(tmp_path, *words, "train.steps=18").end()
    assert code == 0
    assert err.startswith("launcher: train/loss is nan at step 13")
    assert "Restart 1 of at most 3 at once, from the checkpoint at step 10" in err
    train(tmp_path, *words, "train.steps=24")

    monkeypatch.syspath_prepend(tmp_path)
    config = load([*words, "train.steps=24"])
    expected = [loss for loss, _ in on_one_device(config, [*range(10), *range(13, 27)])]
    assert losses(tmp_path / "outputs" / "one") == pytest.approx(expected, rel=1e-5)


@pytest.mark.stress
def test_a_second_ctrl_c_leaves_at_once_and_claims_no_save(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "one"
    # A step that lasts: the second signal comes before it ends.
    words = ("model.hidden_size=4096", "model.num_layers=8", "train.global_batch_size=1024")
    launcher = Launcher(tmp_path, *WORDS, *words, FOREVER, "train.checkpoint.every_steps=0")
    launcher.wait_for(lambda: len(lines(run)) >= 1)
    os.killpg(launcher.process.pid, signal.SIGINT)
    assert any("finishing this step and saving" in line for line in launcher.process.stdout)
    os.killpg(launcher.process.pid, signal.SIGINT)
    code, _, err = launcher.end()
    assert (code, err) == (130, "")
    assert not list(run.glob("checkpoints/[0-9]*"))
    assert summary(run)["exit_reason"].startswith("interrupted, not saved")


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_output_any_more(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    launcher = Launcher(tmp_path, *WORDS, stdout=writing)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)  # as `| head -1` does
    _, err = launcher.process.communicate(timeout=240)
    assert (launcher.process.returncode, err) == (0, "")
    run = tmp_path / "outputs" / "one"
    assert summary(run)["exit_reason"] == "done"
    assert (run / "checkpoints" / str(STEPS)).is_dir()
