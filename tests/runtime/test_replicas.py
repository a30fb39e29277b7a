"""Replicas: any change of one is found and named, and the first one's start is everybody's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.runtime.replicas import (
    Copies,
    Digester,
    ReplicaError,
    _from_first,
    check_equal,
    from_words,
    named_values,
    odd_replicas,
    shared_copies,
    to_words,
    with_values,
)

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
TYPES = "bool", "int8", "int32", "bfloat16", "uint16", "float32", "complex64", "float8_e4m3fn"


def placed(value, *spec):
    return jax.device_put(value, NamedSharding(MESH, PartitionSpec(*spec)))


def changed(array, device, by):
    """The array, of which one device holds something else."""
    parts = [
        jax.device_put(by(np.array(shard.data)) if shard.device.id == device else shard.data, to)
        for shard in array.addressable_shards
        for to in (shard.device,)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def found(tree):
    digester = Digester(tree)
    return odd_replicas([digester.finish(digester.start(tree))])


def tree():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {
        "whole": placed(normal(6, 4)),
        "rows": placed(normal(8, 3), "model"),
        "both": placed(normal(8, 4), "data", "model"),
        "step": placed(np.int32(3)),
        "key": placed(jax.random.key(0)),
    }


def test_equal_replicas_are_equal():
    assert found(tree()) == []


@pytest.mark.parametrize("name", ["whole", "rows", "step"])
def test_the_one_that_was_changed_is_named(name):
    arrays = tree()

    def by(data):
        data = np.atleast_1d(data)
        data.flat[-1] = np.nextafter(data.flat[-1], 9, dtype=np.float32) + (name == "step")
        return data.reshape(arrays[name].addressable_data(0).shape)

    arrays[name] = changed(arrays[name], 3, by)
    first = {"whole": 0, "rows": 1, "step": 0}[name]
    assert found(arrays) == [(name, 3, 0, (first, 0))]


def test_of_two_replicas_both_are_named_and_parts_that_lie_once_are_not_compared():
    arrays = tree()
    arrays["both"] = changed(arrays["both"], 3, lambda data: data + 1)
    arrays["rows"] = changed(arrays["rows"], 0, lambda data: data + 1)
    assert found(arrays) == [("rows", 2, 0, (0, 0))]


def test_values_that_change_places_are_another_digest():
    arrays = {"whole": placed(np.arange(12.0, dtype=np.float32).reshape(3, 4))}
    for by in (lambda x: x[::-1], lambda x: x[:, ::-1], lambda x: np.roll(x, 1)):
        assert len(found({"whole": changed(arrays["whole"], 1, by)})) == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", TYPES)
def test_any_type_has_words_and_comes_back_of_them(dtype):
    values = jnp.asarray([[0.0, 1, 1], [1, 0, 1]], dtype)
    np.testing.assert_array_equal(from_words(to_words(values), values.dtype), values)
    one = placed(values)
    assert found({"x": one}) == []
    assert len(found({"x": changed(one, 2, lambda data: data[::-1])})) == 1


def test_words_keep_every_bit():
    odd = jnp.asarray([-0.0, jnp.nan, jnp.inf, 1e-45], jnp.float32)
    again = from_words(to_words(odd), odd.dtype)
    assert np.asarray(again).tobytes() == np.asarray(odd).tobytes()


@pytest.mark.parametrize("spec", [(), ("model",), (None, "data")])
def test_the_first_replica_is_everybodys(spec):
    values = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    array = placed(values, *spec)
    sharding = array.sharding
    again = _from_first(changed(array, 3, lambda data: data + 1))
    assert again.sharding == sharding
    for shard in again.addressable_shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])


def test_digests_of_several_processes_are_held_against_one_another():
    def part(name, process, digest):
        rows = [[0, 0, 2 * process + d, process, digest] for d in range(2)]
        return Copies((name,), np.array(rows))

    check_equal([part("w", 0, 5), part("w", 1, 5), part("other", 2, 6)])
    with pytest.raises(ReplicaError) as error:
        check_equal([part("w", 0, 5), part("w", 1, 7), part("w", 2, 5)], "step 20: ")
    assert str(error.value).startswith(
        "step 20: the replica of w on device 2 (process 1) differs from that on device 0 "
        "(process 0); "
    )


def test_workers_that_jax_does_not_count_hold_replicas_of_one_another():
    """As with parameter servers: each sees its own device alone, of which the driver is told."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    own = jax.device_put(np.arange(4.0), NamedSharding(mesh, PartitionSpec()))
    trees = [{"w": own, "b": own}, {"w": own + 1, "b": own}]
    assert len(shared_copies(trees[0]).rows) == 0  # as JAX sees it
    digesters = [Digester(tree, rank=rank) for rank, tree in enumerate(trees)]
    for parts in (
        [shared_copies(tree, rank) for rank, tree in enumerate(trees)],
        [d.finish(d.start(tree)) for d, tree in zip(digesters, trees, strict=True)],
    ):
        (odd,) = odd_replicas(parts)
        assert odd == ("w", jax.device_count(), 1, (0, 0))
    values = named_values(trees[0], ["w"])
    taken = with_values(trees[1], {"w": values[0]})
    assert taken["w"].sharding == own.sharding
    assert not odd_replicas(
        [shared_copies(tree, rank) for rank, tree in enumerate((trees[0], taken))]
    )
