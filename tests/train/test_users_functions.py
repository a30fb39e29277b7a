"""All functions that users hand in, with every wrong result: refused in one line, by its place.

The functions are read from the interfaces themselves; a new one fails until it stands in `CASES`.
"""

import functools
import inspect
import re
import sys
import typing
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import launcher
from launcher.api.parallelize import ParallelizedFunction
from launcher.base import source_of
from launcher.config.compose import load
from launcher.driver.callback import Callback, Callbacks, Event, HookError
from launcher.recipes import RETURNS, Batches, Dataset, InputError, Model, Tokenizer, users_code
from launcher.recipes.models.decoding import Decoder
from launcher.report.trackers.tracker import QueuedTracker, Tracker
from launcher.trace import TraceError
from launcher.train.program import build_program

W, ROWS, X = jnp.eye(4), 16, np.ones((8, 4), np.float32)
MODULES = "own_model", "own_data", "own_optimizer"
WORDS = [
    *("model=custom", "model.module=own_model", "dataset=custom", "dataset.module=own_data"),
    *("optimizer=custom", "optimizer.module=own_optimizer", f"allow_modules=[{','.join(MODULES)}]"),
    *(f"train.global_batch_size={ROWS}", "cluster=emulated", "cluster.gpus=2"),
]


def loss(w, batch, key=None):
    return jnp.mean((batch["x"] @ w) ** 2), {}


def batch_of(number):
    return {"x": np.ones((np.size(number) if np.ndim(number) else ROWS, 4), np.float32)}


def program(**given):
    """Trace a run, some functions of whose modules are others."""
    sgd = optax.sgd(0.1)
    own = {name: given.get(f"opt_{name}", f) for name, f in sgd._asdict().items()}
    optimizer = sgd._replace(**own)
    init = given.get("init", lambda key: W)
    numbers = given.get("numbers", lambda k: np.arange(ROWS) + k)
    held = Batches(numbers, given.get("gather", batch_of))
    train = given.get("train", held if given.keys() & {"numbers", "gather"} else batch_of)
    made = {
        "own_model": {"build": lambda *settings: Model(init, given.get("loss", loss))},
        "own_data": {
            "check": lambda options, model, validation: None,
            "build": lambda *a: Dataset(train, given.get("validation"), "rows"),
        },
        "own_optimizer": {
            "build": lambda *settings: (optimizer, given.get("rate", lambda count: 1e-3))
        },
    }
    for name, functions in made.items():
        functions |= {key.split(".")[1]: f for key, f in given.items() if f"{name}." in key}
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(functions)
    return build_program(config_of("validation" in given))


@functools.cache
def config_of(evaluates):
    more = ["train.eval_every=5", "train.eval_batches=1"] if evaluates else ["train.eval_every=0"]
    return load(WORDS + more)


def parallelized(fun):
    """A step that returns what the function does, too."""
    run = launcher.parallelize(lambda w, x: (launcher.grad(square)(w, x), fun()))
    run.plan(W, X)
    return run


def square(w, x):
    return jnp.mean((x @ w) ** 2)


def step_of(fun, how=launcher.value_and_grad):
    """A step whose loss is the function."""
    launcher.parallelize(lambda w, x: how(lambda w, x: fun())(w, x)).plan(W, X)


def of_nnx(make=lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss=lambda net, batch: net(1.0)):
    return lambda options, precision: launcher.nnx.model(make, loss)


def of_module(section, name):
    """A function of a module that is called by itself."""
    return lambda fun: users_code(f"{section}.module=own", fun, RETURNS[section][name])()


def of_field(kind, field, fun):
    """What a user's function returns that holds this one, such as a tokenizer."""
    given = dict.fromkeys(kind._fields, len) | {field: fun}
    return users_code("dataset.module=own", lambda: kind(**given), kind.__name__)()


def as_it_is(grads, state, params):
    return grads, optax.EmptyState()


def hook(event):
    def run(fun):
        mine = type("Mine", (Callback,), {event: lambda self, *about: fun()})
        callbacks = Callbacks()
        callbacks._named.append(("own.Mine", mine()))
        callbacks.call(event, 1, None)

    return run


def tracker(method):
    def run(fun):
        mine = type("Mine", (Tracker,), {method: lambda self, *about: fun()})
        queued = QueuedTracker("own.Mine", mine())
        arguments = [None] * (len(inspect.signature(getattr(Tracker, method)).parameters) - 1)
        getattr(queued, method)(*arguments)
        queued.finish({})

    return run


def leaked():
    """A value of a trace that has ended."""
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(1.0)
    return kept[0]


def fails():
    raise KeyError("own")


async def coroutine():
    return 1.0


WRONG = {
    "None": lambda: None,
    "number": lambda: 1.5,
    "three": lambda: (1, 2, 3),
    "text": lambda: "x",
    "array": lambda: jnp.ones((2, 3)),
    "generator": lambda: (x for x in ()),
    "coroutine": coroutine,
    "leak": leaked,
    "an exception": fails,
}
UNREAD = {"None", "number", "three", "text", "array", "leak"}  # nobody reads the result here
ARRAYS = {"None", "number", "three", "array"}  # any tree of arrays
# By function: how it is called, and which results are right, besides those with which it would
# be called in earnest.
CASES = {
    "model.build": (lambda f: program(**{"own_model.build": f}), set()),
    "model.build_decoder": (of_module("model", "build_decoder"), set()),
    "dataset.check": (of_module("dataset", "check"), {"None"}),
    "dataset.build": (lambda f: program(**{"own_data.build": f}), set()),
    "dataset.tokenizer": (of_module("dataset", "tokenizer"), set()),
    "dataset.bytes_per_target": (of_module("dataset", "bytes_per_target"), {"None", "number"}),
    "dataset.is_prepared": (of_module("dataset", "is_prepared"), set()),
    "dataset.prepare": (of_module("dataset", "prepare"), {"text"}),
    "Model.init": (lambda f: program(init=f), set()),
    "Model.loss": (lambda f: program(loss=f), set()),
    "Dataset.train": (lambda f: program(train=f), set()),
    "Dataset.validation": (lambda f: program(validation=f), set()),
    "Batches.numbers": (lambda f: program(numbers=f), set()),
    "Batches.gather": (lambda f: program(gather=f), set()),
    **{
        f"{kind.__name__}.{n}": (lambda f, k=kind, n=n: getattr(of_field(k, n, f), n)(), UNREAD)
        for kind, names in ((Tokenizer, "encode decode place"), (Decoder, "cache read"))
        for n in names.split()
    },
    "Dataset.after": (lambda f: of_field(Dataset, "after", f).after({}), set()),
    "optimizer.build": (lambda f: program(**{"own_optimizer.build": f}), set()),
    "GradientTransformation.init": (lambda f: program(opt_init=f, opt_update=as_it_is), set()),
    "GradientTransformation.update": (lambda f: program(opt_update=f), set()),
    "optimizer's schedule": (lambda f: program(rate=f), {"number"}),
    **{f"Callback.{event}": (hook(event), UNREAD) for event in typing.get_args(Event)},
    **{
        f"Tracker.{name}": (tracker(name), UNREAD)
        for name in ("table", "rewind", "log", "image", "artifact", "alert", "finish")
    },
    "Tracker.summary_fields": (tracker("summary_fields"), set()),
    "parallelize(fun)": (parallelized, ARRAYS),
    "create(init)": (lambda f: parallelized(fun=float).create(f, like=X), UNREAD - {"text"}),
    "value_and_grad(fun)": (step_of, {"number"}),
    "grad(fun)": (lambda f: step_of(f, launcher.grad), {"number"}),
    "microbatched(fun)": (lambda f: step_of(f, launcher.microbatched), ARRAYS),
    "per_slice(fun)": (lambda f: step_of(launcher.per_slice(f)), {"number"}),
    "nnx.model(make)": (lambda f: program(**{"own_model.build": of_nnx(make=f)}), set()),
    "nnx.model(loss)": (lambda f: program(**{"own_model.build": of_nnx(loss=f)}), {"number"}),
    # These hand their results to the caller as they are.
    **{f"{name}(fn)": None for name in ("foreach_worker", "foreach_replica", "on_first")},
}


def members():
    """The functions that users hand in, from the interfaces."""
    yield from (f"{section}.{name}" for section, names in RETURNS.items() for name in names)
    for kind in (Model, Dataset, Batches, Tokenizer, Decoder):
        hints = kind.__annotations__.items()
        yield from (f"{kind.__name__}.{name}" for name, hint in hints if "Callable" in str(hint))
    yield from (f"GradientTransformation.{name}" for name in optax.GradientTransformation._fields)
    yield from ("optimizer.build", "optimizer's schedule")
    yield from (f"Callback.{event}" for event in typing.get_args(Event))
    yield from (f"Tracker.{name}" for name, x in vars(Tracker).items() if inspect.isfunction(x))
    public = {name: getattr(launcher, name) for name in dir(launcher) if name.islower()}
    made = {"create": ParallelizedFunction.create, "nnx.model": launcher.nnx.model}
    for name, fun in (public | made).items():
        if inspect.isfunction(fun):
            given = inspect.signature(fun).parameters.values()
            named = (p.name for p in given if re.search("Callable|Make", str(p.annotation)))
            yield from (f"{name}({parameter})" for parameter in named)


def test_every_function_that_users_hand_in_has_a_case():
    assert sorted(members()) == sorted(CASES)


@pytest.mark.sampled(5, rest="slow")
@pytest.mark.parametrize("member", [name for name, case in CASES.items() if case])
def test_a_wrong_result_is_refused_in_one_line_with_its_place(member, caplog, monkeypatch):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    run, right = CASES[member]
    for kind, wrong in WRONG.items():
        if kind in right or (kind == "an exception" and "(" in member):  # in Python it is raised
            continue
        caplog.clear()
        try:
            run(lambda *given, wrong=wrong, **named: wrong())
        except (InputError, TraceError, HookError) as error:
            said = str(error)
        else:
            (said,) = caplog.messages
        assert "\n" not in said, (kind, said)
        by_place = r"test_users_functions.py:\d+|own\.Mine|an earlier trace left behind"
        assert re.search(by_place, said), (kind, said)


@pytest.mark.parametrize("form", ["partial", "method", "object", "class", "jit", "keywords"])
def test_every_form_of_a_function_is_taken_and_named(form):
    class Own(tuple):
        def __new__(cls, *given):
            return tuple.__new__(cls, loss(*given) if given else ())

        def __call__(self, w, batch, key):
            return loss(w, batch)

    forms = {
        "partial": functools.partial(lambda more, *given: loss(*given), 0),
        "method": Own().__call__,
        "object": Own(),
        "class": Own,
        "jit": jax.jit(loss),
        "keywords": lambda *given, scale=1.0, **more: loss(*given, **more),
    }
    program(loss=forms[form])
    assert re.search(r"(Own|lambda|loss).* \(.*\.py:\d+\)$|Own$", source_of(forms[form]))
