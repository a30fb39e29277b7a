"""Compiling the programs of a step, in parallel and from shapes alone. Used by `executable`."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Set
from typing import Any

import jax

from launcher.runtime.emit import Emitted
from launcher.runtime.instructions import Run, Send
from launcher.runtime.placement import Placement


def compile_programs(emitted: Emitted, placement: Placement) -> dict[str, Any]:
    """The programs that this process runs, compiled, by name."""
    first: dict[str, Run] = {}
    for x in emitted.instructions:
        if isinstance(x, Run) and placement.runs_here(x.mesh):
            first.setdefault(x.program, x)
    # What another process may not have pulled yet must not be written over.
    offered = {
        slot
        for x in emitted.instructions
        if isinstance(x, Send) and not placement.is_local(x)
        for slot in x.inputs
    }
    lowered = {name: _lower(run, emitted, placement, offered) for name, run in first.items()}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda x: x.compile(), lowered.values())
        return dict(zip(lowered, compiled, strict=True))


def _lower(run: Run, emitted: Emitted, placement: Placement, offered: Set[int]) -> Any:
    def abstract(slot: int) -> jax.ShapeDtypeStruct:
        aval = placement.slots[slot].aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=placement.sharding(slot))

    fun = emitted.programs[run.program]
    jitted = jax.jit(
        lambda *flat: tuple(fun(*flat)),
        donate_argnums=[k for k in run.donated if run.inputs[k] not in offered],
        out_shardings=tuple(placement.sharding(slot) for slot in run.outputs),
        keep_unused=True,
    )
    return jitted.lower(*(abstract(slot) for slot in run.inputs))
