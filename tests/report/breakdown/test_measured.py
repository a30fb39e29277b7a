"""Where a recorded step's time went: sums that hold, schedules' bubbles, and culprits by name."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.base.spans import Clock, Span
from launcher.plan.breakdown import StageParts
from launcher.report.breakdown import PARTS
from launcher.report.measured import length, measured_seconds, minus, overlap, united
from launcher.report.pages.timeline import ProcessSpans
from launcher.report.verdict import judged
from launcher.schedule import SCHEDULES, Kind

sys.path.insert(0, str(Path(__file__).parent))
from events import MS, ORIGIN, lengths, pipeline_events


def parts_of(events):
    return measured_seconds(events)


def test_intervals_are_sets_of_moments():
    a, b = united([(5, 9), (0, 2), (1, 3), (9, 9)]), [(2.0, 6.0), (8.0, 20.0)]
    assert a == [(0, 3), (5, 9)]
    assert minus(a, b) == [(0, 2.0), (6.0, 8.0)]
    assert overlap(a, b) == [(2.0, 3), (5, 6.0), (8.0, 9)]
    assert length(minus(a, b)) + length(overlap(a, b)) == length(a)


BUBBLES = {
    "gpipe": lambda s, m, v: (s - 1) / (m + s - 1),
    "1f1b": lambda s, m, v: (s - 1) / (m + s - 1),
    "eager_1f1b": lambda s, m, v: (s - 1) / (m + s - 1),
    "interleaved_1f1b": lambda s, m, v: (s - 1) / (v * m + s - 1),
    # ZB-H1: of each stage's wait only a third is left where F, B and W take the same time.
    "zero_bubble": lambda s, m, v: (s - 1) / (3 * m + s - 1),
    "forward": lambda s, m, v: (s - 1) / (v * m + s - 1),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("meshes", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
@pytest.mark.parametrize("name", BUBBLES)
def test_the_bubble_of_events_is_the_schedules(name, meshes, micro_batches):
    each = 2 if SCHEDULES[name].interleaves else 1
    tasks = SCHEDULES[name].tasks(meshes, micro_batches, each)
    found = parts_of(pipeline_events(tasks, lengths))
    analytic = BUBBLES[name](meshes, micro_batches, each)
    assert found.parts["bubble"] / found.step_seconds == pytest.approx(analytic, rel=0.05)
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds)
    assert len(found.stages) == meshes * each
    for row in found.stages.values():
        assert row.step_seconds == pytest.approx(found.step_seconds, rel=0.05)
        assert row.forward_seconds == pytest.approx(0.010 * micro_batches)


def test_a_link_is_waited_for_while_its_arrays_are_on_their_way():
    tasks = SCHEDULES["gpipe"].tasks(2, 1)
    found = parts_of(pipeline_events(tasks, lengths, lambda src, dst: 0.005))
    assert found.waits == pytest.approx({(0, 1): 0.005, (1, 0): 0.005})
    assert found.parts["transfers"] == pytest.approx(0.005)  # in the mean over both devices
    assert found.parts["bubble"] == pytest.approx((0.010 + 0.005 + 0.030 + 0.005 + 0.020) / 2)


def span(lane, start, end, kind="", name="a", **about):
    return Span(lane, name, ORIGIN + start * MS, ORIGIN + end * MS, kind or lane, about)


def run(start, end, kind="forward", name="a", **about):
    return span("device 0", start, end, kind, name, mesh=0, program="p", stage=0, **about)


def test_idle_moments_have_reasons_and_the_start_of_the_recording_is_no_part_of_the_step():
    spans = (
        span("data", 0, 10),
        span("recording", 10, 110),
        span("dispatch", 110, 114, name="a"),
        run(114, 124),
        span("dispatch", 120, 140, name="b"),
        run(141, 151, "forward_backward", "b"),
        span("device 0 collectives", 145, 147, "collective"),
        span("device 0 gradient sums", 149, 156, "gradient sum"),
    )
    stage = SimpleNamespace(forward_seconds=1.0, backward_seconds=3.0, update_seconds=0.0)
    found = measured_seconds([ProcessSpans("worker 0", spans, Clock())], [stage])
    ms = {name: round(1e3 * seconds, 6) for name, seconds in found.parts.items()}
    assert 1e3 * found.step_seconds == pytest.approx(56)
    expected = {"compute": 18, "collectives": 7, "data": 10, "driver": 20, "residue": 1}
    assert ms == dict.fromkeys(PARTS, 0.0) | expected
    assert found.dispatch == {"worker 0": found.parts["driver"]}
    row = found.stages[0]
    assert 1e3 * row.forward_seconds == pytest.approx(10 + 2.5)
    assert 1e3 * row.update_seconds == pytest.approx(5)
    assert 1e3 * row.idle_seconds == pytest.approx(10 + 20 + 1)
    assert row.others_seconds == pytest.approx(0)
    assert row.step_seconds == pytest.approx(found.step_seconds)
    assert measured_seconds([ProcessSpans("worker 0", spans[:3], Clock())]) is None


def test_devices_wait_for_the_dispatch_of_their_own_process():
    late = span("device 1", 30, 40, "forward", mesh=1, program="p", stage=1)
    parts = [
        ProcessSpans("worker 0", (span("dispatch", 0, 1), run(1, 40)), Clock()),
        ProcessSpans("worker 1", (span("dispatch", 0, 30), late), Clock()),
    ]
    found = measured_seconds(parts)
    assert found.dispatch == pytest.approx({"worker 0": 0.001, "worker 1": 0.030})
    assert found.parts["driver"] == pytest.approx(0.031 / 2)


def test_a_recording_may_have_more_stages_than_the_plan_of_today():
    """An earlier start of the run recorded it under another plan."""
    first = run(0, 10, "forward_backward")
    second = dataclasses.replace(first, about={**first.about, "stage": 1})
    stage = SimpleNamespace(forward_seconds=1.0, backward_seconds=3.0, update_seconds=0.0)
    spans = (span("data", 0, 1), first, second)
    found = measured_seconds([ProcessSpans("worker 0", spans, Clock())], [stage])
    assert 1e3 * found.stages[0].forward_seconds == pytest.approx(2.5)
    assert 1e3 * found.stages[1].forward_seconds == pytest.approx(5)


SLOW = 0.030  # seconds that each slow thing takes longer
ONE, TWO = (lambda mesh: 0), (lambda mesh: mesh % 2)
HALVES = lambda mesh: mesh // 2  # noqa: E731
CASES = [
    *(("stage 1", 2, process_of) for process_of in (ONE, TWO)),
    *(("stage 0", 4, ONE), ("stage 2", 4, HALVES), ("stage 3", 4, HALVES)),
    *(("link 0-1", 2, process_of) for process_of in (ONE, TWO)),
    *(("link 1-2", 4, HALVES), ("link 2-3", 4, ONE)),
    *(("data", 2, ONE), ("data", 2, TWO), ("data", 4, HALVES)),
    *(("saves", 2, ONE), ("saves", 4, HALVES)),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("culprit", "meshes", "process_of"), CASES)
def test_what_is_slow_is_named(culprit, meshes, process_of):
    what, _, which = culprit.partition(" ")
    tasks = SCHEDULES["1f1b"].tasks(meshes, 8)

    def seconds(task):
        slow = what == "stage" and task.stage == int(which)
        return lengths(task) + slow * SLOW * (2 if task.kind is Kind.BACKWARD else 1)

    def transfer(src, dst):
        ends = {str(src), str(dst)}
        return 0.001 + SLOW * (what == "link" and ends == set(which.split("-")))

    def data(process):  # of the first process alone, as the stage that reads is there
        return 10 * SLOW if what == "data" and process == 0 else 0.0

    about = {"process_of": process_of, "update": 0.005}
    plain = parts_of(pipeline_events(tasks, lengths, lambda src, dst: 0.001, **about))
    slow = parts_of(pipeline_events(tasks, seconds, transfer, data=data, **about))
    if what == "saves":
        slow.parts["saves"] += 10 * SLOW
        slow.step_seconds += 10 * SLOW
    stages_of = {mesh: [mesh] for mesh in range(meshes)}
    assert judged(plain, plain, stages_of) == ("", "")
    found, sentence = judged(plain, slow, stages_of)
    assert found == culprit
    named = {"link": f"the link between stage {which.replace('-', ' and stage ')}"}
    assert named.get(what, f"the compute of {culprit}" if what == "stage" else what) in sentence
    more = {name: slow.parts[name] - plain.parts[name] for name in PARTS}
    difference = slow.step_seconds - plain.step_seconds
    assert sum(more.values()) == pytest.approx(difference)
    assert abs(more["residue"]) <= 0.1 * difference


def test_stages_that_are_all_slow_are_the_devices():
    tasks = SCHEDULES["1f1b"].tasks(4, 8)
    plain = parts_of(pipeline_events(tasks, lengths))
    slow = parts_of(pipeline_events(tasks, lambda task: 2 * lengths(task)))
    stages_of = {mesh: [mesh] for mesh in range(4)}
    found, sentence = judged(plain, slow, stages_of)
    assert found == "compute"
    assert "all stages, which takes 2.0 times what was predicted" in sentence
    assert "task=calibrate" in sentence
    found, sentence = judged(slow, plain, stages_of)
    assert found == "compute"
    assert "50.0% less than" in sentence
    for stage in (2, 3):  # without a prediction there is no ratio
        plain.stages[stage] = StageParts(stage)
        slow.stages[stage] = StageParts(stage, forward_seconds=1e-3)
    found, sentence = judged(plain, slow, stages_of)
    assert "all stages, which takes 2.0 times what was predicted" in sentence
