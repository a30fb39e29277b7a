"""Hydra's sweepers and Optuna ask for points and are told what came of them."""

import sys
import types
from pathlib import Path

import pytest

from launcher.config.compose import load, load_points
from launcher.config.errors import ConfigError
from launcher.config.sweep import run_sweeper
from launcher.submit.study import Study, run_study

OPTUNA = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=6")
FOUND = {}  # by the last sweep by Optuna


@pytest.fixture
def other(tmp_path):
    """The folder of another sweep."""
    (tmp_path / "other").mkdir()
    return tmp_path / "other"


def swept(*arguments, objective=lambda values: 0.0, folder=Path("/nowhere"), dirs=()):
    """The batches of points that were asked for."""
    asked = []

    def run(points, total):
        asked.append(points)
        values = []
        for point in points:
            settings = dict(text.split("=") for text in point.swept)
            try:
                values.append(objective({k: float(v) for k, v in settings.items()}))
            except ArithmeticError:
                values.append(None)
        return values

    def by_optuna(space, make_point):
        points, _ = load_points([make_point(words) for words in space.ends()], dirs)
        study = Study(folder, space.settled(points[0].config), "")
        run_study(study, make_point, run)
        FOUND.update(study.best() or {})
        return 0

    run_sweeper(arguments, dirs, lambda points: len(run(points, len(points))), by_optuna)
    return asked


def test_the_basic_sweeper_asks_for_all_at_once_and_the_rest_stays_as_typed():
    (points,) = swept("+run.id=1e3", "train.steps=1,2", "model.size='nano'", "run.seed=range(2,4)")
    assert [point.overrides for point in points] == [
        ("+run.id=1e3", f"train.steps={steps}", "model.size='nano'", f"run.seed={seed}")
        for steps in (1, 2)
        for seed in (2, 3)
    ]
    assert points[0].label == "train.steps=1 run.seed=2"
    (alone,) = swept("train.steps=3")
    assert [point.label for point in alone] == ["the only run"]


def test_optuna_finds_the_least_and_asks_the_same_again(tmp_path, other):
    space = ("train.steps=interval(1,100)", "run.seed=5", "sweep.jobs=2")

    def objective(values):
        return (values["train.steps"] - 40) ** 2

    first = swept(*OPTUNA, *space, objective=objective, folder=tmp_path)
    assert [len(points) for points in first] == [2] * 3
    found = dict(FOUND)
    values = [float(p.swept[0].partition("=")[2]) for points in first for p in points]
    best = min(values, key=lambda steps: (steps - 40) ** 2)
    assert found["best_params"] == {"train.steps": best}
    assert first[0][0].overrides[1:] == ("run.seed=5", "sweep.jobs=2")
    assert swept(*OPTUNA, *space, objective=objective, folder=tmp_path) == []  # all are told
    assert swept(*OPTUNA, *space, objective=objective, folder=other) == first
    (other / "optuna.journal").unlink()
    assert swept(*OPTUNA, *space[:1], folder=other)[0] != first[0]  # another seed


@pytest.mark.parametrize("sampler", ["tpe", "random", "nsgaii", "grid"])
def test_every_sampler_of_optuna(sampler, tmp_path):
    space = "choice(1,2,3)" if sampler == "grid" else "interval(1.0,9.0)"
    words = (*OPTUNA, f"hydra/sweeper/sampler={sampler}", f"optimizer.learning_rate={space}")
    batches = swept(*words, folder=tmp_path)
    assert sum(map(len, batches)) == (3 if sampler == "grid" else 6)


def test_what_is_to_grow_is_maximized_and_what_fails_stops_nothing(tmp_path):
    def objective(values):
        return 1 / (values["train.steps"] % 2) * values["train.steps"]

    words = (*OPTUNA, "train.steps=choice(1,2,3,4,5)", "sweep.objective=mfu")
    batches = swept(*words, objective=objective, folder=tmp_path)
    found = dict(FOUND)
    tried = {int(p.swept[0][-1]) for points in batches for p in points}
    assert len(batches) == 6
    assert tried & {2, 4}  # that failed
    assert found["best_value"] == max(n for n in tried if n % 2)


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ("hydra/sweeper=optunna",),
            "There is no hydra/sweeper=optunna (on the command line). Did you mean optuna?",
        ),
        (
            ("hydra.sweeper.n_trials=3",),
            "hydra.sweeper.n_trials is not a setting (on the command line). ",
        ),
        (
            (*OPTUNA, "hydra/sweeper/sampler=cmaes"),
            "There is no hydra/sweeper/sampler=cmaes (on the command line). Options of "
            "hydra/sweeper/sampler: grid, nsgaii, random, tpe.",
        ),
        (
            ("hydra.sweeper._target_=a.Nevergrad", "train.steps=1,2"),
            "hydra.sweeper._target_ is a.Nevergrad, and tested sweepers are Hydra's own and "
            "Optuna's (on the command line). Choose hydra/sweeper=basic or optuna.",
        ),
        (
            ("hydra.sweeper.max_batch_size=1", "train.steps=1,2"),
            "hydra.sweeper.max_batch_size has no effect here (on the command line). "
            "Say how many runs go at a time by sweep.jobs, on Slurm by cluster.slurm.array.",
        ),
        (
            ("train.steps=interval(1,3)",),
            "train.steps=interval(1,3) cannot be listed value by value (on the command line). "
            "Write the values with commas, range(start,stop,step) or choice(a,b).",
        ),
        (OPTUNA, "hydra/sweeper=optuna has nothing to search"),
        *(
            ((*OPTUNA, f"{words}", "train.steps=1,2"), f"hydra.sweeper.{error}")
            for words, error in (
                (
                    "hydra.sweeper.direction=up",
                    "direction cannot be up (on the comma",
                ),
                (
                    "hydra.sweeper.direction=[minimize,maximize]",
                    "direction cannot be ['minim",
                ),
                (
                    "hydra.sweeper.sampler._target_=os.system",
                    "sampler is os.system, which is not supp",
                ),
                ("hydra.sweeper.sampler=cmaes", "sampler is cmaes, which is not supp"),
                ("hydra.sweeper.params=3", "params is not a table"),
                (
                    "hydra.sweeper.n_trails=3",
                    "n_trails is not a setting (on the command line). D",
                ),
                (
                    "hydra.sweeper.custom_search_space=a.b",
                    "custom_search_space runs code, and would",
                ),
                ("hydra.sweeper.n_trials=0", "n_trials cannot be 0"),
                ("hydra.sweeper.n_jobs=0", "n_jobs cannot be 0"),
                ("hydra.sweeper.sampler.odd=1", "sampler does not work: "),
                ("hydra.sweeper.sampler.n_startup_trials=x", "sampler does not work: "),
                ("hydra.sweeper.storage=sqlite:///a.db", "storage would be a second record"),
                ("+hydra.sweeper.search_space.x.low=1", "search_space.x cannot be read"),
            )
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_asked_for(words, error):
    with pytest.raises(ConfigError) as caught:
        swept(*words)
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize("older", [None, "another version's"])
def test_without_optuna_one_sentence_says_what_to_install(older, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", older and types.ModuleType("optuna"))
    monkeypatch.delitem(sys.modules, "optuna.storages", raising=False)
    monkeypatch.delitem(sys.modules, "optuna.storages.journal", raising=False)
    with pytest.raises(ConfigError) as caught:
        swept("hydra/sweeper=optuna", "train.steps=1,2")
    assert str(caught.value) == (
        "hydra/sweeper=optuna needs Optuna 5, which is not installed. "
        "Install it with: pip install 'optuna>=5.0,<6'."
    )


@pytest.fixture
def described(tmp_path, monkeypatch):
    """Writes my_conf/recipe/mine.yaml and returns the folder."""

    def write(text, name="recipe/mine"):
        path = tmp_path / "my_conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        head = "# @package _global_\n" if name.startswith("recipe") else ""
        path.write_text(head + text)
        return ["my_conf"]

    monkeypatch.chdir(tmp_path)
    return write


BY_OPTUNA = """
defaults:
  - override /model: mlp
  - override /dataset: synthetic
  - override /hydra/sweeper: optuna
  - override /hydra/sweeper/sampler: random
hydra:
  sweeper:
    n_trials: 6
    params:
      optimizer.learning_rate: interval(0.001,0.1)
      train.steps: choice(10,20)
run: {seed: 3}
sweep: {jobs: 2, objective: mfu}
"""


def test_a_sweep_by_optuna_is_described_in_a_recipe(described, tmp_path, other):
    dirs, keys = described(BY_OPTUNA), {"optimizer.learning_rate", "train.steps"}

    def objective(values):
        return values["optimizer.learning_rate"]

    first = swept("recipe=mine", objective=objective, folder=tmp_path, dirs=dirs)
    assert [len(points) for points in first] == [2] * 3
    for points in first:
        for point in points:
            assert {text.partition("=")[0] for text in point.swept} == keys
            assert point.overrides == ("recipe=mine", *point.swept)
    found = dict(FOUND)
    rates = [float(p.swept[0].partition("=")[2]) for points in first for p in points]
    assert found["best_value"] == max(rates)  # as sweep.objective wants it
    assert swept("recipe=mine", objective=objective, folder=other, dirs=dirs) == first  # seed 3
    (other / "optuna.journal").unlink()
    seed = swept("recipe=mine", "run.seed=4", objective=objective, folder=other, dirs=dirs)
    assert [points[0].swept for points in seed] != [points[0].swept for points in first]
    # One run of the recipe is a run: what it says of a sweep is for -m.
    assert load(["recipe=mine"], dirs).model.name == "mlp"


def test_the_command_line_beats_what_a_file_says_of_the_sweep(described, tmp_path):
    words = ("recipe=mine", "hydra.sweeper.n_trials=2", "sweep.jobs=1", "train.steps=5")
    batches = swept(*words, folder=tmp_path, dirs=described(BY_OPTUNA))
    assert [len(points) for points in batches] == [1, 1]
    for [point] in batches:  # what it fixes is not swept
        assert [text.partition("=")[0] for text in point.swept] == ["optimizer.learning_rate"]
    swept_there = ("train.steps=1,2", "optimizer.learning_rate=0.5")
    text = "hydra: {sweeper: {params: {train.steps: '7,8', run.seed: 'range(0,2)'}}}"
    (points,) = swept("recipe=mine", *swept_there, dirs=described(text))
    assert [point.swept for point in points] == [
        (f"run.seed={seed}", f"train.steps={steps}") for seed in (0, 1) for steps in (1, 2)
    ]


def test_a_file_of_ones_own_among_hydras_sweepers(described, tmp_path):
    dirs = described("n_trials: 3\n", "hydra/sweeper/short")
    described("defaults: [optuna]\nn_trials: 3\n", "hydra/sweeper/short")
    words = ("hydra/sweeper=short", "train.steps=choice(1,2,3)")
    batches = swept(*words, folder=tmp_path, dirs=dirs)
    assert sum(map(len, batches)) == 3


PLACE = "(in my_conf/recipe/mine.yaml:"
OPTUNA_FILE = "defaults: [override /hydra/sweeper: optuna]\nhydra:\n  sweeper:\n    "


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            f"{OPTUNA_FILE}sampler: {{_target_: os.system}}",
            f"hydra.sweeper.sampler is os.system, which is not supported {PLACE}5). "
            "Use hydra/sweeper/sampler=tpe | random | nsgaii | grid.",
        ),
        (
            f"{OPTUNA_FILE}custom_search_space: os.system",
            f"hydra.sweeper.custom_search_space runs code, and would in each job {PLACE}5)",
        ),
        (
            f"{OPTUNA_FILE}sampler: ${{model.options}}",
            f"hydra.sweeper.sampler: ${{model.options}} asks for another value, which has no "
            f"effect here {PLACE}5). Write the value itself.",
        ),
        (
            "hydra: {sweeper: {params: {allow_modules: '[os]'}}}",
            f"allow_modules can be set only on the command line {PLACE}2). Set it there.",
        ),
        (
            "hydra: {sweeper: {params: {++allow_modules: '[os]'}}}",
            f"hydra.sweeper.params: ++allow_modules is not the name of a setting {PLACE}2)",
        ),
        (
            "hydra: {sweeper: {params: {cluster.slurm.setup: 'a,b'}}}",
            f"cluster.slurm.setup runs code, so no file may set it {PLACE}2)",
        ),
        (
            "hydra: {sweeper: {params: {cluster: 'choice({slurm:{setup:a}})'}}}",
            f"cluster.slurm.setup runs code, so no file may set it {PLACE}2)",
        ),
        (
            "hydra: {sweeper: {params: {train.steps: 'interval(1,3)'}}}",
            f"train.steps=interval(1,3) cannot be listed value by value {PLACE}2)",
        ),
        (
            "hydra: {sweeper: {params: {train.steps: '1,(2'}}}",
            f"hydra.sweeper.params: train.steps=1,(2 cannot be read {PLACE}2)",
        ),
        (
            f"{OPTUNA_FILE}params: {{train.steps: 'interval(3,1)'}}",
            "train.steps=interval(3,1) cannot be searched: ",
        ),
        (
            f"{OPTUNA_FILE}params: {{train.steps: 'tag(log,interval(0,1))'}}",
            "train.steps=tag(log,interval(0,1)) cannot be searched: ",
        ),
        (
            f"{OPTUNA_FILE}n_trialz: 3",
            f"hydra.sweeper.n_trialz is not a setting {PLACE}5). Did you mean n_trials?",
        ),
        (
            "defaults: [override /hydra/sweeper: optunna]",
            "There is no hydra/sweeper=optunna (in my_conf/recipe/mine.yaml). Did you mean optuna?",
        ),
        (
            "hydra: {launcher: {n_jobs: 3}}",
            "hydra is Hydra's own section, of which only hydra.sweeper has an effect here",
        ),
    ],
)
def test_what_a_file_may_not_say_of_a_sweep(described, text, error):
    with pytest.raises(ConfigError) as caught:
        swept("recipe=mine", dirs=described(text))
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize("text", ["_target_: os.system", "defaults_x: {_target_: os.system}"])
def test_a_sweepers_file_runs_no_code(described, text):
    with pytest.raises(ConfigError, match="tested sweepers are Hydra's own and Optuna's"):
        swept("hydra/sweeper=odd", dirs=described(text, "hydra/sweeper/odd"))


@pytest.mark.parametrize("in_file", [True, False])
def test_what_a_search_leaves_open_follows_from_the_settings_of_its_runs(
    described, tmp_path, in_file
):
    dirs = described("run: {seed: 3}\nsweep: {jobs: 2, objective: mfu}" if in_file else "{}")
    words = () if in_file else ("run.seed=3", "sweep.jobs=2", "sweep.objective=mfu")
    space = "train.steps=choice(1,2,3,4,5,6,7,8,9)"
    batches = swept(
        *("recipe=mine", *OPTUNA, space, *words),
        objective=lambda values: values["train.steps"],
        folder=tmp_path,
        dirs=dirs,
    )
    tried = [[int(point.swept[0][-1]) for point in points] for points in batches]
    assert [len(points) for points in tried] == [2] * 3
    assert FOUND["best_value"] == max(map(max, tried))


def test_the_older_way_to_write_params(described, tmp_path):
    space = (
        "{train.steps: {type: int, low: 1, high: 9, step: 2}, run.seed: {type: categorical, "
        "choices: [1, 2]}, optimizer.learning_rate: {type: float, low: 0.001, high: 1, log: true}}"
    )
    dirs = described(f"{OPTUNA_FILE}search_space: {space}\n    n_trials: 1")
    [[point]] = swept("recipe=mine", "run.seed=7", folder=tmp_path, dirs=dirs)
    values = dict(text.split("=") for text in point.swept)
    assert int(values["train.steps"]) in (1, 3, 5, 7, 9)
    assert "run.seed" not in values  # which the command line fixes
    assert 0.001 <= float(values["optimizer.learning_rate"]) <= 1


def test_a_file_may_name_a_sampler_by_its_class(described, tmp_path):
    text = f"{OPTUNA_FILE}sampler: {{_target_: optuna.samplers.TPESampler}}\n    n_trials: 2"
    words = ("recipe=mine", "train.steps=choice(1,2)")
    assert sum(map(len, swept(*words, folder=tmp_path, dirs=described(text)))) == 2
