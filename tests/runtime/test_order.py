"""Every process does its part of one list in the list's order, and so none waits for ever."""

import collections
import dataclasses
import random
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from launcher import runtime
from launcher.plan import PlanError, local_shape
from launcher.runtime import dispatch_table
from launcher.runtime.emit import emit
from launcher.runtime.instructions import Free, Run, Send
from launcher.runtime.order import digest, parts_of, prove
from launcher.runtime.placement import make_placement
from launcher.runtime.transport import Parcel
from launcher.schedule import training_schedules
from launcher.spans import SpanRecorder
from launcher.trace import trace_step

sys.path.insert(0, str(Path(__file__).parent))
from plans import at_random, uniform
from trainings import training

STEP, INIT, BATCHES = training("chain")
DEVICES = {2: 8, 3: 6, 4: 8}  # of so many processes together
SCHEDULES = training_schedules()


@pytest.fixture(scope="module")
def traced():
    return trace_step(STEP, (jax.eval_shape(INIT, jax.random.key(0)), BATCHES[0]))


def laid_out(traced, plan, processes):
    """A plan's instructions and slots, the processes of each mesh, and the slots filled before."""
    emitted = emit(traced, plan)
    each = DEVICES[processes] // processes
    owners = [{device // each for device in mesh} for mesh in plan.meshes]
    given = [slot for _, slot in (*emitted.arguments, *emitted.constants)]
    given += [slot for _, slot, _ in emitted.batches]
    return emitted.instructions, emitted.slots, owners, given


def stuck(instructions, owners, parts):
    """Follow the parts as processes do that wait in each instruction for all that take part in it,
    and know what they do together by its turn alone. None if all come to their ends, else why
    not."""
    left = {process: collections.deque(places) for process, places in parts.items()}
    while any(left.values()):
        for places in filter(None, left.values()):
            x = instructions[places[0]]
            group = owners[x.mesh] if isinstance(x, Run) else owners[x.src] | owners[x.dst]
            heads = [left[p][0] if left[p] else None for p in group]
            meets = {None if h is None else kind(instructions[h]) for h in heads}
            if len(meets) > 1:
                continue
            if len(set(heads)) > 1:
                return "one thing is taken for another"
            for p in group:
                left[p].popleft()
            break
        else:
            return "all wait"
    return None


def kind(x):
    """What processes that meet can tell of what they do."""
    return (x.mesh, x.program) if isinstance(x, Run) else (x.src, x.dst)


def planned(traced, seed):
    """A plan at random for two, three or four processes."""
    processes = 2 + seed % 3
    return at_random(traced, seed, local_shape(DEVICES[processes], processes, "cpu")), processes


@pytest.mark.parametrize("seed", range(200, 206))
def test_a_random_plans_processes_come_to_their_ends(traced, seed):
    plan, processes = planned(traced, seed)
    instructions, slots, owners, given = laid_out(traced, plan, processes)
    parts = parts_of(instructions, owners)
    prove(instructions, owners, parts, slots, given)
    assert stuck(instructions, owners, parts) is None
    work = {i for i, x in enumerate(instructions) if not isinstance(x, Free)}
    assert set().union(*parts.values()) == work


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
def test_every_schedules_processes_come_to_their_ends(traced, schedule, stages):
    plan = uniform(6, stages, schedule=schedule).plan(traced, local_shape(8, 4, "cpu"))
    instructions, slots, owners, given = laid_out(traced, plan, 4)
    parts = parts_of(instructions, owners)
    prove(instructions, owners, parts, slots, given)
    assert stuck(instructions, owners, parts) is None


def swapped(parts, rng):
    """The same with two instructions that stand beside one another swapped in one process."""
    process = rng.choice(sorted(p for p, places in parts.items() if len(places) > 1))
    places = list(parts[process])
    at = rng.randrange(len(places) - 1)
    places[at : at + 2] = places[at + 1], places[at]
    return {**parts, process: places}


@pytest.mark.parametrize("seed", range(200, 206))
def test_a_swapped_pair_is_found(traced, seed):
    """Whatever hangs or mixes arrays up when it is followed is refused, and more than that."""
    plan, processes = planned(traced, seed)
    instructions, slots, owners, given = laid_out(traced, plan, processes)
    parts, rng = parts_of(instructions, owners), random.Random(seed)
    harmful = 0
    for _ in range(20):
        wrong = swapped(parts, rng)
        with pytest.raises(PlanError, match=r"process \d has to do instruction \d+"):
            prove(instructions, owners, wrong, slots, given)
        harmful += stuck(instructions, owners, wrong) is not None
    if max(map(len, owners)) > 1 or len(owners) > 2:
        assert harmful


def chain(traced):
    plan = uniform(2, 2).plan(traced, local_shape(8, 2, "cpu"))
    return laid_out(traced, plan, 2)


def test_what_a_process_leaves_out_or_adds_is_found(traced):
    instructions, slots, owners, given = chain(traced)
    parts = parts_of(instructions, owners)
    for places in (parts[1][:-1], [*parts[1], parts[0][0]], []):
        with pytest.raises(PlanError, match="process 1 has to do"):
            prove(instructions, owners, {**parts, 1: places}, slots, given)


def test_what_is_not_there_when_it_is_read_is_found(traced):
    instructions, slots, owners, given = chain(traced)
    send = next(i for i, x in enumerate(instructions) if isinstance(x, Send))
    arrives = set(instructions[send].outputs)
    reader = next(
        i for i, x in enumerate(instructions) if isinstance(x, Run) and arrives & {*x.inputs}
    )
    early = list(instructions)
    early.insert(send, early.pop(reader))
    wrong = [
        (early, given),
        (other_way_round(instructions, send), given),
        (instructions, given[1:]),
    ]
    for listed, before in wrong:
        with pytest.raises(PlanError, match="needs slots"):
            prove(listed, owners, parts_of(listed, owners), slots, before)


def other_way_round(instructions, place):
    """With one transfer the other way round."""
    x = instructions[place]
    other = dataclasses.replace(x, src=x.dst, dst=x.src)
    return [*instructions[:place], other, *instructions[place + 1 :]]


def test_orders_that_differ_have_other_digests(traced):
    instructions, slots, owners, _ = chain(traced)
    told = ["a to b", "b to c"]  # of what goes between processes
    own = digest(instructions, owners, slots, told)
    assert own == digest(tuple(instructions), [set(x) for x in owners], list(slots), tuple(told))
    sends = [i for i, x in enumerate(instructions) if isinstance(x, Send)]
    other = list(instructions)
    other[sends[0]], other[sends[1]] = other[sends[1]], other[sends[0]]
    assert digest(other, owners, slots, told) != own
    assert digest(instructions, owners[::-1], slots, told) != own
    assert digest(instructions, owners, slots[::-1], told) != own
    assert digest(instructions, owners, slots, told[::-1]) != own


def test_a_process_proves_the_entries_that_it_built(traced, monkeypatch):
    plan = uniform(2, 2).plan(traced, local_shape(8, 2, "cpu"))
    emitted = emit(traced, plan)
    placement = make_placement(plan, jax.devices(), emitted.slots)
    programs = {x.program: None for x in emitted.instructions if isinstance(x, Run)}
    donated = (False,) * len(traced.donated)
    given = emitted, placement, programs, donated, None, None, SpanRecorder()
    assert dispatch_table.build_table(*given).entries
    build = dispatch_table._entries

    def swapped(*args):
        entries, exchanges = build(*args)
        first, second, *_ = (i for i, entry in enumerate(entries) if entry.call or entry.outputs)
        found = list(entries)
        found[first], found[second] = found[second], found[first]
        return found, exchanges

    monkeypatch.setattr(dispatch_table, "_entries", swapped)
    with pytest.raises(PlanError, match=r"process 0 has to do instruction \d+"):
        dispatch_table.build_table(*given)


@pytest.mark.parametrize("way", ["PermuteTransport", "PullTransport"])
def test_exchanges_tell_what_they_do(way):
    """Those alike the same, and any other something else."""
    a, b, c = jax.devices()[:3]
    f32, i32 = jnp.dtype("float32"), jnp.dtype("int32")
    base = [Parcel(a, b, (3,), f32), Parcel(a, b, (2,), f32)]
    others = [
        base[:1],
        base[::-1],
        [Parcel(a, c, (3,), f32), base[1]],
        [Parcel(a, b, (3,), i32), base[1]],
        [Parcel(b, a, (3,), f32), base[1]],
    ]
    bind = getattr(runtime, way)().bind
    assert bind(base).description == bind(list(base)).description
    assert len({bind(parcels).description for parcels in [base, *others]}) == 1 + len(others)
