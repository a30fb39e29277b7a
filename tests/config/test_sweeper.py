"""Hydra's sweepers, its own and Optuna's, ask for points and are told what came of them."""

from pathlib import Path

import pytest
import yaml

from launcher.config.errors import ConfigError
from launcher.config.sweeper import Batch, Outcome, SweeperError, run_sweeper

OPTUNA = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=6")


def swept(*arguments, objective=lambda values: 0.0, folder=Path("/nowhere")):
    """The batches that were asked for, as lists of what the points set."""
    asked: list[Batch] = []

    def run(batch):
        asked.append(batch)
        outcomes = []
        for point in batch.points:
            settings = dict(text.split("=") for text in point.swept)
            try:
                outcomes.append(Outcome(objective({k: float(v) for k, v in settings.items()})))
            except ArithmeticError as error:
                outcomes.append(Outcome(problem=str(error)))
        return outcomes

    run_sweeper(arguments, (), run, lambda: folder)
    return asked


def test_the_basic_sweeper_asks_for_all_at_once_and_the_rest_stays_as_typed():
    (batch,) = swept("+run.id=1e3", "train.steps=1,2", "model.size='nano'", "run.seed=range(2,4)")
    assert [point.overrides for point in batch.points] == [
        ("+run.id=1e3", f"train.steps={steps}", "model.size='nano'", f"run.seed={seed}")
        for steps in (1, 2)
        for seed in (2, 3)
    ]
    assert (batch.total, batch.learns) == (4, False)
    assert batch.points[0].label == "train.steps=1 run.seed=2"
    (alone,) = swept("train.steps=3")
    assert [point.label for point in alone.points] == ["the only run"]


def test_optuna_finds_the_least_and_asks_the_same_again(tmp_path):
    space = ("train.steps=interval(1,100)", "run.seed=5", "sweep.jobs=2")

    def objective(values):
        return (values["train.steps"] - 40) ** 2

    first = swept(*OPTUNA, *space, objective=objective, folder=tmp_path)
    assert [(len(batch.points), batch.total, batch.learns) for batch in first] == [(2, 6, True)] * 3
    found = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    values = [float(p.swept[0].partition("=")[2]) for batch in first for p in batch.points]
    best = min(values, key=lambda steps: (steps - 40) ** 2)
    assert found["best_params"] == {"train.steps": best}
    assert first[0].points[0].overrides[1:] == ("run.seed=5", "sweep.jobs=2")
    assert swept(*OPTUNA, *space, objective=objective, folder=tmp_path) == first
    assert swept(*OPTUNA, *space[:1], folder=tmp_path)[0] != first[0]  # another seed


@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes", "nsgaii", "grid"])
def test_every_sampler_of_optuna(sampler, tmp_path):
    space = "choice(1,2,3)" if sampler == "grid" else "interval(1.0,9.0)"
    words = (*OPTUNA, f"hydra/sweeper/sampler={sampler}", f"optimizer.learning_rate={space}")
    batches = swept(*words, folder=tmp_path)
    assert sum(len(batch.points) for batch in batches) == (3 if sampler == "grid" else 6)


def test_what_is_to_grow_is_maximized_and_what_fails_stops_nothing(tmp_path):
    def objective(values):
        return 1 / (values["train.steps"] % 2) * values["train.steps"]

    words = (*OPTUNA, "train.steps=choice(1,2,3,4,5)", "sweep.objective=mfu")
    batches = swept(*words, objective=objective, folder=tmp_path)
    found = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    tried = {int(p.swept[0][-1]) for batch in batches for p in batch.points}
    assert len(batches) == 6
    assert tried & {2, 4}  # that failed
    assert found["best_value"] == max(n for n in tried if n % 2)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ("hydra/sweeper=optunna",),
            "There is no hydra/sweeper=optunna (on the command line). Did you mean optuna?",
        ),
        (
            ("hydra.sweeper.n_trials=3",),
            "Hydra's sweeper: Could not override 'hydra.sweeper.n_trials'.",
        ),
        (
            (*OPTUNA, "hydra.sweeper.storage=sqlite:///a.db"),
            "hydra.sweeper.storage would hold each point twice once the sweep goes on "
            "(on the command line). Leave it out: sweep.json in the sweep's folder holds its "
            "points.",
        ),
        (
            ("train.steps=interval(1,3)",),
            "train.steps=interval(1,3) cannot be listed value by value (on the command line). "
            "Write the values with commas, range(start,stop,step) or choice(a,b).",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_asked_for(words, error):
    with pytest.raises(ConfigError) as caught:
        swept(*words)
    assert str(caught.value).startswith(error)


def test_a_sweeper_that_cannot_begin_says_why():
    with pytest.raises(SweeperError, match="irection"):
        swept(*OPTUNA, "hydra.sweeper.direction=up", "train.steps=1,2")
