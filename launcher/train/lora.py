"""Low-rank adapters: small matrices that learn in the place of a model's own.

(Hu et al., 2022, "LoRA: Low-Rank Adaptation of Large Language Models".) A kernel W becomes
W + alpha / rank * A B. The adapters are parameters of their own, `lora.<the kernel's name>.a` and
`.b`. Each sum is computed where the kernel is first used, and so in its layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from launcher.checkpoint.train_state import (
    ADAPTERS,
    adapted_kernel,
    adapters_of,
    flat_name,
    matches,
    without_adapters,
)
from launcher.config.optimizer import Lora
from launcher.recipes import InputError, Model
from launcher.trace import (
    Equation,
    Jaxpr,
    Var,
    inline_calls,
    is_var,
    jaxpr_as_fun,
    lift_constants,
    make_jaxpr_and_shape,
    splice,
)
from launcher.train.optimizer import matrix_axes


def with_adapters(model: Model, options: Lora) -> Model:
    """Return the model with adapters, which are zero at the start; the model itself at rank 0.

    Raises:
        InputError: raised by `init`, if no parameter fits or they have no names.
    """
    if not options.rank:
        return model

    def init(key: jax.Array) -> Any:
        made = model.init(key)
        params, *state = made if model.has_state else (made,)
        if not isinstance(params, Mapping):
            raise InputError(
                f"optimizer.lora is for a model whose parameters are a dict, not a "
                f"{type(params).__name__}"
            )
        new = _adapters(params, options, jax.random.fold_in(key, 1))
        return ({**params, ADAPTERS: new}, *state) if state else {**params, ADAPTERS: new}

    def loss(params: Any, *rest: Any) -> Any:
        adapters = adapters_of(params)
        return _summed_at_first_use(model.loss, without_adapters(params), adapters, rest, options)

    return Model(init, loss, model.has_state)


def _summed_at_first_use(
    loss: Callable[..., Any],
    base: Any,
    adapters: Mapping[str, tuple[Any, Any]],
    rest: tuple[Any, ...],
    options: Lora,
) -> Any:
    """Return `loss(base with adapters, *rest)`, each sum computed before the first use of it.

    If all sums came first, the first layer would compute those of all others.
    """
    leaves, tree = jax.tree.flatten((base, *rest))
    names = [flat_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(base)]
    closed, shape = make_jaxpr_and_shape(lambda *x: loss(*jax.tree.unflatten(tree, x)), *leaves)
    inlined = inline_calls(closed)
    traced = lift_constants(inlined)
    kernels = traced.invars[-len(leaves) :][: len(names)]
    waiting = {kernels[i]: name for i, name in enumerate(names) if name in adapters}
    matrices = {name: tuple(Var(jax.typeof(x)) for x in pair) for name, pair in adapters.items()}
    equations: list[Equation] = []
    sums: dict[Any, Any] = {}
    for eqn in traced.eqns:
        for kernel in [v for v in eqn.invars if is_var(v) and v in waiting]:
            if (name := waiting.pop(kernel, None)) is None:  # read twice by one equation
                continue
            add = functools.partial(adapted_kernel, options=options)
            new, (sums[kernel],) = splice(add, (kernel, *matrices[name]))
            equations += new
        operands = [sums.get(v, v) if is_var(v) else v for v in eqn.invars]
        equations.append(eqn.replace(invars=operands))
    pairs = [v for pair in matrices.values() for v in pair]
    whole = Jaxpr([*traced.invars, *pairs], equations, traced.outvars)
    values = [x for pair in adapters.values() for x in pair]
    out = jaxpr_as_fun(whole)(*inlined.consts, *leaves, *values)
    return jax.tree.unflatten(jax.tree.structure(shape), out)


def _adapters(params: Mapping[str, Any], options: Lora, key: jax.Array) -> dict[str, Any]:
    """Return new adapters, nested by the words of the kernels' names."""
    new: dict[str, Any] = {}
    leaves = [(flat_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(params)]
    picks = matches(options.pattern)
    for number, (name, leaf) in enumerate(leaves):
        axes = matrix_axes(name, leaf.shape)
        if axes is None or not picks(name):
            continue
        stack, rows, columns = axes.sizes(leaf.shape)
        normal = jax.random.normal(jax.random.fold_in(key, number), (*stack, rows, options.rank))
        place = new
        for word in name.split("."):
            place = place.setdefault(word, {})
        place["a"] = normal / rows**0.5
        place["b"] = jnp.zeros((*stack, options.rank, columns))
    if not new:
        raise InputError(
            f"optimizer.lora.pattern={options.pattern} is the name of no matrix of the model; it "
            f"has {', '.join(name for name, _ in leaves[:4])}, …"
        )
    return new
