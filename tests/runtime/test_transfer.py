"""What crosses between processes: as many bytes as planned, each once, and nothing stays behind."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from launch import together
from tiny import BATCHES, serial

from launcher.base import jax_compat as compat
from launcher.runtime.transport import transfer


@pytest.fixture(scope="module")
def peers():
    """What two processes of two devices each report of themselves."""
    return [json.loads(told) for told in together("transfer_peer.py", 2, 2)]


@pytest.mark.slow
def test_bytes_that_cross_are_those_of_the_routes(peers):
    for peer in peers:
        sent, expected = zip(*peer["moves"], strict=True)
        assert sent == expected
        assert any(sent)


@pytest.mark.slow
def test_arrays_that_go_together_are_one_message(peers):
    assert [peer["messages"] for peer in peers] == [1, 0]


@pytest.mark.slow
def test_bytes_of_a_step_are_those_of_the_plan(peers):
    for peer in peers:
        assert peer["sent"] == peer["planned"]
        assert all(peer["sent"])


@pytest.mark.slow
def test_two_executables_take_turns_on_one_state(peers):
    _, losses = serial(len(BATCHES))
    for found in [peer["losses"] for peer in peers if peer["losses"]]:
        np.testing.assert_allclose(found, losses, rtol=1e-5)


@pytest.mark.slow
def test_repeated_calls_leave_nothing_behind(peers):
    """As many arrays after each turn, and every key offered is pulled, once."""
    for peer in peers:
        assert len(set(peer["alive"][2::2])) == 1
        assert len(set(peer["alive"][3::2])) == 1
    for one, other in (peers, peers[::-1]):
        assert one["offered"] == other["pulled"]
        assert len(set(one["offered"])) == len(one["offered"])


@pytest.mark.slow
def test_random_keys_go_by_both_ways(peers):
    """To each of the two devices, one key and two of four."""
    assert [peer["keys"] for peer in peers] == [[0, 0], [4, 4]]


@pytest.mark.slow
def test_processes_pass_barriers_for_a_move_that_is_new(peers):
    assert [peer["barriers"] for peer in peers] == [
        [2, 2, "ProcessMismatchError"],
        [2, 2, "ZeroDivisionError"],
    ]


# -- inside one process ----------------------------------------------------------------------------

CUTS = [(), ("data",), (None, "model"), ("model", "data")]


def placed(first, shape, cut):
    mesh = Mesh(np.array(jax.devices()[first : first + 4]).reshape(shape), ("data", "model"))
    return NamedSharding(mesh, PartitionSpec(*cut))


@pytest.fixture(params=["copied as JAX does", "this JAX has no such copy"])
def jax_copies(request, monkeypatch):
    """Whether the private copy is there."""
    there = request.param == "copied as JAX does"
    if not there:
        monkeypatch.setattr(transfer, "batched_copy", lambda to: None)
    return there


@pytest.mark.sampled(7)
@pytest.mark.parametrize("here", CUTS)
@pytest.mark.parametrize("there", CUTS)
def test_arrays_arrive_as_the_other_mesh_wants_them(jax_copies, here, there):
    values = [np.arange(32, dtype=np.float32).reshape(8, 4), np.arange(16).reshape(4, 4)]
    src = [placed(0, (2, 2), here)] * 2
    dst = [placed(4, (2, 2), there)] * 2
    arrays = jax.device_put(values, src)
    moved = transfer.local_transfer(arrays, src, dst)(*arrays)
    for value, array in zip(values, moved, strict=True):
        np.testing.assert_array_equal(array, value)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index])
    assert [array.sharding for array in moved] == dst


def test_meshes_of_other_shapes_are_not_taken_for_alike(jax_copies):
    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    src, dst = placed(0, (2, 2), ("data", "model")), placed(4, (4, 1), ("data",))
    (moved,) = transfer.local_transfer([value], [src], [dst])(jax.device_put(value, src))
    assert moved.sharding == dst
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(shard.data, value[shard.index])


def test_a_jax_without_the_private_copy_is_noticed(monkeypatch):
    assert compat.batched_copy([placed(0, (2, 2), ())]) is not None
    compat._works.cache_clear()
    monkeypatch.delattr(compat.xla_client, "batched_copy_array_to_devices_with_sharding")
    assert compat.batched_copy([placed(0, (2, 2), ())]) is None
    compat._works.cache_clear()
