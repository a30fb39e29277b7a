"""The arguments of a step: which are static, the shapes of the others, and their names.

Also the settings of `jax.config` under which it is traced, which travel with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from launcher.trace import TraceError, no_array

_DEFAULTS = ((0,), (1,))  # donated, batch; a step may have fewer arguments
# Those that affect how a function is traced.
_TRACE_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
# Those of the devices, which a worker has from `launcher.init`.
_DEVICE_SETTINGS = {
    "jax_cuda_visible_devices",
    "jax_default_device",
    "jax_num_cpu_devices",
    "jax_platform_name",
    "jax_platforms",
}


@dataclass(frozen=True)
class Traceable:
    """The arguments of `trace_step`: a function of arrays alone, and their shapes.

    Attributes:
        fun: the function.
        args: pytrees of `jax.ShapeDtypeStruct`, for the whole batch.
        batch_argnums: the positions of the arguments with a batch axis.
        donate_argnums: the positions of the donated arguments.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    batch_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """A function and the roles of its arguments, by position.

    *Dynamic* arguments are those that are not static: pytrees of arrays. Static ones are compared
    together with their types, since `1 == 1.0 == True`.

    Attributes:
        fun: the function.
        name: its name, for messages.
        donate: the positions of the donated arguments, as the user gives them.
        batch: the positions of the arguments with a batch axis.
        static: the positions of the static arguments.
    """

    fun: Callable[..., Any]
    name: str
    donate: tuple[int, ...]
    batch: tuple[int, ...]
    static: tuple[int, ...]

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        donate: int | Sequence[int],
        batch: int | Sequence[int],
        static: int | Sequence[int],
    ) -> Signature:
        """Return the signature of a function, given the positions as a user gives them.

        Raises:
            TraceError: an argument is static and batch, or static and donated.
        """
        name = getattr(fun, "__name__", "step")
        found = cls(fun, name, _numbers(donate), _numbers(batch), _numbers(static))
        for word, argnums in (("batch", found.batch), ("donate", found.donate)):
            if both := sorted(set(argnums) & set(found.static)):
                raise TraceError(
                    f"argument {both[0]} of {name} is in static_argnums and in "
                    f"{word}_argnums={argnums}; an argument is one or the other: say "
                    f"{word}_argnums too"
                )
        return found

    def positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments by position.

        Raises:
            TypeError: the function does not take them.
        """
        if not kwargs:
            return args
        bound = inspect.signature(self.fun).bind(*args, **kwargs)
        if bound.kwargs:
            raise TypeError(f"{self.name} takes no keyword-only arguments: {[*bound.kwargs]}")
        return bound.args

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arguments that are arrays, and the static ones with their types.

        Raises:
            TraceError: a static argument cannot be hashed.
        """
        if not self.static:
            return args, ()
        positions = self._positions(self.static, len(args))
        for i in positions:
            try:
                hash(args[i])
            except TypeError as error:
                raise TraceError(
                    f"static argument {i} of {self.name} is a {type(args[i]).__name__}, which "
                    f"cannot be compared by its hash ({error}); give a tuple or a frozen dataclass"
                ) from None
        dynamic = tuple(arg for i, arg in enumerate(args) if i not in positions)
        return dynamic, tuple((type(args[i]), args[i]) for i in positions)

    def traceable(self, dynamic: tuple[Any, ...], static: tuple[Any, ...]) -> Traceable:
        """Return the function with its static arguments filled in, and the shapes of the others."""
        count = len(dynamic) + len(static)
        positions = self._positions(self.static, count)
        return Traceable(
            _bound(self.fun, positions, static) if static else self.fun,
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(*kind(leaf)), dynamic),
            self._dynamic_numbers("batch_argnums", self.batch, count),
            self._dynamic_numbers("donate_argnums", self.donate, count),
        )

    def check(self, leaf: Any, i: int, dynamic: tuple[Any, ...]) -> None:
        """Check that the `i`th leaf of the arguments is an array or a number.

        Raises:
            TraceError: it is something else.
        """
        if wrong := no_array(leaf):
            raise TraceError(
                f"{self.path(i, dynamic)} of {self.name} is {wrong}, which JAX cannot take as "
                "an array; name its argument in static_argnums, or close over it "
                "(functools.partial) instead of passing it"
            )

    def path(self, leaf: int, dynamic: tuple[Any, ...]) -> str:
        """Return an argument leaf's name in the function's signature, such as `state['w']`."""
        path, _ = jax.tree_util.tree_leaves_with_path(dynamic)[leaf]
        argument, inner = path[0].idx, jax.tree_util.keystr(path[1:])
        try:
            names = list(inspect.signature(self.fun).parameters)
        except (TypeError, ValueError):
            names = []
        static = self._positions(self.static, len(names) or len(dynamic))
        names = [name for i, name in enumerate(names) if i not in static]
        return f"{names[argument]}{inner}" if argument < len(names) else f"args[{argument}]{inner}"

    def _positions(self, argnums: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple(sorted({range(count)[n] for n in argnums if -count <= n < count}))

    def _dynamic_numbers(self, word: str, argnums: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Return argument numbers as they are after the static arguments are taken out."""
        if argnums not in _DEFAULTS and not all(-count <= n < count for n in argnums):
            raise TraceError(
                f"{word}={argnums} of {self.name}, which was given {count} arguments; name "
                "only arguments that there are, from 0"
            )
        static = self._positions(self.static, count)
        kept = [i for i in range(count) if i not in static]
        wanted = self._positions(argnums, count)
        return tuple(n for n, i in enumerate(kept) if i in wanted)


def _bound(
    fun: Callable[..., Any], positions: Sequence[int], values: Sequence[tuple[Any, Any]]
) -> Callable[..., Any]:
    """Return a function of its other arguments, with the static ones filled in."""

    def bound(*dynamic: Any) -> Any:
        args = list(dynamic)
        for position, (_, value) in zip(positions, values, strict=True):
            args.insert(position, value)
        return fun(*args)

    bound.__name__ = getattr(fun, "__name__", "step")
    return bound


def kind(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Return the properties of a leaf that decide what is compiled: its shape and its dtype.

    The dtype is JAX's, such as float32 for a NumPy float64 by default.
    """
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.numpy.shape(leaf), dtype


def _numbers(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def trace_settings() -> dict[str, Any]:
    """Return the settings that affect how a function is traced, by name."""
    return {name: getattr(jax.config, name) for name in _TRACE_SETTINGS}


def check_context(name: str) -> None:
    """Refuse what of JAX's context a step cannot be compiled in."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise TraceError(
            f"{name} is called under jax.disable_jit(), and a parallelized step runs compiled; "
            "debug the step without launcher.parallelize"
        )
    if not jax.sharding.get_abstract_mesh().empty:
        raise TraceError(
            f"{name} is called under jax.set_mesh(), and its plan has meshes of its own; call it "
            "outside of it"
        )


@contextmanager
def devices_stay() -> Iterator[None]:
    """Ignore settings of the devices that modules of the user's make when they are imported.

    They are meant for a process with devices of its own. Here JAX would refuse them, because it has
    its devices by now.
    """
    update: Callable[[str, Any], None] = jax.config.update

    def without_devices(name: str, value: Any) -> None:
        if name not in _DEVICE_SETTINGS:
            update(name, value)

    jax.config.update = without_devices  # type: ignore[method-assign]
    try:
        yield
    finally:
        jax.config.update = update  # type: ignore[method-assign]
