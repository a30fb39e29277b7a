"""A user's functions on the workers' own copies: in this process, and (slow) on two workers of two
devices, started once for the module. The last tests break workers."""

import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import launcher
from launcher.api.own_copies import slice_of
from launcher.api.session import SessionError
from launcher.cluster.errors import HungError, WorkerError

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def init(key):
    first, second = jax.random.normal(key, (2, 8, 8)) / 3
    return {"first": first, "second": second, "key": key}


def step(state, x):
    def loss(params, x):
        h = jnp.tanh(x @ params[0])
        launcher.mark_pipeline_boundary()
        return ((h @ params[1] - x) ** 2).mean()

    params = state["first"], state["second"]
    value, (first, second) = launcher.value_and_grad(loss)(params, x)
    new = {"first": params[0] - 0.1 * first, "second": params[1] - 0.1 * second}
    return new | {"key": state["key"]}, value


def trained(method):
    train = launcher.parallelize(step, method=method)
    return train, train(train.create(init, jax.random.key(0), like=X), X)[0]


def device_of(array):
    (device,) = array.devices()
    return device.id


def test_without_a_session_this_process_is_the_only_worker():
    (only,) = launcher.workers()
    assert (only.host, only.process, only.devices) == (0, os.getpid(), tuple(range(8)))
    assert launcher.foreach_worker(lambda x: x + 1, 1) == [2]
    assert len(launcher.foreach_replica(lambda x: x, jnp.ones(3))) == 8


def test_a_step_is_recorded_on_every_worker(session):
    train, state = trained(launcher.DataParallel())
    _, timeline = train.timeline(state, X)
    names = [part.process for part in timeline.steps[1]]
    assert names == (["this process"] if session == "local" else ["worker 0", "worker 1"])
    summing = {span.lane for span in timeline.spans() if span.kind == "gradient sum"}
    assert summing == {f"device {i} gradient sums" for i in range(4)}


def test_workers_say_where_they_are(session):
    found = launcher.workers()
    assert [w.host for w in found] == list(range(len(found)))
    assert [w.process for w in found] == launcher.foreach_worker(os.getpid)
    assert {w.address for w in found} == {"127.0.0.1"}
    devices = [w.devices for w in found]
    assert devices == ([(0, 1, 2, 3)] if session == "local" else [(0, 1), (2, 3)])


def test_copies_of_a_replicated_array_are_whole_and_equal(session):
    _, state = trained(launcher.DataParallel())
    expected = np.asarray(state["first"])
    copies = [
        *launcher.foreach_worker(lambda state: state["first"], state),
        *launcher.foreach_replica(lambda state: state["first"], state),
        launcher.on_first(lambda state: state["first"], state),
    ]
    assert len(copies) == len(launcher.workers()) + 4 + 1
    for copy in copies:
        assert type(copy) is np.ndarray
        np.testing.assert_array_equal(copy, expected)
    places = launcher.foreach_replica(device_of, state["first"])
    assert places == launcher.foreach_replica(lambda: device_of(jnp.ones(2)))
    assert len(set(places)) == 4
    keys = launcher.foreach_replica(lambda key: key, state["key"])
    (key,) = {str(jax.random.key_data(key)) for key in keys}
    assert key == str(jax.random.key_data(jax.device_get(state["key"])))


def test_parts_of_an_array_that_is_cut_make_the_whole(session):
    _, state = trained(launcher.Zero3Parallel())
    expected = np.asarray(state["first"])
    parts = launcher.foreach_replica(lambda w: w, state["first"])
    assert [part.shape for part in parts] == [(2, 8)] * 4
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    of_workers = launcher.foreach_worker(lambda w: (w, jnp.sum(w)), state["first"])
    np.testing.assert_array_equal(np.concatenate([w for w, _ in of_workers]), expected)
    np.testing.assert_allclose(sum(s for _, s in of_workers), expected.sum(), rtol=1e-4)
    np.testing.assert_array_equal(launcher.on_first(lambda w: w, state["first"]), expected[:2])


def test_a_worker_has_none_of_what_lies_elsewhere(session):
    _, state = trained(launcher.PipeshardParallel(num_micro_batches=2))
    params = {"first": state["first"], "second": state["second"]}
    names = launcher.foreach_replica(lambda tree: [*jax.tree.map(jnp.sum, tree)], params)
    assert names == [["first", "second"]] * 4
    there = launcher.foreach_replica(lambda t: [k for k, v in t.items() if v is not None], params)
    assert there == [["first"], ["first"], ["second"], ["second"]]
    if session == "ray":
        there = launcher.foreach_worker(lambda t: [k for k in t if t[k] is not None], params)
        assert there == [["first"], ["second"]]


@pytest.mark.parametrize("spec", [(), ("data",), ("model",), (None, "data"), ("model", None)])
def test_devices_that_are_no_block_of_a_mesh_make_a_slice(spec):
    """Three of 3 × 2 devices, as a worker of three has: a row, and half of the next."""
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("data", "model"))
    whole = np.arange(36.0).reshape(6, 6)
    array = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec)))
    shards = [(shard.index, shard.data) for shard in array.addressable_shards][:3]
    covered = np.zeros((6, 6), bool)
    for index, _ in shards:
        covered[index] = True
    found = slice_of(shards)
    assert found.devices() == {jax.devices()[0]}
    rows, columns = covered.any(1), covered.any(0)
    np.testing.assert_array_equal(found, whole[rows][:, columns])


def test_parts_that_make_no_slice_are_refused():
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("data", "model"))
    array = jax.device_put(np.ones((6, 6)), NamedSharding(mesh, PartitionSpec("data", "model")))
    shards = [(shard.index, shard.data) for shard in array.addressable_shards][:3]
    with pytest.raises(ValueError, match=r"is not a slice of it.*use launcher\.foreach_replica"):
        slice_of(shards)
    keys = jax.device_put(
        jax.random.split(jax.random.key(0), 6), NamedSharding(mesh, PartitionSpec("data"))
    )
    shards = [(shard.index, shard.data) for shard in keys.addressable_shards][:3]
    assert slice_of(shards).shape == (4,)


def test_values_of_the_script_are_the_same_everywhere(session):
    def seen(x, y, word, nothing):
        return type(x), type(y).__name__, float(x.sum() + y.sum()), word, nothing

    values = np.ones(2, np.float64), jnp.ones(3), "hi", None
    expected = (np.ndarray, "ArrayImpl", 5.0, "hi", None)
    assert launcher.foreach_replica(seen, *values) == [expected] * 4
    assert set(launcher.foreach_worker(seen, *values)) == {expected}
    assert launcher.on_first(seen, *values) == expected
    key = jax.random.key(3)
    draws = launcher.foreach_replica(jax.random.normal, key)
    assert draws == [jax.random.normal(key)] * 4


def test_what_a_function_raises_is_its_calls_error_alone(session):
    train, state = trained(launcher.DataParallel())
    third = launcher.foreach_replica(device_of, state["first"])[2]

    def fails(w):
        if device_of(w) == third:
            raise LookupError("nothing to see")

    kind = WorkerError if session == "ray" else LookupError
    with pytest.raises(kind, match="nothing to see") as error:
        launcher.foreach_replica(fails, state["first"])
    if session == "ray":
        assert (error.value.worker, error.value.error_type) == ("worker_1", "LookupError")
        assert "in fails" in str(error.value)
        assert "This was the call for device 2." in str(error.value)
        with pytest.raises(WorkerError, match="what it returned cannot be pickled"):
            launcher.foreach_worker(threading.Lock)
        with pytest.raises(TypeError, match="cannot be sent to the workers"):
            launcher.on_first(threading.Lock().acquire)
    else:
        assert error.value.__notes__ == ["This was the call for device 2."]
    assert float(train(state, X)[1]) > 0


@pytest.mark.slow
def test_a_worker_that_dies_or_hangs_in_a_call_ends_the_session():
    launcher.shutdown()
    launcher.init("ray", num_nodes=2, num_devices_per_node=2, step_timeout=5)
    trained(launcher.DataParallel())[1]["first"].block_until_ready()
    second = launcher.workers()[1].process

    def hangs():
        if os.getpid() == second:
            time.sleep(600)

    with pytest.raises(HungError, match="no answer from worker_1 for 5 s") as error:
        launcher.foreach_worker(hangs)
    assert "in hangs" in str(error.value)
    with pytest.raises(HungError):
        launcher.workers()
    launcher.shutdown()
    launcher.init("ray", num_nodes=2, num_devices_per_node=2)
    _, state = trained(launcher.DataParallel())
    second = launcher.workers()[1].process
    with pytest.raises(WorkerError, match="worker_1 died"):
        launcher.foreach_worker(lambda: os.getpid() == second and os.kill(second, signal.SIGKILL))
    launcher.shutdown()
    with pytest.raises(SessionError, match="session has ended"):
        launcher.on_first(lambda w: w, state["first"])
