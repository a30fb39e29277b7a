"""Stacked arrays whose rows live on the stages of their layers.

Such are the parameters of a model whose blocks are one `lax.scan`. JAX has no array whose rows lie
on meshes of their own, so the rows are arrays, and what holds them looks like the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launcher.arrays.array_like import ArrayLike


@dataclass(frozen=True)
class StackedSharding:
    """Where each row of a `StackedArray` lies.

    Attributes:
        rows: the sharding of each row; None of one that a step does not use.
    """

    rows: tuple[Any, ...]

    @property
    def addressable_devices(self) -> set[jax.Device]:
        """The devices of this process among those of any row."""
        return {device for row in self.rows if row for device in row.addressable_devices}

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process has the devices of all rows."""
        return all(row.is_fully_addressable for row in self.rows)


class StackedArray(ArrayLike):
    """An array whose rows along the first axis are arrays of their own.

    NumPy's and JAX's functions take it as the array of this process that it stands for, for which
    the rows are fetched. An index along the first axis gives a row where it lies.

    Attributes:
        rows: the rows, arrays or shapes of one shape and dtype.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = tuple(rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return (len(self.rows), *self.rows[0].shape)

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.rows[0].dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole."""
        return sum(int(row.nbytes) for row in self.rows)

    @property
    def where(self) -> StackedSharding:
        """Where the rows lie. What is called `sharding` JAX takes for one of its own."""
        return StackedSharding(tuple(row.sharding for row in self.rows))

    @property
    def addressable_shards(self) -> list[Any]:
        """The shards of all rows that are in this process."""
        return [shard for row in self.rows for shard in row.addressable_shards]

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process holds all of it."""
        return all(row.is_fully_addressable for row in self.rows)

    @property
    def value(self) -> jax.Array:
        """The value, an array of this process."""
        return jnp.asarray(np.asarray(self))

    def is_deleted(self) -> bool:
        """Return whether it was donated."""
        return any(row.is_deleted() for row in self.rows)

    def block_until_ready(self) -> StackedArray:
        """Wait until all rows are computed."""
        jax.block_until_ready(self.rows)
        return self

    def copy_to_host_async(self) -> None:
        """Begin to fetch all rows."""
        for row in self.rows:
            row.copy_to_host_async()

    def copy(self) -> StackedArray:
        """Return a copy with the same placement of rows."""
        return StackedArray([row.copy() for row in self.rows])

    def devices(self) -> set[jax.Device]:
        """Return the devices that any row lies on."""
        return {device for row in self.rows for device in row.devices()}

    def __getattr__(self, name: str) -> Any:
        if name == "sharding":
            raise AttributeError(
                "the rows of a StackedArray lie apart: .where.rows has the sharding of each, .rows "
                "the rows"
            )
        return super().__getattr__(name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the rows of a StackedArray lie apart, and are copied to be one array")
        return np.stack(jax.device_get(list(self.rows))).astype(dtype or self.dtype, copy=False)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and not isinstance(index, bool):
            return self.rows[index]
        return self.value[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __repr__(self) -> str:
        return f"StackedArray({self.dtype}{list(self.shape)})"


def sharding_of(leaf: Any) -> Any:
    """Return where an array lies, or is to lie."""
    return leaf.where if isinstance(leaf, StackedArray) else leaf.sharding


def rows_of(sharding: Any) -> tuple[Any, ...]:
    """Return where each row lies of an array whose rows lie apart; of any other, nothing."""
    return sharding.rows if isinstance(sharding, StackedSharding) else ()


def num_rows(leaf: Any) -> int:
    """Return how many rows of an array lie apart; 0 if it is whole."""
    return len(leaf.rows) if isinstance(leaf, StackedArray) else 0


def spec_at(leaf: Any, sharding: Any) -> Any:
    """Return the shape and dtype of an array where it is to lie, of one whose rows do as rows."""
    if isinstance(sharding, StackedSharding):
        row = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        return StackedArray([spec_at(row, of_row) for of_row in sharding.rows])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def rows_in(leaves: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Return leaves with the rows of some in place of these.

    Args:
        leaves: arrays.
        counts: how many rows each has that come in its place; 0 where it stays as it is.
    """
    found: list[Any] = []
    for leaf, count in zip(leaves, counts, strict=True):
        if count:
            found += (
                leaf.rows if isinstance(leaf, StackedArray) else [leaf[i] for i in range(count)]
            )
        else:
            found.append(leaf)
    return found


def stacked_in(flat: Sequence[Any], counts: Sequence[int], stack: Any = StackedArray) -> list[Any]:
    """Return what `rows_in` was made of: the rows stacked by `stack`, a class that takes them."""
    found, rest = [], iter(flat)
    for count in counts:
        found.append(stack(tuple(next(rest) for _ in range(count))) if count else next(rest))
    return found


def with_rows(tree: Any) -> Any:
    """Return a pytree with a tuple of the rows in place of each `StackedArray`."""
    return jax.tree.map(lambda x: x.rows if isinstance(x, StackedArray) else x, tree)


def with_stacks(tree: Any, like: Any) -> Any:
    """Return a pytree in the structure of `like`, of which `with_rows` has been changed."""
    leaves, structure = jax.tree.flatten(like)
    counts = list(map(num_rows, leaves))
    return jax.tree.unflatten(structure, stacked_in(jax.tree.leaves(tree), counts))
