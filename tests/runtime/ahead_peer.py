"""One of several processes that run many steps without ever waiting; `test_throttle` starts it.

    python ahead_peer.py INDEX COUNT COORDINATOR DEVICES STEPS TRANSPORT

Reads the plans' settings from its input, one list of JSON; prints for each the last loss it knows.
"""

import json
import os
import sys

INDEX, COUNT, COORDINATOR = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
DEVICES, STEPS, TRANSPORT = int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
from jax._src import distributed  # noqa: E402  (the key-value store: tests need no driver)
from plans import from_words  # noqa: E402
from tiny import BATCHES, init, step  # noqa: E402

from launcher.plan import local_shape  # noqa: E402
from launcher.runtime import (  # noqa: E402
    PermuteTransport,
    PullTransport,
    compile_step,
)
from launcher.trace import trace_step  # noqa: E402


def main() -> None:
    jax.distributed.initialize(COORDINATOR, COUNT, INDEX)
    store = distributed.global_state.client
    pull = PullTransport()
    store.key_value_set(f"address_{INDEX}", pull.address)
    pull.connect([store.blocking_key_value_get(f"address_{i}", 60_000) for i in range(COUNT)])
    transport = PermuteTransport() if TRANSPORT == "collective" else pull
    traced = trace_step(step, (jax.eval_shape(init, jax.random.key(0)), BATCHES[0]))
    found = []
    for settings in json.loads(sys.stdin.read()):
        cluster = local_shape(COUNT * DEVICES, COUNT, "cpu")
        plan = from_words(**settings).plan(traced, cluster)
        executable = compile_step(traced, plan, jax.devices(), transport)
        state = executable.create(init, jax.random.key(0))
        for k in range(STEPS):
            state, loss = executable(state, BATCHES[k % len(BATCHES)])
        jax.block_until_ready([x for x in jax.tree.leaves(state) if x.addressable_shards])
        found.append(float(loss.addressable_data(0)) if loss.addressable_shards else None)
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


main()
