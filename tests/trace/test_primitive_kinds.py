"""The names of primitives stand in the table and in the rules, nowhere else."""

import ast
import contextlib
import inspect
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launcher
from launcher.trace.ir import primitive_kinds
from launcher.trace.ir.factors import _RULES, factors
from launcher.trace.ir.jaxpr import inline_calls, make_jaxpr, sub_jaxprs

ROOT = Path(launcher.__file__).parent
TABLES = {
    *(f"trace/ir/{name}.py" for name in ("primitive_kinds", "jaxpr", "factors")),
    *(f"trace/slicing/{name}.py" for name in ("follow_relations", "relations")),
}
KINDS = {k: v for k, v in vars(primitive_kinds).items() if isinstance(v, frozenset)}
# "name" is a primitive's too, and everybody's word.
NAMES = set().union(*KINDS.values(), _RULES, ("scan", "while", "cond", "fft", "iota")) - {"name"}


def primitives_named_in(source):
    """The primitives that a module names, by strings or lists of words; none if it asks no name."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    if not any(isinstance(node, ast.Attribute) and node.attr == "primitive" for node in nodes):
        return set()
    said = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}  # docstrings
    strings = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    lists = [n.value.split() for n in strings if id(n) not in said]
    named = [NAMES.intersection(words) for words in lists]
    return set().union(
        *(n for n, words in zip(named, lists, strict=True) if 2 * len(n) > len(words))
    )


def test_no_other_module_lists_primitives():
    files = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py"))]
    assert set(files) >= TABLES
    named = {f: primitives_named_in((ROOT / f).read_text()) for f in files if f not in TABLES}
    assert {f: sorted(names) for f, names in named.items() if len(names) > 2} == {}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ('kinds = ("exp", "mul")', {"exp", "mul"}),
        ('kinds = "exp mul sin".split()', {"exp", "mul", "sin"}),
        ('if eqn.primitive.name == "scan": pass', {"scan"}),
        ('"""Of exp mul and sin."""', set()),
        ('print("no tan, no cos or exp")', set()),
    ],
)
def test_lists_are_found_in_every_form(said, found):
    assert primitives_named_in(f"{said}\neqn.primitive") == found
    assert primitives_named_in(said.replace("eqn.primitive.name", "name")) == set()


def test_kinds_nest():
    of = primitive_kinds
    assert of.ELEMENTWISE > of.COSTLY
    assert of.FUSED > of.COSTLY
    assert of.FUSED > of.CHEAP
    assert of.LINEAR_IN_FIRST > of.FORMS
    assert not of.FUSED & of.REDUCTIONS
    assert not of.FUSED & of.PRODUCTS
    assert not of.ELEMENTWISE & (of.UNSHARDED_ELEMENTWISE | set(_RULES))


def test_every_kind_is_read():
    """A kind that no module imports is no kind."""
    sources = [path.read_text() for path in ROOT.rglob("*.py")]
    table = inspect.getsource(primitive_kinds)
    public = [kind for kind in KINDS if not kind.startswith("_")]
    unread = [k for k in public if not any(k in text for text in sources if text != table)]
    assert unread == []


X = jnp.linspace(0.1, 0.9, 6).reshape(2, 3)
KNOWN = set().union(*(v for v in vars(primitive_kinds).values() if isinstance(v, frozenset | dict)))
SUMS = ("cumsum", "cumprod", "median", "percentile", "histogram")
SEARCHES = ("searchsorted", "nonzero", "interp", "digitize", "bincount", "argsort", "sort")
GIVEN = (
    *((X,) * n for n in (1, 2)),
    *((X.astype(int),) * n for n in (1, 2)),
    *((X[0],) * n for n in (2, 3)),
)


def functions():
    """The functions of JAX that a loss may call on numbers, from its own registries."""
    ufuncs = [n for n, u in vars(np).items() if isinstance(u, np.ufunc) and hasattr(jnp, n)]
    found = {name: getattr(jnp, name) for name in (*sorted(ufuncs), *SEARCHES, *SUMS)}
    names = [n for n in dir(jax.nn) if n[0] != "_" and callable(getattr(jax.nn, n))]
    return found | {f"nn.{name}": getattr(jax.nn, name) for name in names}


@pytest.mark.sampled(5, rest="slow")
@pytest.mark.parametrize("name", functions())
def test_every_operation_of_jax_is_known(name):
    """One that a newer JAX introduces fails here until it is in the table, or read as a program.

    Its gradient's, too.
    """
    fun, unknown = functions()[name], set()
    for args in GIVEN:
        for call in (fun, jax.grad(lambda *x: jnp.sum(fun(*x)))):
            with contextlib.suppress(Exception):  # it takes no such arguments
                unknown |= {e.primitive.name for e in inner(make_jaxpr(call, *args)) if lost(e)}
    assert unknown == set()


def inner(jaxpr):
    for eqn in inline_calls(jaxpr).eqns:
        below = list(sub_jaxprs(eqn))
        yield from itertools.chain(*map(inner, below)) if below else [eqn]


def lost(eqn):
    return eqn.primitive.name not in KNOWN and factors(eqn) is None
