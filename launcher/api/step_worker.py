"""The worker's side of `launcher.init("ray")`.

It owns the host's devices, the compiled steps, and this process's part of every array that the
driver has a handle to; steps and arrays are known by numbers that the driver assigns. The driver
calls `StepWorker.do`: each call is one message, and its result is plain data.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from launcher.api.calls import SURVIVED, Call, Given, Held, Shards, StepProgram, UserCall
from launcher.api.own_copies import Scope, call_here, is_key
from launcher.api.signature import devices_stay
from launcher.arrays.stacked_array import (
    StackedArray,
    num_rows,
    rows_in,
    rows_of,
    sharding_of,
    stacked_in,
    with_rows,
)
from launcher.base import Span
from launcher.cluster.process_group import Peer
from launcher.cluster.ray.pickling import dumps_script
from launcher.partition import Box
from launcher.runtime import (
    Copies,
    Digester,
    Executable,
    StageTimes,
    Transport,
    compile_step,
    fail_together,
    move,
    wait_for,
)
from launcher.trace import trace_step


@dataclass(frozen=True)
class _Compiled:
    """A compiled step.

    Attributes:
        executable: the step's executable.
        in_tree: the structure of its arguments.
        where: the sharding of every leaf of the arguments that the step uses; None for others.
    """

    executable: Executable
    in_tree: Any
    where: list[Any]


_SMALL = 64 * 1024  # bytes of a result that may be kept after the driver has dropped it


class StepWorker(Peer):
    """A worker that compiles steps, runs them on this process's devices and keeps their results."""

    def __init__(self) -> None:
        super().__init__()
        self._programs: dict[int, _Compiled] = {}
        self._arrays: dict[int, jax.Array] = {}
        self._newest: list[jax.Array] = []  # the small results of the last step
        self._failure: BaseException | None = None

    def do(self, message: bytes, *shared: Any) -> Any:
        """Free what the driver has dropped, then call a method.

        After a failure every call fails for the same cause, since the workers no longer hold the
        same arrays. Failures of `SURVIVED` are an exception: they have made and moved nothing.

        Args:
            message: a pickled `(method, dropped, arguments)`.
            *shared: further arguments of the method.
        """
        if self._failure is not None:
            raise self._failure
        method = ""
        try:
            method, dropped, arguments = pickle.loads(message)
            for number in dropped:
                self._arrays.pop(number, None)
                self._programs.pop(number, None)
            return getattr(self, method)(*arguments, *shared)
        except BaseException as error:
            if method not in SURVIVED:
                self._failure = error
            raise

    def compile(self, number: int, pickled: bytes) -> float:
        """Trace a pickled `StepProgram` again and compile it; return the seconds of compiling.

        Raises:
            PlanError: it is not the program that was planned: the code, or the versions of the
                libraries, differ from the driver's.
        """
        devices = jax.devices()  # before a module of the user's can change what makes them
        with fail_together(self._transport), devices_stay():
            program: StepProgram = pickle.loads(pickled)
            _set(program.settings)
            step = trace_step(**vars(program.source))
            services = self._transport, self._servers
            executable = compile_step(step, program.plan, devices, *services)
        in_tree = step.whole.in_tree
        where = in_tree.flatten_up_to(executable.in_shardings)  # None stands for leaves here, too
        where = [place if i in executable.used else None for i, place in enumerate(where)]
        self._programs[number] = _Compiled(executable, in_tree, where)
        return executable.compile_seconds

    def create(self, number: int, first: int, pickled: bytes) -> None:
        """Create a step's first argument in place, given a pickled `(init, arguments)`.

        The driver has checked its structure. Functions in it are not identical to those that came
        with the step, so it gets the structure that was traced.
        """
        with devices_stay():
            init, arguments = pickle.loads(pickled)
            step = self._programs[number]
            tree = step.in_tree.children()[0]

            def as_traced(*arguments: Any) -> Any:
                return jax.tree.unflatten(tree, jax.tree.leaves(init(*arguments)))

            self._keep(first, step.executable.create(as_traced, *arguments))

    def run(self, call: Call, values: Sequence[Any]) -> StageTimes | list[Span] | None:
        """Run a step without waiting for it; return its measurements, if any are requested.

        It waits for the step before. The devices stay busy all the same, and no call of any kind
        lasts longer than two steps, however many the driver has sent.
        """
        run, args = self._called(call, values)
        measured: StageTimes | list[Span] | None = None
        if call.profile:
            results, measured = run.profile(*args)
        elif call.record:
            results, read = run.record(*args)
            measured = read()
        else:
            results = run(*args)
        self._keep(call.first, results)
        before, leaves = self._newest, jax.tree.leaves(results)
        self._newest = [x for x in leaves if x.nbytes <= _SMALL and x.addressable_shards]
        wait_for(before)
        return measured

    def foreach(self, scope: Scope, pickled: bytes) -> bytes:
        """Call a pickled `UserCall` here; return the pickled list of its results.

        Args:
            scope: see `call_here`.
            pickled: the call.

        Raises:
            TypeError: a result cannot be pickled.
            Exception: what the function raises.
        """
        with devices_stay():
            call: UserCall = pickle.loads(pickled)
            _set(call.settings)
            trees = jax.tree.map(self._meant, call.trees)
            devices, is_first = jax.local_devices(), self._rank == 0
            results = call_here(call.fun, trees, scope, devices, is_first=is_first)
            try:
                return dumps_script(results)
            except Exception as error:
                raise TypeError(f"what it returned cannot be pickled: {error}") from None

    def _meant(self, leaf: Any) -> Any:
        """Return what a leaf of a tree that has travelled stands for; of rows apart, a tuple."""
        if isinstance(leaf, Held):
            return with_rows(self._arrays[leaf.number])
        return jax.numpy.asarray(leaf.value) if isinstance(leaf, Given) else leaf

    def warm_up(self, call: Call, values: Sequence[Any]) -> None:
        """Run a step on copies of what it donates and wait for it; nothing is kept."""
        run, args = self._called(call, values)
        run.warm_up(*args)

    def _called(self, call: Call, values: Sequence[Any]) -> tuple[Executable, tuple[Any, ...]]:
        """Return the step of a call and its arguments."""
        remaining = iter(values)
        leaves = [next(remaining) if n < 0 else self._arrays[n] for n in call.leaves]
        for number in call.consumed:
            del self._arrays[number]
        program = self._programs[call.program]
        if self._transport is not None:
            self._bring(leaves, call.leaves, program.where, self._transport)
        return program.executable, jax.tree.unflatten(program.in_tree, leaves)

    def fetch(self, numbers: Sequence[int]) -> list[Shards]:
        """Return the shards of arrays that lie here, each in one process; of keys, the data."""
        if self._holds_copies:
            return [[] for _ in numbers]
        shards = [_shards(_plain(self._arrays[number])) for number in numbers]
        return list(jax.device_get(shards))

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait for the parts of arrays that lie here."""
        arrays = [self._arrays[number] for number in numbers]
        jax.block_until_ready([array for array in arrays if array.addressable_shards])

    def digests(self, numbers: Mapping[str, int]) -> Copies:
        """Return digests of this process's parts of arrays with replicas, given by name."""
        arrays = {name: self._arrays[number] for name, number in numbers.items()}
        digester = Digester(arrays, rank=self._server_rank)
        return digester.finish(digester.start(arrays))

    def lend_own(self, fun: Callable[..., Any], numbers: Sequence[int], *arguments: Any) -> Any:
        """Call a function as `lend` does, unless another worker holds the same."""
        return None if self._holds_copies else self.lend(fun, numbers, 0, *arguments)

    def lend(
        self,
        fun: Callable[..., tuple[list[jax.Array], Any]],
        numbers: Sequence[int],
        first: int,
        *arguments: Any,
    ) -> Any:
        """Call an internal function with arrays stored here, by their numbers.

        Args:
            fun: takes the arrays and `arguments`; returns new arrays, and the answer.
            numbers: the arrays' numbers.
            first: the number of the first new array; the others follow.
            *arguments: further arguments.
        """
        arrays, answer = fun([self._arrays[number] for number in numbers], *arguments)
        self._keep(first, arrays)
        return answer

    @property
    def _holds_copies(self) -> bool:
        """Whether the first worker holds all that this one does, as with parameter servers."""
        return self._servers is not None and self._servers.rank > 0

    def placement(self, number: int) -> str:
        """Return in words where an array lies."""
        return _describe_sharding(sharding_of(self._arrays[number]))

    def ask(self, number: int, attribute: str, *arguments: Any) -> Any:
        """Return an attribute of a compiled step here or, for a method, its result."""
        found = getattr(self._programs[number].executable, attribute)
        return found(*arguments) if callable(found) else found

    def _bring(
        self, leaves: list[Any], numbers: Sequence[int], where: Sequence[Any], transport: Transport
    ) -> None:
        """Move arrays to the devices on which the step wants them, perhaps in another process.

        All workers find the same ones.
        """
        places = [
            i
            for i, (number, wanted) in enumerate(zip(numbers, where, strict=True))
            if number >= 0 and wanted is not None and sharding_of(leaves[i]) != wanted
        ]
        if places:
            counts = [num_rows(leaves[i]) for i in places]
            if counts != [len(rows_of(where[i])) for i in places]:
                raise NotImplementedError(
                    "an array whose rows lie on the stages of their layers is taken whole by this "
                    "step; let it run the layers by the same jax.lax.scan as the train step"
                )
            arrays = rows_in([leaves[i] for i in places], counts)
            avals = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
            src = [array.sharding for array in arrays]
            dst = [to for i in places for to in rows_of(where[i]) or (where[i],)]
            moved = stacked_in(move(arrays, avals, src, dst, transport), counts)
            for i, array in zip(places, moved, strict=True):
                leaves[i] = array

    def _keep(self, first: int, results: Any) -> None:
        self._arrays.update(enumerate(jax.tree.leaves(results), first))


def _describe_sharding(sharding: Any) -> str:
    """Return a sharding in words, such as "axis 0 over data, on devices 2, 3".

    The devices are counted as in the plan.
    """
    if rows := rows_of(sharding):
        words = map(_describe_sharding, rows)
        groups = itertools.groupby(enumerate(words), key=lambda row: row[1])
        parts = [(word, [i for i, _ in group]) for word, group in groups]
        return "; ".join(f"rows {at[0]} to {at[-1]}: {word}" for word, at in parts)
    number = {device: i for i, device in enumerate(jax.devices())}
    devices = ", ".join(str(number[device]) for device in sharding.mesh.devices.flat)
    cuts = [
        f"axis {axis} over {' and '.join([names] if isinstance(names, str) else names)}"
        for axis, names in enumerate(sharding.spec)
        if names
    ]
    many = "s" if "," in devices else ""
    return f"{', '.join(cuts) or 'whole'}, on device{many} {devices}"


def _set(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)


def _plain(array: jax.Array) -> jax.Array:
    has_data = is_key(array.dtype) and array.addressable_shards
    return jax.random.key_data(array) if has_data else array


def _shards(array: Any) -> list[tuple[Box, Any]]:
    """Return the shards of an array that this process is to send, and where they are in it."""
    if isinstance(array, StackedArray):
        found = [(i, shard) for i, row in enumerate(array.rows) for shard in _shards(row)]
        return [(((i, i + 1), *box), data[None]) for i, (box, data) in found]
    own = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return [(_box(shard.index, array.shape), shard.data) for shard in own]


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
