"""Cut the stages of a model with scanned layers into equal pieces that compile once.

The iterations of a scan are the same program with other parameters, and so would be any number of
them. As one program a stage would have as many copies of it as layers, and the first and the last
stage, which do more, would compile theirs again. So a stage is cut at the ends of the iterations
into *pieces*, a program for each kind of task each: what comes before them, a few at a time, and
what comes after. Equal pieces, in any stage, are traced, lowered and compiled once.

A stage's update is cut likewise: equations that large values connect belong together; single
numbers (a learning rate, the norm of all gradients) pass from one program to another. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from launcher.base import REMAT_NAMES
from launcher.partition.assignment import Assignment
from launcher.partition.partitioned import PartitionedStep
from launcher.partition.stages import StageGraph, cut_stages
from launcher.partition.update import place_update
from launcher.partition.update_placement import Segment, latest_levels
from launcher.schedule import Kind, Task
from launcher.trace import (
    ANY_LAYER,
    Equation,
    LayerEnds,
    Loss,
    Var,
    free_vars,
    is_var,
    layer_ends_at,
    nbytes,
)

MOST_LAYERS = 4
"""Layers of a piece: each program's start takes some 0.1 ms, each layer in it time to compile."""

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Pieces:
    """A step whose stages are cut into pieces.

    Attributes:
        cut: the step; its stages are the pieces.
        stage_of: the plan's stage of each piece.
        names: the name of each piece, by which its programs are known.
    """

    cut: PartitionedStep
    stage_of: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def owners(self) -> dict[Var, int]:
        """The piece of each parameter and gradient; none if the stages are whole."""
        if not any(".piece." in name for name in self.names):
            return {}
        found: dict[Var, int] = {}
        for (i, piece), parts in self.cut.update.grad_parts.items():
            found |= dict.fromkeys((self.cut.step.operands[i], *parts), piece)
        return found

    def tasks(self, order: Sequence[Task]) -> list[Task]:
        """Return the tasks of the pieces, given those of the stages."""
        return _of_pieces(order, self.stage_of)


def may_have_pieces(cut: PartitionedStep) -> bool:
    """Return whether the stages of a step may be cut: its scans are open, and it says no more."""
    step = cut.step
    plain = step.stacks is not None and step.layer_ends is None and cut.slicing.workers == 1
    return plain and set(cut.assignment.remat) <= set(REMAT_NAMES)  # `full/2` would lose its pairs


def in_pieces(cut: PartitionedStep) -> Pieces:
    """Cut the stages of a step whose scans are open; those of any other stay as they are."""
    whole = tuple(range(len(cut.stages)))
    unchanged = Pieces(cut, whole, tuple(f"stage.{s}" for s in whole))
    step, assignment = cut.step, cut.assignment
    ends = _iteration_ends(cut.loss) if may_have_pieces(cut) else None
    if ends is None:
        return unchanged
    fine = step.cut_at(ends)
    loss = fine.loss(cut.slicing.num_slices)
    pieces, stage_of = _grouped(loss, _fine_layers(cut.loss, loss, assignment))
    meshes = [assignment.mesh_of[s] for s in stage_of]
    graphs = cut_stages(loss, pieces, meshes)
    if len(graphs) == len(cut.stages) or _has_long_ways(graphs):
        return unchanged
    made = PartitionedStep(
        step=fine,
        assignment=_assigned(assignment, pieces, stage_of),
        loss=loss,
        stages=graphs,
        layouts=cut.layouts,
        update=place_update(fine, loss, graphs, cut.slicing),
        tasks=tuple(tuple(_of_pieces(tasks, stage_of)) for tasks in cut.tasks),
    )
    names = tuple(f"stage.{s}.piece.{k - stage_of.index(s)}" for k, s in enumerate(stage_of))
    return Pieces(made, tuple(stage_of), names)


def _iteration_ends(loss: Loss) -> LayerEnds | None:
    """Return ends of layers that also part the first and the last iteration from what is around.

    The first layer ends with an iteration as the second one is, and the last one begins so.
    """
    own = [(e, n) for e, n in zip(loss.equations, loss.layers, strict=True) if n != ANY_LAYER]
    sizes = [len(list(each)) for _, each in itertools.groupby(own, key=lambda one: one[1])]
    if loss.num_layers < 3 or len(sizes) != loss.num_layers:
        return None
    starts = [0, *itertools.accumulate(sizes)]
    places = {*starts[1:-1], starts[1] - sizes[1], starts[-2] + sizes[-2]}
    return layer_ends_at(loss, sorted(k for k in places if 0 < k < len(own)))


def _fine_layers(coarse: Loss, fine: Loss, assignment: Assignment) -> list[list[int]]:
    """Return the layers of `fine` that each stage has, whose layers are those of `coarse`."""
    stage_of = {layer: s for s, layers in enumerate(assignment.layers) for layer in layers}
    found: list[dict[int, None]] = [{} for _ in assignment.layers]
    for old, new in zip(coarse.layers, fine.layers, strict=True):
        if old != ANY_LAYER:
            found[stage_of[old]][new] = None
    return [sorted(layers) for layers in found]


def _grouped(loss: Loss, of_stages: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the layers of each piece, and its stage.

    Equal layers that follow each other are taken some at a time; layers that are like no other stay
    together.
    """
    every = [layer for layers in of_stages for layer in layers]
    alone = cut_stages(loss, [[layer] for layer in every])
    kind = {layer: graph.structure for layer, graph in zip(every, alone, strict=True)}
    count = Counter(kind.values())

    def key(layer: int) -> str:
        return kind[layer] if count[kind[layer]] > 1 else ""

    runs = [
        (s, word, list(run))
        for s, layers in enumerate(of_stages)
        for word, run in itertools.groupby(layers, key)
    ]
    pieces: list[list[int]] = []
    stage_of: list[int] = []
    for s, word, run in runs:
        size = _size([len(other) for _, of, other in runs if of == word]) if word else len(run)
        even = len(run) - len(run) % size
        pieces += [run[k : k + size] for k in range(0, even, size)] + [[n] for n in run[even:]]
        stage_of += [s] * (len(pieces) - len(stage_of))
    return pieces, stage_of


def _size(lengths: Sequence[int]) -> int:
    """Return how many equal layers a piece has, given the lengths of the runs of such layers.

    The rest of a run are pieces of one layer: four layers are compiled at most.
    """
    fits = [n for n in range(2, MOST_LAYERS + 1) if all(size % n == 0 for size in lengths)]
    return max(fits, default=MOST_LAYERS - 1)


def _has_long_ways(graphs: Sequence[StageGraph]) -> bool:
    """Return whether gradients would come back to a piece from many others, to be added at its end.

    As one program a stage adds each as soon as it is made.
    """
    carried = max((nbytes(v.aval) for g in graphs[1:] for v in g.activations_in[:1]), default=0)
    return any(
        len(readers) > 2 and v in graph.active and nbytes(v.aval) >= carried
        for graph in graphs
        for v, readers in zip(graph.activations_out, graph.consumers, strict=True)
    )


def _assigned(
    assignment: Assignment, pieces: Sequence[Sequence[int]], stage_of: Sequence[int]
) -> Assignment:
    def each(of_stages: Sequence[_T]) -> tuple[_T, ...]:
        return tuple(of_stages[s] for s in stage_of) if of_stages else ()

    return dataclasses.replace(
        assignment,
        layers=tuple(map(tuple, pieces)),
        mesh_of=each(assignment.mesh_of),
        remat=each(assignment.remat),
        zero=each(assignment.zero),
        sequence=each(assignment.sequence),
        shardings=each(assignment.shardings),
    )


def _of_pieces(tasks: Sequence[Task], stage_of: Sequence[int]) -> list[Task]:
    pieces: dict[int, list[int]] = {}
    for piece, stage in enumerate(stage_of):
        pieces.setdefault(stage, []).append(piece)
    found = []
    for task in tasks:
        of = pieces[task.stage]
        found += [task.on_stage(p) for p in (of if task.kind is Kind.FORWARD else of[::-1])]
    return found


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
    maker = {v: i for i, e in enumerate(segment.equations) for v in e.outvars}
    makers = [[maker[v] for v in free_vars([e]) if v in maker] for e in segment.equations]
    levels = latest_levels(makers, groups)
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
    atoms = [(*e.invars, *e.outvars) for e in equations]
    large = [[v for v in own if is_var(v) and v.aval.size != 1] for own in atoms]
    numbers = {v: k for k, v in enumerate(dict.fromkeys(itertools.chain(*large)))}
    links = [(numbers[vars_[0]], numbers[v]) for vars_ in large for v in vars_]
    places = np.array(links, int).reshape(-1, 2).T
    graph = coo_array((np.ones(len(links)), tuple(places)), shape=(len(numbers),) * 2)
    _, component = connected_components(graph, directed=False)
    pieces: dict[int, set[int]] = {}
    for v in numbers.keys() & piece_of.keys():
        pieces.setdefault(int(component[numbers[v]]), set()).add(piece_of[v])
    found = []
    for vars_ in large:
        own = pieces.get(int(component[numbers[vars_[0]]]), set()) if vars_ else set[int]()
        found.append(next(iter(own)) if len(own) == 1 else -1)
    return found
