"""The losses of a train step, and a step with several losses as a chain of parts.

A part computes its loss, and from it all that needs no later loss: an update is done before the
next loss begins. What a later part needs of it is among its results, and among the arguments of
that part. What follows from the batch and from constants alone is recomputed by each part that
needs it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from launcher.trace.errors import GradientError, TraceError
from launcher.trace.interface import Interface
from launcher.trace.ir.jaxpr import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    free_vars,
    inline_calls,
    is_var,
    make_jaxpr,
    needed,
    read_jaxpr,
    rewritten_as,
    source_line,
    walk,
)
from launcher.trace.primitives import PLAIN, loss_p
from launcher.trace.slicing.slices import Loss, SplitLoss, Traces


def is_mixed(equations: Sequence[Equation]) -> bool:
    """Return whether a program has plain gradients as losses, and others too."""
    outermost = walk(equations, lambda eqn: eqn.primitive is not loss_p)
    plain = [
        e for e in outermost if e.primitive is loss_p and PLAIN in str(e.source_info.name_stack)
    ]
    return 0 < len(plain) < sum(e.primitive is loss_p for e in walk(equations))


def find_losses(
    fun: Callable[..., Any], equations: Sequence[Equation], needs_loss: bool = True
) -> list[int]:
    """Return the places of the losses among the equations of a step.

    Raises:
        GradientError: there is none and there has to be one, or one is inside a loop or a branch.
    """
    name = getattr(fun, "__name__", repr(fun))
    for eqn in equations:
        if eqn.primitive is loss_p:
            continue
        for inner in (e for e in walk([eqn]) if e.primitive is loss_p):
            raise GradientError(
                f"{name} takes a gradient, or calls launcher.microbatched, at {source_line(inner)} "
                f"inside {eqn.primitive.name} at {source_line(eqn)}; a parallelized step does it "
                "outside of loops, branches and checkpoints. To accumulate gradients say "
                "num_micro_batches instead of looping; to skip an update take the gradients first "
                "and choose afterwards"
            )
    places = [i for i, eqn in enumerate(equations) if eqn.primitive is loss_p]
    if not places and needs_loss:
        raise GradientError(
            f"{name} takes no gradient of a loss: call jax.grad, jax.value_and_grad or those of "
            "launcher or Flax (in an evaluation step launcher.microbatched) on real numbers; do "
            "not differentiate it; jax.vjp is none. A function that only uses gradients follows "
            "the step that takes them: launcher.parallelize(apply, method=step)"
        )
    return places


def with_named_operands(eqn: Equation, constants: dict[Var, Any]) -> Equation:
    """Return the loss equation with a constant of its own for every operand that is a literal."""
    operands = []
    for atom in eqn.invars:
        if not is_var(atom):
            constants[name := Var(atom.aval)] = np.asarray(atom.val, atom.aval.dtype)
            atom = name
        operands.append(atom)
    return eqn.replace(invars=operands)


def refuse_side_effects(equations: Sequence[Equation]) -> None:
    """Raise TraceError if an equation outside of the losses has a side effect."""
    for eqn in equations:
        if eqn.effects:
            raise TraceError(
                f"{eqn.primitive.name} at {source_line(eqn)} has a side effect; the parts of a "
                "parallelized step run in several places, which must not see each other. Remove "
                "the print or callback, or return the value as a result of the step"
            )


def no_loss(num_slices: int) -> Loss:
    """Return a loss that reads, makes and differentiates nothing, and has no layers."""
    return Loss(num_slices, (), (), (), (), 0, (), (), ())


SplitLosses = Mapping[int, SplitLoss]


@dataclass(frozen=True, eq=False)
class Part:
    """The equations of one loss and those around it.

    Attributes:
        before, loss, after: the equations.
        traces: those of the loss; None if it is none.
    """

    before: tuple[Equation, ...]
    loss: Equation
    after: tuple[Equation, ...]
    traces: Traces | None

    @property
    def equations(self) -> tuple[Equation, ...]:
        """All equations, in order."""
        return (*self.before, self.loss, *self.after)


def cut_at_losses(
    equations: Sequence[Equation], losses: SplitLosses, outvars: Sequence[Atom], free: Set[Var]
) -> list[Part]:
    """Cut a step's program into parts with one loss each.

    Losses that no result needs are left out, if there is another.

    Args:
        equations: the program.
        losses: for the place of each loss what goes there instead.
        outvars: the results of the program.
        free: the batch and the constants.
    """
    if not losses:
        return [_without_loss(equations, outvars)]
    if len(losses) == 1:
        return [_only_part(equations, losses, outvars)]
    program: list[Equation] = []
    for i, eqn in enumerate(equations):
        split = losses.get(i)
        program += [*split.before, split.traces.whole, *split.after] if split else [eqn]
    whole = {i: split.traces.whole for i, split in losses.items()}
    live = {id(e) for e in needed(program, outvars)}
    places = [i for i in sorted(losses) if id(whole[i]) in live] or [min(losses)]
    rank = _ranks(program, [whole[i] for i in places], free)
    done = set(map(id, whole.values()))
    place = {id(e): i for i, e in enumerate(program)}
    cuts = []
    for k, loss in enumerate((whole[i] for i in places), 1):
        rest = [e for e in program if id(e) not in done]
        before = needed([e for e in rest if place[id(e)] < place[id(loss)]], loss.invars)
        done |= {id(e) for e in before if rank[id(e)] >= 0}
        taken = {id(e) for e in before} | done
        rest = [e for e in rest if id(e) not in taken and (k == len(places) or rank[id(e)] <= k)]
        now = [v for e in rest if rank[id(e)] == k and id(e) in live for v in e.outvars]
        after = needed(rest, outvars if k == len(places) else now)
        done |= {id(e) for e in after if rank[id(e)] >= 0}
        cuts.append((before, loss, after))
    parts: list[Part] = []
    wanted: set[Atom] = set(filter(is_var, outvars))
    for i, (before, loss, after) in reversed([*zip(places, cuts, strict=True)]):
        after = needed(split_conditionals(after), wanted)
        parts.insert(0, Part(tuple(before), loss, tuple(after), losses[i].traces))
        wanted.update(free_vars(parts[0].equations))
    return parts


def _without_loss(equations: Sequence[Equation], outvars: Sequence[Atom]) -> Part:
    """Return a part that takes no gradient: all of it comes after a loss that is none."""
    nothing = make_jaxpr(lambda: ())
    (loss,) = make_jaxpr(lambda: loss_p.bind(jaxpr=nothing, wrt=(), reduce=())).eqns
    return Part((), loss, tuple(needed(split_conditionals(equations), outvars)), None)


def _only_part(equations: Sequence[Equation], losses: SplitLosses, outvars: Sequence[Atom]) -> Part:
    ((place, split),) = losses.items()
    loss = split.traces.whole
    before = needed([*equations[:place], *split.before], loss.invars)
    done = {id(e) for e in before}
    rest = [e for i, e in enumerate(equations) if i != place and id(e) not in done]
    after = needed(split_conditionals([*split.after, *rest]), outvars)
    return Part(tuple(before), loss, tuple(after), split.traces)


def _ranks(
    program: Sequence[Equation], losses: Sequence[Equation], free: Set[Var]
) -> dict[int, int]:
    """Return for each equation, by its id, the number of the last loss that it depends on.

    That is 0 if it depends on none, and -1 if it depends on the batch and on constants alone.
    """
    number = {id(loss): k for k, loss in enumerate(losses, 1)}
    of: dict[Var, int] = dict.fromkeys(free, -1)
    found = {}
    for eqn in program:
        reads = max((of.get(v, 0) for v in eqn.invars if is_var(v)), default=-1)
        found[id(eqn)] = number.get(id(eqn), reads)
        of.update((v, found[id(eqn)]) for v in eqn.outvars)
    return found


def interfaces(
    whole: Interface, parts: Sequence[Part], constants: Set[Var], names: Sequence[str]
) -> list[Interface]:
    """Return the arguments and results of each part.

    The arguments are the batch and those that the part reads, in a tree like the step's, with None
    in place of the others, and behind them what former parts hand on. The last part also has the
    arguments that none reads. No result is a literal, or an argument that is not of the batch.

    Args:
        whole: the arguments and results of the step.
        parts: its parts, in order.
        constants: the variables of its captured arrays.
        names: the names of its arguments.
    """
    final = [v for v in whole.outvars if is_var(v)]
    batch = whole.batch_vars
    reads = [batch.union(free_vars(part.equations)) for part in parts]
    reads[-1] |= {v for v in final if v in batch or v in constants}
    reads[-1] |= set(whole.invars) - batch - set().union(*reads)
    takes_place_of = dict(_replacements(whole))
    label = dict(zip(whole.invars, names, strict=True))
    found: list[Interface] = []
    wanted: set[Atom] = set(final)
    given = batch | constants
    for k in reversed(range(len(parts))):
        made = {v: None for e in parts[k].equations for v in e.outvars}
        if k == len(parts) - 1:
            made.update((v, None) for v in final if v in given)
        outs = [v for v in dict.fromkeys((*final, *made)) if v in wanted and v in made]
        carried = {
            f"new.{label[takes_place_of[v]]}" if v in takes_place_of else f"value.{i}": v
            for i, v in enumerate(free_vars(parts[k].equations))
            if v not in label and v not in constants
        }
        later = set(final).union(*reads[k + 1 :])
        found.insert(0, _interface(whole, reads[k], carried, outs, later))
        wanted = (wanted - made.keys()) | reads[k]
    return found


def _replacements(whole: Interface) -> list[tuple[Var, Var]]:
    """Return the results that take the place of an argument, with that argument."""
    pairs = [(whole.outvars[i], whole.invars[j]) for i, j in whole.aliases.items()]
    return [(new, old) for new, old in pairs if is_var(new)]


def _interface(
    whole: Interface,
    reads: Set[Var],
    carried: Mapping[str, Var],
    outs: Sequence[Var],
    later: Set[Atom],
) -> Interface:
    """Return the interface of a part.

    Args:
        whole: that of the step.
        reads: what the part reads.
        carried: what former parts hand on, by name.
        outs: its results.
        later: what is needed once it has run.
    """
    own = [v if v in reads else None for v in whole.invars]
    tree: Any = (*jax.tree.unflatten(whole.in_tree, own), dict(carried))
    invars, in_tree = jax.tree.flatten(tree)
    flags = dict(zip(whole.invars, zip(whole.donated, whole.batch, strict=True), strict=True))
    donated = tuple(flags.get(v, (True, False))[0] and v not in later for v in invars)
    result, argument = ({v: i for i, v in enumerate(some)} for some in (outs, invars))
    aliases: dict[int, int] = {}
    for new, old in _replacements(whole):
        if new in result and old in argument:
            aliases.setdefault(result[new], argument[old])
    return Interface(
        in_tree=in_tree,
        out_tree=jax.tree.structure((0,) * len(outs)),
        invars=tuple(invars),
        outvars=tuple(outs),
        donated=donated,
        batch=tuple(flags.get(v, (True, False))[1] for v in invars),
        aliases=aliases,
    )


def split_conditionals(equations: Sequence[Equation]) -> list[Equation]:
    """Return the same program with every `cond` split by the arrays that its results depend on.

    "Apply the update only if all gradients are finite" is one `lax.cond` over every parameter,
    which as one equation would have to run in one place. Its results fall into groups that share no
    array operand, one group a parameter; each becomes a conditional of its own.
    """
    return [part for eqn in equations for part in _split(eqn)]


def _split(eqn: Equation) -> list[Equation]:
    if eqn.primitive.name != "cond" or len(eqn.outvars) == 1 or eqn.effects:
        return [eqn]
    old = eqn.params["branches"]
    branches = [inline_calls(read_jaxpr(branch)) for branch in old]
    if any(branch.consts for branch in branches):
        return [eqn]
    reads = [_operands_read(branches, k) for k in range(len(eqn.outvars))]
    operands = eqn.invars[1:]
    arrays = [{i for i in used if operands[i].aval.size != 1} for used in reads]
    parts = []
    for group in _connected(arrays):
        used = sorted(set().union(*(reads[k] for k in group)))
        narrow = tuple(
            rewritten_as(before, _narrow(branch, group, used))
            for before, branch in zip(old, branches, strict=True)
        )
        parts.append(
            eqn.replace(
                invars=[eqn.invars[0], *(operands[i] for i in used)],
                outvars=[eqn.outvars[k] for k in group],
                params={**eqn.params, "branches": narrow},
            )
        )
    return parts


def _operands_read(branches: Sequence[Jaxpr], result: int) -> set[int]:
    found: set[int] = set()
    for branch in branches:
        out = [branch.outvars[result]]
        used = set(free_vars(needed(branch.eqns, out), out))
        found |= {i for i, v in enumerate(branch.invars) if v in used}
    return found


def _connected(sets: Sequence[set[int]]) -> list[list[int]]:
    """Indices grouped so that sets of different groups are disjoint; the empty ones are one."""
    groups: list[tuple[set[int], list[int]]] = []
    for k, members in enumerate(sets):
        joined, indices = set(members), [k]
        rest = []
        for other, others in groups:
            if other & joined or (not other and not joined):
                joined, indices = joined | other, others + indices
            else:
                rest.append((other, others))
        groups = [*rest, (joined, indices)]
    return [sorted(indices) for _, indices in groups]


def _narrow(branch: Jaxpr, results: list[int], operands: list[int]) -> Jaxpr:
    outs = [branch.outvars[k] for k in results]
    return Jaxpr([branch.invars[i] for i in operands], needed(branch.eqns, outs), outs)
