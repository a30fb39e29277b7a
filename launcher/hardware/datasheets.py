"""Read the datasheets of GPUs from `conf/device/`, which named clusters use as well."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import yaml

from launcher.base import CONF


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


# Words that do not tell GPUs apart: the maker, the kind of memory, and the memory of a GH200's CPU.
_COMMON = re.compile(r"NVIDIA|TESLA|HBM\d\w?|120GB|480GB")


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


def _words(name: str) -> list[str]:
    """Return the words of a GPU's name, with SXM4 as SXM and 144G as 144GB."""
    same = re.sub(r"\b(\d+)G\b", r"\1GB", re.sub(r"SXM\d", "SXM", name.upper()))
    return re.findall(r"[A-Z0-9.]+", same)


@functools.cache
def datasheets() -> tuple[Datasheet, ...]:
    """Return all datasheets, sorted by the names of their files."""
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
