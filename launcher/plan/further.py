"""Plans for a step with several losses: the method plans one, and the others follow it.

They run on the same submeshes, on as many microbatches and replicas. A layer goes where its
parameters live by the plans that are there already, and they keep their specs. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from launcher.hardware import ClusterShape
from launcher.partition import Assignment, PlanError, Spec, Submesh, layer_flops, partition, parts
from launcher.plan.build import KeptShardings, PlanBuilder, build_plan
from launcher.plan.plan import Plan
from launcher.plan.profile.measure_layers import MeasuredLayers
from launcher.plan.stage_plan import StagePlan
from launcher.schedule import DEFAULT_SCHEDULE, FORWARD_SCHEDULE
from launcher.trace import (
    ANY_LAYER,
    TracedStep,
    Var,
    free_vars,
    is_var,
    leaf_names,
    nbytes,
    needed,
    program_flops,
    source_line,
)

Devices = tuple[int, ...]  # of a submesh


def following_assignment(part: TracedStep, lead: Assignment, places: Places) -> Assignment:
    """Return the assignment of a part that follows the leading one's.

    Raises:
        PlanError: it has too few layers to cut the batch as the leading one does.
    """
    loss, meshes = part.loss(1), lead.submeshes
    away = _bytes_away(part, places, [mesh.devices for mesh in meshes])
    at = home_of_each(layer_flops(loss), away)
    layers, mesh_of, schedule = lead.layers, lead.mesh_of, lead.schedule
    stage_of = {layer: s for s, group in enumerate(layers) for layer in group}
    own = [mesh_of[stage_of[i]] for i in range(loss.num_layers)] if len(stage_of) == len(at) else []
    if own and moved(own, away) <= moved(at, away):
        stages, used = list(range(len(layers))), list(range(len(meshes)))
    else:
        used = sorted(set(at))
        layers = tuple(tuple(i for i, m in enumerate(at) if m == mesh) for mesh in used)
        stages = [mesh_of.index(mesh) for mesh in used]
        mesh_of = tuple(range(len(used)))
        schedule = schedule if len(lead.layers) == len(meshes) else DEFAULT_SCHEDULE
    remat = tuple(lead.remat[s] if loss.wrt else "none" for s in stages)
    found = Assignment(
        method=lead.method,
        layers=layers,
        submeshes=tuple(meshes[mesh] for mesh in used),
        mesh_of=mesh_of,
        num_micro_batches=lead.num_micro_batches,
        schedule=schedule if loss.wrt else FORWARD_SCHEDULE,
        remat=remat,
        zero=tuple(lead.zero_of(s) for s in stages),
        reduction=lead.reduction,
    )
    if found.num_replicas != lead.num_replicas:
        raise PlanError(
            f"the loss at {source_line(part.loss_equation)} has too few layers for all of "
            f"{_shapes(meshes)} devices, and alone on {_shapes(found.submeshes)} it would cut the "
            "batch otherwise than the other losses of the step; give all submeshes the same "
            "logical mesh, or mark more layers in that loss"
        )
    return found


def _shapes(meshes: Sequence[Submesh]) -> str:
    return " and ".join("{}x{}".format(*mesh.logical_mesh) for mesh in meshes)


def _bytes_away(part: TracedStep, places: Places, meshes: Sequence[Devices]) -> list[list[int]]:
    """Return for each layer, by submesh, the bytes of what it reads that live on another."""
    loss = part.loss(1)
    holders = dict(zip(loss.invars, part.operands, strict=True))
    reads: list[dict[Var, None]] = [{} for _ in range(loss.num_layers)]
    for eqn, layer in zip(loss.equations, loss.layers, strict=True):
        if layer != ANY_LAYER:
            of_layer = (holders[v] for v in eqn.invars if is_var(v) and v in holders)
            reads[layer].update((root, None) for v in of_layer for root in _roots(part, v))
    found = []
    for roots in reads:
        known = [(nbytes(v.aval), home) for v in roots if (home := places.home(v)) is not None]
        found.append([sum(size for size, home in known if home != mesh) for mesh in meshes])
    return found


def _roots(part: TracedStep, var: Var) -> list[Var]:
    """Return what an operand of the loss is computed from."""
    return free_vars(needed(part.before, [var]), [var])


def home_of_each(costs: Sequence[float], away: Sequence[Sequence[int]]) -> list[int]:
    """Return the submesh of each layer: layers in order, on submeshes in order.

    The fewest bytes are read from other submeshes; of those choices the costliest submesh is as
    cheap as can be, and the work as even. A submesh may be left out.

    Args:
        costs: the work of each layer.
        away: for each layer, by submesh, the bytes that it reads from others.
    """
    count = len(away[0])
    work = [0.0, *itertools.accumulate(costs)]
    read = [[0, *itertools.accumulate(of[mesh] for of in away)] for mesh in range(count)]

    @functools.cache
    def best(first: int, mesh: int) -> tuple[float, float, float, tuple[int, ...]]:
        """Return the best choice for the layers from `first` on submeshes from `mesh` on."""
        options = []
        for end in range(len(costs) if mesh == count - 1 else first, len(costs) + 1):
            cost = work[end] - work[first]
            here = read[mesh][end] - read[mesh][first]
            rest = (0.0, 0.0, 0.0, ()) if mesh == count - 1 else best(end, mesh + 1)
            squares = cost * cost + rest[2]
            at = (*(mesh,) * (end - first), *rest[3])
            options.append((here + rest[0], max(cost, rest[1]), squares, at))
        return min(options)

    return list(best(0, 0)[3])


def moved(at: Sequence[int], away: Sequence[Sequence[int]]) -> float:
    """Return the bytes that layers on these submeshes read from others."""
    return sum(of[mesh] for mesh, of in zip(at, away, strict=True))


def successors(step: TracedStep) -> dict[Var, Var]:
    """Return for results of the step that take an argument's place that argument."""
    whole, arguments = step.whole, set(step.whole.invars)
    found: dict[Var, Var] = {}
    for result, argument in whole.aliases.items():
        v = whole.outvars[result]
        if is_var(v) and v not in arguments:
            found.setdefault(v, whole.invars[argument])
    return found


@dataclass(eq=False)
class Places:
    """Where the arguments of a step and what its parts hand on live, by the plans made so far.

    A result that takes an argument's place lives where that does.

    Attributes:
        step: the step.
        homes: the submesh of each value.
        specs: the specs that were chosen for it there.
    """

    step: TracedStep
    homes: dict[Var, Devices] = field(default_factory=dict)
    specs: dict[tuple[Var, Devices], Spec] = field(default_factory=dict)
    _same: dict[Var, Var] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._same = successors(self.step)

    def home(self, var: Var) -> Devices | None:
        """Return the submesh where a value lives, if that is known."""
        return self.homes.get(self._same.get(var, var))

    def add(self, part: TracedStep, plan: Plan) -> None:
        """Add what a part's plan says."""
        for v, devices in _lying(part, plan):
            self.homes.setdefault(self._same.get(v, v), devices)
        var_of = dict(zip(leaf_names(part), part.invars, strict=True))
        for stage in plan.stages:
            for name, spec in stage.shardings.items():
                var = var_of[name]
                self.specs.setdefault((self._same.get(var, var), stage.devices), spec)

    def with_note(self, part: TracedStep, plan: Plan) -> Plan:
        """Return a part's plan with a note on what has to be moved for it, if arrays have."""
        lying = dict(_lying(part, plan))
        arrays = [v for v in lying if v.aval.size > 1]
        away = sum(nbytes(v.aval) for v in arrays if self.home(v) != lying[v])
        if not away:
            return plan
        note = (
            f"{away} bytes move between stages each step, which the loss at "
            f"{source_line(part.loss_equation)} needs elsewhere than other losses do"
        )
        return dataclasses.replace(plan, notes=(note, *plan.notes))

    def with_the_rest(self, part: TracedStep, plan: Plan) -> Plan:
        """Return a part's plan with the memory of arguments that only other parts read."""
        own = {self._same.get(v, v) for v in part.invars}
        rest = [(v, self.homes[v]) for v in self.step.whole.invars if v in self.homes]

        def bytes_beside(stage: StagePlan) -> int:
            sizes = dict(zip(("data", "model"), stage.logical_mesh, strict=True))
            return sum(
                nbytes(v.aval) // parts(self.specs.get((v, home), ()), sizes)
                for v, home in rest
                if v not in own and home == stage.devices
            )

        stages = [
            dataclasses.replace(stage, memory_bytes=stage.memory_bytes + bytes_beside(stage))
            for stage in plan.stages
        ]
        return dataclasses.replace(plan, stages=tuple(stages))

    def kept(self, part: TracedStep) -> KeptShardings:
        """Return the specs of a part's arguments that are known, where they live."""
        found: dict[Devices, dict[str, Spec]] = {}
        for name, var, is_batch in zip(leaf_names(part), part.invars, part.batch, strict=True):
            home = self.home(var)
            spec = self.specs.get((self._same.get(var, var), home)) if home else None
            if home and spec is not None and not is_batch:
                found.setdefault(home, {})[name] = spec
        return found


def _lying(part: TracedStep, plan: Plan) -> list[tuple[Var, Devices]]:
    """Return the submeshes of what a part reads and of its results, by its plan."""
    update = partition(part.cut_at(plan.layer_ends), plan.assignment).update
    read = set(free_vars([*part.before, part.loss_equation, *part.after]))
    found = [(v, m) for v, m in update.homes.items() if v in read]
    found += [(v, m) for v, m in zip(update.outvars, update.out_homes, strict=True) if is_var(v)]
    return [(v, plan.meshes[m]) for v, m in found]


def lead_of(step: TracedStep) -> TracedStep:
    """Return the part of a step that the method plans: of those that train the most work."""
    return max(step.parts, key=_work) if step.other_losses else step


def _work(part: TracedStep) -> tuple[bool, float]:
    loss = part.loss(1)
    return bool(loss.wrt), program_flops(loss.equations)


def build_parts(step: TracedStep, assignment: Assignment, cluster: ClusterShape) -> Plan:
    """Return the plan of a step by the assignment of its leading part (`lead_of`).

    Raises:
        PlanError: as `PlanBuilder.build`, for any of the losses.
        BatchError: as `PlanBuilder.build`, for any of the losses.
    """
    plan = build_plan(lead_of(step), assignment, cluster)
    return with_further(step, plan, assignment)


def with_further(
    step: TracedStep,
    plan: Plan,
    assignment: Assignment,
    measured: MeasuredLayers | None = None,
) -> Plan:
    """Return the plan of a step, given that of its leading part.

    Args:
        step: the step.
        plan: the plan of its leading part.
        assignment: the assignment that it was built from.
        measured: the measured seconds of that part's layers, if it was built with them.

    Raises:
        PlanError: another loss cannot follow.
        BatchError: the batch does not divide, or slices cannot compute what another loss means.
    """
    if not step.other_losses:
        return plan
    lead, places, cluster = lead_of(step), Places(step), ClusterShape(**plan.cluster)
    places.add(lead, plan)
    built = []
    for part in step.parts:
        if part is lead:
            built.append((plan, PlanBuilder(part, cluster, measured), assignment))
            continue
        of_part = following_assignment(part, assignment, places)
        builder = PlanBuilder(part, cluster)
        built.append((builder.build(of_part, places.kept(part)), builder, of_part))
        places.add(part, built[-1][0])
    plans = []
    for part, (first, builder, of_part) in zip(step.parts, built, strict=True):
        kept = places.kept(part)
        if all(kept.get(s.devices, {}).items() <= s.shardings.items() for s in first.stages):
            again = first
        else:  # another loss trains what this one reads
            again = builder.build(of_part, kept)
            again = dataclasses.replace(again, runners_up=first.runners_up)
        plans.append(places.with_the_rest(part, places.with_note(part, again)))
    return plan_of_parts(step, plans)


def checked_fit(plan: Plan) -> Plan:
    """Return a plan that was searched for.

    Raises:
        PlanError: it does not fit the devices' memory with what its other losses hold.
    """
    if plan.further and plan.missing_bytes > 0:
        missing = f"{plan.missing_bytes / 2**30:.2f} GiB"
        raise PlanError(
            f"the {len(plan.parts)} losses of the step need {missing} a device more than it has: "
            "the search is for the plan of one loss, beside which the others keep parameters of "
            "their own. Give the stages by hand, or use more devices"
        )
    return plan


def plan_of_parts(step: TracedStep, plans: Sequence[Plan]) -> Plan:
    """Return the plans of a step's losses as one, that of the first, with predictions for all."""
    first, *further = plans
    seconds = sum(plan.predicted_step_seconds for plan in plans)

    def mean(values: Iterable[float]) -> float:
        """Return the mean over the step's time."""
        pairs = zip(values, plans, strict=True)
        return sum(value * plan.predicted_step_seconds for value, plan in pairs) / seconds

    lines = ", ".join(source_line(part.loss_equation) for part in step.parts)
    note = f"{len(plans)} losses a step, one after the other: {lines}"
    return dataclasses.replace(
        first,
        num_parameters=max(_num_parameters(step), *(plan.num_parameters for plan in plans)),
        flops_per_step=sum(plan.flops_per_step for plan in plans),
        predicted_step_seconds=seconds,
        predicted_samples_per_second=step.batch_size / seconds,
        predicted_tflops_per_device=mean(p.predicted_tflops_per_device for p in plans),
        predicted_tflops_per_device_with_remat=mean(
            p.predicted_tflops_per_device_with_remat for p in plans
        ),
        predicted_bubble_fraction=mean(p.predicted_bubble_fraction for p in plans),
        notes=(note, *dict.fromkeys(of_part for plan in plans for of_part in plan.notes)),
        further=tuple(further),
        least_step_seconds=None,  # it was of the leading one
    )


def _num_parameters(step: TracedStep) -> int:
    """Return how many numbers the losses differentiate, of those that the step takes."""
    same, arguments = successors(step), set(step.whole.invars)
    trained = (
        part.loss_equation.invars[i]
        for part in step.parts
        for i in part.loss_equation.params["wrt"]
    )
    return sum(v.aval.size for v in {same.get(v, v) for v in trained if is_var(v)} & arguments)
