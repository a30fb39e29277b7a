"""Group layers into stages, and derive what each stage computes and exchanges.

Pure functions from a traced loss to `StageGraph`s; the planner reads sizes and costs off them,
the runtime compiles them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.trace import (
    ANY_LAYER,
    Atom,
    Equation,
    Jaxpr,
    Loss,
    Var,
    dependents,
    free_vars,
    has_tangent,
    is_var,
    needed,
    program_flops,
    reached_by_gradients,
    structure_text,
)


@dataclass(frozen=True, eq=False)
class StageGraph:
    """What one stage computes on one slice of the batch.

    Attributes:
        mesh: where it lives. equations: its program. outs: `activations_out` first, then the
            results.
        layers: the equations of each of its layers, in order.
        operands: the loss's operands it reads (indices). wrt: those it differentiates.
        inputs: the variables of the operands, then the activations in.
        activations_in, activations_out: values from earlier and for later stages.
        consumers: for every activation out, the stages that read it.
        results: the loss's results that are made here (indices; 0 is the loss).
        active: the activations in and out through which gradients flow.
    """

    index: int
    mesh: int
    equations: tuple[Equation, ...]
    layers: tuple[tuple[Equation, ...], ...]
    operands: tuple[int, ...]
    wrt: tuple[int, ...]
    inputs: tuple[Var, ...]
    activations_in: tuple[Var, ...]
    activations_out: tuple[Var, ...]
    consumers: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]
    outs: tuple[Atom, ...]
    active: frozenset[Var]

    @functools.cached_property
    def structure(self) -> str:
        """Text that is equal for stages that are the same program.

        They also differentiate the same inputs and send the same gradients back.
        """
        how = {
            "wrt": [i in self.wrt for i in self.operands],
            "active": [v in self.active for v in (*self.activations_in, *self.activations_out)],
            "of": [len(self.operands), len(self.activations_out), 0 in self.results],
            "consumers": [len(readers) for readers in self.consumers],  # each sends a gradient back
        }
        return structure_text(Jaxpr(self.inputs, self.equations, self.outs), how)

    @property
    def active_in(self) -> tuple[Var, ...]:
        """The activations in whose gradients this stage sends back."""
        return tuple(v for v in self.activations_in if v in self.active)

    @property
    def active_out(self) -> tuple[Var, ...]:
        """The activations out whose gradients come back to this stage."""
        return tuple(v for v in self.activations_out if v in self.active)


def layer_flops(loss: Loss) -> list[float]:
    """Forward operations of each layer on one slice."""
    costs = [0.0] * loss.num_layers
    for eqn, layer in zip(loss.equations, loss.layers, strict=True):
        if layer != ANY_LAYER:
            costs[layer] += program_flops([eqn])
    return costs


def group_layers(costs: Sequence[float], num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Split consecutive layers into `num_stages` non-empty groups.

    The costliest group is as cheap as can be; of those splits, the most even one (the least sum of
    squares) is taken.
    """

    @functools.cache
    def best(first: int, groups: int) -> tuple[float, float, tuple[int, ...]]:
        if groups == 1:
            cost = sum(costs[first:])
            return cost, cost * cost, (len(costs),)
        options = []
        for end in range(first + 1, len(costs) - groups + 2):
            cost = sum(costs[first:end])
            most, squares, ends = best(end, groups - 1)
            options.append((max(cost, most), squares + cost * cost, (end, *ends)))
        return min(options)

    ends = best(0, num_stages)[2]
    return tuple(tuple(range(a, b)) for a, b in zip((0, *ends[:-1]), ends, strict=True))


def cut_stages(
    loss: Loss, stage_layers: Sequence[Sequence[int]], mesh_of: Sequence[int] | None = None
) -> tuple[StageGraph, ...]:
    """Return the graph of every stage.

    Args:
        loss: the loss of one slice.
        stage_layers: the layers of each stage.
        mesh_of: the submesh of each stage; by default each has its own.
    """
    mesh_of = range(len(stage_layers)) if mesh_of is None else mesh_of
    stage_of_layer = {layer: s for s, layers in enumerate(stage_layers) for layer in layers}
    last = len(stage_layers) - 1
    own: list[dict[int, list[Equation]]] = [{n: [] for n in layers} for layers in stage_layers]
    constant: list[Equation] = []
    made_in: dict[Var, int] = {}
    for eqn, layer in zip(loss.equations, loss.layers, strict=True):
        if layer == ANY_LAYER:
            constant.append(eqn)
            continue
        own[stage_of_layer[layer]][layer].append(eqn)
        made_in.update((v, stage_of_layer[layer]) for v in eqn.outvars)
    result_stage = [made_in.get(v, last) if is_var(v) else last for v in loss.outvars]
    programs = []
    for s, by_layer in enumerate(own):
        results = tuple(i for i, home in enumerate(result_stage) if home == s)
        equations = [eqn for layer in by_layer.values() for eqn in layer]
        read = free_vars(equations, [loss.outvars[i] for i in results])
        first, *others = by_layer.values() or [[]]  # a step without a loss has no layers
        layers = (*needed(constant, read), *first), *map(tuple, others)
        programs.append((layers, [eqn for layer in layers for eqn in layer], results))
    read_by = [free_vars(eqns, [loss.outvars[i] for i in results]) for _, eqns, results in programs]
    reads = [set(read) for read in read_by]
    operand_index = {v: i for i, v in enumerate(loss.invars)}
    reached = dependents(loss.equations, [loss.invars[i] for i in loss.wrt])
    active = {v for v in reached if has_tangent(v.aval)}  # gradients flow through them
    graphs = []
    for s, (layers, equations, results) in enumerate(programs):
        out = [v for eqn in equations for v in eqn.outvars if made_in.get(v) == s]
        consumers = {v: tuple(t for t in range(s + 1, last + 1) if v in reads[t]) for v in out}
        activations_out = tuple(v for v in out if consumers[v])
        operands = tuple(operand_index[v] for v in read_by[s] if v in operand_index)
        activations_in = tuple(v for v in read_by[s] if v in made_in and made_in[v] < s)
        graphs.append(
            StageGraph(
                index=s,
                mesh=mesh_of[s],
                equations=tuple(equations),
                layers=layers,
                operands=operands,
                wrt=tuple(i for i in operands if i in loss.wrt),
                inputs=(*(loss.invars[i] for i in operands), *activations_in),
                activations_in=activations_in,
                activations_out=activations_out,
                consumers=tuple(consumers[v] for v in activations_out),
                results=results,
                outs=(*activations_out, *(loss.outvars[i] for i in results)),
                active=frozenset(v for v in (*activations_in, *activations_out) if v in active),
            )
        )
    return tuple(graphs)


def lost_gradients(loss: Loss, graphs: Sequence[StageGraph]) -> list[int]:
    """Return the operands that have a gradient in the whole loss, and none in its stages.

    There must be none: they would silently stay as they are. Stages hand back the gradients of
    their active activations only.
    """
    flowing = {v for v in loss.outvars[:1] if is_var(v)}
    whole = reached_by_gradients(loss.equations, loss.outvars[:1])
    found: set[int] = set()
    for graph in reversed(graphs):
        ends = [v for v in graph.outs if is_var(v) and v in flowing]
        inside = reached_by_gradients(graph.equations, ends)
        flowing |= inside.intersection(graph.active_in)
        found |= {i for i in graph.wrt if loss.invars[i] in inside}
    return [i for i in loss.wrt if loss.invars[i] in whole and i not in found]
