"""Memory that the update of a step needs on a device beside its state. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from launcher.partition import MOST_LAYERS, Layout, PartitionedStep, StageGraph, gradients, parts
from launcher.plan.cost.liveness import Liveness
from launcher.trace import (
    FUSED,
    REDUCTIONS,
    Equation,
    Loss,
    TracedStep,
    Var,
    is_var,
    nbytes,
    needed,
)


class UpdateMemory:
    """What of a step's update is stored while it runs, wherever that is.

    Element-wise equations are fused into each other and write over the state: the update of most
    optimizers stores nothing but what sums read.

    Args:
        step: the step.
        as_soon: see `Liveness`.
    """

    def __init__(self, step: TracedStep, as_soon: bool) -> None:
        self._results = {v for v in step.outvars if is_var(v)}  # they are counted where they lie
        self._gradients = gradients(step)
        storing = [v for eqn in step.after if _stores(eqn, as_soon) for v in eqn.outvars]
        self._liveness = Liveness(needed(step.after, storing), [], as_soon=as_soon)

    @property
    def share(self) -> float:
        """The bytes of what is stored, of those of all gradients."""
        whole = sum(nbytes(v.aval) for v in self._gradients.values())
        stored = self._liveness.peak(lambda v: 0.0 if v in self._results else nbytes(v.aval))
        return stored / whole if whole else 0.0

    def bytes(self, cut: PartitionedStep, mesh: int, in_pieces: bool) -> float:
        """Return what the update needs on a device of a mesh, beside the state and gradients.

        Args:
            cut: the partitioned step.
            mesh: the mesh.
            in_pieces: whether every piece of a stage has an update of its own.
        """
        layout = cut.layouts[mesh]
        groups = self._of_pieces(cut, mesh) if in_pieces else [self._of_mesh(cut, mesh)]

        def peak(of: set[Var]) -> float:
            return self._liveness.peak(
                lambda v: _bytes(v, layout) if v in of and v not in self._results else 0.0
            )

        return max(map(peak, groups), default=0.0) + _fresh_bytes(cut, mesh)

    def _of_mesh(self, cut: PartitionedStep, mesh: int) -> set[Var]:
        segments = [of for of in cut.update.after if of.mesh == mesh]
        return {v for of in segments for eqn in of.equations for v in eqn.outvars}

    def _of_pieces(self, cut: PartitionedStep, mesh: int) -> list[set[Var]]:
        """Return what is computed from the gradients of so many layers as a piece may have."""
        piece: dict[Var, int] = {}
        number = 0
        for graph in cut.on_mesh(mesh):
            for i, layers in layers_reading(graph, cut.loss).items():
                gradient = self._gradients.get(cut.step.operands[i])
                if gradient is not None:
                    piece[gradient] = number + layers[0] // MOST_LAYERS
            number += 1 + len(graph.layers) // MOST_LAYERS
        found: dict[int, set[Var]] = {}
        for eqn in self._liveness.equations:
            own = next((piece[v] for v in eqn.invars if is_var(v) and v in piece), None)
            if own is not None:
                piece.update(dict.fromkeys(eqn.outvars, own))
                found.setdefault(own, set()).update(eqn.outvars)
        return list(found.values())


def layers_reading(graph: StageGraph, loss: Loss) -> dict[int, list[int]]:
    """Return for every operand that a stage differentiates those of its layers that read it."""
    index = {loss.invars[i]: i for i in graph.wrt}
    found: dict[int, list[int]] = {}
    for layer, equations in enumerate(graph.layers):
        for v in dict.fromkeys(v for eqn in equations for v in eqn.invars if is_var(v)):
            if v in index:
                found.setdefault(index[v], []).append(layer)
    return found


def accumulators(layers: Sequence[int]) -> int:
    """Return how many accumulators a gradient has where stages run in pieces.

    Neighbouring layers are taken to be a piece.
    """
    return 1 + sum(b > a + 1 for a, b in itertools.pairwise(layers))


def _stores(eqn: Equation, as_soon: bool) -> bool:
    """Return whether the compiler stores what an equation reads or makes."""
    name = eqn.primitive.name
    return name not in FUSED and (as_soon or name not in REDUCTIONS)


def _fresh_bytes(cut: PartitionedStep, mesh: int) -> float:
    """Return the bytes of the update's results that take no argument's place, nor a gradient's."""
    layout, update, step = cut.layouts[mesh], cut.update, cut.step
    made = {v for segment in update.after for eqn in segment.equations for v in eqn.outvars}
    fresh = [
        v
        for i, (v, home) in enumerate(zip(update.outvars, update.out_homes, strict=True))
        if home == mesh and i not in step.aliases and is_var(v) and v in made
    ]
    whole = gradients(step)
    spare = Counter(
        _likeness(whole[step.operands[i]], layout)
        for i, stage in (update.grad_parts if fresh else ())
        if cut.stages[stage].mesh == mesh
    )
    total = 0.0
    for v in fresh:
        spare[_likeness(v, layout)] -= 1
        total += _bytes(v, layout) if spare[_likeness(v, layout)] < 0 else 0.0
    return total


def _likeness(v: Var, layout: Layout) -> object:
    return v.aval.shape, v.aval.dtype, layout.outer(v)


def _bytes(v: Var, layout: Layout) -> float:
    return nbytes(v.aval) / parts(layout.outer(v), layout.sizes)
