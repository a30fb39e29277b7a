"""A task is one class in a registry: one from outside runs like the launcher's own."""

import pytest

from launcher.config import sections
from launcher.config.compose import load
from launcher.config.errors import ConfigError
from launcher.driver.run import guarded, run
from launcher.driver.tasks import task
from launcher.stop import Stop


@pytest.fixture
def count_layers(monkeypatch):
    """The settings of a task that prints the model's layers, or refuses them."""
    monkeypatch.setattr(task, "TASKS", dict(task.TASKS))

    @task.register
    class CountLayers(task.TaskKind):
        name, answers, reads = "count_layers", True, ("model",)

        def run(self, config, console):
            if config.model.layers is None:
                raise ConfigError("the model has no layers", "Use another.", ["model"])
            console.print("counting")
            print(config.model.layers)
            return 0

    yield load(["model=gpt", "model.num_layers=3", "task=count_layers"])
    del sections.TASKS["count_layers"]


def test_a_task_from_outside_runs_and_answers(count_layers, capsys):
    assert run(count_layers, Stop()) == 0
    assert capsys.readouterr() == ("3\n", "counting\n")
    assert sections.TASKS["count_layers"] == ("model",)


def test_its_errors_are_reported(count_layers, capsys, monkeypatch):
    monkeypatch.setattr(type(count_layers.model), "layers", None)
    assert guarded(lambda: run(count_layers, Stop())) == 2
    assert "the model has no layers" in capsys.readouterr().err


def test_names_are_those_of_the_classes():
    assert {name: task.task_named(name).name for name in task.TASKS} == {
        name: name for name in task.TASKS
    }
