"""Time of a step by a plan, divided into the same parts as a recorded step's. Pure."""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

from launcher.hardware import ClusterShape
from launcher.plan.cost import formulas
from launcher.plan.pipeline import timeline, whole_step_seconds
from launcher.schedule import Kind, Task, dependencies

if TYPE_CHECKING:
    from launcher.plan.plan import Plan
    from launcher.plan.stage_plan import StagePlan

# What a device's time in a step goes into, in the order in which it is shown.
PARTS = ("compute", "collectives", "transfers", "bubble", "driver", "data", "saves", "residue")


@dataclass(frozen=True)
class StageParts:
    """Time of a stage's devices during a step, in seconds; the sum is the step.

    Attributes:
        stage: the stage.
        forward_seconds: forward passes, collectives included. Where both passes are one program, it
            is divided as the plan divides them.
        backward_seconds: backward passes, collectives included.
        update_seconds: the update, with the sums of gradients that no pass hides.
        idle_seconds: no program of any stage runs on them.
        others_seconds: other stages on the same devices run.
    """

    stage: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_seconds: float = 0.0
    idle_seconds: float = 0.0
    others_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the stage itself runs."""
        return self.forward_seconds + self.backward_seconds + self.update_seconds

    @property
    def step_seconds(self) -> float:
        """The sum of the row."""
        return self.busy_seconds + self.idle_seconds + self.others_seconds


@dataclass
class StepSeconds:
    """Time of a step, divided: by its plan, or as it was recorded.

    Attributes:
        step_seconds: the step.
        parts: seconds of each of `PARTS`, in the mean over the devices.
        stages: the time of each stage's devices.
        waits: seconds that the devices of a mesh waited for arrays, by (source mesh, mesh).
        dispatch: seconds that the devices of a process waited for programs, as recorded.
    """

    step_seconds: float
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    stages: dict[int, StageParts] = field(default_factory=dict)
    waits: dict[tuple[int, int], float] = field(default_factory=dict)
    dispatch: dict[str, float] = field(default_factory=dict)


def predicted_seconds(plan: Plan) -> StepSeconds:
    """Return the time of a step by a plan; the losses of a step follow one another."""
    step = StepSeconds(plan.predicted_step_seconds)
    for part in plan.parts:
        _add(step, part)
    step.parts["residue"] = step.step_seconds - sum(step.parts.values())
    return step


def _add(step: StepSeconds, plan: Plan) -> None:
    """Add the parts of one loss's pipeline to a step."""
    expected, mesh_of, meshes = timeline(plan), plan.mesh_of, plan.meshes
    ends = {timed.task: timed.end for timed in expected}
    pipeline, total = max(ends.values(), default=0.0), whole_step_seconds(plan, expected)
    updates = [
        sum(stage.update_seconds for stage in plan.stages if stage.devices == devices)
        for devices in meshes
    ]
    once = total - pipeline - max(updates)  # in which links alone are occupied
    for mesh, devices in enumerate(meshes):
        forward: dict[int, float] = defaultdict(float)
        backward: dict[int, float] = defaultdict(float)
        now = idle = transfers = summed = 0.0
        for timed in (one for one in expected if one.mesh == mesh):
            task = timed.task
            gap, now = timed.start - now, timed.end
            idle += gap
            waited, source = _waited(task, timed.start, gap, plan, ends)
            transfers += waited
            if waited:
                link = mesh_of[source], mesh
                step.waits[link] = step.waits.get(link, 0.0) + waited
            passes = forward if task.kind is Kind.FORWARD else backward
            passes[task.stage] += timed.end - timed.start
        idle += pipeline - now + max(updates) - updates[mesh] + once
        for s, of in enumerate(mesh_of):
            if of == mesh:
                stage, both = plan.stages[s], forward[s] + backward[s]
                summed += _summed(stage, plan, both)
                others = total - idle - both - stage.update_seconds
                spent = forward[s], backward[s], stage.update_seconds, idle, others
                _, *before = astuple(step.stages.get(s, StageParts(s)))
                step.stages[s] = StageParts(s, *map(operator.add, before, spent))
        parts = {
            "compute": total - idle - summed,
            "collectives": summed,
            "transfers": transfers + once,
            "bubble": idle - transfers - once,
        }
        for name, seconds in parts.items():
            step.parts[name] += seconds * len(devices) / plan.num_devices


def _waited(
    task: Task, start: float, gap: float, plan: Plan, ends: dict[Task, float]
) -> tuple[float, int]:
    """Return the part of the gap before a task in which an array was in transfer, and its stage."""
    if gap <= 0 or task.kind is Kind.BACKWARD_WEIGHT:
        return 0.0, task.stage
    is_forward = task.kind is Kind.FORWARD
    needs = set(dependencies(task, len(plan.stages)))
    needs |= {
        task.on_stage(one.src_stage)
        for one in plan.transfers
        if one.dst_stage == task.stage
        and one.bytes_per_microbatch
        and (one.src_stage < task.stage) is is_forward
    }
    mesh_of = plan.mesh_of
    abroad = [n for n in needs if n in ends and mesh_of[n.stage] != mesh_of[task.stage]]
    if not abroad:
        return 0.0, task.stage
    last = max(abroad, key=lambda need: ends[need])
    return min(gap, max(0.0, start - ends[last])), last.stage


def _summed(stage: StagePlan, plan: Plan, passes: float) -> float:
    """Return the seconds of a stage's collectives in a step whose passes take `passes` seconds.

    Those hidden under a backward pass do not count.
    """
    cluster = ClusterShape(**plan.cluster)
    data, model = stage.logical_mesh
    links = formulas.ring_links(stage.devices, model, cluster)
    within = update = 0.0
    for one in stage.collectives:
        size, link = (model, links.model) if one.axis == "model" else (data, links.data)
        seconds = float(formulas.ring_seconds(one.kind, one.bytes, size, link, cluster, one.count))
        if one.when == "update":
            update += seconds
        else:
            within += seconds * plan.num_micro_batches
    update = max(0.0, update - stage.hidden_seconds) + stage.exchange_seconds
    nominal = (stage.forward_seconds + stage.backward_seconds) * plan.num_micro_batches
    share = min(within / nominal, 1.0) if nominal else 0.0
    return share * passes + min(update, stage.update_seconds)
