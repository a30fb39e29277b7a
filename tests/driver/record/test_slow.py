"""The cause of a slowdown is named from noisy numbers, and nothing is where there is none."""

import numpy as np
import pytest

from launcher.driver.record.slow import (
    DATA,
    DISPATCH,
    EVERY,
    GARBAGE,
    LINK,
    STAGE,
    Monitor,
    Spot,
    StepSample,
)

HOSTS = [(0,), (0,), (1,), (1,)]
STAGES = [Spot(STAGE, str(k)) for k in range(4)]
LINKS = [Spot(LINK, f"{k} to {k + 1}") for k in range(3)]
OTHERS = [Spot(DISPATCH, "worker 1"), Spot(GARBAGE, "worker 1"), Spot(DATA, "worker 0")]


def samples(slow, cost, begin, count, noise=0.01, seed=0):
    """Samples of a step of a second, of which these spots take more from a sample on."""
    random = np.random.default_rng(seed)
    for k in range(count):
        seconds = dict.fromkeys(STAGES, 0.7) | dict.fromkeys(LINKS, 0.02)
        seconds |= {OTHERS[0]: 0.01, OTHERS[1]: 0.001, OTHERS[2]: 0.0}
        step = 1.0
        if k >= begin:
            for spot in slow:
                seconds[spot] += cost * (0.7 if spot.kind == STAGE else 1.0)
            step += cost * (0.7 if slow[0].kind == STAGE else 1.0)
        yield StepSample(
            (k + 1) * EVERY,
            step * random.normal(1, noise),
            {spot: each * random.normal(1, noise) for spot, each in seconds.items()},
        )


def found(*given, **more):
    monitor = Monitor(HOSTS)
    return [(sample.step, monitor.add(sample)) for sample in samples(*given, **more)]


CAUSES = [
    ([STAGES[1]], "stage 1"),
    ([STAGES[2], STAGES[3]], "host 1 (stages 2, 3)"),
    ([LINKS[1]], "the link of stage 1 to 2"),
    ([OTHERS[0]], "the dispatch of programs in worker 1"),
    ([OTHERS[1]], "garbage collection in worker 1"),
    ([OTHERS[2]], "the data of worker 0"),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cost", [0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize(("slow", "cause"), CAUSES)
def test_the_cause_is_named_within_twenty_steps_with_its_cost(slow, cause, cost):
    told = found(slow, cost, 20, 40, seed=int(100 * cost))
    assert not any(one for step, one in told if step <= 20 * EVERY)
    step, first = next((step, one) for step, one in told if one)
    assert step <= 20 * EVERY + 20
    assert first.cause == cause
    assert {one.cause for _, one in told if one} == {cause}
    spent = cost * (0.7 if slow[0].kind == STAGE else 1.0)
    assert told[-1][1].seconds == pytest.approx(spent, rel=0.4)
    assert first.since > 19 * EVERY


@pytest.mark.parametrize(("slow", "cause"), CAUSES)
def test_what_is_lost_in_the_noise_of_single_samples_is_named_by_more_of_them(slow, cause):
    told = found(slow, 0.06, 30, 45, noise=0.025)
    assert not any(one for step, one in told if step <= 30 * EVERY)
    step, first = next((step, one) for step, one in told if one)
    assert 30 * EVERY + 20 < step <= 30 * EVERY + 50
    assert first.cause == cause
    assert first.since > 28 * EVERY


def test_little_that_lasts_is_named_once_and_beside_what_is_normal():
    """Through single steps in which the whole machine is busy."""
    monitor, told = Monitor(HOSTS), []
    for k, sample in enumerate(samples([STAGES[1]], 0.07, 30, 230, noise=0.025)):
        seconds = {p: each * (1.5 if k % 40 == 39 else 1) for p, each in sample.seconds.items()}
        told.append(monitor.add(StepSample(sample.step, sample.step_seconds, seconds)))
    named = [one for one in told if one]
    assert {(one.cause, one.since) for one in named} == {("stage 1", named[0].since)}
    assert told.index(named[0]) + len(named) == len(told)


def test_no_sample_of_a_slowdown_that_has_ended_becomes_normal():
    monitor = Monitor(HOSTS)
    for sample in samples([STAGES[1]], 0.2, 20, 40):
        assert monitor.add(sample) is None or sample.step > 20 * EVERY
    for sample in samples([], 0.0, 10**9, 40, seed=1):
        found = monitor.add(sample)
    assert found is None
    assert max(sample.seconds[STAGES[1]] for sample in monitor._before) < 0.77


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_nothing_is_named_in_an_hour_in_which_nothing_is_slow(seed, noise):
    assert not any(one for _, one in found([], 0.0, 10**9, 720, noise=noise, seed=seed))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("even", [True, False])
def test_nor_under_a_second_load_on_the_machine(seed, even):
    """It comes and goes, and hits every spot, evenly or not."""
    random, monitor = np.random.default_rng(seed), Monitor(HOSTS)
    loads = random.choice([0.0, 0.2, 0.6, 1.5], 80)
    for k, sample in enumerate(samples([], 0.0, 10**9, 720, noise=0.02, seed=seed)):
        load = loads[k // 9]
        busy = {p: 1 + load * (1 if even else random.uniform(0.3, 1.7)) for p in sample.seconds}
        seconds = {spot: each * busy[spot] for spot, each in sample.seconds.items()}
        seconds[OTHERS[2]] = 0.05 * load * random.uniform(0.3, 1.7)
        step = sample.step_seconds * max(busy[spot] for spot in STAGES)
        assert monitor.add(StepSample(sample.step, step, seconds)) is None


def test_data_that_are_late_from_the_start_are_named():
    told = found([OTHERS[2]], 0.1, 0, 20)
    assert [one.cause for _, one in told if one] == ["the data of worker 0"] * 6


def test_a_stage_that_is_slower_but_holds_nothing_up_is_not_named():
    told = Monitor(HOSTS)
    for sample in samples([STAGES[1]], 0.2, 20, 40):
        assert told.add(StepSample(sample.step, 1.0, sample.seconds)) is None


def test_a_slowdown_that_lasts_does_not_become_normal_and_one_that_passes_ends():
    told = found([STAGES[1]], 0.2, 20, 200)
    assert all(one and one.since == told[23][1].since for _, one in told[23:])
    monitor = Monitor(HOSTS)
    for sample in samples([STAGES[1]], 0.2, 20, 60):
        monitor.add(sample)
    assert monitor.found
    for sample in samples([], 0.0, 10**9, 8, seed=1):
        monitor.add(sample)
    assert monitor.found is None
    text = str(told[30][1])
    assert text.startswith(f"stage 1 has slowed the run since step {told[30][1].since} by 1")
    assert text.endswith("% faster")
