"""A step with several losses as a chain of parts, one for each loss, that run one after the other.

A part computes its loss, and from it all that needs no later loss: an update is done before the
next loss begins. What a later part needs of it is among its results, and among the arguments of
that part. What follows from the batch and from constants alone is recomputed by each part that
needs it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax

from launcher.trace.interface import Interface
from launcher.trace.ir.bodies import split_conditionals
from launcher.trace.ir.jaxpr import Atom, Equation, Var, free_vars, is_var, needed
from launcher.trace.slicing.slices import SplitLoss

SplitLosses = Mapping[int, SplitLoss]


@dataclass(frozen=True, eq=False)
class Part:
    """The equations of one loss and those around it.

    Attributes:
        place: where the loss stands among the equations of the step.
        before, loss, after: the equations.
    """

    place: int
    before: tuple[Equation, ...]
    loss: Equation
    after: tuple[Equation, ...]

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
    cuts = []
    for k, place in enumerate(places, 1):
        loss = whole[place]
        rest = [e for e in program if id(e) not in done]
        before = needed(rest[: _count_before(rest, program, loss)], loss.invars)
        done |= {id(e) for e in before if rank[id(e)] >= 0}
        taken = {id(e) for e in before} | done
        rest = [e for e in rest if id(e) not in taken and (k == len(places) or rank[id(e)] <= k)]
        now = [v for e in rest if rank[id(e)] == k and id(e) in live for v in e.outvars]
        after = needed(rest, outvars if k == len(places) else now)
        done |= {id(e) for e in after if rank[id(e)] >= 0}
        cuts.append((place, before, loss, after))
    parts: list[Part] = []
    wanted: set[Atom] = set(filter(is_var, outvars))
    for place, before, loss, after in reversed(cuts):
        after = needed(split_conditionals(after), wanted)
        parts.insert(0, Part(place, tuple(before), loss, tuple(after)))
        wanted.update(free_vars(parts[0].equations))
    return parts


def _only_part(equations: Sequence[Equation], losses: SplitLosses, outvars: Sequence[Atom]) -> Part:
    ((place, split),) = losses.items()
    loss = split.traces.whole
    before = needed([*equations[:place], *split.before], loss.invars)
    done = {id(e) for e in before}
    rest = [e for i, e in enumerate(equations) if i != place and id(e) not in done]
    after = needed(split_conditionals([*split.after, *rest]), outvars)
    return Part(place, tuple(before), loss, tuple(after))


def _count_before(some: Sequence[Equation], program: Sequence[Equation], loss: Equation) -> int:
    """Return how many of some equations of a program stand before a loss."""
    place = {id(e): i for i, e in enumerate(program)}
    return sum(place[id(e)] < place[id(loss)] for e in some)


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
    batch = {v for v, is_batch in zip(whole.invars, whole.batch, strict=True) if is_batch}
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
        in_avals=tuple(v.aval for v in invars),
        invars=tuple(invars),
        outvars=tuple(outs),
        donated=donated,
        batch=tuple(flags.get(v, (True, False))[1] for v in invars),
        aliases=aliases,
    )
