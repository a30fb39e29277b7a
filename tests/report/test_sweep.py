"""A sweep's table, on the console and for other programs, and its picture."""

import csv
import io

import pytest
import yaml
from matplotlib.image import imread

from launcher.config.compose import load
from launcher.report.console import make_console
from launcher.report.summary import Summary, write_summary
from launcher.report.sweep import (
    PICTURE,
    TABLE,
    Row,
    is_done,
    objective_of,
    print_comparison,
    short_names,
    write_results,
)


def make_run(folder, settings, **summary):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    if summary:
        write_summary(folder, Summary(run_id=folder.name, **summary))
    return folder


def text_of(run_dirs):
    file = io.StringIO()
    print_comparison(make_console(file), run_dirs)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def settings(number, micro_batches):
    return {
        "run": {"id": f"s-{number}", "seed": 0},
        "parallel": {"method": "manual", "num_micro_batches": micro_batches},
        "train": {"steps": 20},
    }


def test_the_exact_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "multirun" / "s"
    result = {"exit_reason": "done", "steps": 20, "predicted_step_seconds": 0.07}
    runs = [
        make_run(
            root / "s-0",
            settings(0, 2),
            final_loss=2.41,
            eval_loss=2.5,
            step_seconds_median=0.08,
            samples_per_second=400.0,
            **result,
        ),
        make_run(
            root / "s-1",
            settings(1, 4),
            final_loss=2.40,
            eval_loss=2.6,
            step_seconds_median=0.09,
            samples_per_second=1355.5,
            **result,
        ),
        make_run(
            root / "s-2",
            settings(2, 8),
            exit_reason="out of memory on worker 0",
            final_loss=1.0,
            step_seconds_median=0.01,
        ),
        make_run(root / "s-3", settings(3, 16)),
        make_run(root / "s-4", settings(4, 32), exit_reason="interrupted", steps=3),
    ]
    assert text_of(runs) == [
        "runs multirun/s/s-*",
        "run  num_micro_batches     loss     eval      step  predicted  samples/s  ended",
        "0                    2   2.4100  *2.5000  *80.0 ms    70.0 ms      400.0  done",
        "1                    4  *2.4000   2.6000   90.0 ms    70.0 ms   *1,355.5  done",
        "2                    8   1.0000        -   10.0 ms          -          -  failed",
        "3                   16        -        -         -          -          -  not finished",
        "4                   32        -        -         -          -          -  interrupted",
        "2: out of memory on worker 0",
        "3: there is no whole summary.json",
    ]


def test_plans_are_compared_by_their_predictions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "multirun" / "s"
    runs = [
        make_run(
            root / f"s-{n}",
            settings(n, 2**n),
            exit_reason="planned",
            predicted_step_seconds=0.07 - 0.01 * n,
            predicted_samples_per_second=400.0 + n,
            predicted_bubble_fraction=0.25,
            predicted_peak_memory_bytes=3 << (30 + n),
        )
        for n in range(2)
    ]
    assert text_of(runs) == [
        "runs multirun/s/s-*",
        "run  num_micro_batches  predicted  samples/s  bubble     memory  ended",
        "0                    1    70.0 ms      400.0   25.0%  *3.00 GiB  planned",
        "1                    2   *60.0 ms     *401.0   25.0%   6.00 GiB  planned",
    ]


def test_runs_of_different_folders_keep_their_names(tmp_path):
    runs = [make_run(tmp_path / name, {}) for name in ("a/x-0", "b/x-1")]
    assert text_of(runs)[0].split()[0] == "run"
    assert [line.split()[0] for line in text_of(runs)[1:3]] == ["x-0", "x-1"]


def test_folders_in_which_nothing_can_be_read_are_still_shown(tmp_path):
    (tmp_path / "r-0").mkdir()
    (tmp_path / "r-1").mkdir()
    (tmp_path / "r-1" / "summary.json").write_text("{torn")
    (tmp_path / "r-1" / "config.yaml").write_text("a: [")
    text = text_of([tmp_path / "r-0", tmp_path / "r-1", tmp_path / "r-2"])
    assert sum("not finished" in line for line in text) == 3


def test_keys_lose_their_section_unless_that_would_confuse_them():
    keys = ["train.steps", "model.name", "optimizer.name"]
    assert short_names(keys) == ["steps", "model.name", "optimizer.name"]


def test_the_jobs_of_a_batch_system_are_shown(tmp_path):
    done = {"exit_reason": "done", "steps": 20}
    runs = [make_run(tmp_path / "s-0", settings(0, 2), **done)]
    runs.append(make_run(tmp_path / "s-1", settings(1, 4)))
    file = io.StringIO()
    print_comparison(make_console(file), runs, ["7_0 COMPLETED", "7_1 PENDING"])
    lines = file.getvalue().splitlines()
    head = next(line.split() for line in lines if "loss" in line)
    later = io.StringIO()  # a trial without settings, as it has not begun, adds no column
    jobs = ["7_0 COMPLETED", "7_1 PENDING", "7_2 PENDING"]
    print_comparison(make_console(later), [*runs, tmp_path / "s-2"], jobs)
    assert next(line.split() for line in later.getvalue().splitlines() if "loss" in line) == head
    assert later.getvalue().splitlines()[-1].split()[:2] == ["2", "-"]
    assert any("7_0 COMPLETED  done" in line for line in lines)
    assert any("7_1 PENDING    -" in line for line in lines)
    assert "no summary.json" not in file.getvalue()
    assert [is_done(run) for run in runs] == [True, False]


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
