"""Submeshes are placed with no device twice, on as few hosts as they can be."""

import dataclasses

import numpy as np
import pytest

from launcher.plan import local_shape
from launcher.plan.inter_op.submeshes import place_submeshes, submesh_sizes


def cluster_of(hosts, each):
    return dataclasses.replace(local_shape(1, 1, "cpu"), hosts=hosts, devices_per_host=each)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(30))
def test_every_choice_of_sizes_has_a_place(seed):
    rng = np.random.default_rng(seed)
    cluster = cluster_of(int(rng.integers(1, 5)), int(rng.choice([1, 2, 4, 6, 7, 8])))
    batch = int(rng.choice([24, 60, 64]))
    sizes, left = [], cluster.num_devices
    while fitting := [n for n in submesh_sizes(cluster, batch) if n <= left]:
        sizes.append(int(rng.choice(fitting)))
        left -= sizes[-1]
        if rng.random() < 0.2:
            break
    placed = place_submeshes(sizes, cluster)
    used = [d for devices in placed for d in devices]
    assert [len(devices) for devices in placed] == sizes
    assert len(used) == len(set(used))
    assert set(used) <= set(range(cluster.num_devices))


@pytest.mark.parametrize(
    ("hosts", "each", "batch", "sizes"),
    [
        (8, 8, 1024, (1, 2, 4, 8, 16, 32, 64)),
        (4, 8, 24, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)),
        (5, 7, 64, (1, 2, 4, 7, 8, 14, 16, 28, 32)),
        (2, 7, 70, (1, 2, 5, 7, 10, 14)),
        (1, 7, 5, (1, 5, 7)),
    ],
)
def test_a_stage_may_have_the_devices_that_rows_can_be_shared_by(hosts, each, batch, sizes):
    assert submesh_sizes(cluster_of(hosts, each), batch) == sizes


def test_of_a_batch_of_many_divisors_a_host_has_all_and_the_cluster_some():
    found = submesh_sizes(cluster_of(128, 8), 55440)  # 120 divisors
    assert set(range(1, 9)) < set(found)
    assert len(found) < 50


def test_submeshes_that_fill_hosts_do_so_where_the_others_share_them():
    assert place_submeshes((2, 4, 2, 2), cluster_of(3, 4))[1] == (4, 5, 6, 7)
    assert place_submeshes((3, 4, 3, 2), cluster_of(3, 4)) == [
        (4, 5, 6),
        (0, 1, 2, 3),
        (7, 8, 9),
        (10, 11),
    ]


@pytest.mark.parametrize("sizes", [(4, 4, 8, 2, 2, 4), (1, 2, 4, 8, 1), (8, 16), (2, 8, 4, 8, 2)])
def test_a_stage_that_fits_a_host_is_on_one(sizes):
    cluster = cluster_of(8, 8)
    for size, devices in zip(sizes, place_submeshes(sizes, cluster), strict=True):
        assert len({cluster.host_of(d) for d in devices}) == -(-size // 8)


def test_neighbours_share_a_host():
    assert place_submeshes((4, 4, 4, 4), cluster_of(2, 8)) == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
    ]
    assert place_submeshes((2, 4, 4, 2), cluster_of(2, 8))[2:] == [(8, 9, 10, 11), (12, 13)]
