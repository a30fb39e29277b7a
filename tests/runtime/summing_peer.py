"""One of several processes that sum gradients; `test_shared_sum` starts it.

    python summing_peer.py INDEX COUNT COORDINATOR DEVICES

Prints a line of JSON: of each of the settings on standard input the losses, the bits of the state,
what carries out its sums, and the arrays of each all-reduce of its programs. Settings with "dies"
have the last process killed where it meets the others for the so-manieth time, and end all.
"""

import hashlib
import json
import os
import re
import signal
import sys
from pathlib import Path

INDEX, COUNT, COORDINATOR, DEVICES = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ["NPROC"] = str(int(DEVICES) + 2)  # threads, see launcher.cluster.ray.session
os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import plans  # noqa: E402
from jax._src import distributed  # noqa: E402  (the key-value store: tests need no driver)
from trainings import training  # noqa: E402

from launcher.plan import local_shape  # noqa: E402
from launcher.runtime import PullTransport, compile_step  # noqa: E402
from launcher.runtime.transport.shared_sum import SharedSum  # noqa: E402
from launcher.trace import trace_step  # noqa: E402

ALL_REDUCE = re.compile(r"= \S.* all-reduce\(([^)]*)\)")


def killed_at(call):
    """Have this process killed where it meets others for the `call`th time."""
    meet, left = SharedSum._meet, iter(range(call))

    def meet_or_die(of):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        meet(of)

    SharedSum._meet = meet_or_die


def held(state):
    """The bits that this process holds of a state, by device."""
    digests = {}
    for array in jax.tree.leaves(state):
        for shard in array.addressable_shards:
            digest = digests.setdefault(shard.device.id, hashlib.sha256())
            digest.update(np.asarray(shard.data).tobytes())
    return [digest.hexdigest() for _, digest in sorted(digests.items())]


def trained(transport, settings):
    dies = settings.pop("dies", None)
    step, init, batches = training(settings.pop("training", "tiny"))
    example = jax.eval_shape(init, jax.random.key(0)), batches[0]
    traced = trace_step(step, example)
    cluster = local_shape(COUNT * int(DEVICES), COUNT, "cpu")
    run = compile_step(
        traced, plans.from_words(**settings).plan(traced, cluster), jax.devices(), transport
    )
    state, losses = run.create(init, jax.random.key(0)), []
    if dies is not None and INDEX == COUNT - 1:
        killed_at(dies)
    for batch in batches:
        state, loss = run(state, batch)
        if loss.addressable_shards:
            losses.append(float(loss.addressable_data(0)))
    texts, maps = run.hlo_text(), Path("/proc/self/maps").read_text().splitlines()
    calls = [entry.call for entry in run._table.entries]
    return {
        "losses": losses,
        "state": held(state),
        "mapped": sorted({line.split(maxsplit=5)[5] for line in maps if "rw-s" in line}),
        "in_memory": sum(isinstance(call, SharedSum) for call in calls),
        "all_reduces": [
            found.count("%") for text in texts.values() for found in ALL_REDUCE.findall(text)
        ],
    }


def main() -> None:
    jax.distributed.initialize(COORDINATOR, COUNT, INDEX)
    store, transport = distributed.global_state.client, PullTransport()
    store.key_value_set(f"address_{INDEX}", transport.address)
    transport.connect([store.blocking_key_value_get(f"address_{i}", 60_000) for i in range(COUNT)])
    near, told = transport.neighbours, []
    for settings in json.loads(sys.stdin.read()):
        transport.neighbours = near if settings.pop("together", True) else {}
        try:
            told.append(trained(transport, settings))
        except ConnectionError as error:
            print(json.dumps([type(error).__name__, str(error)]), flush=True)
            os._exit(0)  # JAX would wait for the process that is gone
    print(json.dumps(told), flush=True)
    jax.distributed.shutdown()


main()
