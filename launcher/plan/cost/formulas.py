"""Formulas of the cost model: one each, for the prediction of a plan and for the search of one.

Every argument may be a number, as for a plan's own stages, or an array over many stages, as in the
search; they broadcast. Sizes are in bytes, rates in bytes/s, and times in seconds. Pure.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from launcher.hardware import ClusterShape

Amount: TypeAlias = float | NDArray[np.float64]
Condition: TypeAlias = bool | NDArray[np.bool_]


@dataclass(frozen=True)
class Links:
    """Bytes/s between neighbours in the rings of a submesh, along model and along data."""

    model: float
    data: float


def ring_links(devices: Iterable[int], model: int, cluster: ClusterShape) -> Links:
    """Return the links of a submesh.

    A ring inside a host has links of its own; rings that leave a host share its link.

    Args:
        devices: the devices, in the order of the logical mesh.
        model: size of the model axis, whose devices stand side by side.
        cluster: the rates of the links.
    """
    return Links(
        *(
            cluster.inter_host / max(hops.values()) if hops else cluster.intra_host
            for hops in ring_hops(tuple(map(cluster.host_of, devices)), model)
        )
    )


@functools.lru_cache(maxsize=4096)
def ring_hops(hosts: tuple[int, ...], model: int) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Return how often the rings along model, and those along data, leave each host.

    They enter it as often. Hosts that no ring leaves are not named.

    Args:
        hosts: the host of each device, in the order of the logical mesh.
        model: see `ring_links`.
    """
    count, along_model, along_data = len(hosts), Counter[int](), Counter[int]()
    if len(set(hosts)) > 1:
        for at, host in enumerate(hosts):
            row = at - at % model
            along_model[host] += hosts[row + (at + 1) % model] != host
            along_data[host] += hosts[(at + model) % count] != host
    return +along_model, +along_data


def all_reduce_seconds(
    size: Amount, devices: Amount, bandwidth: Amount, start: Amount, count: Amount = 1
) -> Amount:
    """Return the seconds of ring all-reduces, one after another.

    Each device sends `2 (n - 1) / n` of the bytes (Patarasuk and Yuan, 2009).

    Args:
        size: bytes of all arrays, where they are not sharded along the axis.
        devices: number of devices in the ring.
        bandwidth: bytes/s between neighbours.
        start: seconds of one of no bytes, `ClusterShape.start_seconds`.
        count: number of arrays.
    """
    return 2 * (devices - 1) * size / devices / bandwidth + start * count


def ring_seconds(
    kind: str,
    size: Amount,
    devices: Amount,
    bandwidth: Amount,
    cluster: ClusterShape,
    count: Amount = 1,
) -> Amount:
    """Return the seconds of ring collectives of a kind; see `all_reduce_seconds`.

    All-gathers and reduce-scatters are half of an all-reduce.
    """
    start = cluster.start_seconds(devices)
    if kind == "all-reduce":
        return all_reduce_seconds(size, devices, bandwidth, start, count)
    return all_reduce_seconds(size / cluster.gather_rate, devices, bandwidth, start, count) / 2


GATHERED_TOGETHER = 30 << 20  # bytes: XLA:GPU's default for arrays that one all-gather brings


def gather_count(size: Amount, count: Amount, cluster: ClusterShape) -> Amount:
    """Return about how many all-gathers bring `count` arrays of `size` bytes together."""
    return bucket_count(size, count, GATHERED_TOGETHER if cluster.is_gpu else 0)


def bucket_count(size: Amount, count: Amount, bucket_bytes: int) -> Amount:
    """Return about how many buckets gradients fill (`partition.gradient_sync`).

    Args:
        size: their bytes.
        count: their number.
        bucket_bytes: the most bytes in a bucket of several; 0: each gradient has its own.
    """
    return np.minimum(count, np.ceil(size / bucket_bytes)) if bucket_bytes else count


def exposed_seconds(
    sums: Amount, buckets: Amount, backward: Amount, last: Amount | None = None
) -> Amount:
    """Return the seconds of the sums of gradients that continue after the backward pass.

    Buckets are complete one after another through the whole pass, and one is summed at a time: the
    last one is summed after it, or all of them from the first one's completion on.

    Args:
        sums: seconds of all sums.
        buckets: number of buckets.
        backward: seconds of the pass beside which they can run; 0: they can run beside none.
        last: seconds of the last sum; None: all are equal.
    """
    share = 1 / np.maximum(buckets, 1)
    return np.maximum(sums * share if last is None else last, sums - backward * (1 - share))


_CONTENTION = 0.6  # of the shorter of two that run together; chosen: fits gave 0.36 to 0.72


def beside_work(work: Amount, crossing: Amount, alone: Amount) -> Amount:
    """Return the seconds of a pass whose parameters are gathered, and gradients scattered, in it.

    XLA:GPU gathers what a product reads under the work before it, and scatters a gradient under
    the work behind it, one after another. Both are slower so, since they share units and memory.

    Args:
        work: seconds of all else.
        crossing: seconds of what is gathered and scattered.
        alone: the part of it that has no work beside it: what is gathered before the first product,
            and scattered after the last.
    """
    hidden = crossing - alone
    return alone + np.maximum(work, hidden) + _CONTENTION * np.minimum(work, hidden)


def beside_seconds(backward: Amount, cluster: ClusterShape) -> Amount:
    """Return the seconds of a backward pass beside which sums of gradients can run.

    There are none where the devices share a machine: what moves the bytes is what computes.
    """
    return backward if cluster.effective_parallelism is None else 0.0 * backward


def stage_parallelism(products: float, total: float, cluster: ClusterShape) -> float | None:
    """Return `ClusterShape.effective_parallelism` of a stage's passes: the mean over their seconds.

    Args:
        products: seconds of their matrix products.
        total: seconds of the passes.
        cluster: the devices; None is returned where each has its own resources.
    """
    others = cluster.effective_parallelism
    if others is None or cluster.product_parallelism is None:
        return others
    return others + (cluster.product_parallelism - others) * products / total


def transfer_seconds(
    size: Amount,
    parts: tuple[int, int],
    hosts: tuple[int, int],
    is_local: bool,
    cluster: ClusterShape,
) -> Amount:
    """Return the seconds to send a microbatch from one stage to another.

    Inside a host every part has a link of its own. Between hosts the parts share the links of the
    hosts, over which no byte goes twice (`partition.reshard`).

    Args:
        size: bytes of the whole microbatch.
        parts: the parts that it is cut into along data, at the source and at the destination.
        hosts: number of hosts of the source and of the destination.
        is_local: whether both are on the same hosts.
        cluster: the rates of the links.
    """
    if is_local:
        return cluster.latency + size / cluster.intra_host / min(parts)
    return cluster.latency + size / cluster.inter_host / min(*parts, *hosts)


@dataclass(frozen=True)
class PassParts:
    """Seconds of the parts of a stage's passes over a microbatch.

    Attributes:
        work: of the forward pass, without communication.
        work_back: of the backward pass, without what is recomputed.
        again: of what the backward pass recomputes, without communication.
        sums: of the collectives of the forward pass.
        sums_back: of the collectives of the backward pass, with those of what it recomputes.
        gather: of gathering the parameters that are sharded along data (ZeRO-3).
        first: the part of it that no work is before.
        crossing: of gathering them again, and of reducing and scattering their gradients.
        last: the part of it that no work is behind.
        launch: what a host takes to launch the forward pass.
        launch_back: the same of the backward pass.
    """

    work: Amount
    work_back: Amount
    again: Amount
    sums: Amount
    sums_back: Amount
    gather: Amount
    first: Amount
    crossing: Amount
    last: Amount
    launch: Amount = 0.0
    launch_back: Amount = 0.0


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a stage's passes over a microbatch.

    Attributes:
        forward: of the forward pass.
        backward: of the whole backward pass.
        weight: of the part of the backward pass that no other stage waits for.
    """

    forward: Amount
    backward: Amount
    weight: Amount


def pass_seconds(
    of: PassParts, cluster: ClusterShape, as_one: Condition, is_first: Condition, splits: bool
) -> PassSeconds:
    """Return the seconds of a stage's passes over a microbatch.

    Each program has a dispatch overhead; one that does both passes has it once. A pass takes at
    least as long as the host takes to launch it. Where the devices share a machine, no collective
    runs beside work.

    Args:
        of: their parts.
        cluster: the devices.
        as_one: whether both passes are one program.
        is_first: whether no other stage waits for the gradient of the stage's input.
        splits: whether the schedule has a program of its own for the gradients of the weights,
            which take half of the work. The first stage has none: all of it may wait.
    """
    overhead, shared = cluster.dispatch_overhead, cluster.effective_parallelism is not None
    alone, alone_back = (of.gather, of.crossing) if shared else (of.first, of.last)
    forward = np.maximum(beside_work(of.work + of.sums, of.gather, alone), of.launch) + overhead
    work = of.work_back + of.again + of.sums_back
    backward = np.maximum(beside_work(work, of.crossing, alone_back), of.launch_back)
    backward = backward + np.where(as_one, 0.0, overhead)
    start = np.where(is_first, 0.0, overhead if splits else 0.0)
    weight = np.where(is_first, backward, of.work_back / 2 + start)
    return PassSeconds(forward, backward + start, weight)


_LAUNCHED_BACK = 1.5  # launches of a backward pass over its forward pass's; taken, not fitted


def launch_seconds(forward: Amount, again: Amount, cluster: ClusterShape) -> tuple[Amount, Amount]:
    """Return what a host takes to launch a stage's passes.

    Args:
        forward: the launches of the forward pass (`collectives.Load`).
        again: those of what the backward pass recomputes in full.
        cluster: the devices.
    """
    each = cluster.launch_seconds
    return each * forward, each * (_LAUNCHED_BACK * forward + again)


def update_seconds(sums: Amount, state: Amount, bandwidth: float) -> Amount:
    """Return the seconds of a stage once a step.

    Args:
        sums: seconds of the collectives that sum the gradients and gather the parameters.
        state: bytes of the parameters and of the optimizer's state on a device; they are read and
            written once.
        bandwidth: bytes/s of a device's memory.
    """
    return sums + 2 * state / bandwidth


def sharded_bytes(whole: Amount, divisible: Amount, devices: Amount) -> Amount:
    """Return the bytes on each device if the divisible part of `whole` is sharded."""
    return whole - divisible + divisible / devices


def activation_bytes(in_flight: Amount, left: Amount, forward: Amount, backward: Amount) -> Amount:
    """Return the peak activation memory of a stage on a device, temporaries included.

    Args:
        in_flight: number of microbatches whose activations are held at once.
        left: what a forward pass leaves to the backward pass of its microbatch.
        forward: the most that a forward pass needs on top of what was there before it.
        backward: the same of a backward pass.
    """
    return np.maximum((in_flight - 1) * left + forward, in_flight * left + backward)


def peak_in_turn(peak: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the peak memory of programs that run one layer after another, for all runs of layers.

    Args:
        peak: `[layer]`: the most bytes that each layer needs while it runs.
        before: `[layer]`: bytes that are held of it while any later layer runs.
        after: `[layer]`: bytes that are held of it while any earlier layer runs.

    Returns:
        `[first, end]`: the peak of a program of the layers `first … end - 1`; 0 of no layers.
    """
    left, held = (np.concatenate([[0.0], np.cumsum(x)]) for x in (before, after))
    at = peak + left[:-1] - held[1:]
    is_in = np.tri(len(peak), dtype=bool).T  # [first, layer]
    most = np.maximum.accumulate(np.where(is_in, at, -np.inf), axis=1)
    found = np.zeros((len(peak), len(peak) + 1))
    found[:, 1:] = np.where(is_in, most - left[:-1, None] + held[None, 1:], 0.0)
    return found
