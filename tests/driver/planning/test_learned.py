"""What a training took corrects the next plan of the same program, until it is told to forget."""

import dataclasses
import functools
import json

import pytest
from layered import layered_step

from launcher.config.compose import load
from launcher.driver.planning.learned import as_learned, learn, outcome
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import local_shape
from launcher.plan.profile.outcomes import corrected, kept_correction
from launcher.report.breakdown.accounting import PARTS, Accounting, StepPart

WORDS = ("model=mlp", "dataset=synthetic", "parallel=manual", "parallel.num_stages=2")
SHAPE = local_shape(2, 1, "cpu")
STEP = functools.cache(lambda: layered_step(((64, 64),) * 4, 32, updated=range(4)))


def config(*words):
    return load([*WORDS, *words])


def planned(shape=SHAPE):
    return plan_of(config().parallel, STEP(), shape)


def accounted(plan, seconds, **parts):
    """The accounting of steps of so many seconds, of which some are not the devices' own."""
    rest = seconds - sum(parts.values())
    measured = dict.fromkeys(PARTS, 0.0) | {"compute": rest} | parts
    step = plan.predicted_step_seconds
    predicted = dict.fromkeys(PARTS, 0.0) | {"compute": step}
    return Accounting(
        step,
        measured_step_seconds=seconds,
        median_step_seconds=seconds,
        parts=tuple(StepPart(name, predicted[name], measured[name]) for name in PARTS),
    )


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("times", [0.3, 2.5, 8.0])
def test_the_second_plans_error_is_less_than_half_of_the_firsts(times, caplog):
    first = planned()
    took = times * first.predicted_step_seconds
    learn(config(), first, accounted(first, took), steps=20)
    caplog.set_level("INFO")
    shape = as_learned(config(), SHAPE, STEP())
    assert f"took {times:.2f} times as long here before" in caplog.text
    assert "parallel.cost=model forgets it" in caplog.text
    second = planned(shape)

    def error(plan):
        return abs(plan.predicted_step_seconds - took)

    assert error(second) <= error(first) / 2
    # What it took then is held against the corrected rates: nothing is counted twice.
    learn(config(), second, accounted(second, second.predicted_step_seconds), steps=20)
    assert kept_correction(SHAPE, [first.fingerprint]) == pytest.approx(times)


def test_waiting_for_data_arrays_or_saves_is_no_property_of_the_devices():
    plan = planned()
    took = 2 * plan.predicted_step_seconds
    waits = dict.fromkeys(("data", "transfers"), took)
    assert outcome(accounted(plan, 3 * took, **waits)) == pytest.approx(2)
    assert outcome(Accounting(1.0, median_step_seconds=2.0)) is None


def test_it_is_forgotten_where_rates_are_nominal_and_not_kept_of_a_few_steps(caplog):
    plan = planned()
    twice = accounted(plan, 2 * plan.predicted_step_seconds)
    learn(config(), plan, twice, steps=7)
    learn(config("parallel.cost=model"), plan, twice, steps=20)
    learn(config("parallel.cost=profile"), plan, twice, steps=20)
    assert as_learned(config(), SHAPE, STEP()) == SHAPE
    learn(config(), plan, twice, steps=8)
    assert as_learned(config("parallel.cost=model"), SHAPE, STEP()) == SHAPE
    assert as_learned(config(), SHAPE, STEP()).correction == pytest.approx(2)
    other = dataclasses.replace(SHAPE, flops=2 * SHAPE.flops)  # calibrated since
    assert as_learned(config(), other, STEP()) == other
    assert as_learned(config(), SHAPE, layered_step(((64, 64),) * 2, 32)) == SHAPE


def test_a_run_that_goes_on_plans_as_it_did(tmp_path):
    plan = planned(corrected(SHAPE, 3.0))
    (tmp_path / "outputs" / "mine").mkdir(parents=True)
    (tmp_path / "outputs" / "mine" / "plan.json").write_text(json.dumps(plan.to_dict()))
    learn(config(), plan, accounted(plan, 5 * plan.predicted_step_seconds), steps=20)
    assert as_learned(config("run.id=mine"), SHAPE, STEP()).correction == 3.0
    assert as_learned(config(), SHAPE, STEP()).correction == pytest.approx(15.0)
