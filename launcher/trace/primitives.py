"""The two primitives a train step is read by, and the functions that bind them.

`microbatched_loss` keeps a whole loss as a jaxpr inside the trace of the train step, so that the
planner sees the forward pass, what is differentiated and what is combined, before autodiff has
mixed them up. Outside a parallelized step it means what `jax.value_and_grad` does, under every
transformation. `pipeline_boundary` has no operands and computes nothing: its place among the
equations is its meaning.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from launcher.base import jax_compat, source_of
from launcher.trace.errors import GradientError, LossError
from launcher.trace.interface import arrays_only, fixed, no_array, unfixed
from launcher.trace.ir.jaxpr import (
    Equation,
    Jaxpr,
    Primitive,
    hide_from_source_lines,
    inline_calls,
    jaxpr_as_fun,
    lift_constants,
    make_jaxpr,
)

REDUCTIONS = ("infer", "mean", "sum", "max", "min", "concat", "last")
_PER_SLICE = "launcher.per_slice"
PLAIN = "launcher.plain"

# Whether `jax.grad` is `launcher.grad` in this thread; `jax.jit` keeps its traces apart.
_plain_is_loss = jax.make_user_context(False)

# An equation's source line is its caller's: not in here, and not in a library beside JAX.
_BESIDE_JAX = [jax.__file__.replace("jax/__init__", name) for name in ("equinox", "flax", "optax")]
for _path in (__file__, jax_compat.__file__, *(path.removesuffix(".py") for path in _BESIDE_JAX)):
    hide_from_source_lines(_path)

boundary_p = Primitive("pipeline_boundary")
boundary_p.multiple_results = True
boundary_p.def_impl(list)
boundary_p.def_abstract_eval(list)
mlir.register_lowering(boundary_p, lambda ctx: [])

loss_p = Primitive("microbatched_loss")
loss_p.multiple_results = True


def mark_pipeline_boundary() -> None:
    """End a pipeline layer here: what follows, up to the next mark, is the next layer.

    Call it in the forward pass between two blocks of the model, outside loops (`lax.scan`,
    `while`) and outside `jax.checkpoint`. A scan over stacked parameters needs no marks: each
    iteration is a layer. Without a pipeline it does nothing.

    Example:
        >>> def forward(params, x):
        ...     x = jnp.tanh(x @ params[0])
        ...     launcher.mark_pipeline_boundary()
        ...     return x @ params[1]
        >>> forward((jnp.ones((2, 2)), jnp.ones((2, 1))), jnp.zeros((3, 2))).shape
        (3, 1)
    """
    boundary_p.bind()


def per_slice(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Say of `fun` that each slice's own value is meant, not the whole batch's.

    A slice is what one replica sees of one microbatch. A function that compares its examples with
    one another, as batch normalization does, is refused where there are several slices, unless it
    is marked so. A result that does not grow with the batch then stands for its mean over the
    slices. Outside a parallelized step this does nothing.

    Example:
        >>> @launcher.per_slice
        ... def centered(x):
        ...     return x - x.mean(axis=0)
        >>> float(centered(jnp.ones((4, 2))).sum())
        0.0
    """

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_PER_SLICE):
            return fun(*args, **kwargs)

    return wrapped


def is_per_slice(eqn: Equation) -> bool:
    """Return whether an equation stands in a function marked by `per_slice`."""
    return _PER_SLICE in str(eqn.source_info.name_stack)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    reduce: Any = "infer",
) -> Callable[..., Any]:
    """`jax.value_and_grad` that a parallelized train step can cut into microbatches and stages.

    Args:
        fun: the loss, `fun(*args, **kwargs) -> scalar`, or `(scalar, aux)` with `has_aux`. In a
            parallelized step it sees one microbatch at a time. Leaves of its arguments that are no
            arrays (flags, numbers, strings, functions) reach it as they are.
        argnums: which positional arguments to differentiate.
        has_aux: whether `fun` returns auxiliary data beside the loss.
        reduce: how results are combined over the slices of the batch (microbatches and replicas)
            to what they are on the whole batch. By default that is read off `fun`'s program
            (`"infer"`). One word for all results, or, with `has_aux`, a pair `(loss, aux)` whose
            second part may be a pytree prefix of aux: `"mean"`, `"sum"`, `"max"`, `"min"` or
            `"concat"` (along axis 0), which are checked against the program, or `"last"`, the value
            of the last slice.

    Returns:
        A function with `fun`'s arguments, returning `(value, grads)`.

    Raises:
        TypeError: a differentiated leaf is not of a floating dtype, or the loss is no scalar.
        GradientError: `reduce` is not a known word, or `argnums` names no positional argument.

    Example:
        >>> value, slope = launcher.value_and_grad(lambda w, x: jnp.mean(w * x))(2.0, jnp.ones(4))
        >>> float(value), float(slope)
        (2.0, 1.0)
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        for n in nums:
            if not -len(args) <= n < len(args):
                raise GradientError(
                    f"argnums={argnums} of launcher.grad or value_and_grad names argument {n}, but "
                    f"the loss was given {len(args)} positional arguments"
                )
        nums = tuple(n % len(args) for n in nums)
        out, grads = _bind(fun, args, kwargs, nums, has_aux, reduce)
        return out, grads[0] if isinstance(argnums, int) else grads

    return wrapped


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    reduce: Any = "infer",
) -> Callable[..., Any]:
    """`jax.grad` for a parallelized step; see `value_and_grad`. Gives `grads` or `(grads, aux)`.

    Example:
        >>> float(launcher.grad(lambda w, x: jnp.mean(w * x))(2.0, jnp.ones(4)))
        1.0
    """
    with_value = value_and_grad(fun, argnums, has_aux, reduce)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


@contextlib.contextmanager
def plain_gradients() -> Iterator[None]:
    """Have the outermost `jax.grad` and `jax.value_and_grad` be those of this module.

    So are functions of other libraries that end in them. One inside a loss is a part of it, and one
    that is differentiated (`jax.jvp`) or of integers or complex numbers stays as it is.
    """

    def take(fun: Callable[..., Any], primals: tuple[Any, ...], has_aux: bool) -> Any:
        types = [jnp.result_type(x) for x in jax.tree.leaves(primals)]
        if not (_plain_is_loss.value and all(jnp.issubdtype(t, jnp.floating) for t in types)):
            return None
        with jax.named_scope(PLAIN):
            out, grads = value_and_grad(fun, tuple(range(len(primals))), has_aux)(*primals)
        return (out[0], lambda _: grads, out[1]) if has_aux else (out, lambda _: grads)

    with _plain_is_loss(True), jax_compat.taking_gradients(take):
        yield


def microbatched(fun: Callable[..., Any], reduce: Any = "infer") -> Callable[..., Any]:
    """Evaluate `fun` a microbatch at a time and combine its results: the forward-only form.

    `reduce` is one word or a pytree prefix of `fun`'s result, as in `value_and_grad`.

    Example:
        >>> evaluate = launcher.microbatched(lambda x: {"total": x.sum()}, reduce="sum")
        >>> float(evaluate(jnp.ones(4))["total"])
        4.0
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _bind(fun, args, kwargs, (), False, reduce)[0]

    return wrapped


def _bind(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nums: tuple[int, ...],
    has_aux: bool,
    reduce: Any,
) -> tuple[Any, tuple[Any, ...]]:
    everything, tree = jax.tree.flatten((args, kwargs))
    is_diff = [i in nums for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    is_diff += [False] * (len(everything) - len(is_diff))
    array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in everything]
    traced = [i for i, own in enumerate(array) if own or is_diff[i]]
    leaves = [everything[i] for i in traced]
    for leaf, diff in zip(everything, is_diff, strict=True):
        if diff:
            _check_differentiable(fun, leaf)
    out_tree: Any = None

    def flat_fun(*flat: Any) -> list[Any]:
        nonlocal out_tree
        again, named = jax.tree.unflatten(tree, _with_values(everything, traced, flat))
        out = fixed(fun(*again, **named))
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise LossError(f"{source_of(fun)} must return (loss, aux), as has_aux=True says")
        if nums:
            _check_loss(fun, out[0] if has_aux else out)
        arrays_only(fun, out)
        out_leaves, out_tree = jax.tree.flatten(out)
        return out_leaves

    with _plain_is_loss(False):  # a gradient inside of the loss is part of it
        closed = inline_calls(make_jaxpr(flat_fun, *leaves))
    words = _reduction_words(out_tree, has_aux, reduce)
    if nums and words[0] not in ("infer", "mean", "sum"):
        raise GradientError(f'a loss is combined by "mean" or "sum", not {words[0]!r}')
    operands = [*closed.consts, *leaves]
    wrt = tuple(len(closed.consts) + k for k, i in enumerate(traced) if is_diff[i])
    params = {"jaxpr": lift_constants(closed), "wrt": wrt, "reduce": words}
    if (reached := _on_loss.get()) is not None:
        reached([jax.typeof(x) for x in operands], params)
    outs = loss_p.bind(*operands, **params)
    values, flat_grads = outs[: len(words)], iter(outs[len(words) :])
    by_num = {n: jax.tree.map(lambda _: next(flat_grads), args[n]) for n in sorted(set(nums))}
    return unfixed(jax.tree.unflatten(out_tree, values)), tuple(by_num[n] for n in nums)


def _with_values(given: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return what is given, with these values at these places."""
    new = dict(zip(places, values, strict=True))
    return [new.get(i, value) for i, value in enumerate(given)]


def _check_differentiable(fun: Callable[..., Any], leaf: Any) -> None:
    wrong = no_array(leaf)
    if wrong or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        wrong = (wrong and f"that is {wrong}") or f"of dtype {jnp.result_type(leaf)}"
        raise LossError(f"{source_of(fun)}: cannot differentiate a leaf {wrong}")


def _reduction_words(out_tree: Any, has_aux: bool, reduce: Any) -> tuple[str, ...]:
    if has_aux and isinstance(reduce, str) and reduce == "concat":
        raise GradientError('reduce="concat" fits no scalar loss; say reduce=("mean", "concat")')
    dummy = jax.tree.unflatten(out_tree, [0] * out_tree.num_leaves)
    try:
        words = tuple(jax.tree.leaves(jax.tree.broadcast(reduce, dummy)))
    except ValueError as error:
        raise GradientError(
            f"reduce={reduce!r} does not fit what the loss returns, {out_tree}; give one word, or "
            "(loss, aux) with a word or a tree of words for aux"
        ) from error
    for word in words:
        if word not in REDUCTIONS:
            raise GradientError(f"reduce={word!r} is not one of {', '.join(REDUCTIONS)}")
    return words


def _check_loss(fun: Callable[..., Any], loss: Any) -> None:
    wrong = no_array(loss) or jax.typeof(loss).str_short()
    if no_array(loss) or jnp.shape(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise LossError(
            f"the loss of {source_of(fun)} must be one floating-point number; it is {wrong}"
        )


def _whole_batch(
    *operands: Any, jaxpr: Jaxpr, wrt: tuple[int, ...], reduce: tuple[str, ...]
) -> list[Any]:
    """What the primitive means: the loss, its other results and its gradients, on one batch."""
    del reduce  # one microbatch: nothing to combine
    fun = jaxpr_as_fun(jaxpr)
    if not wrt:
        return list(fun(*operands))

    def of_wrt(*diff: Any) -> tuple[Any, list[Any]]:
        outs = fun(*_with_values(operands, wrt, diff))
        return outs[0], list(outs)

    _, vjp, outs = jax.vjp(of_wrt, *(operands[i] for i in wrt), has_aux=True)
    return [*outs, *vjp(jnp.ones_like(outs[0]))]


def _loss_avals(*avals: Any, jaxpr: Any, wrt: Any, reduce: Any) -> list[Any]:
    del reduce
    return [*jaxpr.out_avals, *(avals[i] for i in wrt)]


def _loss_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Forward-mode (and so every higher) derivatives: those of what the primitive means."""
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moving(*values: Any) -> list[Any]:
        return _whole_batch(*_with_values(primals, moving, values), **params)

    outs, rates = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    float0 = jax.dtypes.float0  # of results that have no tangents: integers, keys
    avals = [jax.core.ShapedArray(jnp.shape(rate), float0) for rate in rates]
    none = [jnp.result_type(rate) == float0 for rate in rates]
    return outs, [ad.Zero(a) if z else r for a, z, r in zip(avals, none, rates, strict=True)]


def _loss_batching(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
    """The losses of single examples, and their gradients: what a loss of the batch returns."""
    rows = jax.vmap(functools.partial(_whole_batch, **params), in_axes=tuple(axes))
    with calling_at_losses(lambda avals, params: None):  # this one was reached already
        outs = microbatched(rows)(*operands)
    return outs, [0] * len(outs)


loss_p.def_impl(_whole_batch)
loss_p.def_abstract_eval(_loss_avals)
mlir.register_lowering(loss_p, mlir.lower_fun(_whole_batch, multiple_results=True))
ad.primitive_jvps[loss_p] = _loss_jvp
batching.primitive_batchers[loss_p] = _loss_batching


# Called at each loss of a trace with the types of its operands and its equation's parameters.
_on_loss: ContextVar[Callable[[Sequence[Any], dict[str, Any]], None] | None]
_on_loss = ContextVar("on_loss", default=None)


@contextlib.contextmanager
def calling_at_losses(reached: Callable[[Sequence[Any], dict[str, Any]], None]) -> Iterator[None]:
    """Call a function at each loss that the traces inside reach; it may raise to end the trace.

    Such a loss may be one that the step does not hold, as under `jax.eval_shape`, or stand inside
    another loss.
    """
    token = _on_loss.set(reached)
    try:
        yield
    finally:
        _on_loss.reset(token)
