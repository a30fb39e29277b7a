"""What a worker that stands by has emitted is what it runs once it takes a place."""

import dataclasses
import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import jax
import numpy as np
import pytest

from launcher.config.compose import load, to_dict
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import local_shape
from launcher.runtime.programs import compile as compiling
from launcher.train import worker as module
from launcher.train.program import build_program
from launcher.train.worker import TrainWorker

WORDS = (
    *("model=mlp", "model.hidden_size=8", "dataset=synthetic", "cluster.gpus=2"),
    *("parallel=manual", "parallel.num_stages=2", "parallel.num_micro_batches=2"),
)


def stepped(worker):
    """The loss and the state after a step."""
    worker.create()
    worker.step(1)
    loss = worker.flush().metrics["train/loss"]
    worker.close()
    return loss, worker._state


@functools.cache
def planned():
    """The settings, their plan, and the step of a worker that did not stand by."""
    config, worker = load(WORDS), TrainWorker()
    plan = plan_of(config.parallel, build_program(config).train, local_shape(2, 1, "cpu"))
    worker.build(to_dict(config))
    worker.setup(plan.to_dict())
    return config, plan, stepped(worker)


@pytest.mark.parametrize("anew", ["no", "the plan", "the locality"])
def test_a_place_is_taken_with_what_was_emitted_for_it_alone(monkeypatch, anew):
    config, plan, expected = planned()
    monkeypatch.setattr(module, "on_cpus", nullcontext)  # no other test's arrays are to end
    worker, emitted, emit = TrainWorker(), [], compiling.emit
    monkeypatch.setattr(compiling, "emit", lambda *args: emitted.append(args) or emit(*args))
    place = worker.locality()
    if anew == "the locality":
        place = dataclasses.replace(place, near=frozenset())
    worker.stand_by(plan.to_dict(), place, to_dict(config))
    assert len(emitted) == 2  # of a step and of an evaluation
    if anew == "the plan":
        plan = dataclasses.replace(plan, predicted_step_seconds=1.0)
    worker.setup(plan.to_dict())
    assert len(emitted) == (2 if anew == "no" else 4)
    jax.tree.map(np.testing.assert_array_equal, stepped(worker), expected)


@pytest.mark.parametrize("words", [(), ("parallel=zero3",), ("parallel=shard", "parallel.model=2")])
def test_the_programs_that_are_lowered_ahead_are_those_for_the_devices(monkeypatch, words):
    """Each of them, to the text, so that the compilation cache knows it; none is lowered again."""
    config = load([*WORDS[:4], *(words or WORDS[4:])])
    step = build_program(config).train
    plan = plan_of(config.parallel, step, local_shape(2, 1, "cpu"))
    services = compiling.StepServices(None, None, compiling.SpanRecorder())
    ahead = compiling.lower_ahead(step, plan, compiling.locality_of(jax.devices(), services))
    lowered, lower = {}, compiling._lower
    monkeypatch.setattr(
        compiling, "_lower", lambda name, *a: lowered.setdefault(name, lower(name, *a))
    )
    about = plan, jax.devices(), services
    with ThreadPoolExecutor() as pool:
        compiling.StepCompilation(step, *about, pool).result()
        assert {name: one.digest for name, one in lowered.items()} == {
            name: one.digest for name, one in ahead.lowered.items()
        }
        lowered.clear()
        made = compiling.StepCompilation(step, *about, pool, ahead).result()
    assert not lowered
    assert made.hlo_text()


STANDS_BY = f"""
import jax
from launcher.base.jax_compat import on_cpus
from launcher.config.compose import load, to_dict
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import local_shape
from launcher.runtime import Locality
from launcher.train.program import build_program
from launcher.train.worker import TrainWorker
config = load({WORDS!r})
with on_cpus():
    plan = plan_of(config.parallel, build_program(config).train, local_shape(2, 1, "cpu"))
TrainWorker().stand_by(plan.to_dict(), Locality(0), to_dict(config))
try:
    print(jax.devices()[0].platform)
except (RuntimeError, AssertionError):  # as JAX says it
    print("no GPU is here")
"""


@pytest.mark.slow  # a process of its own
def test_on_gpus_one_that_stands_by_has_asked_for_none():
    """JAX asks for devices once: had it taken CPUs by then, it would have these."""
    environ = {**os.environ, "JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-c", STANDS_BY]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] in ("no GPU is here", "gpu"), result.stdout
