"""Cut the update of a stage into a program for each piece.

Equations that large values connect belong together; single numbers (a learning rate, the norm of
all gradients) pass from one program to another. The updates of equal pieces are then equal programs
of which one is compiled, however many layers there are. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from launcher.partition.update_placement import Segment
from launcher.trace import Equation, Var, free_vars, is_var

_Group: TypeAlias = int  # a piece, or -1: of none, or of several


def split_segment(segment: Segment, piece_of: Mapping[Var, int]) -> list[Segment]:
    """Return the programs of a segment, in an order that can be followed.

    Args:
        segment: the segment.
        piece_of: the piece of each parameter and gradient; none: the segment stays as it is.
    """
    if not piece_of:
        return [segment]
    groups = _groups(segment.equations, piece_of)
    levels = _levels(segment.equations, groups)
    programs: dict[tuple[int, _Group], list[Equation]] = {}
    for eqn, group, level in zip(segment.equations, groups, levels, strict=True):
        programs.setdefault((level, group), []).append(eqn)
    keys = sorted(programs)
    reads = {key: free_vars(programs[key]) for key in keys}
    read = {v for of in reads.values() for v in of} | set(segment.outputs)
    found = []
    for key in keys:
        made = [v for e in programs[key] for v in e.outvars]
        outputs = tuple(v for v in made if v in read)
        sends = tuple(send for send in segment.sends if send[0] in set(made))
        equations, inputs = tuple(programs[key]), tuple(reads[key])
        found.append(Segment(segment.mesh, segment.level, equations, inputs, outputs, sends))
    return found


def _groups(equations: tuple[Equation, ...], piece_of: Mapping[Var, int]) -> list[_Group]:
    """Return every equation's piece: that of the large values which it is connected with."""
    root: dict[Var, Var] = {}

    def find(v: Var) -> Var:
        while root.setdefault(v, v) is not v:
            root[v] = root[root[v]]
            v = root[v]
        return v

    large = [
        [v for v in (*e.invars, *e.outvars) if is_var(v) and v.aval.size != 1] for e in equations
    ]
    for first, *others in filter(None, large):
        for v in others:
            root[find(v)] = find(first)
    pieces: dict[Var, set[int]] = {}
    for v in list(root):
        if v in piece_of:
            pieces.setdefault(find(v), set()).add(piece_of[v])
    found = []
    for vars_ in large:
        of = pieces.get(find(vars_[0]), set()) if vars_ else set[int]()
        found.append(of.copy().pop() if len(of) == 1 else -1)
    return found


def _levels(equations: tuple[Equation, ...], groups: list[_Group]) -> list[int]:
    """Return when each equation runs: after what it waits for, with the last that need it."""
    maker = {v: i for i, e in enumerate(equations) for v in e.outvars}
    makers = [[maker[v] for v in eqn.invars if is_var(v) and v in maker] for eqn in equations]
    levels: list[int] = []
    for i, of in enumerate(makers):
        levels.append(max((levels[k] + (groups[k] != groups[i]) for k in of), default=0))
    top: dict[_Group, int] = {}
    for group, level in zip(groups, levels, strict=True):
        top[group] = max(top.get(group, 0), level)
    latest, awaited = list(levels), set[int]()
    bound: dict[int, int] = {}
    for i in reversed(range(len(equations))):
        if i not in awaited:
            latest[i] = bound.get(i, top[groups[i]])
        for k in makers[i]:
            if groups[k] == groups[i]:
                bound[k] = min(bound.get(k, top[groups[k]]), latest[i])
            else:
                awaited.add(k)
    return latest
