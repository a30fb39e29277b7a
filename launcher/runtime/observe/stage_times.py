"""Time each task of a step alone, by waiting for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from launcher.plan import Plan
from launcher.runtime.emit.instructions import Run
from launcher.runtime.execute.dispatch_table import Entry
from launcher.schedule import Task


@dataclass(frozen=True)
class StageTimes:
    """Times of one step in which every task was waited for.

    Attributes:
        stage_seconds: the busy seconds of each stage, those of several losses one after another
            (`Plan.all_stages`); 0.0 for stages of other processes, of which nothing is known here.
        task_seconds: the seconds of each task; those of other processes are absent.
    """

    stage_seconds: tuple[float, ...]
    task_seconds: dict[Task, float]


def time_stages(entries: Sequence[Entry], slots: list[Any], key: int, plan: Plan) -> StageTimes:
    """Follow the entries of a dispatch table and wait for each; return the times of the stages.

    Args:
        entries: the entries.
        slots: the arrays, which are there.
        key: the key of the step's call.
        plan: the plan.
    """
    seconds: dict[Task, float] = {}
    stages = [stage.devices for stage in plan.all_stages]
    first_stage = [stages.index(devices) for devices in plan.all_meshes]
    busy = [0.0] * len(stages)
    for entry in entries:
        taken = _timed(entry, slots, key)
        if isinstance(entry.instruction, Run):
            task = entry.instruction.task
            stage = task.stage if task else first_stage[entry.instruction.mesh]
            busy[stage] += taken
            if task is not None:
                seconds[task] = seconds.get(task, 0.0) + taken
    return StageTimes(tuple(busy), seconds)


def _timed(entry: Entry, slots: list[Any], key: int) -> float:
    """Run one entry and wait for it; return the seconds that it took."""
    if entry.call is None:
        for i in entry.inputs:
            slots[i] = None
        return 0.0
    arrays = [slots[i] for i in entry.inputs]
    start = time.perf_counter()
    results = entry.call(key, arrays) if entry.keyed else entry.call(*arrays)
    jax.block_until_ready([x for x in results if x.addressable_shards])
    taken = time.perf_counter() - start
    for i, value in zip(entry.outputs, results, strict=True):
        slots[i] = value
    return taken
