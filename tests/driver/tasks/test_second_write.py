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
EXPORT = ("task=export", "run.id=a")


def refused(words, write):
    """What a second write is refused with."""
    Path("out").write_text("mine")
    with pytest.raises(ConfigError) as error:
        write(load(words))
    assert Path("out").read_text() == "mine"
    return str(error.value)


def of_export(said):
    words = [*EXPORT, "export.path=out"]
    return refused(words, lambda config: export._target(config, Path(), Path("7")))


def of_evaluation(said):
    words = ["task=evaluate", "run.id=a", "evaluate.path=out"]
    return refused(words, lambda config: evaluate._target(config, Path("other")))


def of_tokenizer(said):
    words = ["task=tokenize", "dataset=jsonl", "dataset.path=a.jsonl", "tokenize.path=out"]
    return refused(words, lambda config: TokenizeTask().run(config, make_console()))


def of_tokens(said):
    """Tokens of the same source and settings are kept, others replaced with a line."""
    words = ["model=gpt", "dataset=jsonl", "dataset.path=a.jsonl", "dataset.tokens=out"]
    for more in ([], [], ["dataset.bad=skip"]):
        assert said == []
        prepare_corpus(load([*words, *more]).dataset, 1)
    (line,) = said
    return line


WRITTEN = {
    "export.path": (of_export, "export.path=out exists already"),
    "evaluate.path": (of_evaluation, "evaluate.path=out exists already"),
    "tokenize.path": (of_tokenizer, "tokenize.path=out exists already"),
    "dataset.tokens": (of_tokens, "the tokens in out are those of another source or other"),
}
OF_RUNS = {"run.id", "run.dir"}  # a run resumes in its own folder: tests/driver/folder
# Where each task writes beside its run's own folder; "" nowhere.
TARGETS = {
    "export": "export.path",
    "evaluate": "evaluate.path",
    "tokenize": "tokenize.path",
    "prepare_data": "dataset.tokens",
    **dict.fromkeys(("train", "plan", "submit"), "run.id"),
    **dict.fromkeys(("check", "calibrate", "generate", "sweep_status"), ""),
}


def test_every_task_and_every_setting_that_names_a_place_is_classified():
    assert {*TASKS, *sections.TASKS} == set(TARGETS)
    assert {key for key in TARGETS.values() if key} <= {*WRITTEN, *OF_RUNS}
    named = {key for key in setting_keys() if key.rpartition(".")[2].endswith(ENDINGS)}
    assert named == READ | OF_RUNS | set(WRITTEN)


@pytest.mark.parametrize("key", WRITTEN)
def test_a_second_write_is_refused_or_said(key, tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(json.dumps({"text": "some words"}) + "\n")
    write, text = WRITTEN[key]
    assert write(said).startswith(text)
