"""A training in this process: the loop, with a real worker whose calls run in a thread."""

import functools
import signal
from concurrent.futures import ThreadPoolExecutor

from launcher import checkpoint
from launcher.base.output import lines_to
from launcher.config.compose import load, to_dict
from launcher.driver.callback import Callbacks
from launcher.driver.folder.folder import contents
from launcher.driver.loop import Saving, train
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.record.step_log import StepLog
from launcher.driver.workers import merged
from launcher.plan import local_shape
from launcher.stop import Stop
from launcher.train.program import build_program
from launcher.train.step_result import StepResult
from launcher.train.worker import TrainWorker

WORDS = (
    "model=mlp",
    "dataset=synthetic",
    "model.hidden_size=16",
    "train.steps=6",
    "train.global_batch_size=8",
    "train.eval_every=3",
    "train.eval_batches=2",
    "optimizer.warmup_steps=2",
    "parallel=manual",
    "parallel.num_micro_batches=2",
    "parallel.num_stages=2",
)


class Handle:
    """A worker's calls, one at a time in a thread; counts those whose results nobody has asked."""

    def __init__(self, worker, plan):
        self._worker = worker
        self.plan = plan
        self._thread = ThreadPoolExecutor(1)
        self.outstanding = self.most_outstanding = 0

    def submit(self, method, *arguments):
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        future = self._thread.submit(getattr(self._worker, method), *arguments)
        return Asked(self, future)

    def close(self):
        self._worker.close()
        self._thread.shutdown()


class Asked:
    def __init__(self, handle, future):
        self._handle = handle
        self._future = future

    def result(self, limit=None):
        self._handle.outstanding -= 1
        answer = self._future.result(60)
        return merged([answer], self._handle.plan) if isinstance(answer, StepResult) else answer

    def each(self):
        return [self.result()]


class Training:
    """Runs `loop.train` on a fresh worker, in `folder`, from its newest checkpoint."""

    background = False  # whether a process of its own writes the saves
    snapshots = None

    def __init__(self, folder, *words, stop_after=None):
        self.config = load([*WORDS, *words])
        self.folder = folder
        self.lines, self.said, self.failures = [], [], []
        self.say = self.said.append
        self.stop = Stop()
        self.stop_after = stop_after
        self.wall = None

    def run(self):
        config, finished = self.config, checkpoint.newest(self.folder).step or 0
        plan = self.plan_of(build_program(config).train)
        worker = TrainWorker()
        worker.build(to_dict(config))
        if not self.background:  # starting it takes longer than such a training
            worker._saver.start_process = lambda: None
        worker.setup(plan.to_dict())
        worker.restore(str(self.folder), finished) if finished else worker.create()
        self.handle = Handle(worker, plan)
        self.step_log = self.step_log_of(plan)
        try:
            describe = functools.partial(contents, config, plan.to_dict())
            settings = config.train.checkpoint
            saving = Saving(self.handle, self.folder, settings, describe, self.failures)
            with lines_to(self.say):
                told = self.handle, self.step_log, self.stop, finished, saving
                train(config.train, *told, self.snapshots)
        finally:
            self.handle.close()
        return self

    def plan_of(self, step):
        shape = local_shape(self.config.cluster.gpus or 2, 1, "cpu")
        return plan_of(self.config.parallel, step, shape)

    def step_log_of(self, plan):
        settings = self.config.train
        return StepLog(
            self._log,
            settings.log_every,
            lambda seconds: {},
            settings.non_finite == "skip",
            callbacks=Callbacks(self.wall),
            spikes=settings.spikes,
        )

    def _log(self, step, metrics):
        self.lines.append({"step": step, **metrics})
        if step == self.stop_after:
            self.stop.requested = signal.SIGINT

    def losses(self):
        return [line["train/loss"] for line in self.lines]
