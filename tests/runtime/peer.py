"""One of several processes that train the same model together; `test_processes` starts it.

    python peer.py INDEX COUNT COORDINATOR DEVICES

Prints a line of JSON: the losses that this process knows, and what it holds at the end. Settings
with "ahead" run so many steps without ever waiting, and tell the last loss alone.
"""

import faulthandler
import functools
import hashlib
import json
import os
import sys
from types import SimpleNamespace
from unittest import mock

INDEX, COUNT, COORDINATOR, DEVICES = (
    int(sys.argv[1]),
    int(sys.argv[2]),
    sys.argv[3],
    int(sys.argv[4]),
)
os.environ["NPROC"] = str(DEVICES + 2)  # threads, see launcher.cluster.ray.session
os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import plans  # noqa: E402
from jax._src import distributed  # noqa: E402  (the key-value store: tests need no driver)
from trainings import training  # noqa: E402

from launcher.plan import local_shape  # noqa: E402
from launcher.plan.methods import ManualStageOption, PipeshardParallel  # noqa: E402
from launcher.runtime import (  # noqa: E402
    PermuteTransport,
    PullTransport,
    compile_step,
)
from launcher.trace import trace_step  # noqa: E402

COMPILING = sys.modules[compile_step.__module__]


@functools.lru_cache(1)
def prepared(words):
    """Of the settings `words`, without a transport: the traced step, its plan, `init`, the batches,
    and what compiles the plan's programs once. They are the same by every transport, and most of
    the work."""
    settings = json.loads(words)
    step, init, batches = training(settings.pop("training", "tiny"))
    traced = trace_step(step, (jax.eval_shape(init, jax.random.key(0)), batches[0]))
    plan = planned(traced, local_shape(COUNT * DEVICES, COUNT, "cpu"), settings)
    compilation, kept = COMPILING.Compilation, []

    def compile_once(*args, **kwargs):
        kept.extend([] if kept else [compilation(*args, **kwargs).result()])
        return SimpleNamespace(programs=[], result=lambda: kept[0])

    return traced, plan, init, batches, compile_once


def planned(traced, cluster, settings):
    """By the settings' words: a plan of `plans`, a seed for one at random, a method's name, or the
    fields of a `ManualStageOption`."""
    if "plan" in settings:
        return plans.by_name(traced, settings["plan"], cluster)
    if "seed" in settings:
        return plans.at_random(traced, settings["seed"], cluster)
    if "method" in settings:
        return plans.from_words(**settings).plan(traced, cluster)
    return PipeshardParallel(3, stage_option=ManualStageOption(**settings)).plan(traced, cluster)


MOST_SECONDS = 200  # for each of the settings; what takes longer hangs


def held(leaves):
    """The bits that this process holds of some arrays, in short."""
    shards = [shard.data for x in leaves for shard in x.addressable_shards]
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in shards)).hexdigest()


def main() -> None:
    jax.distributed.initialize(COORDINATOR, COUNT, INDEX)
    store = distributed.global_state.client
    pull = PullTransport()
    store.key_value_set(f"address_{INDEX}", pull.address)
    transports = {"pull": pull, "collective": PermuteTransport()}
    addresses = [store.blocking_key_value_get(f"address_{i}", 60_000) for i in range(COUNT)]
    for transport in transports.values():
        transport.connect(addresses)
    found = {}
    for settings in json.loads(sys.stdin.read()):
        print(settings, file=sys.stderr, flush=True)  # of a failure's output the last
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        words = {k: v for k, v in settings.items() if k not in ("transport", "ahead")}
        transport = transports[settings.get("transport", "pull")]
        traced, plan, init, batches, compile_once = prepared(json.dumps(words))
        with mock.patch.object(COMPILING, "Compilation", compile_once):
            step = compile_step(traced, plan, jax.devices(), transport)
        state = step.create(init, jax.random.key(0))
        losses, ahead = [], settings.get("ahead", 0)
        for k in range(ahead):
            state, loss = step(state, batches[k % len(batches)])
        if ahead and loss.addressable_shards:
            losses.append(float(loss.addressable_data(0)))
        for k, batch in enumerate(batches if not ahead else ()):
            run = step.profile if k == 1 else lambda *args: (step(*args), None)  # noqa: B023
            (state, loss), _ = run(state, batch)
            if loss.addressable_shards:
                losses.append(float(loss.addressable_data(0)))
        leaves = jax.tree.leaves(state)
        jax.block_until_ready([x for x in leaves if x.addressable_shards])
        here = sum(int(np.prod(x.shape)) for x in leaves if x.addressable_shards)
        found[json.dumps(settings)] = {
            "losses": losses, "elements_here": here, "state": held(leaves)
        }  # fmt: skip
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


main()
