"""The cost model's formulas, by hand and against brute force; each of numbers and of arrays."""

import dataclasses
import itertools

import numpy as np
import pytest

from launcher.plan import local_shape
from launcher.plan.cost.formulas import (
    Links,
    PassParts,
    activation_bytes,
    all_reduce_seconds,
    beside_work,
    exposed_seconds,
    launch_seconds,
    pass_seconds,
    peak_in_turn,
    ring_links,
    ring_seconds,
    sharded_bytes,
    transfer_seconds,
    update_seconds,
)
from launcher.plan.cost.mesh_memory import mesh_activation_bytes as simulated_bytes
from launcher.plan.cost.stage_memory import Footprint
from launcher.schedule import Kind, make_tasks, max_in_flight

CLUSTER = dataclasses.replace(
    local_shape(8, 2, "cpu"), intra_host=100.0, inter_host=20.0, latency=0.5
)


def ring(size, devices, bandwidth, latency):
    """An all-reduce step by step: every device sends a part to the next, twice round."""
    parts = [size / devices] * devices
    return sum(parts[0] / bandwidth + latency for _ in range(2 * (devices - 1)))


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_a_ring_sends_a_part_at_a_time(devices):
    start = CLUSTER.start_seconds(devices)
    assert all_reduce_seconds(800.0, devices, 100.0, start) == pytest.approx(
        ring(800.0, devices, 100.0, 0.5)
    )
    sizes, counts = np.array([800.0, 0.0, 90.0]), np.array([1.0, 0.0, 3.0])
    found = all_reduce_seconds(sizes, devices, 100.0, start, counts)
    of_three = 3 * ring(30.0, devices, 100.0, 0.5)
    assert found == pytest.approx([ring(800.0, devices, 100.0, 0.5), 0.0, of_three])
    cluster = dataclasses.replace(CLUSTER, gather_rate=0.5)
    args = devices, 100.0, cluster, counts
    for kind, same in (("all-gather", sizes / 0.5), ("reduce-scatter", sizes / 0.5)):
        half = all_reduce_seconds(same, devices, 100.0, start, counts) / 2
        assert ring_seconds(kind, sizes, *args) == pytest.approx(half)
    assert ring_seconds("all-reduce", sizes, *args) == pytest.approx(found)


@pytest.mark.parametrize("buckets", [1, 2, 5])
@pytest.mark.parametrize("backward", [0.0, 3.0, 40.0])
def test_a_bucket_is_summed_once_it_is_complete_and_the_link_is_free(buckets, backward):
    """All sums take 10 s: beside the pass, longer than it, or after it."""
    free = 0.0
    for number in range(1, buckets + 1):
        free = max(free, backward * number / buckets) + 10.0 / buckets
    assert exposed_seconds(10.0, buckets, backward) == pytest.approx(free - backward)
    last = exposed_seconds(10.0, buckets, backward, 9.0)  # as an embedding's is, which comes last
    assert last == pytest.approx(max(9.0, exposed_seconds(10.0, buckets, backward)))


@pytest.mark.parametrize(
    ("hosts", "model", "links"),
    [
        ((0, 0, 0, 0), 2, Links(100.0, 100.0)),
        ((0, 0, 0, 0, 1, 1, 1, 1), 1, Links(100.0, 20.0)),
        ((0, 0, 0, 0, 1, 1, 1, 1), 4, Links(100.0, 5.0)),
        ((0, 0, 0, 0, 1, 1, 1, 1), 8, Links(20.0, 100.0)),
        ((0, 1), 2, Links(20.0, 100.0)),
        ((0, 1, 1, 1), 2, Links(20.0, 20.0)),  # the second ring along data stays on host 1
        ((0, 1, 0, 1), 1, Links(100.0, 10.0)),  # the ring leaves each host twice
        ((0, 0, 0, 0, 1, 1), 3, Links(20.0, 10.0)),
        ((0, 0, 0, 0, 1, 1, 1, 1, 2), 3, Links(10.0, 20 / 3)),  # two rings cross host 1's link
    ],
)
def test_a_ring_that_leaves_a_host_shares_its_link(hosts, model, links):
    one_each = dataclasses.replace(CLUSTER, hosts=3, devices_per_host=1)  # a device is its host
    assert ring_links(hosts, model, one_each) == links


@pytest.mark.parametrize(
    ("parts", "hosts", "is_local", "bandwidth"),
    [
        ((1, 1), (1, 1), True, 100.0),
        ((4, 4), (1, 1), True, 400.0),
        ((4, 1), (1, 1), True, 100.0),  # all parts arrive on one device
        ((2, 4), (1, 1), True, 200.0),
        ((4, 4), (1, 1), False, 20.0),  # the only link between two hosts
        ((4, 4), (2, 2), False, 40.0),
        ((4, 4), (2, 1), False, 20.0),
        ((1, 1), (2, 2), False, 20.0),  # one host sends it
    ],
)
def test_a_transfer_takes_as_many_links_as_both_ends_have(parts, hosts, is_local, bandwidth):
    for size in (800.0, np.array([[0.0, 800.0], [10.0, 3.0]])):
        seconds = transfer_seconds(size, parts, hosts, is_local, CLUSTER)
        assert seconds == pytest.approx(0.5 + size / bandwidth)


PARTS = PassParts(
    work=1.0, work_back=2.0, again=1.0, sums=0.1, sums_back=0.2, gather=10, first=4,
    crossing=2.5, last=1,
)  # fmt: skip
APART = dataclasses.replace(CLUSTER, dispatch_overhead=0.5, effective_parallelism=None)


@pytest.mark.parametrize(
    ("as_one", "is_first", "splits", "expected"),
    [
        # As long as it gathers; as it works, and then on; and a share of what runs beside it.
        (False, False, False, (11.16, 5.6, 1.0)),
        (True, False, False, (11.16, 5.1, 1.0)),  # does not start again
        (False, False, True, (11.16, 6.1, 1.5)),  # a program more
        (False, True, True, (11.16, 5.6, 5.6)),  # no other stage waits for any of it
    ],
)
def test_passes_gather_beside_their_work_and_start(as_one, is_first, splits, expected):
    found = pass_seconds(PARTS, APART, as_one, is_first, splits)
    assert (found.forward, found.backward, found.weight) == pytest.approx(expected)


def test_collectives_run_beside_work_but_for_those_that_nothing_is_beside():
    assert beside_work(3.0, 2.0, 0.5) == pytest.approx(3.5 + 0.6 * 1.5)
    assert beside_work(3.0, 5.0, 0.5) == pytest.approx(5.0 + 0.6 * 3.0)
    assert beside_work(3.0, 2.0, 2.0) == 5.0
    shared = dataclasses.replace(APART, effective_parallelism=2.0)
    found = pass_seconds(PARTS, shared, False, False, False)
    assert (found.forward, found.backward) == pytest.approx((11.6, 6.2))


def test_a_pass_takes_no_less_than_the_host_takes_to_launch_it():
    cluster = dataclasses.replace(APART, launch_seconds=2.0)
    launch, back = launch_seconds(10, 4, cluster)
    assert (launch, back) == (20.0, 38.0)  # a gradient has 1.5 times the launches
    parts = dataclasses.replace(PARTS, launch=launch, launch_back=back)
    found = pass_seconds(parts, cluster, False, False, False)
    assert (found.forward, found.backward) == (20.5, 38.5)


@pytest.mark.parametrize("splits", [True, False])
def test_passes_of_arrays_are_those_of_each_of_their_numbers(splits):
    rng = np.random.default_rng(0)
    names = [field.name for field in dataclasses.fields(PassParts)]
    parts = PassParts(**{name: rng.uniform(0, 9, (2, 3)) for name in names})
    as_one, is_first = rng.random((2, 3)) < 0.5, rng.random((2, 3)) < 0.5
    many = pass_seconds(parts, APART, as_one, is_first, splits)
    for at in itertools.product(range(2), range(3)):
        alone = PassParts(**{name: float(getattr(parts, name)[at]) for name in names})
        one = pass_seconds(alone, APART, bool(as_one[at]), bool(is_first[at]), splits)
        for name in ("forward", "backward", "weight"):
            assert getattr(many, name)[at] == getattr(one, name)


def test_an_update_reads_and_writes_what_a_device_holds():
    assert update_seconds(0.5, 100.0, 50.0) == 0.5 + 4.0
    state = np.array([100.0, 90.0])
    assert sharded_bytes(state, np.array([80.0, 0.0]), 4).tolist() == [40.0, 90.0]
    assert update_seconds(0.0, state, 50.0).tolist() == [4.0, 3.6]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_activations_in_flight_are_those_of_the_tasks_in_their_order(schedule, count):
    """The closed form that the search uses beside the simulation of a mesh's tasks."""
    rng = np.random.default_rng(count)
    left, forward, backward = rng.uniform(1, 9, (3, 4))
    tasks = make_tasks(schedule, 4, 4, count)
    held = np.array([max_in_flight(of_mesh) for of_mesh in tasks])
    found = activation_bytes(held, left, forward, backward)
    for s, of_mesh in enumerate(tasks):
        one = Footprint(
            left={Kind.FORWARD: left[s], Kind.BACKWARD: -left[s]},
            working={Kind.FORWARD: forward[s], Kind.BACKWARD: backward[s]},
        )
        assert found[s] == pytest.approx(simulated_bytes({s: one}, of_mesh))


@pytest.mark.parametrize("seed", range(10))
def test_layers_that_run_in_turn_hold_what_others_need(seed):
    rng = np.random.default_rng(seed)
    peak, before, after = rng.uniform(0, 9, (3, 6))
    found = peak_in_turn(peak, before, after)
    for first, end in itertools.product(range(6), range(7)):
        most = 0.0
        for layer in range(first, end):
            held = before[first:layer].sum() + after[layer + 1 : end].sum()
            most = max(most, peak[layer] + held)
        assert found[first, end] == pytest.approx(most)
