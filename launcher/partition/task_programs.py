"""Cut a stage's joint program into the passes that its schedule runs one by one.

Each equation belongs to the first pass that needs it. A value that a later pass reads travels there
as a *residual*; an input is read again instead, and what follows from the parameters alone, or
cheaply from what the forward pass leaves (`min_cut`), is recomputed. So a backward pass
in two parts does no costly work twice: the part that makes the gradients of activations runs first
and leaves to the other what both need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from launcher.partition.joint_graph import JointGraph, Name
from launcher.partition.min_cut import is_cheap, is_fused, kept_values
from launcher.partition.sharding.named_dims import Sharding
from launcher.schedule import Kind
from launcher.trace import (
    BARRIERS,
    Atom,
    Equation,
    Jaxpr,
    Var,
    dependents,
    free_vars,
    is_var,
    jaxpr_as_fun,
    matmul_flops,
    nbytes,
    needed,
)


@dataclass(frozen=True, eq=False)
class TaskProgram:
    """A part of a joint program: `fun(*inputs) -> outputs`, in the order of their names.

    `closed`: the same, with the `constants` that it captures as leading inputs.
    """

    closed: Jaxpr
    constants: tuple[Any, ...]
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]

    @property
    def fun(self) -> Callable[..., Sequence[Any]]:
        """See the class."""
        return functools.partial(jaxpr_as_fun(self.closed), *self.constants)


def outputs_by_kind(
    joint: JointGraph, results: Sequence[int], kinds: Set[Kind], together: bool
) -> dict[Kind, list[Name]]:
    """Return what each kind of task makes, in the order in which a microbatch runs them.

    A backward kind with nothing to make is absent.

    Args:
        joint: the stage's joint graph.
        results: the results of the loss that are wanted.
        kinds: those that the schedule has.
        together: whether the first backward kind does the forward pass as well.
    """
    activations, back, grads = (joint.named(k) for k in ("activation", "cotangent", "grad"))
    wanted = {Kind.FORWARD: [*activations, *(n for n in joint.named("result") if n.of in results)]}
    if Kind.BACKWARD in kinds:
        wanted[Kind.BACKWARD] = [*back, *grads]
    elif Kind.BACKWARD_WEIGHT in kinds:
        later = _put_off(joint, back, grads)
        wanted[Kind.BACKWARD_INPUT] = [*back, *(name for name in grads if name not in later)]
        wanted[Kind.BACKWARD_WEIGHT] = later
    found = {kind: names for kind, names in wanted.items() if names or kind is Kind.FORWARD}
    if together and len(found) > 1:
        forward = found.pop(Kind.FORWARD)
        first = next(iter(found))
        found[first] = [*forward, *found[first]]
    return found


def _put_off(joint: JointGraph, back: Sequence[Name], grads: Sequence[Name]) -> list[Name]:
    """Return the gradients of weights that can wait: those with a matrix product of their own.

    The operands of any other gradient would take more memory than it takes time.
    """
    if not back:
        return list(grads)
    late = dependents(joint.equations, joint.gradients_in)
    first = {id(e) for e in needed(joint.equations, [joint.outputs[name] for name in back])}
    # Whatever one of these needs and is none of them needs none of them either.
    rest = [e for e in joint.equations if id(e) not in first and any(v in late for v in e.outvars)]
    return [name for name in grads if matmul_flops(needed(rest, [joint.outputs[name]]))]


# A stage whose backward pass follows at once does both in one program, which costs one start less,
# unless what the program would keep inside is large: of its memory XLA:CPU asks for one block a
# run, and glibc fetches a block of 32 MiB or more from the system each time, page by page (a third
# of such a program's time). Between programs the same values are many smaller blocks.
MOST_INSIDE = 8 << 20  # bytes of residuals


def runs_as_one(forward: TaskProgram, inside: Sharding) -> bool:
    """Return whether a backward pass becomes one program with the forward pass before it.

    It does where the forward pass leaves little on each device.

    Args:
        forward: the forward pass.
        inside: the specs of the joint graph's values.
    """
    left = [name.of for name in forward.outputs if name.kind == "residual"]
    return sum(nbytes(v.aval) // inside.parts(v) for v in left) <= MOST_INSIDE


def cut(joint: JointGraph, groups: Mapping[Kind, Sequence[Name]]) -> dict[Kind, TaskProgram]:
    """Return the passes that make these groups of outputs, in the order in which they run."""
    wanted = [[joint.outputs[name] for name in names] for names in groups.values()]
    equations = needed(joint.equations, [atom for outs in wanted for atom in outs])
    late = dependents(equations, joint.gradients_in)
    varying = late | dependents(equations, joint.slices)
    changing = [e for e in equations if not varying.isdisjoint(e.outvars)]
    early = [e for e in changing if late.isdisjoint(e.outvars)]
    behind = {
        v: atom
        for e in equations
        if e.primitive.name in BARRIERS
        for v, atom in zip(e.outvars, e.invars, strict=True)
    }
    kept = _kept(joint, equations, early, wanted, behind)
    ready = {v for e in early for v in e.outvars}  # for the first pass to compute
    again = {id(e) for e in early if is_cheap(e) and e.outvars[0] not in kept}
    aside = [e for e in equations if id(e) in again or varying.isdisjoint(e.outvars)]
    made: dict[Var, int] = {}  # the pass that makes a value
    bodies = []
    for k, outs in enumerate(wanted):
        elsewhere = ready if k else set[Var]()
        own = [
            e
            for e in needed(equations, outs if k else [*outs, *kept])
            if any(v in varying and v not in made and v not in elsewhere for v in e.outvars)
        ]
        made.update((v, k) for e in own for v in e.outvars)

        def read(atom: Atom, k: int = k, elsewhere: Set[Var] = elsewhere) -> Atom:
            """A barrier matters to its own pass; to others its operand is as good."""
            while is_var(atom) and atom in behind and (made.get(atom, k) < k or atom in elsewhere):
                atom = behind[atom]
            return atom

        own = [e.replace(invars=[read(v) for v in e.invars]) for e in own]
        outs = [read(v) for v in outs]
        helps = [
            e.replace(invars=[read(v) for v in e.invars]) for e in aside if k or id(e) not in again
        ]
        bodies.append(([*needed(helps, free_vars(own, outs)), *own], outs))
    passes = _passes(joint, list(groups.values()), bodies, made)
    return dict(zip(groups, passes, strict=True))


def _kept(
    joint: JointGraph,
    equations: Sequence[Equation],
    early: Sequence[Equation],
    wanted: Sequence[Sequence[Atom]],
    behind: Mapping[Var, Atom],
) -> set[Var]:
    """Return what the first pass leaves of what does not depend on a gradient, `early`."""
    ready = {v for e in early for v in e.outvars}
    first = {id(e) for e in (*early, *needed(equations, wanted[0]))}

    def read(atom: Atom) -> Atom:
        while is_var(atom) and atom in ready and atom in behind:
            atom = behind[atom]
        return atom

    outs = [atom for outs in wanted[1:] for atom in outs]
    rest = [e for e in equations if id(e) not in first]
    later = free_vars(rest, outs)
    placed = free_vars([e for e in rest if not is_fused(e)])
    given = {v for name, v in joint.inputs.items() if name.kind == "activation"}
    return kept_values(early, given, map(read, later), map(read, placed), read) - given


def _passes(
    joint: JointGraph,
    groups: Sequence[Sequence[Name]],
    bodies: Sequence[tuple[list[Equation], list[Atom]]],
    made: Mapping[Var, int],
) -> list[TaskProgram]:
    """Programs of these bodies, each leaving what later ones read."""
    known = {
        v: name
        for name, v in joint.outputs.items()
        if name.kind in ("activation", "cotangent") and is_var(v)
    }
    known |= {v: name for name, v in joint.inputs.items()}
    reads = [free_vars(*body) for body in bodies]
    passes = []
    for k, (names, (equations, outs)) in enumerate(zip(groups, bodies, strict=True)):
        later = {v for variables in reads[k + 1 :] for v in variables}
        left = [v for v, maker in made.items() if maker == k and v in later and v not in known]
        constants = [v for v in reads[k] if v in joint.constants]
        inputs = [v for v in reads[k] if v not in joint.constants]
        closed = Jaxpr([*constants, *inputs], equations, [*outs, *left])
        passes.append(
            TaskProgram(
                closed=closed,
                constants=tuple(joint.constants[v] for v in constants),
                inputs=tuple(known.get(v, Name("residual", v)) for v in inputs),
                outputs=(*names, *(Name("residual", v) for v in left)),
            )
        )
    return passes
