"""One of two processes that exchange arrays and count what crosses; `test_transfer` starts it.

    python transfer_peer.py INDEX COUNT COORDINATOR DEVICES

Prints a line of JSON: what this process sent, beside what it should have sent.
"""

import collections
import contextlib
import json
import os
import sys
from unittest import mock

INDEX, COUNT, COORDINATOR = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
DEVICES = int(sys.argv[4])
os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax._src import distributed  # noqa: E402  (the key-value store: tests need no driver)
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from plans import uniform  # noqa: E402
from tiny import BATCHES, init, step  # noqa: E402

from launcher.partition.reshard import route, volume  # noqa: E402
from launcher.plan import local_shape  # noqa: E402
from launcher.runtime import (  # noqa: E402
    PermuteTransport,
    ProcessMismatchError,
    PullTransport,
    compile_step,
    move,
)
from launcher.runtime.transport.permute import _Program  # noqa: E402
from launcher.runtime.transport.transfer import boxes, is_here, place_array  # noqa: E402
from launcher.trace import trace_step  # noqa: E402


class Counted(PullTransport):
    """Notes what goes through it."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self.offered, self.pulled = collections.Counter(), collections.Counter()

    def send(self, key, process, arrays):
        self.bytes += sum(x.nbytes for x in arrays)
        self.offered[key] += 1
        super().send(key, process, arrays)

    def recv(self, key, process, like):
        self.pulled[key] += 1
        return super().recv(key, process, like)


def random_sharding(rng):
    """Some devices of both processes in any order, as a mesh that cuts an array somehow."""
    shape = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)][rng.integers(6)]
    devices = rng.permutation(np.array(jax.devices()))[: shape[0] * shape[1]]
    specs = [(), ("a",), (None, "b"), ("a", "b"), ("b", "a"), (("a", "b"),), (None, ("b", "a"))]
    return NamedSharding(
        Mesh(devices.reshape(shape), ("a", "b")), PartitionSpec(*specs[rng.integers(7)])
    )


def random_moves(transport):
    """For random pairs of shardings: bytes sent by this process, and as the routes say."""
    rng, found = np.random.default_rng(0), []
    whole = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
    process_of = {d.id: d.process_index for d in jax.devices()}
    for _ in range(40):
        src, dst = random_sharding(rng), random_sharding(rng)
        array = None
        if is_here(src):
            array = jax.make_array_from_callback(whole.shape, src, lambda index: whole[index])
        before = transport.bytes
        (moved,) = move(
            [array], [jax.ShapeDtypeStruct(whole.shape, whole.dtype)], [src], [dst], transport
        )
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])
        pieces = route(boxes(whole.shape, src), boxes(whole.shape, dst), process_of)
        sent = [p for p in pieces if p.src_process == INDEX != p.dst_process]
        expected = sum(volume(p.box) for p in sent) * whole.itemsize
        found.append([transport.bytes - before, expected])
    return found


def messages(transport):
    """How many messages three arrays take that this process sends to the other."""
    mine, other = (
        NamedSharding(Mesh([d for d in jax.devices() if d.process_index == i], "a"), spec)
        for i, spec in ((0, PartitionSpec("a")), (1, PartitionSpec()))
    )
    whole = np.arange(8.0, dtype=np.float32)
    array = None
    if is_here(mine):
        array = jax.make_array_from_callback(whole.shape, mine, lambda index: whole[index])
    before = transport.offered.total()
    aval = jax.ShapeDtypeStruct(whole.shape, whole.dtype)
    moved = move([array] * 3, [aval] * 3, [mine] * 3, [other] * 3, transport)
    for shard in [shard for x in moved for shard in x.addressable_shards]:
        np.testing.assert_array_equal(shard.data, whole)
    return transport.offered.total() - before


def keys(transport):
    """Random keys, one and several, go to where the other process is; how many arrived."""
    one, other = (
        Mesh([d for d in jax.devices() if d.process_index == i], "a") for i in range(COUNT)
    )
    values = [jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg"), 4)]
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
    src = [NamedSharding(one, PartitionSpec())] * 2
    dst = [NamedSharding(other, PartitionSpec(*cut)) for cut in ((), ("a",))]
    there = [place_array(*each) if INDEX == 0 else None for each in zip(values, src, strict=True)]
    arrived = 0
    for value, moved, sharding in zip(
        values, move(there, avals, src, dst, transport), dst, strict=True
    ):
        assert (moved.shape, moved.dtype, moved.sharding) == (value.shape, value.dtype, sharding)
        data = np.asarray(jax.random.key_data(value))
        for shard in jax.random.key_data(moved).addressable_shards:
            arrived += 1
            np.testing.assert_array_equal(shard.data, data[shard.index])
    return arrived


class NotingTransport(PermuteTransport):
    """Notes the order of every barrier."""

    def __init__(self):
        super().__init__()
        self.orders = []

    def barrier(self, order, *together):
        self.orders.append(order)
        return super().barrier(order, *together)


def barriers():
    """How many barriers the processes pass for a move, for another like it, and for a third that
    one of them cannot compile; and whether each process fails."""
    transport = NotingTransport()
    src, dst = (
        NamedSharding(
            Mesh([d for d in jax.devices() if d.process_index == i], "a"), PartitionSpec()
        )
        for i in range(COUNT)
    )
    found = []
    for size in (3, 3, 4):
        value = np.arange(size, dtype=np.float32)
        array = place_array(value, src) if INDEX == 0 else None
        fails = mock.patch.object(_Program, "compiled", side_effect=ZeroDivisionError)
        try:
            with fails if size == 4 and INDEX == 1 else contextlib.nullcontext():
                (moved,) = move([array], [value], [src], [dst], transport)
        except (ZeroDivisionError, ProcessMismatchError) as error:
            found.append(type(error).__name__)
        else:
            assert all((x.data == value).all() for x in moved.addressable_shards)
            found.append(len(transport.orders))
    return found


def steps(transport):
    """Two executables by turns on one state: bytes a step of each, losses, arrays alive."""
    traced = trace_step(step, (jax.eval_shape(init, jax.random.key(0)), BATCHES[0]))
    cluster = local_shape(COUNT * DEVICES, COUNT, "cpu")
    executables = []
    for schedule, micro_batches in (("1f1b", 3), ("gpipe", 2)):
        plan = uniform(micro_batches, 2, schedule=schedule).plan(traced, cluster)
        executables.append(compile_step(traced, plan, jax.devices(), transport))
    state = executables[0].create(init, jax.random.key(0))
    sent, losses, alive = [], [], []
    for k in range(6):
        before = transport.bytes
        state, loss = executables[k % 2](state, BATCHES[k])
        sent.append(transport.bytes - before)
        jax.block_until_ready([x for x in jax.tree.leaves(state) if x.addressable_shards])
        alive.append(len(jax.live_arrays()))
        if loss.addressable_shards:
            losses.append(float(loss.addressable_data(0)))
    planned = [
        sum(
            t.bytes_per_microbatch * e.plan.num_micro_batches + t.bytes_per_step
            for t in e.plan.transfers
            if t.src_stage == INDEX  # a stage a process
        )
        for e in executables
    ]
    return {"sent": sent, "planned": planned * 3, "losses": losses, "alive": alive}


def main() -> None:
    jax.distributed.initialize(COORDINATOR, COUNT, INDEX)
    store = distributed.global_state.client
    transport = Counted()
    store.key_value_set(f"address_{INDEX}", transport.address)
    addresses = [store.blocking_key_value_get(f"address_{i}", 60_000) for i in range(COUNT)]
    transport.connect(addresses)
    found = {"moves": random_moves(transport), "messages": messages(transport), **steps(transport)}
    found["keys"] = [keys(transport), keys(PermuteTransport())]
    found["barriers"] = barriers()
    found["offered"] = sorted(transport.offered.elements())
    found["pulled"] = sorted(transport.pulled.elements())
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


main()
