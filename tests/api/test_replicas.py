"""`launcher.check_replicas`, in this process and as a worker answers it."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import launcher
from launcher.api.step_worker import StepWorker
from launcher.runtime import check_equal

MESH = Mesh(np.array(jax.devices()[:2]), ("data",))


def placed(value, *spec):
    return jax.device_put(np.float32(value), NamedSharding(MESH, PartitionSpec(*spec)))


def unequal(value):
    """An array of which the second device holds something else."""
    array = placed(value)
    parts = [jax.device_put(np.float32(value) + i, d) for i, d in enumerate(MESH.devices)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def test_equal_replicas_and_what_has_none_pass():
    alone = jax.device_put(np.ones(3), jax.devices()[3])
    launcher.check_replicas(
        {"w": placed([1, 2]), "cut": placed([1, 2], "data"), "host": np.ones(3)}
    )
    launcher.check_replicas([alone, 3.0, None])
    launcher.check_replicas({})


def test_a_replica_that_differs_is_named_by_its_path_and_place():
    with pytest.raises(launcher.ReplicaError) as error:
        launcher.check_replicas({"w": placed([1, 2]), "opt": (placed([3]), unequal([4, 5]))})
    assert str(error.value).startswith(
        "the replica of opt.1 on device 1 (process 0) differs from that on device 0 (process 0)"
    )


def test_a_worker_answers_for_the_arrays_that_it_holds():
    worker = StepWorker()
    worker._arrays = {3: placed([1, 2]), 8: unequal([1, 2])}
    check_equal([worker.digests({"a": 3})])
    with pytest.raises(launcher.ReplicaError, match="the replica of b on device 1"):
        check_equal([worker.digests({"a": 3, "b": 8})])
