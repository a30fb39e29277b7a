"""A step with several losses is cut into parts: what each computes, takes and hands on."""

import jax
import jax.numpy as jnp
import pytest
import several

import launcher
from launcher.trace import BatchError, TraceError, trace_step
from launcher.trace.interface import leaf_names
from launcher.trace.ir.jaxpr import free_vars, is_var
from launcher.trace.primitives import loss_p

W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
grad = launcher.grad


def squares(w, x):
    return jnp.mean((x @ w) ** 2)


def traced(make):
    step, init = several.ours(make)
    return trace_step(step, (jax.eval_shape(init), several.BATCH))


def made(part):
    return {v for e in (*part.before, part.loss_equation, *part.after) for v in e.outvars}


@pytest.mark.parametrize("make", several.STEPS)
def test_the_parts_in_turn_have_what_they_read_and_leave_all_results(make):
    step = traced(make)
    batch = {v for v, is_batch in zip(step.whole.invars, step.whole.batch, strict=True) if is_batch}
    there = set(step.whole.invars) | set(step.constants)
    for part in step.parts:
        reads = free_vars([*part.before, part.loss_equation, *part.after])
        assert set(reads) <= set(part.invars) | set(part.constants)
        assert set(part.invars) <= there
        assert set(part.outvars) <= made(part) | batch | set(part.constants)
        there |= set(part.outvars)
    assert {v for v in step.whole.outvars if is_var(v)} <= there
    taken = {v for part in step.parts for v in part.invars}
    assert taken >= {v for v in step.whole.invars if v not in batch}
    assert len(set(leaf_names(part))) == len(part.invars)


def test_an_update_is_done_before_the_next_loss():
    first, second = traced(several.gan).parts
    names = leaf_names(first)
    assert {name.split(".")[1] for name in names if name.startswith("0.")} == {"d", "g"}
    assert [names[i] for i in first.aliases.values()] == [n for n in names if n.startswith("0.d")]
    # The generator is read here and consumed by the second part alone.
    donated = dict(zip(names, first.donated, strict=True))
    assert not donated["0.g.params.a"]
    assert donated["0.d.params.a"]
    handed_on = [name for name in leaf_names(second) if name.startswith("2.")]
    assert handed_on == ["2.new.0.d.params.a", "2.new.0.d.params.b"]
    replaced = {leaf_names(second)[i] for i in second.aliases.values()}
    assert replaced >= {"0.g.params.a", "0.count"}


def test_what_follows_from_the_batch_alone_is_computed_again_and_not_handed_on():
    def step(w, x):
        x = x - x.mean(0)
        return w - grad(squares)(w, x) - grad(squares)(w + 1, x)

    first, second = trace_step(step, (W, X)).parts
    names = [[e.primitive.name for e in part.before] for part in (first, second)]
    assert sorted([*names[0], "add"]) == sorted(names[1])
    assert len(first.outvars) == 1  # w less the first gradient


def test_a_loss_that_nothing_needs_is_left_out():
    def step(w, x):
        grad(squares)(w + 1, x)
        return w - grad(squares)(w, x)

    found = trace_step(step, (W, X))
    assert len(found.parts) == 1
    assert found.whole is found


def test_a_single_loss_is_the_step_itself():
    found = trace_step(lambda w, x: w - grad(squares)(w, x), (W, X))
    assert found.parts == (found,)
    assert [e.primitive for e in found.parts[0].after if e.primitive is loss_p] == []


def test_parts_have_fingerprints_of_their_own():
    step = traced(several.gan)
    assert [part.fingerprint for part in step.parts] == [
        step.fingerprint,
        f"{step.fingerprint}.1",
    ]
    assert traced(several.gan).fingerprint == step.fingerprint
    assert traced(several.generated_outside).fingerprint != step.fingerprint


def chunks(w, x):
    for i in range(0, len(x), 4):
        w = w - grad(squares)(w, x[i : i + 4])
    return w


def one_in_a_loop(w, x):
    w = w - grad(squares)(w, x)
    return jax.lax.fori_loop(0, 2, lambda _, w: w - grad(squares)(w, x), w)


def printing_between(w, x):
    w = w - grad(squares)(w, x)
    jax.debug.print("{}", w)
    return w - grad(squares)(w, x)


def test_a_number_of_losses_that_the_batch_decides_is_refused_for_slices():
    step = trace_step(chunks, (W, X))
    words = "the step has 2 losses on the whole batch of 8 and 1 on 4 rows; their number must not"
    with pytest.raises(BatchError, match=words):
        step.loss(2)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (one_in_a_loop, "inside (scan|while) at .*test_parts.py.*say num_micro_batches"),
        (printing_between, "debug_.* at .*test_parts.py.*side effect"),
    ],
)
def test_what_is_refused_of_one_loss_is_refused_of_several(step, words):
    with pytest.raises(TraceError, match=words):
        trace_step(step, (W, X))
