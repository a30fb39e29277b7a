"""A sweep's table for other programs, and its picture."""

import csv

import pytest
from matplotlib.image import imread

from launcher.config.compose import load
from launcher.report.summary import Summary, write_summary
from launcher.report.sweep import PICTURE, TABLE, Row, objective_of, write_results


def finished(folder, name, **results):
    (folder / name).mkdir()
    write_summary(folder / name, Summary(run_id=name, exit_reason="done", **results))


def test_the_table_has_settings_outcomes_and_runs(tmp_path):
    finished(tmp_path, "s-0", final_loss=2.5, step_seconds_median=0.1, predicted_step_seconds=0.2)
    rows = [
        Row(0, "s-0", ("train.steps=3", "+recipe=smoke"), "done", 2.5),
        Row(1, "s-1", ("train.steps=4", "dataset.path='a,b'"), "failed", None),
    ]
    write_results(tmp_path, rows, "final_loss")
    with open(tmp_path / TABLE, newline="") as file:
        first, second = csv.DictReader(file)
    known = {key: value for key, value in first.items() if value}
    assert known == {
        "point": "0",
        "run": "s-0",
        "state": "done",
        "train.steps": "3",
        "recipe": "smoke",
        "objective": "2.5",
        "final_loss": "2.5",
        "step_seconds": "0.1",
        "predicted_step_seconds": "0.2",
    }
    assert (second["state"], second["dataset.path"]) == ("failed", "'a,b'")
    assert not (tmp_path / PICTURE).exists()  # of one result


@pytest.mark.parametrize("settings", ["1,2,8", "1e-4,1e-3,1e-2", "adam,lion,sgd", "3,3,3"])
def test_the_picture_shows_times_and_objective_against_what_is_swept(settings, tmp_path):
    rows = []
    for n, value in enumerate(settings.split(",")):
        finished(tmp_path, f"s-{n}", step_seconds_median=0.1 * n, predicted_step_seconds=0.2)
        rows.append(Row(n, f"s-{n}", (f"key={value}",), "done", 2.0 - n))
    write_results(tmp_path, rows, "final_loss")
    both = imread(tmp_path / PICTURE)
    assert both.std() > 0.05  # it is not empty
    write_results(tmp_path, rows, "step_seconds")
    assert imread(tmp_path / PICTURE).shape[0] < both.shape[0]  # the times alone


def test_the_objective_that_suits_the_task():
    assert objective_of(load(["recipe=smoke"])) == "eval_loss"
    assert objective_of(load(["recipe=smoke", "train.eval_every=0"])) == "final_loss"
    assert objective_of(load(["recipe=smoke", "task=plan"])) == "predicted_step_seconds"
