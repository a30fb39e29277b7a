"""The training worker: a process that owns the devices, the state and the data of one host.

The driver calls the methods of `TrainWorker` by name; each call is one message, and its result is
plain data.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from launcher import checkpoint
from launcher.arrays.stacked_array import spec_at
from launcher.base import SpanRecorder
from launcher.base.jax_compat import on_cpus
from launcher.checkpoint.train_state import TrainState
from launcher.cluster.process_group import Peer
from launcher.cluster.ray import NodeFolder
from launcher.cluster.ray.scratch import memory_folder
from launcher.cluster.ray.worker_actor import Outcome
from launcher.config.reader import from_dict
from launcher.config.schema import Config
from launcher.plan import Plan
from launcher.recipes import InputError
from launcher.runtime import (
    Copies,
    Digester,
    Executable,
    KernelChoices,
    Locality,
    StageTimes,
    StepCompilation,
    StepServices,
    choices_in,
    locality_of,
    lower_ahead,
    named_values,
    shared_copies,
    wait_for_more,
    with_first_replicas,
    with_values,
)
from launcher.train.feed import Feeder, filled, own_rows
from launcher.train.program import Program, averaged_model, build_program, with_stored_model
from launcher.train.sampling import Sample, Sampler
from launcher.train.spikes import batch_index
from launcher.train.step_result import (
    GarbageTime,
    RecordingReader,
    Sent,
    StepResult,
    fetched_metrics,
    fetched_values,
    finished,
    stalled_seconds,
    trace_folder,
    with_stage_times,
)


class TrainWorker(Peer):
    """Trains on this process's devices: `build`, `setup`, `create` or `restore`, then `step`.

    A step is sent to the devices before the previous one's results are fetched, so that they always
    have work. Its metrics are therefore returned by the next call.
    """

    _config: Config
    _state: TrainState
    _feeder: Feeder
    _evaluated: dict[str, Any]  # the model, during an evaluation

    def __init__(self) -> None:
        super().__init__()
        self._built: Program | None = None
        self._sent: Sent | None = None
        self._stages: StageTimes | None = None
        self._trial: TriedPlan | None = None
        self._compiling: Compiling | None = None
        self._ahead: tuple[Any, ...] = ()  # a plan, a locality, and what is lowered for them
        self._sampler: Sampler | None = None
        # A thread of its own, to note when a step completes while the next one is being sent.
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetcher")
        self._recording_reader = RecordingReader()
        self._garbage = GarbageTime()
        self._spans = SpanRecorder()
        self._saver = checkpoint.Saver(self._spans)
        self._found: dict[checkpoint.Moment, checkpoint.Found] = {}
        self._before_evaluation: StepResult | None = None
        self._passed_over = 0
        self._taken: Mapping[str, int] = {}
        self._left_out: Collection[int] = ()
        self._completed = 0.0

    @cached_property
    def _choices(self) -> KernelChoices | None:
        rank = self._server_rank  # each of these chooses for itself
        own = "autotune" if rank is None else f"autotune/worker_{rank}"
        return choices_in(Path(self._home, own), self._config.train.deterministic)

    def build(
        self, config: dict[str, Any], compute_capability: float | None = None, home: str = ""
    ) -> None:
        """Build and trace the program; a second call does nothing.

        Args:
            config: the settings.
            compute_capability: of the GPUs, as the driver has it, so that both trace the same.
            home: the run's folder.
        """
        if self._built is None:
            self._config, self._home = from_dict(config), home
            self._built = build_program(self._config, compute_capability)

    def locality(self) -> Locality:
        """Return this worker's place among the others, as its steps depend on it."""
        return locality_of(jax.devices(), StepServices(self._transport, self._servers, self._spans))

    def stand_by(self, plan: dict[str, Any], locality: Locality, *about: Any) -> None:
        """Do what `build` and `begin_setup` can without a device, to take a place later."""
        with on_cpus():
            self.build(*about)
            steps = self._program.by(Plan.from_dict(plan))
            self._ahead = plan, locality, [lower_ahead(*each, locality) for each in steps]
            self._program.dataset.train(0)  # imports and opens what a batch needs

    def begin_setup(self, plan: dict[str, Any]) -> int:
        """Begin to compile the steps of a plan, given as `Plan.to_dict()`, ahead of time.

        Returns:
            The number of distinct programs.

        Raises:
            PlanError: the program differs from the one that was planned, because the code or a
                library has another version than in the driver.
        """
        services = StepServices(self._transport, self._servers, self._spans, self._choices)
        *about, lowered = self._ahead or (None,)
        ahead = lowered if about == [plan, self.locality()] else None
        self._ahead = ()
        self._compiling = Compiling(self._program, Plan.from_dict(plan), services, ahead)
        return len(self._compiling.programs)

    def chose_anew(self) -> bool:
        """Return whether XLA chose kernels for this run's programs since this start."""
        return self._choices is not None and self._choices.are_new

    def compiled(self, seen: int) -> int:
        """Wait until more than `seen` programs are compiled, or all; return how many are."""
        assert self._compiling is not None
        return wait_for_more(self._compiling.programs, seen)

    def setup(self, plan: dict[str, Any]) -> float:
        """Finish, or do all of, what `begin_setup` begins; return the seconds that it took."""
        settings = self._config.train.checkpoint
        saves = not self._servers or self._rank == 0
        if saves and (settings.every_steps or settings.every_minutes):  # during training
            self._saver.start_process()
        if self._compiling is None:
            self.begin_setup(plan)
        assert self._compiling is not None
        (self._train, evaluate, seconds), self._compiling = self._compiling.result(), None
        if evaluate:
            self._evaluator = Evaluator(evaluate, self._program)
        if self._config.train.check_replicas_every:
            self._digester = Digester(self._placed(), rank=self._server_rank)
        return seconds

    def begin_trial(self, plan: dict[str, Any] | None) -> None:
        """Compile a plan and create a state, for `run_trial`; None: free those of the last one."""
        self._trial = None
        if plan is not None:
            services = StepServices(self._transport, None, SpanRecorder(), self._choices)
            self._trial = TriedPlan(self._program, Plan.from_dict(plan), services)

    def run_trial(self, steps: int) -> float:
        """Return the mean seconds of a step by the plan of `begin_trial`, over `steps` steps."""
        assert self._trial is not None
        return self._trial.run(steps)

    def create(self, init_from: str | None = None) -> Copies:
        """Create the first state, sharded; its model is from `init_from`, if given.

        Returns:
            Digests of what other processes have created, too, which `init` may have made different
            there: see `take_first`.
        """
        self._state = self._train.create(self._program.init, self._program.seed)
        if init_from is not None:
            self._state = with_stored_model(self._state, self._placed(), Path(init_from))
        self._feed(start=0)
        return shared_copies(self._state, self._server_rank)

    def take_first(self, names: list[str], first: Outcome | None = None) -> None:
        """Make all replicas of some arrays of the state equal to the first one, everywhere.

        Args:
            names: the arrays' names.
            first: the first worker's answer to `values`, if JAX does not know of the other workers.
        """
        if first is None:
            self._state = with_first_replicas(self._state, names)
        elif first[0]:  # else that is the error
            self._state = with_values(self._state, dict(zip(names, first[1], strict=True)))

    def values(self, names: list[str]) -> list[np.ndarray]:
        """Return some arrays of the state, by their names."""
        return named_values(self._state, names)

    def restore(self, folder: str, step: int) -> None:
        """Restore this process's part of the state saved after `step` steps, already sharded."""
        self._state = checkpoint.restore(Path(folder), step, self._placed())
        self._feed(start=step)

    def snapshots(self, place: checkpoint.HostPlace) -> checkpoint.Holdings:
        """Return what the folders of this host hold of the state, by the moment."""
        memory = memory_folder(os.environ)
        self._found = checkpoint.intact(place.all(memory)) if memory else {}
        return {moment: found.holding for moment, found in self._found.items()}

    def lacks(self, moment: checkpoint.Moment) -> list[checkpoint.Piece]:
        """Return the shards of this process's part of a state that `snapshots` has not found."""
        return self._found.setdefault(moment, checkpoint.Found()).lacks(self._placed())

    def lend(self, moment: checkpoint.Moment, pieces: list[checkpoint.Piece]) -> dict[Any, Any]:
        """Return pieces of the state that `snapshots` has found, or parts of them."""
        return {piece: self._found[moment].copy_of(piece) for piece in pieces}

    def borrow(self, moment: checkpoint.Moment, lent: Outcome) -> None:
        """Take another worker's answer to `lend`."""
        if lent[0]:  # else that is the error
            self._found[moment].add(lent[1])

    def restore_snapshot(self, moment: checkpoint.Moment) -> None:
        """Restore this process's part of the state from what was found and borrowed."""
        self._state = self._found[moment].restored(self._placed())
        self._feed(start=moment.step)

    def keep_snapshots(self, moment: checkpoint.Moment, place: checkpoint.HostPlace) -> Any:
        """Take memory for snapshots; return its folder and the bytes of each piece, or why not."""
        self._found = {}
        memory = memory_folder(os.environ)
        if memory is None:
            return "no folder in shared memory outlives a worker here"
        sizes = self._saver.keep_snapshots(memory, place, self._state, moment)
        return sizes if isinstance(sizes, str) else (NodeFolder.here(place.own(memory)), sizes)

    def exchange_copies(self, *about: Any) -> str | None:
        """Copy pieces of each snapshot to another host, and take others: `Snapshots.exchange`."""
        return self._saver.snapshots.exchange(*about)

    def drop_snapshots(self) -> None:
        """Give the memory for snapshots back."""
        self._saver.drop_snapshots()

    def pass_over(
        self, step: int, batches: int, taken: Mapping[str, int], left_out: Collection[int] = ()
    ) -> None:
        """Skip batches: from `step` on, take the batch `batches` after the one of a step's number.

        Call it after `create` or `restore`.

        Args:
            step: the number of finished steps.
            batches: how many to skip; below 0 where the run began with the state of another.
            taken: the rows that were taken before batch 0, as of `Dataset.after`.
            left_out: the indices of single batches to skip among those that are left.
        """
        self._feeder.close()
        self._passed_over, self._taken, self._left_out = batches, taken, left_out
        self._feed(step)

    def first_batch(self, step: int) -> None:
        """Wait for the batch of a step that is still to come."""
        self._feeder.peek(step - 1 + self._passed_over)

    def dry_step(self, step: int) -> None:
        """Run a step, as `step` would next, on a copy of the state; nothing changes.

        The first run of a program opens connections and allocates, and takes as long as many.
        """
        self._train.warm_up(self._state, self._feeder.peek(step - 1 + self._passed_over))

    def step(
        self,
        step: int,
        profile: bool = False,
        record: bool = False,
        trace_in: str | None = None,
        watch: bool = False,
    ) -> StepResult | None:
        """Send a step to the devices and return the result of the one before.

        Args:
            step: the number of the step, from 1.
            profile: run the step alone and task by task. All results from this call on then include
                its stage times.
            record: drain the pipeline, then run and record one normal step. A later result has the
                recording.
            trace_in: the folder to keep the trace of JAX's profiler in, if there is to be one.
            watch: record it beside the steps around it, without the profiler.

        Returns:
            The result of the step before, or None if there is none outstanding.
        """
        if self._sent is None:
            self._completed = time.perf_counter()
        alone = record or trace_in is not None
        result = self._finish() if profile or alone else None
        if alone:
            self._recording_reader.wait()  # there is one session of JAX's profiler at a time
        if alone or watch:
            self._spans.start()
        with self._spans.span("data", f"batch of step {step}"):
            batch, waited = self._feeder.get(step - 1 + self._passed_over)
        stalled = stalled_seconds(waited, self._sent)
        if profile:
            (self._state, metrics), self._stages = self._train.profile(self._state, batch)
        elif alone:
            keep = None if trace_in is None else trace_folder(trace_in, self._rank, step)
            (self._state, metrics), read = self._train.record(self._state, batch, keep=keep)
            self._recording_reader.add(step, self._rank, read, hand_on=record)
        else:
            if watch:
                run = functools.partial(self._train.record, profiled=False, waits=False)
                (self._state, metrics), read = run(self._state, batch)
                self._recording_reader.add(step, self._rank, read)
            else:
                self._state, metrics = self._train(self._state, batch)
            result = self._finish()
        every, digests = self._config.train.check_replicas_every, []
        if every and step % every == 0:
            digests = self._digester.start(self._state)
        outcome = self._fetcher.submit(fetched_metrics, metrics)
        self._sent = Sent(step, outcome, waited, stalled, digests)
        return self._with_times(result)

    def flush(self) -> StepResult | None:
        """Wait for the step in progress and return its result; None if there is none."""
        result = self._finish()
        self._recording_reader.wait()
        return self._with_times(result)

    def snapshot(self, step: int) -> StepResult | None:
        """Begin to take a snapshot of the newest state, that after `step`; return like `flush`."""
        result = self._finish()
        self._saver.snapshots.take(step, self._state)
        return self._with_times(result)

    def evaluate(self, batch: int) -> StepResult | None:
        """Evaluate on one batch of held-out data.

        Every evaluation takes the same batches, so that its values can be compared; each is a call,
        in order, so that a long evaluation is not taken for a hung worker.

        Args:
            batch: the number of the batch, below `Program.eval_batches`.

        Returns:
            After the last batch, the result of the step sent before the evaluation, with the means
                over all rows as `eval/...`; before, None.

        Raises:
            launcher.recipes.InputError: the data that is held out has no rows.
        """
        if batch == 0:
            self._before_evaluation = self.flush()
            self._evaluated = averaged_model(self._state, self._placed())
        means = self._evaluator.run(self._evaluated, batch)
        if means is None:
            return None
        self._evaluated = {}
        assert self._before_evaluation is not None
        named = {f"eval/{name}": value for name, value in means.items()}
        return replace(self._before_evaluation, metrics=self._before_evaluation.metrics | named)

    def sample(self, step: int, prompts: list[list[int]], most: int) -> Sample:
        """Continue prompts, given as tokens, with the parameters after `step`, the newest."""
        if self._sampler is None:
            self._sampler = Sampler(self._config, self._train.plan)
        params = averaged_model(self._state, self._placed())["params"]
        return self._sampler.sample(step, params, prompts, most)

    def save(
        self, folder: str, step: int, metadata: dict[str, Any], token: str, beside: bool = False
    ) -> None:
        """Begin to write this process's part of the newest state.

        `saved` must have been called for the save before.

        Args:
            folder: the folder of checkpoints.
            step: the number of finished steps.
            metadata: JSON-able metadata of the checkpoint.
            token: a new string for every save, the same in all processes.
            beside: whether training continues.
        """
        if self._servers and self._rank > 0:  # whose state is the first worker's
            return
        if beside:
            self._saver.start_process()
        keep = self._config.train.checkpoint.keep
        writers = checkpoint.Writers(jax.process_index(), jax.process_count(), token)
        self._saver.begin(Path(folder), step, self._state, metadata, keep, writers)

    def writing(self, seconds: float) -> bool:
        """Wait for up to `seconds`; return whether the save is still being written."""
        return self._saver.is_writing(seconds)

    def saved(self) -> str | None:
        """Wait for the save in progress; return why it failed, or None if it did not."""
        return self._saver.finish()

    def close(self) -> None:
        """Stop the threads and leave the process group."""
        self._saver.close()
        self._fetcher.shutdown()
        self._recording_reader.close()
        self._garbage.close()
        self._feeder.close()
        if self._transport is not None:
            jax.distributed.shutdown()

    @property
    def _program(self) -> Program:
        assert self._built is not None
        return self._built

    def _placed(self) -> TrainState:
        """Return the state's shapes with their shardings."""
        shapes: TrainState = jax.tree.map(spec_at, self._program.state, self._train.in_shardings[0])
        return shapes

    def _feed(self, start: int) -> None:
        first, stop = start + self._passed_over, self._config.train.steps + self._passed_over
        program, rows = self._program, self._train.batch_rows()
        data = program.dataset
        batches = data.after(self._taken) if data.after else data.train
        made, out = own_rows(batches, program.batch, rows), self._left_out
        self._feeder = Feeder(lambda k: made(batch_index(first, k - first, out)), first, stop)

    def _finish(self) -> StepResult | None:
        if self._sent is None:
            return None
        sent, self._sent = self._sent, None
        copies = self._digester.finish if sent.digests else None
        counted = self._train.peak_bytes
        result, self._completed = finished(sent, self._completed, copies, counted)
        spent = {"data": sent.stall_seconds, "garbage": self._garbage.take()}
        return replace(result, spent=(spent,))

    def _with_times(self, result: StepResult | None) -> StepResult | None:
        """Return a result with the stage times, and with what was recorded and has been read."""
        if result is None:
            return None
        recordings, snapshots = self._recording_reader.take(), self._saver.snapshots
        result = replace(result, recordings=recordings, snapshots=(snapshots.newest,))
        if (seconds := snapshots.spent()) is not None:
            result.metrics["perf/snapshot_seconds"] = seconds
        return result if self._stages is None else with_stage_times(result, self._stages)


class Compiling:
    """The train step and the evaluation step of a plan, lowered, and on their way.

    Args:
        program: the run's program.
        plan: the plan of the train step; evaluation follows it.
        services: what instructions use.
        ahead: what `lower_ahead` has returned for both steps, if it was called.

    Attributes:
        programs: the distinct programs, while they are compiled.

    Raises:
        PlanError: the program differs from the one that was planned.
    """

    def __init__(self, program: Program, plan: Plan, services: StepServices, ahead: Any) -> None:
        self._started, devices = time.perf_counter(), jax.devices()
        # A recorded step holds no evaluation.
        rest = StepServices(*services[:2], SpanRecorder(), services.choices)
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compiler")
        self._steps: list[StepCompilation] = []
        try:
            for k, (step, own) in enumerate(program.by(plan)):
                about = devices, rest if k else services, self._pool, ahead and ahead[k]
                self._steps.append(StepCompilation(step, own, *about))
        finally:  # what is begun waits for it
            if services.choices:
                services.choices.choose()
        self.programs = [future for step in self._steps for future in step.programs]

    def result(self) -> tuple[Executable, Executable | None, float]:
        """Wait for all; return the train step, the evaluation step, and the seconds it took."""
        with self._pool:
            train, *others = [step.result() for step in self._steps]
        return train, next(iter(others), None), time.perf_counter() - self._started


class TriedPlan:
    """A plan's step, compiled, with a first state and a batch; nothing of it stays.

    Args:
        program: the run's program.
        plan: the plan to try.
        services: what its instructions use.

    Raises:
        Exception: the plan cannot be compiled, or its state does not fit.
    """

    def __init__(self, program: Program, plan: Plan, services: StepServices) -> None:
        gc.collect()  # what the trial before has held
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compilation = StepCompilation(program.train, plan, jax.devices(), services, pool)
            if services.choices:
                services.choices.choose(in_turns=True)
            self._step = compilation.result()
        self._state = self._step.create(program.init, program.seed)
        rows = self._step.batch_rows()
        self._batch: Any = own_rows(program.dataset.train, program.batch, rows)(0)

    def run(self, steps: int) -> float:
        """Return the mean seconds of a step over `steps` consecutive steps.

        All workers call it together, with the same number.
        """
        began = time.perf_counter()
        for _ in range(steps):
            self._state, metrics = self._step(self._state, self._batch)
        arrays = jax.tree.leaves((self._state, metrics))
        jax.block_until_ready([array for array in arrays if array.addressable_shards])
        return (time.perf_counter() - began) / steps


class Evaluator:
    """Evaluates a model batch by batch.

    Args:
        step: the compiled evaluation step.
        program: the run's program, with what is held out.
    """

    def __init__(self, step: Executable, program: Program) -> None:
        self._step, self._program = step, program
        self._rows = step.batch_rows()
        self._evaluated: list[tuple[int, dict[str, jax.Array]]] = []

    def run(self, model: dict[str, Any], batch: int) -> dict[str, float] | None:
        """Evaluate on one batch of held-out data; batches are given in order, from 0.

        Args:
            model: `TrainState.model`.
            batch: the number of the batch, below `Program.eval_batches`.

        Returns:
            After the last batch, the means over all rows of the metrics that this process knows;
            before, None.

        Raises:
            launcher.recipes.InputError: there are no rows.
        """
        held_out = self._program.dataset.validation
        assert held_out is not None
        if batch == 0:
            self._evaluated = []
        for count, part in filled(held_out, batch, self._program.batch, self._rows):
            self._evaluated.append((count, self._step(model, part)))
            if len(self._evaluated) > 1:  # wait for the one before while this one runs
                fetched_values(self._evaluated[-2][1])
        if batch + 1 != self._program.eval_batches:
            return None
        if not self._evaluated:
            raise InputError("the first batch of held-out data has no rows; hold some out")
        fetched = [(count, fetched_values(metrics)) for count, metrics in self._evaluated]
        return {name: _mean([(n, values[name]) for n, values in fetched]) for name in fetched[0][1]}


def _mean(found: list[tuple[int, np.ndarray]]) -> float:
    """Return the mean over full batches, each with the number of rows that it stands for.

    Each holds a value or, of a model that gives weights, the value and the batch's weight
    (`make_eval_step`), which grows with the repetition of rows.
    """
    pairs = [(n, *np.ravel(value).astype(float)) for n, value in found]
    weights = [n * weight for n, _, *weights in pairs for weight in weights or [1.0]]
    return float(np.average([value for _, value, *_ in pairs], weights=weights))
