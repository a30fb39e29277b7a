"""What a layer costs of which all but the products with weights is computed again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.hardware.cluster_shape import ClusterShape
from launcher.partition.remat import recomputed
from launcher.partition.sharding.named_dims import NamedDims, Sharding
from launcher.partition.stage_programs import inside_of, trace_stage
from launcher.partition.stages import StageGraph
from launcher.plan.cost.collectives import (
    Collective,
    dependence,
    flow,
    is_active,
    loads_again,
    work_seconds,
)
from launcher.plan.cost.stage_memory import left_bytes, stored_in, temporaries
from launcher.schedule import Kind
from launcher.trace import Loss
from launcher.trace.ir.jaxpr import Equation, Var, nbytes, sub_jaxprs

_KINDS = {Kind.FORWARD, Kind.BACKWARD}


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


class SelectiveCosts:
    """The costs of one layer, which is traced once for all meshes."""

    def __init__(self, graph: StageGraph, loss: Loss, varying: Sequence[Var]) -> None:
        """Trace the layer.

        Args:
            graph: the layer.
            loss: the loss that it is a part of.
            varying: its values whose sizes depend on the number of rows.
        """
        self._graph, self._loss = graph, loss
        self._of = trace_stage(graph, loss, "selective", _KINDS)
        self._stored, self._inside = stored_in(self._of), NamedDims(self._of.joint.equations)
        self._again = recomputed(graph.layers, "selective")
        parameters = [loss.invars[i] for i in graph.wrt]
        self._flows = flow(graph.equations, [*parameters, *graph.active_in])
        self._varying = dependence(graph.equations, varying)

    def costs(self, sharding: Sharding, cluster: ClusterShape) -> dict[str, float]:
        """Return the fields of its `LayerCost` that are about it.

        Args:
            sharding: the sharding of its forward pass.
            cluster: the rates of the devices.
        """
        work = [0.0, 0.0]  # of all rows, and of every slice
        sums: list[Collective] = []
        for use, found in loads_again(self._again, sharding.spec, sharding.sizes, self._flows):
            work[not is_active(use, self._varying)] += work_seconds(found, cluster)
            sums += found.forward
        cut = inside_of(self._of, self._loss, sharding, self._inside)
        back = temporaries(self._of, cut, self._stored).get(Kind.BACKWARD)
        inputs = sum(nbytes(v.aval) / sharding.parts(v) for v in self._graph.activations_in)
        left = left_bytes(self._of, cut).get(Kind.FORWARD, 0.0)
        return {
            "selective_seconds": work[0],
            "fixed_selective_seconds": work[1],
            "selective_bytes": sum(c.share * c.times * c.size for c in sums),
            "selective_sums": sum(c.share * c.times for c in sums),
            "kept_bytes": max(0.0, left - inputs),
            "selective_peak_bytes": back.peak - back.fixed_early if back else 0.0,
            "fixed_selective_peak_bytes": back.fixed_peak if back else 0.0,
            "fixed_selective_early_bytes": back.fixed_early if back else 0.0,
        }
