"""An Optuna sweep of real trainings is killed half-way and started again."""

import csv
import json
import re
import signal
from pathlib import Path

import pytest
import yaml
from launched import Launcher, lines

from launcher.submit.points import DONE, read_points

WORDS = (
    *("-m", "recipe=smoke", "train.eval_every=0", "train.steps=4", "wandb.mode=disabled"),
    *("train.checkpoint.every_steps=2", "run.id=s", "hydra/sweeper=optuna", "sweep.jobs=2"),
    *("hydra.sweeper.n_trials=8", "optimizer.learning_rate=interval(0.0001,0.01)"),
    "sweep.objective=final_loss",
)


def done(folder: Path) -> set[str]:
    if not (folder / "sweep.json").exists():
        return set()
    return {point.run for point in read_points(folder) if point.state == DONE}


@pytest.mark.stress
def test_a_killed_sweep_of_trainings_ends_with_its_8_points_none_twice(tmp_path: Path) -> None:
    folder = tmp_path / "multirun" / "s"
    first = Launcher(tmp_path, *WORDS, deadline=900)
    first.wait_for(lambda: len(done(folder)) >= 3 and first.workers())
    first.process.send_signal(signal.SIGKILL)
    first.end()  # and nothing is left of it, nor of the runs in progress
    before = {run: (folder / run / "summary.json").read_bytes() for run in done(folder)}
    assert 3 <= len(before) < 8
    begun = [point.run for point in read_points(folder)]

    code, out, err = Launcher(tmp_path, *WORDS, deadline=900).end()
    assert (code, err) == (0, ""), out
    points = read_points(folder)
    assert [point.run for point in points] == [f"s-{n}" for n in range(8)]
    assert [point.run for point in points][: len(begun)] == begun
    assert {point.state for point in points} == {DONE}
    assert sorted(path.name for path in folder.glob("s-*")) == [f"s-{n}" for n in range(8)]
    again = {int(number) - 1 for number in re.findall(r"^\[(\d)/8\] \S+$", out, re.MULTILINE)}
    assert again == {n for n in range(8) if f"s-{n}" not in before}
    for run, content in before.items():
        assert (folder / run / "summary.json").read_bytes() == content
    rates = set()
    for point in points:
        assert [line["step"] for line in lines(folder / point.run)] == [1, 2, 3, 4]
        settings = yaml.safe_load((folder / point.run / "config.yaml").read_text())
        rates.add(settings["optimizer"]["learning_rate"])
        loss = json.loads((folder / point.run / "summary.json").read_text())["final_loss"]
        assert point.value == loss
    assert len(rates) == 8
    with open(folder / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == [f"s-{n}" for n in range(8)]
    found = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert found["best_value"] == min(point.value for point in points)


@pytest.mark.stress
def test_the_points_of_a_sweep_compile_what_they_share_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("-m", "recipe=smoke", "train.eval_every=0", "wandb.mode=disabled", "run.id=s")
    code, out, err = Launcher(tmp_path, *words, "run.seed=1,2").end()
    assert (code, err) == (0, ""), out
    kept = [path.stat() for path in (tmp_path / "cache").rglob("compiled/*/*-cache")]
    assert len(kept) > 4
    second = (tmp_path / "multirun" / "s" / "s-1" / "config.yaml").stat()
    assert all(stat.st_mtime < second.st_mtime for stat in kept)
    assert len(lines(tmp_path / "multirun" / "s" / "s-1")) == 3
