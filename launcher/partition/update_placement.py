"""Place a graph of equations on meshes and cut it into segments.

No optimizer and no model is known here. The rules, in this order:

1. An equation with a bulky (not one-element) operand on some mesh runs there; on the mesh with
   most of those bytes if there are several.
2. An equation whose placed operands are all single numbers runs with them if they are on one
   mesh and so is its result a number, on the home mesh (the last stage's) if they are on several:
   the terms of a global norm travel as numbers, and no gradient does.
3. Any other equation is *free*: recomputed wherever its result is needed (a learning rate, a
   bias correction, a broadcast clipping factor).
4. An argument has one home, the first mesh that needs it; to others it is sent.

A mesh's equations form *segments*; a new one starts only where another mesh's value is awaited,
and an equation waits for the latest segment that needs it, so that XLA can fuse it there.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from launcher.trace import Equation, Var, free_vars, is_var, nbytes


@dataclass(frozen=True, eq=False)
class Segment:
    """Equations that one mesh runs as one program; every list is in the mesh's own values.

    `sends` lists `(output, to mesh)`, done right after the segment has run.
    """

    mesh: int
    level: int
    equations: tuple[Equation, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    sends: tuple[tuple[Var, int], ...]


Send = tuple[Var, int, int]  # (value, from mesh, to mesh)


@dataclass(eq=False)
class Placer:
    """Places one graph. Call `export` for every value needed at a mesh, then `segments`.

    Attributes:
        equations: the graph, in order. home: the mesh that combines numbers.
        placed: where each value is that is bound to a mesh; sources (gradients) are given.
        homes: where `arguments` live, filled as they are needed; the step's graphs share it.
        everywhere: values that any mesh can be given from outside (the batch, constants).
        earlier: the graph that ran before this one and may be asked for its values.
    """

    equations: Sequence[Equation]
    home: int
    placed: dict[Var, int]
    homes: dict[Var, int]
    arguments: frozenset[Var]
    everywhere: frozenset[Var]
    earlier: Placer | None = None
    source_sends: dict[Send, None] = field(default_factory=dict)
    argument_sends: dict[Send, None] = field(default_factory=dict)
    given: dict[tuple[Var, int], None] = field(default_factory=dict)
    defined: dict[Var, int] = field(default_factory=dict)
    _exports: dict[tuple[Var, int], None] = field(default_factory=dict)
    _wanted: dict[tuple[Var, int], None] = field(default_factory=dict)
    _sends: dict[Send, None] = field(default_factory=dict)
    _instances: dict[tuple[int, int], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.defined = {v: i for i, e in enumerate(self.equations) for v in e.outvars}
        for eqn in self.equations:
            mesh = self._mesh_of(eqn)
            if mesh is not None:
                for v in eqn.outvars:
                    self.placed.setdefault(v, mesh)

    def _mesh_of(self, eqn: Equation) -> int | None:
        pinned = [self.placed[v] for v in eqn.outvars if v in self.placed]
        if pinned:
            return pinned[0]
        placed = [v for v in eqn.invars if is_var(v) and v in self.placed]
        bulky = [v for v in placed if v.aval.size != 1]
        if bulky:
            weight: dict[int, int] = {}
            for v in bulky:
                weight[self.placed[v]] = weight.get(self.placed[v], 0) + nbytes(v.aval)
            return min(weight, key=lambda s: (-weight[s], s))
        meshes = {self.placed[v] for v in placed}
        if len(meshes) > 1:
            return self.home
        if meshes and all(v.aval.size == 1 for v in eqn.outvars):
            return meshes.pop()
        return None

    def export_placed(self) -> None:
        """Require every equation that is bound to a mesh, mesh by mesh."""
        bound = {v: s for v, s in self.placed.items() if v in self.defined}
        for v in sorted(bound, key=lambda v: (bound[v], self.defined[v])):
            self._require(v, bound[v])

    def export(self, var: Var, mesh: int) -> None:
        """Have `var` on `mesh` when the graph has run: computed there, sent there, or given."""
        self._exports[var, mesh] = None
        self._require(var, mesh)

    def _require(self, var: Var, mesh: int) -> None:
        """Place a value on a mesh, and before it all that it follows from.

        With a stack instead of recursion: the norm of a large model's gradients is a sum of a
        thousand terms.
        """
        waiting = [(var, mesh)]
        while waiting:
            var, mesh = waiting.pop()
            if (var, mesh) in self._wanted:
                continue
            self._wanted[var, mesh] = None
            origin = self.placed.get(var, mesh)
            if var in self.defined:
                if origin != mesh:
                    self._sends[var, origin, mesh] = None
                index = self.defined[var]
                if (index, origin) not in self._instances:
                    self._instances[index, origin] = None
                    operands = [v for v in self.equations[index].invars if is_var(v)]
                    waiting += [(v, origin) for v in reversed(operands)]
            elif self.earlier and var in self.earlier.defined:
                self.earlier.export(var, mesh)
            else:
                self._bring(var, origin, mesh)

    def _bring(self, var: Var, origin: int, mesh: int) -> None:
        """A value that no equation makes."""
        if var in self.everywhere:
            self.given[var, mesh] = None
        elif var in self.arguments:
            home = self.homes.setdefault(var, mesh)
            if home != mesh:
                self.argument_sends[var, home, mesh] = None
        elif origin != mesh:
            self.source_sends[var, origin, mesh] = None

    def segments(self) -> tuple[Segment, ...]:
        """Return the programs to run, in an order that can be followed."""
        instances = sorted(self._instances)
        number = {instance: k for k, instance in enumerate(instances)}
        makers = [
            [
                number[self.defined[v], self.placed.get(v, mesh)]
                for v in self.equations[index].invars
                if is_var(v) and v in self.defined
            ]
            for index, mesh in instances
        ]
        sent_early = {number[self.defined[v], at] for v, at, _ in self._sends}
        levels = latest_levels(makers, [mesh for _, mesh in instances], sent_early)
        groups: dict[tuple[int, int], list[int]] = {}
        for (index, mesh), level in zip(instances, levels, strict=True):
            groups.setdefault((level, mesh), []).append(index)
        keys = sorted(groups)
        sent: dict[tuple[Var, int], list[int]] = {}
        for v, at, to in self._sends:
            sent.setdefault((v, at), []).append(to)
        programs = {key: [self.equations[i] for i in groups[key]] for key in keys}
        reads = {key: free_vars(programs[key]) for key in keys}
        found = []
        for key in keys:
            level, mesh = key
            made = [v for e in programs[key] for v in e.outvars]
            sends = [(v, to) for v in made for to in sent.get((v, mesh), ())]
            later = {v for k in keys if k[1] == mesh and k > key for v in reads[k]}
            out = {v for v, _ in sends} | later | {v for v, s in self._exports if s == mesh}
            outputs = tuple(dict.fromkeys(v for v in made if v in out))
            found.append(
                Segment(mesh, level, tuple(programs[key]), tuple(reads[key]), outputs, tuple(sends))
            )
        return tuple(found)


def latest_levels(
    makers: Sequence[Sequence[int]], groups: Sequence[int], awaited: Set[int] = frozenset()
) -> list[int]:
    """Return when each equation runs: after what it waits for, with the last that need it.

    One that another group waits for runs as early as it can.

    Args:
        makers: for each equation, those that make its operands, which come before it.
        groups: the mesh or piece of each equation.
        awaited: those whose results are sent elsewhere, if no equation reads them there.
    """
    levels: list[int] = []
    for own, needs in zip(groups, makers, strict=True):
        levels.append(max((levels[k] + (groups[k] != own) for k in needs), default=0))
    top: dict[int, int] = {}
    for group, level in zip(groups, levels, strict=True):
        top[group] = max(top.get(group, 0), level)
    pairs = zip(groups, makers, strict=True)
    early = awaited | {k for own, needs in pairs for k in needs if groups[k] != own}
    latest = [n if i in early else top[groups[i]] for i, n in enumerate(levels)]
    for i in reversed(range(len(makers))):
        for k in makers[i]:
            if k not in early:
                latest[k] = min(latest[k], latest[i])
    return latest
