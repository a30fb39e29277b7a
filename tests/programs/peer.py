"""One of several processes that run programs of the table; `test_two_processes` starts it.

    python peer.py INDEX COUNT COORDINATOR DEVICES

Reads pairs of a program and a method as JSON; holds what this process has of every step's results
against one device, and prints for each pair how many arrays that were, and what is wrong.
"""

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path

INDEX, COUNT, COORDINATOR = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
DEVICES = int(sys.argv[4])
os.environ["NPROC"] = str(DEVICES + 2)  # threads, see launcher.cluster.ray.session
os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES}"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax._src import distributed  # noqa: E402  (the key-value store: tests need no driver)
from programs.program import METHODS, STEPS, one_device, plain  # noqa: E402

import launcher  # noqa: E402
from launcher.plan import local_shape  # noqa: E402
from launcher.runtime import PullTransport, compile_step  # noqa: E402
from launcher.trace import trace_step  # noqa: E402

MOST_SECONDS = 60  # for each program; what takes longer hangs


def compared(program, method, transport):
    """How many arrays, or parts of them, of this process equal those of one device."""
    step = program.build(launcher.value_and_grad)
    traced = trace_step(step, (program.init(), program.batch(0)))
    plan = METHODS[method].plan(traced, local_shape(COUNT * DEVICES, COUNT, "cpu"))
    executable = compile_step(traced, plan, jax.devices(), transport)
    state, found = executable.create(program.init), []
    for k in range(STEPS):
        state, metrics = executable(state, program.batch(k))
        found.append([shards(x) for x in jax.tree.leaves((state, metrics))])
    slices = 1 if program.reference is None else plan.num_micro_batches * plan.num_replicas
    count = 0
    for got, want in zip(found, one_device(program, slices), strict=True):
        for a, b in zip(got, jax.tree.leaves(want), strict=True):
            scale = 1e-5 * float(np.abs(b).max(initial=0))
            for index, values in a:
                np.testing.assert_allclose(values, np.asarray(b)[index], rtol=1e-5, atol=scale)
                count += 1
    return count


def shards(x):
    """What this process holds of an array: where, and the values. The next step consumes it."""
    return [(shard.index, np.array(plain(shard.data))) for shard in x.addressable_shards]


def main() -> None:
    jax.distributed.initialize(COORDINATOR, COUNT, INDEX)
    from programs.table import PROGRAMS  # it makes arrays: not before the processes are together

    store = distributed.global_state.client
    pull = PullTransport()
    store.key_value_set(f"address_{INDEX}", pull.address)
    pull.connect([store.blocking_key_value_get(f"address_{i}", 60_000) for i in range(COUNT)])
    told = []
    for name, method in json.loads(sys.stdin.read()):
        print(name, method, file=sys.stderr, flush=True)  # of a failure's output the last
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        try:
            told.append([compared(PROGRAMS[name], method, pull), ""])
        except AssertionError:  # whatever else it is, the other processes wait for this one
            told.append([0, traceback.format_exc(limit=-3)])
    print(json.dumps(told), flush=True)
    jax.distributed.shutdown()


main()
