"""Every process does its part of one list in the list's order, and so none waits for ever."""

import collections
import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import pytest
import scanned
import several
from plans import at_random, uniform
from trainings import training

import launcher
from launcher import runtime
from launcher.base.spans import SpanRecorder
from launcher.plan import PlanError, local_shape
from launcher.runtime import dispatch_table
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import (
    Free,
    Run,
    Send,
    Slot,
    digest,
    digests,
    participants,
    prove,
)
from launcher.runtime.programs.device_meshes import place_on_devices
from launcher.runtime.transport.transport import Parcel
from launcher.schedule import training_schedules
from launcher.trace import trace_step

STEP, INIT, BATCHES = training("chain")
DEVICES = {2: 8, 3: 6, 4: 8}  # of so many processes together
SCHEDULES = training_schedules()


@pytest.fixture(scope="module")
def traced():
    return trace_step(STEP, (jax.eval_shape(INIT, jax.random.key(0)), BATCHES[0]))


def lists_of(traced, plan, processes, total=None):
    """What each process has, and the processes of each mesh."""
    each = (total or DEVICES[processes]) // processes
    lists = {
        p: emit(traced, plan, devices={*range(p * each, (p + 1) * each)}) for p in range(processes)
    }
    return lists, [{device // each for device in mesh} for mesh in plan.all_meshes]


def work(emitted):
    return [x for x in emitted.instructions if not isinstance(x, Free)]


def together(x, owners):
    return set().union(*(owners[mesh] for mesh in participants(x)))


def here_of(process, owners):
    return {mesh for mesh, found in enumerate(owners) if process in found}


def proven(emitted, process, owners, done=None):
    done = work(emitted) if done is None else done
    here = here_of(process, owners)
    prove(emitted.instructions, done, here, emitted.slots, emitted.given)


def stuck(done, owners):
    """Follow what processes do, each of which waits in an instruction for all that take part in it,
    and knows what they do together by its turn alone. None if all come to their ends, else why
    not."""
    left = {process: collections.deque(listed) for process, listed in done.items()}
    while any(left.values()):
        for listed in filter(None, left.values()):
            x = listed[0]
            group = together(x, owners)
            heads = [left[p][0] if left[p] else None for p in group]
            meets = {None if h is None else kind(h) for h in heads}
            if len(meets) > 1:
                continue
            if len({h.turn for h in heads}) > 1:
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


@functools.cache
def random_lists(traced, seed):
    """What each process has of a plan at random, and the processes of each mesh."""
    return lists_of(traced, *planned(traced, seed))


def check(traced, plan, lists, owners):
    """Each process has its part of the whole list, all come to their ends and prove it."""
    whole = emit(traced, plan)
    turns = [x.turn for x in work(whole)]
    assert turns == sorted(set(turns))
    assert max(turns, default=-1) < whole.turns
    filled = set(whole.given)
    for x in work(whole):
        in_place = set(x.inputs) if isinstance(x, Run) else set()
        assert not filled.intersection(set(x.outputs) - in_place)  # each slot is written once
        filled.update(x.outputs)
    for process, own in lists.items():
        is_part(own, whole, here_of(process, owners))
        proven(own, process, owners)
    at = {x.turn: together(x, owners) for x in work(whole)}
    assert at == {
        turn: {p for p, own in lists.items() if turn in {x.turn for x in work(own)}} for turn in at
    }
    assert sorted({x.turn for own in lists.values() for x in work(own)}) == turns
    assert stuck({p: work(own) for p, own in lists.items()}, owners) is None
    assert {*whole.programs} == {name for own in lists.values() for name in own.programs}
    told = collections.Counter()
    for own in lists.values():
        told.update(digests(own.instructions, owners, own.slots, {}).items())
    assert all(count == found for (_, count), found in told.items())


def is_part(own, whole, here):
    """A worker's list is the whole one without what does not concern it; slots have numbers of
    their own."""
    number = {}  # in the whole list

    def same(mine, theirs):
        pairs = list(zip(mine, theirs, strict=True))
        assert all(number.setdefault(a, b) == b for a, b in pairs)
        assert all(
            (own.slots[a].mesh, own.slots[a].spec) == (whole.slots[b].mesh, whole.slots[b].spec)
            and own.slots[a].aval == whole.slots[b].aval
            for a, b in pairs
        )

    listed = []
    for x in whole.instructions:
        if isinstance(x, Free):
            mine = tuple(slot for slot in x.slots if whole.slots[slot].mesh in here)
            listed += [Free(mine)] if mine else []
        elif not here.isdisjoint(participants(x)):
            listed.append(x)
    same([slot for _, slot in own.arguments], [slot for _, slot in whole.arguments])
    for a, b in zip(own.instructions, listed, strict=True):
        if isinstance(a, Free):
            assert {number[slot] for slot in a.slots} == {*b.slots}
            continue
        assert dataclasses.replace(a, inputs=(), outputs=()) == dataclasses.replace(
            b, inputs=(), outputs=()
        )
        same(a.inputs, b.inputs)
        same(a.outputs, b.outputs)
    returned = [
        (a[0], b[0]) for a, b in zip(own.results, whole.results, strict=True) if a[0] is not None
    ]
    same(*zip(*returned, strict=True))
    assert len(set(number.values())) == len(number)
    mine = [sum(slot.mesh in here for slot in each.slots) for each in (own, whole)]
    assert mine[0] == mine[1]
    assert [(i, number[slot], axis) for i, slot, axis in own.batches] == [
        x for x in whole.batches if whole.slots[x[1]].mesh in here
    ]
    assert sorted((number[slot], value) for value, slot in own.constants) == sorted(
        (slot, value) for value, slot in whole.constants if whole.slots[slot].mesh in here
    )
    assert own.used == whole.used
    read = {slot for x in work(whole) for slot in x.inputs} | {slot for slot, *_ in whole.results}
    assert whole.used == {i for i, slot in whole.arguments if slot in read}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(200, 216))
def test_each_process_has_its_part_of_a_random_plan(traced, seed):
    check(traced, planned(traced, seed)[0], *random_lists(traced, seed))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
def test_each_process_has_its_part_under_every_schedule(traced, schedule, stages):
    plan = uniform(6, stages, schedule=schedule).plan(traced, local_shape(8, 4, "cpu"))
    check(traced, plan, *lists_of(traced, plan, 4))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", several.STEPS)
def test_each_process_has_its_part_of_several_losses(make):
    step, init = several.ours(make)
    traced = trace_step(step, (jax.eval_shape(init), several.BATCH))
    plan = uniform(2, 2).plan(traced, local_shape(4, 2, "cpu"))
    check(traced, plan, *lists_of(traced, plan, 2, 4))


def test_each_process_has_its_part_of_stages_in_pieces():
    state = jax.eval_shape(scanned.init, jax.random.key(0))
    traced = trace_step(scanned.step, (state, scanned.BATCHES[0]))
    plan = uniform(2, 2).plan(traced, local_shape(2, 2, "cpu"))
    traced = traced.planned_as(plan.fingerprint)
    assert any(".piece." in name for name in emit(traced, plan).programs)
    check(traced, plan, *lists_of(traced, plan, 2, 2))


def test_a_worker_of_many_makes_its_own_instructions_alone(monkeypatch):
    """Of 16 stages and 64 microbatches: two tasks a microbatch and two transfers at each side."""
    count, micro_batches, stage = 16, 64, 7
    step = tanh_layers(count)
    params = [jax.ShapeDtypeStruct((4, 4), "float32")] * count
    traced = trace_step(step, (params, jax.ShapeDtypeStruct((micro_batches, 4), "float32")))
    plan = uniform(micro_batches, count).plan(traced, local_shape(count, count, "cpu"))
    made = collections.Counter()
    for kind in (Run, Send, Free, Slot):
        note_new(kind, made, monkeypatch)
    own = emit(traced, plan, devices={stage})
    runs = [x for x in own.instructions if isinstance(x, Run)]
    assert collections.Counter(x.task is None for x in runs) == {False: 2 * micro_batches, True: 2}
    assert sum(isinstance(x, Send) for x in own.instructions) == 4 * micro_batches
    # The programs around the pipeline are made anew with what they donate; arguments and results
    # have slots in every process.
    assert made == {
        Run: len(runs) + 2,
        Send: 4 * micro_batches,
        Free: sum(isinstance(x, Free) for x in own.instructions),
        Slot: len(own.slots),
    }
    # Since JAX 0.11 the derivative of tanh leaves a value that is not the one handed on.
    assert len(own.slots) < 11 * micro_batches
    assert all(name.startswith((f"stage.{stage}.", "update.")) for name in own.programs)
    assert len(own.programs) == 4  # zeros, forward, backward, update


def tanh_layers(count):
    def step(params, x):
        def loss(params, x):
            for i, w in enumerate(params):
                if i:
                    launcher.mark_pipeline_boundary()
                x = jnp.tanh(x @ w)
            return (x**2).mean()

        value, grads = launcher.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def note_new(kind, made, monkeypatch):
    init = kind.__init__

    def noted(self, *args, **named):
        made[kind] += 1
        init(self, *args, **named)

    monkeypatch.setattr(kind, "__init__", noted)


def swapped(listed, rng):
    """The same with two instructions that stand beside one another swapped."""
    at = rng.randrange(len(listed) - 1)
    return [*listed[:at], listed[at + 1], listed[at], *listed[at + 2 :]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(200, 206))
def test_a_swapped_pair_is_found(traced, seed):
    """Whatever hangs or mixes arrays up when it is followed is refused, and more than that."""
    lists, owners = random_lists(traced, seed)
    rng, harmful = random.Random(seed), 0
    done = {process: work(own) for process, own in lists.items()}
    for _ in range(20):
        process = rng.choice([p for p, listed in done.items() if len(listed) > 1])
        wrong = swapped(done[process], rng)
        with pytest.raises(PlanError, match="has to do instruction"):
            proven(lists[process], process, owners, wrong)
        relisted = dataclasses.replace(lists[process], instructions=tuple(wrong))
        with pytest.raises(PlanError, match=r"does instruction \d+, .* after turn \d+"):
            proven(relisted, process, owners)
        harmful += stuck({**done, process: wrong}, owners) is not None
    if max(map(len, owners)) > 1 or len(owners) > 2:
        assert harmful


@functools.cache
def chain(traced):
    plan = uniform(2, 2).plan(traced, local_shape(8, 2, "cpu"))
    return lists_of(traced, plan, 2)


def test_what_a_process_leaves_out_or_adds_is_found(traced):
    lists, owners = chain(traced)
    listed = work(lists[1])
    for done in (listed[:-1], [*listed, work(lists[0])[0]], []):
        with pytest.raises(PlanError, match="this process has to do"):
            proven(lists[1], 1, owners, done)


def test_what_is_not_there_when_it_is_read_is_found(traced):
    lists, owners = chain(traced)
    own = lists[1]
    send = next(i for i, x in enumerate(own.instructions) if isinstance(x, Send))
    arrives = set(own.instructions[send].outputs)
    reader = next(
        i for i, x in enumerate(own.instructions) if isinstance(x, Run) and arrives & {*x.inputs}
    )
    early = list(own.instructions)
    early.insert(send, early.pop(reader))
    read = {slot for x in work(own) for slot in x.inputs if own.slots[slot].mesh == 1}
    mine = next(i for i, (_, slot) in enumerate(own.arguments) if slot in read)
    wrong = [
        {"instructions": early},
        {"instructions": other_way_round(own.instructions, send)},
        {"arguments": [*own.arguments[:mine], *own.arguments[mine + 1 :]]},
    ]
    for change in wrong:
        found = dataclasses.replace(own, **change)
        in_turn = [
            x if isinstance(x, Free) else dataclasses.replace(x, turn=turn)
            for turn, x in enumerate(found.instructions)
        ]
        with pytest.raises(PlanError, match="needs slots"):
            proven(dataclasses.replace(found, instructions=in_turn), 1, owners)


def other_way_round(instructions, place):
    """With one transfer the other way round."""
    x = instructions[place]
    other = dataclasses.replace(x, src=x.dst, dst=x.src)
    return [*instructions[:place], other, *instructions[place + 1 :]]


def test_processes_that_differ_have_other_digests(traced):
    lists, owners = chain(traced)
    sends = [x for x in work(lists[0]) if isinstance(x, Send)]
    told = {x.turn: f"{k} goes" for k, x in enumerate(sends)}
    both = [digests(x.instructions, owners, x.slots, told) for x in lists.values()]
    assert both[0] == both[1]
    assert [*both[0].values()] == [2]
    own = lists[0]

    def other(instructions=own.instructions, slots=own.slots, told=told):
        return digests(instructions, owners, slots, told) != both[0]

    assert not other(list(own.instructions), list(own.slots), dict(told))
    places = [i for i, x in enumerate(own.instructions) if isinstance(x, Send)]
    changed = list(own.instructions)
    changed[places[0]], changed[places[1]] = changed[places[1]], changed[places[0]]
    assert other(changed)
    later = [dataclasses.replace(x, turn=x.turn + 1) if x is sends[0] else x for x in changed]
    assert other(later)
    assert other(slots=own.slots[::-1])
    assert other(told={**told, sends[0].turn: "another goes"})
    assert digest(7, owners) == digest(7, [set(x) for x in owners])
    assert digest(7, owners) not in (digest(8, owners), digest(7, owners[::-1]))


def test_a_process_proves_the_entries_that_it_built(traced, monkeypatch):
    plan = uniform(2, 2).plan(traced, local_shape(8, 2, "cpu"))
    emitted = emit(traced, plan)
    placement = place_on_devices(plan, jax.devices(), emitted.slots)
    programs = {x.program: None for x in emitted.instructions if isinstance(x, Run)}
    donated = (False,) * len(traced.donated)
    services = runtime.StepServices(None, None, SpanRecorder())
    given = emitted, placement, programs, donated, services
    assert dispatch_table.build_table(*given).entries
    build = dispatch_table._entries

    def swapped(*args):
        entries, exchanges = build(*args)
        first, second, *_ = (i for i, entry in enumerate(entries) if entry.call or entry.outputs)
        found = list(entries)
        found[first], found[second] = found[second], found[first]
        return found, exchanges

    monkeypatch.setattr(dispatch_table, "_entries", swapped)
    with pytest.raises(PlanError, match=r"this process has to do instruction \d+"):
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
