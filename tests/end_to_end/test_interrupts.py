"""Ctrl-C in every phase: it is answered, nothing is left or lost, no traceback is shown."""

import os
import signal
import time
from pathlib import Path

import pytest
from launched import Launcher, lines, losses, summary, typed

STEPS = 40
WORDS = typed(
    f"model=mlp dataset=synthetic train.steps={STEPS} train.eval_every=0 "
    "train.checkpoint.every_steps=5 parallel=manual parallel.num_stages=2 "
    "parallel.num_micro_batches=2 cluster=emulated cluster.gpus=2 wandb.mode=disabled run.id=one"
)
MOMENTS = int(os.environ.get("LAUNCHER_TEST_MOMENTS", "40"))
UNDER_WAY = 5  # steps at most that a Ctrl-C still lets end, and be recorded


class Running:
    """A launcher whose output goes to a file that is looked at meanwhile."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.output = folder / "output"
        with self.output.open("w") as output:
            self.launcher = Launcher(folder, *words, stdout=output.fileno())

    def press(self, after: str | None = None, seconds: float = 0.0) -> None:
        """Ctrl-C, when `after` is shown; None: as soon as a signal is answered at all."""
        self.launcher.wait_for_handlers()
        if after is not None:
            self.launcher.wait_for(lambda: after in self.output.read_text())
        time.sleep(seconds)
        if self.launcher.process.poll() is None:
            os.killpg(self.launcher.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """The exit code, and what was printed; nothing on standard error."""
        code, _, err = self.launcher.end(soon=10)
        assert err == ""
        return code, self.output.read_text()


@pytest.mark.parametrize(
    ("task", "phase"),
    [
        ("check", None),
        pytest.param("plan", "reading the data and tracing", marks=pytest.mark.stress),
        ("plan", "planning"),
        pytest.param("train", "starting Ray", marks=pytest.mark.stress),
        pytest.param("train", "compiling", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_before_the_first_step_ends_the_run(
    task: str, phase: str | None, tmp_path: Path
) -> None:
    running = Running(tmp_path, *WORDS, f"task={task}")
    running.press(phase)
    code, out = running.end()
    assert code == 130
    assert "launcher: stopping" in out
    run = tmp_path / "outputs" / "one"
    assert run.exists() == (task == "train")
    if task == "train":
        assert summary(run)["exit_reason"] == "interrupted"
        assert not (run / "checkpoints").exists()


def test_ctrl_c_while_the_devices_are_measured_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    running = Running(tmp_path, *WORDS)
    running.press("measuring the devices")
    code, out = running.end()
    assert code == 130
    assert "launcher: stopping" in out
    assert not (tmp_path / "outputs" / "one").exists()
    assert not [*(tmp_path / "cache" / "launcher" / "calibration").glob("*.json")]


@pytest.mark.stress
def test_a_run_that_is_interrupted_at_forty_moments_comes_to_the_same_losses(
    tmp_path: Path,
) -> None:
    """Each time a separate run, which is then resumed to its end."""
    (tmp_path / "other").mkdir()
    undisturbed = Running(tmp_path / "other", *WORDS)
    undisturbed.launcher.wait_for_handlers()
    began = time.monotonic()
    assert undisturbed.end()[0] == 0
    whole = time.monotonic() - began
    expected = losses(tmp_path / "other" / "outputs" / "one")
    codes = []
    for moment in range(MOMENTS):
        folder = tmp_path / str(moment)
        folder.mkdir()
        run = folder / "outputs" / "one"
        running = Running(folder, *WORDS)
        running.press(seconds=moment * whole / MOMENTS)
        before = len(lines(run))
        code, out = running.end()
        codes.append(code)
        if before + UNDER_WAY < STEPS:  # it cannot end by itself
            assert code == 130, moment
            assert len(lines(run)) <= before + UNDER_WAY, moment
        if code:
            assert code == 130, moment
            assert "launcher: stopping" in out, moment
            assert Running(folder, *WORDS).end()[0] == 0, moment
        assert [line["step"] for line in lines(run)] == list(range(1, STEPS + 1)), moment
        assert losses(run) == expected, moment
    assert 130 in codes
