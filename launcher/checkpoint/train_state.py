"""The state of training, which a checkpoint holds: its parts, names and low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np

from launcher.config.optimizer import Lora
from launcher.recipes import InputError

MODEL_PARTS = ("params", "model_state")  # what of a state is the model's, and an evaluation reads
RECENT = "recent"  # the part of a state that a run can begin anew
_MOST_NAMED = 4
Picks = Callable[[str], bool]  # whether a parameter is one of them, by its name
ADAPTERS = "lora"  # the parameter beside the model's own, and the first word of their names


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of training, with its random key.

    Attributes:
        step: the number of finished steps, int32 [].
        params: the model's parameters.
        opt_state: the optimizer's state.
        key: `jax.random.key_data` of the run's random key, uint32. It holds the bits and not a
            typed key, so that every leaf is a plain array to store and to move.
        model_state: the model's state (`launcher.recipes.Model.has_state`); None if it has none.
        ema: an exponential moving average of the parameters that learn, None in the place of the
            others; None if none is kept.
        recent: the newest steps' losses and gradient norms, as `launcher.train.spikes` has them;
            None if nothing watches for spikes.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array
    model_state: Any = None
    ema: Any = None
    recent: Any = None

    @property
    def averaged(self) -> dict[str, Any]:
        """`model`, with the average of the parameters where one is kept."""
        if self.ema is None:
            return self.model
        return {**self.model, "params": rejoined(self.ema, self.params)}

    @property
    def model(self) -> dict[str, Any]:
        """The parts that are the model's, by their names."""
        parts = {name: getattr(self, name) for name in MODEL_PARTS}
        return {name: part for name, part in parts.items() if part is not None}


def flat_name(path: Any) -> str:
    """Return the name of a leaf, of its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def matches(*patterns: str) -> Picks:
    """Return a function that says whether a name fits one of these patterns."""
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def map_named(fun: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return the tree of `fun(name, leaf, ...)`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: fun(flat_name(path), *leaves), tree, *others
    )


def split_named(params: Any, picks: Picks) -> tuple[Any, Any]:
    """Return two trees, of the leaves that are picked and of the others; None stands for a leaf."""
    picked = map_named(lambda name, leaf: leaf if picks(name) else None, params)
    others = map_named(lambda name, leaf: None if picks(name) else leaf, params)
    return picked, others


def rejoined(one: Any, other: Any) -> Any:
    """Return the tree of which `split_named` made two."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, one, other, is_leaf=lambda leaf: leaf is None
    )


def check_pattern(key: str, pattern: str, params: Any) -> None:
    """Raise InputError if a setting's pattern fits no parameter."""
    names = [flat_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if not any(map(matches(pattern), names)):
        raise InputError(
            f"{key}={pattern} is the name of no parameter; this model has {_some(names)}"
        )


def _some(names: Iterable[str]) -> str:
    """Return some names, of those that differ in their last words."""
    different = list({name.rpartition(".")[2]: name for name in names}.values())
    more = ", …" if len(different) > _MOST_NAMED else ""
    return ", ".join(different[:_MOST_NAMED]) + more


def without_adapters(params: Any) -> Any:
    """Return the parameters of the model alone, as they are."""
    if not isinstance(params, Mapping) or ADAPTERS not in params:
        return params
    return {name: part for name, part in params.items() if name != ADAPTERS}


def adapters_of(params: Any) -> dict[str, tuple[Any, Any]]:
    """Return the adapters among parameters, by the names of their kernels."""
    return {} if without_adapters(params) is params else dict(_pairs(params[ADAPTERS]))


def adapted_kernel(kernel: Any, a: Any, b: Any, options: Lora) -> Any:
    """Return a kernel with its adapter added, of NumPy's or of JAX's arrays.

    Args:
        kernel: float [stack..., rows..., columns...].
        a: float [stack..., rows, rank].
        b: float [stack..., rank, columns].
        options: their rank and factor.
    """
    sums = a @ b * np.float32(options.alpha / options.rank)
    return kernel + sums.reshape(kernel.shape).astype(kernel.dtype)


def _pairs(adapters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each kernel's name and its adapter."""
    if "a" in adapters and not isinstance(adapters["a"], Mapping):
        yield prefix.removesuffix("."), (adapters["a"], adapters["b"])
        return
    for word, part in adapters.items():
        yield from _pairs(part, f"{prefix}{word}.")
