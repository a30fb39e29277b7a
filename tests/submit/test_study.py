"""A journal of trials: each is told once, whoever is killed, and whatever a disk can do."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("optuna")
from optuna.distributions import IntDistribution

from launcher.config.compose import Asked
from launcher.config.errors import ConfigError
from launcher.config.search import Space
from launcher.submit import study as module
from launcher.submit.points import JOURNAL
from launcher.submit.study import Study, count_ended, run_study

TELL = 6  # a kind of the journal's lines
NAME = "train.steps"


def space(trials: int = 12, rate: float = 1.0, grid: int = 0, most: int = 1000) -> Space:
    of_grid = "GridSampler", {"search_space": {NAME: list(range(1, grid + 1))}}
    sampler, options = of_grid if grid else ("RandomSampler", {"seed": 0})
    return Space(
        values={NAME: IntDistribution(1, grid or most)},
        sampler=sampler,
        options=options,
        direction="minimize",
        trials=trials,
        jobs=3,
        max_failure_rate=rate,
        name="s",
    )


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]


def told(folder: Path) -> Counter[int]:
    """How often each trial was told."""
    return Counter(line["trial_id"] for line in lines(folder) if line["op_code"] == TELL)


def test_a_job_comes_back_to_its_trial_and_a_lost_one_is_tried_again_once(tmp_path: Path) -> None:
    study = Study(tmp_path, space(2), "x")
    lost, own = study.take(0, "1_0"), study.take(1, "1_1")
    assert lost is not None
    assert own is not None
    assert study.take(1, "1_1") == own  # requeued
    assert Study(tmp_path, space(2), "x").running() == {lost: "1_0", own: "1_1"}
    study.tell_lost(lost.number, is_repeated=True)
    assert study.tell(own.number, 2.0)
    assert (study.vacant(), study.open_places(), count_ended(tmp_path)) == ([0], [0], 1)
    second = study.take(1, "1_1")
    assert second is not None
    assert (second.number, second.place, second.swept) == (2, 0, lost.swept)
    assert study.take(0, "1_0") is None  # another one has it
    study.tell_lost(second.number, is_repeated=True)
    assert (study.vacant(), study.open_places(), study.take(1, "1_1")) == ([], [], None)
    assert count_ended(tmp_path) == 2
    assert not study.tell(second.number, 1.0)  # it was only slow
    assert set(told(tmp_path).values()) == {1}
    best = {NAME: int(own.swept[0].partition("=")[2])}
    assert study.best() == {"name": "optuna", "best_params": best, "best_value": 2.0}


def test_new_jobs_take_what_ended_jobs_left_and_what_was_cancelled_is_not(tmp_path: Path) -> None:
    study = Study(tmp_path, space(3), "x")
    left, cancelled = study.take(0, "1_0"), study.take(1, "1_1")
    assert left is not None
    assert cancelled is not None
    study.tell_lost(cancelled.number, is_repeated=False)
    study.release()
    assert study.open_places() == [0, 2]
    assert study.take(0, "7_0") == left
    assert study.running() == {left: "7_0"}


def test_too_many_failures_end_it(tmp_path: Path) -> None:
    asked = []

    def run(points, total):
        asked.append(len(points))
        return [float("nan"), *(1.0 for _ in points[1:])]

    run_study(Study(tmp_path, space(12, rate=0.3), "x"), lambda words: Asked(tuple(words), ()), run)
    assert asked == [3]
    run_study(Study(tmp_path, space(7, rate=0.4), "x"), lambda words: Asked(tuple(words), ()), run)
    assert asked == [3, 3, 1]
    assert Study(tmp_path, space(8, rate=0.4), "x").take(7, "1_7") is None


@pytest.mark.parametrize("torn", [b'{"op_code":6,"trial', b"\0" * 9, b'{"op_code":4}'])
def test_a_half_line_is_cut_off_and_nothing_else_lost(tmp_path: Path, torn: bytes) -> None:
    study, other = Study(tmp_path, space(), "x"), Study(tmp_path, space(), "x")
    first = study.take(0, "1_0")
    assert first is not None
    whole = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(whole + torn)
    assert other.running() == {first: "1_0"}
    assert other.tell(first.number, 1.0)
    second = study.take(1, "1_1")
    assert second is not None
    assert (tmp_path / JOURNAL).read_bytes().startswith(whole + b'{"op_code":6,"worker')
    assert Study(tmp_path, space(), "x").running() == {second: "1_1"}


def test_other_settings_and_damage_are_refused(tmp_path: Path) -> None:
    study = Study(tmp_path, space(), "x")
    study.take(0, "1_0")
    for searched, settings in ((space(), "y"), (space(most=5), "x")):
        with pytest.raises(ConfigError, match="is the journal of a sweep with other settings"):
            Study(tmp_path, searched, settings)
    text = (tmp_path / JOURNAL).read_text()
    (tmp_path / JOURNAL).write_text(text.replace('"op_code":4', '"op_code":', 1))
    with pytest.raises(ConfigError, match=r"optuna\.journal is damaged: "):
        Study(tmp_path, space(), "x")


def test_neither_links_nor_locks_are_asked_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    for owner, name in ((fcntl, "flock"), (fcntl, "lockf"), (os, "symlink"), (os, "link")):
        monkeypatch.setattr(owner, name, refuse)
    study = Study(tmp_path, space(1), "x")
    trial = study.take(0, "1_0")
    assert trial is not None
    assert study.tell(trial.number, 1.0)
    assert study.take(1, "1_1") is not None


# Asks for the trials of its places, tells some, and leaves the others, until it is killed.
PROCESS = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_study import Study, space
study = Study(Path(sys.argv[1]), space({trials}, grid={trials}), "x")
print("ready", flush=True)
for place in map(int, sys.argv[2:]):
    trial = study.take(place, f"1_{{place}}")
    study.tell(trial.number, float(place))
    study.tell(trial.number, float(place))
"""


def start(folder: Path, trials: int, places: range) -> subprocess.Popen[str]:
    text = PROCESS.format(tests=str(Path(__file__).parent), trials=trials)
    words = [sys.executable, "-c", text, str(folder), *map(str, places)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process


@pytest.mark.devices
@pytest.mark.slow
def test_processes_share_a_grid_and_may_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, jobs, rng = 60, 3, random.Random(3)
    Study(tmp_path, space(trials, grid=trials), "x")
    processes = [start(tmp_path, trials, range(n, trials, jobs)) for n in range(jobs)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes[1:]:
        time.sleep(rng.uniform(0.1, 0.4))
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()
    # What the killed ones left, a lock among it, is no obstacle to the jobs that come back.
    monkeypatch.setattr(module, "_GRACE", 3)
    study = Study(tmp_path, space(trials, grid=trials), "x")
    study.release()
    for place in study.open_places():
        trial = study.take(place, f"2_{place}")
        assert trial is not None
        assert trial.place == place
        assert study.tell(trial.number, float(place))
    assert set(told(tmp_path).values()) == {1}
    asked = [t for t in study._trials() if "place" in t.user_attrs]
    assert sorted(trial.user_attrs["place"] for trial in asked) == list(range(trials))
    assert all(trial.state.is_finished() for trial in study._trials())
    if len(asked) == len(study._trials()):  # else one was killed while it asked
        assert sorted(trial.params[NAME] for trial in asked) == list(range(1, trials + 1))
