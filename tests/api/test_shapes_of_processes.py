"""One training whatever the shape of the processes: 1 × 4 devices in this process and (slow) 2 × 2
and 4 × 1 on workers, each a session for the module. The last tests stop workers."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from runtime import test_buckets as buckets

import launcher
from launcher.api.session import current

WIDTH = 8
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
SHAPES = {"1x4": None, "2x2": (2, 2), "4x1": (4, 1)}
SLOWER = {"2x2": pytest.mark.slow, "4x1": pytest.mark.stress}

ON_TWO_BY_TWO = pytest.mark.parametrize(
    "shape",
    [pytest.param("2x2", marks=pytest.mark.slow)],
    indirect=True,
    scope="module",
)


@pytest.fixture(
    scope="module",
    params=["1x4", *(pytest.param(shape, marks=mark) for shape, mark in SLOWER.items())],
)
def shape(request: pytest.FixtureRequest) -> Iterator[str]:
    if (of := SHAPES[request.param]) is None:
        launcher.init("local", num_devices_per_node=4)
    else:
        launcher.init("ray", num_nodes=of[0], num_devices_per_node=of[1], step_timeout=60)
    yield request.param
    launcher.shutdown()


def init(key):
    first, second = jax.random.normal(key, (2, WIDTH, WIDTH)) / 3
    return {"first": first, "second": second}


def loss(params, x):
    h = jnp.tanh(x @ params["first"])
    return jnp.mean((h @ params["second"] - x) ** 2)


def gradients(params, x):
    return launcher.value_and_grad(loss)(params, x)


def apply(params, grads):
    return jax.tree.map(jnp.subtract, params, grads)  # descent of rate 1


def step(params, x):
    value, grads = gradients(params, x)
    return apply(params, grads), value


def fused(**settings):
    """A whole step, by data parallelism."""
    train = launcher.parallelize(step, method=launcher.DataParallel(**settings))
    return lambda: train(start(train), X)


def apart(in_the_driver=False):
    """Gradients that one function takes, and another one or this process applies."""
    taken = launcher.parallelize(gradients, donate_argnums=())
    used = launcher.parallelize(apply, method=taken)

    def run():
        params = start(taken)
        value, grads = taken(params, X)
        if in_the_driver:
            return apply(*jax.device_get((params, grads))), value
        return used(params, grads), value

    return run


def start(train):
    return train.create(init, jax.random.key(0), like=X)


WAYS = {
    "data": fused,
    "four microbatches": lambda: fused(num_micro_batches=4),
    "a bucket a gradient": lambda: fused(num_micro_batches=2, bucket_bytes=0),
    "by hand": apart,
    "by the driver's hand": lambda: apart(in_the_driver=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_rate_one_is_that_of_one_device_to_the_bit_each_time(shape, way):
    params = init(jax.random.key(0))
    expected, value = jax.jit(step)(params, X)
    run = WAYS[way]()
    once, again = (jax.device_get(run()) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    np.testing.assert_allclose(once[1], value, rtol=1e-6)
    for name in params:
        moved = once[0][name] - params[name]
        np.testing.assert_allclose(moved, expected[name] - params[name], rtol=1e-4, atol=1e-6)


@ON_TWO_BY_TWO
@pytest.mark.parametrize("method", [launcher.DataParallel, launcher.Zero2Parallel])
def test_processes_of_one_machine_sum_in_memory_that_they_share(shape, method):
    """No program does; in one process programs sum, see `tests/runtime/test_buckets.py`."""
    train = launcher.parallelize(buckets.step, method=method(bucket_bytes=buckets.TWO))
    state = jax.eval_shape(buckets.init, jax.random.key(0))
    texts = train.executable(state, buckets.BATCH).on_workers("hlo_text")
    assert len(texts) == 2
    for programs in texts:
        found = {name for text in programs.values() for name, _ in buckets.operations(text)}
        assert "dot" in found
        assert not {"all-reduce", "reduce-scatter"} & found
    plan = train.plan(state, buckets.BATCH)
    assert [bucket.bytes for bucket in plan.stages[0].buckets] == [2 * buckets.LAYER] * 2


def waits(train, params, value, folder):
    """Every call that waits for workers."""
    here = jax.tree.map(np.asarray, init(jax.random.key(0)))
    return {
        "fetch": lambda: float(value),
        "block_until_ready": value.block_until_ready,
        "prefetch": lambda: (launcher.prefetch([params]), jax.device_get(params)),
        "a step and its loss": lambda: float(train(here, X)[1]),
        "warmup": lambda: train.warmup(params, X),
        "foreach_worker": lambda: launcher.foreach_worker(jnp.sum, params["first"]),
        "foreach_replica": lambda: launcher.foreach_replica(jnp.sum, params["first"]),
        "on_first": lambda: launcher.on_first(jnp.sum, params["first"]),
        "workers": launcher.workers,
        "check_replicas": lambda: launcher.check_replicas(params),
        "save": lambda: launcher.save(folder / "after", params),
        "restore": lambda: launcher.restore(folder / "before", like=params),
    }


@contextlib.contextmanager
def stopped(process):
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@ON_TWO_BY_TWO
def test_a_stopped_worker_is_named_by_every_call_that_waits_for_it(shape, tmp_path):
    """One session for all calls, which goes on only here: to users it is over with the error."""
    launcher.shutdown()
    launcher.init("ray", num_nodes=2, num_devices_per_node=2, step_timeout=2)
    train = launcher.parallelize(step)
    params = start(train)
    for _ in range(4):  # the first steps may take longer
        params, value = train(params, X)
    launcher.save(tmp_path / "before", params)
    second = psutil.Process(launcher.workers()[1].process)
    messages = current()
    for name, call in waits(train, params, value, tmp_path).items():
        with stopped(second), pytest.raises(launcher.HungError) as error:
            call()
        assert "worker_1: its process was stopped (SIGSTOP" in str(error.value), name
        assert "for 2 s (launcher.init(step_timeout=...))" in str(error.value), name
        messages._failure = None
        current().answers(messages.send("process"))  # what it was asked, it answers now
