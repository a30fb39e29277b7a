"""Plans for evaluation, on the stages of a train step's plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from launcher.hardware import ClusterShape
from launcher.partition import PlanError, Spec
from launcher.plan.build import build_plan
from launcher.plan.followers.further import plan_of_parts
from launcher.plan.plan import Plan
from launcher.plan.stage_plan import StagePlan
from launcher.schedule import FORWARD_SCHEDULE
from launcher.trace import TracedStep, leaf_names


def make_forward_plan(step: TracedStep, like: Plan) -> Plan:
    """Return the plan of an evaluation step on the stages of a train step's plan.

    So it finds its parameters where the train step keeps them. Of several losses of the train step
    it is run like the one that has as many layers, and the same arguments.

    Args:
        step: the evaluation step.
        like: the plan of the train step.

    Raises:
        PlanError: the two steps do not have the same layers.
    """
    step = step.planned_as(like.fingerprint)
    if step.other_losses:
        return plan_of_parts(step, [_make_forward_plan(part, like) for part in step.parts])
    return _make_forward_plan(step, like)


def _make_forward_plan(step: TracedStep, train: Plan) -> Plan:
    names = leaf_names(step)

    def shardings(stage: StagePlan) -> dict[str, Spec]:
        """Return the specs on a stage's submesh, by any of the train step's losses."""
        known = {}
        for other in train.further:
            for on_mesh in other.stages:
                known.update(on_mesh.shardings if on_mesh.devices == stage.devices else {})
        return _renamed({**known, **stage.shardings}, names)

    counts = [step.cut_at(plan.layer_ends).loss(1).num_layers for plan in train.parts]
    layers = [sum(len(stage.layers) for stage in plan.stages) for plan in train.parts]
    alike = [plan for plan, a, b in zip(train.parts, counts, layers, strict=True) if a == b]
    if not alike:
        raise PlanError(
            f"the evaluation step has {counts[0]} layers and the train step {layers[0]}; both must "
            "run the same model"
        )
    like = max(alike, key=lambda plan: sum(len(_renamed(s.shardings, names)) for s in plan.stages))
    assignment = dataclasses.replace(
        like.assignment,
        schedule=FORWARD_SCHEDULE,
        remat=("none",) * len(like.stages),
        shardings=tuple(map(shardings, like.stages)),
    )
    return build_plan(step.cut_at(like.layer_ends), assignment, ClusterShape(**like.cluster))


def _renamed(shardings: Mapping[str, Spec], names: Sequence[str]) -> dict[str, Spec]:
    """Return the specs of another step's arguments under the names of this step's.

    A leaf is identified by its path. Of several matches the one with the fewest steps before the
    path is taken, since a parameter is nested less deeply than what the optimizer keeps for it.
    """
    found = {}
    for name in names:
        path = name.partition(".")[2]
        same = [other for other in shardings if path and f".{other}".endswith(f".{path}")]
        if same:
            found[name] = shardings[min(same, key=len)]
    return found
