"""Processes of one machine sum gradients in memory that they share: the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import launch
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from trainings import serial

from launcher.base import SpanRecorder
from launcher.runtime.emit.instructions import Exchange, ExchangeSpec
from launcher.runtime.transport.shared_sum import SharedSum
from launcher.runtime.transport.transport import Transport

DATA = {"method": "data", "num_micro_batches": 1}
ZERO2 = {"method": "zero2", "num_micro_batches": 2}
ZERO3 = {"method": "zero3", "num_micro_batches": 2}
STAGES = {"method": "three_d", "data": 2, "model": 1, "pipeline": 2, "num_micro_batches": 2}
GAN = {"training": "gan", "method": "data", "num_micro_batches": 2}


def told_by(count, devices, settings):
    timeout = 200 + 50 * len(settings)
    given = json.dumps(settings)
    told = launch.together("summing_peer.py", count, devices, given=given, timeout=timeout)
    return [json.loads(each) for each in told]


def check(settings, told):
    """The losses are those of one device, in every process that knows them."""
    for k, each in enumerate(settings):
        _, losses = serial(each.get("training", "tiny"))
        known = [found for peer in told if (found := peer[k]["losses"])]
        assert known
        for found in known:
            np.testing.assert_allclose(found, losses, rtol=1e-5, err_msg=str(each))


def test_two_processes_make_the_bits_of_sums_by_sockets():
    words = [DATA, ZERO2]
    settings = [each | {"together": how} for each in words for how in (True, False)]
    told = told_by(2, 1, settings)
    check(words, [peer[::2] for peer in told])
    for peer in told:
        for near, far in zip(peer[::2], peer[1::2], strict=True):
            assert near["state"] == far["state"]
            assert (near["in_memory"], far["in_memory"]) == (1, 0)
        near, far = peer[:2]
        assert near["mapped"] == ["/memfd:launcher (deleted)"]  # no name that could be left behind
        assert near["all_reduces"] == [1]  # of the loss alone
        assert far["all_reduces"] == [1, 1]  # of all gradients, packed, and of the loss
    first, second = told
    assert first[0]["state"] == second[0]["state"]  # its replica


def test_numbers_are_summed_and_parts_of_16_bits_added_in_32():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    shapes, dtypes = [(), (2, 0), (3,)], ["float32", "float32", "bfloat16"]
    specs = map(ExchangeSpec, "abc", ["sum"] * 3, shapes, dtypes)
    x = Exchange(0, tuple(specs), (1, 1, 1), (0, 1, 2), (3, 4, 5), turn=7)
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    placement = SimpleNamespace(
        owners=[{0}],
        meshes=[mesh],
        slots={s: SimpleNamespace(aval=aval) for s, aval in zip(x.outputs, avals, strict=True)},
        sharding=lambda slot: NamedSharding(mesh, PartitionSpec()),
    )
    total = SharedSum(x, placement, {}, SpanRecorder())
    total.open(total.path)
    first = jnp.asarray([256.0, 1, 1, 1])  # 256 + 1 is 256 in 16 bits
    parts = [first, jnp.zeros((4, 2, 0)), jnp.tile(first[:, None], 3)]
    own = NamedSharding(mesh, PartitionSpec("data"))
    for _ in range(2):  # in the same memory
        number, nothing, several = total(*jax.device_put(parts, own))
        assert (number.shape, float(number), nothing.shape) == ((), 259, (2, 0))
        assert several.dtype == jnp.float32
        np.testing.assert_array_equal(several, [260] * 3)  # 259, rounded once


def connected(other, sees=True):
    """A transport's neighbours, where another process says where it is, and whether it sees all."""

    class Told(Transport):
        def barrier(self, order, together=None, about=None):
            return [about, other(*about) if order == "connect" else sees]

    way = Told()
    way.connect([])
    return way.neighbours


def test_processes_share_memory_that_see_one_another(monkeypatch):
    me = os.getpid()
    assert connected(lambda place, pid: [place, pid]) == {0: me, 1: me}
    assert connected(lambda place, pid: [place, pid], sees=False) == {}
    assert connected(lambda place, pid: [place, 2**22 + 1]) == {}  # no process has this number
    assert connected(lambda place, pid: [[*place[:2], -1], pid], sees=False) == {0: me}

    def hidden(path):
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert connected(lambda place, pid: [place, pid]) == {}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("count", "devices", "settings", "sums"),
    [
        # Zero-3 sums in every microbatch, inside its passes, what three divides not.
        (3, 1, [DATA, ZERO2, ZERO3], [1, 1, 1]),
        (2, 2, [DATA, ZERO2, ZERO3, GAN], [1, 1, 0, 2]),
        (4, 1, [STAGES], [1]),
    ],
)
def test_so_many_processes_equal_one_device(count, devices, settings, sums):
    told = told_by(count, devices, settings)
    check(settings, told)
    for peer in told:
        assert [found["in_memory"] for found in peer] == sums
    if count < 4:  # all replicas of the parameters, in all processes
        assert len({bits for peer in told for bits in peer[0]["state"]}) == 1


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("meeting", [4, 0])
def test_a_killed_process_ends_the_others(meeting):
    coordinator = launch.free_coordinator()
    script = [sys.executable, launch.HERE / "summing_peer.py"]
    peers = [
        subprocess.Popen(
            [*script, str(i), "2", coordinator, "1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for i in range(2)
    ]
    given = json.dumps([DATA | {"dies": meeting}])
    try:
        for peer in peers:
            peer.stdin.write(given)
            peer.stdin.close()
            peer.stdin = None
        out, errors = peers[0].communicate(timeout=200)
        assert peers[1].wait(60) == -9
        peers[1].communicate()
    finally:
        for peer in peers:
            peer.kill()
    assert peers[0].returncode == 0, errors[-3000:]
    kind, message = json.loads(out.splitlines()[-1])
    assert kind == "ConnectionError"
    assert message.startswith("process 1 of this run ended in the middle of a step")
