"""Nothing that a user names is written over without a word.

A new task, or a new setting that may name a file or folder, fails here until it is classified.
"""

import json
from pathlib import Path

import pytest

from launcher.config import sections
from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.config.reader import setting_keys
from launcher.driver.tasks import evaluate, export
from launcher.driver.tasks.prepare_data import TokenizeTask
from launcher.driver.tasks.task import TASKS
from launcher.recipes.datasets.documents.prepare import prepare_corpus
from launcher.report.console import make_console

ENDINGS = ("path", "dir", "id", "file", "folder", "tokens", "plan", "prompts", "fork", "init_from")
READ = {
    *("dataset.path", "dataset.validation_path", "parallel.plan", "generate.prompts"),
    *("train.init_from", "run.fork", "sweep.dir"),
    *("cluster.slurm.container.workdir", "generate.max_new_tokens"),  # of a container; a number
}
OF_RUNS = {"run.id", "run.dir"}  # a run resumes in its own folder: tests/driver/folder
# Writing what each setting names.
REFUSED = {
    "export.path": lambda config: export._target(config, Path(), Path("7")),
    "evaluate.path": lambda config: evaluate._target(config, Path("other")),
    "tokenize.path": lambda config: TokenizeTask().run(config, make_console()),
}
# Where each task writes beside its run's own folder; "" nowhere.
TARGETS = {
    **{task: f"{task}.path" for task in ("export", "evaluate", "tokenize")},
    "prepare_data": "dataset.tokens",
    **dict.fromkeys(("train", "plan", "submit"), "run.id"),
    **dict.fromkeys(("check", "calibrate", "generate", "sweep_status"), ""),
}
JSONL = ("model=gpt", "dataset=jsonl", "dataset.path=a.jsonl")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(json.dumps({"text": "some words"}) + "\n")


def test_every_task_and_every_setting_that_names_a_place_is_classified():
    assert {*TASKS, *sections.TASKS} == set(TARGETS)
    written = {*REFUSED, "dataset.tokens"}
    assert {*TARGETS.values()} - {""} <= written | OF_RUNS
    named = {key for key in setting_keys() if key.rpartition(".")[2].endswith(ENDINGS)}
    assert named == READ | OF_RUNS | written


@pytest.mark.parametrize("key", REFUSED)
def test_a_second_write_is_refused(key):
    Path("out").write_text("mine")
    config = load([f"task={key.partition('.')[0]}", *JSONL, "run.id=a", f"{key}=out"])
    with pytest.raises(ConfigError, match=f"{key}=out exists already"):
        REFUSED[key](config)
    assert Path("out").read_text() == "mine"


def test_tokens_of_another_source_or_settings_are_replaced_with_a_word(said):
    for more in ([], [], ["dataset.bad=skip"]):
        assert said == []
        prepare_corpus(load([*JSONL, "dataset.tokens=out", *more]).dataset, 1)
    assert said == ["the tokens in out are replaced: source or settings differ"]
