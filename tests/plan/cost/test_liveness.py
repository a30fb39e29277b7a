"""Values of a program that the compiler stores."""

import jax
import jax.numpy as jnp
import pytest

from launcher.plan.cost.liveness import Liveness
from launcher.plan.cost.waiting import PutOff
from launcher.trace.ir.jaxpr import make_jaxpr, nbytes

ROWS, WIDTH = 8, 16
ARRAY = ROWS * WIDTH * 4


def twice(x):
    return jnp.sin(x), jnp.cos(x)


@pytest.mark.parametrize(
    ("program", "other", "stored"),
    [
        (lambda x, y: twice(x * y), (ROWS, WIDTH), 2),
        (lambda x, y: twice(x * y), (WIDTH,), 1),
        (lambda x, y: twice(jax.lax.mul(x, y)), (ROWS, 1), 1),
        (lambda x, y: ((z := x + 1).sum(1), jnp.sin(z)), (WIDTH,), 1),
    ],
    ids=["of two", "of a broadcast", "of a column", "for a sum"],
)
def test_what_is_stored_of_what_is_read_twice(program, other, stored):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((ROWS, WIDTH), other)]
    jaxpr = make_jaxpr(program, *shapes)
    liveness = Liveness(jaxpr.eqns, jaxpr.outvars)
    held = liveness.held(len(liveness.equations) - 1, lambda v: nbytes(v.aval))
    assert held // ARRAY == stored


def test_what_sums_read_is_stored_at_once_where_equations_run_as_soon_as_they_can():
    def program(*arrays):
        total = 0.0
        for x in arrays:
            total = total + (x * x).sum()
        return total

    jaxpr = make_jaxpr(program, *[jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)] * 3)
    numbers = 8 * 4  # sums, at most so many at once
    for as_soon, arrays in (True, 3), (False, 0):
        liveness = Liveness(jaxpr.eqns, jaxpr.outvars, as_soon=as_soon)
        peak = liveness.peak(lambda v: nbytes(v.aval))
        assert arrays * ARRAY <= peak <= arrays * ARRAY + numbers


@pytest.mark.parametrize(
    ("widths", "needed"),
    [((WIDTH, WIDTH), 0), ((2 * WIDTH, WIDTH), 0), ((WIDTH // 2, WIDTH // 2), 1)],
    ids=["as large", "larger", "smaller"],
)
def test_the_buffer_of_a_later_result_holds_what_fits_into_it(widths, needed):
    """Of two products in turn the first is dead when two results are made."""

    def program(x, w, a, b):
        first = jnp.sin(x @ w)
        second = first @ w
        return second.sum(0) @ a, second.sum(0) @ b

    shapes = (ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, ROWS * widths[0]), (WIDTH, ROWS * widths[1])
    jaxpr = make_jaxpr(program, *[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    liveness = Liveness(jaxpr.eqns, [], jaxpr.outvars)
    found = liveness.peak_beside(jaxpr.outvars, lambda v: nbytes(v.aval))
    assert found >= needed * ARRAY
    assert (found < ARRAY) == (needed == 0)


# Of the programs below, each on XLA:GPU: the arrays of ROWS x WIDTH floats at the peak.
def scattered(x, w):
    return jnp.zeros_like(x).at[jnp.arange(ROWS), 0].add(w[:ROWS, 0])


def alike(x, w):
    return jnp.tanh(x @ w)


def narrowed(x, w):
    """Only what is as large may take a place."""
    return jnp.tanh(x @ w).astype(jnp.bfloat16)


def cast(x, w):
    """Casts that are made one at a time, although all of them stand first."""
    casts = [jax.lax.convert_element_type(w * k, jnp.bfloat16) for k in (1, 2, 3, 4)]
    x = x.astype(jnp.bfloat16)
    for one in casts:
        x = x @ one
    return x


def read_twice(x, w):
    """An exponential that two products read in different forms: it is computed again."""
    much = jnp.exp(x)
    return (much + 1).sum(1), (much * 2).sum(1)


def turned_weight(x, w):
    return x @ (w + 1).T


def summed(x, w):
    """A kernel that adds up what it computes does not write over what it reads."""
    y = jnp.tanh(x @ w)
    return y, y.sum(0)


def summed_beside(x, w):
    """So does one that adds up what it computes it of."""
    y = jnp.tanh(x @ w)
    return y * 2, y.sum(0)


def scattered_and_narrowed(x, w):
    """What is scattered into took the place of what it is made of."""
    y = jnp.tanh(x @ w).at[jnp.arange(ROWS), 0].add(w[:ROWS, 0])
    return y.astype(jnp.bfloat16)


def largest(x, w):
    """The gradient, zeros twice, and for half of the elements two indices and one of replicas."""
    window = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": "VALID"}
    _, pull = jax.vjp(lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, **window), x)
    return pull(w[:ROWS, : WIDTH // 2])


def widened(x, w):
    """Of what sums read in 32 bits, that it is made of in 16."""
    wide = (x * jnp.exp(w[:ROWS])).astype(jnp.bfloat16).astype(jnp.float32)
    return (wide + 1).sum(1), (wide * 2).sum(1), jnp.sin(wide).sum(1), (wide - 4).sum(0)


def passed(x, w):
    """A barrier's results are its operands, and each is made of its own alone."""
    y, z = jax.lax.optimization_barrier((x @ w, jnp.sin(x)))
    return y @ w, z.sum(0)


def columns(x, w):
    """Of a kernel that sums columns of few rows, two values in 32 bits beside two in 16."""
    a, b = (x.astype(jnp.bfloat16) @ (k * w).astype(jnp.bfloat16) for k in (1, 2))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return (a * b).sum(0), (-(a + b)).sum(0)


@pytest.mark.parametrize(
    ("program", "arrays"),
    [
        (scattered, 1),
        (alike, 1),
        (narrowed, 1.5),
        (cast, 2),
        (read_twice, 0),
        (turned_weight, 3),
        (summed, 2.1),
        (summed_beside, 2.1),
        (scattered_and_narrowed, 1.5),
        (largest, 5),
        (widened, 0.8),
        (passed, 2.1),
        (columns, 3),
    ],
    ids=lambda of: getattr(of, "__name__", ""),
)
def test_what_is_stored_on_gpus(program, arrays):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((ROWS, WIDTH), (WIDTH, WIDTH))]
    jaxpr = make_jaxpr(program, *shapes)
    liveness = Liveness(jaxpr.eqns, jaxpr.outvars, on_gpu=True)
    assert liveness.peak(lambda v: nbytes(v.aval)) / ARRAY == pytest.approx(arrays, abs=0.3)


def test_what_is_stored_on_gpus_is_the_same_in_each_process():
    def program(*arrays):
        a, b, c = (x.astype(jnp.float32) for x in arrays[-3:])
        return (a * b).sum(0), jnp.sin(a * b * c).sum(0), (b * c).sum(0)

    row = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    # Others, not used, so that values lie at other addresses, by which sets are in order.
    jaxprs = [make_jaxpr(program, *[row] * (3 + others)) for others in range(20)]
    found = [Liveness(x.eqns, x.outvars, on_gpu=True) for x in jaxprs]
    assert len({one.peak(lambda v: nbytes(v.aval)) for one in found}) == 1


def of_rows(scores, x):
    return jax.lax.dot_general(scores, x, (((1,), (1,)), ((0,), (0,))))


def of_columns(scores, x):
    return jax.lax.dot_general(scores, x, (((2,), (1,)), ((0,), (0,))))


@pytest.mark.parametrize(
    ("program", "squares"),
    [
        (lambda s, x: (of_columns(jnp.tanh(of_columns(s, s)), x),), 1),
        (lambda s, x: (of_rows(y := jnp.tanh(of_columns(s, s)), x), of_columns(y, x)), 2),
        (lambda s, x: of_columns(s.transpose(1, 0, 2) + 1, x), 1),
    ],
    ids=["as it lies", "turned beside", "made for one"],
)
def test_operands_of_batches_of_products_are_copied_on_gpus(program, squares):
    """`scores` of pairs, which the first product of two copies for itself."""
    batch, length = 32, 32
    scores = jax.ShapeDtypeStruct((batch, length, length), jnp.float32)
    x = jax.ShapeDtypeStruct((batch, length, 1), jnp.float32)
    jaxpr = make_jaxpr(program, scores, x)
    peak = Liveness(jaxpr.eqns, jaxpr.outvars, on_gpu=True).peak(lambda v: nbytes(v.aval))
    assert peak / (batch * length * length * 4) == pytest.approx(squares, abs=0.3)


@pytest.mark.parametrize(("dtype", "dims"), [(jnp.float32, [3, 2]), (jnp.bfloat16, [2, 3])])
def test_a_batch_of_products_in_16_bits_waits_for_its_reader_on_gpus(dtype, dims):
    def program(scores, x, w):
        first = of_columns(scores, x)
        return w @ w + first

    shapes = (4, 8, 8), (4, 8, 8), (8, 8)
    jaxpr = make_jaxpr(program, *[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])
    found = Liveness(jaxpr.eqns, jaxpr.outvars, on_gpu=True).equations
    products = [eqn for eqn in found if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.ndim for eqn in products] == dims


def test_gradients_of_a_set_wait_for_one_another_and_for_its_ties():
    """The first product is a gradient's alone: it waits for what the second is made of.

    So does one for a gradient of no set, if the set has ties.
    """

    def program(x, w):
        y = jnp.tanh(x @ w)
        first, part, z = y.T @ y, x.T @ y, jnp.tanh(y @ w)
        u = jnp.sin(z @ w)
        return first, z.T @ x, part + u.T @ u, u

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((ROWS, WIDTH), (WIDTH, WIDTH))]
    jaxpr = make_jaxpr(program, *shapes)
    gradients, held = jaxpr.outvars[:3], jaxpr.outvars[3:]

    def order(*ties):
        waits = [PutOff(set(gradients[:2]), ties)]
        equations = Liveness(jaxpr.eqns, held, gradients, waits=waits, on_gpu=True).equations
        names = [e.primitive.name[0] + str(e.outvars[0].aval.shape[0]) for e in equations]
        return "".join(name[0] for name in names if name in ("t8", "s8", "d16"))

    assert order() == "tdtdds" + "d"
    assert order(*held) == "tts" + "dddd"


@pytest.mark.parametrize(("pads", "images"), [((1, 1), 1), ((0, 1), 2)])
def test_a_convolution_with_uneven_padding_reads_a_padded_copy_on_gpus(pads, images):
    def program(x, w):
        return jax.lax.conv_general_dilated(jnp.tanh(x), w, (2, 2), [pads] * 2)

    shapes = (2, 3, 16, 16), (1, 3, 3, 3)
    jaxpr = make_jaxpr(program, *[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    peak = Liveness(jaxpr.eqns, jaxpr.outvars, on_gpu=True).peak(lambda v: nbytes(v.aval))
    assert peak / (2 * 3 * 16 * 16 * 4) == pytest.approx(images, abs=0.3)


def test_what_is_gathered_is_whole_from_its_first_reader_to_its_last():
    def program(x, a, b):
        return jnp.tanh(x @ a) @ b

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    jaxpr = make_jaxpr(program, jax.ShapeDtypeStruct((1, WIDTH), jnp.float32), weight, weight)

    def peak(weights):
        liveness = Liveness(jaxpr.eqns, jaxpr.outvars, gathered=weights, on_gpu=True)
        return liveness.peak(lambda v: nbytes(v.aval) if v in weights else 0.0)

    weights = jaxpr.invars[1:]
    assert peak(weights) == nbytes(weights[0].aval)
    assert peak(weights[:1]) == peak(weights)


def test_a_long_chain_from_an_input_alone_is_counted():
    def program(x):
        for _ in range(2_000):
            x = 1.5 * x
        return x @ x.T

    jaxpr = make_jaxpr(program, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    liveness = Liveness(jaxpr.eqns, jaxpr.outvars, on_gpu=True)
    assert liveness.peak(lambda v: nbytes(v.aval)) == ARRAY + ROWS * ROWS * 4
