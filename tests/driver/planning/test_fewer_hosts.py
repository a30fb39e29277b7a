"""Plans for the hosts that are left: what is kept, what gives way, and what is said of it."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
from layered import layered_step

from launcher.config.parallel import Auto, Data, Manual, Parallel, Replay, Shard, ThreeD, Zero3
from launcher.driver.planning import fewer_hosts
from launcher.driver.planning.fewer_hosts import loss_of_a_host, plan_on_fewer
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import ClusterShape, Plan, PlanError, local_shape
from launcher.trace import TracedStep

HOSTS = local_shape(6, 3, "cpu")  # of two devices


@functools.cache
def step(rows: int) -> TracedStep:
    return layered_step([(16, 16)] * 6, rows)


def shape_on_two(parallel: Parallel, rows: int) -> tuple[int, ...]:
    """The hosts that the plan for two takes, its stages, the mesh of each, and its microbatches."""
    plan = plan_on_fewer(parallel, step(rows), HOSTS, 2)
    (mesh,) = {stage.logical_mesh for stage in plan.stages}
    return plan.cluster["hosts"], len(plan.stages), *mesh, plan.num_micro_batches


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("parallel", "rows", "found"),
    [
        (Data(), 12, (2, 1, 4, 1, 1)),
        (Zero3(num_micro_batches=2), 24, (2, 1, 4, 1, 2)),
        (Zero3(num_micro_batches=4), 24, (2, 1, 4, 1, 6)),  # 24 / 4 rows are not for 4 devices
        (Zero3(num_micro_batches=2), 12, (2, 1, 4, 1, 3)),
        (Data(num_micro_batches=3), 18, (1, 1, 2, 1, 3)),  # 18 are not for 4 devices, however cut
        (Manual(num_stages=2, num_micro_batches=2), 12, (2, 2, 2, 1, 2)),
        (Manual(num_stages=2, num_micro_batches=9), 18, (2, 2, 2, 1, 9)),
        (ThreeD(data=3, model=2, pipeline=1, num_micro_batches=2), 12, (2, 1, 2, 2, 2)),
        (ThreeD(data=1, model=2, pipeline=3, num_micro_batches=2), 12, None),
        (Shard(data=3, model=2), 12, (2, 1, 2, 2, 1)),
        (Shard(data=1, model=6), 12, None),
        (Manual(num_stages=3, num_micro_batches=2), 12, None),
        (Replay(plan="plan.json"), 12, None),
    ],
)
def test_the_batch_stays_and_microbatches_and_the_data_axis_give_way(
    parallel: Parallel, rows: int, found: tuple[int, ...] | None
) -> None:
    if found is not None:
        assert shape_on_two(parallel, rows) == found
    else:
        with pytest.raises(PlanError, match=r"^on 2 hosts there is no plan: .*[a-z]"):
            shape_on_two(parallel, rows)


@pytest.mark.parametrize("rows", [12, 13])
def test_a_search_finds_a_plan_for_the_devices_that_are_left(rows: int) -> None:
    plan = plan_on_fewer(Auto(), step(rows), HOSTS, 2)
    assert plan.cluster["hosts"] == 2
    assert plan.num_devices <= 4
    assert plan.batch_size == rows


def test_a_search_that_finds_nothing_is_not_made_for_fewer_and_fewer_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def search(parallel: Parallel, step: TracedStep, cluster: ClusterShape) -> Plan:
        asked.append(cluster.hosts)
        return plan_of(parallel, step, cluster)

    monkeypatch.setattr(fewer_hosts, "plan_of", search)
    with pytest.raises(PlanError, match=r"^on 2 hosts there is no plan: "):
        plan_on_fewer(Auto(), step(12), dataclasses.replace(HOSTS, memory_bytes=1024), 2)
    assert asked == [2]


@pytest.mark.parametrize(
    ("parallel", "rows", "line"),
    [
        (Data(), 12, r"1 stage of 4x1, 1 microbatch, 1f1b; it fits, .* times the step of all .*"),
        (
            Data(num_micro_batches=3),
            18,
            r"1 stage of 2x1, .* on 1 of 2 hosts; it fits, .* times .*",
        ),
        (Manual(num_stages=3), 24, r", the run waits for it and then ends: on 2 hosts .*: 1, 2, 4"),
    ],
)
def test_what_the_loss_of_a_host_costs_is_said(parallel: Parallel, rows: int, line: str) -> None:
    whole = plan_of(parallel, step(rows), HOSTS)
    on_fewer = functools.partial(plan_on_fewer, parallel, step(rows), HOSTS)
    assert re.fullmatch(f"if a host is lost(: )?{line}", loss_of_a_host(whole, on_fewer))


@pytest.mark.slow
def test_a_plan_that_does_not_fit_gives_way_to_more_microbatches_or_is_told_of() -> None:
    needs = [plan_of(Data(), step(96), HOSTS).stages[0].memory_bytes]
    needs += [plan_on_fewer(Data(), step(96), HOSTS, 2).stages[0].memory_bytes]
    assert needs[0] < needs[1]
    between = dataclasses.replace(HOSTS, memory_bytes=sum(needs) // 2)
    plan = plan_on_fewer(Data(), step(96), between, 2)
    assert plan.num_micro_batches == 2
    assert plan.missing_bytes <= 0
    none = dataclasses.replace(HOSTS, memory_bytes=1024)
    with pytest.raises(PlanError, match="the plan does not fit: stage 0 needs") as raised:
        plan_on_fewer(Data(), step(96), none, 2)
    assert "larger devices" in str(raised.value)
    allowed = dataclasses.replace(Data(), allow_over_memory=True)
    on_fewer = functools.partial(plan_on_fewer, allowed, step(96), none)
    assert on_fewer(2).num_micro_batches == 1
    line = loss_of_a_host(plan_of(allowed, step(96), none), on_fewer)
    assert "; the plan does not fit: stage 0 needs" in line
    assert "it fits" not in line
