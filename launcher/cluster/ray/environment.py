"""Derive the environment of Ray's processes and of the workers from the driver's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from launcher.cluster.devices import DevicePool
from launcher.cluster.ray import ray_compat
from launcher.hardware import gpu_memory_variables

# An emulated device's arrays are fresh memory each time: pages of 2 MiB spare most of its faults.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def ray_environment(environ: Mapping[str, str], token: Path, nodes: bool = False) -> dict[str, str]:
    """Return the environment of a private Ray, which settings of any other Ray do not reach.

    Args:
        environ: the environment of this process.
        token: the file with the secret that this Ray requires of every client.
        nodes: whether this Ray spans several machines.
    """
    return _plain(environ) | ray_compat.private_settings(token, nodes)


def worker_environment(
    environ: Mapping[str, str], pool: DevicePool, host: int, addresses: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment of a worker: the driver's, with only one host's devices visible.

    A pool of GPUs without ids leaves the choice to the host's own CUDA_VISIBLE_DEVICES.

    Args:
        environ: the environment of the driver.
        pool: the devices of the run.
        host: the index of the worker's host in the pool.
        addresses: the addresses of the other hosts, which are exempt from proxies.
    """
    variables = _plain(environ, addresses)
    # JAX assumes that a process of a Slurm step owns a single device.
    variables = {name: value for name, value in variables.items() if not name.startswith("SLURM_")}
    if pool.kind == "gpu" and not pool.gpu_ids:
        variables.pop("CUDA_VISIBLE_DEVICES", None)
        return variables | gpu_memory_variables(environ) | {"JAX_PLATFORMS": "cuda,cpu"}
    if pool.kind == "gpu":
        first = host * pool.devices_per_host
        mine = pool.gpu_ids[first : first + pool.devices_per_host]
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(mine), "JAX_PLATFORMS": "cuda,cpu"}
        return variables | gpu_memory_variables(environ) | shown
    kept = [
        flag
        for flag in variables.get("XLA_FLAGS", "").split()
        if flag.partition("=")[0] != _DEVICE_COUNT_FLAG
    ]
    variables.pop("JAX_NUM_CPU_DEVICES", None)  # JAX refuses both it and the flag
    # Each device that waits in a collective blocks one of XLA's threads. Without a spare one, the
    # data that another process needs to join that collective would never be sent.
    threads = max(_num_cpus(), pool.devices_per_host + 1)
    return (
        {"NPROC": str(threads), "GLIBC_TUNABLES": _HUGE_PAGES}
        | variables
        | {
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join([*kept, f"{_DEVICE_COUNT_FLAG}={pool.devices_per_host}"]),
        }
    )


def _num_cpus() -> int:
    """Return the number of CPUs for this process, or of all if the system cannot tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _plain(environ: Mapping[str, str], addresses: Sequence[str] = ()) -> dict[str, str]:
    """Return `environ` without settings of Ray, and with our own machines exempt from proxies."""
    prefix = ray_compat.PREFIX
    variables = {name: value for name, value in environ.items() if not name.startswith(prefix)}
    for name in ("no_proxy", "NO_PROXY"):
        listed = [entry for entry in variables.get(name, "").split(",") if entry]
        ours = dict.fromkeys(("localhost", "127.0.0.1", *addresses))
        local = [entry for entry in ours if entry not in listed]
        variables[name] = ",".join([*listed, *local])
    return variables


@contextmanager
def replaced_environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Replace this process's environment variables by `environ` inside the context."""
    before = dict(os.environ)
    _change(environ)
    try:
        yield
    finally:
        _change(before)


def _change(environ: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
