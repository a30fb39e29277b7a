"""The spec of every value of a step on every submesh of a plan.

A plan says how the step's arguments are cut (`StagePlan.shardings`); by the named dimensions of the
step this module says it of everything else: gradients, activations, residuals, what the update
computes. `runtime` lays its arrays out by it and `plan` measures memory by it.

A submesh has three axes. `data` holds the replicas that all stages have in common; `rows` cuts the
slices of a stage with more of its data axis than that; `model` cuts whatever the plan says. In a
plan, `data` means the first two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from launcher.partition.assignment import Assignment
from launcher.partition.named_dims import Axis, NamedDims, Sharding, Spec, axes, without
from launcher.trace import Equation, Loss, TracedStep, Var, is_var, leaf_names

DATA, ROWS, MODEL = AXES = "data", "rows", "model"


class Between(Enum):
    """Media between the replicas of a submesh, through which their gradients are summed."""

    LINKS = "links"  # of GPUs, or within a process: programs sum
    SOCKETS = "sockets"  # of CPU processes: programs sum; each array costs its round trips
    MEMORY = "memory"  # that CPU processes of one machine share: sums are between programs


def outer_dims(step: TracedStep) -> NamedDims:
    """Return the named dimensions outside of the loss, where a gradient runs with what it is of."""
    dims = NamedDims([*step.before, *step.after])
    for var, gradient in gradients(step).items():
        dims.link(var, gradient)
    return dims


def gradients(step: TracedStep) -> dict[Var, Var]:
    """Return what is differentiated, and its gradient."""
    eqn = step.loss_equation
    wrt = [eqn.invars[i] for i in eqn.params["wrt"]]
    return dict(zip(wrt, eqn.outvars[len(eqn.params["reduce"]) :], strict=True))


def batch_axes(step: TracedStep, loss: Loss) -> tuple[int | None, ...]:
    """Return the batch axis of each operand of the loss, or None.

    Of the only slice of a batch this is known for its leaves alone.
    """
    if loss.num_slices > 1:
        return loss.slice_axes
    batch = step.batch_vars
    return tuple(0 if v in batch and v.aval.shape else None for v in step.operands)


def mesh_sizes(logical_mesh: tuple[int, int], replicas: int) -> dict[str, int]:
    """Return the devices along each axis of a submesh."""
    return {DATA: replicas, ROWS: logical_mesh[0] // replicas, MODEL: logical_mesh[1]}


class Layout:
    """The specs on one submesh.

    Args:
        explicit: of the step's arguments, and of the results that take their places.

    Attributes:
        between: the medium between its replicas, known once they are placed on devices.
    """

    between = Between.LINKS

    def __init__(
        self,
        step: TracedStep,
        loss: Loss,
        sizes: Mapping[str, int],
        explicit: Mapping[Var, Spec],
        outer_dims: NamedDims,
        loss_dims: NamedDims,
    ) -> None:
        self.sizes, self.explicit, self.loss_dims = sizes, explicit, loss_dims
        self._holders, self._loss, self._wrt = step.operands, loss, frozenset(loss.wrt)
        self._gradients, self._batch_axes = gradients(step), batch_axes(step, loss)
        self._outer, self._inner = Sharding(outer_dims, sizes), Sharding(loss_dims, sizes)
        for var, spec in explicit.items():
            self._outer.seed(var, spec)
        for i, (var, axis) in enumerate(zip(loss.invars, self._batch_axes, strict=True)):
            spec = self._whole_of_data(i)
            cut = ((ROWS, *axes(a)) if d == axis else a for d, a in enumerate(spec))
            self._inner.seed(var, tuple(cut))

    def outer(self, var: Var) -> Spec:
        """A value outside of the loss."""
        return self.explicit[var] if var in self.explicit else self._outer.spec(var)

    def activation(self, var: Var) -> Spec:
        """A value of the loss, as one slice has it."""
        return self._inner.spec(var)

    def operand(self, i: int) -> Spec:
        """Return the spec of an operand of the loss as a stage's program for one slice reads it.

        Parameters that are cut along data are gathered first.
        """
        if self._batch_axes[i] is not None:
            return self._inner.spec(self._loss.invars[i])
        return self._whole_of_data(i)

    def is_gathered(self, i: int) -> bool:
        """Return whether an operand is cut along data where it is kept."""
        return self._loss.slice_axes[i] is None and _cuts(self.outer(self._holders[i]), DATA)

    def is_scattered(self, i: int) -> bool:
        """Return whether an operand has a gradient, which ends up cut along the replicas."""
        return i in self._wrt and self.sizes[DATA] > 1 and _cuts(self.gradient(i), DATA)

    def gradient(self, i: int) -> Spec:
        """An operand's gradient, once it is whole."""
        return self.outer(self._gradients[self._holders[i]])

    def inside(self, equations: Iterable[Equation], seeds: Mapping[Var, Spec]) -> Sharding:
        """Return the specs of another program, by those of its inputs."""
        found = Sharding(NamedDims(equations), self.sizes)
        for var, spec in seeds.items():
            found.seed(var, spec)
        return found

    def _whole_of_data(self, i: int) -> Spec:
        """Return the spec of what holds an operand, gathered along data."""
        return without(self.outer(self._holders[i]), DATA, ROWS)


def layouts(
    step: TracedStep, loss: Loss, assignment: Assignment, outer: NamedDims
) -> tuple[Layout, ...]:
    """Return the layout of every submesh. `outer`: see `outer_dims`."""
    names = dict(zip(leaf_names(step), step.invars, strict=True))
    inner = NamedDims(loss.equations)
    found = []
    for mesh in range(len(assignment.submeshes)):
        cut: dict[Var, Spec] = {}
        on_mesh = (s for s, at in enumerate(assignment.mesh_of) if at == mesh)
        for stage in on_mesh:
            for name, spec in (assignment.shardings_of(stage) or {}).items():
                cut[names[name]] = tuple(_mesh_axes(axis) for axis in spec)
        for result, argument in step.aliases.items():
            atom = step.outvars[result]
            if step.invars[argument] in cut and is_var(atom):
                cut[atom] = cut[step.invars[argument]]
        own = assignment.own_submesh(mesh).logical_mesh
        sizes = mesh_sizes(own, assignment.slicing.own_replicas)
        single = [axis for axis, size in sizes.items() if size == 1]
        cut = {v: without(spec, *single) for v, spec in cut.items()}
        found.append(Layout(step, loss, sizes, cut, outer, inner))
    return tuple(found)


def _mesh_axes(axis: Any) -> Axis:
    named = [a for word in axes(axis) for a in ((DATA, ROWS) if word == DATA else (word,))]
    return tuple(named) or None


def _cuts(spec: Spec, axis: str) -> bool:
    return any(axis in axes(a) for a in spec)
