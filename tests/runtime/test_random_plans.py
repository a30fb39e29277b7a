"""Plans drawn at random can be followed, and compute what one device computes."""

import sys
import threading
from pathlib import Path

import jax
import pytest

from launcher.plan import Plan, local_shape
from launcher.runtime import compile_step
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import Free, Run
from launcher.trace import trace_step

sys.path.insert(0, str(Path(__file__).parent))
from plans import at_random
from trainings import assert_same, run, serial, training

SECONDS = 200  # a plan that takes longer hangs
STEP, INIT, BATCHES = training("chain")


@pytest.fixture(scope="module")
def traced():
    return trace_step(STEP, (jax.eval_shape(INIT, jax.random.key(0)), BATCHES[0]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[] if s < 3 else [pytest.mark.stress]) for s in range(30)]
)
def test_a_random_plan_computes_what_one_device_does(traced, seed):
    plan = at_random(traced, seed, local_shape(8, 1, "cpu"))
    assert Plan.from_dict(plan.to_dict()) == plan
    plan.validate(traced)
    found = []

    def follow():
        executable = compile_step(traced, plan, jax.devices())
        found.append(run(executable, executable.create(INIT, jax.random.key(0)), BATCHES))

    thread = threading.Thread(target=follow, daemon=True)  # a hang must not keep pytest
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "the plan hangs"
    assert found, "the plan fails, see the thread's traceback"
    assert_same(found[0], serial("chain"))


@pytest.mark.parametrize("seed", range(100, 106))
def test_nothing_waits_for_what_comes_later(traced, seed):
    """Every process follows its part of one list in which each value is made before it is used, so
    that no two can wait for each other."""
    emitted = emit(traced, at_random(traced, seed, local_shape(8, 2, "cpu")))
    ready = {slot for _, slot in (*emitted.arguments, *emitted.constants)}
    ready |= {slot for _, slot, _ in emitted.batches}
    for x in emitted.instructions:
        if isinstance(x, Free):
            assert ready.issuperset(x.slots)
            ready.difference_update(x.slots)
            continue
        assert ready.issuperset(x.inputs)
        in_place = set(x.inputs) if isinstance(x, Run) else set()
        assert not ready.intersection(set(x.outputs) - in_place)
        ready.update(x.outputs)
    assert ready >= {slot for slot, _, _ in emitted.results if slot is not None}
