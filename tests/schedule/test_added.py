"""A schedule is one class: whoever adds one edits nothing else."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import launcher
from launcher import schedule
from launcher.schedule import SCHEDULES, Kind, Schedule, Task, register

SOURCES = Path(launcher.__file__).parent


@pytest.fixture
def fifo():
    """GPipe whose backward passes come in the order of the forward passes."""

    @register
    class Fifo(Schedule):
        name = "fifo"

        def order(self, mesh, num_meshes, num_micro_batches, stages_per_mesh):
            kinds = Kind.FORWARD, Kind.BACKWARD
            return [Task(mesh, m, kind) for kind in kinds for m in range(num_micro_batches)]

    yield Fifo.name
    del SCHEDULES[Fifo.name]


def loss(params, batch):
    hidden = batch["x"]
    for i, layer in enumerate(params):
        if i:
            launcher.mark_pipeline_boundary()
        hidden = jnp.tanh(hidden @ layer)
    return jnp.mean((hidden - batch["y"]) ** 2)


def step(params, batch):
    value, grads = launcher.value_and_grad(loss)(params, batch)
    return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads)), value


@pytest.mark.devices
def test_a_schedule_of_the_users_own_trains_as_one_device_does(fifo):
    method = launcher.PipeshardParallel(num_micro_batches=4, schedule=fifo)
    parallel = launcher.parallelize(step, method=method, devices=jax.devices()[:2])
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(key, (8, 8)) / 3 for key in keys[:2]]
    batch = {"x": jax.random.normal(keys[2], (16, 8)), "y": jax.random.normal(keys[3], (16, 8))}
    want, serial = jax.tree.map(jnp.copy, params), jax.jit(step)  # the parallel step donates
    for _ in range(3):
        params, value = parallel(params, batch)
        want, expected = serial(want, batch)
        assert float(value) == pytest.approx(float(expected), rel=1e-5)


def test_no_schedule_is_compared_by_its_name():
    """Outside of its own file each is known by what its class says."""
    names = "|".join(name for name in SCHEDULES if SCHEDULES[name].trains)
    word = re.compile(rf"[\"\']({names})[\"\']")
    own = Path(schedule.__file__).parent
    named = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for path in SOURCES.rglob("*.py")
        if own not in path.parents
        for line in path.read_text().splitlines()
        if word.search(line)
    ]
    assert named == []
