"""Datasheets of GPUs, from `conf/device/`, where named clusters take them as well."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import yaml

from launcher.conf_folder import CONF


@dataclass(frozen=True)
class Datasheet:
    """One kind of GPU.

    Attributes:
        name: model, form factor and memory, such as H100-SXM5-80GB.
        peak_flops: dense FLOP/s in 16 bit.
        peak_flops_fp32: dense FLOP/s in 32 bit, as JAX computes it.
        sustained: the share of the peak that large matrix products reach inside a training step.
        memory_gib: its memory.
        memory_bandwidth: bytes/s.
        link: bytes/s one way, from device to device on a host.
    """

    name: str
    peak_flops: float
    peak_flops_fp32: float
    sustained: float
    memory_gib: int
    memory_bandwidth: float
    link: float


def find_datasheet(device_kind: str) -> Datasheet | None:
    """Returns the datasheet of a GPU, as JAX or nvidia-smi names it; None where there is none.

    Of several of one model it is the one with the memory and the form factor that are named, which
    may not be there (H200) or be another memory's (GH200 480GB), and else the first.
    """
    kind = device_kind.upper()
    sizes = {int(size) for size in re.findall(r"(\d+) ?GB?\b", kind)}

    def fit(sheet: Datasheet) -> tuple[int, bool, bool]:
        model, form, _ = sheet.name.upper().split("-")
        return len(model), sheet.memory_gib in sizes, form in kind

    found = [sheet for sheet in datasheets() if sheet.name.upper().partition("-")[0] in kind]
    return max(found, key=fit, default=None)


@functools.cache
def datasheets() -> tuple[Datasheet, ...]:
    """Returns all datasheets, sorted by the names of their files."""
    files = sorted((CONF / "device").glob("*.yaml"), key=lambda file: file.stem)
    trees = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]
    return tuple(
        Datasheet(
            name=device["name"],
            peak_flops=device["peak_tflops"] * 1e12,
            peak_flops_fp32=device["peak_tflops_fp32"] * 1e12,
            sustained=device["sustained"],
            memory_gib=device["memory_gib"],
            memory_bandwidth=device["memory_gb_per_second"] * 1e9,
            link=links["intra_host_gb_per_second"] * 1e9,
        )
        for device, links in ((tree["device"], tree["links"]) for tree in trees)
    )
