"""Count the peak memory of a compiled step, which the planner estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from launcher.runtime.emit.instructions import Free, Run
from launcher.runtime.emit.listing import Emitted
from launcher.runtime.programs.device_meshes import DeviceMeshes
from launcher.trace.ir.jaxpr import nbytes


def peak_bytes(
    emitted: Emitted, placement: DeviceMeshes, compiled: Mapping[str, Any]
) -> list[int] | None:
    """Return the most bytes that a device of each mesh holds during a step.

    They are the arrays that are there when a program runs, its results and its temporaries.

    Args:
        emitted: this process's instructions; 0 is returned for meshes that they do not touch.
        placement: where its slots live.
        compiled: its programs, by name.

    Returns:
        The bytes by the mesh's number; None if the programs do not tell theirs.
    """
    said = {name: program.memory_analysis() for name, program in compiled.items()}
    if None in said.values():
        return None
    live: dict[int, int] = {}
    held, peak = [0] * len(placement.meshes), [0] * len(placement.meshes)

    def keep(slot: int) -> None:
        drop(slot)
        aval, sharding = emitted.slots[slot].aval, placement.sharding(slot)
        live[slot] = nbytes(jax.ShapeDtypeStruct(sharding.shard_shape(aval.shape), aval.dtype))
        held[emitted.slots[slot].mesh] += live[slot]

    def drop(slot: int) -> None:
        held[emitted.slots[slot].mesh] -= live.pop(slot, 0)

    for _, slot in (*emitted.arguments, *emitted.constants):
        keep(slot)
    for _, slot, _ in emitted.batches:
        keep(slot)
    for x in emitted.instructions:
        if isinstance(x, Free):
            for slot in x.slots:
                drop(slot)
            continue
        if isinstance(x, Run):
            of = said[x.program]
            fresh = of.output_size_in_bytes - of.alias_size_in_bytes + of.temp_size_in_bytes
            peak[x.mesh] = max(peak[x.mesh], held[x.mesh] + fresh)
            for k in x.donated:
                drop(x.inputs[k])
        for slot in x.outputs:
            keep(slot)
    return peak
