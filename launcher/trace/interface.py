"""A step's arguments and results: the batch and donated leaves, and the program around the loss."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from launcher.base import not_run, source_of
from launcher.trace.errors import BatchError, TraceError
from launcher.trace.ir.jaxpr import Atom, Aval, Equation, Var, is_var


@dataclass(frozen=True, eq=False)
class Interface:
    """The arguments and results of a program.

    Attributes:
        in_tree, out_tree: the structure of the arguments and results.
        invars: one variable an argument leaf. outvars: one atom a result leaf.
        donated, batch: per argument leaf.
        aliases: result leaf -> the donated argument leaf whose place it takes.
    """

    in_tree: Any
    out_tree: Any
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    donated: tuple[bool, ...]
    batch: tuple[bool, ...]
    aliases: dict[int, int]

    @functools.cached_property
    def in_avals(self) -> tuple[Aval, ...]:
        """The type of every argument leaf, of the whole batch."""
        return tuple(v.aval for v in self.invars)

    @property
    def batch_vars(self) -> frozenset[Var]:
        """The arguments that are the batch."""
        return frozenset(itertools.compress(self.invars, self.batch))


@dataclass(frozen=True, eq=False)
class OuterProgram(Interface):
    """The equations of a step with one loss.

    Attributes:
        before, loss_equation, after: the outer program, split at the loss.
    """

    before: tuple[Equation, ...]
    loss_equation: Equation
    after: tuple[Equation, ...]

    @functools.cached_property
    def operands(self) -> tuple[Var, ...]:
        """The operands of the loss, of which a large model has thousands."""
        return tuple(v for v in self.loss_equation.invars if is_var(v))  # as all of them are


def leaf_names(step: Interface) -> tuple[str, ...]:
    """Return a name for every argument leaf: its argument's number and its path, joined by dots."""
    return _names(step.in_tree)


@functools.lru_cache(maxsize=8)
def _names(tree: jax.tree_util.PyTreeDef) -> tuple[str, ...]:
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    leaves, _ = jax.tree_util.tree_flatten_with_path(numbered)
    return tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)


_DTYPES = (np.number, np.bool_, jax.dtypes.extended)
_PACKED = ("int2", "int4", "uint2", "uint4")  # several elements to a byte


@dataclass(frozen=True)
class Arguments:
    """A step's arguments.

    Attributes:
        shapes: the arguments with a shape for every array.
        batch, donated: per leaf of `shapes`. donate_argnums: the donated arguments by position.
    """

    shapes: tuple[Any, ...]
    batch: tuple[bool, ...]
    donated: tuple[bool, ...]
    donate_argnums: tuple[int, ...]

    def without(self, leaves: Sequence[bool]) -> Arguments:
        """Return the arguments with some leaves taken out of the batch."""
        pairs = zip(self.batch, leaves, strict=True)
        return replace(self, batch=tuple(was and not out for was, out in pairs))

    def with_rows(self, rows: int) -> tuple[Any, ...]:
        """Return the shapes for a batch of this many rows."""

        def resized(leaf: Any) -> Any:
            shape = (rows, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)

        leaves, tree = jax.tree.flatten(self.shapes)
        pairs = zip(leaves, self.batch, strict=True)
        cut = [resized(leaf) if is_batch and leaf.shape else leaf for leaf, is_batch in pairs]
        return tuple(jax.tree.unflatten(tree, cut))


def read_arguments(
    args: Sequence[Any], batch_argnums: Sequence[int], donate_argnums: Sequence[int]
) -> Arguments:
    """See `Arguments`.

    Raises:
        TraceError: a leaf is no array, or a position does not exist.
    """
    batch = _positions("batch_argnums", batch_argnums, len(args))
    donate = _positions("donate_argnums", donate_argnums, len(args))
    shapes = tuple(
        jax.tree_util.tree_map_with_path(lambda path, x, i=i: _abstract(i, path, x), arg)
        for i, arg in enumerate(args)
    )

    def flags(wanted: Sequence[int]) -> tuple[bool, ...]:
        return tuple(i in wanted for i, arg in enumerate(shapes) for _ in jax.tree.leaves(arg))

    return Arguments(shapes, flags(batch), flags(donate), donate)


def _positions(name: str, numbers: Sequence[int], count: int) -> tuple[int, ...]:
    for n in numbers:
        if not -count <= n < count:
            raise TraceError(
                f"{name} names argument {n}, but the step was given {count} arguments; list the "
                "positions of arguments that exist, or ()"
            )
    return tuple(dict.fromkeys(n % count for n in numbers))


def _abstract(argument: int, path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    shape: jax.ShapeDtypeStruct = leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        aval = jax.typeof(leaf)
        weak = bool(getattr(aval, "weak_type", False))
        shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
    if shape.dtype.name in _PACKED:
        raise TraceError(
            f"leaf {jax.tree_util.keystr(path)} of argument {argument} is {shape.dtype}, "
            "which JAX's compiled programs do not take; keep it in int8, and convert it in the step"
        )
    return shape


def no_array(leaf: Any) -> str | None:
    """Return what a leaf is that JAX cannot take as an array, in words; None: it can."""
    if isinstance(leaf, (bool, int, float, complex)):
        return None
    dtype = getattr(leaf, "dtype", np.object_)
    if any(jax.dtypes.issubdtype(dtype, known) for known in _DTYPES):
        return None
    return f"a {type(leaf).__name__}" + (f" of {dtype}" if hasattr(leaf, "dtype") else "")


def arrays_only(fun: Callable[..., Any], result: Any) -> Any:
    """Return what a user's function returned.

    Raises:
        TraceError: some of it is no array.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if wrong := not_run(leaf) or no_array(leaf):
            place = jax.tree_util.keystr(path)
            raise TraceError(
                f"{source_of(fun)} must return arrays and numbers; it returns {wrong}"
                + (f" as result{place}" if place else "")
            )
    return result


def batch_size(arguments: Arguments) -> int:
    """Return the rows along axis 0 of the batch's leaves; 1 where there are none.

    Raises:
        BatchError: they differ, or are none.
    """
    leaves = jax.tree_util.tree_leaves_with_path(arguments.shapes)
    sizes = {
        jax.tree_util.keystr(path): leaf.shape[0]
        for (path, leaf), wanted in zip(leaves, arguments.batch, strict=True)
        if wanted and leaf.shape
    }
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise BatchError(
            f"the batch's leaves differ along axis 0 ({listed}); they must agree, and "
            "another argument takes what has no rows"
        )
    if 0 in sizes.values():
        raise BatchError(f"the batch has no rows ({', '.join(sizes)} along axis 0)")
    return next(iter(sizes.values()), 1)


def aliases(arguments: Arguments, out: Any) -> dict[int, int]:
    """Return the result leaves that take a donated argument's place.

    These are the whole result, or the first of its parts (whatever holds them: a tuple, a dict, a
    dataclass) that is like the argument.
    """
    parts = jax.tree.leaves(out, is_leaf=lambda x: x is not out)
    candidates = [(0, out), *zip(_starts(parts), parts, strict=True)]
    in_starts = _starts(arguments.shapes)
    found: dict[int, int] = {}
    for n in arguments.donate_argnums:
        for start, result in candidates:
            count = len(jax.tree.leaves(result))
            free = not any(start + i in found for i in range(count))
            if free and _alike(arguments.shapes[n], result):
                found.update((start + i, in_starts[n] + i) for i in range(count))
                break
    return found


def _starts(trees: Sequence[Any]) -> list[int]:
    counts = [len(jax.tree.leaves(tree)) for tree in trees]
    return list(itertools.accumulate(counts, initial=0))[:-1]


def _alike(a: Any, b: Any) -> bool:
    structures: list[Any] = [jax.tree.structure(a), jax.tree.structure(b)]
    if structures[0] != structures[1]:
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """A leaf that is no array, as a part of the structure of its tree."""

    kind: type  # since 1 == 1.0 == True
    value: Any


def fixed(tree: Any) -> Any:
    """Return a tree with each leaf of an Equinox module that is no array as a `_Static`."""
    if (module := getattr(sys.modules.get("equinox"), "Module", None)) is None:
        return tree

    def leaf(x: Any) -> Any:
        return x if hasattr(x, "dtype") else _Static(type(x), x)

    def part(x: Any) -> Any:
        return jax.tree.map(leaf, x) if isinstance(x, module) else x

    return jax.tree.map(part, tree, is_leaf=lambda x: isinstance(x, module))


def unfixed(tree: Any) -> Any:
    """Return a tree with the leaves that a `_Static` stands for."""
    if "equinox" not in sys.modules:
        return tree

    def part(x: Any) -> Any:
        return x.value if isinstance(x, _Static) else x

    return jax.tree.map(part, tree, is_leaf=lambda x: isinstance(x, _Static))
