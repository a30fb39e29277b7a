"""A dataset that slows its run on demand, for `slowness.py`: it replaces parts of the engine.

Devices do not compute: each program waits for `PASS` seconds, as a GPU's host does, so that stages
do not take each other's cores. `now.json` in the working directory says what takes longer, in which
worker, and by how many seconds.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from launcher.recipes.datasets.synthetic import Synthetic
from launcher.recipes.datasets.synthetic.dataset import build as synthetic

PASS = 0.02
NOW = Path("now.json")
BALLAST = [[k] for k in range(100_000)]  # so that a collection takes some milliseconds


def due(kind: str) -> float:
    """Return the seconds by which this process is to be slowed in this way now."""
    if not NOW.exists():
        return 0.0
    now = json.loads(NOW.read_text())
    is_meant = now["kind"] == kind and now["worker"] == jax.process_index()
    return float(now["seconds"]) if is_meant else 0.0


def paced(kind: str, does: Callable[..., Any], wait: Callable[[], object]) -> Callable[..., Any]:
    """Return a function that returns no earlier than the due seconds after the return before."""
    before = time.perf_counter()

    def slowed(*given: Any) -> Any:
        nonlocal before
        result = does(*given)
        while time.perf_counter() < before + due(kind):
            wait()
        before = time.perf_counter()
        return result

    return slowed


def passing(hold: Callable[[], None]) -> Callable[..., Any]:
    """Return a function whose results are there after `hold`, which runs beside the caller."""
    programs: dict[Any, Any] = {}

    def held(*arrays: Any) -> Any:
        hold()
        return arrays

    def passed(arrays: Any) -> Any:
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        return jax.pure_callback(held, tuple(like), *arrays)

    def late(arrays: Any) -> Any:
        where = tuple(x.sharding for x in arrays)
        if where not in programs:
            programs[where] = jax.jit(passed, out_shardings=where)
        return programs[where](tuple(arrays))

    return late


def hold_up() -> None:
    """Replace the engine's parts in this process."""
    from launcher.runtime import executable
    from launcher.runtime.emit.instructions import Run
    from launcher.runtime.transport import pull
    from launcher.train.worker import TrainWorker

    build, arrive = executable.build_table, pull._Pulls.__call__
    busy: dict[int, threading.Lock] = defaultdict(threading.Lock)
    wire = threading.Lock()

    def held(entry: Any, count: int) -> Any:
        def on_device() -> None:
            with busy[entry.instruction.mesh]:
                time.sleep(PASS + due("host") / count)

        later = passing(on_device)

        def call(*arrays: Any) -> Any:
            time.sleep(due("dispatch") / count)
            return later(entry.call(*arrays))

        return entry._replace(call=call)

    def table(*given: Any) -> Any:
        built = build(*given)
        is_run = [isinstance(entry.instruction, Run) for entry in built.entries]
        both = zip(built.entries, is_run, strict=True)
        entries = tuple(held(entry, sum(is_run)) if its else entry for entry, its in both)
        object.__setattr__(built, "entries", entries)
        return built

    def on_the_wire() -> None:
        with wire:
            time.sleep(due("link"))

    on_wire = passing(on_the_wire)

    def arriving(self: Any, key: int, parts: Any) -> Any:
        found = arrive(self, key, parts)
        return dict(zip(found, on_wire(found.values()), strict=True)) if found else found

    executable.build_table, pull._Pulls.__call__ = table, arriving
    TrainWorker.step = paced("garbage", TrainWorker.step, gc.collect)


def check(options: Any, model_options: Any, validation: bool) -> None:
    """See `launcher.recipes`."""


def build(options: Any, model_options: Any, global_batch_size: int, seed: int) -> Any:
    """See `launcher.recipes`."""
    made = synthetic(Synthetic(), model_options, global_batch_size, seed)
    if not Path("/proc/self/cmdline").read_text().startswith("ray::"):
        return made
    hold_up()
    return made._replace(train=paced("data", made.train, lambda: time.sleep(0.001)))
