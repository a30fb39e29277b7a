"""A plan as tables, and beside what was measured."""

import dataclasses

import pytest

from launcher.plan import local_shape
from launcher.plan.plan import Plan, ProfiledLayers, RunnerUp, StagePlan
from launcher.report.plan_table import beside_measured, plan_tables, predicted_memory
from launcher.report.summary import Summary


def make_plan():
    stages = tuple(
        StagePlan(
            layers=(i,),
            hosts=(i,),
            devices=(2 * i, 2 * i + 1),
            logical_mesh=(2, 1),
            remat="none",
            forward_seconds=0.01,
            backward_seconds=0.02,
            backward_weight_seconds=0.01,
            update_seconds=0.001,
            memory_bytes=(i + 1) << 20,
            num_parameters=100,
            shardings={},
        )
        for i in range(2)
    )
    shape = local_shape(4, 2, "cpu")
    return Plan(
        method="manual",
        schedule="1f1b",
        num_micro_batches=8,
        batch_size=32,
        num_parameters=200,
        stages=stages,
        transfers=(),
        cluster=vars(shape),
        flops_per_step=1e9,
        predicted_step_seconds=0.3,
        predicted_samples_per_second=100.0,
        predicted_tflops_per_device=0.01,
        predicted_tflops_per_device_with_remat=0.01,
        predicted_bubble_fraction=0.3,
        fingerprint="abc",
        runners_up=(RunnerUp("1 stage", 0.4, "it is slower"),),
        profiled=(ProfiledLayers((0, 1), 1, 4, 0.01, 0.02),),
    )


def test_every_table_has_rows_as_wide_as_its_columns():
    tables = plan_tables(make_plan())
    assert list(tables) == [
        "plan/stages",
        "plan/shardings",
        "plan/runners_up",
        "plan/profiled_layers",
    ]
    assert all(len(row) == len(t.columns) for t in tables.values() for row in t.rows)
    assert tables["plan/profiled_layers"].rows == [["0-1", 1, 4, 0.01, 0.02, ""]]
    assert tables["plan/runners_up"].rows == [["1 stage", 0.4, "it is slower"]]


def test_a_plan_without_a_search_has_no_empty_tables():
    plain = dataclasses.replace(make_plan(), runners_up=(), profiled=())
    assert list(plan_tables(plain)) == ["plan/stages", "plan/shardings"]


def test_predictions_stand_beside_what_was_measured_where_it_was():
    summary = Summary(
        "r", "done", step_seconds_median=0.25, predicted_step_seconds=0.3, peak_memory_bytes=None
    )
    table = beside_measured(make_plan(), summary, {"pipeline/stage_1_seconds": 0.2})
    assert table.rows == [
        ["step_seconds", 0.3, 0.25, pytest.approx(0.2)],
        ["stage_1_seconds", pytest.approx(0.24), 0.2, pytest.approx(0.2)],
    ]


def test_memory_is_that_of_the_fullest_device():
    assert predicted_memory(make_plan()) == 2 << 20
