"""What a script may define: the functions of `CASES` say what they see of it, here or elsewhere."""

import collections
import dataclasses
import functools
import re
import typing

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from flax.training import train_state
from jax.experimental import pallas as pl
from jax.tree_util import GetAttrKey

X = jnp.ones(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: jax.Array
    n: int = dataclasses.field(default=3, metadata={"static": True})
    more: dict = dataclasses.field(default_factory=lambda: {"r": float(bool(Registered))})


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=["b"], drop_fields=["c"]
)
@dataclasses.dataclass(frozen=True)
class Dropped:
    a: jax.Array
    b: str = "x"
    c: int = 0


@struct.dataclass
class Struct:
    w: jax.Array
    f: typing.Callable = struct.field(pytree_node=False)


class State(train_state.TrainState):
    batch_stats: typing.Any


class Averaged(State):
    ema: typing.Any = None

    def averaged(self):
        return self.replace(ema=jax.tree.map(lambda a, b: (a + b) / 2, self.ema, self.params))


def state_of(cls, **more):
    return cls.create(
        apply_fn=jnp.tanh, params={"a": X}, tx=optax.adam(0.1), batch_stats={"m": X}, **more
    )


class Hooked:
    """Its subclasses are registered by what they define themselves."""

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_node(cls, cls.flatten, cls.unflatten)


class Point(Hooked):
    names = "x", "y"

    def __init__(self, x, y):
        self.x, self.y = x, y

    def flatten(self):
        return tuple(getattr(self, name) for name in self.names), None

    @classmethod
    def unflatten(cls, _, children):
        return cls(*children)


class ModuleMeta(type):
    """Makes a registered dataclass of each class, as Equinox does."""

    def __new__(mcs, *args):
        cls = dataclasses.dataclass(super().__new__(mcs, *args))
        static = {f.name: f.metadata.get("static", False) for f in dataclasses.fields(cls)}
        data, meta = ([n for n, s in static.items() if s is b] for b in (False, True))
        return jax.tree_util.register_dataclass(cls, data, meta)


class Module(metaclass=ModuleMeta):
    pass


class Linear(Module):
    w: jax.Array
    act: typing.Callable = dataclasses.field(default=jnp.tanh, metadata={"static": True})

    def __call__(self, x):
        return self.act(x * self.w)


class Twice(Linear):
    then: Linear | None = None

    def __call__(self, x):
        return self.then(super().__call__(x))


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    def __init__(self, x):
        self.x = x

    def tree_flatten_with_keys(self):
        return ((GetAttrKey("x"), self.x),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class Functions:
    def __init__(self, x):
        self.x = x


jax.tree_util.register_pytree_with_keys(
    Functions, lambda f: (((GetAttrKey("x"), f.x),), None), lambda _, c: Functions(*c)
)


@jax.tree_util.register_static
class Word(str):
    pass


class Named(typing.NamedTuple):
    a: jax.Array
    b: float = 2.0


Plain = collections.namedtuple("Plain", "u v")
jax.tree_util.register_pytree_node(  # a class that travels by name
    collections.UserList, lambda found: (found.data, None), lambda _, c: collections.UserList(c)
)


def local():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Local:
        z: jax.Array

    return Local(X)


def trees():
    return {
        "registered": Registered(X),
        "dropped": Dropped(X),
        "struct": Struct(X, lambda x: x + 1),
        "state": state_of(State),
        "averaged": state_of(Averaged, ema={"a": X}),
        "hooked": Point(X, X),
        "module": Twice(X, then=Linear(X)),
        "keyed": Keyed(X),
        "functions": Functions(X),
        "static": Word("hi"),
        "named": Named(X),
        "plain": Plain(X, X),
        "by name": collections.UserList([X, X]),
        "local": local(),
    }


def used(tree):
    """What a script does with its classes inside a step."""
    state = tree["state"].apply_gradients(grads=tree["state"].params)
    return jax.tree.map(
        lambda x: 2 * x,
        {
            **tree,
            "state": state.replace(batch_stats={"m": tree["hooked"].x}),
            "averaged": tree["averaged"].averaged(),
            "made": (Registered(X), Point(X, tree["module"](X)), Linear(X), Named(X), Word("ho")),
            "struct": tree["struct"].replace(w=tree["struct"].f(X)),
        },
    )


def seen(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), jnp.shape(leaf)) for path, leaf in leaves]


def program(fun):
    """The gradient's program: the rules of the function, too."""

    def told():
        found = jax.make_jaxpr(jax.grad(lambda x: fun(x).sum()))(jnp.ones((2, 3)))
        return re.sub("0x[0-9a-f]+", "", str(found))

    return told


@jax.custom_vjp
def vjp(x):
    return jnp.sin(x)


vjp.defvjp(lambda x: (vjp(x), x), lambda x, g: (3 * g * jnp.cos(x),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, n):
    return n * x


def scaled_back(n, _, g):
    return (n * g,)


scaled.defvjp(lambda x, n: (scaled(x, n), None), scaled_back)


@jax.custom_jvp
def jvp(x):
    return jnp.sin(x)


@jvp.defjvp
def _(primals, tangents):
    return jvp(primals[0]), 2 * tangents[0]


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
def kept(x):
    return jnp.tanh(jnp.sin(x))


@jax.custom_gradient
def gradient(x):
    return jnp.sin(x), lambda g: g * x


class Net(nn.Module):
    @nn.remat
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


def net(x):
    return Net().apply(Net().init(jax.random.key(0), x), x)


def double(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...]


def kernel():
    call = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct((3,), X.dtype), interpret=True)
    return str(jax.make_jaxpr(call)(X))


CASES = {
    **{f"tree {name}": functools.partial(seen, tree) for name, tree in trees().items()},
    "trees used": lambda: (str(jax.make_jaxpr(used)(trees())), seen(used(trees()))),
    "trees given": functools.partial(lambda tree: seen(used(tree)), trees()),
    "custom_vjp": program(vjp),
    "custom_vjp with an argument": program(lambda x: scaled(x, 2.0)),
    "custom_jvp": program(jvp),
    "custom_gradient": program(gradient),
    "checkpoint": program(kept),
    "checkpoint of a jitted function": program(jax.checkpoint(jax.jit(jnp.sin))),
    "jit": program(jax.jit(jnp.sin, donate_argnums=0)),
    "vmap": program(jax.vmap(lambda x: jnp.sin(x))),
    "named_call": program(jax.named_call(jnp.sin, name="here")),
    "module of Flax with remat": program(net),
    "Pallas kernel": kernel,
}
