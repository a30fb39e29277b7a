"""Share of a GPU's memory that JAX allocates from in a process, and that a plan may fill."""

from __future__ import annotations

from collections.abc import Mapping

# A worker has its GPUs to itself; the rest is for CUDA's contexts, NCCL's buffers and code.
GPU_MEMORY_SHARE = 0.92
JAX_MEMORY_SHARE = 0.75  # JAX's own default, in a process that we do not start

_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_NEWER = "XLA_CLIENT_MEM_FRACTION"  # JAX refuses both together


def memory_share(environ: Mapping[str, str], default: float = GPU_MEMORY_SHARE) -> float:
    """Return the share that `environ` sets, or the default."""
    try:
        return float(environ.get(_NEWER) or environ.get(_VARIABLE) or default)
    except ValueError:  # JAX reports it
        return default


def gpu_memory_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the environment of a worker so that it has `memory_share(environ)`."""
    is_set = environ.get(_NEWER) or environ.get(_VARIABLE)
    return {} if is_set else {_VARIABLE: str(GPU_MEMORY_SHARE)}


def usable_bytes(memory_gib: float, share: float = GPU_MEMORY_SHARE) -> int:
    """Return the bytes of a GPU's memory that a plan may fill."""
    return int(share * memory_gib * 2**30)
