"""Each primitive's rule, proved on numbers: what is cut along a factor's dimensions, computed part
by part and put together again is what the whole equation computes."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from launcher.trace.ir.factors import _RULES, _nothing, factors
from launcher.trace.ir.jaxpr import inline_calls, is_var, make_jaxpr
from launcher.trace.slicing.relations import row_factors

PARTS = 2
GATHERS = ("gather",)
SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
# How partial results are put together where a factor reaches no result; else they are added.
COMBINED = {"reduce_max": np.maximum, "reduce_min": np.minimum}


def cut(x, dims, k):
    """Part `k` of an array, cut along some of its dimensions."""
    for d in dims:
        size = x.shape[d] // PARTS
        x = x[(slice(None),) * d + (slice(k * size, (k + 1) * size),)]
    return x


def shorter(lengths, dims):
    return tuple(n // PARTS if d in dims else n for d, n in enumerate(lengths))


def local_params(eqn, ins, outs):
    """The equation's parameters for one part: those that spell out lengths, shortened.

    Args:
        ins, outs: of each operand and result the dimensions that are cut.
    """
    params, name = dict(eqn.params), eqn.primitive.name
    if name == "reshape":
        params["new_sizes"] = shorter(params["new_sizes"], outs[0])
    elif name in ("broadcast_in_dim", "iota"):
        params["shape"] = shorter(params["shape"], outs[0])
    elif name == "slice":
        params["limit_indices"] = shorter(params["limit_indices"], ins[0])
    elif name == "dynamic_slice":
        params["slice_sizes"] = shorter(params["slice_sizes"], ins[0])
    elif name == "gather":
        numbers = params["dimension_numbers"]
        single = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        params["slice_sizes"] = shorter(params["slice_sizes"], set(ins[0]) - set(single))
    return params


def local_operands(eqn, operands, ins, k, is_sum):
    """The operands of part `k`."""
    name = eqn.primitive.name
    found = [cut(x, dims, k) for x, dims in zip(operands, ins, strict=True)]
    if name in (*GATHERS, *SCATTERS):  # where the part begins, each index counts from there
        numbers = eqn.params["dimension_numbers"]
        looked_up = getattr(numbers, "start_index_map", None)
        looked_up = numbers.scatter_dims_to_operand_dims if looked_up is None else looked_up
        window = getattr(numbers, "collapsed_slice_dims", None)
        window = numbers.inserted_window_dims if window is None else window
        for place, d in enumerate(looked_up):
            if d in ins[0] and d in window:
                size = operands[0].shape[d] // PARTS
                found[1] = found[1].copy()
                found[1][..., place] -= k * size
    if name in SCATTERS and is_sum and k:  # what is added to is there once
        found[0] = np.zeros_like(found[0])
    return found


def check(eqn, operands):
    """Every factor of an equation. Returns how many have been cut."""
    whole = eqn.primitive.bind(*operands, **eqn.params)
    whole = whole if eqn.primitive.multiple_results else [whole]
    checked = 0
    for factor in factors(eqn) or ():
        ins, outs = collections.defaultdict(list), collections.defaultdict(list)
        for i, d in factor.operands:
            ins[i].append(d)
        for j, d in factor.results:
            outs[j].append(d)
        lengths = {operands[i].shape[d] for i, d in factor.operands}
        lengths |= {whole[j].shape[d] for j, d in factor.results}
        if any(n % PARTS for n in lengths):
            continue
        checked += 1
        ins = [ins[i] for i in range(len(operands))]
        outs = [outs[j] for j in range(len(whole))]
        params = local_params(eqn, ins, outs)
        if eqn.primitive.name in (*GATHERS, *SCATTERS):  # what lies elsewhere counts nothing
            params |= {"mode": lax.GatherScatterMode.FILL_OR_DROP}
            params |= {"fill_value": 0} if "fill_value" in params else {}
        is_sum = not factor.results
        made = []
        for k in range(PARTS):
            given = local_operands(eqn, operands, ins, k, is_sum)
            part = eqn.primitive.bind(*given, **params)
            made.append(part if eqn.primitive.multiple_results else [part])
        for j, want in enumerate(whole):
            parts = [np.asarray(part[j]) for part in made]
            if outs[j]:
                (along,) = outs[j]
                got = np.concatenate(parts, along)
            elif is_sum:
                got = functools.reduce(COMBINED.get(eqn.primitive.name, np.add), parts)
            else:  # another result, which the factor does not touch
                got = parts[0]
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=f"{factor}: {eqn}")
    return checked


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def whole_numbers(top, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, top, shape, np.int32)


def conv(x, w, **options):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


def pool(x, window, strides, padding="VALID"):
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


X = numbers(4, 6, 8)
ROWS = numbers(10, 6)

# (what to trace, its operands, the primitive that must be in it, the factors that can be cut)
CASES = {
    "dot": (lambda a, b: a @ b, (numbers(4, 6), numbers(6, 8)), "dot_general", 3),
    "dot, batch": (
        lambda a, b: jnp.einsum("bhqd,bkhd->bhqk", a, b),
        (numbers(2, 4, 6, 8), numbers(2, 10, 4, 8)), "dot_general", 5,
    ),
    "dot, two sums": (
        lambda a, b: jnp.einsum("abcd,cbe->ade", a, b),
        (numbers(2, 4, 6, 8), numbers(6, 4, 10)), "dot_general", 5,
    ),
    "conv": (conv, (numbers(2, 4, 4, 6), numbers(3, 3, 6, 8)), "conv_general_dilated", 3),
    "conv, odd layout": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("CNHW", "OIHW", "HWNC")
        ),
        (numbers(6, 2, 4, 4), numbers(8, 6, 3, 3)), "conv_general_dilated", 3,
    ),
    "conv, groups": (
        functools.partial(conv, feature_group_count=2),
        (numbers(2, 4, 4, 8), numbers(3, 3, 4, 6)), "conv_general_dilated", 1,
    ),
    "conv, batch groups": (
        functools.partial(conv, batch_group_count=2),
        (numbers(4, 4, 4, 8), numbers(3, 3, 8, 6)), "conv_general_dilated", 0,
    ),
    "transpose": (lambda x: x.transpose(2, 0, 1), (X,), "transpose", 3),
    "broadcast": (
        lambda x: lax.broadcast_in_dim(x, (6, 4, 8), (1, 2)), (numbers(4, 1),),
        "broadcast_in_dim", 1,
    ),
    "reshape, split": (lambda x: x.reshape(4, 6, 2, 4), (X,), "reshape", 3),
    "reshape, merge": (lambda x: x.reshape(24, 8), (X,), "reshape", 2),
    "reshape, both": (lambda x: x.reshape(6, 4, 8), (X,), "reshape", 2),
    "reshape, all": (lambda x: x.reshape(-1), (X,), "reshape", 1),
    "reshape, transposed": (lambda x: lax.reshape(x, (6, 32), (1, 0, 2)), (X,), "reshape", 0),
    "reshape, ones": (lambda x: x.reshape(1, 8, 1, 4, 1), (numbers(1, 4, 1, 8),), "reshape", 1),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (numbers(4, 1, 6),), "squeeze", 2),
    "reduce_sum": (lambda x: x.sum((0, 2)), (X,), "reduce_sum", 3),
    "reduce_max": (lambda x: x.max(1), (X,), "reduce_max", 3),
    "reduce_min": (lambda x: x.min(-1), (X,), "reduce_min", 3),
    "reduce_prod": (lambda x: x.prod(1), (X,), "reduce_prod", 2),
    "reduce_and": (lambda x: (x > 0).all(1), (X,), "reduce_and", 2),
    "argmax": (lambda x: x.argmax(1), (X,), "argmax", 2),
    "argmin": (lambda x: x.argmin(-1), (X,), "argmin", 2),
    "stack": (lambda x: jnp.stack([x, 2 * x], 1), (X,), "stack", 3),
    "unstack": (lambda x: jnp.unstack(x, axis=1), (X,), "unstack", 2),
    "tile": (lambda x: jnp.tile(x, (1, 2, 1)), (X,), "tile", 2),
    "cumsum": (lambda x: lax.cumsum(x, 1), (X,), "cumsum", 2),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 0), (X,), "cumlogsumexp", 2),
    "sort": (lambda x: jnp.sort(x, 1), (X,), "sort", 2),
    "reduce_or": (lambda x: (x > 0).any(1), (X,), "reduce_or", 2),
    "reduce_xor": (
        lambda x: lax.reduce_xor(x, (1,)), (whole_numbers(99, 4, 6, 8),), "reduce_xor", 2,
    ),
    "cumprod": (lambda x: lax.cumprod(x, 1), (X,), "cumprod", 2),
    "cummax": (lambda x: lax.cummax(x, 1), (X,), "cummax", 2),
    "cummin": (lambda x: lax.cummin(x, 1, reverse=True), (X,), "cummin", 2),
    "sort with others": (
        lambda x: lax.sort((x, 2 * x), dimension=0), (X,), "sort", 2,
    ),
    "top_k": (lambda x: lax.top_k(x, 2), (X,), "top_k", 2),
    "top_k of all": (lambda x: lax.top_k(x, 8), (X,), "top_k", 2),
    "concatenate": (lambda x: jnp.concatenate([x, 2 * x], 1), (X,), "concatenate", 2),
    "split": (lambda x: jnp.split(x, 2, 1), (X,), "split", 2),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0))), (X,), "pad", 2),
    "pad inside": (
        lambda x: lax.pad(x, 0.0, ((0, 0, 1), (0, 0, 0), (-1, 1, 0))), (X,), "pad", 1,
    ),
    "rev": (lambda x: lax.rev(x, (1,)), (X,), "rev", 2),
    "slice": (lambda x: x[:, 1:3], (X,), "slice", 2),
    "slice, strided": (lambda x: x[:, :, ::2], (X,), "slice", 2),
    "dynamic_slice": (
        lambda x, i: lax.dynamic_slice(x, (0, i, 0), (4, 2, 8)), (X, 3), "dynamic_slice", 2,
    ),
    "dynamic_update_slice": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i, 0)),
        (X, numbers(4, 2, 8, seed=1), 3), "dynamic_update_slice", 2,
    ),
    "select_n": (lambda x: jnp.where(x > 0, x, 2 * x), (X,), "select_n", 3),
    "select_n by one": (
        lambda x: lax.select_n(x[0, 0, 0] > 0, x, 2 * x), (X,), "select_n", 3,
    ),
    "clamp": (lambda x: lax.clamp(-0.5, x, 0.5), (X,), "clamp", 3),
    "embedding": (lambda t, i: t[i], (ROWS, whole_numbers(10, 4, 8)), "gather", 4),
    "take_along_axis": (
        lambda x, i: jnp.take_along_axis(x, i, 1),
        (numbers(4, 6), whole_numbers(6, 4, 2)), "gather", 3,
    ),
    "gather, one of each row": (
        lambda x, i: x[jnp.arange(4), i], (numbers(4, 6), whole_numbers(6, 4)), "gather", 3,
    ),
    "gather of windows": (
        lambda x, i: jax.vmap(lambda s: lax.dynamic_slice(x, (s, 0), (2, 6)))(i),
        (ROWS, whole_numbers(8, 4)), "gather", 2,
    ),
    "gather, batched": (
        lambda x, i: jax.vmap(lambda a, s: lax.dynamic_slice(a, (s, 0), (2, 8)))(x, i),
        (X, whole_numbers(4, 4)), "gather", 2,
    ),
    "scatter-add": (
        lambda t, i, u: t.at[i].add(u),
        (ROWS, whole_numbers(10, 4, 8), numbers(4, 8, 6)), "scatter-add", 4,
    ),
    "scatter-add, batched": (
        lambda x, i, u: jax.vmap(lambda a, k, b: a.at[k].add(b))(x, i, u),
        (X, whole_numbers(6, 4, 2), numbers(4, 2, 8)), "scatter-add", 4,
    ),
    "scatter": (
        lambda t, i, u: t.at[i].set(u),
        (ROWS, np.int32([1, 8, 5, 0]), numbers(4, 6)), "scatter", 2,
    ),
    "scatter-max": (
        lambda t, i, u: t.at[i].max(u), (ROWS, whole_numbers(10, 4), numbers(4, 6)),
        "scatter-max", 2,
    ),
    "scatter-mul": (
        lambda t, i, u: t.at[i].multiply(u), (ROWS, whole_numbers(10, 4), numbers(4, 6)),
        "scatter-mul", 2,
    ),
    "scatter-min": (
        lambda t, i, u: t.at[i].min(u), (ROWS, whole_numbers(10, 4), numbers(4, 6)),
        "scatter-min", 2,
    ),
    "scatter of windows": (
        lambda t, u, i: jax.vmap(lambda a, b, s: lax.dynamic_update_slice(a, b, (s, 0)))(t, u, i),
        (X, numbers(4, 2, 8, seed=1), whole_numbers(4, 4)), "scatter", 2,
    ),
    "max pool": (
        lambda x: pool(x, (1, 2, 2, 1), (1, 2, 2, 1)), (numbers(2, 4, 4, 6),),
        "reduce_window_max", 2,
    ),
    "min pool": (
        lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 1), (1, 2, 1), "VALID"), (X,),
        "reduce_window_min", 2,
    ),
    "pool that shifts": (
        lambda x: pool(x, (1, 1, 1), (1, 1, 1), ((0, 0), (1, -1), (0, 0))), (X,),
        "reduce_window_max", 2,
    ),
    "pool by another function": (
        lambda x: lax.reduce_window(x, 1.0, lax.mul, (1, 2, 1), (1, 2, 1), "VALID"), (X,),
        "reduce_window", 2,
    ),
    "pool that pads": (
        lambda x: pool(x, (1, 2, 1), (1, 2, 1), ((0, 0), (0, 0), (1, 1))), (numbers(2, 4, 6),),
        "reduce_window_max", 1,
    ),
    "average pool": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 2, 1), "SAME"), (X,),
        "reduce_window_sum", 2,
    ),
    "pool's gradient": (
        jax.grad(lambda x: (pool(x, (1, 2, 2, 1), (1, 2, 2, 1)) ** 2).sum()),
        (numbers(2, 4, 4, 6),), "select_and_scatter_add", 2,
    ),
    "pool's derivative": (
        lambda x: jax.jvp(lambda x: pool(x, (1, 2, 1), (1, 2, 1)), (x,), (2 * x,)), (X,),
        "select_and_gather_add", 2,
    ),
    "barrier": (lambda x: lax.optimization_barrier((x, 2 * x[0])), (X,), "optimization_barrier", 5),
}  # fmt: skip


def equations_of(case):
    """The equations of a case, each with its operands and its results."""
    fun, operands, *_ = CASES[case]
    closed = inline_calls(make_jaxpr(fun, *operands))
    values = dict(zip(closed.invars, map(np.asarray, operands), strict=True))
    values |= dict(zip(closed.constvars, map(np.asarray, closed.consts), strict=True))
    for eqn in closed.eqns:
        given = [values[v] if is_var(v) else np.asarray(v.val, v.aval.dtype) for v in eqn.invars]
        made = bind(eqn, given, eqn.params)
        yield eqn, given, made
        values.update(zip(eqn.outvars, made, strict=True))


def bind(eqn, operands, params):
    made = eqn.primitive.bind(*operands, **params)
    return [np.asarray(x) for x in (made if eqn.primitive.multiple_results else [made])]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", CASES)
def test_parts_along_a_factor_make_the_whole(case):
    *_, primitive, count = CASES[case]
    checked = collections.Counter()
    for eqn, given, _ in equations_of(case):
        checked[eqn.primitive.name] += check(eqn, given)
    made_of_others = primitive == "unstack" and jax.__version_info__ < (0, 10, 2)
    assert checked[primitive] == count or made_of_others, checked


def test_every_rule_has_a_case():
    computing = {name for name, rule in _RULES.items() if rule is not _nothing}
    assert computing - {primitive for *_, primitive, _ in CASES.values()} == set()


def joined_axes(eqn, operands, whole, axes):
    """Of each result the axes along which the results of slices make the whole.

    `axes`: of each operand the axis that is cut into slices, or None.
    """
    found = [set() for _ in whole]
    ins = [[] if axis is None else [axis] for axis in axes]
    spelled = eqn.primitive.name in ("reshape", "broadcast_in_dim")
    for d in range(whole[0].ndim) if spelled else [0]:
        if spelled and whole[0].shape[d] % PARTS:
            continue
        params = local_params(eqn, ins, [[d]] * len(whole))
        try:
            slices = [
                bind(eqn, [cut(x, dims, k) for x, dims in zip(operands, ins, strict=True)], params)
                for k in range(PARTS)
            ]
        except (TypeError, ValueError, IndexError):
            continue
        if len(slices[0]) != len(whole):
            continue
        for j, want in enumerate(whole):
            for axis in range(want.ndim):
                parts = [one[j] for one in slices]
                lengths = [part.shape[:axis] + part.shape[axis + 1 :] for part in parts]
                if lengths[0] == want.shape[:axis] + want.shape[axis + 1 :]:
                    got = np.concatenate(parts, axis)
                    if got.shape == want.shape and np.allclose(got, want, 1e-5, 1e-5):
                        found[j].add(axis)
    return found


# Where slices would make the whole, but no factor of all operands says so: of even parts alone, or
# of each operand on its own.
CAREFUL = ("barrier", "reshape, transposed", "slice, strided", "max pool", "pool that pads")


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", CASES)
def test_examples_are_along_the_axis_where_slices_make_the_whole(case):
    """For every choice of operands that depend on the batch, and of the axis of each.

    An operand that does not depend on the batch may grow with it, as a mask of ones does: it is cut
    where the result would else not be the whole.
    """
    for eqn, operands, whole in equations_of(case):
        if eqn.primitive.name != CASES[case][2]:
            continue
        choices = [(None, *(d for d in range(x.ndim) if x.shape[d] % PARTS == 0)) for x in operands]
        brute = {}
        for axes in itertools.product(*choices):
            lengths = {x.shape[d] for x, d in zip(operands, axes, strict=True) if d is not None}
            if len(lengths) == 1:
                brute[axes] = joined_axes(eqn, operands, whole, axes)
        for axes in brute:
            if any(a is not None and not is_var(v) for v, a in zip(eqn.invars, axes, strict=True)):
                continue
            places = {(i, a) for i, a in enumerate(axes) if a is not None}
            along = [f for f in row_factors(eqn) if places <= set(f.operands) and not f.indexed]
            kept = dict(along[0].results) if along else {}
            wider = [
                joined
                for other, joined in brute.items()
                if all(a is None or a == b for a, b in zip(axes, other, strict=True))
            ]
            for j in range(len(eqn.outvars)):
                right = set().union(*(joined[j] for joined in wider))
                claimed = kept.get(j)
                careful = claimed is None and case in CAREFUL
                assert careful or (not right if claimed is None else claimed in right), (
                    f"{eqn.primitive.name} {eqn.params} of {axes}: result {j} has its examples "
                    f"along {claimed}; slices make the whole along {right or 'none'}"
                )


@pytest.mark.parametrize("name", ["exp", "logistic", "is_finite", "add", "max", "lt", "atan2"])
def test_element_wise_operations_may_be_cut_anywhere(name):
    operands = (X,) if name in ("exp", "logistic", "is_finite") else (X, X[::-1])
    for eqn in inline_calls(make_jaxpr(getattr(lax, name), *operands)).eqns:
        assert check(eqn, operands) == X.ndim


def test_an_unknown_primitive_has_no_factors():
    closed = inline_calls(make_jaxpr(jnp.linalg.cholesky, jnp.eye(4)))
    found = {eqn.primitive.name: factors(eqn) for eqn in closed.eqns}
    assert found["cholesky"] is None
