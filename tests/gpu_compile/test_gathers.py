"""Gathers of parameters sharded along data, in the programs that XLA makes for GPUs, as planned."""

import collections
import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sweep
from cells import Cell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("jax_plugins")
        or not importlib.util.find_spec("jax_plugins.xla_cuda12"),
        reason="XLA's compiler for NVIDIA GPUs is not installed: pip install '.[plan-cuda]'",
    ),
]
FIXED = "cluster=h100_8 train.precision=bf16 train.global_batch_size=64 model.num_layers=2"
LLAMA = (
    "model=llama model.size=micro model.hidden_size=1024 model.num_heads=16 model.num_kv_heads=8"
    " model.mlp_size=2816 model.sequence_length=1024 model.vocab_size=32000"
)
CELLS = {
    "tied": ("model=gpt model.size=125m parallel=zero3", 0.51),
    "scanned": ("model=gpt model.size=125m parallel=zero3 model.scan_layers=true", 0.51),
    "recomputed": (f"{LLAMA} parallel=zero3 parallel.remat=full", 0.51),
    "three_d": (
        f"{LLAMA} parallel=three_d parallel.data=2 parallel.model=2 parallel.pipeline=2", 0
    ),
}  # fmt: skip


def by_pass(found):
    """Bytes by pass, kind and axis, of (pass, kind, axis, bytes)."""
    sums = collections.Counter()
    for when, kind, axis, size in found:
        sums[when, kind, axis] += size
    return sums


@pytest.mark.parametrize(("words", "share"), CELLS.values(), ids=CELLS)
def test_what_is_gathered_is_as_planned(words, share):
    """As many bytes as planned, and not more than this share of what the pass reads in fp32."""
    plan, report = sweep.compile_cell(Cell("h100", tuple(f"{FIXED} {words}".split())))
    for number, stage in enumerate(plan.stages):
        planned = by_pass((c.when, c.kind, c.axis, c.bytes) for c in stage.collectives)
        made = by_pass(
            (name.split(".")[2], one.kind, one.axis.partition(" ")[0], one.bytes)
            for program in report.programs
            for name in program.names[:1]
            if name.startswith(f"stage.{number}.") and not name.endswith(".last")
            for one in program.collectives
        )
        whole = 4 * stage.num_parameters
        for when in ("forward", "backward"):
            gathers = when, "all-gather", "data"
            assert made[gathers] == planned[gathers] <= share * whole
