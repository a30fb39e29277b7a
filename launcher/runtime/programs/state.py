"""Create a step's state in place: every leaf is computed where it will live."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.arrays.stacked_array import StackedSharding, stacked_in
from launcher.runtime.transport.transfer import absent, is_here, place_array
from launcher.trace import Jaxpr, jaxpr_as_fun, make_jaxpr_and_shape, with_rows_apart


def create_state(
    init: Callable[..., Any], args: tuple[Any, ...], shardings: Any, meshes: Sequence[Mesh]
) -> Any:
    """Compute `init(*args)` with these shardings, as a pytree like its result.

    Each mesh computes its own leaves, so that no process needs memory for those of others.

    Args:
        init: the function that makes the state.
        args: its arguments, which every process has.
        shardings: the sharding of each leaf, a pytree like the state; a `StackedSharding` for one
            whose rows are apart.
        meshes: the meshes that the leaves live on.

    Raises:
        TypeError: `init` does not return what the step takes.
    """
    program, shapes = make_jaxpr_and_shape(init, *args)  # once for all meshes
    expected: Any = jax.tree.structure(shardings)
    if expected != jax.tree.structure(shapes):
        raise TypeError("init does not return the structure that the step takes")
    program, counts = _with_rows(program, jax.tree.leaves(shardings))
    avals = [v.aval for v in program.outvars]
    wanted = jax.tree.leaves(jax.tree.map(_rows_of, shardings))
    made = [None if is_here(s) else absent(a, s) for a, s in zip(avals, wanted, strict=True)]

    def on_mesh(mesh: Mesh) -> None:
        mine = [i for i, s in enumerate(wanted) if s.mesh == mesh and is_here(s)]
        if not mine:
            return

        def some(*inputs: Any) -> list[Any]:
            leaves = jaxpr_as_fun(program)(*jax.tree.leaves(inputs))
            return [leaves[i] for i in mine]

        whole = NamedSharding(mesh, PartitionSpec())
        here = jax.tree.map(lambda x: place_array(x, whole), args)
        values = jax.jit(some, out_shardings=[wanted[i] for i in mine])(*here)
        for i, value in zip(mine, values, strict=True):
            made[i] = value

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(on_mesh, meshes))
    return jax.tree.unflatten(expected, stacked_in(made, counts))


def _rows_of(sharding: Any) -> Any:
    return sharding.rows if isinstance(sharding, StackedSharding) else sharding


def _with_rows(program: Jaxpr, shardings: Sequence[Any]) -> tuple[Jaxpr, tuple[int, ...]]:
    """Return a program that returns the rows of results that are to lie apart, and their numbers.

    A scan that makes such results is its iterations, so that a mesh only runs those of its rows.
    """
    counts = tuple(len(s.rows) if isinstance(s, StackedSharding) else 0 for s in shardings)
    if not any(counts):
        return program, counts
    return with_rows_apart(program, counts), counts
