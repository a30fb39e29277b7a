"""`parallel=parameter_server`: two workers whose gradients two servers sum, through their life."""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from disturbed import WORDS, assert_as_undisturbed
from launched import Launcher, command_of, lines, summary, train

SERVED = (
    *(word for word in WORDS if not word.startswith("parallel")),
    *("parallel=parameter_server", "cluster.hosts=2", "train.global_batch_size=64"),
)
SERVER = r"parameter server (0 on host 0|1 on host 1)"
DATA = "parallel=data", "cluster.hosts=1"
STAGES = "parallel=manual", "parallel.num_stages=2", "cluster.hosts=1"


def servers(launcher: Launcher) -> list[psutil.Process]:
    """The processes of parameter servers, in any order."""
    return [p for p in launcher.processes() if command_of(p).startswith("ray::Server")]


def started(folder: Path, *words: str, steps: int = 6) -> Launcher:
    """A run with servers that has made so many steps."""
    launcher = Launcher(folder, *SERVED, *words)
    launcher.wait_for(lambda: len(lines(folder / "outputs" / "one")) >= steps)
    assert len(servers(launcher)) == 2
    return launcher


@pytest.mark.stress
def test_a_run_saved_under_servers_resumes_in_stages_and_back(tmp_path: Path) -> None:
    """With the losses and evaluations of a run of two devices in one process."""
    words = ("train.eval_every=2", "train.eval_batches=1", "train.check_replicas_every=1")
    words = (*SERVED, *words, "optimizer.decay=constant")
    for steps, others in [(2, ()), (4, STAGES), (6, ())]:
        train(tmp_path, *words, *others, f"train.steps={steps}")
    train(tmp_path, *words, *DATA, "run.id=alone", "train.steps=6")
    found, expected = (lines(tmp_path / "outputs" / name) for name in ("one", "alone"))
    assert [line["step"] for line in found] == list(range(1, 7))
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        values = [[line[key] for line in run if key in line] for run in (found, expected)]
        assert len(values[0]) == (3 if key == "eval/loss" else 6)
        assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.slow
def test_a_killed_server_is_named_and_the_run_comes_to_the_same_bytes(
    undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    launcher = started(tmp_path)
    servers(launcher)[1].kill()
    code, _, err = launcher.end()
    assert code == 0, err
    assert re.match(rf"launcher: {SERVER} died: its process was killed", err), err
    assert "Restart 1 of at most 3 at once, from the newest snapshot in memory, or else from" in err
    run = tmp_path / "outputs" / "one"
    assert summary(run)["restarts"] == 1
    assert_as_undisturbed(run, undisturbed(*SERVED))


@pytest.mark.stress
@pytest.mark.parametrize("victim", ["server", "worker"])
def test_what_is_stopped_is_named_and_replaced(
    undisturbed: Callable[..., Path], tmp_path: Path, victim: str
) -> None:
    launcher = started(tmp_path, "cluster.step_timeout=10")
    stopped = servers(launcher) if victim == "server" else launcher.workers()
    stopped[0].send_signal(signal.SIGSTOP)
    code, _, err = launcher.end()
    assert code == 0, err
    name = SERVER if victim == "server" else r"worker_\d"
    assert re.match(f"launcher: no answer from {name}", err), err
    assert re.search(f"{name}(, which answered before)?: its process was stopped", err), err
    assert_as_undisturbed(tmp_path / "outputs" / "one", undisturbed(*SERVED))


@pytest.mark.stress
def test_without_restarts_the_run_ends_in_time(tmp_path: Path) -> None:
    timeout = 10
    words = f"cluster.step_timeout={timeout}", "cluster.max_restarts=0", "train.steps=100000"
    launcher = started(tmp_path, *words)
    servers(launcher)[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    code, _, err = launcher.end()
    assert code == 1
    assert re.search(SERVER, err.splitlines()[0]), err
    assert time.monotonic() - began < timeout + 5 + 5  # the launcher's own end takes a while


@pytest.mark.stress
def test_ctrl_c_and_the_driver_s_death_leave_nothing(tmp_path: Path) -> None:
    for number, expected in [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]:
        folder = tmp_path / number.name
        folder.mkdir()
        launcher = started(folder, "train.steps=100000", "train.checkpoint.every_steps=0")
        launcher.process.send_signal(number)
        code, _, err = launcher.end()
        assert code == expected, err
