"""The report on a plan's compiled programs: peaks of its stages, collectives, errors. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from launcher.plan import CompiledPlan, CompiledProgram, CompiledStage, CompileError, Plan
from launcher.runtime.compiled_text import collectives_in
from launcher.runtime.dispatch_table import peaks, program_bytes, slot_bytes
from launcher.runtime.emit.instructions import Emitted, Run
from launcher.runtime.programs.device_meshes import DeviceMeshes

_LONGEST = 400  # characters of a compiler's sentence


class CompiledStep(NamedTuple):
    """A compiled step, as the compiler reports it.

    Attributes:
        report: what the compiler says of its programs.
        text: the text of each compiled program, by its name.
    """

    report: CompiledPlan
    text: dict[str, str]


def read_compiled(compiled: Any, text: str, mesh: jax.sharding.Mesh) -> CompiledProgram:
    """Read a compiled program: its bytes and its collectives.

    Args:
        compiled: the program, as JAX compiled it.
        text: its text, which takes a while to write.
        mesh: its mesh.
    """
    found = program_bytes(compiled)
    assert found is not None  # as XLA's compilers for CPUs and GPUs do
    return dataclasses.replace(found, collectives=collectives_in(text, mesh.devices.shape))


def compiled_report(
    plan: Plan,
    emitted: Emitted,
    placement: DeviceMeshes,
    distinct: Mapping[tuple[str, ...], CompiledProgram | BaseException],
    seconds: float,
) -> CompiledPlan:
    """Return what a compiler makes of a plan's programs.

    Args:
        plan: the plan.
        emitted: its instructions; nothing is known about the meshes that they do not touch.
        placement: where its slots live.
        distinct: each distinct program, or why it does not compile, by the names of its equals.
        seconds: how long compiling took.
    """
    mesh_of = {x.program: x.mesh for x in emitted.instructions if isinstance(x, Run)}
    good = {names: x for names, x in distinct.items() if isinstance(x, CompiledProgram)}
    failed = [(n, x) for names, x in distinct.items() if names not in good for n in names]
    peak = peaks(emitted, placement, {name: x for names, x in good.items() for name in names})
    stage_meshes = [plan.all_meshes.index(stage.devices) for stage in plan.all_stages]
    predictions = [stage.memory_bytes for stage in plan.all_stages]
    known = set(mesh_of.values()) - {mesh_of[name] for name, _ in failed}
    state = [0] * len(placement.meshes)
    for _, slot in emitted.arguments:
        state[placement.slots[slot].mesh] += slot_bytes(placement, slot)
    return CompiledPlan(
        device=placement.meshes[0].devices.flat[0].device_kind,
        stages=tuple(
            CompiledStage(predicted, at.bytes, state[mesh], at.temporary_bytes, at.program)
            if mesh in known
            else CompiledStage(predicted, None, state[mesh])
            for predicted, mesh in zip(predictions, stage_meshes, strict=True)
            for at in [peak[mesh]]
        ),
        programs=tuple(dataclasses.replace(x, names=names) for names, x in good.items()),
        errors=tuple(
            CompileError(
                name,
                tuple(stage for stage, mesh in enumerate(stage_meshes) if mesh == mesh_of[name]),
                _sentence(error),
            )
            for name, error in failed
        ),
        seconds=seconds,
    )


def _sentence(error: Any) -> str:
    """Return the first line of an error, which says what is wrong."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
