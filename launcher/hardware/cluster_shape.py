"""Shape of a cluster for the planner, as pure data: numbers, speeds, connections and memory."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from launcher.hardware.datasheets import Datasheet, find_datasheet, has_bf16

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


@dataclass(frozen=True)
class ClusterShape:
    """Hosts of equal devices.

    Attributes:
        device_kind: the kind of the devices, as JAX names it.
        peak_flops: dense 16-bit FLOP/s of one device by its datasheet, or None where there is none
            to compare a run with (MFU is then unknown).
        flops: FLOP/s that one device is assumed to sustain in matrix products of bf16, for
            predictions.
        flops_fp32: the same in 32-bit matrix products.
        memory_bandwidth: bytes/s that one device is assumed to sustain.
        attention_flops: FLOP/s that it is assumed to sustain in fused attention; None: `flops`.
        launch_seconds: seconds that a host takes to launch a matrix product and the kernels around
            it; a device that is faster waits.
        memory_bytes: memory of one device that a plan may fill (`usable_bytes`), or None if it is
            shared or not known.
        intra_host: bytes/s one way, from device to device on a host.
        inter_host: bytes/s one way, from host to host.
        latency: seconds of one transfer, beside its bytes.
        effective_parallelism: how many devices' worth of compute a machine sustains whose devices
            share it: 1 if one device alone is as fast as all together, the number of devices if
            none slows another. In between it is that number times the share of a task's time with
            all busy that the task takes alone. The rates are those with all busy. None: each
            device has its own resources.
        product_parallelism: the same of matrix products alone, in which a device may use more cores
            than in what is done element by element; None: they are not distinguished.
        dispatch_overhead: seconds that a program takes beside its work: its start, and the wait for
            the last of its devices.
        store_latency: seconds of an exchange through parameter servers, from put to get, beside its
            bytes.
        store_put: bytes/s at which a worker packs its parts and puts them into the store, with all
            workers and servers busy, as those below.
        store_add: bytes/s of parts that a server gets and adds.
        store_get: bytes/s at which a worker gets sums and places them on its devices.
        compute_capability: NVIDIA's number of what the devices can compute, such as 9.0; None: not
            known, or no GPUs.
        gather_rate: bytes/s of all-gathers and reduce-scatters over those of all-reduces.
        measured: names of the fields above that were measured, joined by commas.
        correction: factor that the rates above were divided by in plans of earlier versions, which
            learned it from earlier runs; 1 in new plans.
    """

    name: str
    hosts: int
    devices_per_host: int
    device_kind: str
    peak_flops: float | None
    flops: float
    flops_fp32: float
    memory_bandwidth: float
    memory_bytes: int | None
    intra_host: float
    inter_host: float
    latency: float
    effective_parallelism: float | None = None
    product_parallelism: float | None = None
    dispatch_overhead: float = 10e-6
    store_latency: float = 1e-3
    store_put: float = 1e9
    store_add: float = 1e9
    store_get: float = 1e9
    attention_flops: float | None = None
    launch_seconds: float = 0.0
    compute_capability: float | None = None
    gather_rate: float = 1.0
    measured: str = ""
    correction: float = 1.0

    @property
    def num_devices(self) -> int:
        """Number of devices on all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def is_gpu(self) -> bool:
        """Whether XLA:GPU compiles for its devices, not XLA:CPU: see `plan.cost.liveness`."""
        return self.device_kind != "cpu"

    @property
    def shares_machine(self) -> bool:
        """Whether its devices slow one another: see `schedule.simulate_shared`."""
        return self.effective_parallelism is not None and self.num_devices > 1

    def host_of(self, device: int) -> int:
        """Return the host of a device; devices are numbered host by host."""
        return device // self.devices_per_host

    def hosts_of(self, devices: Iterable[int]) -> tuple[int, ...]:
        """Return the hosts that devices are on, in order."""
        return tuple(sorted({self.host_of(device) for device in devices}))

    def link_of_axis(self, devices: int) -> float:
        """Return the bytes/s of a ring of neighbouring devices."""
        return self.intra_host if devices <= self.devices_per_host else self.inter_host

    def rates(self, measured: bool) -> list[str]:
        """Return in words the rates that predictions rest on: those measured, or the others.

        The others are as a datasheet has them, or nominal.
        """
        known, there = self.measured.split(","), vars(self)
        if self.num_devices == 1:
            there = there | dict.fromkeys(("intra_host", "gather_rate", "latency"))
        if self.hosts == 1:
            there = there | {"inter_host": None}
        return [
            words for name, words in RATES.items() if there[name] and (name in known) == measured
        ]

    def start_seconds(self, devices: Any) -> Any:
        """Return the seconds of an all-reduce of no bytes among so many devices, an array or one.

        On GPUs it goes up and down a tree (Sanders et al. 2009, as NCCL does); elsewhere round a
        ring.
        """
        steps = np.ceil(np.log2(devices)) if self.is_gpu else devices - 1
        return 2 * self.latency * steps

    def element_seconds(self, flops: float, moved: float) -> float:
        """Return the seconds of everything but matrix products on one device.

        It is fused: a chain of element-wise operations is one pass, which takes the time to move
        its bytes once, or that of its operations if it is longer.

        Args:
            flops: its operations.
            moved: bytes that it reads and writes where nothing is fused.
        """
        chain = _GPU_CHAIN if self.is_gpu else _CPU_CHAIN
        return max(flops / self.flops, moved / chain / self.memory_bandwidth)

    def product_seconds(
        self, flops: float, flops_fp32: float, results: float = 0.0, unaligned: float = 0.0
    ) -> float:
        """Return the seconds of matrix products on one device, at the sustained rates.

        Args:
            flops: operations in 16 bits.
            flops_fp32: operations in 32 bits.
            results: elements of the results; the units of a GPU fill and drain for each tile.
            unaligned: operations in 16 bits that a GPU's tensor cores do not take.
        """
        plain = flops / self.flops + flops_fp32 / self.flops_fp32
        if not self.is_gpu:
            return plain
        rate = self.flops if flops else self.flops_fp32
        return plain + 2 * _FILL * results / rate + (_UNALIGNED - 1) * unaligned / self.flops

    def attention_seconds(self, flops: float) -> float:
        """Return the seconds of fused attention on one device, given its operations."""
        return flops / (self.attention_flops or self.flops)


# The rates that predictions rest on, in words, by the field of each.
RATES = {
    "flops": "products",
    "attention_flops": "fused attention",
    "memory_bandwidth": "element-wise work",
    "launch_seconds": "launches",
    "dispatch_overhead": "starts of programs",
    "intra_host": "links in a host",
    "gather_rate": "gathers beside sums",
    "inter_host": "links between hosts",
    "latency": "latency",
}


def with_measured(shape: ClusterShape, **found: float | None) -> ClusterShape:
    """Return a shape with what was measured of it; what is None or 0 was not, and stays."""
    known: dict[str, Any] = {name: value for name, value in found.items() if value}
    names = dict.fromkeys((*filter(None, shape.measured.split(",")), *known))
    return dataclasses.replace(shape, measured=",".join(names), **known)


# Bytes that element-wise operations move if nothing is fused, over those that a compiled chain of
# them moves.
_CPU_CHAIN = 4.0
# Those of GPUs were fitted to published runs beside the planner. Its own fit to the measured ones
# (`tests/benchmarks/published.py`) changes products, attention and elements by 6 % at most.
_GPU_CHAIN = 5.0
_FILL = 171  # length of a sum that takes as long as it takes to fill and drain the units
_UNALIGNED = 12.0  # times as long: chosen by three runs with heads of 108 in PyTorch of 2022
_MEMORY_SHARE = 0.77  # of a GPU's memory rate, in passes over large arrays
_LINK_SHARE = 0.85  # of the links between a host's GPUs, in sums of large arrays (nccl-tests)
NETWORK_SHARE = 0.9  # of those between hosts

# Assumed rates for GPUs without a datasheet; their memory is unknown.
_OTHER_GPU = {"flops": 50e12, "flops_fp32": 10e12, "memory_bandwidth": 500e9, "intra_host": 12e9}
_LOAD, _LOOKS = Path("/proc/loadavg"), 20
LOCAL = "local"  # the name of GPUs that are here
_ETHERNET = 12.5e9  # 100 Gbit/s
_CORE_FLOPS = 60e9  # one CPU core in fp32 matrix products of a small model; nominal
_CPU_BANDWIDTH = 30e9  # one core, out of its caches; nominal
# Nominal, of a device with a core of its own; those of 23 plans of a small GPT for four devices on
# two cores came out 7 % off in the median (`tests/benchmarks/planner_honest.py`).
_CPU_LINK = 4e9  # from device to device, inside a collective
_CPU_LATENCY = 50e-6  # per step of a collective, in which devices wait for one another
_CPU_DISPATCH_OVERHEAD = 1e-3
_CPU_PARALLELISM = 1.25  # on two cores; XLA lets each device use both


def local_shape(
    num_devices: int, num_hosts: int, device_kind: str, memory_share: float = GPU_MEMORY_SHARE
) -> ClusterShape:
    """Return the shape of this machine.

    It has GPUs of `device_kind` (as JAX or nvidia-smi names them) or, for `"cpu"`, emulated devices
    that share the machine's cores and memory. The rates of a GPU without a datasheet in
    `conf/device/` are nominal (`is_nominal`).
    """
    if device_kind == "cpu":
        return _emulated(num_devices, num_hosts)
    rates: dict[str, Any] = {"peak_flops": None, "memory_bytes": None, **_OTHER_GPU}
    sheet = find_datasheet(device_kind)
    if sheet is not None:
        rates = sheet_rates(sheet, memory_share)
    return ClusterShape(
        name=LOCAL,
        hosts=num_hosts,
        devices_per_host=num_devices // num_hosts,
        device_kind=device_kind,
        inter_host=_ETHERNET,
        latency=10e-6,
        **rates,
    )


def sheet_rates(sheet: Datasheet, memory_share: float = GPU_MEMORY_SHARE) -> dict[str, Any]:
    """Return the fields of a `ClusterShape` that a datasheet says.

    A GPU without bf16 computes it in fp32.
    """
    peak = sheet.peak_flops if has_bf16(sheet.compute_capability) else sheet.peak_flops_fp32
    return {
        "peak_flops": sheet.peak_flops,
        "flops": sheet.sustained * peak,
        "flops_fp32": sheet.sustained * sheet.peak_flops_fp32,
        "memory_bandwidth": _MEMORY_SHARE * sheet.memory_bandwidth,
        "attention_flops": sheet.sustained_attention * peak,
        "launch_seconds": sheet.launch_seconds,
        "memory_bytes": usable_bytes(sheet.memory_gib, memory_share),
        "intra_host": _LINK_SHARE * sheet.link,
        "compute_capability": sheet.compute_capability,
    }


def is_nominal(shape: ClusterShape) -> bool:
    """Return whether the devices of a shape by `local_shape` are GPUs of unknown rates."""
    return shape.device_kind != "cpu" and shape.peak_flops is None


def threads_at_work(seconds: float = 0.2) -> float:
    """Return how many threads want a core while this one sleeps, in the mean.

    Those of niced processes, which take little from others, do not count unless this one is niced.
    It is 0 where the kernel is not Linux.
    """
    found = []
    psutil.cpu_times_percent()
    for _ in range(_LOOKS):
        time.sleep(seconds / _LOOKS)
        try:
            running, _, _ = _LOAD.read_text().split()[3].partition("/")
        except OSError:
            return 0.0
        found.append(int(running) - 1)  # this one, which reads
    of = psutil.cpu_times_percent()
    busy = of.user + of.nice + of.system
    share = (busy if os.nice(0) > 0 else busy - of.nice) / max(busy, 1.0)
    return float(share * statistics.mean(found))


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(psutil.Process().cpu_affinity() or [0])


def beside_others(shape: ClusterShape, others: float) -> ClusterShape:
    """Return devices that share a machine as fast as others leave them.

    A thread of another session gets half of a core, and a step waits for the slowest of its own:
    beside one on two cores, steps were measured to take 1.6 times as long.

    Args:
        shape: the devices, alone on the machine.
        others: how many threads of other processes want a core.
    """
    factor = 1.0 + others / _cores()
    rates = "flops", "flops_fp32", "memory_bandwidth", "intra_host", "inter_host"
    waits = {name: getattr(shape, name) * factor for name in ("latency", "dispatch_overhead")}
    found = {name: getattr(shape, name) / factor for name in rates}
    return dataclasses.replace(shape, **found, **waits)


def _emulated(num_devices: int, num_hosts: int) -> ClusterShape:
    cores = _cores()
    share = min(1.0, cores / num_devices)
    return ClusterShape(
        name="emulated",
        hosts=num_hosts,
        devices_per_host=num_devices // num_hosts,
        device_kind="cpu",
        peak_flops=None,
        flops=_CORE_FLOPS * share,
        flops_fp32=_CORE_FLOPS * share,
        memory_bandwidth=_CPU_BANDWIDTH * share,
        memory_bytes=None,
        intra_host=_CPU_LINK * share,
        inter_host=_CPU_LINK * share / 4,
        latency=_CPU_LATENCY / share,
        effective_parallelism=_CPU_PARALLELISM * max(1.0, cores / 2),
        dispatch_overhead=_CPU_DISPATCH_OVERHEAD / share,
    )


@dataclass(frozen=True)
class WorkerInfo:
    """A process that runs a plan.

    Attributes:
        host: its index among the workers, as in a stage's `hosts`.
        address: the address of its machine; 127.0.0.1 where all workers are on the driver's.
        process: its process number on that machine.
        devices: its devices, as the plan counts them.
    """

    host: int
    address: str
    process: int
    devices: tuple[int, ...]
