"""The report on a plan's compiled programs: peaks of its stages, programs, and what failed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.plan import CompiledPlan, CompiledProgram, CompiledStage, CompileError, Plan
from launcher.runtime.compiled_text import collectives_in
from launcher.runtime.dispatch_table import Peak, peaks, program_bytes, slot_bytes
from launcher.runtime.emit.instructions import Emitted, Run
from launcher.runtime.programs.device_meshes import DeviceMeshes

_LONGEST = 400  # characters of a compiler's sentence


def read_compiled(compiled: Any, mesh: Any) -> CompiledProgram:
    """Read a compiled program: its bytes and its collectives.

    Args:
        compiled: what JAX compiled.
        mesh: its `jax.sharding.Mesh`.
    """
    found = program_bytes(compiled)
    assert found is not None  # CPUs and GPUs tell
    return found._replace(collectives=collectives_in(compiled.as_text(), mesh.devices.shape))
