"""Read the datasheets of GPUs from `conf/device/`, which named clusters use as well."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from launcher.base import CONF

_BF16_SINCE = 8.0  # Ampere; before, XLA computes products of bf16 in fp32
COMPILER_KEYS = ("compute_capability", "multiprocessors", "clock_ghz", "l2_mib")


@dataclass(frozen=True)
class Datasheet:
    """One kind of GPU.

    Attributes:
        name: model, form factor and memory, such as H100-SXM5-80GB.
        peak_flops: dense FLOP/s in 16 bit, whichever kind is faster.
        peak_flops_fp32: dense FLOP/s in 32 bit, as JAX computes it.
        sustained: the share of the peak that large matrix products reach inside a training step.
        sustained_attention: the same of fused attention.
        launch_seconds: seconds that a host takes to launch a product and the kernels around it.
        memory_gib: its memory.
        memory_bandwidth: bytes/s.
        link: bytes/s one way, from device to device on a host.
        source: the file that says all this.
        compute_capability: NVIDIA's number of what it can compute, such as 9.0; None: not said, as
            those below, which the compiler has to know (`target_config`).
        multiprocessors: how many it has.
        clock_ghz: its highest clock.
        l2_mib: its L2 cache.
    """

    name: str
    peak_flops: float
    peak_flops_fp32: float
    sustained: float
    sustained_attention: float
    launch_seconds: float
    memory_gib: float
    memory_bandwidth: float
    link: float
    source: str
    compute_capability: float | None
    multiprocessors: int | None
    clock_ghz: float | None
    l2_mib: float | None


# Words that do not tell GPUs apart: the maker, the kind of memory, and the memory of a GH200's CPU.
_COMMON = re.compile(r"NVIDIA|TESLA|GEFORCE|HBM\d\w?|120GB|480GB")


def find_datasheet(device_kind: str) -> Datasheet | None:
    """Return the datasheet of a GPU by its name, as JAX, nvidia-smi, Ray or Slurm gives it.

    The datasheet has to account for every word of the name, so that a GPU of another form factor or
    memory, or a slice of one, is not taken for it. Of several, the first one is returned; of none,
    None.
    """
    words = _words(device_kind)
    model_and_form = {word for word in words if not _COMMON.fullmatch(word)}
    for sheet in datasheets():
        named = _words(sheet.name)
        if named[0] in words and model_and_form.issubset(named):
            return sheet
    return None


def has_bf16(compute_capability: float | None) -> bool:
    """Return whether GPUs of a compute capability compute products of bf16 as such.

    Devices of which it is not known do.
    """
    return compute_capability is None or compute_capability >= _BF16_SINCE


def _words(name: str) -> list[str]:
    """Return the words of a GPU's name, with SXM4 as SXM, 144G as 144GB and RTX 4090 as RTX4090."""
    same = re.sub(r"SXM\d", "SXM", name.upper().replace("_", "-"))
    same = re.sub(r"\b(\d+)G\b", r"\1GB", same)
    return re.findall(r"[A-Z0-9.]+", re.sub(r"\bRTX[ -](?=\d)", "RTX", same))


@functools.cache
def datasheets() -> tuple[Datasheet, ...]:
    """Return all datasheets, sorted by the names of their files."""
    files = sorted((CONF / "device").glob("*.yaml"), key=lambda file: file.stem)
    trees = ((file.name, yaml.safe_load(file.read_text(encoding="utf-8"))) for file in files)
    return tuple(
        _datasheet(tree["device"], tree["links"], f"conf/device/{name}") for name, tree in trees
    )


def described_sheet(device: Mapping[str, Any], links: Mapping[str, Any], source: str) -> Datasheet:
    """Return the datasheet of a described cluster's devices.

    What only the compiler has to know may be None: it is then that of the kind, if its name is
    known.

    Args:
        device: the values of the keys below `device`, as in `conf/device/`.
        links: of those below `links`.
        source: where they stand.
    """
    known = find_datasheet(device["name"])
    of_kind = {key: getattr(known, key, None) for key in COMPILER_KEYS if device[key] is None}
    return _datasheet({**device, **of_kind}, links, source)


def _datasheet(device: Mapping[str, Any], links: Mapping[str, Any], source: str) -> Datasheet:
    peak = device["peak_tflops"] * 1e12
    single = device.get("peak_tflops_fp32")
    return Datasheet(
        name=device["name"],
        peak_flops=peak,
        peak_flops_fp32=single * 1e12 if single else peak / 2,
        sustained=device["sustained"],
        sustained_attention=device["sustained_attention"],
        launch_seconds=device["launch_us"] * 1e-6,
        memory_gib=device["memory_gib"],
        memory_bandwidth=device["memory_gb_per_second"] * 1e9,
        link=links["intra_host_gb_per_second"] * 1e9,
        source=source,
        **{key: device.get(key) for key in COMPILER_KEYS},
    )
