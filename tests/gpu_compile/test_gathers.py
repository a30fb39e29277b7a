"""Gathers and other collectives of both passes, as XLA's compiler for GPUs makes them."""

import collections
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sweep
from cells import Cell

pytestmark = pytest.mark.slow
FIXED = "cluster=h100_8 train.precision=bf16 train.global_batch_size=64 model.num_layers=2"
LLAMA = (
    "model=llama model.size=micro model.hidden_size=1024 model.num_heads=16 model.num_kv_heads=8"
    " model.mlp_size=2816 model.sequence_length=1024 model.vocab_size=32000"
)
# With the share of the parameters' bytes in 32 bits that a pass gathers at most.
CELLS = {
    "tied": ("model=gpt model.size=125m parallel=zero3", 0.501),
    "scanned": ("model=gpt model.size=125m parallel=zero3 model.scan_layers=true", 0.501),
    "recomputed": (f"{LLAMA} parallel=zero3 parallel.remat=full", 0.501),
    "three_d": (
        f"{LLAMA} parallel=three_d parallel.data=2 parallel.model=2 parallel.pipeline=2", 0
    ),
    "experts": ("model=moe model.size=380m parallel=shard parallel.data=2 parallel.model=4", 0),
}  # fmt: skip
GRADIENTS = "backward", "all-reduce", "data"  # that are summed once a step, in whichever program


def by_pass(found):
    """Bytes of collectives (pass, kind, axis, bytes), by all else."""
    sums = collections.Counter()
    for *key, size in found:
        sums[tuple(key)] += size
    return sums


@pytest.mark.parametrize(("words", "share"), CELLS.values(), ids=CELLS)
def test_collectives_of_both_passes_are_as_planned(words, share):
    """Also along which axes: a look-up in a table cut along model is summed along it alone."""
    plan, report = sweep.compile_cell(Cell("h100", tuple(f"{FIXED} {words}".split())))
    for number, stage in enumerate(plan.stages):
        planned = by_pass((c.when, c.kind, c.axis, c.bytes) for c in stage.collectives)
        made = by_pass(
            (name.split(".")[2], one.kind, one.axis, one.bytes)
            for program in report.programs
            for name in program.names
            if name.startswith(f"stage.{number}.") and not name.endswith(".last")
            for one in program.collectives
        )
        for when, kind, axis in {*planned, *made} - {GRADIENTS}:
            if when != "update":
                size = planned[when, kind, axis]
                assert made[when, kind, axis] == pytest.approx(size, abs=4096), (when, kind, axis)
        for when in ("forward", "backward"):
            assert made[when, "all-gather", "data"] <= share * 4 * stage.num_parameters
