"""A worker that trains, saves and restores under one plan; as one of several processes:

    python checkpoint_peer.py INDEX COUNT COORDINATOR DEVICES

reads `words` (settings), `model` and `jobs` as JSON from standard input and prints the jobs'
results.
`test_checkpoint_plans` starts it, and does the same jobs in its own process.
"""

import json
import os
import sys

if __name__ == "__main__":
    DEVICES = int(sys.argv[4])
    os.environ["NPROC"] = str(DEVICES + 2)  # threads, see launcher.cluster.ray.session
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES}"

import psutil
from jax._src import distributed

from launcher.base.jax_compat import coordination_service
from launcher.config.compose import load, to_dict
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import local_shape
from launcher.train.program import build_program
from launcher.train.worker import TrainWorker

MLP = ("model=mlp", "model.hidden_size=256")
COMMON = (
    "dataset=synthetic",
    "train.steps=100",
    "train.global_batch_size=8",
    "train.eval_every=0",
    "optimizer.warmup_steps=2",
    "cluster=emulated",
)


class Trainee:
    """A worker with its program compiled for the settings `words`."""

    def __init__(self, words, worker=None, model=MLP):
        config = load([*model, *COMMON, *words])
        self.worker = worker or TrainWorker()
        cluster = local_shape(config.cluster.gpus, config.cluster.hosts, "cpu")
        program = build_program(config)
        plan = plan_of(config.parallel, program.train, cluster)
        self.worker.build(to_dict(config))
        self.worker.setup(plan.to_dict())

    def slices(self):
        """Into how many slices the plan cuts the batch."""
        plan = self.worker._train.plan
        return plan.num_micro_batches * plan.num_replicas

    def create_and_save(self, folder):
        """Two steps, a save of the state, two steps more: their losses."""
        self.worker.create()
        self._losses(1, 2)
        self.worker.save(folder, 2, {"config": {}}, "a")
        losses = self._losses(3, 4)
        assert self.worker.saved() is None
        return losses

    def restore_and_save(self, source, target):
        """Restore a state and save it as it is; the bytes that were read, and two steps' losses."""
        process = psutil.Process()
        before = process.io_counters().read_chars
        self.worker.restore(source, 2)
        read = process.io_counters().read_chars - before
        self.worker.save(target, 2, {"config": {}}, "b")
        assert self.worker.saved() is None
        return read, self._losses(3, 4)

    def resume(self, source):
        """Restore a state; the losses of two steps."""
        self.worker.restore(source, 2)
        return self._losses(3, 4)

    def save_last(self, folder):
        """Save the state after the fourth step."""
        self.worker.save(folder, 4, {"config": {}}, "d")
        assert self.worker.saved() is None

    def start_and_save(self, source, target):
        """A first state with the parameters of a checkpoint, saved as it is."""
        self.worker.create(source)
        self.worker.save(target, 2, {"config": {}}, "c")
        assert self.worker.saved() is None

    def _losses(self, first, last):
        results = [self.worker.step(step) for step in range(first, last + 1)]
        results.append(self.worker.flush())
        return [r.metrics.get("train/loss") for r in results if r]


def joined():
    """A worker that has met the others, by the words of the command line."""
    worker, index, count = TrainWorker(), int(sys.argv[1]), int(sys.argv[2])
    worker.service = coordination_service(sys.argv[3], count) if index == 0 else None
    store = lambda: distributed.global_state.client  # noqa: E731
    address = worker.join(sys.argv[3], count, index, "127.0.0.1", "pull")
    store().key_value_set(f"address_{index}", address)
    worker.connect([store().blocking_key_value_get(f"address_{i}", 60_000) for i in range(count)])
    return worker


if __name__ == "__main__":
    given = json.load(sys.stdin)
    trainee = Trainee(given["words"], joined(), given.get("model", MLP))
    told = []
    for number, (job, *arguments) in enumerate(given["jobs"]):
        told.append(getattr(trainee, job)(*arguments))
        # A checkpoint is there once the first process has it from all.
        distributed.global_state.client.wait_at_barrier(f"job_{number}", 120_000)
    print(json.dumps(told), flush=True)
    trainee.worker.close()
