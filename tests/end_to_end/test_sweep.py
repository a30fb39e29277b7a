"""Sweeps: a process and a folder a run, failures kept apart, signals handed on, one table."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

SWEEP = '''
import sys
from launcher.submit import local_sweep
from launcher.config.compose import Point
from launcher.config.schema import Config

run = """
import os, signal, sys
def stop(*_):
    os.write(1, b'state saved' + bytes([10]))
    sys.exit(7)
signal.signal(signal.{wanted}, stop)
print('ready', flush=True)
signal.pause()
"""
local_sweep._command = lambda *_: [sys.executable, "-c", run]
local_sweep.answer = lambda text: print(text, flush=True)
points = [Point((f"train.steps={n}",), f"train.steps={n}", Config()) for n in (3, 4)]
sys.exit(local_sweep.run_sweep(points, []))
'''


def test_a_signal_ends_the_run_in_progress_and_the_sweep_in_good_order(tmp_path: Path) -> None:
    for sent, wanted, code in (
        (signal.SIGINT, "SIGINT", 130),
        (signal.SIGTERM, "SIGTERM", 75),
        (signal.SIGUSR1, "SIGTERM", 75),
    ):
        program = SWEEP.replace("{wanted}", wanted)
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path
        ) as sweep:
            assert sweep.stdout is not None
            assert sweep.stdout.readline() == "[1/2] train.steps=3\n"
            assert sweep.stdout.readline() == "ready\n"
            os.kill(sweep.pid, sent)
            assert sweep.stdout.read() == "state saved\n"  # and no other run
        assert sweep.returncode == code


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 200)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "launcher", "-m", "run.id=jack"),
            *("recipe=smoke", "dataset=text", "dataset.path=missing.txt,text.txt"),
            *("train.steps=2", "wandb.mode=offline"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "launcher: dataset.path=missing.txt ended with exit code 2\n" in result.stderr
    assert "Traceback" not in result.stderr
    runs = tmp_path / "multirun" / "jack"
    assert [path.name for path in runs.iterdir()] == ["jack-1"]
    settings = yaml.safe_load((runs / "jack-1" / "config.yaml").read_text())
    assert settings["wandb"]["group"] == "jack"
    assert settings["run"]["id"] == "jack-1"
    assert re.search(r"^\[1/2\] dataset.path=missing.txt$", result.stdout, re.MULTILINE)
    assert re.search(r"^\[2/2\] dataset.path=text.txt$", result.stdout, re.MULTILINE)
    table = result.stdout[result.stdout.rindex("samples/s") :]
    assert "jack-1" in table
    assert list(tmp_path.glob("outputs")) == []
