"""Build the dispatch table that a call follows.

It is this process's instruction list with everything bound that is known before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from launcher.base import SpanRecorder
from launcher.plan import CompiledProgram, PlanError
from launcher.runtime.emit.instructions import (
    Emitted,
    Free,
    Instruction,
    Run,
    Send,
    digest,
    digests,
    prove,
)
from launcher.runtime.programs.choices import KernelChoices
from launcher.runtime.programs.device_meshes import DeviceMeshes
from launcher.runtime.throttle import Throttle
from launcher.runtime.transport.servers import THREADS, Exchanging, Servers
from launcher.runtime.transport.shared_sum import SharedSum
from launcher.runtime.transport.transfer import (
    RemoteTransfer,
    absent,
    is_here,
    local_transfer,
    place_array,
)
from launcher.runtime.transport.transport import Shipment, Transport
from launcher.trace import nbytes


class Entry(NamedTuple):
    """An entry of the dispatch table: an instruction, and the function that carries it out.

    Attributes:
        instruction: the instruction that it carries out.
        call: what to call; None if the entry only drops the arrays of its inputs.
        inputs: the slots to read.
        outputs: the slots to write.
        keyed: whether `call` also takes the key of the step's call, which is its number if there
            are parameter servers.
    """

    instruction: Instruction
    call: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    keyed: bool

    def run(self, slots: list[Any], key: int) -> list[Any]:
        """Carry it out as a call of the step does; return what it has written to its outputs."""
        if self.call is None:
            for i in self.inputs:
                slots[i] = None
            return []
        arrays = [slots[i] for i in self.inputs]
        results = list(self.call(key, arrays) if self.keyed else self.call(*arrays))
        for i, value in zip(self.outputs, results, strict=True):
            slots[i] = value
        return results


class StepServices(NamedTuple):
    """What a step's instructions use beside its programs.

    Attributes:
        transport: moves arrays between processes.
        servers: the parameter servers.
        spans: records what runs beside the devices.
        choices: of XLA for its programs, on GPUs.
    """

    transport: Transport | None
    servers: Servers | None
    spans: SpanRecorder
    choices: KernelChoices | None = None


@dataclass(frozen=True, eq=False)
class Table:
    """Everything that a call of the step needs.

    Attributes:
        entries: what to do, in order.
        num_keys: the number of transfer keys that one call takes, the same in all processes.
        slots: the initial contents of the slots: the constants.
        arguments: `(argument leaf, slot, sharding)` of those that the step reads or returns.
        batches: `(argument leaf, slot, sharding, stacked along axis | None)`.
        results: the slot of each result leaf; None if `fixed` holds it.
        fixed: results that no call computes here.
        shared: results whose array something else holds too, so that they have to be copied.
    """

    entries: tuple[Entry, ...]
    num_keys: int
    slots: list[Any]
    arguments: tuple[tuple[int, int, NamedSharding], ...]
    batches: tuple[tuple[int, int, NamedSharding, int | None], ...]
    results: tuple[int | None, ...]
    fixed: dict[int, jax.Array]
    shared: tuple[int, ...]


def build_table(
    emitted: Emitted,
    placement: DeviceMeshes,
    compiled: Mapping[str, Any],
    donated: tuple[bool, ...],
    services: StepServices,
) -> Table:
    """Build the dispatch table of this process.

    Args:
        emitted: this process's instructions and programs.
        placement: where its slots live.
        compiled: the compiled programs of this process, by name.
        donated: for each argument leaf, whether a call may consume it.
        services: what its instructions use.

    Raises:
        PlanError: the stages belong to several processes and there is no transport between them.
    """
    outlives = {slot for slot, _, _ in emitted.results}
    outlives |= {slot for i, slot in emitted.arguments if not donated[i]}
    entries, shipments = _entries(emitted, placement, compiled, outlives, services)
    _prove(entries, emitted, placement)
    if (transport := services.transport) is not None:
        owners = placement.owners
        described = {n: x.description for n, x in shipments.items()}
        together = digests(emitted.instructions, owners, emitted.slots, described)
        order = digest(emitted.turns, owners)
        sums = [entry.call for entry in entries if isinstance(entry.call, SharedSum)]
        memory = {x.turn: x.path for x in sums}
        every = transport.open([*shipments.values()], order, together, about=memory)
        for x in sums:
            x.open(next(path for paths in every if (path := paths.get(str(x.turn)))))
    slots: list[Any] = [None] * len(emitted.slots)
    for value, slot in emitted.constants:
        if is_here(placement.sharding(slot)):
            slots[slot] = place_array(value, placement.sharding(slot))
    fixed = _fixed(emitted, placement)
    if transport is not None:
        transport.barrier("open")  # nothing is left that can fail
    sharding = placement.sharding
    return Table(
        entries=entries,
        num_keys=emitted.turns,
        slots=slots,
        arguments=tuple((i, s, sharding(s)) for i, s in emitted.arguments if i in emitted.used),
        batches=tuple((i, slot, sharding(slot), axis) for i, slot, axis in emitted.batches),
        results=tuple(
            None if i in fixed else slot for i, (slot, _, _) in enumerate(emitted.results)
        ),
        fixed=fixed,
        shared=_shared(emitted, placement, donated),
    )


def _entries(
    emitted: Emitted,
    placement: DeviceMeshes,
    compiled: Mapping[str, Any],
    outlives: Set[int | None],
    services: StepServices,
) -> tuple[tuple[Entry, ...], dict[int, Shipment]]:
    """Return the entries, and what goes to other processes and comes from them, by turn."""
    throttle, (transport, servers, spans, _) = Throttle(), services
    programs = {
        x.program: throttle.wrap(compiled[x.program], placement.meshes[x.mesh].local_devices)
        for x in emitted.instructions
        if isinstance(x, Run)
    }
    entries, shipments = [], {}
    pool = ThreadPoolExecutor(THREADS, "launcher-exchange")  # no threads before an exchange
    for x in emitted.instructions:
        call: Any
        if isinstance(x, Run):
            entries.append(Entry(x, programs[x.program], x.inputs, x.outputs, False))
        elif isinstance(x, Send):
            avals = [placement.slots[slot].aval for slot in x.inputs]
            src = [placement.sharding(slot) for slot in x.inputs]
            dst = [placement.sharding(slot) for slot in x.outputs]
            if placement.is_local(x):
                call = local_transfer(avals, src, dst)
            elif transport is None:
                raise PlanError("stages of different processes need a transport to exchange arrays")
            else:
                lasting = [slot in outlives for slot in x.inputs]
                call = RemoteTransfer(avals, src, dst, transport, x.turn, lasting)
                shipments[x.turn] = call.exchange
            entries.append(Entry(x, call, x.inputs, x.outputs, x.turn in shipments))
        elif isinstance(x, Free):
            entries.append(Entry(x, None, x.slots, (), False))
        else:
            if servers is not None:
                call = Exchanging(x, placement, servers, pool, spans)
            else:
                assert transport is not None  # it knows who shares memory
                call = SharedSum(x, placement, transport.neighbours, spans)
            entries.append(Entry(x, call, x.inputs, x.outputs, servers is not None))
    return tuple(entries), shipments


def _prove(entries: Sequence[Entry], emitted: Emitted, placement: DeviceMeshes) -> None:
    """Prove, from the entries as they were built, that this process does not deadlock."""
    done = [x for x, *_ in entries if not isinstance(x, Free)]
    here = {mesh for mesh in range(len(placement.meshes)) if placement.runs_here(mesh)}
    prove(emitted.instructions, done, here, emitted.slots, emitted.given)


def _fixed(emitted: Emitted, placement: DeviceMeshes) -> dict[int, jax.Array]:
    found = {}
    for i, (slot, literal, mesh) in enumerate(emitted.results):
        if slot is None:
            sharding = placement.whole(mesh)
            value = np.asarray(literal.val, literal.aval.dtype)
            found[i] = (
                place_array(value, sharding) if is_here(sharding) else absent(value, sharding)
            )
        elif not is_here(placement.sharding(slot)):
            found[i] = absent(emitted.slots[slot].aval, placement.sharding(slot))
    return found


def _shared(
    emitted: Emitted, placement: DeviceMeshes, donated: tuple[bool, ...]
) -> tuple[int, ...]:
    """Return the results whose array the table, the caller or another result holds too.

    The caller may donate any result to the next call.
    """
    held = {slot for _, slot in emitted.constants}
    held |= {slot for i, slot in emitted.arguments if not donated[i]}
    shared = []
    for i, (slot, _, mesh) in enumerate(emitted.results):
        if placement.runs_here(mesh) and (slot is None or slot in held):
            shared.append(i)
        if slot is not None:
            held.add(slot)
    return tuple(shared)


def rows_here(
    copies: Iterable[tuple[int, int, NamedSharding, int | None]],
    avals: Sequence[Any],
    stacked: Callable[[Any, int], Any],
) -> np.ndarray | None:
    """Return the numbers of the rows that lie on devices of this process, in ascending order.

    Args:
        copies: `(argument leaf, slot, sharding, stacked along axis | None)` of the batch's leaves.
        avals: the shapes of the step's argument leaves, on the whole batch.
        stacked: returns what this process holds of a leaf, stacked along an axis.

    Returns:
        int64 [rows], maybe none; or None if any row may be needed.
    """
    found = [np.empty(0, np.int64)]
    for leaf, _, sharding, axis in copies:
        shape = avals[leaf].shape
        if not sharding.addressable_devices:
            continue
        if axis or not shape or 0 in shape:
            return None
        # Each element is the number of its row; it takes no memory.
        numbers = np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        numbers = np.broadcast_to(numbers, shape)
        if axis is not None:
            numbers = stacked(numbers, axis)
        first: tuple[Any, ...] = (..., *[0] * (len(shape) - 1))
        boxes = sharding.addressable_devices_indices_map(numbers.shape).values()
        found += [numbers[box][first].ravel() for box in boxes]
    return np.unique(np.concatenate(found))


class Peak(NamedTuple):
    """The most that a device of a mesh holds during a step.

    Attributes:
        bytes: the arrays that are there when a program runs, its results and its temporaries.
        temporary_bytes: of these, the temporaries.
        program: the program's name.
    """

    bytes: int = 0
    temporary_bytes: int = 0
    program: str = ""


def peak_bytes(
    emitted: Emitted, placement: DeviceMeshes, compiled: Mapping[str, Any]
) -> list[int] | None:
    """Return the most bytes that a device of each mesh holds during a step.

    Args:
        emitted: this process's instructions; 0 is returned for meshes that they do not touch.
        placement: where its slots live.
        compiled: its programs, by name.

    Returns:
        The bytes by the mesh's number; None if the programs do not tell theirs.
    """
    own = {name: program_bytes(program) for name, program in compiled.items()}
    known = {name: one for name, one in own.items() if one is not None}
    if len(known) < len(own):
        return None
    return [peak.bytes for peak in peaks(emitted, placement, known)]


def program_bytes(compiled: Any) -> CompiledProgram | None:
    """Return the bytes of a compiled program, without its names and collectives, if it tells."""
    of = compiled.memory_analysis()
    if of is None:
        return None
    return CompiledProgram(
        (),
        of.argument_size_in_bytes,
        of.output_size_in_bytes,
        of.alias_size_in_bytes,
        of.temp_size_in_bytes,
    )


def peaks(
    emitted: Emitted, placement: DeviceMeshes, programs: Mapping[str, CompiledProgram]
) -> list[Peak]:
    """Return the peak of each mesh; an empty one for meshes that the instructions do not touch.

    Args:
        emitted: this process's instructions.
        placement: where its slots live.
        programs: its compiled programs, by name; those that are not there count as nothing.
    """
    live: dict[int, int] = {}
    held, peak = [0] * len(placement.meshes), [Peak()] * len(placement.meshes)

    def keep(slot: int) -> None:
        drop(slot)
        live[slot] = slot_bytes(placement, slot)
        held[emitted.slots[slot].mesh] += live[slot]

    def drop(slot: int) -> None:
        held[emitted.slots[slot].mesh] -= live.pop(slot, 0)

    for slot in emitted.given:
        keep(slot)
    for x in emitted.instructions:
        if isinstance(x, Free):
            for slot in x.slots:
                drop(slot)
            continue
        if isinstance(x, Run):
            if (of := programs.get(x.program)) is not None:
                fresh = of.result_bytes - of.aliased_bytes + of.temporary_bytes
                now = Peak(held[x.mesh] + fresh, of.temporary_bytes, x.program)
                peak[x.mesh] = max(peak[x.mesh], now, key=lambda one: one.bytes)
            for k in x.donated:
                drop(x.inputs[k])
        for slot in x.outputs:
            keep(slot)
    return peak


def slot_bytes(placement: DeviceMeshes, slot: int) -> int:
    """Return the bytes on one device of what a slot holds."""
    aval = placement.slots[slot].aval
    return nbytes(
        jax.ShapeDtypeStruct(placement.sharding(slot).shard_shape(aval.shape), aval.dtype)
    )
