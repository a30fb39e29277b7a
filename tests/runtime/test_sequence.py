"""Stages that cut the data along its sequence train as one device does, beside stages that cut the
parameters, and communicate as their plan says."""

import collections

import jax
import pytest
from collective_counts import collectives
from trainings import assert_same, run, serial, training

from launcher.partition.assignment import Assignment, Submesh
from launcher.plan import local_shape
from launcher.plan.build import build_plan
from launcher.runtime import compile_step
from launcher.trace import trace_step


def planned(name, meshes, sequence, num_micro_batches):
    """A GPT, cut into a stage for each logical mesh."""
    step, init, batches = training(name)
    traced = trace_step(step, (jax.eval_shape(init, jax.random.key(0)), batches[0]))
    count, layers = len(meshes), traced.loss(1).num_layers
    submeshes, first = [], 0
    for data, model in meshes:
        submeshes.append(Submesh(tuple(range(first, first + data * model)), (data, model)))
        first += data * model
    assignment = Assignment(
        method="auto",
        layers=tuple(
            tuple(range(layers * s // count, layers * (s + 1) // count)) for s in range(count)
        ),
        submeshes=tuple(submeshes),
        mesh_of=tuple(range(count)),
        num_micro_batches=num_micro_batches,
        schedule="1f1b",
        remat=("none",) * count,
        sequence=sequence,
    )
    return traced, build_plan(traced, assignment, local_shape(8, 1, "cpu"))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "meshes", "sequence", "num_micro_batches"),
    [
        ("gpt_short", [(1, 2), (1, 2)], (True, False), 2),
        ("gpt_short", [(1, 2)], (True,), 1),
        ("gpt_tied", [(2, 2), (1, 4)], (True, True), 2),
    ],
)
def test_a_sequence_that_is_cut_trains_as_a_whole_one(name, meshes, sequence, num_micro_batches):
    _, init, batches = training(name)
    traced, plan = planned(name, meshes, sequence, num_micro_batches)
    for stage, cut in zip(plan.stages, sequence, strict=True):
        assert ("model" in stage.shardings.get("1.tokens", ())) == cut
    executable = compile_step(traced, plan, jax.devices())
    state = executable.create(init, jax.random.key(0))
    assert_same(run(executable, state, batches), serial(name))
    found, wanted = collections.Counter(), collections.Counter()
    for name, text in executable.hlo_text().items():
        if name.startswith("stage."):
            found.update(kind for kind, _ in collectives(text))
    for one in (c for stage in plan.stages for c in stage.collectives if c.when != "update"):
        # XLA makes an all-reduce and a slice of a reduce-scatter, at least on CPUs.
        wanted["all-reduce" if one.kind == "reduce-scatter" else one.kind] += one.count
    assert found == wanted
