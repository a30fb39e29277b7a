"""Which plans are tried before a training, what comes of it, and what stays."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from layered import layered_step

from launcher.cluster.errors import HungError, WorkerError
from launcher.cluster.kinds import find_devices
from launcher.config.cluster import Emulated
from launcher.config.compose import load
from launcher.config.parallel import Auto, Manual
from launcher.config.schema import Config
from launcher.driver.planning.plan_from_config import plan_of, plans_of
from launcher.driver.planning.prepare import known_fastest, of_run, plans_to_try
from launcher.driver.tries import Tries
from launcher.plan import Plan, local_shape
from launcher.plan.profile.trials import keep_trial, kept_trial, same_way, trial_of
from launcher.report.console import make_console
from launcher.trace.step import TracedStep

SHAPE = local_shape(4, 1, "cpu")
POOL = find_devices(Emulated(gpus=4))
OPEN = "recipe=mlp_synthetic", "cluster=emulated"
FORGETS = *OPEN, "parallel.cost=model"


@functools.cache
def step() -> TracedStep:
    return layered_step([(512, 512)] * 4, 512)


@functools.cache
def plans() -> list[Plan]:
    """The three best of `step`."""
    return plans_of(Auto(), step(), SHAPE, how_many=lambda best: 3)


@functools.cache
def settings(words: tuple[str, ...]) -> Config:
    return load(words)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Answered:
    """Workers that answer what is given of each plan: seconds of a step, or an error."""

    def __init__(self, answers: list[Any], count: int = 1) -> None:
        self.handles, self.calls, self._now = [None] * count, [], None
        self._answers = {json.dumps(p.to_dict()): a for p, a in zip(plans(), answers, strict=True)}

    def submit(self, method: str, argument: Any) -> Any:
        if method == "begin_trial":
            self._now = None if argument is None else self._answers[json.dumps(argument)]
            self.calls.append(self._now)
            return SimpleNamespace(result=lambda: None)
        assert method == "run_trial"

        def each() -> list[float]:
            if isinstance(self._now, Exception):
                raise self._now
            return [self._now / 2, self._now][-len(self.handles) :]

        return SimpleNamespace(each=each)


def failed(message: str, died: bool = False) -> WorkerError:
    return WorkerError("worker_0", message, Path("log"), died=died, error_type="Error")


def tries(knows: bool = True) -> Tries:
    return Tries(plans(), make_console(), knows)


def test_the_best_plans_are_of_several_kinds_and_fit() -> None:
    assert plans()[0].to_dict() == plan_of(Auto(), step(), SHAPE).to_dict()
    assert len(plans()) == 3
    kinds = [tuple(len(stage.devices) for stage in plan.stages) for plan in plans()]
    assert len(set(kinds)) == 3
    # Pipelines, too, which the search of the best plan alone has not simulated.
    assert {len(plan.meshes) for plan in plans()} == {1, 4}
    seconds = [plan.predicted_step_seconds for plan in plans()]
    assert seconds[1:] == sorted(seconds[1:])
    for plan in plans():
        plan.validate(step())
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    tight = dataclasses.replace(SHAPE, memory_bytes=max(s.memory_bytes for s in plans()[0].stages))
    for plan in plans_of(Auto(), step(), tight, how_many=lambda best: 9):
        assert plan.missing_bytes <= 0
    assert len(plans_of(Manual(), step(), SHAPE, how_many=lambda best: 3)) == 1


@pytest.mark.parametrize(
    ("words", "steps", "seconds", "count"),
    [
        ((), 200, 8.9, 1),
        ((), 200, 9.1, 3),
        (("parallel.cost=model",), 200, 9.1, 1),
        (("parallel.try=0",), 200, 9.1, 1),
        (("parallel.try=auto",), 200, 9.1, 3),
        (("parallel.try=5",), 1, 1e-3, 5),
        (("parallel.try=2", "parallel.cost=model"), 1, 1e-3, 2),
        (("parallel=manual",), 200, 9.1, 1),
    ],
)
def test_plans_are_tried_where_that_pays(
    words: tuple[str, ...], steps: int, seconds: float, count: int
) -> None:
    config = load(["recipe=mlp_synthetic", "cluster=emulated", f"train.steps={steps}", *words])
    best = dataclasses.replace(plans()[0], predicted_step_seconds=seconds)
    assert plans_to_try(config, POOL, best) == count
    assert plans_to_try(config, None, best) == 1  # a described cluster


def test_the_fastest_is_taken_and_what_was_measured_stays(said: list[str]) -> None:
    trying = tries()
    assert trying.run(Answered([0.3, 0.1, 0.2]))
    chosen = trying.choose()
    assert chosen == dataclasses.replace(plans()[1], tried=chosen.tried)
    assert [trial.measured_step_seconds for trial in chosen.tried] == [0.3, 0.1, 0.2]
    assert plans_to_try(settings(OPEN), POOL, plans()[0]) == 3
    said.clear()
    assert known_fastest(settings(OPEN), plans()) == chosen
    assert "parallel.cost=model forgets it" in said[0]
    assert known_fastest(settings(FORGETS), plans()) is None
    again = Answered([0.1, 0.2, 0.3])
    assert tries().run(again)
    assert again.calls == [None]  # nothing is left to try
    assert tries(knows=False).run(again)
    assert again.calls[1:] == [0.1, 0.2, 0.3, None]


def test_the_slowest_worker_counts() -> None:
    trying = tries()
    trying.run(Answered([0.3, 0.1, 0.2], count=2))
    assert [trial.measured_step_seconds for trial in trying.choose().tried] == [0.3, 0.1, 0.2]


def test_only_plans_that_were_all_measured_are_compared() -> None:
    keep_trial(plans()[0], trial_of(plans()[0], 0.1))
    assert known_fastest(settings(OPEN), plans()) is None
    assert known_fastest(settings(OPEN), plans()[:1]) is None
    workers = Answered([9.0, 0.3, 0.2])
    trying = tries()
    trying.run(workers)
    assert workers.calls == [0.3, 0.2, None]
    assert trying.choose().tried[0].measured_step_seconds == 0.1


def test_a_plan_that_cannot_run_falls_out_and_is_not_tried_again(said: list[str]) -> None:
    trying = tries()
    assert trying.run(Answered([failed("RESOURCE_EXHAUSTED: out of memory\nmore"), 0.3, 0.2]))
    chosen = trying.choose()
    assert same_way(chosen, plans()[2])
    assert chosen.tried[0].measured_step_seconds is None
    why = "worker_0 failed: Error: RESOURCE_EXHAUSTED: out of memory"
    assert chosen.tried[0].failure == why
    assert f"{chosen.tried[0].plan} is dropped: {why}" in said
    assert known_fastest(settings(OPEN), plans()) == chosen


@pytest.mark.parametrize(
    ("error", "count"),
    [
        (failed("Segmentation fault", died=True), 1),
        (failed("out of memory"), 2),  # for which the other one waits
        (HungError("no answer from worker_0 for 60 s\nand where", {}), 1),
    ],
)
def test_one_that_ends_the_workers_falls_out_and_others_try_the_rest(
    error: Exception, count: int
) -> None:
    trying = tries()
    first = Answered([0.3, error, 0.2], count)
    assert not trying.run(first)
    assert first.calls == [0.3, error]
    second = Answered([9.0, 9.0, 0.2], count)
    assert trying.run(second)
    assert second.calls == [0.2, None]
    chosen = trying.choose()
    assert same_way(chosen, plans()[2])
    assert chosen.tried[1].failure
    assert kept_trial(plans()[1]) is None  # it may have been something else


def test_if_none_can_run_the_training_tells_why(said: list[str]) -> None:
    trying = tries()
    trying.run(Answered([failed("no")] * 3))
    assert same_way(trying.choose(), plans()[0])
    assert "the best by its prediction is taken" in said[-1]


def test_what_was_measured_is_of_a_plan_on_such_devices() -> None:
    keep_trial(plans()[0], trial_of(plans()[0], 0.1))
    trial = kept_trial(dataclasses.replace(plans()[0], predicted_step_seconds=7.0))
    assert trial is not None
    assert (trial.measured_step_seconds, trial.predicted_step_seconds) == (0.1, 7.0)
    more = {**plans()[0].cluster, "devices_per_host": 8}
    hosts = {**plans()[0].cluster, "devices_per_host": 2, "hosts": 2}
    for change in (
        {"fingerprint": "another"},
        {"schedule": "gpipe"},
        {"cluster": more},
        {"cluster": hosts},
        {"stages": plans()[1].stages},
    ):
        assert kept_trial(dataclasses.replace(plans()[0], **change)) is None


def test_a_run_that_goes_on_takes_the_plan_that_it_has_chosen(tmp_path: Path) -> None:
    trying = tries()
    trying.run(Answered([0.3, 0.1, 0.2]))
    chosen = trying.choose()
    file = tmp_path / "plan.json"
    assert of_run(tmp_path, plans()) is None
    file.write_text(json.dumps(chosen.to_dict()))
    assert of_run(tmp_path, plans()) == chosen
    assert of_run(tmp_path, plans()[:1]) is None
    file.write_text(json.dumps(plans()[1].to_dict()))  # which was not chosen by trying
    assert of_run(tmp_path, plans()) is None
    file.write_text("{")
    assert of_run(tmp_path, plans()) is None
