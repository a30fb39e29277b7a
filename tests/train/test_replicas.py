"""A run's check of its replicas, in a worker of this process."""

import jax
import numpy as np
import pytest

from launcher.config.compose import load, to_dict
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.record.step_log import StepLog
from launcher.driver.workers import merged
from launcher.plan import local_shape
from launcher.runtime import ReplicaError
from launcher.train.worker import TrainWorker

WORDS = "model=mlp", "model.hidden_size=16", "dataset=synthetic", "train.global_batch_size=8"
CHECKED = "train.check_replicas_every=2", "train.eval_every=0", "train.steps=6", "cluster.gpus=4"


def test_a_replica_that_was_changed_by_hand_is_named_at_the_next_check():
    config = load([*WORDS, *CHECKED, "parallel=data"])
    worker = TrainWorker()
    worker.build(to_dict(config))
    plan = plan_of(config.parallel, worker._program.train, local_shape(4, 1, "cpu"))
    worker.setup(plan.to_dict())
    worker.create()
    logged = []
    step_log = StepLog(lambda step, metrics: logged.append(step), 1, lambda seconds: {})

    def step(k):
        result = worker.step(k)
        step_log.record(result and merged([result], plan))

    for k in (1, 2, 3):
        step(k)
    kernel = worker._state.params["layers_1"]["kernel"]
    parts = [
        jax.device_put(np.array(shard.data) + (shard.device.id == 2), shard.device)
        for shard in kernel.addressable_shards
    ]
    worker._state.params["layers_1"]["kernel"] = jax.make_array_from_single_device_arrays(
        kernel.shape, kernel.sharding, parts
    )
    step(4)
    with pytest.raises(ReplicaError) as error:
        step(5)  # which brings the result of step 4
    assert str(error.value).startswith(
        "step 4: the replica of params.layers_1.kernel on device 2 (process 0) differs from that "
        "on device 0 (process 0)"
    )
    assert logged == [1, 2, 3, 4]
    worker.close()
