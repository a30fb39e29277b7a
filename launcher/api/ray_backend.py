"""The workers of a session as one machine, in the driver: the backend of `launcher.init("ray")`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from launcher.api.calls import Call, Given, Held, StepProgram, UserCall
from launcher.api.messages import Connection, Messages, Reply
from launcher.api.own_copies import Scope
from launcher.api.remote_array import Fetch, RemoteArray, known_to_flax, pickled, portable
from launcher.api.signature import Traceable, trace_settings
from launcher.base import Clock, Span
from launcher.cluster.errors import WorkerError
from launcher.cluster.ray.worker import WorkerHandle
from launcher.cluster.worker_group import WorkerGroup
from launcher.hardware import WorkerInfo
from launcher.plan import ClusterShape, Plan
from launcher.plan.methods import AutoStageOption, Method, PipeshardParallel
from launcher.plan.options import stage_option_of
from launcher.plan.profile.calibration import calibrated, measure_first
from launcher.runtime import Copies, StageTimes, transformed_error
from launcher.trace import TracedStep

_IN_MESSAGE = 64 * 1024  # bytes up to which sending to each worker is quicker than sharing


class RayBackend(Messages):
    """The workers, one a host, each with a `StepWorker`.

    The first call decides how they reach one another: by parameter servers if it compiles a plan
    that has some, and else as a process group.

    Several threads may use it: each message is put together and sent under the lock `sending`, and
    waited for without it.

    Args:
        group: the workers.
        nominal: the cluster, at nominal rates.
        serve: starts so many parameter servers for so many workers.
        is_here: whether the workers are on this machine.
    """

    def __init__(
        self,
        group: WorkerGroup,
        nominal: ClusterShape,
        serve: Callable[[int, int], list[WorkerHandle]],
        is_here: bool,
    ) -> None:
        super().__init__(group)
        known_to_flax()
        self._nominal, self._is_here = nominal, is_here
        self._connection = Connection(group, serve)
        self._next_number = 0
        self._wanted: list[RemoteArray] = []

    def shape(self, method: Method | None = None) -> ClusterShape:
        """Return the cluster that a method plans for; see `planned_shape`."""
        return planned_shape(self._nominal, method, self._is_here)

    def send(self, method: str, *arguments: Any, shared: Any = None) -> list[Reply]:
        """Send a message once the workers are connected; see `Messages.send`."""
        with self.sending:
            self._connection.open()
            return super().send(method, *arguments, shared=shared)

    # -- arrays (see `remote_array.Owner`) -----------------------------------------------------

    def fetch(self, arrays: Sequence[RemoteArray]) -> None:
        """Start to fetch arrays, in one message to each worker."""
        with self.sending:
            replies = self.send("fetch", [array.number for array in arrays])
            fetch = Fetch(lambda: self.answers(replies), arrays)
            for place, array in enumerate(arrays):
                array.fetched = fetch, place

    def want(self, array: RemoteArray) -> None:
        """Fetch this array with the next flush."""
        self._wanted.append(array)

    def flush(self) -> None:
        """Start to fetch all arrays that are wanted."""
        with self.sending:
            wanted, self._wanted = self._wanted, []
            wanted = [a for a in wanted if not a.is_deleted()]
            if wanted:
                self.fetch(wanted)

    def wait(self, array: RemoteArray) -> None:
        """Wait until an array is computed."""
        with self.sending:
            replies = self.send("wait", [array.number])
        self.answers(replies)

    def digests(self, arrays: Mapping[str, RemoteArray]) -> list[Copies]:
        """Return each worker's digests of the replicated ones of these arrays.

        Raises:
            TypeError: an array belongs to a session that was shut down.
        """
        with self.sending:
            numbers = {name: self.number_of(array) for name, array in arrays.items()}
            replies = self.send("digests", numbers)
        return self.answers(replies)

    def placement(self, array: RemoteArray) -> str:
        """Return in words where an array lies."""
        with self.sending:
            replies = self.send("placement", array.number)
        count = len(self._group.handles)
        every = f" of each of {count} workers" if self._connection.by_servers else ""
        return str(self.answers(replies)[0]) + every

    def lend(self, fun: Callable[..., Any], arrays: Sequence[RemoteArray], *given: Any) -> Any:
        """Return what `fun` answers on each worker; see `StepWorker.lend_own`."""
        with self.sending:
            numbers = tuple(array.number for array in arrays)
            replies = self.send("lend_own", fun, numbers, *given)
        return self.answers(replies)

    def lend_for(
        self,
        fun: Callable[..., Any],
        like: Sequence[RemoteArray],
        avals: Sequence[tuple[Any, Any]],
        *arguments: Any,
    ) -> list[RemoteArray]:
        """Return handles to the arrays that `fun` makes on the workers out of others there."""
        with self.sending:
            numbers, first = tuple(array.number for array in like), self.new_numbers(len(avals))
            replies = self.send("lend", fun, numbers, first, *arguments)
        self.answers(replies)
        return [RemoteArray(self, n, *aval) for n, aval in enumerate(avals, first)]

    def new_numbers(self, count: int) -> int:
        """Return the first of `count` consecutive numbers that nothing has had yet."""
        with self.sending:
            first = self._next_number
            self._next_number += count
            return first

    # -- workers -------------------------------------------------------------------------------

    def workers(self) -> list[WorkerInfo]:
        """Return a description of each worker, in the order of the hosts."""
        processes = self.answers(super().send("process"))  # whether connected or not
        return self._group.infos(processes, self._nominal.devices_per_host)

    def clocks(self) -> list[Clock]:
        """Return each worker's clock against this process's, once all messages are answered."""
        return self._group.clocks()

    def foreach(self, scope: Scope, fun: Callable[..., Any], trees: Sequence[Any]) -> list[Any]:
        """Call a user's function on the workers' own copies of arrays; return all results in order.

        Args:
            scope: see `own_copies.call_here`.
            fun: the function.
            trees: its arguments.

        Raises:
            TypeError: the function cannot be pickled, or an array is of another session.
            ConsumedError: an array was donated.
            WorkerError: it raised; the session continues.
        """
        with self.sending:
            travelling = jax.tree.map(self._travelling, tuple(trees))
            call = pickled(UserCall(fun, travelling, trace_settings()), fun)
            replies = self.send("foreach", scope, shared=call)
        return [result for part in self.answers(replies) for result in pickle.loads(part)]

    def _travelling(self, leaf: Any) -> Any:
        if isinstance(leaf, RemoteArray):
            return Held(self.number_of(leaf))
        return Given(portable(leaf)) if isinstance(leaf, jax.Array) else leaf

    def number_of(self, array: RemoteArray) -> int:
        """Return the number of an array of this session.

        Raises:
            TypeError: the array belongs to a session that was shut down.
            ConsumedError: it was donated.
        """
        if array.owner is not self:
            raise TypeError(f"{array!r} belongs to a session that was shut down")
        return array.number

    # -- steps ---------------------------------------------------------------------------------

    def compile(self, step: TracedStep, plan: Plan, source: Traceable) -> RemoteExecutable:
        """Compile a step on the workers, each its own stages, and wait for them.

        Args:
            step: the traced step.
            plan: its plan.
            source: the function and arguments that it was traced from.

        Raises:
            WorkerError: a worker cannot compile it; the session continues if that worker lives.
            PlanError: the workers are connected in another way than the plan needs.
        """
        with self.sending:
            self._connection.open_for(plan)
        program = StepProgram(source, plan, trace_settings())
        number = self.new_numbers(1)
        replies = self.send("compile", number, shared=pickled(program, source.fun))
        try:
            return RemoteExecutable(self, number, step, plan, max(self.answers(replies)))
        except WorkerError:
            self.drop(number)  # where it was compiled
            raise


class RemoteExecutable:
    """A step that is compiled on the workers; the counterpart of `launcher.runtime.Executable`.

    Attributes:
        plan: the plan that it runs.
        compile_seconds: the seconds that the slowest worker took to compile.
    """

    def __init__(
        self, backend: RayBackend, number: int, step: TracedStep, plan: Plan, compile_seconds: float
    ) -> None:
        self.plan, self.compile_seconds = plan, compile_seconds
        self._backend, self._number = backend, number
        self._whole = step.whole
        self._out_avals = [(v.aval.shape, v.aval.dtype) for v in self._whole.outvars]

    def __call__(self, *args: Any) -> Any:
        """Send one step to the workers and return handles at once; donated handles are consumed.

        Raises:
            TypeError: the arguments do not have the structure that was traced, or are traced.
            ConsumedError: an argument was donated before.
            WorkerError: a worker failed in an earlier call, or is gone.
        """
        return self._run(args)[0]

    def warm_up(self, *args: Any) -> None:
        """Run one step on copies of the donated arguments, and wait for it; nothing changes."""
        self._backend.answers(self._run(args, "warm_up")[1])

    def profile(self, *args: Any) -> tuple[Any, StageTimes]:
        """Run one step, waiting for every task; return its results and the times of the stages."""
        results, replies = self._run(args, profile=True)
        parts: list[StageTimes] = self._backend.answers(replies)
        busy = zip(*(part.stage_seconds for part in parts), strict=True)
        tasks = {task: s for part in parts for task, s in part.task_seconds.items()}
        return results, StageTimes(tuple(map(max, busy)), tasks)

    def record(self, *args: Any) -> tuple[Any, list[list[Span]], list[Clock]]:
        """Run one step and record it; return its results, and each worker's spans and clock."""
        with self._backend.sending:  # the workers are idle while their clocks are read
            results, replies = self._run(args, record=True)
            return results, self._backend.answers(replies), self._backend.clocks()

    def create(self, init: Callable[..., Any], *args: Any) -> Any:
        """Create the step's first argument, `init(*args)`, on the workers, each leaf in its place.

        Raises:
            TypeError: `init` does not return what the step takes.
        """
        shapes, tree = jax.tree.flatten(jax.eval_shape(init, *args))
        expected = self._whole.in_tree.children()[0]
        wanted = self._whole.in_avals[: len(shapes)]
        avals = [(leaf.shape, leaf.dtype) for leaf in shapes]
        if tree != expected or avals != [(a.shape, a.dtype) for a in wanted]:
            raise TypeError("init does not return the structure, shapes and dtypes of the step")
        first = self._backend.new_numbers(len(avals))
        made_by = pickled((init, jax.tree.map(portable, args)), init)
        self._backend.send("create", self._number, first, shared=made_by)
        return jax.tree.unflatten(tree, self._handles(first, avals))

    def on_workers(self, attribute: str, *arguments: Any) -> list[Any]:
        """Return an attribute of each worker's executable, or the result of that method there."""
        return self._backend.answers(self._backend.send("ask", self._number, attribute, *arguments))

    def hlo_text(self) -> dict[str, str]:
        """Return the compiled programs as text, by name."""
        return {name: text for part in self.on_workers("hlo_text") for name, text in part.items()}

    def __del__(self) -> None:
        self._backend.drop(self._number)

    def _run(
        self, args: tuple[Any, ...], method: str = "run", **how: bool
    ) -> tuple[Any, list[Reply]]:
        leaves, tree = jax.tree.flatten(args)
        if tree != self._whole.in_tree:
            expected = self._whole.in_tree
            raise TypeError(f"the step was compiled for arguments {expected}, not {tree}")
        with self._backend.sending:
            return self._sent(leaves, method, how)

    def _sent(
        self, leaves: list[Any], method: str, how: dict[str, bool]
    ) -> tuple[Any, list[Reply]]:
        backend = self._backend
        backend.flush()
        numbers: list[int] = []
        values: list[Any] = []
        consumed: list[RemoteArray] = []
        for i, leaf in enumerate(leaves):
            if type(leaf) is not RemoteArray or self._whole.batch[i]:  # each gets the whole batch
                if isinstance(leaf, jax.core.Tracer):
                    raise transformed_error()
                values.append(portable(leaf, self._whole.in_avals[i].dtype))
                numbers.append(-1)
                continue
            numbers.append(backend.number_of(leaf))
            if self._whole.donated[i] and method == "run":
                consumed.append(leaf)
        gone = {leaf.number for leaf in consumed}
        if sum(number in gone for number in numbers) > len(gone):
            raise TypeError("an array is given twice and donated; a call can consume it only once")
        first = backend.new_numbers(len(self._out_avals))
        call = Call(self._number, first, tuple(numbers), tuple(gone), **how)
        if sum(value.nbytes for value in values) > _IN_MESSAGE:
            replies = backend.send(method, call, shared=values)
        else:
            replies = backend.send(method, call, values)
        for leaf in consumed:
            leaf.consume()
        results = self._handles(first, self._out_avals)
        return jax.tree.unflatten(self._whole.out_tree, results), replies

    def _handles(self, first: int, avals: Iterable[tuple[Any, Any]]) -> list[RemoteArray]:
        return [RemoteArray(self._backend, n, *aval) for n, aval in enumerate(avals, first)]


def planned_shape(nominal: ClusterShape, method: Method | None, is_here: bool) -> ClusterShape:
    """Return a cluster at the rates to plan by.

    They are measured ones where a calibration is kept. A search that finds none of this machine's
    CPU devices measures them first. GPUs are held by the processes that are up, and are measured by
    `task=calibrate`.

    Args:
        nominal: the cluster, at nominal rates.
        method: what plans; a search with the cost "model" rests on nominal rates.
        is_here: whether the devices are this machine's.

    Raises:
        PlanError: the method's stage option is not known.
    """
    cost = _cost(method)
    if cost == "model":
        return nominal
    measures = cost is not None and is_here and nominal.device_kind == "cpu"
    return calibrated(nominal, measure_first(nominal) if measures else None)


def _cost(method: Method | None) -> str | None:
    """Return what a method's search rests on (`AutoStageOption.cost`); None if it has none."""
    if not isinstance(method, PipeshardParallel):
        return None
    option = stage_option_of(method.stage_option)
    return option.cost if isinstance(option, AutoStageOption) else None
