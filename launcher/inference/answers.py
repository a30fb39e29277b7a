"""Use a run's finished model on the devices that its plan assigns.

A model on one device needs no other process. One that the plan shards, or whose stages lie apart,
is read by workers, one a host, as a training is: no process holds the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher.checkpoint import FinishedModel, check_vocabulary
from launcher.cluster.kinds import find_devices
from launcher.cluster.ray.private_ray import PrivateRay
from launcher.cluster.worker_group import WorkerGroup
from launcher.config.cluster import machines_of
from launcher.config.compose import to_dict
from launcher.config.schema import Config
from launcher.inference.model_workers import EvaluationWorker, TextWorker
from launcher.inference.placed_model import layout_of
from launcher.plan import Plan
from launcher.report.console import status

_log = logging.getLogger(__name__)


@contextmanager
def model_answers(
    kind: type[TextWorker] | type[EvaluationWorker],
    settings: Config,
    source: Path,
    plan: Plan | None,
    ema: bool,
    given: tuple[Any, ...],
    console: Console,
) -> Iterator[Iterator[Any]]:
    """Yield what workers answer, until they have no more; they have read the model before.

    Args:
        kind: what they are.
        settings: what they are given; with the run's model and adapters, and this task's cluster.
        source: the checkpoint.
        plan: the plan that has trained it, if it is known.
        ema: whether to take the averages of the parameters.
        given: what else `begin` takes.
        console: where progress is shown.

    Raises:
        Mismatch: the checkpoint cannot be read, or is of another vocabulary.
        InputError: the model or the data cannot be used.
        ConfigError: the devices asked for are not here.
        ClusterError: the workers could not be started.
        WorkerError: a worker raised an exception.
    """
    pool = find_devices(settings.cluster)
    model = FinishedModel(source, settings.optimizer.lora, ema)
    check_vocabulary(settings.model, model.shapes)
    layout = layout_of(plan, model.shapes, pool.num_devices)
    begun = to_dict(settings), str(source.absolute()), layout, *given
    reading = f"reading {source}"
    if layout.num_devices == 1:
        worker = kind()
        with status(console, reading):
            worker.begin(*begun)
        yield iter(worker.more, None)
        return
    # The hosts that hold the first devices, those of the layout.
    pool = replace(pool, hosts=-(-layout.num_devices // pool.devices_per_host))
    _log.info(f"{reading} onto {layout.num_devices} devices, as its plan shards it")
    with PrivateRay(pool, None) as session:
        timeout = machines_of(settings.cluster).answer_timeout
        with status(console, "starting Ray and the workers") as advance:
            workers = session.spawn(kind, advance=advance)
            group = WorkerGroup(workers, session.check, timeout, "cluster.step_timeout")
            group.join(advance=advance)
        with status(console, reading) as advance:
            group.gather(group.call("begin", *begun), starting=True, advance=advance)
        yield iter(lambda: group.gather(group.call("more"), starting=True)[0], None)
