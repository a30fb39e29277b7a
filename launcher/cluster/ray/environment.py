"""The environment variables of Ray's processes and of the workers: pure functions of the driver's.

`session` and `slurm_agent` import it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.cluster.devices import DevicePool
from launcher.cluster.ray.head import TOKEN_VARIABLE

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# Of a GPU's memory JAX takes 0.75 by itself. A plan may fill as much as this (`USABLE` in
# `plan.inter_op.auto`), and the worker has the GPU alone.
_GPU_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}


def ray_environment(environ: Mapping[str, str], token: Path, nodes: bool = False) -> dict[str, str]:
    """The environment of a private Ray: no setting of any other Ray reaches it.

    Args:
        token: the file that holds the secret without which nobody may talk to this Ray.
        nodes: whether it spans several machines.
    """
    return _plain(environ) | {
        "RAY_AUTH_MODE": "token",
        TOKEN_VARIABLE: str(token),
        # Ray's word for a cluster of one machine: everything listens on 127.0.0.1 alone.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1" if nodes else "0",
        # Which GPUs a worker sees is ours to say.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "DASHBOARD_METRIC_PORT": "0",  # any free one
        # On a machine that has other work to do.
        "RAY_gcs_server_port_wait_time_s": "120",
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's own is 15: training is not to stand back behind everything else on the machine.
        "RAY_worker_niceness": "0",
        # Under `uv run` Ray would build a virtual environment for each worker.
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # The memory of a run is its own affair: Ray would kill the worker at 95 % of the machine.
        "RAY_memory_monitor_refresh_ms": "0",
        # Ray prints a dead worker's obituary over the progress display; WorkerError tells it.
        "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    }


def worker_environment(
    environ: Mapping[str, str], pool: DevicePool, host: int, addresses: Sequence[str] = ()
) -> dict[str, str]:
    """The driver's environment with the devices of one host made visible, and no others.

    A pool of GPUs without ids leaves the choice to the host's own CUDA_VISIBLE_DEVICES.

    Args:
        addresses: of the other hosts, which are exempt from proxies.
    """
    variables = _plain(environ, addresses)
    # JAX takes a process in a Slurm step for one that owns a single device.
    variables = {name: value for name, value in variables.items() if not name.startswith("SLURM_")}
    if pool.kind == "gpu" and not pool.gpu_ids:
        variables.pop("CUDA_VISIBLE_DEVICES", None)
        return _GPU_MEMORY | variables | {"JAX_PLATFORMS": "cuda,cpu"}
    if pool.kind == "gpu":
        first = host * pool.devices_per_host
        mine = pool.gpu_ids[first : first + pool.devices_per_host]
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(mine), "JAX_PLATFORMS": "cuda,cpu"}
        return _GPU_MEMORY | variables | shown
    kept = [
        flag
        for flag in variables.get("XLA_FLAGS", "").split()
        if flag.partition("=")[0] != _DEVICE_COUNT_FLAG
    ]
    variables.pop("JAX_NUM_CPU_DEVICES", None)  # JAX refuses it beside the flag
    # Each device that waits in a collective holds a thread of XLA's. With no thread to spare, what
    # another process needs to join that collective is never sent.
    threads = max(_num_cpus(), pool.devices_per_host + 1)
    return (
        {"NPROC": str(threads)}
        | variables
        | {
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join([*kept, f"{_DEVICE_COUNT_FLAG}={pool.devices_per_host}"]),
        }
    )


def _num_cpus() -> int:
    """Those that this process may run on, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _plain(environ: Mapping[str, str], addresses: Sequence[str] = ()) -> dict[str, str]:
    """`environ` without any setting of Ray, and with our own machines exempt from proxies."""
    variables = {name: value for name, value in environ.items() if not name.startswith("RAY_")}
    for name in ("no_proxy", "NO_PROXY"):
        listed = [entry for entry in variables.get(name, "").split(",") if entry]
        ours = dict.fromkeys(("localhost", "127.0.0.1", *addresses))
        local = [entry for entry in ours if entry not in listed]
        variables[name] = ",".join([*listed, *local])
    return variables
