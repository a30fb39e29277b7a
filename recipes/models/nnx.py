"""Flax NNX modules as models: `launcher.nnx.model(make, loss)`.

An NNX module holds its arrays. Here they become arguments and results: parameters (`nnx.Param`)
are trained, random streams get their keys from each step's, and all other variables (batch
statistics, counters) are the model's state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from launcher.recipes.protocols import Model

Make = Callable[[nnx.Rngs], nnx.Module]
_MOST_DRAWS = 2**16  # of one random stream in one step


def model(make: Make, loss: Callable[[Any, Any], Any]) -> Model:
    """Return an NNX module and its loss as a model: for `model=custom`, or a step of your own.

    Its functions are `init(key) -> (params, state)` and
    `loss(params, state, batch, key) -> (loss, (metrics, state))`, where both trees are dicts of
    arrays. In training the module is as `make` returns it; in evaluation (`key` is None) it is
    switched by `module.eval()`, and streams that it draws from all the same begin with the same key
    in every step.

    Args:
        make: makes the module, `make(rngs)`; called while it is traced.
        loss: takes the module and a batch; returns the mean loss, a float32 scalar, or
            `(loss, metrics)` with a dict of further scalars. What it changes in the module is kept.

    Example:
        >>> def make(rngs):
        ...     return flax.nnx.Linear(4, 2, rngs=rngs)
        >>> model = launcher.nnx.model(make, lambda net, batch: jnp.mean(net(batch) ** 2))
        >>> params, state = model.init(jax.random.key(0))
        >>> params["kernel"].shape
        (4, 2)
    """
    like = _split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    @functools.wraps(make, updated=())
    def init(key: jax.Array) -> tuple[Any, Any]:
        _, params, _, _, state = _split(make(nnx.Rngs(key)))
        return _as_dict(params), _as_dict(state)

    @functools.wraps(loss, updated=())
    def of_arrays(params: Any, state: Any, batch: Any, key: jax.Array | None) -> Any:
        net = _merged(like, params, state, jax.random.key(0) if key is None else key)
        if key is None:
            net.eval()
        out = loss(net, batch)
        value, metrics = out if isinstance(out, tuple) else (out, {})
        new = _split(net)[-1]
        return value, (metrics, _as_dict(new))

    return Model(init, of_arrays, has_state=True)


def module(make: Make, params: Any, state: Any, key: jax.Array | int = 0) -> Any:
    """Return the module with these arrays, such as those of a checkpoint.

    Args:
        make: makes the module, as for `model`.
        params: its parameters, as `Model.init` returns them.
        state: its state.
        key: for its random streams.

    Example:
        >>> def make(rngs):
        ...     return flax.nnx.Linear(4, 2, rngs=rngs)
        >>> params, state = launcher.nnx.model(make, lambda net, batch: 0.0).init(jax.random.key(0))
        >>> launcher.nnx.module(make, params, state)(jnp.ones((1, 4))).shape
        (1, 2)
    """
    like = _split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return _merged(like, params, state, jax.random.key(key) if isinstance(key, int) else key)


def _split(net: nnx.Module) -> tuple[Any, Any, Any, Any, Any]:
    """Return a module's graph, parameters, random streams, what was sown in it, and its state."""
    graph, *trees = nnx.split(net, nnx.Param, nnx.RngState, nnx.Intermediate, ...)
    params, streams, sown, state = trees
    return graph, params, streams, sown, state


def _merged(like: tuple[Any, ...], params: Any, state: Any, key: jax.Array) -> Any:
    """Return the module that was split to `like`, with other arrays."""
    graph, *trees = like
    of_params, streams, sown, of_state = (jax.tree.map(lambda x: x, tree) for tree in trees)
    nnx.replace_by_pure_dict(of_params, params)
    nnx.replace_by_pure_dict(of_state, state)
    return nnx.merge(graph, of_params, _reseeded(streams, key), sown, of_state)


def _reseeded(streams: Any, key: jax.Array) -> Any:
    """Return random streams that begin anew with one key, each at a count of its own.

    A stream folds its key with its count whenever it draws. So each layer of the pipeline makes its
    keys itself, and no two dropout layers draw the same mask, as they would after `nnx.reseed`,
    which gives streams of one name one key and one count.
    """
    again, started = [], 0
    for path, variable in nnx.to_flat_state(streams):
        (shape,) = (x.shape for x in jax.tree.leaves(variable))
        value: Any = jnp.broadcast_to(key, shape) if shape else key
        if isinstance(variable, nnx.RngCount):
            starts = np.arange(started, started + math.prod(shape), dtype=np.uint32)
            value = jnp.asarray(starts.reshape(shape) * _MOST_DRAWS)
            started += starts.size
        again.append((path, variable.replace(value)))
    return nnx.from_flat_state(again)


def _as_dict(tree: Any) -> dict[str, Any]:
    """Return a tree of variables as a dict of arrays, with the names that a checkpoint has.

    The parts of a list are numbered there as text.
    """
    named: dict[str, Any] = _with_text_keys(nnx.to_pure_dict(tree))
    return named


def _with_text_keys(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {str(name): _with_text_keys(part) for name, part in tree.items()}
