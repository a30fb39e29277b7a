"""Arrays on workers in a script's own hands: as arrays of this process, fetched once."""

import copy
import json
import pickle
import threading

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from launcher.api.remote_array import Fetch, RemoteArray, known_to_flax
from launcher.testing import assert_allclose

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3) + 1
KEY = jax.random.key(3)
known_to_flax()


class Workers:
    """One worker, whose arrays lie here; `fetched` are the numbers of those that were asked for."""

    def __init__(self):
        self.arrays, self.fetched = [], []
        self.sending = threading.RLock()

    def handle(self, value):
        self.arrays.append(value)
        array = jnp.asarray(value)
        return RemoteArray(self, len(self.arrays) - 1, array.shape, array.dtype)

    def fetch(self, arrays):
        self.fetched += [array.number for array in arrays]
        values = [self.arrays[array.number] for array in arrays]
        data = [
            jax.random.key_data(v) if jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key) else v
            for v in values
        ]
        shards = [[([(0, n) for n in np.shape(d)], np.asarray(d))] for d in data]
        fetch = Fetch(lambda: [shards], arrays)
        for place, array in enumerate(arrays):
            array.fetched = fetch, place

    def want(self, array):
        pass

    def flush(self):
        pass

    def drop(self, number):
        pass


@pytest.fixture
def workers():
    return Workers()


USES = {
    "+": lambda m, s: m + s,
    "+=": lambda m, s: sum([s, s, s]),
    "-": lambda m, s: (-m) - s,
    "/": lambda m, s: 3.0 / s + m / s,
    "**": lambda m, s: 2**s,
    "@": lambda m, s: m @ m.T,
    "array @": lambda m, s: jnp.ones((4, 2)) @ m,
    "number +": lambda m, s: np.float32(1) + s,
    "ndarray +": lambda m, s: np.ones(3) + m,
    "<": lambda m, s: s < 3,
    "==": lambda m, s: m == m,
    "and": lambda m, s: bool(s > 1 and s),
    "[]": lambda m, s: m[0, 1:],
    "at": lambda m, s: m.at[0].set(3.0),
    "in": lambda m, s: 3.0 in m[0],
    "len": lambda m, s: len(m),
    "iteration": lambda m, s: [row.sum() for row in m],
    "method": lambda m, s: m.mean(axis=0).astype(jnp.int32),
    "reshape": lambda m, s: m.reshape(-1),
    "max": lambda m, s: float(max([s, s])),
    "round": lambda m, s: round(s, 1),
    "json": lambda m, s: json.dumps({"loss": float(s), "all": m.tolist()}),
    "format": lambda m, s: f"{s:.3f} {s}",
    "str": lambda m, s: str(m),
    "np.mean": lambda m, s: np.mean([s, s]),
    "np.isfinite": lambda m, s: np.isfinite(m),
    "np.asarray": lambda m, s: jax.tree.map(np.asarray, {"m": m, "s": s}),
    "jnp.stack": lambda m, s: jnp.stack([s, s]),
    "jnp.add": lambda m, s: jax.tree.map(jnp.add, [m], [m]),
    "jnp.where": lambda m, s: jnp.where(m > s, m, s),
    "jnp.zeros_like": lambda m, s: jnp.zeros_like(m),
    "jit": lambda m, s: jax.jit(lambda m, s: m * s)(m, s),
    "closed over": lambda m, s: jax.jit(lambda x: x * m)(2.0),
    "grad": lambda m, s: jax.grad(lambda m: (m**2).sum())(m),
    "vmap": lambda m, s: jax.vmap(lambda row: row.sum())(m),
    "device_put": lambda m, s: jax.device_put(m),
    "device_get": lambda m, s: jax.device_get([m, s]),
    "optax": lambda m, s: optax.tree.norm({"m": m, "s": s}),
    "to_state_dict": lambda m, s: flax.serialization.to_state_dict({"m": m}),
    "to_bytes": lambda m, s: flax.serialization.to_bytes({"m": m, "s": s}),
    "from_bytes": lambda m, s: flax.serialization.from_bytes(
        {"m": m}, flax.serialization.to_bytes({"m": m})
    ),
    "pickle": lambda m, s: pickle.loads(pickle.dumps(m)),
    "deepcopy": lambda m, s: copy.deepcopy(m),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_it_is_used_as_an_array_of_this_process_is(workers, use):
    matrix, scalar = workers.handle(MATRIX), workers.handle(np.float32(2.5))
    told, expected = use(matrix, scalar), use(jnp.asarray(MATRIX), jnp.float32(2.5))
    if isinstance(expected, (str, bytes)):
        assert told == expected
    else:
        assert_allclose(told, expected)
    assert len(workers.fetched) == len(set(workers.fetched)) <= 2


def test_what_is_known_without_its_value_fetches_nothing(workers):
    matrix = workers.handle(MATRIX)
    assert (matrix.shape, matrix.dtype, matrix.ndim, matrix.size) == ((2, 3), np.float32, 2, 6)
    assert (len(matrix), repr(matrix)) == (2, "RemoteArray(float32[2, 3])")
    assert not hasattr(matrix, "devices")
    assert workers.fetched == []
    with pytest.raises(TypeError, match="len"):
        len(workers.handle(np.float32(1)))
    with pytest.raises(TypeError, match="unhashable"):
        hash(matrix)


def test_a_random_key_is_fetched_or_says_how(workers):
    key = workers.handle(KEY)
    assert_allclose(jax.device_get(key), KEY)
    assert_allclose(jax.jit(jax.random.split)(key), jax.random.split(KEY))
    told = r"is a random key on the workers; fetch it: jax\.device_get"
    for use in (jax.random.split, jax.random.key_data, jnp.asarray):
        with pytest.raises(TypeError, match=told):
            use(workers.handle(KEY))
