"""The plan's table says what the plan says and fits the screen."""

import dataclasses
import io

import pytest

from launcher.hardware import with_measured
from launcher.plan import local_shape
from launcher.plan.plan import Plan, ProfiledLayers, RunnerUp, StagePlan, Transfer, Trial
from launcher.report.console import make_console
from launcher.report.plan_table import (
    beside_measured,
    plan_tables,
    predicted_memory,
    predictions,
    print_plan,
)
from launcher.report.summary import Summary

# Each of the two replicas sends its 64 KiB of a microbatch to the same host in 0.06 ms, of which
# 10 µs pass before; another host has one link for both.
CLUSTER = dataclasses.replace(
    local_shape(8, 2, "cpu"), peak_flops=None, intra_host=1.31072e9, inter_host=1e8, latency=1e-5
)


def make_plan(num_stages=4, memory_bytes=None, **stage_changes):
    stages = tuple(
        dataclasses.replace(
            StagePlan(
                layers=(2 * i, 2 * i + 1),
                hosts=(i // 2,),
                devices=(2 * i, 2 * i + 1),
                logical_mesh=(2, 1),
                remat="none",
                forward_seconds=0.0102,
                backward_seconds=0.0211,
                backward_weight_seconds=0.0102,
                update_seconds=0.001,
                memory_bytes=12 << 30,
                num_parameters=105_000,
                shardings={},
            ),
            **stage_changes,
        )
        for i in range(num_stages)
    )
    links = [(i, i + 1) for i in range(num_stages - 1)]
    transfers = [Transfer(a, b, 131072, 20) for a, b in links]
    transfers += [Transfer(b, a, 131072, 0) for a, b in links]
    return Plan(
        method="manual",
        schedule="1f1b",
        num_micro_batches=8,
        batch_size=32,
        num_parameters=420_000,
        stages=stages,
        transfers=tuple(transfers),
        cluster=dataclasses.asdict(CLUSTER) | {"memory_bytes": memory_bytes},
        flops_per_step=1e9,
        predicted_step_seconds=0.381,
        predicted_samples_per_second=84.2,
        predicted_tflops_per_device=0.012,
        predicted_tflops_per_device_with_remat=0.013,
        predicted_bubble_fraction=0.325,
        fingerprint="abc",
    )


def text_of(plan):
    file = io.StringIO()
    print_plan(make_console(file), plan)
    return file.getvalue()


def test_the_exact_text():
    assert text_of(make_plan()) == (
        """
plan: manual, 4 stages, 1f1b, 8 microbatches, 8 devices on 2 hosts (emulated)
stage  layers  submesh  mesh  params  forward  backward  transfer    memory
    0     0-1      1x2   2x1   105 K  10.2 ms   21.1 ms   0.06 ms  12.0 GiB
    1     2-3      1x2   2x1   105 K  10.2 ms   21.1 ms   1.32 ms  12.0 GiB
    2     4-5      1x2   2x1   105 K  10.2 ms   21.1 ms   0.06 ms  12.0 GiB
    3     6-7      1x2   2x1   105 K  10.2 ms   21.1 ms         -  12.0 GiB
stages 0-3: the batch cut in 2 along data
420 K parameters; predicted: 381 ms a step, 84 samples/s, 32.5% bubble
bottleneck: stage 0, busy 65.7% of the step; gradient sums and update 1.00 ms
rates: as stated, none measured
"""
    )


def test_it_is_said_which_rates_were_measured():
    cluster = with_measured(local_shape(8, 2, "NVIDIA H100"), flops=1e15, latency=1e-6)
    plan = dataclasses.replace(make_plan(), cluster=vars(cluster))
    assert (
        "\nrates measured: products, latency; as stated: fused attention, element-wise work, "
        "launches, starts of programs, links in a host, gathers beside sums, links between hosts\n"
    ) in text_of(plan)


def test_memory_stands_beside_the_devices_own():
    assert "12.0 GiB  75%\n" in text_of(make_plan(memory_bytes=16 << 30))
    assert "12.0 GiB 150%\n" in text_of(make_plan(memory_bytes=8 << 30))
    line = "\nmemory: plans may fill 8.00 GiB a device; the rest is left to CUDA, NCCL and cuDNN\n"
    assert line in text_of(make_plan(memory_bytes=8 << 30))


def test_a_mesh_of_several_stages_is_as_busy_as_all_of_them():
    plan = make_plan(2)
    turns = [dataclasses.replace(stage, layers=(i,)) for i, stage in enumerate(plan.stages * 2)]
    plan = dataclasses.replace(plan, stages=tuple(turns), predicted_step_seconds=1.0)
    assert "bottleneck: stages 0, 2, busy 50.1% of the step" in text_of(plan)


def test_remat_is_told_once_where_all_stages_agree_and_by_stage_where_not():
    assert "8 microbatches, remat full, " in text_of(make_plan(remat="full"))
    plan = make_plan(2)
    first = dataclasses.replace(plan.stages[0], remat="full")
    mixed = text_of(dataclasses.replace(plan, stages=(first, plan.stages[1])))
    assert all(f"  {word}  " in mixed for word in ("remat", "full", "none"))


def test_layers_that_the_model_checkpoints_itself_are_told():
    assert "8 microbatches, remat the model's, " in text_of(make_plan(own_checkpoints=2))
    plan = make_plan(2, remat="full/2")
    first = dataclasses.replace(plan.stages[0], own_checkpoints=1)
    mixed = text_of(dataclasses.replace(plan, stages=(first, plan.stages[1])))
    assert all(f"  {word}  " in mixed for word in ("full/2, 1 the model's", "full/2"))


def test_one_of_a_thing_is_not_called_several():
    plan = dataclasses.replace(make_plan(1, devices=(0,)), num_micro_batches=1, method="data")
    assert "plan: data, 1 stage, 1f1b, 1 microbatch, 1 device on 1 host (" in text_of(plan)


def test_large_plans_fit_100_plain_columns():
    plan = make_plan(64, memory_bytes=141 << 30, forward_seconds=12.5, num_parameters=999_900_000)
    text = text_of(plan)
    assert max(map(len, text.splitlines())) <= 100
    assert text.isascii()


def test_runners_up_stand_beside_the_plan_slower_or_not():
    plan = make_plan()
    seconds = plan.predicted_step_seconds
    others = [
        RunnerUp("1 stage", 1.25 * seconds, "it is slower"),
        RunnerUp("2 stages", 0.9 * seconds, "it needs 20 GiB a device"),
    ]
    text = text_of(dataclasses.replace(plan, runners_up=tuple(others)))
    assert "(+25.0%): 1 stage; it is slower" in text
    assert "(-10.0%): 2 stages; it needs" in text


def test_runners_up_that_fit_and_whose_intervals_overlap_are_equal():
    plan = dataclasses.replace(make_plan(), predicted_within=0.1)
    seconds = plan.predicted_step_seconds
    others = tuple(
        RunnerUp(f"{times}", times * seconds, "", fits)
        for times, fits in ((0.9, False), (1.05, True), (1.2, True), (1.22, True))
    )
    plan = dataclasses.replace(plan, runners_up=others)
    assert [one.plan for one in plan.alike] == ["1.05", "1.2"]  # up to 1.1 ** 2
    text = text_of(plan)
    assert "± 10% a step" in text
    assert "2 are equal to it by predictions of ± 10%: parallel.try=3 runs them" in text
    measured = dataclasses.replace(plan, tried=(Trial("", seconds, seconds),))
    assert "equal" not in text_of(measured)


def test_tokens_are_told_where_samples_have_them():
    assert "84 samples/s, 10,778 tokens/s, " in predictions(make_plan(), 128)
    assert "tokens" not in predictions(make_plan())


@pytest.mark.parametrize(
    ("least", "words"),
    [(0.381, "within 0.1% of"), (0.3806, "within 0.2% of"), (0.375, "within 1.6% of"), (None, "")],
)
def test_the_plan_says_how_near_it_is_to_the_best_possible(least, words):
    text = text_of(dataclasses.replace(make_plan(), least_step_seconds=least))
    assert words in text
    assert ("best possible" in text) == bool(words)


def test_a_submesh_of_part_of_a_host_says_at_most_how_many_devices_each_gives():
    plan = make_plan(num_stages=1, hosts=(0, 1), devices=(1, 2, 3, 4, 5), logical_mesh=(5, 1))
    assert " 2x<=3 " in text_of(plan)


def found_plan():
    """A plan that was searched for, from measured layers."""
    others = (RunnerUp("1 stage", 0.4, "it is slower"),)
    profiled = (ProfiledLayers((0, 1), 1, 4, 0.01, 0.02),)
    return dataclasses.replace(make_plan(2), runners_up=others, profiled=profiled)


def test_every_table_has_rows_as_wide_as_its_columns():
    tables = plan_tables(found_plan())
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
    plain = make_plan(2)
    assert list(plan_tables(plain)) == ["plan/stages", "plan/shardings"]


def test_predictions_stand_beside_what_was_measured_where_it_was():
    summary = Summary(
        "r", "done", step_seconds_median=0.25, predicted_step_seconds=0.3, peak_memory_bytes=None
    )
    table = beside_measured(make_plan(2), summary, {"pipeline/stage_1_seconds": 0.2})
    assert table.rows == [
        ["step_seconds", 0.3, 0.25, pytest.approx(0.2)],
        ["stage_1_seconds", pytest.approx(0.2504), 0.2, pytest.approx(0.252)],
    ]


def test_memory_is_that_of_the_fullest_device():
    assert predicted_memory(make_plan()) == 12 << 30
