"""Find the devices of this machine: its GPUs, or emulated CPU devices in their place.

Neither JAX nor CUDA is loaded into this process: the driver plans on a machine whose devices belong
to the workers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from launcher.base import installing
from launcher.config.cluster import Cluster
from launcher.config.errors import ConfigError

STAND_INS = 4  # emulated devices unless the user asks for a number
_MOST_STAND_INS = 64  # for cluster=local: more is a slip, or meant for another machine
EMULATED = "emulated CPU device"

# CUDA itself enumerates the GPUs, so that its own rules hold (CUDA_VISIBLE_DEVICES by index or
# UUID, MIG, containers); in a process of its own, so that the driver opens no GPU.
_PROBE = """
import ctypes, json
names, capabilities, problem = [], [], ""
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    code = cuda.cuInit(0)
    if code == 0:
        count, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
        cuda.cuDeviceGetCount(ctypes.byref(count))
        for device in range(count.value):
            cuda.cuDeviceGetName(name, 256, device)
            names.append(name.value.decode())
            version = []
            for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
                cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
                version.append(number.value)
            capabilities.append(float("{}.{}".format(*version)))
    elif code != 100:  # CUDA_ERROR_NO_DEVICE: none, or all hidden
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        problem = f"CUDA error {code}, {(text.value or b'unknown').decode()}"
except OSError as error:
    problem = str(error)
print(json.dumps({"names": names, "problem": problem, "capabilities": capabilities}))
"""


@dataclass(frozen=True)
class DevicePool:
    """The devices of a run: `hosts` processes with `devices_per_host` each.

    Attributes:
        kind: "gpu" or "cpu".
        hosts: the number of processes.
        devices_per_host: the number of devices of each.
        device_name: the model of the devices.
        note: one line about them for the user.
        gpu_ids: one CUDA_VISIBLE_DEVICES entry a GPU, in order; empty for CPU devices, and if each
            host chooses its own GPUs.
        compute_capability: the least that CUDA says of the GPUs; None where it was not asked.
        count_flag: of XLA, for the number of emulated devices.
    """

    count_flag: ClassVar[str] = "--xla_force_host_platform_device_count"
    kind: str  # "gpu" | "cpu"
    hosts: int
    devices_per_host: int
    device_name: str
    note: str
    gpu_ids: tuple[str, ...] = ()
    compute_capability: float | None = None

    @property
    def device_kind(self) -> str:
        """The devices' kind, as the planner names it: "cpu", or the GPUs' model."""
        return "cpu" if self.kind == "cpu" else self.device_name

    @property
    def num_devices(self) -> int:
        """The number of devices of all hosts."""
        return self.hosts * self.devices_per_host


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process may use, and why JAX cannot use them.

    Attributes:
        names: the model of each GPU.
        problem: why JAX cannot use them; "" if it can.
        capabilities: the compute capability of each GPU.
    """

    names: tuple[str, ...] = ()
    problem: str = ""
    capabilities: tuple[float, ...] = ()

    @property
    def usable(self) -> tuple[str, ...]:
        """The models of the GPUs that JAX can use."""
        return () if self.problem else self.names

    def least_capability(self, wanted: int) -> float | None:
        """Return the least compute capability of the first `wanted` GPUs; None: not known."""
        return None if self.problem else min(self.capabilities[:wanted], default=None)


def emulated_pool(cluster: Cluster) -> DevicePool:
    """Return emulated CPU devices, spread evenly over `cluster.hosts` processes.

    Raises:
        ConfigError: they cannot be spread evenly.
    """
    total = cluster.gpus or STAND_INS
    if total % cluster.hosts:
        raise ConfigError(
            f"cluster.gpus={total} cannot be divided over cluster.hosts={cluster.hosts}",
            f"cluster.gpus is the total number: set it to a multiple of {cluster.hosts}.",
            ("cluster.gpus", "cluster.hosts"),
        )
    spread = f" on {cluster.hosts} emulated hosts" if cluster.hosts > 1 else ""
    return DevicePool(
        kind="cpu",
        hosts=cluster.hosts,
        devices_per_host=total // cluster.hosts,
        device_name=EMULATED,
        note=f"{count(total, EMULATED)}{spread}, as asked",
    )


def local_pool(cluster: Cluster, gpus: Gpus, visible: str | None) -> DevicePool:
    """Return this machine's GPUs, or as many CPU devices as asked for if it has no usable GPU.

    Args:
        cluster: the settings.
        gpus: the GPUs of this machine.
        visible: the value of CUDA_VISIBLE_DEVICES under which `gpus` were counted.

    Raises:
        ConfigError: the settings ask for more GPUs than there are.
    """
    usable = len(gpus.usable)
    if not usable:
        return _stand_ins(cluster.gpus, gpus)
    wanted = cluster.gpus or usable
    if wanted > usable:
        raise ConfigError(
            f"cluster.gpus={wanted}, but this machine has {count(usable, 'GPU')}",
            f"Set cluster.gpus={usable} or less, or cluster=emulated for CPU devices in their "
            "place.",
            ("cluster.gpus",),
        )
    name = ", ".join(dict.fromkeys(gpus.names[:wanted]))
    return DevicePool(
        kind="gpu",
        hosts=1,
        devices_per_host=wanted,
        device_name=name,
        note=f"{count(wanted, 'GPU')}: {name}",
        gpu_ids=_first_ids(visible, wanted),
        compute_capability=gpus.least_capability(wanted),
    )


def visible_gpus(cluster: Cluster, environ: Mapping[str, str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for one node of a job: as many of its GPUs as the run uses.

    Raises:
        ConfigError: the node has fewer GPUs.
    """
    assert cluster.gpus is not None
    per_host = cluster.gpus // cluster.hosts
    node_gpus(find_gpus(environ), per_host)
    return ",".join(_first_ids(environ.get("CUDA_VISIBLE_DEVICES"), per_host))


def _first_ids(visible: str | None, count: int) -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES for the first GPUs of those that it shows.

    CUDA stops at the first entry that it does not know, so the entries it took are the first ones.
    """
    ids = visible.split(",") if visible else map(str, range(count))
    return tuple(entry.strip() for entry in ids)[:count]


def node_gpus(gpus: Gpus, wanted: int) -> tuple[str, ...]:
    """Return the names of the first `wanted` GPUs of this node of a job.

    Raises:
        ConfigError: the node has fewer GPUs.
    """
    if len(gpus.usable) < wanted:
        node = os.environ.get("SLURMD_NODENAME", "this node")
        reason = f": {gpus.problem}" if gpus.problem else ""
        raise ConfigError(
            f"{node} gives this job {count(len(gpus.names), 'GPU')}, but {wanted} are needed on "
            f"each node{reason}",
            "Set cluster.gpus to what the nodes have in total, or cluster.slurm.emulated=true for "
            "CPU devices.",
            ("cluster.gpus",),
        )
    return gpus.names[:wanted]


def _stand_ins(asked: int | None, gpus: Gpus) -> DevicePool:
    total = asked or STAND_INS
    if gpus.problem and gpus.names:
        reason = f"{count(len(gpus.names), 'GPU')} here ({gpus.names[0]}), but {gpus.problem}"
        if asked:
            raise ConfigError(
                f"cluster.gpus={asked}: {reason}",
                f"Fix that, or set cluster=emulated for {count(asked, EMULATED)}.",
                ("cluster.gpus",),
            )
    else:
        reason = f"no GPU to use here ({gpus.problem})" if gpus.problem else "no GPU here"
    if total > _MOST_STAND_INS:
        raise ConfigError(
            f"cluster.gpus={total}, but there is {reason}, and at most {_MOST_STAND_INS} emulated "
            "CPU devices stand in",
            f"Set cluster.gpus={_MOST_STAND_INS} or less; to plan for a cluster that is not here, "
            "describe it (task=plan cluster=h100_8_x16).",
            ("cluster.gpus",),
        )
    verb = "stands" if total == 1 else "stand"
    return DevicePool(
        kind="cpu",
        hosts=1,
        devices_per_host=total,
        device_name=EMULATED,
        note=f"{reason}: {count(total, EMULATED)} {verb} in",
    )


def find_gpus(environ: Mapping[str, str]) -> Gpus:
    """Return the GPUs that CUDA shows to a process of `environ`, and whether JAX can use them."""
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg")):
        return Gpus()
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return Gpus(problem=f"JAX_PLATFORMS={platforms} hides them")
    try:
        probe = subprocess.run(
            [sys.executable, "-I", "-c", _PROBE],
            capture_output=True,
            check=True,
            timeout=60,
            env=dict(environ),
        )
    except (subprocess.SubprocessError, OSError) as error:
        return Gpus(problem=f"CUDA could not be queried: {type(error).__name__}")
    answer = json.loads(probe.stdout.splitlines()[-1])
    names, problem = tuple(answer["names"]), answer["problem"]
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if names and not any(importlib.util.find_spec(plugin) for plugin in plugins):
        problem = f"JAX has no CUDA plugin ({installing('jax_cuda12_plugin')})"
    return Gpus(names, problem, tuple(answer["capabilities"]))


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "2 GPUs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
