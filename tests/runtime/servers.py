"""Parameter servers in memory, and workers in threads, each with emulated devices of its own."""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from launcher.plan import local_shape
from launcher.runtime import compile_step

SECONDS = 60  # after which a worker that waits fails


class Store:
    """What the workers have given so far, and who waits for it."""

    def __init__(self, count, delays=None):
        self.count, self.delays = count, delays
        self.parts, self.changed = {}, threading.Condition()
        self.broken = None


class InMemory:
    """The servers as worker `rank` sees them; parts may arrive in any order, by `delays`."""

    def __init__(self, store, rank):
        self.store, self.rank, self.count = store, rank, store.count
        self.specs, self.calls = [], itertools.count()

    def open(self, exchanges):
        self.specs += exchanges
        return len(self.specs) - len(exchanges)

    def reserve(self):
        return next(self.calls)

    def put(self, call, exchange, part):
        spec = self.specs[exchange]
        assert (part.shape, part.dtype.name) == (spec.shape, spec.dtype)
        if self.store.delays:
            time.sleep(self.store.delays.random() / 200)
        with self.store.changed:
            self.store.parts.setdefault((call, exchange), {})[self.rank] = part
            self.store.changed.notify_all()

    def get(self, call, exchange):
        store, key = self.store, (call, exchange)
        with store.changed:
            done = store.changed.wait_for(
                lambda: store.broken or len(store.parts.get(key, ())) == self.count, SECONDS
            )
            if store.broken:
                raise store.broken
            assert done, "a part did not come"
            parts = [store.parts[key][rank] for rank in range(self.count)]
        return whole(self.specs[exchange], parts)


def whole(spec, parts):
    """What a server makes of parts in rank order: read-only, as what lies in a store."""
    if spec.kind == "gather":
        found = np.concatenate(parts)
    else:
        wide = np.promote_types(parts[0].dtype, np.float32)
        found = parts[0].astype(wide)
        for part in parts[1:]:
            found += part.astype(wide)
        found = found.astype(parts[0].dtype)
    found.flags.writeable = False
    return found


def planned(traced, method, workers, devices=4):
    return method.plan(traced, local_shape(devices, workers, "cpu"))


def on_workers(traced, plan, fun, seed=None):
    """What `fun(executable, rank)` returns on each worker."""
    count = plan.reduction.workers
    store = Store(count, seed is not None and random.Random(seed))
    each = plan.num_devices // count

    def work(rank):
        try:
            devices = jax.devices()[rank * each : (rank + 1) * each]
            servers = InMemory(store, rank) if count > 1 else None
            return fun(compile_step(traced, plan, devices, servers=servers), rank)
        except BaseException as error:  # nobody waits for this worker
            with store.changed:
                store.broken = store.broken or error
                store.changed.notify_all()
            raise

    with ThreadPoolExecutor(count) as pool:
        return [done.result() for done in [pool.submit(work, rank) for rank in range(count)]]


def own_rows(executable, batch):
    """The batch as a worker reads it: rows that its replicas do not need are not there."""
    rows = executable.batch_rows()

    def of(leaf):
        if rows is None or not leaf.shape:
            return leaf
        odd = np.full_like(leaf, np.nan if np.issubdtype(leaf.dtype, np.floating) else -1)
        odd[rows] = leaf[rows]
        return odd

    return jax.tree.map(of, batch)


def trained(traced, plan, init, batches, seed=None):
    """State and results of all steps on each worker, each of which has its own rows alone."""

    def run(executable, _):
        state, history = executable.create(init), []
        for batch in batches:
            state, found = executable(state, own_rows(executable, batch))
            history.append(found)
        return jax.device_get((state, history))

    return on_workers(traced, plan, run, seed)
