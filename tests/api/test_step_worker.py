"""What a worker of the Python front does of its own, in this process."""

import jax
import jax.numpy as jnp
import pytest

from launcher.api import step_worker
from launcher.api.calls import Call
from launcher.api.step_worker import StepWorker


def step(state, batch):
    return state + batch, (batch**2).sum()


@pytest.fixture
def worker():
    """With one step compiled, its number 0, and a state, number 0."""
    worker = StepWorker()
    tree = jax.tree.structure(((0, 0),)).children()[0]
    compiled = jax.jit(step, donate_argnums=0)
    worker._programs[0] = step_worker._Compiled(compiled, tree, [])
    worker._arrays[0] = jnp.zeros(3)
    return worker


def test_a_call_waits_for_the_step_before_its_own_and_no_other(worker, monkeypatch):
    """Then none takes longer than two steps, which is what tells that a worker hangs."""
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    for k in range(3):
        call = Call(0, 2 * k + 2, (2 * k, -1), (2 * k,), profile=False)
        worker.run(call, [jnp.ones(3)])
        assert len(waited) == k + 1
    assert waited[0] == []
    assert [list(map(id, arrays)) for arrays in waited[1:]] == [
        [id(worker._arrays[3])],  # the loss: the state is used up
        [id(worker._arrays[5])],
    ]


def test_large_results_that_nobody_wants_are_not_kept(worker):
    worker._arrays[0] = jnp.zeros(2**15)
    worker.run(Call(0, 2, (0, -1), (0,), profile=False), [jnp.ones(2**15)])
    assert [array.shape for array in worker._newest] == [()]
