"""Sweeps: a process and a folder a run, failures kept apart, signals handed on, one table.

Where nothing of a run matters but its end, a small program stands in for the launcher.
"""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from launched import Launcher, lines, train

from launcher.__main__ import main
from launcher.submit.points import read_points

SWEEP = '''
import sys
from launcher.__main__ import main
from launcher.submit import sweep

def command(point, dirs, folder, run_id, sweep_id):
    return [sys.executable, "-c", RUN, str(folder / run_id), *point.overrides]

sweep._command = command
RUN = """
{run}
"""
sys.exit(main(sys.argv[1:]))
'''

# A run that waits for a signal, and one that ends and says what its objective is.
WAITS = """
import os, signal, sys
def stop(*_):
    os.write(1, b'state saved' + bytes([10]))
    sys.exit(7)
signal.signal(signal.{wanted}, stop)
print('ready', flush=True)
signal.pause()
"""
ENDS = """
import json, os, pathlib, sys, time
home, settings = pathlib.Path(sys.argv[1]), dict(one.split("=", 1) for one in sys.argv[2:])
home.mkdir(exist_ok=True)
with open(home.parent / "begun", "a") as file:
    file.write(home.name + chr(10))
time.sleep(0.05)
rate = float(settings["optimizer.learning_rate"])
result = {"run_id": home.name, "exit_reason": "done", "final_loss": (rate - 0.3) ** 2}
(home / "summary.json").write_text(json.dumps(result))
"""
SETTINGS = ("recipe=smoke", "train.eval_every=0", "run.id=s")


def start(run: str, *words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SWEEP.replace("{run}", run), "-m", *SETTINGS, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.sampled(3, rest="slow")
@pytest.mark.parametrize(
    ("sent", "wanted", "code"),
    [
        (signal.SIGINT, "SIGINT", 130),
        (signal.SIGTERM, "SIGTERM", 75),
        (signal.SIGUSR1, "SIGTERM", 75),
    ],
)
def test_a_signal_ends_the_run_in_progress_and_the_sweep_in_good_order(
    sent: signal.Signals, wanted: str, code: int, tmp_path: Path
) -> None:
    with start(WAITS.replace("{wanted}", wanted), "train.steps=3,4", cwd=tmp_path) as sweep:
        assert sweep.stdout is not None
        assert sweep.stdout.readline() == "[1/2] train.steps=3\n"
        assert sweep.stdout.readline() == "ready\n"
        os.kill(sweep.pid, sent)
        assert sweep.stdout.read() == "state saved\n"  # and no other run
    assert sweep.returncode == code


# In the default tier: a resumed sweep, below, and one by Optuna in tests/config/test_sweeper.py.
@pytest.mark.slow
def test_an_optuna_sweep_that_is_stopped_again_and_again_goes_on(tmp_path: Path) -> None:
    words = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=8", "sweep.jobs=2")
    words = (*words, "optimizer.learning_rate=interval(0.01,1.0)")
    folder = tmp_path / "multirun" / "s"
    slow = ENDS.replace("time.sleep(0.05)", "time.sleep(60 if home.name > 's-3' else 0.05)")
    begun = folder / "begun"
    for sent, code, count in ((signal.SIGKILL, -9, 6), (signal.SIGINT, 130, 8)):
        sweep = start(slow, *words, cwd=tmp_path)
        wait_for(lambda n=count: begun.exists() and len(begun.read_text().split()) == n)
        sweep.send_signal(sent)
        sweep.communicate(timeout=60)
        assert sweep.returncode == code
        states = {point.run: point.state for point in read_points(folder)}
        cut_off = {"s-4": "running", "s-5": "running"}
        assert states == {f"s-{n}": "done" for n in range(4)} | cut_off
    finished(start(ENDS, *words, cwd=tmp_path))
    begun_after = begun.read_text().split()[8:]
    assert sorted(begun_after) == ["s-4", "s-5", "s-6", "s-7"]  # and nothing that was done
    rows = table(folder)
    assert [(row["run"], row["state"]) for row in rows] == [(f"s-{n}", "done") for n in range(8)]
    assert len({row["optimizer.learning_rate"] for row in rows}) == 8
    best = min(rows, key=lambda row: float(row["objective"]))
    found = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert found["best_params"] == {
        "optimizer.learning_rate": float(best["optimizer.learning_rate"])
    }
    other = start(ENDS, *words, "sweep.objective=mfu", cwd=tmp_path)
    assert "is the journal of a sweep with other settings" in other.communicate(timeout=60)[1]


def test_a_sweep_grows_and_what_failed_is_run_again(tmp_path: Path) -> None:
    fails = "import sys; sys.exit(3 if 'optimizer.learning_rate=0.2' in sys.argv else 0)"
    rates = "optimizer.learning_rate=0.1,0.2"
    folder = tmp_path / "multirun" / "s"
    sweep = start(ENDS + fails, rates, cwd=tmp_path)
    out, err = sweep.communicate(timeout=120)
    assert (sweep.returncode, err) == (
        1,
        "launcher: optimizer.learning_rate=0.2 ended with exit code 3\n",
    )
    out = finished(start(ENDS, f"{rates},0.4", cwd=tmp_path))
    assert re.findall(r"^\[.*", out, re.MULTILINE) == ["[3/3] optimizer.learning_rate=0.4"]
    assert [row["state"] for row in table(folder)] == ["done"] * 3
    other = start(ENDS, rates, "train.log_every=2", cwd=tmp_path)
    assert "has run in this sweep with other settings" in other.communicate(timeout=60)[1]
    assert other.returncode == 2


def test_an_objective_that_no_run_will_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, error in (
        (("task=plan", "sweep.objective=mfu"), "sweep.objective=mfu is measured, but task=plan "),
        (  # a plan is made here, and is no job
            ("task=plan", "cluster=slurm", "sweep.objective=mfu"),
            "sweep.objective=mfu is measured, but task=plan ",
        ),
        (("sweep.objective=eval_loss",), "sweep.objective=eval_loss, but train.eval_every=0 "),
        (("sweep.objective=mfu_",), "sweep.objective must be one of eval_loss, "),
    ):
        assert main(["-m", *SETTINGS, *words, "train.steps=1,2"]) == 2
        assert f"launcher: {error}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []  # nothing was made


@pytest.mark.stress
def test_the_points_of_a_sweep_compile_what_they_share_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    train(tmp_path, "-m", *SETTINGS, "wandb.mode=disabled", "run.seed=1,2")
    kept = [path.stat() for path in (tmp_path / "cache").rglob("compiled/*/*-cache")]
    assert len(kept) > 4
    second = (tmp_path / "multirun" / "s" / "s-1" / "config.yaml").stat()
    assert all(stat.st_mtime < second.st_mtime for stat in kept)
    assert len(lines(tmp_path / "multirun" / "s" / "s-1")) == 3


@pytest.mark.stress
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 200)
    files = "recipe=smoke", "dataset=text", "dataset.path=missing.txt,text.txt"
    words = "-m", "run.id=jack", *files, "train.steps=2", "wandb.mode=offline"
    code, out, err = Launcher(tmp_path, *words).end()
    assert code == 1, err
    assert "launcher: dataset.path=missing.txt ended with exit code 2\n" in err
    assert "Traceback" not in err
    runs = tmp_path / "multirun" / "jack"
    assert [path.name for path in runs.glob("jack-*")] == ["jack-1"]
    settings = yaml.safe_load((runs / "jack-1" / "config.yaml").read_text())
    assert settings["wandb"]["group"] == "jack"
    assert settings["run"]["id"] == "jack-1"
    assert re.search(r"^\[1/2\] dataset.path=missing.txt$", out, re.MULTILINE)
    assert re.search(r"^\[2/2\] dataset.path=text.txt$", out, re.MULTILINE)
    table = out[out.rindex("samples/s") :]
    assert "jack-1" in table
    assert list(tmp_path.glob("outputs")) == []
