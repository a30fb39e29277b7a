"""The whole search: microbatches, replicas, stages, submeshes, ZeRO and rematerialisation.

For each number of microbatches and of common replicas that can be, the layers' costs
(`search.layers`) are priced as stages (`search.candidates`) and the best stages found
(`search.stages`). Pure; used by `plan.methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.plan.cluster_shape import ClusterShape
from launcher.plan.errors import PlanError
from launcher.plan.outline import Outline, Submesh
from launcher.plan.profile.measured import MeasuredLayers
from launcher.plan.search.candidates import Choice, Priced, Setting, price, submesh_sizes
from launcher.plan.search.layers import CostTable, cost_table
from launcher.plan.search.placing import place_submeshes
from launcher.plan.search.stages import Found, best_stages
from launcher.plan.stages import group_layers, layer_flops
from launcher.trace.step import TracedStep

_MOST_LAYERS = 16  # the stage search joins neighbouring layers to no more than these
_MOST_SLICES_TRIED = 1024
_USABLE = 0.92  # of a device's memory; the rest is the runtime's own and fragments
_RUNNERS_UP = 3

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Wanted:
    """What the user left open (None) and what not."""

    num_micro_batches: int | None = None
    schedule: str | None = None
    remat: str | None = None


@dataclass(frozen=True)
class Candidate:
    """One found plan in outline, with the objective that the search gave it, in seconds."""

    outline: Outline
    seconds: float
    choices: tuple[Choice, ...]
    memory: tuple[float, ...]


def search(
    step: TracedStep,
    cluster: ClusterShape,
    wanted: Wanted,
    progress: Progress = lambda share: None,
    measured: MeasuredLayers | None = None,
) -> list[Candidate]:
    """The best plan and the runners-up, best first. `measured`: the layers' seconds, instead of the
    model's.

    Raises:
        PlanError: nothing fits the devices' memory; the message says by how much and what would.
    """
    num_layers = step.loss(1).num_layers
    groups = group_layers(layer_flops(step.loss(1)), min(num_layers, _MOST_LAYERS))
    sizes = submesh_sizes(cluster)
    costs = cost_table(step, cluster, model_sizes(cluster))
    table = _grouped(measured.applied(costs) if measured else costs, groups)
    found = _all(step, cluster, wanted, table, groups, sizes, _capacity(cluster), progress)
    if not found:
        raise PlanError(_nothing_fits(step, cluster, wanted, table, groups, sizes))
    return found[: 1 + _RUNNERS_UP]


def _all(
    step: TracedStep,
    cluster: ClusterShape,
    wanted: Wanted,
    table: CostTable,
    groups: Sequence[Sequence[int]],
    sizes: tuple[int, ...],
    capacity: float | None,
    progress: Progress,
) -> list[Candidate]:
    settings = list(_settings(step.batch_size, cluster, wanted, capacity))
    found: list[Candidate] = []
    for k, setting in enumerate(settings):
        priced = price(table, cluster, setting, sizes)

        def inner(share: float, k: int = k) -> None:
            progress((k + share) / len(settings))

        best = best_stages(priced.candidates, cluster.num_devices, progress=inner)
        if best is not None:
            found.append(_candidate(best, priced, setting, groups, cluster))
    found.sort(key=lambda c: c.seconds)
    distinct: dict[object, Candidate] = {}
    for candidate in found:
        key = candidate.outline.layers, candidate.choices
        distinct.setdefault(key, candidate)  # of the same stages the best number of microbatches
    return list(distinct.values())


def _settings(
    batch_size: int, cluster: ClusterShape, wanted: Wanted, capacity: float | None
) -> Iterator[Setting]:
    counts = [wanted.num_micro_batches] if wanted.num_micro_batches else _powers(batch_size)
    remats = (wanted.remat,) if wanted.remat else ("none", "full")
    for count in counts:
        if batch_size % count:
            continue
        for replicas in range(1, cluster.num_devices + 1):
            if cluster.num_devices % replicas == 0 and batch_size % (count * replicas) == 0:
                schedule = wanted.schedule or "1f1b"
                yield Setting(count, batch_size, replicas, schedule, remats, capacity)


def _powers(batch_size: int) -> list[int]:
    """Numbers of microbatches to try: the powers of two that divide the batch."""
    found, count = [], 1
    while batch_size % count == 0 and count <= _MOST_SLICES_TRIED:
        found.append(count)
        count *= 2
    return found


def model_sizes(cluster: ClusterShape) -> tuple[int, ...]:
    """Sizes of the model axis: it stays inside a host, whose links are the fast ones."""
    each = cluster.devices_per_host
    return tuple(n for n in range(1, each + 1) if each % n == 0)


def _capacity(cluster: ClusterShape) -> float | None:
    return None if cluster.memory_bytes is None else _USABLE * cluster.memory_bytes


def _grouped(table: CostTable, groups: Sequence[Sequence[int]]) -> CostTable:
    """Costs of runs of layers. A run reads what its first layer reads, and sends what its last
    one sends."""
    starts = [group[0] for group in groups]
    ends = [group[-1] for group in groups]
    of = {name: np.add.reduceat(rows, starts, axis=1) for name, rows in table.of.items()}
    of["input_bytes"] = table.of["input_bytes"][:, starts]
    of["sent_bytes"] = table.of["sent_bytes"][:, ends]
    return CostTable(table.model_sizes, of, table.num_distinct)


def _candidate(
    found: Found,
    priced: Priced,
    setting: Setting,
    groups: Sequence[Sequence[int]],
    cluster: ClusterShape,
) -> Candidate:
    count = len(found.stages)
    at = [(count - 1 - s, *stage) for s, stage in enumerate(found.stages)]
    choices = tuple(priced.choices[int(priced.chosen[i])] for i in at)
    sizes = [priced.candidates.sizes[j] for _, _, j in found.stages]
    devices = place_submeshes(sizes, cluster)
    layers = tuple(
        tuple(layer for group in groups[first:end] for layer in group)
        for first, end, _ in found.stages
    )
    outline = Outline(
        method="auto",
        layers=layers,
        submeshes=tuple(
            Submesh(of, choice.logical_mesh) for of, choice in zip(devices, choices, strict=True)
        ),
        mesh_of=tuple(range(count)),
        num_micro_batches=setting.num_micro_batches,
        schedule=setting.schedule,
        remat=tuple(choice.remat for choice in choices),
        zero=tuple(choice.zero for choice in choices),
    )
    memory = tuple(float(priced.memory[i]) for i in at)
    return Candidate(outline, found.objective, choices, memory)


def _nothing_fits(
    step: TracedStep,
    cluster: ClusterShape,
    wanted: Wanted,
    table: CostTable,
    groups: Sequence[Sequence[int]],
    sizes: tuple[int, ...],
) -> str:
    """By how much nothing fits, and what would."""
    free = Wanted(None, wanted.schedule, None)
    capacity = _capacity(cluster)
    if capacity is None:
        return (
            f"a batch of {step.batch_size} does not divide into microbatches "
            f"({wanted.num_micro_batches}) on these {cluster.num_devices} devices; change the "
            "batch size or parallel.num_micro_batches"
        )
    if (wanted.num_micro_batches or wanted.remat) and (
        easier := _all(step, cluster, free, table, groups, sizes, capacity, lambda share: None)
    ):
        best = easier[0].outline
        remat = sorted(set(best.remat))[0]
        return (
            f"no plan with parallel.num_micro_batches={wanted.num_micro_batches} fits the "
            f"{cluster.memory_bytes / 2**30:.0f} GiB of a device; "  # type: ignore[operator]
            f"parallel.num_micro_batches={best.num_micro_batches} with parallel.remat={remat} would"
        )
    needed = _least_memory(step, cluster, wanted, table, groups, sizes, capacity)
    if needed is None:
        return (
            f"the model cannot be cut for {cluster.num_devices} devices: change cluster.gpus or "
            f"train.global_batch_size={step.batch_size}"
        )
    at = max(range(len(needed.memory)), key=lambda s: needed.memory[s])
    over = needed.memory[at] - capacity
    times = needed.memory[at] / capacity
    return (
        f"the model does not fit: in the leanest plan found ({len(needed.memory)} stages, "
        f"{needed.outline.num_micro_batches} microbatches) stage {at} needs "
        f"{needed.memory[at] / 2**30:.1f} GiB a device, {over / 2**30:.1f} GiB more than the "
        f"{capacity / 2**30:.1f} GiB that can be used; take about {times:.1f} times the devices "
        "(cluster.gpus), a smaller model, or a smaller train.global_batch_size"
    )


def _least_memory(
    step: TracedStep,
    cluster: ClusterShape,
    wanted: Wanted,
    table: CostTable,
    groups: Sequence[Sequence[int]],
    sizes: tuple[int, ...],
    capacity: float,
) -> Candidate | None:
    """A plan that would fit with the least memory more, to a tenth."""
    for tenths in (11, 12, 13, 14, 15, 17, 20, 25, 30, 40, 60, 80, 120, 200, 400, 1000, 10000):
        more = capacity * tenths / 10
        found = _all(step, cluster, wanted, table, groups, sizes, more, lambda share: None)
        if found:
            return min(found, key=lambda c: max(c.memory))
    return None
