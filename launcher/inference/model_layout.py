"""Device layout of a model for generation and evaluation: a pure function of its plan.

A plan of one mesh says it itself. The stages of a pipeline would wait for one another (at every
token, where text is made), so their devices become one mesh over which each array is cut: no device
holds more than its share of the model, and every matrix product ends with a sum over the devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.partition import Spec, axes, mesh_sizes, without
from launcher.plan import Plan

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
