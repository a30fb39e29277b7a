"""Trace a stage, and cut its joint program into the passes that its schedule runs one by one.

Each equation belongs to the first pass that needs it. A value that a later pass reads travels there
as a *residual*; an input is read again instead, and what follows from the parameters alone, or
cheaply from what the forward pass leaves, is recomputed. So a backward pass in two parts does no
costly work twice: the part that makes the gradients of activations runs first and leaves to the
other what both need.

What is cheap to compute (element by element, or the same elements in another order) need not be
kept where its operands are: the backward pass computes it again, fused into what reads it. Which
values to keep is then a minimum cut of the forward pass, between what cannot be recomputed and
what is read later, each value weighing its bytes (the rule of PyTorch's min-cut partitioner,
https://dev-discuss.pytorch.org/t/467). Of equal cuts it is the latest, which computes least.
An iteration of a scan and of the scan that is its backward pass are cut in the same way: JAX would
keep all that the latter reads, two to three times these bytes. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from launcher.partition.joint_graph import JointGraph, Known, Name, trace_joint
from launcher.partition.named_dims import NamedDims, Sharding
from launcher.partition.stages import StageGraph
from launcher.schedule import Kind
from launcher.trace import (
    BARRIERS,
    CHEAP,
    FUSED,
    REDUCTIONS,
    Atom,
    Equation,
    Jaxpr,
    Loss,
    Var,
    called_instead,
    dependents,
    free_vars,
    inline_calls,
    is_var,
    jaxpr_as_fun,
    matmul_flops,
    may_open,
    nbytes,
    needed,
    read_jaxpr,
    renamed,
    replace_bodies,
    scan_counts,
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
    again = {id(e) for e in early if e.primitive.name in CHEAP and e.outvars[0] not in kept}
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
    placed = free_vars([e for e in rest if e.primitive.name not in FUSED | REDUCTIONS])
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


_UNITS = 1 << 29  # what all values together weigh: flows are 32-bit integers
_ENDLESS = 1 << 30


def kept_values(
    equations: Sequence[Equation],
    given: Set[Var],
    wanted: Iterable[Atom],
    firm: Iterable[Atom] = (),
    read: Callable[[Atom], Atom] = lambda atom: atom,
) -> set[Var]:
    """Choose the values to keep, so that `wanted` can be computed from them by cheap equations.

    They are values that `equations` make or are given; any other value is at hand anyway.

    Args:
        equations: the forward pass.
        given: what the equations read and would have to be kept, too.
        wanted: what is read later.
        firm: what cannot be recomputed.
        read: returns what to read instead of an operand.
    """
    numbers = {v: k for k, v in enumerate([*given, *(v for e in equations for v in e.outvars)])}
    ends = {numbers[v] for v in wanted if is_var(v) and v in numbers}
    if not ends:
        return set()
    # A value is an edge from node 2k to 2k + 1, which weighs its bytes.
    source, sink = 2 * len(numbers), 2 * len(numbers) + 1
    starts = {numbers[v] for v in (*given, *firm) if is_var(v) and v in numbers}
    endless = [(2 * k + 1, sink) for k in ends]
    for eqn in equations:
        if eqn.primitive.name not in CHEAP:
            starts.update(numbers[v] for v in eqn.outvars)
            continue
        operands = {read(v) for v in eqn.invars if is_var(v)}
        at = numbers[eqn.outvars[0]]
        endless += [(2 * numbers[v] + 1, 2 * at) for v in operands if is_var(v) and v in numbers]
    endless += [(source, 2 * k) for k in starts]
    sizes = np.array([nbytes(v.aval) for v in numbers], dtype=float)
    weights = np.maximum(1, sizes * (_UNITS / max(sizes.sum(), 1.0))).astype(np.int32)
    pairs = [*((2 * k, 2 * k + 1) for k in range(len(numbers))), *endless]
    values = np.concatenate([weights, np.full(len(endless), _ENDLESS, np.int32)])
    after = _before_sink(np.array(pairs).T, values, source, sink)
    return {v for v, k in numbers.items() if 2 * k not in after and 2 * k + 1 in after}


def _before_sink(pairs: np.ndarray, values: np.ndarray, source: int, sink: int) -> set[int]:
    """Return the nodes behind the latest minimum cut, from which more could flow to the sink."""
    graph = coo_array((values, tuple(pairs)), shape=(sink + 1, sink + 1), dtype=np.int32).tocsr()
    spare = graph - maximum_flow(graph, source, sink).flow
    spare.eliminate_zeros()
    return set(breadth_first_order(spare.T.tocsr(), sink, return_predecessors=False).tolist())


def with_less_kept(joint: JointGraph) -> JointGraph:
    """Return a joint graph whose scans keep what `kept_values` chooses of an iteration."""
    late = dependents(joint.equations, joint.gradients_in)
    made = dependents(joint.equations, joint.slices | late) - {*joint.inputs.values()}
    equations = _in_pairs(joint.equations, late, made, joint.outputs.values())
    if equations == joint.equations:
        return joint
    parts = [*joint.inputs.values()], equations, [*joint.outputs.values()]
    new = inline_calls(Jaxpr(*parts, [*joint.constants], [*joint.constants.values()]))
    outputs = dict(zip(joint.outputs, new.outvars, strict=True))
    constants = dict(zip(new.constvars, new.consts, strict=True))
    return dataclasses.replace(joint, outputs=outputs, equations=new.eqns, constants=constants)


def _in_pairs(
    equations: Sequence[Equation], late: Set[Var], made: Set[Var], outs: Iterable[Atom]
) -> list[Equation]:
    """Return equations whose scans keep less; those that change become calls.

    Args:
        equations: a forward and a backward pass.
        late: what depends on the gradients that the backward pass is given.
        made: what the backward pass can read only if it is kept.
        outs: what is read besides.
    """
    old = [_read(eqn) for eqn in equations if may_open(eqn)]
    new: dict[Equation, _Scan] = {scan.eqn: scan for scan in old}
    for first, then in itertools.permutations(new, 2):
        if late.isdisjoint(first.outvars) and not late.isdisjoint(then.outvars):
            reads = [
                new[e].inputs.values() if e in new else e.invars for e in equations if e is not then
            ]
            elsewhere = {v for v in itertools.chain(outs, *reads) if is_var(v)}
            new[first], new[then] = _pair(new[first], new[then], made, elsewhere)
    called = {scan.eqn: new[scan.eqn].called() for scan in old if new[scan.eqn] is not scan}
    return [called.get(eqn, eqn) for eqn in equations]


@dataclass(frozen=True, eq=False)
class _Scan:
    """A scan under fresh names.

    Attributes:
        eqn: its equation.
        carried: how many values it carries.
        inputs: its body's inputs, those that are carried first, and the arrays that they are, or
            start from, or are rows of.
        equations, outs: the body, and its results in the order of the equation's.
    """

    eqn: Equation
    carried: int
    inputs: Mapping[Var, Atom]
    equations: Sequence[Equation]
    outs: Sequence[Atom]

    def called(self) -> Equation:
        """Return a call of it, whose constants are carried; JAX sees that they stay the same."""
        n, params = self.carried, self.eqn.params
        is_row = {v: v.aval.shape != x.aval.shape for v, x in self.inputs.items()}
        given = sorted(self.inputs, key=is_row.__getitem__)
        m = len(given) - sum(is_row.values())
        run = jaxpr_as_fun(inline_calls(Jaxpr(given, self.equations, self.outs)))

        def one(state: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            made = run(*state, *rows)
            return [*made[:n], *state[n:]], made[n:]

        def scan(*operands: Any) -> list[Any]:
            how = {name: params[name] for name in ("length", "reverse", "unroll")}
            state, rows = jax.lax.scan(one, [*operands[:m]], [*operands[m:]], **how)
            return [*state[:n], *rows]

        def at_its_line(jaxpr: Jaxpr) -> Jaxpr:
            info = self.eqn.source_info.replace(name_stack=jaxpr.eqns[0].source_info.name_stack)
            return dataclasses.replace(
                jaxpr, eqns=[eqn.replace(source_info=info) for eqn in jaxpr.eqns]
            )

        call = called_instead(self.eqn, scan, [self.inputs[v] for v in given])
        return replace_bodies(call, at_its_line)


def _read(eqn: Equation) -> _Scan:
    """Return a scan's parts."""
    (consts, carried), body = scan_counts(eqn), inline_calls(read_jaxpr(eqn.params["jaxpr"]))
    env: dict[Var, Atom] = {v: Var(v.aval) for v in body.invars}
    given = list(zip(_named(body.invars, env), eqn.invars, strict=True))
    given = given[consts : consts + carried] + given[:consts] + given[consts + carried :]
    equations = renamed(body.eqns, env)
    return _Scan(eqn, carried, dict(given), equations, _named(body.outvars, env))


def _pair(first: _Scan, then: _Scan, made: Set[Var], elsewhere: Set[Var]) -> tuple[_Scan, _Scan]:
    """Return a scan and the scan that is its backward pass, with less to keep.

    A row of what is kept is read with the same row of all else, in whatever order they run.

    Args:
        first: the scan.
        then: its backward pass; if it reads nothing of the first, nothing changes.
        made: see `_in_pairs`.
        elsewhere: what others than `then` read.
    """
    n, results, own = first.carried, first.eqn.outvars, first.equations
    rows = dict(zip(results[n:], first.outs[n:], strict=True))
    inputs = [*first.inputs.items()]
    same = {x: v for v, x in inputs[n:] if is_var(x)} | rows
    env: dict[Var, Atom] = {v: v for v in then.inputs}
    for v, x in [*then.inputs.items()][then.carried :]:
        if is_var(x) and x in same and same[x].aval.shape == v.aval.shape:
            env[v] = same[x]
    both, outs = [*own, *renamed(then.equations, env)], _named(then.outs, env)

    given = {v for i, (v, x) in enumerate(inputs) if i < n or (is_var(x) and x in made)}
    rows = {x: v for x, v in rows.items() if x in elsewhere}
    late = {v for eqn in both[len(own) :] for v in eqn.outvars}
    left = [*first.outs[:n], *rows.values(), *outs]
    less = _in_pairs(both, late, dependents(both, given), left)
    own, back = less[: len(own)], less[len(own) :]
    wanted = free_vars(back, outs)
    kept = kept_values(own, given, wanted)
    again = needed(own, wanted, kept)
    if not again and less == both:
        return first, then

    back = [*again, *back]
    read = free_vars(back, outs)
    there = {*[v for v, _ in inputs[n:]], *filter(is_var, rows.values())}
    for v in [v for v in read if v in kept - there]:
        aval: Any = v.aval
        rows[Var(aval.update(shape=(first.eqn.params["length"], *aval.shape)))] = v
    sources = {**first.inputs, **then.inputs, **{v: x for x, v in rows.items() if is_var(v)}}
    sources = {v: sources[v] for v in [*[*then.inputs][: then.carried], *read] if v in sources}
    eqn = first.eqn.replace(outvars=[*results[:n], *rows])
    first = dataclasses.replace(
        first, eqn=eqn, equations=own, outs=[*first.outs[:n], *rows.values()]
    )
    return first, dataclasses.replace(then, inputs=sources, equations=back, outs=outs)


def _named(atoms: Iterable[Atom], env: Mapping[Var, Atom]) -> list[Any]:
    return [env[v] if is_var(v) else v for v in atoms]


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """A stage's joint graph, and the task programs that it is cut into.

    Attributes:
        results: those of the loss that are wanted.
        sliced: the operands of which each slice reads its rows.
    """

    joint: JointGraph
    programs: Mapping[Kind, TaskProgram]
    results: Sequence[int]
    sliced: Set[int]


@dataclass(frozen=True)
class StageUse:
    """What of a stage a step uses.

    Attributes:
        grads: the operands whose gradients are wanted.
        varying: the operands that differ from slice to slice.
        results: the results of the loss that are wanted.
    """

    grads: Sequence[int]
    varying: Sequence[int]
    results: Sequence[int]


def trace_stage(
    graph: StageGraph,
    loss: Loss,
    remat: str,
    kinds: Set[Kind],
    wanted: StageUse | None = None,
    known: Known | None = None,
) -> StagePrograms:
    """Trace a stage, and cut it into a program for each kind of task.

    Args:
        graph: the stage.
        loss: the loss that it is a part of.
        remat: what the backward pass recomputes, a string of `base.names`.
        kinds: those that the schedule has.
        wanted: what the step uses; by default all, and all but the parameters differ from slice
            to slice.
        known: see `trace_joint`.
    """
    sliced = {i for i in graph.operands if loss.slice_axes[i] is not None}
    if wanted is None:
        varying = [i for i in graph.operands if i in sliced or i not in loss.wrt]
        wanted = StageUse(graph.wrt, varying, graph.results)
    parts = Kind.BACKWARD_WEIGHT in kinds
    joint = trace_joint(graph, loss, wanted.grads, wanted.varying, remat, parts, known)
    joint = with_less_kept(joint)
    programs = cut(joint, outputs_by_kind(joint, wanted.results, kinds, together=False))
    return StagePrograms(joint, programs, wanted.results, sliced)


def as_one(of: StagePrograms, kinds: Set[Kind]) -> StagePrograms:
    """Return the same with the forward pass in one program with what follows it."""
    groups = outputs_by_kind(of.joint, of.results, kinds, together=True)
    return dataclasses.replace(of, programs=cut(of.joint, groups))


def inside_of(
    of: StagePrograms, loss: Loss, sharding: Sharding, dims: NamedDims | None = None
) -> Sharding:
    """Return the specs of a joint program's values, by its forward pass's; `dims`: its own."""
    found = Sharding(dims or NamedDims(of.joint.equations), sharding.sizes)
    for name, var in of.joint.inputs.items():
        if name.kind != "seed":
            first = name.of[0] if name.kind == "cotangent" else name.of
            outside = loss.invars[first] if name.kind == "operand" else first
            found.seed(var, sharding.spec(outside))
    return found
