"""The cells of the sweep: models, methods and GPUs whose plans are held against XLA's programs.

A cell is a kind of GPU and the words of a command line. They are small in depth alone, since the
compiler's time grows with it: their layers, vocabularies and batches are those of real training.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple


class Cell(NamedTuple):
    """A command line, and the described cluster's kind of GPU.

    Attributes:
        gpu: the kind of GPU that its programs are compiled for: the name of a datasheet.
        words: the settings.
    """

    gpu: str
    words: tuple[str, ...]


# Each family at a real width, and its two depths.
_FAMILIES = {
    "gpt": ("model=gpt model.size=125m train.global_batch_size=64", "model.num_layers={}", 1, 2),
    "bert": ("model=bert model.size=base train.global_batch_size=128", "model.num_layers={}", 2, 4),
    "llama": (
        "model=llama model.size=micro model.hidden_size=1024 model.num_heads=16"
        " model.num_kv_heads=8 model.mlp_size=2816 model.sequence_length=1024"
        " model.vocab_size=32000 train.global_batch_size=64",
        "model.num_layers={}",
        1,
        2,
    ),
    "moe": ("model=moe model.size=380m train.global_batch_size=64", "model.num_layers={}", 2, 4),
    "vit": ("model=vit model.size=base train.global_batch_size=256", "model.num_layers={}", 2, 4),
    "resnet": (
        "model=resnet model.size=resnet18 train.global_batch_size=256",
        "model.depth={}",
        10,
        18,
    ),
    "wide_resnet": (
        "model=wide_resnet model.size=250m train.global_batch_size=128",
        "model.depth={}",
        14,
        26,
    ),
    "unet": ("model=unet model.size=small train.global_batch_size=512", "model.blocks={}", 1, 2),
    "mlp": (
        "model=mlp model.hidden_size=4096 model.input_size=1024 model.output_size=1024"
        " train.global_batch_size=65536",
        "model.num_layers={}",
        4,
        8,
    ),
    "toy": (
        "model=toy model.hidden_size=2048 model.input_size=512 model.output_size=128"
        " train.global_batch_size=32768",
        "model.num_layers={}",
        4,
        8,
    ),
}
_METHODS = {
    "data": "parallel=data",
    "zero2": "parallel=zero2",
    "zero3": "parallel=zero3",
    "shard": "parallel=shard parallel.data=2 parallel.model=4",
    "manual": "parallel=manual parallel.num_stages=2 parallel.num_micro_batches=4",
    "three_d": "parallel=three_d parallel.data=2 parallel.model=2 parallel.pipeline=2",
}
_SCHEDULES = ("gpipe", "eager_1f1b", "zero_bubble")
_INTERLEAVED = "parallel.schedule=interleaved_1f1b parallel.num_stages=4 parallel.stages_per_mesh=2"
_CLUSTERS = {
    "h100": "cluster=h100_8",
    "a100": "cluster=a100_8",
    "b200": "cluster=b200_8",
    "v100": "cluster=p3_16xlarge",
    "l40s": "cluster=h100_8",  # no cluster of theirs has a name
}


def cells() -> Iterator[Cell]:
    """Yield the cells: families x methods x precisions, then remat, schedules, scans and GPUs.

    Two stages need the larger of the two depths.
    """
    every = itertools.product(_FAMILIES, _METHODS, ("bf16", "fp32"))
    for k, (family, method, precision) in enumerate(every):
        yield _cell(family, method, precision, deep=k % 2 == 1 or method == "manual")
    for family, method in itertools.product(("gpt", "bert", "llama", "vit"), ("data", "manual")):
        for remat in ("selective", "full"):
            yield _cell(family, method, "bf16", True, f"parallel.remat={remat}")
    for family, schedule in itertools.product(("gpt", "bert", "mlp"), _SCHEDULES):
        yield _cell(family, "manual", "bf16", True, f"parallel.schedule={schedule}")
    for family in ("bert", "mlp"):
        yield _cell(family, "manual", "bf16", True, _INTERLEAVED)
    for family, method in itertools.product(("gpt", "bert", "llama"), ("data", "zero3", "manual")):
        yield _cell(family, method, "bf16", True, "model.scan_layers=true")
    for family in ("gpt", "bert", "vit", "resnet", "mlp"):
        for gpu in _CLUSTERS:
            if gpu != "h100":
                yield _cell(family, "data", "bf16", True, gpu=gpu)


def _cell(
    family: str, method: str, precision: str, deep: bool, more: str = "", gpu: str = "h100"
) -> Cell:
    fixed, layers, *depths = _FAMILIES[family]
    words = (
        fixed,
        layers.format(depths[deep]),
        _CLUSTERS[gpu],
        f"train.precision={precision}",
        _METHODS[method],
        more,
    )
    return Cell(gpu, tuple(" ".join(words).split()))
