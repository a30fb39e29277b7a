"""Models with scanned blocks compile what one stage of them has, in any number of stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scanned import BATCHES, LAYERS, init, step, step_of, unrolled_step
from test_scanned import unrolled_state

import launcher
from launcher import PipeshardParallel, UniformStageOption
from launcher.partition.partitioned import partition
from launcher.partition.pieces import MOST_LAYERS, in_pieces
from launcher.plan import local_shape
from launcher.plan.methods import DataParallel
from launcher.runtime import compile_step
from launcher.runtime.emit.emit import emit
from launcher.runtime.emit.instructions import Run
from launcher.testing import assert_allclose
from launcher.trace import trace_step

STATE = jax.eval_shape(init, jax.random.key(0))
BATCH = jax.ShapeDtypeStruct(BATCHES[0].shape, jnp.float32)


def planned(count, of=step, state=STATE, **how):
    method = PipeshardParallel(4, stage_option=UniformStageOption(count), **how)
    traced = trace_step(of, (state, BATCH))
    plan = method.plan(traced, local_shape(count, 1, "cpu"))
    return traced.planned_as(plan.fingerprint), plan


def cut(count, **how):
    traced, plan = planned(count, **how)
    return in_pieces(partition(traced.cut_at(plan.layer_ends), plan.assignment))


def layers_of(pieces):
    """Of each piece its stage, and how many blocks it has."""
    blocks = [sum(e.primitive.name == "tanh" for e in g.equations) for g in pieces.cut.stages]
    return list(zip(pieces.stage_of, blocks, strict=True))


def test_stages_are_cut_where_the_scan_begins_and_ends():
    assert layers_of(cut(1)) == [(0, 1), *[(0, MOST_LAYERS)] * (LAYERS // MOST_LAYERS), (0, 0)]
    # The embedding has a tanh of its own.
    assert layers_of(cut(2)) == [(0, 1), (0, 3), (0, 3), (1, 3), (1, 3), (1, 0)]
    uneven = layers_of(cut(4))  # of 3, 3, 4 and 2 layers: three together, or one
    assert uneven[1:-1] == [(0, 3), (1, 3), (2, 3), (2, 1), (3, 1), (3, 1)]


def test_a_stage_is_whole_where_its_pieces_would_mean_another_thing():
    unrolled = planned(2, unrolled_step, jax.eval_shape(unrolled_state, jax.random.key(0)))
    traced, plan = unrolled
    assert in_pieces(partition(traced, plan.assignment)).names == ("stage.0", "stage.1")
    assert cut(2, remat="full/2").names == ("stage.0", "stage.1")
    assert len(cut(2, remat="full").names) > 2

    def joined(params, x):  # gradients of all blocks would wait for the first piece
        first = jnp.tanh(x @ params["tied"])

        def block(h, p):
            return h + jnp.tanh((h + first) @ p["w"] + p["b"]), None

        h, _ = lax.scan(block, first, params["blocks"])
        return (h**2).mean()

    traced, plan = planned(2, step_of(joined))
    assert in_pieces(partition(traced, plan.assignment)).names == ("stage.0", "stage.1")


def test_tasks_of_pieces_go_forward_and_back():
    traced, plan = planned(2)
    emitted = emit(traced, plan)
    for stage in range(2):
        runs = [x for x in emitted.instructions if isinstance(x, Run) and x.task]
        first = [x for x in runs if x.task.stage == stage and x.task.microbatch == 0]
        numbers = [int(x.program.split(".")[3]) for x in first]
        turn = numbers.index(max(numbers))
        assert numbers[: turn + 1] == sorted(numbers[: turn + 1])
        assert numbers[turn + 1 :] == sorted(numbers[turn + 1 :], reverse=True)
        assert {n for n in numbers if numbers.count(n) == 1} <= {max(numbers)}  # of the loss


def compiles(count, monkeypatch, blocks=LAYERS):
    """The lowered programs that are compiled for a plan, and how many there are to run."""
    key = jax.random.key(0)
    if blocks != LAYERS:
        monkeypatch.setattr("scanned.LAYERS", blocks)
    traced, plan = planned(count, state=jax.eval_shape(init, key))
    found = []
    compile_one = jax.stages.Lowered.compile
    with monkeypatch.context() as patch:
        patch.setattr(
            jax.stages.Lowered, "compile", lambda self, **_: found.append(self) or compile_one(self)
        )
        executable = compile_step(traced, plan, jax.devices())
    monkeypatch.undo()
    return found, len(executable.hlo_text())


def size(programs):
    """How many operations are compiled."""
    return sum(len(program.as_text().splitlines()) for program in programs)


@pytest.mark.devices
def test_stages_compile_what_one_stage_does(monkeypatch):
    one, _ = compiles(1, monkeypatch)
    of_stages, programs = compiles(4, monkeypatch)
    assert programs > len(of_stages)
    assert size(of_stages) <= 1.2 * size(one)


@pytest.mark.slow
@pytest.mark.devices
def test_deeper_models_compile_no_more(monkeypatch):
    few, _ = compiles(2, monkeypatch, 8)
    many, _ = compiles(2, monkeypatch, 24)
    assert len(many) == len(few)
    # Only what sums a norm over all layers has more of them.
    assert size(many) <= 1.25 * size(few)


@pytest.mark.devices
def test_a_plan_of_one_stage_has_pieces_too():
    train = launcher.parallelize(step, method=DataParallel(remat="full"), devices=jax.devices()[:1])
    state, losses = train.create(init, jax.random.key(0), like=BATCHES[0]), []
    expected, by_one = jax.jit(init)(jax.random.key(0)), []
    for x in BATCHES[:2]:
        state, loss = train(state, x)
        expected, other = jax.jit(step)(expected, x)
        losses.append(float(loss))
        by_one.append(float(other))
    assert any(".piece." in name for name in train.executable(state, BATCHES[0]).hlo_text())
    np.testing.assert_allclose(losses, by_one, rtol=1e-5)
    assert_allclose(state, expected, rtol=1e-4, atol=1e-6)
