"""Transfers between the stages of a partitioned step."""

from __future__ import annotations

from launcher.partition.partitioned import PartitionedStep
from launcher.plan.stage_plan import Transfer
from launcher.trace.ir.jaxpr import nbytes


def transfers_of(cut: PartitionedStep) -> tuple[Transfer, ...]:
    """Return what is sent between meshes.

    An activation is sent to a mesh once, and a gradient comes back from each stage that read it.
    The rest of the step is sent from the first stage of a mesh to the first stage of another.
    """
    graphs, outer, trained = cut.stages, cut.update, bool(cut.loss.wrt)
    every: dict[tuple[int, int], int] = {}
    once: dict[tuple[int, int], int] = {}
    for graph in graphs:
        for v, consumers in zip(graph.activations_out, graph.consumers, strict=True):
            size = nbytes(v.aval) * cut.slicing.replicas
            abroad = [to for to in consumers if graphs[to].mesh != graph.mesh]
            for to in {graphs[to].mesh: to for to in reversed(abroad)}.values():
                every[graph.index, to] = every.get((graph.index, to), 0) + size
            for to in abroad:
                if trained and v in graph.active:
                    every[to, graph.index] = every.get((to, graph.index), 0) + size
    first = {g.mesh: g.index for g in reversed(graphs)}
    sends = [*outer.argument_sends, *outer.part_sends]
    for segment in (*outer.before, *outer.after):
        sends += [(v, segment.mesh, to) for v, to in segment.sends]
    for v, src, dst in sends:
        link = first[src], first[dst]
        once[link] = once.get(link, 0) + nbytes(v.aval)
    return tuple(
        Transfer(*link, every.get(link, 0), once.get(link, 0)) for link in sorted({*every, *once})
    )
