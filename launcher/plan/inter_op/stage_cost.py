"""The cost of every run of layers as a stage, on logical meshes with named axes. Pure numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from launcher.hardware import ClusterShape
from launcher.partition import DATA, MODEL, MOST_INSIDE
from launcher.plan.cost.formulas import (
    Amount,
    Links,
    PassParts,
    PassSeconds,
    activation_bytes,
    all_reduce_seconds,
    beside_seconds,
    bucket_count,
    exposed_seconds,
    gather_count,
    launch_seconds,
    pass_seconds,
    sharded_bytes,
    update_seconds,
)
from launcher.plan.inter_op.layer_table import (
    NOTHING,
    OPEN,
    LayerTable,
    Recompute,
    first_layers,
    largest,
    other_layers,
)
from launcher.plan.inter_op.submeshes import Mesh, SearchPoint, links_within
from launcher.schedule import SCHEDULES

Arrays = tuple[np.ndarray, ...]
T = TypeVar("T", bound=Callable[..., Any])


def _kept(of: T) -> T:
    """Compute a method of `StageCosts` once for the same arguments."""
    name = of.__name__

    @functools.wraps(of)
    def kept(self: StageCosts, *args: Any) -> Any:
        key = (name, *args)  # whose hash takes its time
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = of(self, *args)
        return found

    return kept  # type: ignore[return-value]


def _shared(of: T) -> T:
    """Compute a method once for all numbers of replicas, which its arrays do not depend on."""

    def shared(self: StageCosts, *args: Any) -> Any:
        if self.whole is None:
            return of(self, *args)
        whole, kept = self.whole
        found = getattr(whole, of.__name__)(*args)
        if isinstance(found, tuple):
            return tuple(one[kept] for one in found)
        return found[kept]

    return _kept(functools.wraps(of)(shared))  # type: ignore[return-value]


class StageCosts:
    """Costs of all stages on some logical meshes: arrays `[mesh, first, end]`, of seconds or bytes.

    A stage is the layers `first … end - 1`. Its memory and its passes depend on what it recomputes,
    a `Recompute`; None: each of the table's `recomputes`, along a leading axis.

    Attributes:
        known: the results of methods, by name and arguments.
        whole: the costs that these are a part of, and the positions of the meshes there.
    """

    def __init__(
        self,
        table: LayerTable,
        meshes: Sequence[Mesh],
        cluster: ClusterShape,
        point: SearchPoint,
        back_at_once: bool,
        links: Links | None = None,
        whole: tuple[StageCosts, Sequence[int]] | None = None,
    ) -> None:
        """Prepare to add up the costs of the table's layers.

        Args:
            table: the costs of the layers.
            meshes: the logical meshes, with the same axes.
            cluster: the rates of the devices.
            point: the values held fixed.
            back_at_once: whether each backward pass of the last stage directly follows its forward
                pass.
            links: the links of the submesh, if there is one mesh; by default `links_within`.
            whole: see the attributes; `among` sets it.
        """
        self.table, self.meshes, self.cluster, self.point = table, tuple(meshes), cluster, point
        self.known: dict[tuple[Any, ...], Any] = {}
        self.whole = whole
        self._schedule = SCHEDULES[point.schedule]
        first, end = np.arange(table.num_layers)[:, None], np.arange(table.num_layers + 1)[None]
        self._first, self._end, self._valid = first, end, np.where(first < end, 0.0, np.inf)
        self._is_first = np.broadcast_to(first == 0, self._valid.shape)
        self._goes_back = np.broadcast_to(end == table.num_layers, self._valid.shape) & back_at_once
        self._links = [links or links_within(mesh, cluster) for mesh in meshes]
        self._slices = [point.num_micro_batches * mesh.data for mesh in meshes]

    def among(self, kept: Sequence[int], point: SearchPoint) -> StageCosts:
        """Return the costs on the meshes at `kept`, in a point that differs in its replicas alone.

        Arrays that do not depend on the replicas are taken from these.
        """
        meshes = [self.meshes[k] for k in kept]
        back_at_once = bool(self._goes_back.any())
        whole = self, list(kept)
        return StageCosts(self.table, meshes, self.cluster, point, back_at_once, whole=whole)

    def _column(self, values: Sequence[float]) -> np.ndarray:
        return np.array(values)[:, None, None]

    @_kept
    def _size(self, axis: str) -> np.ndarray:
        """Return the devices along an axis, `[mesh, 1, 1]`."""
        return self._column([mesh.size(axis) for mesh in self.meshes])

    @_kept
    def _ring(self, axis: str) -> Arrays:
        """Return an axis's devices, bytes/s between neighbours and seconds of a sum of no bytes."""
        inside = self.cluster.intra_host  # for axes that no ring of this cost model runs along
        rate = self._column([getattr(one, axis, inside) for one in self._links])
        return self._size(axis), rate, np.asarray(self.cluster.start_seconds(self._size(axis)))

    def _all_reduce(self, axis: str, size: Amount, count: Amount, devices: Any = None) -> Any:
        """Return the seconds of all-reduces along an axis: `formulas.all_reduce_seconds`.

        Of no arrays latency is left out. `devices`: those of each ring, if not all of the axis.
        """
        ring, rate, start = self._ring(axis)
        if devices is not None:
            ring, start = devices, self.cluster.start_seconds(devices)
        return all_reduce_seconds(size, ring, rate, start, count)

    def _gather(self, axis: str, size: Amount, count: Amount) -> Any:
        """Return the seconds of all-gathers or reduce-scatters along an axis."""
        return self._all_reduce(axis, size / self.cluster.gather_rate, count) / 2

    def _each(self, of: Callable[[Mesh, int], np.ndarray]) -> np.ndarray:
        """Return what `of` returns of each mesh and its number of slices, `[mesh, first, end]`."""
        found = [of(mesh, slices) for mesh, slices in zip(self.meshes, self._slices, strict=True)]
        return found[0][None] if len(found) == 1 else np.stack(found)

    @_shared
    def _of(self, name: str) -> np.ndarray:
        """Return the sums of a field of the table over each stage's layers."""
        rows, of = [mesh.row for mesh in self.meshes], self.table.spans[name]
        return of[rows[0] : rows[0] + 1] if len(rows) == 1 else of[rows]

    @_shared
    def _a_slice(self, name: str) -> np.ndarray:
        """Return the share of one slice of a field of the whole batch."""
        return np.asarray(self._of(name) / self._column(self._slices))

    @_shared
    def _divisible(self, name: str) -> np.ndarray:
        """Return a field of the parameters whose state can be sharded along data."""
        return self._each(lambda mesh, _: self.table.parameter_spans(mesh.row, mesh.data)[name])

    def _sharded(self, zero: int, name: str) -> np.ndarray:
        """Return a field of the parameters that are sharded along data at a ZeRO level.

        Level 2 follows the optimizer's state: without any, it is the same as level 0.
        """
        if zero == 3 or (zero == 2 and self.table.has_optimizer):
            return self._divisible(name)
        return np.zeros((1, *self._valid.shape))

    def _whole_and_sharded(self, zero: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        return self._of(name), self._sharded(zero, name)

    @_kept
    def _parts(self, recompute: Recompute | None) -> tuple[Any, Any, Any]:
        """Return how many layers are recomputed in full, whether the others are, how many are."""
        most = self.table.num_layers
        if recompute is not None:
            full, selective, _ = recompute
            return full, selective, most if selective else full
        pairs = [(one.full, one.selective) for one in self.table.recomputes]
        counts, chosen = (np.array(of) for of in zip(*pairs, strict=True))
        return counts, chosen[:, None, None, None], np.where(chosen, most, counts)

    def _in_full(self, of: np.ndarray, recompute: Recompute | None) -> np.ndarray:
        """Return the costs of the layers that are recomputed in full."""
        return first_layers(of, self._parts(recompute)[0])

    def _recomputed(self, of: np.ndarray, recompute: Recompute | None) -> np.ndarray:
        """Return the costs of the layers that are recomputed in either way."""
        return first_layers(of, self._parts(recompute)[2])

    def _others(self, of: np.ndarray, recompute: Recompute | None, selectively: bool) -> np.ndarray:
        """Return the costs of the other layers if they are recomputed selectively, or if not."""
        full, selective, _ = self._parts(recompute)
        if recompute is None:
            return np.where(selective == selectively, other_layers(of, full), 0.0)
        return other_layers(of, full) if selective == selectively else np.zeros_like(of)

    def _repeated(
        self, of: np.ndarray, selectively: np.ndarray, recompute: Recompute | None
    ) -> np.ndarray:
        """Return the costs that recomputation repeats: of layers in full, else `selectively`."""
        found = self._in_full(of, recompute)
        if self._may_be_selective(recompute):
            found = found + self._others(selectively, recompute, selectively=True)
        return found

    def _may_be_selective(self, recompute: Recompute | None) -> bool:
        return self.table.selective if recompute is None else recompute.selective

    @_shared
    def runs_as_one(self, recompute: Recompute | None) -> np.ndarray:
        """Return whether both passes are one program: see `task_programs.runs_as_one`.

        Where the recomputation is open, whether they are with any.
        """
        if recompute is not None and recompute.is_open:
            left = self._least("residual_bytes", "checkpoint_bytes") - self._a_slice("input_bytes")
            return np.asarray(self._goes_back & (left <= MOST_INSIDE))
        left = self._others(self._a_slice("residual_bytes"), recompute, selectively=False)
        if recompute != NOTHING:  # the first layer's input is there
            inputs = self._a_slice("checkpoint_bytes") - self._a_slice("input_bytes")
            left = left + np.maximum(self._recomputed(inputs, recompute), 0.0)
        if self._may_be_selective(recompute):
            left = left + self._others(self._a_slice("kept_bytes"), recompute, selectively=True)
        return np.asarray(self._goes_back & (left <= MOST_INSIDE))

    def _least(self, *names: str) -> np.ndarray:
        """Return the sums over each stage's layers of the least of these fields of a layer."""
        every = [np.diagonal(self._a_slice(name), 1, -2, -1) for name in names]
        total = np.pad(np.cumsum(np.minimum.reduce(every), -1), ((0, 0), (1, 0)))
        return np.asarray(total[:, None, :] - total[:, :-1, None])

    def held(self, zero: int) -> np.ndarray:
        """Return the bytes that a device holds while tasks run, beside activations."""
        return self._state_bytes(zero)[0]

    def around(self, zero: int) -> np.ndarray:
        """Return the most bytes that a device holds after its last task."""
        return self._state_bytes(zero)[1]

    @_kept
    def _state_bytes(self, zero: int) -> Arrays:
        data = self._size(DATA)
        cut = self._sharded(zero, "parameter_bytes") * (zero == 3)
        state = sharded_bytes(self._of("parameter_bytes"), cut, data)
        state = state + sharded_bytes(*self._whole_and_sharded(zero, "optimizer_bytes"), data)
        running, summing, updating = self._gradient_bytes(zero)
        updating = updating * (1 + self.table.update_share)
        whole = cut  # a pass has what is sharded whole, and its gradients
        if self.cluster.is_gpu and zero == 3:  # a layer at a time
            whole = largest(np.diagonal(cut, 1, -2, -1))
        return (
            np.asarray(self._of("batch_bytes") / data + state + 2 * whole + running),
            np.asarray(state + np.maximum(summing, updating)),
        )

    def _gradient_bytes(self, zero: int) -> tuple[Amount, Amount, Amount]:
        """Return the bytes of gradients while tasks run, as they are summed, and of the sums.

        See `cost.mesh_memory` about what sums need.
        """
        whole, cut = self._whole_and_sharded(zero, "gradient_bytes")
        data, is_one = self._size(DATA), self.point.num_micro_batches == 1
        summed = sharded_bytes(whole, cut, data)
        if self.point.replicas is None:  # the least with any number of them
            return summed if zero == 3 or is_one else whole, summed, summed
        if zero == 3:
            return summed, summed, summed
        if self.point.replicas == 1:
            return whole, whole, summed
        limit = self.point.reduction.bucket_bytes
        alone, largest = whole <= limit, np.minimum(whole, limit)  # one bucket, or several
        if is_one:
            return summed + np.where(cut > 0, 2, 1) * largest, summed, summed
        packed = cut * (1 + 1 / data)
        running = whole + np.where(alone, 0.0, cut / data + 2 * largest)
        return running, whole + np.where(alone, summed + packed, 0.0), summed

    @_kept
    def _peak(self, name: str) -> np.ndarray:
        """Return the peak temporaries of a task program: "forward", "backward" or "whole"."""
        return self._each(lambda mesh, slices: self.table.peak_bytes(mesh.row, name, slices))

    @_kept
    def _layer_peak(self, name: str) -> np.ndarray:
        """Return the peak temporaries of a layer that is recomputed: "layer" or "selective"."""
        return self._each(lambda mesh, slices: self.table.layer_peak_bytes(mesh.row, name, slices))

    @_kept
    def working(self, recompute: Recompute | None) -> Arrays:
        """Return what a forward pass leaves, and what either pass needs on top, in bytes."""
        # Layers that are recomputed leave their inputs, and hold their values one at a time.
        inputs = self._recomputed(self._a_slice("checkpoint_bytes"), recompute)
        one = self._in_full(self._layer_peak("layer"), recompute)
        whole, forward, backward = (
            self._others(self._peak(name), recompute, selectively=False)
            for name in ("whole", "forward", "backward")
        )
        if self._may_be_selective(recompute):
            inputs = inputs + self._others(self._a_slice("kept_bytes"), recompute, selectively=True)
            peak = self._others(self._layer_peak("selective"), recompute, selectively=True)
            one = np.maximum(one, peak)
        left = inputs + self._others(self._a_slice("left_bytes"), recompute, selectively=False)
        whole, forward = inputs + np.maximum(whole, one), inputs + forward
        backward = np.maximum(backward, one)
        # One program of both passes leaves what the second part of a backward pass in two needs.
        as_one, kept = self.runs_as_one(recompute), left if self._schedule.splits_backward else 0.0
        return (
            np.where(as_one, kept, left),
            np.where(as_one, whole, forward),
            np.where(as_one, whole - kept, backward),
        )

    def memory(self, zero: int, recompute: Recompute, in_flight: Sequence[int]) -> np.ndarray:
        """Return the peak bytes on a device, `[stages behind, mesh, first, end]`.

        Where the recomputation is open, they are a lower bound with one microbatch in flight.

        Args:
            zero: ZeRO level: 0, 2 or 3.
            recompute: the recomputation.
            in_flight: the microbatches whose activations a stage holds, by the stages behind it.
        """
        if recompute.is_open:
            return self._least_memory(zero)[None]
        count = np.array(in_flight)[:, None, None, None]
        running = self.held(zero) + activation_bytes(count, *self.working(recompute))
        return np.asarray(np.maximum(running, self.around(zero)))

    def _least_memory(self, zero: int) -> np.ndarray:
        """Return a lower bound on the peak bytes with any recomputation.

        Every layer leaves its residuals or its input, and needs the least that any of its backward
        passes does. One program of both passes is taken to leave nothing.
        """
        peaks = [self._layer_peak("layer"), self._peak("backward"), self._peak("whole")]
        if self.table.selective:  # which leaves more than the layers' inputs
            peaks.append(self._layer_peak("selective"))
        peak = largest(np.diagonal(np.minimum.reduce(peaks), 1, -2, -1))
        left = self._least("checkpoint_bytes", "left_bytes")
        left = np.where(self.runs_as_one(OPEN), 0.0, left)
        return np.asarray(np.maximum(self.held(zero) + left + peak, self.around(zero)))

    @_shared
    def _work(self) -> Arrays:
        """Return the seconds of both passes, and of selective recomputation, without sums."""
        rows = [self.point.batch_size / slices for slices in self._slices]
        pairs = [
            self.table.work_seconds(mesh.row, slices, row)
            for mesh, slices, row in zip(self.meshes, self._slices, rows, strict=True)
        ]
        work, back = (np.stack(of) for of in zip(*pairs, strict=True))
        if not self.table.selective:
            return work, back, work
        share = self._each(lambda mesh, slices: self.table.selective_share(mesh.row, slices))
        return work, back, work * share

    @_shared
    def _along_model(self, latency: bool) -> Arrays:
        """Return the seconds along model of the forward pass and of the backward pass.

        Then come those of what the backward pass gathers as the forward pass did, and of what
        selective recomputation sums; all with latency, or without.
        """
        found = []
        for name in ("forward", "backward", "repeated", "selective"):
            size, count = self._a_slice(f"{name}_bytes"), latency * self._of(f"{name}_sums")
            if name == "backward":
                size = size + self._of("fixed_backward_bytes")
            found.append(self._all_reduce(MODEL, size, count))
        return tuple(found)

    def _sums(self, recompute: Recompute | None, latency: bool) -> Arrays:
        """Return the seconds of the all-reduces along model of each of a microbatch's passes."""
        forward, backward, repeated, selectively = self._along_model(latency)
        backward = backward + np.where(self.runs_as_one(recompute), 0.0, repeated)
        return forward, backward + self._repeated(forward, selectively, recompute)

    def _gathers(self, recompute: Recompute | None, latency: bool) -> Arrays:
        """Return the seconds to gather what is sharded along data for each pass (ZeRO-3)."""
        ahead = [self._sharded(3, name) for name in ("gathered_bytes", "parameters")]
        less = [self._sharded(3, name) for name in ("gathered_again_bytes", "gathered_again")]
        again = [  # layers that run again read all that they have read
            self._recomputed(of, recompute) + self._others(part, recompute, selectively=False)
            for of, part in zip(ahead, less, strict=True)
        ]
        counts = [latency * gather_count(x, n, self.cluster) for x, n in (ahead, again)]
        first, then = map(self._gather, (DATA, DATA), (ahead[0], again[0]), counts)
        return first, np.where(self.runs_as_one(recompute), 0.0, then)

    def _row_sums(self, latency: bool) -> Any:
        """Return the seconds to sum gradients along the devices that share a microbatch's rows."""
        size, count = self._of("parameter_bytes"), latency * self._of("parameters")
        return self._all_reduce(DATA, size, count, self._size(DATA) // (self.point.replicas or 1))

    def passes(self, zero: int, recompute: Recompute | None) -> PassSeconds:
        """Return the seconds of a microbatch's passes."""
        return self._passes(zero == 3, recompute)  # the other levels are the update's

    @_kept
    def _passes(self, gathers: bool, recompute: Recompute | None) -> PassSeconds:
        work, back, selectively = self._work()
        sums, sums_back = self._sums(recompute, latency=True)
        more = self._repeated(work, selectively, recompute)
        beside = self._beside(recompute) if gathers else (0.0, 0.0, 0.0, 0.0)
        launches, sums_back = self._of("launches"), sums_back + self._row_sums(True)
        launched = launch_seconds(launches, self._in_full(launches, recompute), self.cluster)
        parts = PassParts(work, back, more, sums, sums_back, *beside, *launched)
        as_one, splits = self.runs_as_one(recompute), self._schedule.splits_backward
        return pass_seconds(parts, self.cluster, as_one, self._is_first, splits)

    def _beside(self, recompute: Recompute | None) -> tuple[Amount, Amount, Amount, Amount]:
        """Return the seconds of `PassParts` that parameters sharded along data take (ZeRO-3)."""
        (ahead, again), (scatter, buckets) = self._gathers(recompute, True), self._scatters(3, True)
        first = np.diagonal(ahead, 1, -2, -1)[..., None]
        return ahead, first, again + scatter, scatter / np.maximum(buckets, 1)

    @_shared
    def _crossing_seconds(self) -> Arrays:
        """Return how long one microbatch occupies the links, and its latency.

        They are those to the next stage, and those of its gradient to the one before. The other
        stage is taken to be no slower than this one, and on the same host if both fit there.
        """
        links = [mesh.link_to_next(self.cluster) for mesh in self.meshes]
        rates, senders = (self._column(of) for of in zip(*links, strict=True))
        out = np.asarray(self.sent() / rates / senders)
        back = np.broadcast_to(out[..., 0, :-1, None], out.shape)
        return out, back, np.where(out > 0, self.cluster.latency, 0.0)

    def sent(self) -> np.ndarray:
        """Return the bytes of one microbatch to the next stage."""
        return np.asarray(self._of("sent_bytes") / self.point.num_micro_batches)

    @_kept
    def once(self, zero: int, recompute: Recompute | None) -> np.ndarray:
        """Return the seconds of what is done once a step.

        Gradients are summed over the replicas beside the backward pass, and the update reads and
        writes the state.
        """
        sums, buckets, gathers, state = self._once_parts(zero, True)
        backward = self.passes(zero, recompute).backward
        exposed = exposed_seconds(sums, buckets, beside_seconds(backward, self.cluster))
        return np.asarray(update_seconds(exposed + gathers, state, self.cluster.memory_bandwidth))

    def hidden(self, zero: int, recompute: Recompute) -> np.ndarray:
        """Return the seconds of the sums once a step that run under a backward pass."""
        sums, buckets, _, _ = self._once_parts(zero, True)
        beside = beside_seconds(self.passes(zero, recompute).backward, self.cluster)
        return np.asarray(sums - exposed_seconds(sums, buckets, beside))

    @_kept
    def _once_parts(self, zero: int, latency: bool) -> tuple[Amount, Amount, Amount, Amount]:
        """Return the seconds of sums, their buckets, the seconds of gathers, the state's bytes."""
        owned, owned_cut = self._whole_and_sharded(zero, "owned_bytes")
        kept, kept_cut = self._whole_and_sharded(zero, "optimizer_bytes")
        size, size_cut = self._whole_and_sharded(zero, "gradient_bytes")
        count, count_cut = self._whole_and_sharded(zero, "gradients")
        sharded = kept_cut + (owned_cut if zero == 3 else 0.0)
        buckets = self._buckets(size - size_cut, count - count_cut)
        replicas, crossing = self.point.replicas or 1, self._crossing(size - size_cut)
        sums = self._all_reduce(DATA, crossing, latency * buckets, replicas)
        gathers: Amount = 0.0
        if zero == 2:  # scattered, and gathered after the update
            scatter, scattered = self._scatters(zero, latency)
            sums, buckets = sums + scatter, buckets + scattered
            names = latency * self._sharded(zero, "parameters")
            gathers = self._gather(DATA, self._sharded(zero, "parameter_bytes"), names)
        return sums, buckets, gathers, sharded_bytes(owned + kept, sharded, self._size(DATA))

    def _scatters(self, zero: int, latency: bool) -> Arrays:
        """Return the seconds to reduce and scatter gradients along data, and their buckets."""
        size = self._sharded(zero, "gradient_bytes")
        buckets = self._buckets(size, self._sharded(zero, "gradients"))
        return self._gather(DATA, self._crossing(size), latency * buckets), np.asarray(buckets)

    def _buckets(self, size: Amount, count: Amount) -> Amount:
        """Return the number of buckets of gradients, by their bytes as they are accumulated."""
        return bucket_count(self._crossing(size), count, self.point.reduction.bucket_bytes)

    def _crossing(self, size: Amount) -> Amount:
        """Return the bytes that cross, of gradients of 32 bits."""
        return size / 2 if self.point.reduction.dtype == "bf16" else size

    @_kept
    def pass_rings(self, zero: int, recompute: Recompute) -> Mapping[str, Amount]:
        """Return how long a microbatch's collectives occupy the rings along each axis."""
        more = (*self._gathers(recompute, False), self._scatters(3, False)[0]) if zero == 3 else ()
        return {MODEL: sum(self._sums(recompute, False)), DATA: sum(more, self._row_sums(False))}

    def once_rings(self, zero: int) -> Mapping[str, Amount]:
        """Return how long the collectives once a step occupy the rings along each axis."""
        sums, _, gathers, _ = self._once_parts(zero, False)
        return {DATA: sums + gathers}

    def seconds(
        self, zero: int, chosen: Recompute | np.ndarray, hidden: Sequence[int]
    ) -> tuple[np.ndarray, ...]:
        """Return the seconds of the first microbatch, of everything else, and of all work.

        A pipeline takes no less than the sum of the first over its stages and the most of the
        second. For the first microbatch goes through all stages and back; where a stage works on
        others meanwhile (`Schedule.hidden_forwards`), that is not part of everything else, nor is
        what it may do while the last gradient travels on. A stage takes as long as its devices work
        or its links send, whichever is more.

        Args:
            zero: ZeRO level: 0, 2 or 3.
            chosen: the recomputation; or for each stage its position in the table's `recomputes`,
                `[stages behind, mesh, first, end]`.
            hidden: the forward passes that the first round trip hides, by the stages behind.

        Returns:
            The seconds of one microbatch with its transfers to and from the next stage; of
            everything else, `[stages behind, mesh, first, end]`; those in which a device works or
            is done once a step; and the last alone.
        """
        passes, update = self._timed(zero, chosen)
        others = self.point.num_micro_batches - 1
        out, back, latency = self._crossing_seconds()
        whole = passes.forward + passes.backward
        once, work, sends = whole, others * whole, others * (out + back)
        if self._schedule.splits_backward and not self.cluster.shares_machine:
            once = np.where(self._is_first, whole, whole - passes.weight)
            # Its own weights, and one more for each stage before, are left to do while the last
            # gradient goes back there.
            later = np.minimum(np.arange(self.table.num_layers), others)[:, None]
            work = work - np.where(self._is_first, 0.0, later * passes.weight)
        done = np.array(hidden, float)[:, None, None, None]
        rest = np.maximum(work - done * passes.forward, sends - done * out)
        first = once + 2 * (out + latency)
        every = whole * self.point.num_micro_batches + update
        return first + self._valid, rest + update + self._valid, every + self._valid, update

    def _timed(self, zero: int, chosen: Recompute | np.ndarray) -> tuple[PassSeconds, np.ndarray]:
        if isinstance(chosen, Recompute):
            return self.passes(zero, chosen), self.once(zero, chosen)
        of = self.passes(zero, None)
        at = chosen, np.arange(len(self.meshes))[:, None, None], self._first, self._end
        taken = PassSeconds(of.forward, np.asarray(of.backward)[at], np.asarray(of.weight)[at])
        return taken, self.once(zero, None)[at]

    def fewest(
        self, zero: int, in_flight: Sequence[int], wanted: np.ndarray | None
    ) -> tuple[Recompute | np.ndarray, np.ndarray]:
        """Return the recomputation of each stage with which it fits in the least time.

        A stage that never fits recomputes nothing.

        Args:
            zero: ZeRO level: 0, 2 or 3.
            in_flight: see `memory`.
            wanted: the stages that matter, `[mesh, first, end]`; None: all.

        Returns:
            The positions in `recomputes`, or `NOTHING` for all; and the peak bytes; both `[stages
            behind, mesh, first, end]`.
        """
        most, needs = self.point.memory_bytes or np.inf, self.memory(zero, NOTHING, in_flight)
        change = needs > most
        # The last stage may become one program, and so faster, the less it leaves inside.
        most_recomputed = Recompute(self.table.num_layers)
        change[0] |= self.runs_as_one(most_recomputed) & ~self.runs_as_one(NOTHING)
        change &= self._valid == 0 if wanted is None else wanted
        if not change.any():
            return NOTHING, needs
        behind, mesh, first, end = at = np.nonzero(change)
        here = mesh, first, end
        working = (of[:, mesh, first, end] for of in self.working(None))
        held = np.array(in_flight)[behind]
        each = self.held(zero)[here] + activation_bytes(held, *working)
        each = np.maximum(each, self.around(zero)[here])
        backward = np.asarray(self.passes(zero, None).backward)[:, mesh, first, end]
        best = np.where(each <= most, backward, np.inf).argmin(0)
        if not best.any():
            return NOTHING, needs
        chosen = np.zeros(needs.shape, int)
        chosen[at] = best
        needs[at] = np.take_along_axis(each, best[None], 0)[0]
        return chosen, needs
