"""A step's programs, compiled for what looks into them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launcher.runtime.emit.instructions import Emitted
from launcher.runtime.programs.compile import Compilation
from launcher.runtime.programs.device_meshes import DeviceMeshes


def compile_programs(emitted: Emitted, placement: DeviceMeshes) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as pool:
        return Compilation(emitted, placement, pool).result()
