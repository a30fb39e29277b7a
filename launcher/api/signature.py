"""The arguments of a step: which are static, the shapes of the others, and their names.

Also the settings of `jax.config` under which it is traced, which travel with it.

Two libraries have arguments that are more than arrays. Flax NNX objects are changed in place, so a
step takes and returns their arrays. In Equinox modules, leaves that are no arrays are static, so
they become parts of the tree's structure.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from launcher.trace import TraceError, arrays_only, fixed, no_array, unfixed

Argnums = int | Sequence[int]  # positions of arguments, as a user gives them
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
        needs_loss: whether the function has to have a loss.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    batch_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    needs_loss: bool


@dataclass(frozen=True)
class Graph:
    """The Flax NNX objects among dynamic arguments, apart from their arrays.

    Attributes:
        places: the numbers of the arguments that hold them.
        definition: their `nnx.GraphDef`; arguments may share arrays.
    """

    places: tuple[int, ...]
    definition: Any = field(hash=False)  # Flax 0.12.6 keeps lists in some

    def merged(self, dynamic: Sequence[Any]) -> list[Any]:
        """Return the arguments, with new objects for those of `places`."""
        objects = iter(_nnx().merge(self.definition, self._state(dynamic)))
        return [next(objects) if i in self.places else arg for i, arg in enumerate(dynamic)]

    def update(self, args: Sequence[Any], dynamic: Sequence[Any], new: Sequence[Any]) -> None:
        """Give the objects among `args` new arrays; None stands for the one in `dynamic`."""
        arrays = list(dynamic)
        for i, tree in zip(self.places, new, strict=True):
            arrays[i] = jax.tree.map(lambda x, y: x if y is None else y, dynamic[i], tree)
        objects = [args[i] for i in self.places]
        _nnx().update(objects, self._state(arrays))
        for _, node in _nnx().iter_graph(objects):
            if isinstance(node, _nnx().Metric):
                _nnx().update(node, _together(_nnx().state(node)))

    def _state(self, dynamic: Sequence[Any]) -> Any:
        return _nnx().State({n: dynamic[i] for n, i in enumerate(self.places)})


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
        cls, fun: Callable[..., Any], donate: Argnums, batch: Argnums, static: Argnums
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
        """Return the arguments as trees of arrays, and the static ones with their types.

        The last static one is the `Graph` of the others, or None.

        Raises:
            TraceError: a static argument cannot be hashed.
        """
        positions = self._positions(self.static, len(args))
        for i in positions:
            try:
                hash(args[i])
            except TypeError as error:
                raise TraceError(
                    f"static argument {i} of {self.name} is a {type(args[i]).__name__}, which "
                    f"cannot be compared by its hash ({error}); give a tuple or a frozen dataclass"
                ) from None
        trees, graph = _arrays_of([arg for i, arg in enumerate(args) if i not in positions])
        return trees, (*((type(args[i]), args[i]) for i in positions), graph)

    def returned(
        self, args: tuple[Any, ...], dynamic: tuple[Any, ...], graph: Graph | None, results: Any
    ) -> Any:
        """Return the results of the step, given those of the function that `traceable` makes of it.

        The NNX objects among its arguments get their new arrays.

        Args:
            args: the arguments of the call, by position.
            dynamic: their arrays, as `split` returns them.
            graph: their graph, as `split` returns it.
            results: the results for these arrays.
        """
        if graph is not None:
            *new, results = results
            positions = self._positions(self.static, len(args))
            objects = [arg for i, arg in enumerate(args) if i not in positions]
            graph.update(objects, dynamic, new)
        return unfixed(results)

    def traceable(
        self, dynamic: tuple[Any, ...], static: tuple[Any, ...], needs_loss: bool
    ) -> Traceable:
        """Return the function of arrays with static arguments filled in, and its arguments' shapes.

        If there are NNX objects, it returns their arrays first, each argument's as one result.

        Raises:
            TraceError: a position is none of an argument, or an NNX object is a batch.
        """
        graph, count = static[-1], len(dynamic) + len(static) - 1
        batch = self._dynamic_numbers("batch_argnums", self.batch, count)
        donated = self._dynamic_numbers("donate_argnums", self.donate, count)
        if graph is not None and {*graph.places}.intersection(batch):
            raise TraceError(
                f"batch_argnums={self.batch} of {self.name} names a Flax NNX object, which has no "
                "rows; name the batch's arguments there, from 0, and the objects in donate_argnums"
            )
        fun = _of_arrays(self, self._positions(self.static, count), static, donated)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(*kind(leaf)), dynamic)
        return Traceable(fun, shapes, batch, donated, needs_loss)

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


def _of_arrays(
    of: Signature, positions: Sequence[int], static: tuple[Any, ...], donated: Sequence[int]
) -> Callable[..., Any]:
    """Return a function of the arrays of its arguments, as `Signature.traceable` describes it.

    Of an argument that is not donated it returns the arrays that have changed, None for others.
    """
    *values, graph = static

    @functools.wraps(of.fun)
    def of_arrays(*dynamic: Any) -> Any:
        args = unfixed(dynamic) if graph is None else graph.merged(unfixed(dynamic))
        everything = [*args]
        for position, (_, value) in zip(positions, values, strict=True):
            everything.insert(position, value)
        out = fixed(of.fun(*everything))
        if graph is None:
            return out
        trees, after = _arrays_of(args)
        if after != graph:
            raise TraceError(
                f"{of.name} changes more of a Flax NNX object than its arrays, such as an "
                "attribute, or its mode by model.train() or model.eval(); do that before the call"
            )
        new = [
            jax.tree.map(lambda x, y, i=i: None if x is y and i not in donated else x, *pair)
            for i, pair in enumerate(zip(trees, dynamic, strict=True))
            if i in graph.places
        ]
        return (*new, out)

    of_arrays.__name__ = of.name
    return of_arrays


def _nnx() -> Any:
    """Return Flax NNX, if it is loaded: there are no objects of it without."""
    return sys.modules.get("flax.nnx")


def _arrays_of(args: Sequence[Any]) -> tuple[tuple[Any, ...], Graph | None]:
    """Return trees of the arguments' arrays, and the graph of the NNX objects, if there are any."""

    def is_object(x: Any) -> bool:
        return isinstance(x, _nnx().Pytree)

    def holds(arg: Any) -> bool:
        return any(map(is_object, jax.tree.leaves(arg, is_leaf=is_object)))

    # Every call of a step comes here: without Flax NNX nobody looks at the leaves.
    places = tuple(i for i, arg in enumerate(args) if holds(arg)) if _nnx() else ()
    if not places:
        return tuple(map(fixed, args)), None
    definition, state = _nnx().split([args[i] for i in places])
    arrays = _nnx().to_pure_dict(state)
    of = {i: arrays.get(n, {}) for n, i in enumerate(places)}  # none of its own: all are shared
    trees = (of[i] if i in of else fixed(arg) for i, arg in enumerate(args))
    return tuple(trees), Graph(places, definition)


def created(init: Callable[..., Any], *args: Any) -> Any:
    """Return the arrays of what `init` makes.

    Raises:
        TraceError: it is a Flax NNX object.
    """
    ((arrays,), graph) = _arrays_of([init(*args)])
    if graph is not None:
        raise TraceError(
            "create makes no Flax NNX objects: call init itself, and the first step moves the "
            "arrays to their devices; launcher.nnx.model is for what no device can hold"
        )
    return arrays_only(init, arrays)


def _together(tree: Any) -> Any:
    """Return a metric's arrays on one device of this process, to be read and set together."""
    arrays = jax.tree.leaves(tree)
    if not all(isinstance(x, jax.Array) for x in arrays):  # they are on workers
        return jax.tree.map(jax.numpy.asarray, jax.device_get(tree))
    if not arrays or not arrays[0].is_fully_addressable:
        return tree
    return jax.device_put(tree, min(arrays[-1].devices(), key=lambda device: device.id))


def kind(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Return the properties of a leaf that decide what is compiled: its shape and its dtype.

    The dtype is JAX's, such as float32 for a NumPy float64 by default.
    """
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.numpy.shape(leaf), dtype


def _numbers(argnums: Argnums) -> tuple[int, ...]:
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
