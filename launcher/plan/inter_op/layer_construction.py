"""Layer construction: the layers that the stage search sees, and what each costs.

Neighbouring layers are joined where there are many. A layer is solved on its own for each size of
the model axis, and layers that are the same program are solved once, so that the time does not grow
with the number of identical blocks. Costs are of the whole batch; a slice has its share. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from launcher.hardware import ClusterShape
from launcher.partition import (
    MODEL,
    NamedDims,
    Sharding,
    Spec,
    StageGraph,
    StagePrograms,
    Use,
    accumulator_dtype,
    as_one,
    axes,
    batch_axes,
    cut_stages,
    group_layers,
    inside_of,
    layer_flops,
    operand_types,
    outer_dims,
    parts,
    recomputed,
    trace_stage,
)
from launcher.plan.cost.collectives import (
    Collective,
    backward_work_seconds,
    dependence,
    flow,
    is_active,
    loads,
    loads_again,
    product_seconds,
    work_seconds,
)
from launcher.plan.cost.mesh_memory import UpdateMemory
from launcher.plan.cost.stage_memory import Temporaries, left_bytes, stored_in, temporaries
from launcher.plan.inter_op.layer_table import SELECTIVE_FIELDS, LayerTable, Parameters, joined
from launcher.plan.inter_op.problem import Problem
from launcher.plan.inter_op.submeshes import model_sizes, submesh_sizes
from launcher.plan.intra_op import model_sharding, sequence_class, sequence_sharding
from launcher.plan.profile.measure_layers import MeasuredLayers
from launcher.schedule import Kind
from launcher.trace import Equation, Loss, TracedStep, Var, is_var, nbytes, sub_jaxprs

_KINDS = {Kind.FORWARD, Kind.BACKWARD}


_Reads = tuple[tuple[int, int], ...]
# A layer's costs on one model axis, by the field of `LayerTable`, the specs of its parameters, and
# the bytes of an element of each, as the forward and the backward pass read it.
_Solved = tuple[dict[str, float], tuple[Spec, ...], _Reads]


def cost_table(
    step: TracedStep,
    cluster: ClusterShape,
    model_sizes: Sequence[int],
    with_sequence: bool = True,
    outer: NamedDims | None = None,
) -> LayerTable:
    """Return the table of a step's layers.

    Args:
        step: the traced step, cut into layers.
        cluster: the rates of the devices.
        model_sizes: sizes of the model axis.
        with_sequence: whether model axes that cut the data along its sequence are included.
        outer: the named dimensions outside of the loss (`outer_dims`), if they are known.
    """
    loss = step.loss(1)
    dims = NamedDims(loss.equations) if with_sequence and max(model_sizes) > 1 else None
    model_axes: list[tuple[int, int | None]] = [(m, None) for m in model_sizes]
    if dims is not None:
        found = ((m, sequence_class(step, loss, dims, m)) for m in model_sizes if m > 1)
        model_axes += [(m, of) for m, of in found if of is not None]
    graphs = cut_stages(loss, [(i,) for i in range(loss.num_layers)])
    selective = cluster.memory_bytes is not None and has_attention(loss.equations)
    rows_of = batch_axes(step, loss)
    solved: dict[object, list[_Solved]] = {}
    of_layer: list[list[_Solved]] = []
    for graph in graphs:
        given = [*(loss.invars[i] for i in graph.operands), *graph.activations_in]
        known = tuple(
            dims.classes(v).index(of) if dims and of in dims.classes(v) else None
            for v in given
            for _, of in model_axes
        )
        key = graph.structure, tuple(rows_of[i] for i in graph.operands), known
        if key not in solved:
            layer = _Layer(graph, loss, selective, cluster.is_gpu)
            solved[key] = []
            for m, along in model_axes:
                if dims is not None and along is not None:
                    cut = sequence_sharding(graph, loss, dims, along, m)
                else:
                    cut = model_sharding(step, loss, graph, m, cluster, cluster.link_of_axis(m))
                solved[key].append((layer.costs(cut, cluster), layer.specs(cut), layer.reads))
        batch = float(sum(nbytes(loss.invars[i].aval) for i in _of_batch(step, graph)))
        of_layer.append([({**x[0], "batch_bytes": batch}, *x[1:]) for x in solved[key]])
    axes_of_layers = [[of[k][0] for of in of_layer] for k in range(len(model_axes))]
    return LayerTable(
        model_sizes=tuple(m for m, _ in model_axes),
        of={
            name: np.array([[of[name] for of in layers] for layers in axes_of_layers])
            for name in axes_of_layers[0][0]
        },
        parameters=_parameters(
            step, loss, graphs, of_layer, [m for m, _ in model_axes], outer or outer_dims(step)
        ),
        sequence=tuple(of is not None for _, of in model_axes),
        selective=selective,
        update_share=UpdateMemory(step, cluster.is_gpu).share,
    )


def _of_batch(step: TracedStep, graph: StageGraph) -> list[int]:
    """Return the operands of a layer that are leaves of the batch."""
    batch = step.batch_vars
    holders = step.loss_equation.invars
    return [i for i in graph.operands if is_var(holders[i]) and holders[i] in batch]


class _Layer:
    """A layer, whose task programs are traced once for all meshes."""

    def __init__(self, graph: StageGraph, loss: Loss, selective: bool, on_gpu: bool) -> None:
        """Trace the layer.

        Args:
            graph: the layer.
            loss: the loss that it is a part of.
            selective: whether it may be recomputed selectively.
            on_gpu: whether XLA:GPU compiles it.
        """
        self._graph, self._loss = graph, loss
        self._parameters = [loss.invars[i] for i in graph.wrt]
        self._flows = flow(graph.equations, [*self._parameters, *graph.active_in])
        self._varying = dependence(graph.equations, _varying(graph, loss))
        apart = trace_stage(graph, loss, "none", _KINDS)
        self._apart = _Traced(apart, on_gpu)
        self._whole = _Traced(as_one(apart, _KINDS), on_gpu)
        self._selective = None
        if selective:
            self._selective = _Traced(trace_stage(graph, loss, "selective", _KINDS), on_gpu)
            self._again = recomputed(graph.layers, "selective")

    def specs(self, sharding: Sharding) -> tuple[Spec, ...]:
        """Return the specs of its parameters, given the sharding of its forward pass."""
        return tuple(map(sharding.spec, self._parameters))

    @functools.cached_property
    def reads(self) -> _Reads:
        """The bytes of an element of each parameter as each pass can take it; 0: it does not."""
        of = self._apart.programs.programs
        ahead, again = (
            operand_types(of[kind]) if kind in of else {} for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        return tuple((_itemsize(ahead.get(i)), _itemsize(again.get(i))) for i in self._graph.wrt)

    def costs(self, sharding: Sharding, cluster: ClusterShape) -> dict[str, float]:
        """Return what it costs without its leaves of the batch, by the field of `LayerTable`.

        Args:
            sharding: the sharding of its forward pass.
            cluster: the rates of the devices.
        """
        graph, flows, varying = self._graph, self._flows, self._varying
        work, back, products = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]  # of all rows, of every slice
        forward: list[tuple[Use, Collective]] = []
        backward: list[tuple[Use, Collective]] = []
        launches = 0
        for use, found in loads(sharding, flows):
            launches += found.launches
            fixed = not is_active(use, varying)
            work[fixed] += work_seconds(found, cluster)
            products[fixed] += product_seconds(found, cluster)
            if is_active(use, flows):
                back[fixed] += backward_work_seconds(found, cluster)
                products[fixed] += found.backward_share * product_seconds(found, cluster)
            forward += [(use, c) for c in found.forward]
            backward += [(use, c) for c in found.backward if is_active(use, flows)]
        repeated = [(use, c) for use, c in backward if c.again]
        backward = [(use, c) for use, c in backward if not c.again]

        def moved(crossing: Sequence[tuple[Use, Collective]], fixed: bool = False) -> float:
            return sum(
                c.as_reduced(cluster)
                for use, c in crossing
                if fixed == (c.of is not None and not varying(use, sharding.dims.source(*c.of)[1]))
            )

        def count(crossing: Sequence[tuple[Use, Collective]]) -> float:
            return sum(c.share * c.times for _, c in crossing)

        inputs = self._input_bytes(sharding)
        return {
            "work_seconds": work[0],
            "fixed_seconds": work[1],
            "back_seconds": back[0],
            "fixed_back_seconds": back[1],
            "product_seconds": products[0],
            "fixed_product_seconds": products[1],
            "launches": float(launches),
            "forward_bytes": moved(forward),
            "backward_bytes": moved(backward),
            "fixed_backward_bytes": moved(backward, fixed=True),
            "repeated_bytes": moved(repeated),
            "forward_sums": count(forward),
            "backward_sums": count(backward),
            "repeated_sums": count(repeated),
            "input_bytes": inputs,
            "checkpoint_bytes": inputs,
            "sent_bytes": float(sum(nbytes(v.aval) for v in graph.activations_out)),
            **self._memory(sharding),
            **self._selective_costs(sharding, cluster),
        }

    def _input_bytes(self, sharding: Sharding) -> float:
        return sum(nbytes(v.aval) / sharding.parts(v) for v in self._graph.activations_in)

    def _memory(self, sharding: Sharding) -> dict[str, float]:
        """Return how much memory its task programs need."""
        cut = self._apart.cut(self._loss, sharding)
        apart = self._apart.temporaries(cut)
        (together,) = self._whole.temporaries(cut).values()
        none = Temporaries(0.0, 0.0, 0.0, 0.0)
        found = {}
        for name, one in (
            ("forward", apart[Kind.FORWARD]),
            ("backward", apart.get(Kind.BACKWARD, none)),
            ("whole", together),
            ("layer", together),
        ):
            found[f"{name}_peak_bytes"] = one.peak - one.fixed_early
            found[f"{name}_early_bytes"] = one.early - one.fixed_early
            found[f"fixed_{name}_peak_bytes"] = one.fixed_peak
            found[f"fixed_{name}_early_bytes"] = one.fixed_early
        del found["layer_early_bytes"]
        programs = self._apart.programs
        outputs = programs.programs[Kind.FORWARD].outputs
        residuals = [name.of for name in outputs if name.kind == "residual"]
        return found | {
            "residual_bytes": sum(nbytes(v.aval) / cut.parts(v) for v in residuals),
            "left_bytes": left_bytes(programs, cut).get(Kind.FORWARD, 0.0),
        }

    def _selective_costs(self, sharding: Sharding, cluster: ClusterShape) -> dict[str, float]:
        """Return what it costs to recompute it selectively."""
        if self._selective is None:
            return dict.fromkeys(SELECTIVE_FIELDS, 0.0)
        work = [0.0, 0.0]  # of all rows, and of every slice
        sums: list[Collective] = []
        for use, found in loads_again(self._again, sharding.spec, sharding.sizes, self._flows):
            work[not is_active(use, self._varying)] += work_seconds(found, cluster)
            sums += found.forward
        cut = self._selective.cut(self._loss, sharding)
        none = Temporaries(0.0, 0.0, 0.0, 0.0)
        back = self._selective.temporaries(cut).get(Kind.BACKWARD, none)
        left = left_bytes(self._selective.programs, cut).get(Kind.FORWARD, 0.0)
        return {
            "selective_seconds": work[0],
            "fixed_selective_seconds": work[1],
            "selective_bytes": sum(c.as_reduced(cluster) for c in sums),
            "selective_sums": sum(c.share * c.times for c in sums),
            "kept_bytes": max(0.0, left - self._input_bytes(sharding)),
            "selective_peak_bytes": back.peak - back.fixed_early,
            "fixed_selective_peak_bytes": back.fixed_peak,
            "fixed_selective_early_bytes": back.fixed_early,
        }


def _itemsize(dtype: str | None) -> int:
    return jnp.dtype(dtype).itemsize if dtype else 0


class _Traced:
    """Task programs of a layer, what they store, and the named dimensions of their joint graph."""

    def __init__(self, programs: StagePrograms, on_gpu: bool) -> None:
        self.programs, self._stored = programs, stored_in(programs, on_gpu)

    @functools.cached_property
    def _dims(self) -> NamedDims:
        return NamedDims(self.programs.joint.equations)

    def cut(self, loss: Loss, sharding: Sharding) -> Sharding:
        """Return the sharding of the joint graph, given that of the forward pass."""
        return inside_of(self.programs, loss, sharding, self._dims)

    def temporaries(self, cut: Sharding) -> dict[Kind, Temporaries]:
        """Return the temporaries of each program, given the sharding of the joint graph."""
        return temporaries(self.programs, cut, self._stored)


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


def _parameters(
    step: TracedStep,
    loss: Loss,
    graphs: Sequence[StageGraph],
    solved: Sequence[Sequence[_Solved]],
    model_sizes: Sequence[int],
    outer: NamedDims,
) -> tuple[Parameters, ...]:
    """Return the parameters of all layers, sharded along the model axis as their layers are.

    What several layers read is sharded as the first of them has it.
    """
    optimizer, used = _optimizer_bytes(step, loss, outer), _used_gradients(step, loss)
    readers: dict[int, list[int]] = {}
    for graph in graphs:
        for i in graph.wrt:
            readers.setdefault(i, []).append(graph.index)

    def one(i: int) -> Parameters:
        layer, aval = readers[i][0], loss.invars[i].aval
        at = graphs[layer].wrt.index(i)
        specs = [of[at] for _, of, _ in solved[layer]]
        lengths = [
            tuple(n // (m if axes(cut) else 1) for n, cut in zip(aval.shape, spec, strict=True))
            for spec, m in zip(specs, model_sizes, strict=True)
        ]
        gradient = aval.size * accumulator_dtype(aval.dtype).itemsize if i in used else 0
        reads = [solved[k][0][2][graphs[k].wrt.index(i)] for k in readers[i]]
        ahead, again = map(max, zip(*reads, strict=True))
        whole = {
            "parameters": 1.0,
            "parameter_bytes": nbytes(aval),
            "owned_bytes": nbytes(aval),
            "optimizer_bytes": optimizer[i],
            "gradients": 1.0 if i in used else 0.0,
            "gradient_bytes": gradient,
            "gathered_bytes": aval.size * ahead,
            "gathered_again": 1.0 if again else 0.0,
            "gathered_again_bytes": aval.size * again,
        }
        sharded = zip(specs, model_sizes, strict=True)
        share = np.array([1.0 / parts(spec, {MODEL: m}) for spec, m in sharded])
        of = {
            name: value * (share if name.endswith("bytes") else np.ones_like(share))
            for name, value in whole.items()
        }
        return Parameters(tuple(readers[i]), tuple(lengths), of)

    return joined(map(one, readers))


def _used_gradients(step: TracedStep, loss: Loss) -> set[int]:
    """Return the operands whose gradients the step uses."""
    gradients = step.loss_equation.outvars[len(loss.reduce) :]
    read = {v for eqn in step.after for v in eqn.invars if is_var(v)}
    read |= {v for v in step.outvars if is_var(v)}
    return {i for i, v in zip(loss.wrt, gradients, strict=True) if v in read}


def _optimizer_bytes(step: TracedStep, loss: Loss, dims: NamedDims) -> Mapping[int, float]:
    """Return for each differentiated operand the bytes of what the optimizer keeps for it."""
    of_class: dict[int, int] = {}
    for i in loss.wrt:
        for c in dims.classes(step.loss_equation.invars[i]):
            of_class.setdefault(c, i)
    total = dict.fromkeys(loss.wrt, 0.0)
    for var, is_batch in zip(step.invars, step.batch, strict=True):
        known = [of_class[c] for c in dims.classes(var) if c in of_class]
        if known and not is_batch:
            total[known[0]] += nbytes(var.aval)
    for i in loss.wrt:  # the parameter itself; single numbers have no dimensions to be known by
        aval = loss.invars[i].aval
        total[i] = max(0.0, total[i] - nbytes(aval)) if aval.shape else 0.0
    return total


def has_attention(equations: Iterable[Equation]) -> bool:
    """Return whether there is a product of values, each with its own of the batch's rows."""
    for eqn in equations:
        if eqn.primitive.name == "dot_general":
            _, (batch, _) = eqn.params["dimension_numbers"]
            if batch:
                return True
        elif any(has_attention(inner.eqns) for inner in sub_jaxprs(eqn)):
            return True
    return False


# The stage search joins neighbouring layers to no more than these, if not more stages are wanted.
_MOST_LAYERS = 16


def make_problem(
    step: TracedStep,
    cluster: ClusterShape,
    measured: MeasuredLayers | None = None,
    num_stages: int | None = None,
    outer: NamedDims | None = None,
) -> Problem:
    """Return the search problem of a traced step on a cluster.

    Args:
        step: the traced step, cut into layers.
        cluster: the devices to plan for.
        measured: the layers' measured seconds, instead of the cost model's.
        num_stages: the number of stages that is asked for, if any.
        outer: the named dimensions outside of the loss, if they are known.
    """
    cluster = measured.shape(cluster) if measured else cluster
    loss = step.loss(1)
    most = max(_MOST_LAYERS, num_stages or 1)
    groups = group_layers(layer_flops(loss), min(loss.num_layers, most))
    # Layers are not measured with their data cut along the sequence.
    table = cost_table(step, cluster, model_sizes(cluster), measured is None, outer)
    table = dataclasses.replace(table, measured=measured)
    return Problem(
        table.grouped(groups),
        groups,
        step.batch_size,
        cluster,
        submesh_sizes(cluster, step.batch_size),
        cluster.memory_bytes,
        unjoined=table if len(groups) < loss.num_layers else None,
    )
