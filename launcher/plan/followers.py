"""Plans on the stages of a train step's plan: for evaluation, and for functions without a loss.

A function that uses gradients and takes none has its arguments where that step has them: a state
where the step keeps it, gradients where the step leaves them. Each of its equations then runs where
its operands live, as those of the step's own update do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax

from launcher.hardware import ClusterShape
from launcher.partition import (
    DATA,
    MODEL,
    ROWS,
    Axis,
    PartitionedStep,
    PlanError,
    Spec,
    axes,
    gradients,
    partition,
)
from launcher.plan.build import build_plan
from launcher.plan.further import plan_of_parts
from launcher.plan.plan import Plan
from launcher.plan.stage_plan import StagePlan
from launcher.schedule import FORWARD_SCHEDULE
from launcher.trace import Atom, Interface, TracedStep, Var, free_vars, is_var, leaf_names

Devices = tuple[int, ...]  # of a submesh


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


@dataclass(frozen=True)
class _Known:
    """A value of the step that is followed.

    Attributes:
        path: its path in the argument or result that it is part of; of a gradient, that of what it
            is the gradient of.
        rank: 0 for gradients among the results, 1 for other gradients, 2 for arguments.
        shape: its shape.
        devices: the submesh where it lives.
        spec: how it is cut there, in the words of a plan.
    """

    path: str
    rank: int
    shape: tuple[int, ...]
    devices: Devices
    spec: Spec


def make_update_plan(step: TracedStep, followed: TracedStep, like: Plan) -> Plan:
    """Return the plan of a function without a loss that follows another function.

    An argument leaf with the name of an argument leaf of the other function is that one. Any other
    is known by its path, as a gradient if one is of this shape, or else as an argument. What
    remains goes where it is needed.

    Args:
        step: the function without a loss.
        followed: the function that it follows.
        like: the plan of that one.
    """
    arguments, others = _arguments(followed, like), list(_others(followed, like))
    shardings: dict[Devices, dict[str, Spec]] = {devices: {} for devices in like.all_meshes}
    for name, aval in zip(leaf_names(step), step.in_avals, strict=True):
        known = arguments.get(name)
        if known is None or known.shape != aval.shape:
            known = _alike(_path(name), aval.shape, [*others, *arguments.values()])
        if known is not None:
            shardings[known.devices][name] = known.spec
    stages = tuple(_stage(like, devices, found) for devices, found in shardings.items())
    seconds = max(stage.update_seconds for stage in stages)
    return Plan(
        method=like.method,
        schedule=FORWARD_SCHEDULE,
        num_micro_batches=1,
        batch_size=step.batch_size,
        num_parameters=like.num_parameters,
        stages=stages,
        transfers=(),
        cluster=vars(ClusterShape(**like.cluster)).copy(),
        flops_per_step=0.0,
        predicted_step_seconds=seconds,
        predicted_samples_per_second=0.0,
        predicted_tflops_per_device=0.0,
        predicted_tflops_per_device_with_remat=0.0,
        predicted_bubble_fraction=0.0,
        fingerprint=step.fingerprint,
        notes=("it follows another function, and runs where that one's update does",),
        reduction=like.reduction,
    )


def _stage(like: Plan, devices: Devices, shardings: dict[str, Spec]) -> StagePlan:
    """Return a stage without layers on a submesh of the plan that is followed."""
    there = [stage for stage in like.all_stages if stage.devices == devices]
    return StagePlan(
        layers=(),
        hosts=there[0].hosts,
        devices=devices,
        logical_mesh=there[0].logical_mesh,
        remat="none",
        forward_seconds=0.0,
        backward_seconds=0.0,
        backward_weight_seconds=0.0,
        update_seconds=sum(stage.update_seconds - stage.exchange_seconds for stage in there),
        memory_bytes=max(stage.memory_bytes for stage in there),
        num_parameters=sum(stage.num_parameters for stage in there),
        shardings=shardings,
    )


def _cuts(followed: TracedStep, like: Plan) -> Iterator[tuple[TracedStep, Plan, PartitionedStep]]:
    for part, plan in zip(followed.parts, like.parts, strict=True):
        yield part, plan, partition(part.cut_at(plan.layer_ends), plan.assignment)


def _arguments(followed: TracedStep, like: Plan) -> dict[str, _Known]:
    """Return the arguments that a function reads, by name: of others no place is known."""
    name_of = _names(followed.whole)
    found: dict[str, _Known] = {}
    for part, plan, cut in _cuts(followed, like):
        reads = set(free_vars([*part.before, part.loss_equation, *part.after]))
        for v, mesh in cut.update.homes.items():
            if v in reads and v in name_of:
                name = name_of[v]
                found.setdefault(name, _known(_path(name), 2, v, cut, plan, mesh))
    return found


def _others(followed: TracedStep, like: Plan) -> Iterator[_Known]:
    """Return the results of a function and its gradients, whether it returns them or not."""
    whole, name_of = followed.whole, _names(followed.whole)
    numbered = jax.tree.unflatten(whole.out_tree, range(len(whole.outvars)))
    paths = jax.tree_util.tree_flatten_with_path(numbered)[0]
    path_of = {
        whole.outvars[i]: _path(jax.tree_util.keystr(path, simple=True, separator="."))
        for path, i in paths
        if is_var(whole.outvars[i]) and i not in whole.aliases
    }
    for part, plan, cut in _cuts(followed, like):
        ends = zip(cut.update.outvars, cut.update.out_homes, strict=True)
        homes = {v: mesh for v, mesh in ends if is_var(v)}
        for v, gradient in gradients(part).items():
            mesh = homes.get(gradient, cut.update.homes.get(v))
            if mesh is None:
                continue
            if gradient in path_of:
                yield _known(path_of[gradient], 0, gradient, cut, plan, mesh)
            if v in name_of:
                yield _known(_path(name_of[v]), 1, gradient, cut, plan, mesh)


def _known(path: str, rank: int, var: Var, cut: PartitionedStep, plan: Plan, mesh: int) -> _Known:
    spec = tuple(map(_word, cut.layouts[mesh].outer(var)))
    return _Known(path, rank, var.aval.shape, plan.meshes[mesh], spec)


def _names(whole: Interface) -> dict[Atom, str]:
    pairs = zip(whole.invars, whole.batch, leaf_names(whole), strict=True)
    return {v: name for v, is_batch, name in pairs if not is_batch}


def _alike(path: str, shape: tuple[int, ...], known: Iterable[_Known]) -> _Known | None:
    """Return the known leaf that one with this path and shape corresponds to.

    Of several matches the one with the fewest steps before the path is taken, as a parameter is
    nested less deeply than what the optimizer keeps for it.
    """
    same = [k for k in known if k.shape == shape and f".{k.path}".endswith(f".{path}")]
    return min(same, key=lambda k: (k.rank, len(k.path)), default=None)


def _path(name: str) -> str:
    """Return a name without the number of its argument or result."""
    return name.partition(".")[2]


def _word(axis: Axis) -> Axis:
    """Return the mesh axes of a dimension as a plan has them, where rows are part of data."""
    named = axes(axis)
    words = [word for word, of in (("data", {DATA, ROWS}), ("model", {MODEL})) if of & {*named}]
    return words[0] if len(words) == 1 else tuple(words) or None
