"""A plan and a recorded step side by side: both sides add up, and the figures agree."""

import dataclasses
import functools
import io
import json
import re
import sys
from pathlib import Path

import pytest
from layered import layered_step

import launcher
from launcher.base.files import DamagedError
from launcher.base.spans import Clock
from launcher.plan import local_shape
from launcher.plan.breakdown import predicted_seconds
from launcher.plan.pipeline import timeline
from launcher.report.breakdown import (
    FILE,
    PARTS,
    PHASES,
    Goodput,
    Known,
    LinkWait,
    Memory,
    StageBreakdown,
    StageParts,
    StepBreakdown,
    StepPart,
    break_down,
    breakdown_tables,
    in_summary,
    print_breakdown,
    read_breakdown,
)
from launcher.report.console import make_console
from launcher.report.pages.timeline import ProcessSpans
from launcher.report.plan_table import bottleneck
from launcher.schedule import step_seconds

sys.path.insert(0, str(Path(__file__).parent))
from events import lengths, pipeline_events

SHAPES = ((64, 64),) * 8


@functools.cache
def plan_of(schedule="1f1b", stages=4, devices=4, **shape):
    step = layered_step(SHAPES, 32, updated=range(8))
    method = launcher.PipeshardParallel(
        num_micro_batches=8,
        schedule=schedule,
        stage_option=launcher.UniformStageOption(stages),
    )
    return method.plan(step, local_shape(devices, 1, "cpu"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b", "zero_bubble"])
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("shared", [True, False])
def test_the_parts_of_a_plan_are_its_step(schedule, devices, shared):
    plan = plan_of(schedule, devices=devices)
    if not shared:
        cluster = {**plan.cluster, "effective_parallelism": None}
        plan = dataclasses.replace(plan, cluster=cluster)
    found = predicted_seconds(plan)
    step = plan.predicted_step_seconds
    assert sum(found.parts.values()) == pytest.approx(step)
    assert all(seconds >= -1e-12 for name, seconds in found.parts.items() if name != "residue")
    if shared:  # else the step was predicted for another cluster
        assert found.parts["residue"] == pytest.approx(0, abs=1e-9 * step)
        for row in found.stages.values():
            assert row.step_seconds == pytest.approx(step)
            assert row.others_seconds == pytest.approx(0)
    assert (found.parts["collectives"] > 0) == (devices == 8)
    for stage, row in zip(plan.stages, found.stages.values(), strict=True):
        if not shared:
            assert row.forward_seconds == pytest.approx(8 * stage.forward_seconds)


def test_what_waits_for_a_link_is_part_of_the_transfers():
    """Gradients of both stages are summed over the link of the host that they share."""
    rates = {"inter_host": 1e6, "effective_parallelism": None}
    cluster = dataclasses.replace(local_shape(6, 3, "cpu"), **rates)
    step = layered_step(SHAPES, 48, updated=range(8))
    stages = launcher.UniformStageOption(2)
    plan = launcher.PipeshardParallel(num_micro_batches=8, stage_option=stages).plan(step, cluster)
    found, longest = predicted_seconds(plan), max(s.update_seconds for s in plan.stages)
    length = plan.predicted_step_seconds
    assert found.parts["transfers"] > length - step_seconds(timeline(plan)) - longest > 0.1 * length
    assert sum(found.parts.values()) == pytest.approx(length)
    assert found.parts["residue"] == pytest.approx(0, abs=1e-9 * length)
    assert [row.step_seconds for row in found.stages.values()] == pytest.approx([length] * 2)
    assert re.search("; the link (from|to) host 1 is occupied", bottleneck(plan))


def test_stages_on_the_same_devices_have_each_others_time_in_their_rows():
    plan = plan_of("interleaved_1f1b", devices=2)
    assert tuple(plan.mesh_of) == (0, 1, 0, 1)
    rows = predicted_seconds(plan).stages
    for stage, mesh in enumerate(plan.mesh_of):
        assert rows[stage].step_seconds == pytest.approx(plan.predicted_step_seconds)
        beside = [s for s, of in enumerate(plan.mesh_of) if of == mesh and s != stage]
        others = sum(rows[s].busy_seconds for s in beside)
        assert rows[stage].others_seconds == pytest.approx(others)


def recorded(plan):
    return pipeline_events(plan.tasks(), lengths, lambda src, dst: 0.001, update=0.002)


def test_the_figures_of_an_accounting_agree():
    plan = plan_of()
    known = Known(samples=32, tokens=320, saves_seconds=0.1, memory_peak=7)
    found = break_down(plan, known, 3, recorded(plan), Goodput(training_seconds=1.0))
    assert found.step == 3
    assert sum(p.predicted_seconds for p in found.parts) == pytest.approx(
        found.predicted_step_seconds
    )
    step = found.measured_step_seconds
    assert sum(p.measured_seconds for p in found.parts) == pytest.approx(step)
    assert found.samples_per_second == pytest.approx(32 / step)
    assert found.tokens_per_second == pytest.approx(320 / step)
    assert found.part("saves").measured_seconds == 0.1
    for stage in found.stages:
        assert stage.measured.step_seconds == pytest.approx(step, rel=0.05)
    assert {(link.source, link.target) for link in found.links} == {
        *(((s,), (s + 1,)) for s in range(3)),
        *(((s + 1,), (s,)) for s in range(3)),
    }
    assert found.mfu is None  # a CPU has no datasheet
    assert found.memory.peak == 7
    assert found.sentence

    tables = breakdown_tables(found)
    assert [*tables] == ["accounting", "measured_stages"]
    assert all(len(row) == len(t.columns) for t in tables.values() for row in t.rows)
    assert tables["accounting"].rows[-1][:3] == ["step", found.predicted_step_seconds, step]
    assert in_summary(found)["differs"] == found.sentence


def test_how_far_clocks_are_apart_is_said():
    plan = plan_of()
    events = pipeline_events(
        plan.tasks(), lengths, lambda src, dst: 0.001, process_of=lambda mesh: mesh // 2
    )
    assert break_down(plan, Known(32), 3, events).clock_skew_seconds == 0.0
    clocks = Clock(2_000_000, 40_000), Clock(-3_000_000, 60_000)
    there = [ProcessSpans(e.process, e.spans, c) for e, c in zip(events, clocks, strict=True)]
    found = break_down(plan, Known(32), 3, [*there, ProcessSpans("driver", (), Clock())])
    assert found.clock_skew_seconds == pytest.approx(0.005)
    assert found.clock_uncertainty_seconds == pytest.approx(0.0001)
    console = make_console(io.StringIO())
    print_breakdown(console, found)
    assert (
        "The processes' clocks were 5.00 ms apart, which is corrected for; times of two processes "
        "may be off by 0.10 ms.\n"
    ) in console.file.getvalue()
    alone = break_down(plan, Known(32), 3, recorded(plan))
    console = make_console(io.StringIO())
    print_breakdown(console, alone)
    assert "clocks" not in console.file.getvalue()


def test_utilisation_counts_what_is_computed_again_only_where_it_is_said():
    plan = plan_of()
    plan = dataclasses.replace(
        plan,
        cluster={**plan.cluster, "peak_flops": 1e9},
        predicted_tflops_per_device=1.0,
        predicted_tflops_per_device_with_remat=1.25,
    )
    found = break_down(plan, Known(32), 3, recorded(plan))
    expected = plan.flops_per_step / found.measured_step_seconds / plan.num_devices / 1e9
    assert found.mfu == pytest.approx(expected)
    assert found.mfu_with_remat == pytest.approx(1.25 * expected)


def test_without_a_recorded_step_there_is_what_is_known():
    found = break_down(plan_of(), Known(32, median_step_seconds=0.5))
    assert (found.step, found.measured_step_seconds, found.samples_per_second) == (None, 0.5, 64.0)
    assert found.parts == found.stages == ()
    assert breakdown_tables(found) == {}


WHOLE = StepBreakdown(
    predicted_step_seconds=1.0,
    step=3,
    measured_step_seconds=2.0,
    samples_per_second=16.0,
    memory=Memory(now=10, peak=20),
    parts=tuple(StepPart(name, 0.125, 0.25) for name in PARTS),
    stages=(StageBreakdown(StageParts(0, 0.5, 0.25, 0.125, 0.125), StageParts(0, 2.0)),),
    links=(LinkWait((0, 2), (1,), 0.0, 0.25),),
    goodput=Goodput(training_seconds=90.0, starting_seconds=10.0),
)


def test_it_is_read_as_it_was_written(tmp_path):
    assert read_breakdown(tmp_path) is None
    WHOLE.save(tmp_path)
    assert read_breakdown(tmp_path) == WHOLE
    tree = json.loads((tmp_path / FILE).read_text())
    assert tree["goodput"]["goodput"] == 0.9
    assert tree["goodput"]["wall_seconds"] == 100.0
    assert [part["name"] for part in tree["parts"]] == list(PARTS)
    assert tree["parts"][0] == {
        "name": "compute",
        "predicted_seconds": 0.125,
        "measured_seconds": 0.25,
    }


def test_the_row_of_a_stage_adds_up():
    assert WHOLE.stages[0].predicted.step_seconds == 1.0
    assert WHOLE.part("bubble") == StepPart("bubble", 0.125, 0.25)
    assert StepBreakdown(1.0).part("bubble") == StepPart("bubble", 0.0, 0.0)


def test_what_is_no_number_is_null(tmp_path):
    StepBreakdown(1.0, measured_step_seconds=float("nan")).save(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["measured_step_seconds"] is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"goodput": {}, "parts": 3}'])
def test_a_file_that_is_damaged_is_none(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert read_breakdown(tmp_path) is None


def test_a_part_that_is_missing_is_named():
    with pytest.raises(DamagedError, match="predicted_step_seconds is missing"):
        StepBreakdown.from_dict({"goodput": {}})


def test_the_phases_add_up_to_the_wall_time_and_training_is_what_was_good():
    good = Goodput(training_seconds=60.0, compiling_seconds=20.0, starting_seconds=20.0)
    assert good.wall_seconds == 100.0
    assert good.goodput == 0.6
    assert Goodput().goodput is None
    assert sum(map(good.seconds, PHASES)) == good.wall_seconds


def test_what_was_lost_moves_and_never_more_than_there_is():
    good = Goodput(training_seconds=60.0).moved(25.0, "training", "redone")
    assert (good.training_seconds, good.redone_seconds) == (35.0, 25.0)
    good = good.moved(50.0, "training", "data").moved(-3.0, "training", "data")
    assert (good.training_seconds, good.data_seconds, good.wall_seconds) == (0.0, 35.0, 60.0)
    assert good.with_seconds("redone", -99.0).redone_seconds == 0.0


def test_devices_cost_what_they_were_held_for_where_their_price_is_known():
    good = Goodput(training_seconds=1800.0, starting_seconds=1800.0, devices=8)
    assert good.cost is None
    priced = Goodput(1800.0, devices=8, price_per_device_hour=2.5)
    assert priced.cost == pytest.approx(0.5 * 8 * 2.5)
