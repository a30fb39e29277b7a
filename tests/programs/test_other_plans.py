"""Steps of the table by further plans, and a plan's notes on them."""

import itertools
import re

import jax
import pytest
from programs.program import DEVICES, METHODS, TWO_STAGES, check
from programs.table import PROGRAMS

import launcher

TWO = {"num_micro_batches": 2}
OTHER = {
    "data, 2": launcher.DataParallel(**TWO),
    "zero2, 2": launcher.Zero2Parallel(**TWO),
    "zero3, 2": launcher.Zero3Parallel(**TWO),
    "three_d": launcher.ThreeDParallel(data=2, pipeline=2, **TWO),
    "remat": launcher.PipeshardParallel(stage_option=TWO_STAGES, remat="full", **TWO),
    "zero_bubble": launcher.PipeshardParallel(4, stage_option=TWO_STAGES, schedule="zero_bubble"),
}
NAMES = [name for name, program in PROGRAMS.items() if not program.refused]


@pytest.mark.sampled(199)
@pytest.mark.parametrize(("name", "method"), [*itertools.product(NAMES, OTHER)])
def test_a_program_by_another_plan(monkeypatch, name, method):
    monkeypatch.setitem(METHODS, method, OTHER[method])
    check(PROGRAMS[name], method)


def test_a_plan_tells_what_needs_the_whole_batch():
    """By the line of the program."""

    def plan(name, method):
        program = PROGRAMS[f"losses: {name}"]
        devices = jax.devices()[:DEVICES]
        build = program.build(launcher.value_and_grad)
        step = launcher.parallelize(build, method=METHODS[method], devices=devices)
        return step.plan(program.init(), program.batch(0))

    joined = plan("contrastive", "data")
    assert [stage.logical_mesh for stage in joined.stages] == [(1, DEVICES)]
    assert re.fullmatch(
        r"devices share the whole batch instead of cutting it into replicas, since dot_general at "
        r".*test_losses\.py:\d+.* joins examples",
        joined.notes[0],
    )
    assert re.fullmatch(
        r"sum over the examples; computed on the whole batch: reduce_sum at .*test_losses\.py.*",
        plan("masked mean", "stages").loss,
    )
