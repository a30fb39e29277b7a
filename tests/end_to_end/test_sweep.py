"""Sweeps: a process and a folder a run, failures kept apart, signals handed on, one table."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

RELAY = '''
import sys
from launcher.sweep import SignalRelay

run = """
import signal, sys
signal.signal({wanted}, lambda *_: sys.exit(7))
print('ready', flush=True)
signal.pause()
"""
with SignalRelay() as relay:
    code = relay.run([sys.executable, "-c", run])
print(code, relay.received.name)
'''


def test_a_signal_reaches_the_run_in_progress() -> None:
    for sent, wanted in (
        (signal.SIGINT, "signal.SIGINT"),
        (signal.SIGTERM, "signal.SIGTERM"),
        (signal.SIGHUP, "signal.SIGTERM"),
    ):
        program = RELAY.replace("{wanted}", wanted)
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        ) as sweep:
            assert sweep.stdout is not None
            assert sweep.stdout.readline() == "ready\n"
            os.kill(sweep.pid, sent)
            assert sweep.stdout.read() == f"7 {sent.name}\n"


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
