"""What needs the whole batch: a denominator is computed once, before the pipeline; examples that
see one another cost the collectives that their layers take, and no more."""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest
from programs import test_losses
from programs.pieces import batch, losses, of_loss
from programs.program import DEVICES, METHODS, ROWS, check

import launcher
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import Run
from launcher.trace import trace_step


def masked(p, b):
    return (losses(p, b) * b["mask"]).sum() / b["mask"].sum()


def masks_of_whole_numbers(k):
    """A slice of four, another one at each step, has no weight."""
    mask = np.ones(ROWS, np.int32)
    mask[4 * k : 4 * k + 4], mask[14 - k :] = 0, 0
    return {**batch(k), "mask": mask}


MASKED = dataclasses.replace(of_loss(masked), batch=masks_of_whole_numbers)


def compiled(program, method):
    step = launcher.parallelize(
        program.build(launcher.value_and_grad),
        method=METHODS[method],
        devices=jax.devices()[:DEVICES],
    )
    return step.executable(program.init(), program.batch(0))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("method", ["stages", *(m for m in METHODS if m != "stages")])
def test_a_slice_without_weight_changes_nothing(method):
    check(MASKED, method, rtol=1e-6)


@pytest.mark.parametrize("method", ["data", "stages"])
def test_the_sum_of_the_mask_is_computed_once(method):
    """It is the only sum of whole numbers: of one program, which runs once a step, before all
    tasks of the pipeline."""
    executable = compiled(MASKED, method)
    texts = executable.hlo_text()
    sums = {name: len(re.findall(r"= s32\[\] reduce\(", text)) for name, text in texts.items()}
    assert {name: count for name, count in sums.items() if count} == {"before.0": 1}
    traced = trace_step(MASKED.build(launcher.value_and_grad), (MASKED.init(), MASKED.batch(0)))
    runs = [x for x in emit(traced, executable.plan).instructions if isinstance(x, Run)]
    programs = [run.program for run in runs]
    assert programs.count("before.0") == 1
    assert programs.index("before.0") < min(i for i, run in enumerate(runs) if run.task)
    assert (
        len({run.task.microbatch for run in runs if run.task}) == METHODS[method].num_micro_batches
    )


KINDS = "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"
CALL = re.compile(rf"= (\w+\[[\d,]*\])\S* ({'|'.join(KINDS)})(?:-start)?\(")


@pytest.mark.parametrize("name", ["contrastive", "batch norm"])
def test_examples_that_see_one_another_take_one_all_reduce(name):
    """Four devices share the whole batch: the first layer is cut by columns and the second by rows,
    whose products are summed. Each device then has all outputs, and joins them by itself."""
    executable = compiled(test_losses.PROGRAMS[name], "data")
    assert executable.plan.stages[0].logical_mesh == (1, DEVICES)
    found = {
        program: collections.Counter(CALL.findall(text))
        for program, text in executable.hlo_text().items()
    }
    assert {program: dict(calls) for program, calls in found.items() if calls} == {
        "stage.0.forward_backward": {(f"f32[{ROWS},4]", "all-reduce"): 1}
    }
    check(test_losses.PROGRAMS[name], "data")
