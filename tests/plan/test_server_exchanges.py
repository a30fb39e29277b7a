"""Exchanges through parameter servers in a plan: the server of each, and the time it takes."""

import dataclasses
import json

import numpy as np
import pytest
from layered import layered_step

from launcher.partition.assignment import Reduction
from launcher.partition.partitioned import shared_out
from launcher.plan import Plan, ServerExchange, local_shape
from launcher.plan.cost.stage_seconds import exchange_seconds
from launcher.plan.methods import DataParallel, ParameterServer
from launcher.plan.profile.calibration import StoreRates, calibrated, keep_host_rates
from launcher.report.plan_table import server_line

WIDTH, LAYERS = 512, 8
STEP = layered_step([(WIDTH, WIDTH)] * LAYERS, 64)
SHAPE = local_shape(8, 4, "cpu")
LAYER = WIDTH * WIDTH * 4  # bytes


def planned(shape=SHAPE, **settings):
    return ParameterServer(**settings).plan(STEP, shape)


def loads(plan):
    found = [0] * plan.reduction.servers
    for x in plan.exchanges:
        found[x.server] += x.whole_bytes(plan.reduction.workers)
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_servers_get_equal_shares(seed):
    """No server has more than the mean and the largest exchange; each is within 25 % where the
    exchanges are small enough to allow it."""
    rng = np.random.default_rng(seed)
    servers = int(rng.integers(1, 5))
    sizes = rng.integers(1, 1000, rng.integers(1, 40)).tolist()
    of = shared_out(sizes, servers)
    held = np.bincount(of, sizes, servers)
    assert held.max() <= held.mean() + max(sizes)
    if max(sizes) <= held.mean() / 4:
        np.testing.assert_allclose(held, held.mean(), rtol=0.25)


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_every_server_has_a_share_of_the_buckets(servers):
    """Also where the model's gradients would fill one bucket of the usual size."""
    held = np.array(loads(planned(servers=servers)))
    assert held.sum() >= LAYERS * LAYER
    np.testing.assert_allclose(held, held.mean(), rtol=0.25)


def test_by_default_there_is_a_server_a_host():
    assert (planned().reduction.servers, planned().reduction.workers) == (4, 4)
    assert planned(servers=1).reduction.servers == 1


def test_each_gradient_crosses_once():
    plan = planned(bucket_bytes=LAYER, servers=2)
    (stage,) = plan.stages
    sums = [x.bytes for x in plan.exchanges if x.kind == "sum"]
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert sums == [bucket.bytes for bucket in stage.buckets] == [LAYER] * LAYERS


def test_the_plan_is_one_stage_of_all_devices():
    plan, data = planned(), DataParallel().plan(STEP, SHAPE)
    for of in (plan, data):
        (stage,) = of.stages
        assert (stage.logical_mesh, stage.hosts) == ((8, 1), (0, 1, 2, 3))
    assert plan.stages[0].forward_seconds == data.stages[0].forward_seconds
    # its own replicas' sums, a bucket at a time, and none between workers
    assert sum(x.bytes for x in plan.stages[0].collectives) == LAYERS * LAYER


def test_gradients_are_on_devices_twice():
    """A worker's own and the sums, beside the parameters."""
    assert planned().stages[0].memory_bytes >= 3 * LAYERS * LAYER


RATES = StoreRates(latency=0.2, put=10.0, add=20.0, get=5.0)
SLOW = RATES.applied(SHAPE)
TWO = Reduction(workers=2, servers=2)


def exchange(size, server, kind="sum", when="update"):
    return ServerExchange("", when, kind, "float32", size, server)


def test_an_exchange_takes_its_way_through_a_server():
    """To the store, added as often as there are workers, and back."""
    there = 0.1 + 100 / 10
    assert exchange_seconds([exchange(100, 0)], TWO, SLOW) == pytest.approx(
        there + 2 * 100 / 20 + 0.1 + 100 / 5
    )
    gathered = exchange_seconds([exchange(100, 0, "gather")], TWO, SLOW)
    assert gathered == pytest.approx(there + 2 * 100 / 20 + 0.1 + 200 / 5)


def test_exchanges_run_side_by_side():
    """The slowest of the worker's two links and the server limits them."""
    one = exchange_seconds([exchange(100, 0)], TWO, SLOW)
    two = exchange_seconds([exchange(100, 0), exchange(100, 1)], TWO, SLOW)
    assert two == pytest.approx(one + 0.1 + 100 / 5)  # the second is fetched after the first
    busy = dataclasses.replace(SLOW, store_put=1e9, store_get=1e9, store_add=1.0)
    alone = exchange_seconds([exchange(100, 0), exchange(100, 0)], TWO, busy)
    shared = exchange_seconds([exchange(100, 0), exchange(100, 1)], TWO, busy)
    assert alone == pytest.approx(2 * shared, rel=1e-2)


def test_what_is_needed_before_the_loss_comes_before_it():
    before, after = exchange(100, 0, "gather", "before"), exchange(100, 1)
    both = exchange_seconds([before, after], TWO, SLOW)
    assert both == pytest.approx(sum(exchange_seconds([x], TWO, SLOW) for x in (before, after)))


def test_the_predicted_step_has_them():
    fast = dataclasses.replace(SHAPE, store_put=1e15, store_add=1e15, store_get=1e15)
    plans = [planned(dataclasses.replace(fast, store_latency=s), servers=2) for s in (0.0, 1.0)]
    (free,), (late,) = (plan.stages for plan in plans)
    assert free.exchange_seconds == pytest.approx(0, abs=1e-6)
    assert late.exchange_seconds > 1
    longer = plans[1].predicted_step_seconds - plans[0].predicted_step_seconds
    assert longer == pytest.approx(late.exchange_seconds - free.exchange_seconds)


def test_measured_rates_are_those_of_the_next_plans(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = calibrated(SHAPE)
    path = keep_host_rates(SHAPE, RATES)
    assert calibrated(SHAPE) == RATES.applied(before)
    assert calibrated(local_shape(8, 2, "cpu")).store_put == before.store_put  # other workers
    path.write_text('{"latency": "now"}')
    assert calibrated(SHAPE) == before


def test_the_table_says_what_crosses():
    text = server_line(planned(servers=2))
    assert text.startswith("2 parameter servers (4.00 MiB, 4.00 MiB): each of 4 ")
    assert server_line(DataParallel().plan(STEP, SHAPE)) == ""
