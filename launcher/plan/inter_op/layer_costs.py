"""The cost of each layer on submeshes of every shape: the table that the stage search adds up.

A layer is solved on its own for each size of the model axis, and layers that are the same program
are solved once, so that the time does not grow with the number of identical blocks. Costs are of
the whole batch; that of a slice is its share. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from launcher.partition.sharding.layout import batch_axes, outer_dims
from launcher.partition.sharding.named_dims import NamedDims, Sharding, Use, parts
from launcher.partition.stage_programs import StagePrograms, as_one, inside_of, trace_stage
from launcher.partition.stages import StageGraph, cut_stages
from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.cost.collectives import (
    Collective,
    dependence,
    flow,
    is_active,
    loads,
    work_seconds,
)
from launcher.plan.cost.stage_memory import footprint
from launcher.plan.intra_op.sequence_parallel import sequence_class, sequence_sharding
from launcher.plan.intra_op.stage_shardings import model_sharding
from launcher.plan.profile.measured_layers import MeasuredLayers
from launcher.schedule import Kind
from launcher.trace import Loss, TracedStep
from launcher.trace.jaxpr import Var, is_var, nbytes

_KINDS = {Kind.FORWARD, Kind.BACKWARD}


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer on `m` devices of a model axis, for the whole batch, on one of them.

    Attributes:
        work_seconds: seconds of the forward pass without communication.
        fixed_seconds: what every slice takes beside, however few rows it has: to compute something
            of parameters alone.
        forward_bytes: bytes all-reduced along the model axis in the forward pass; what is gathered
            or scattered counts half.
        backward_bytes: the same in the backward pass.
        fixed_backward_bytes: the same of every slice, however few rows it has: of parameters.
        forward_sums: number of all-reduces of `forward_bytes`.
        backward_sums: number of all-reduces of the backward pass.
        parameters: number of parameter arrays.
        parameter_bytes: bytes of the parameters on one device.
        state_bytes: bytes of the parameters and the optimizer's state on one device.
        gradient_bytes: bytes of the gradients on one device.
        residual_bytes: what the forward pass leaves for the backward pass, the activations that it
            reads included.
        again_bytes: what both passes as one program need beyond `working_bytes`.
        working_bytes: peak temporaries of a pass.
        input_bytes: bytes of the activations that the layer reads.
        sent_bytes: bytes of the activations that cross to the next layer, unsharded.
    """

    work_seconds: float
    fixed_seconds: float
    forward_bytes: float
    backward_bytes: float
    fixed_backward_bytes: float
    forward_sums: float
    backward_sums: float
    parameters: float
    parameter_bytes: float
    state_bytes: float
    gradient_bytes: float
    residual_bytes: float
    again_bytes: float
    working_bytes: float
    input_bytes: float
    sent_bytes: float


@dataclass(frozen=True, eq=False)
class CostTable:
    """The layers' costs, as arrays `[model axis, layer]`, one for each field of `LayerCost`.

    Attributes:
        model_sizes: sizes of the model axes.
        of: the arrays by the name of the field.
        num_distinct: number of layers that are different programs.
        sequence: whether each model axis cuts the data along its sequence, and not the parameters;
            empty: none does.
    """

    model_sizes: tuple[int, ...]
    of: dict[str, np.ndarray]
    num_distinct: int
    sequence: tuple[bool, ...] = ()

    def is_sequence(self, at: int) -> bool:
        """Return whether the model axis number `at` cuts the data along its sequence."""
        return bool(self.sequence) and self.sequence[at]

    def index(self, model: int, sequence: bool) -> int:
        """Return the number of a model axis."""
        every = range(len(self.model_sizes))
        return next(
            k for k in every if (self.model_sizes[k], self.is_sequence(k)) == (model, sequence)
        )


def cost_table(
    step: TracedStep,
    cluster: ClusterShape,
    model_sizes: Sequence[int],
    with_sequence: bool = True,
) -> CostTable:
    """Return the table of a step's layers.

    Args:
        step: the traced step, cut into layers.
        cluster: the rates of the devices.
        model_sizes: sizes of the model axis.
        with_sequence: whether model axes that cut the data along its sequence are included.
    """
    loss = step.loss(1)
    dims = NamedDims(loss.equations) if with_sequence and max(model_sizes) > 1 else None
    axes: list[tuple[int, int | None]] = [(m, None) for m in model_sizes]
    if dims is not None:
        found = ((m, sequence_class(step, loss, dims, m)) for m in model_sizes if m > 1)
        axes += [(m, of) for m, of in found if of is not None]
    graphs = cut_stages(loss, [(i,) for i in range(loss.num_layers)])
    state = _state_bytes(step, loss)
    owner = {i: g.index for g in reversed(graphs) for i in g.operands}
    rows_of = batch_axes(step, loss)
    solved: dict[object, list[LayerCost]] = {}
    rows = []
    for graph in graphs:
        given = [*(loss.invars[i] for i in graph.operands), *graph.activations_in]
        known = tuple(
            dims.classes(v).index(of) if dims and of in dims.classes(v) else None
            for v in given
            for _, of in axes
        )
        key = graph.structure, tuple(rows_of[i] for i in graph.operands), known
        if key not in solved:
            of = trace_stage(graph, loss, "none", _KINDS)
            inside = NamedDims(of.joint.equations)
            whole = as_one(of, _KINDS)
            solved[key] = []
            for m, along in axes:
                if dims is not None and along is not None:
                    cut = sequence_sharding(graph, loss, dims, along, m)
                else:
                    cut = model_sharding(step, loss, graph, m, cluster, cluster.link_of_axis(m))
                solved[key].append(_solve(graph, loss, cut, cluster, of, whole, inside))
        own = [i for i in graph.wrt if owner[i] == graph.index]
        rows.append([_with_state(cost, graph, own, loss, state) for cost in solved[key]])
    names = [f.name for f in fields(LayerCost)]
    arrays = {
        name: np.array([[getattr(row[k], name) for row in rows] for k in range(len(axes))])
        for name in names
    }
    sizes, sequence = tuple(m for m, _ in axes), tuple(of is not None for _, of in axes)
    return CostTable(sizes, arrays, len(solved), sequence)


def with_measured(table: CostTable, measured: MeasuredLayers) -> CostTable:
    """Return the table with measured work, which includes the collectives along the model axis."""
    of = {name: values.copy() for name, values in table.of.items()}
    for m_index, model in enumerate(table.model_sizes):
        for layer, kind in enumerate(measured.kind_of):
            fixed, a_row = measured.timings[kind, model].line
            of["fixed_seconds"][m_index, layer] = fixed / 3
            of["work_seconds"][m_index, layer] = a_row / 3 * measured.batch_size
    sums = "forward_bytes", "backward_bytes", "forward_sums", "backward_sums"
    for name in (*sums, "fixed_backward_bytes"):
        of[name] = np.zeros_like(of[name])
    return replace(table, of=of)


def _solve(
    graph: StageGraph,
    loss: Loss,
    sharding: Sharding,
    cluster: ClusterShape,
    of: StagePrograms,
    whole: StagePrograms,
    inside: NamedDims,
) -> LayerCost:
    """Return the cost of a layer, sharded so, without what the update keeps for it.

    Args:
        graph: the layer.
        loss: the loss that it is a part of.
        sharding: the sharding of its forward pass.
        cluster: the rates of the devices.
        of: its forward and backward pass as two task programs.
        whole: both as one task program.
        inside: the named dimensions of its joint graph.
    """
    parameters = [loss.invars[i] for i in graph.wrt]
    flows = flow(graph.equations, [*parameters, *graph.active_in])
    varying = dependence(graph.equations, _varying(graph, loss))
    work = fixed = 0.0
    forward: list[tuple[Use, Collective]] = []
    backward: list[tuple[Use, Collective]] = []
    for use, found in loads(sharding, flows):
        if is_active(use, varying):
            work += work_seconds(found, cluster)
        else:
            fixed += work_seconds(found, cluster)
        forward += [(use, c) for c in found.forward]
        backward += [(use, c) for c in found.backward]

    cut = inside_of(of, loss, sharding, inside)
    room = footprint(of, cut)
    working = max(room.working.values())

    def moved(crossing: Sequence[tuple[Use, Collective]], fixed: bool) -> float:
        return sum(
            c.share * c.times * c.size
            for use, c in crossing
            if fixed == (c.of is not None and not varying(use, sharding.dims.source(*c.of)[1]))
        )

    def held(var: Var) -> float:
        return nbytes(var.aval) / parts(sharding.spec(var), sharding.sizes)

    return LayerCost(
        work_seconds=work,
        fixed_seconds=fixed,
        forward_bytes=moved(forward, fixed=False),
        backward_bytes=moved(backward, fixed=False),
        fixed_backward_bytes=moved(backward, fixed=True),
        forward_sums=sum(c.share * c.times for _, c in forward),
        backward_sums=sum(c.share * c.times for _, c in backward),
        parameters=float(len(parameters)),
        parameter_bytes=sum(map(held, parameters)),
        state_bytes=0.0,
        gradient_bytes=0.0,
        residual_bytes=room.left.get(Kind.FORWARD, 0.0),
        again_bytes=max(0.0, max(footprint(whole, cut).working.values()) - working),
        working_bytes=working,
        input_bytes=sum(map(held, graph.activations_in)),
        sent_bytes=float(sum(nbytes(v.aval) for v in graph.activations_out)),
    )


def _varying(graph: StageGraph, loss: Loss) -> list[Var]:
    """Return the values of a layer whose sizes depend on the number of rows.

    They are data, activations, and what is broadcast, which in most cases is to their shape.
    """
    rows = [loss.invars[i] for i in graph.operands if i not in graph.wrt]
    spread = [
        v
        for eqn in graph.equations
        for v in eqn.outvars
        if v.aval.size > max((x.aval.size for x in eqn.invars if is_var(x)), default=1)
    ]
    return [*rows, *graph.activations_in, *spread]


def _with_state(
    cost: LayerCost, graph: StageGraph, own: Sequence[int], loss: Loss, state: dict[int, float]
) -> LayerCost:
    """Return a layer's cost with the state, which is sharded as the parameters are.

    A parameter that several layers read belongs to the first; the others hold a copy.
    """
    whole = sum(nbytes(loss.invars[i].aval) for i in graph.wrt)
    share = cost.parameter_bytes / whole if whole else 1.0
    elements = sum(loss.invars[i].aval.size for i in graph.wrt)
    kept = sum(state[i] for i in own)
    copies = sum(nbytes(loss.invars[i].aval) for i in graph.wrt if i not in own)
    values = vars(cost) | {
        "state_bytes": (kept + copies) * share,
        "gradient_bytes": 4.0 * elements * share,
    }
    return LayerCost(**values)


def _state_bytes(step: TracedStep, loss: Loss) -> dict[int, float]:
    """Return for each differentiated operand the bytes of the arguments that belong to it.

    They are the parameter itself and what the optimizer keeps for it.
    """
    dims = outer_dims(step)
    of_class: dict[int, int] = {}
    for i in loss.wrt:
        for c in dims.classes(step.loss_equation.invars[i]):
            of_class.setdefault(c, i)
    total = dict.fromkeys(loss.wrt, 0.0)
    for var, is_batch in zip(step.invars, step.batch, strict=True):
        known = [of_class[c] for c in dims.classes(var) if c in of_class]
        if known and not is_batch:
            total[known[0]] += nbytes(var.aval)
    for i in loss.wrt:  # single numbers have no dimensions to be known by
        if not loss.invars[i].aval.shape:
            total[i] = float(nbytes(loss.invars[i].aval))
    return total
