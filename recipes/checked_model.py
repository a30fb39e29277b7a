"""Functions of models and optimizers in one form each, and checks of what they return.

The checks are made while the functions are traced, so they cost a run nothing. Each error is one
line that says what is wrong and what to return instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from launcher.base import source_of
from launcher.recipes.protocols import Batch, InputError, Model
from launcher.trace import arrays_only, no_array

Metrics = dict[str, jax.Array]
OWN_METRICS = ("loss", "grad_norm", "learning_rate", "skipped", "spike_score")
_WITH_STATE = "Model(init, loss, has_state=True)"


def init_model(model: Model, key: jax.Array) -> tuple[Any, Any]:
    """Return a model's first parameters and state; None for the state of a model without any.

    Raises:
        InputError: `init` returns something else than it should.
    """
    made = arrays_only(model.init, model.init(key))
    if not model.has_state:
        return made, None
    if not isinstance(made, tuple) or len(made) != 2:
        raise InputError(
            "the init of a model with state must return (parameters, state); it returns "
            f"{_in_words(made)}"
        )
    params, state = made
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        kind = getattr(leaf, "dtype", type(leaf))
        if isinstance(kind, type) or jnp.issubdtype(kind, jax.dtypes.prng_key):
            raise InputError(
                "the model's state must hold arrays of numbers, which can be saved; "
                f"state{jax.tree_util.keystr(path)} is {getattr(kind, '__name__', kind)}"
            )
    return params, state


def checked_loss(model: Model) -> Callable[..., tuple[jax.Array, tuple[Metrics, Any]]]:
    """Return the model's loss as `(params, state, batch, key) -> (loss, (metrics, state))`.

    The state of a model without any is None. The returned function raises InputError if the model's
    returns something else than it should: the loss is one number, metrics are a dict of numbers
    whose names are not the launcher's own, and the new state is like the one that was given.
    """

    def loss(
        params: Any, state: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[Metrics, Any]]:
        of = f"the model's {source_of(model.loss)}"
        given = (params, state, batch, key) if model.has_state else (params, batch, key)
        match model.loss(*given):
            case tuple((value, dict() as metrics)) if not model.has_state:
                new = None
            case tuple((value, tuple((dict() as metrics, new)))) if model.has_state:
                _check_like(of, "state", new, state)
            case out:
                raise InputError(
                    f"{of} must return (loss, metrics), one number and a dict of "
                    f"further ones, or, of a {_WITH_STATE}, (loss, (metrics, state)); it returns "
                    f"{_in_words(out)}, with has_state={model.has_state}"
                )
        _check_numbers(of, value, metrics)
        return value, (metrics, new)

    return loss


def checked_optimizer(
    optimizer: optax.GradientTransformation, schedule: Callable[[Any], Any]
) -> tuple[Callable[..., tuple[Any, Any]], Callable[[Any], jax.Array]]:
    """Return an optimizer's update, `(grads, state, params, loss) -> (updates, state)`, and rate.

    Transformations that take `value` (`optax.GradientTransformationExtraArgs`) get the loss. Both
    functions raise InputError if what the user's return is unlike what they should.
    """
    of = f"the optimizer's {source_of(optimizer.update)}"
    taken = inspect.signature(optimizer.update).parameters.values()
    takes_value = any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in taken)

    def update(grads: Any, state: Any, params: Any, loss: jax.Array) -> tuple[Any, Any]:
        made = optimizer.update(grads, state, params, **({"value": loss} if takes_value else {}))
        if not isinstance(made, tuple) or len(made) != 2:
            raise InputError(f"{of} must return (updates, state); it returns {_in_words(made)}")
        _check_like(of, "updates", made[0], params, np.shape)
        _check_like(of, "state", made[1], state)
        return made

    def rate(count: Any) -> jax.Array:
        if not _is_number(found := schedule(count)):
            told = f"{source_of(schedule)} must return a number"
            raise InputError(f"the schedule {told}; it returns {_in_words(found)}")
        return jnp.asarray(found, jnp.float32)

    return update, rate


def _is_number(value: Any) -> bool:
    """Return whether a value is one real number, of Python's, NumPy's or JAX's."""
    kinds = jnp.floating, jnp.integer, jnp.bool_
    is_one = not no_array(value) and not np.shape(value)
    return is_one and any(jnp.issubdtype(jnp.result_type(value), kind) for kind in kinds)


def _check_numbers(of: str, value: Any, metrics: Metrics) -> None:
    """Check that the loss and each metric are numbers, and that their names are free."""
    for name, number in {"the loss": value, **metrics}.items():
        if not _is_number(number):
            metric = name if number is value else f"its metric {name!r}"
            raise InputError(
                f"{of} must return numbers; {metric} is {_in_words(number)}: "
                "take its mean, or leave it out"
            )
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise InputError(f"{of} must return a floating-point loss; it is {_in_words(value)}")
    if taken := [name for name in metrics if name in OWN_METRICS]:
        raise InputError(
            f"{of} gives a metric the name {taken[0]!r}, which the launcher's own "
            "has; choose another"
        )


def _in_words(value: Any) -> str:
    """Return the type and the shape of what a function returned, in words."""
    if type(value) is tuple:
        return f"({', '.join(map(_in_words, value))})"
    return no_array(value) or f"{jnp.result_type(value)}{list(np.shape(value))}"


def _check_like(
    of: str, name: str, new: Any, given: Any, words: Callable[[Any], Any] = _in_words
) -> None:
    """Refuse a tree whose structure, and leaves in `words`, are not those of the given."""
    now, before = (
        {f"{name}{jax.tree_util.keystr(path)}": words(x) for path, x in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (new, given))
    )
    trees: list[Any] = [jax.tree.structure(tree) for tree in (new, given)]
    leaf = next((leaf for leaf in before | now if now.get(leaf) != before.get(leaf)), None)
    if leaf is None and trees[0] == trees[1]:
        return
    changed = f"it is {_in_words(new)}, and was {_in_words(given)}"
    if leaf is not None:
        changed = f"{leaf} is {now.get(leaf, 'missing')}, and was {before.get(leaf, 'missing')}"
    raise InputError(
        f"the {name} that {of} returns must have the names, shapes and dtypes of the one it was "
        f"given; {changed}"
    )
