"""What a forward pass leaves: as few bytes as can be, and nothing costly to compute again."""

import itertools
import random

import jax.numpy as jnp
import pytest

from launcher.partition.task_programs import kept_values
from launcher.trace.ir.jaxpr import is_var, make_jaxpr, nbytes
from launcher.trace.ir.primitive_kinds import CHEAP


def random_program(seed):
    """A program of products, sums and element-wise steps over arrays of several sizes."""
    chance = random.Random(seed)

    def fun(x, y):
        values = [x, y]
        for _ in range(6):
            a, b = chance.choice(values), chance.choice(values)
            made = chance.choice(
                [
                    lambda a=a: jnp.tanh(a),
                    lambda a=a, b=b: a + b,
                    lambda a=a, b=b: a * b,
                    lambda a=a: jnp.sum(a, 0, keepdims=True) if a.shape[0] > 1 else jnp.sin(a),
                    lambda a=a: jnp.cumsum(a, 1),
                ]
            )
            values.append(made())
        return values

    jaxpr = make_jaxpr(fun, jnp.ones((4, 2)), jnp.ones((1, 2)))
    made = [v for e in jaxpr.eqns for v in e.outvars]
    wanted = chance.sample(made, 2)
    firm = chance.sample(made, 1) if chance.random() < 0.5 else []
    return jaxpr, wanted, firm


def best_by_trying(jaxpr, wanted, firm):
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    values = [*jaxpr.invars, *made]

    def is_ready(v, kept):
        if v in kept:
            return True
        if v in jaxpr.invars or v in firm or made[v].primitive.name not in CHEAP:
            return False
        return all(is_ready(u, kept) for u in made[v].invars if is_var(u))

    subsets = itertools.chain.from_iterable(
        itertools.combinations(values, n) for n in range(len(values) + 1)
    )
    return min(
        sum(nbytes(v.aval) for v in kept)
        for kept in subsets
        if all(is_ready(v, kept) for v in wanted)
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(30))
def test_no_smaller_set_would_do(seed):
    jaxpr, wanted, firm = random_program(seed)
    kept = kept_values(jaxpr.eqns, set(jaxpr.invars), wanted, firm)
    assert sum(nbytes(v.aval) for v in kept) == best_by_trying(jaxpr, wanted, firm)


def test_of_equal_sets_it_is_the_one_that_computes_least():
    jaxpr = make_jaxpr(lambda x: jnp.sin(jnp.cos(jnp.tanh(x))), jnp.ones(3))
    last = jaxpr.outvars[0]
    assert kept_values(jaxpr.eqns, set(jaxpr.invars), [last]) == {last}


def test_what_is_at_hand_is_not_kept():
    jaxpr = make_jaxpr(lambda x, y: jnp.sin(x) + y, jnp.ones(3), jnp.ones(3))
    assert kept_values(jaxpr.eqns, set(), jaxpr.outvars) == set()
    assert kept_values(jaxpr.eqns, set(jaxpr.invars[:1]), []) == set()
