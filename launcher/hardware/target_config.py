"""Describe a GPU that is not here to XLA's compiler, from its datasheet.

The text is XLA's `GpuTargetConfigProto`, which `jax.experimental.topologies.get_topology_desc`
takes as `target_config`.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.hardware.datasheets import Datasheet


@dataclass(frozen=True)
class _Generation:
    """What all GPUs of a compute capability share.

    Attributes:
        threads: that a multiprocessor holds.
        shared_kib: shared memory of a multiprocessor.
        units: of a multiprocessor, for fp32.
        pcie: the generation of PCI Express, at 16 lanes.
    """

    threads: int
    shared_kib: int
    units: int
    pcie: int


# By compute capability, from the CUDA C++ programming guide, "Technical specifications".
_GENERATIONS = {
    7.0: _Generation(2048, 96, 64, 3),
    7.5: _Generation(1024, 64, 64, 3),
    8.0: _Generation(2048, 164, 64, 4),
    8.6: _Generation(1536, 100, 128, 4),
    8.9: _Generation(1536, 100, 128, 4),
    9.0: _Generation(2048, 228, 128, 5),
    10.0: _Generation(2048, 228, 128, 5),
    10.3: _Generation(2048, 228, 128, 5),
    12.0: _Generation(1536, 100, 128, 5),
}
_SYSTEM_KIB = 1  # of shared memory, that CUDA keeps of each block since 8.0
_ACCELERATED = range(9, 12)  # major versions whose instructions include those of "sm_90a" and so on


def target_config(sheet: Datasheet) -> str:
    """Return the text that describes a kind of GPU to XLA's compiler.

    Raises:
        ValueError: the datasheet lacks what the compiler has to know.
    """
    capability, generation = _generation(sheet)
    kept = _SYSTEM_KIB if capability >= 8.0 else 0
    major, minor = f"{capability:.1f}".split(".")
    extension = "ACCELERATED_FEATURES" if int(major) in _ACCELERATED else "NONE"
    return f"""
gpu_device_info {{
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {generation.threads}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  shared_memory_per_core: {generation.shared_kib << 10}
  shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {generation.shared_kib - kept << 10}
  fpus_per_core: {generation.units}
  core_count: {_given(sheet, "multiprocessors"):.0f}
  clock_rate_ghz: {_given(sheet, "clock_ghz")}
  l2_cache_size: {int(_given(sheet, "l2_mib") * 2**20)}
  memory_bandwidth: {int(sheet.memory_bandwidth)}
  device_memory_size: {int(sheet.memory_gib * 2**30)}
  pcie_bandwidth: {2 ** (generation.pcie + 1) << 30}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{sheet.name}"
"""


def _generation(sheet: Datasheet) -> tuple[float, _Generation]:
    capability = _given(sheet, "compute_capability")
    if capability not in _GENERATIONS:
        known = ", ".join(map(str, _GENERATIONS))
        raise ValueError(
            f"{sheet.source}: device.compute_capability={capability} is not known; known are "
            f"{known}. Programs for {sheet.name} cannot be compiled here"
        )
    return capability, _GENERATIONS[capability]


def _given(sheet: Datasheet, key: str) -> float:
    value: float | None = getattr(sheet, key)
    if value is None:
        raise ValueError(
            f"{sheet.source}: device.{key} is not set, and to compile for {sheet.name} it has to "
            "be: fill it in from the datasheet; conf/device/h100.yaml is an example"
        )
    return value
