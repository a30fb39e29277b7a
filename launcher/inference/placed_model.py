"""A finished model sharded over the devices of a layout, wherever its arrays come from.

One program runs on all devices (GSPMD; Xu et al., 2021), so each process calls the same methods
with the same arguments. No process holds more than its share of the model and a few arrays on the
way there. The stages of a pipeline would wait for one another (at every token, where text is made),
so their devices become one mesh over which each array is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launcher.arrays.stacked_array import StackedArray
from launcher.checkpoint import FinishedModel
from launcher.checkpoint.train_state import flat_name
from launcher.config.schema import Config
from launcher.partition import Spec, axes, mesh_sizes, without
from launcher.plan import Plan
from launcher.recipes.models.decoding import Generator, Sampling, build_decoder
from launcher.runtime.programs.collectives import partition_spec

Shape = tuple[int, ...]
_HEADS_THEN_ROWS = (-2, -4, -1)  # of a cache: [..., rows, positions, heads, size]


@dataclass(frozen=True)
class ModelLayout:
    """A mesh and what it shards.

    Attributes:
        sizes: the size of each axis of the mesh; none of them is 1.
        specs: for each array of the model, by its flat name, the axes that shard each dimension.
    """

    sizes: dict[str, int]
    specs: dict[str, Spec]

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes.values())

    def of_cache(self, shape: Shape) -> Spec:
        """Return the spec of an array of the cache: its heads first, then its rows."""
        dims = [len(shape) + dim for dim in _HEADS_THEN_ROWS] if len(shape) >= 4 else []
        return _spread(shape, self.sizes, dims)


def layout_of(plan: Plan | None, shapes: Mapping[str, Shape], num_devices: int) -> ModelLayout:
    """Return the layout of a model.

    Axes of the plan's mesh that shard no array are left out: their devices would all compute
    the same.

    Args:
        plan: the plan that has trained the model; None: it is not known.
        shapes: the shape of each array, by its flat name, `params.…` or `model_state.…`.
        num_devices: how many devices there are; with fewer than the plan needs the model is cut
            over them all.
    """
    if plan is not None and len(plan.all_meshes) == 1:
        layout = _planned(plan, shapes)
        if layout.num_devices <= num_devices:
            return layout
    count = num_devices if plan is None else min(num_devices, plan.num_devices)
    sizes = {f"part_{i}": size for i, size in enumerate(_prime_factors(count))}
    specs = {}
    for name, shape in shapes.items():
        largest_first = sorted(zip(shape, range(len(shape)), strict=True), reverse=True)
        specs[name] = _spread(shape, sizes, [dim for _, dim in largest_first])
    return ModelLayout(sizes, specs)


def _planned(plan: Plan, shapes: Mapping[str, Shape]) -> ModelLayout:
    """Return the layout that a plan of one mesh gives."""
    said: dict[str, Spec] = {}
    for stage in plan.all_stages:
        said |= stage.shardings
    specs = {name: said.get(f"0.{name}", (None,) * len(shape)) for name, shape in shapes.items()}
    used = {axis for spec in specs.values() for entry in spec for axis in axes(entry)}
    sizes = mesh_sizes(plan.stages[0].logical_mesh, plan.num_replicas)
    kept = {axis: size for axis, size in sizes.items() if axis in used and size > 1}
    dropped = sizes.keys() - kept.keys()
    return ModelLayout(kept, {name: without(spec, *dropped) for name, spec in specs.items()})


def _spread(shape: Shape, sizes: Mapping[str, int], dims: Sequence[int]) -> Spec:
    """Return a spec that gives each axis to the first of `dims` that it still divides."""
    left = list(shape)
    found: list[tuple[str, ...]] = [()] * len(shape)
    for axis, size in sizes.items():
        dim = next((d for d in dims if left[d] % size == 0 and left[d] >= size), None)
        if dim is not None:
            left[dim] //= size
            found[dim] = (*found[dim], axis)
    return tuple(names[0] if len(names) == 1 else names or None for names in found)


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors, the largest first: what no dimension can be cut by is small."""
    found, divisor = [], 2
    while number > 1:
        if number % divisor:
            divisor += 1
        else:
            number //= divisor
            found.append(divisor)
    return found[::-1]


_AT_ONCE = 2**30  # bytes of arrays that are read together


class ModelPlaces:
    """Puts arrays where a layout says.

    Args:
        layout: where the model's arrays lie.
        devices: all devices, of which the first are used.
    """

    def __init__(self, layout: ModelLayout, devices: Sequence[jax.Device]) -> None:
        here = np.array(devices[: layout.num_devices])
        self._mesh = Mesh(here.reshape(tuple(layout.sizes.values())), tuple(layout.sizes))
        self._layout = layout

    @property
    def compute_capability(self) -> float | None:
        """NVIDIA's number of what the devices can compute; None: they are no GPUs of its."""
        said = getattr(self._mesh.devices.flat[0], "compute_capability", None)
        return said and float(said)

    @property
    def whole(self) -> NamedSharding:
        """The sharding of what all devices have."""
        return self.at(())

    def at(self, spec: Any) -> NamedSharding:
        """Return the sharding of a spec of the layout."""
        return NamedSharding(self._mesh, partition_spec(spec))

    def cache(self, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array of a decoder's cache."""
        return self.at(self._layout.of_cache(shape))

    def of_model(self, name: str) -> NamedSharding:
        """Return the sharding of an array of the model, by its flat name."""
        return self.at(self._layout.specs[name])

    def load(self, model: FinishedModel) -> dict[str, Any]:
        """Return a checkpoint's model on the devices, by its parts, nested as the model has them.

        Raises:
            Mismatch: it cannot be read.
        """
        found: dict[str, Any] = {}
        for names in _some_at_once(model.shapes):
            for name, value in model.read(names).items():
                found[name] = put(value, self.of_model(name))
        return dict(
            jax.tree_util.tree_map_with_path(lambda path, _: found[flat_name(path)], model.tree)
        )

    def place(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: Any,
        pieces: Iterable[tuple[int | None, np.ndarray]],
    ) -> jax.Array | None:
        """Return an array of the model on the devices; None in a process that has none of them.

        Args:
            name: its flat name.
            shape: its shape.
            dtype: its dtype.
            pieces: its rows with their numbers, or all of it with None. This process keeps only
                the shards of its own devices.
        """
        sharding = self.of_model(name)
        own: Any = sharding.addressable_devices_indices_map(shape)
        parts = {device: np.empty(sharding.shard_shape(shape), dtype) for device in own}
        for number, value in pieces:
            for device, part in parts.items():
                if number is None:
                    part[...] = value[own[device]]
                    continue
                of_rows, *rest = own[device]
                start, stop, _ = of_rows.indices(shape[0])
                if start <= number < stop:
                    part[number - start] = value[tuple(rest)]
        if not own:
            return None
        on_devices = [jax.device_put(part, device) for device, part in parts.items()]
        return jax.make_array_from_single_device_arrays(shape, sharding, on_devices)


def text_generator(settings: Config, places: ModelPlaces) -> Generator:
    """Return the generator of a run's model on these devices.

    Args:
        settings: the run's settings, whose section `generate` says how to draw.
        places: where the parameters lie.

    Raises:
        InputError: the model has no decoder.
    """
    asked = settings.generate
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
    precision, capability = settings.train.precision, places.compute_capability
    decoder = build_decoder(settings.model, precision, capability)
    return Generator(decoder, sampling, places)


def put(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return an array that all processes have, sharded."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _some_at_once(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Yield the names of arrays, of about as many together as may be read at once."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        names.append(name)
        size += 4 * int(np.prod(shape))
        if size >= _AT_ONCE:
            yield names
            names, size = [], 0
    if names:
        yield names


def everywhere(leaf: Any) -> np.ndarray:
    """Return the value of an array, in every process; all of them call it together.

    The processes that hold none of it get it by a sum, in which each shard is given once.
    """
    if isinstance(leaf, StackedArray):
        return np.stack([everywhere(row) for row in leaf.rows])
    if leaf.is_fully_addressable and jax.process_count() == 1:
        return np.asarray(leaf)
    bits = np.dtype(f"u{leaf.dtype.itemsize}")  # a sum of bits, as that of -0.0 and 0 is 0
    own = np.zeros(leaf.shape, bits)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            own[shard.index] = np.asarray(shard.data).view(bits)
    mesh = Mesh(np.array(jax.devices()), ("device",))
    mine = jax.local_devices()
    rows = [jax.device_put(own[None] if i == 0 else np.zeros_like(own)[None], d)
            for i, d in enumerate(mine)]  # fmt: skip
    parts = jax.make_array_from_single_device_arrays(
        (len(mesh.devices), *leaf.shape), NamedSharding(mesh, PartitionSpec("device")), rows
    )
    whole = NamedSharding(mesh, PartitionSpec())
    summed = jax.jit(_sum, out_shardings=whole)(parts)
    return np.asarray(summed.addressable_shards[0].data).view(leaf.dtype)


def _sum(parts: jax.Array) -> jax.Array:
    """Sum over devices; a function of the module's own is compiled once for all equal shapes."""
    return parts.sum(0, dtype=parts.dtype)
