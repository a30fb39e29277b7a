"""Tokens by a run's model, on the devices that its plan puts it on.

A model on one device needs no other process. One that the plan shards, or whose stages lie apart,
is read by workers, one a host, as a training is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launcher.cluster.devices import DevicePool, find_devices
from launcher.cluster.ray.private_ray import start
from launcher.cluster.worker_group import WorkerGroup
from launcher.config.compose import to_dict
from launcher.config.machines import machines_of
from launcher.config.schema import Config
from launcher.plan import Plan, PlanError
from launcher.report.console import status
from launcher.train.checkpoint import FinishedModel
from launcher.train.text_layout import TextLayout, layout_of
from launcher.train.text_worker import TextWorker

_log = logging.getLogger(__name__)


def tokens_of(
    config: Config,
    settings: Config,
    source: Path,
    plan: Plan | None,
    prompts: Sequence[Sequence[int]],
    console: Console,
) -> Iterator[list[int]]:
    """Yield the next token of each prompt, as often as `generate.max_new_tokens` says.

    Args:
        config: the settings of this task.
        settings: the run's.
        source: the checkpoint.
        plan: the plan that has trained it, if it is known.
        prompts: the tokens of each prompt.
        console: where progress is shown.

    Raises:
        Mismatch: the checkpoint cannot be read.
        InputError: the model has no decoder.
        ConfigError: the devices asked for are not here.
        ClusterError: the workers could not be started.
        WorkerError: a worker raised an exception.
    """
    settings = replace(settings, generate=config.generate)
    pool = find_devices(config.cluster)
    model = FinishedModel(source, settings.optimizer.lora, config.generate.ema)
    layout = layout_of(plan, model.shapes, pool.num_devices)
    given = to_dict(settings), str(source.absolute()), layout, [list(p) for p in prompts]
    reading = f"reading {source}"
    if layout.num_devices == 1:
        worker = TextWorker()
        with status(console, reading):
            worker.begin(*given)
        while (tokens := worker.more()) is not None:
            yield tokens
        return
    pool = _part_of(pool, layout)
    _log.info(f"{reading} onto {layout.num_devices} devices, as its plan shards it")
    with start(pool, None) as session:
        timeout = machines_of(config.cluster).step_timeout
        with status(console, "starting Ray and the workers"):
            workers = session.spawn(TextWorker)
            group = WorkerGroup(workers, session.check, timeout, "cluster.step_timeout")
            group.join()
        with status(console, reading):
            group.gather(group.submit("begin", *given), starting=True)
        while True:
            found, *_ = group.gather(group.submit("more"), starting=True)
            if found is None:
                return
            yield found


def stored_plan(home: Path) -> Plan | None:
    """Return the plan in a run's folder, or None if it is not there or of another version."""
    try:
        return Plan.from_dict(json.loads((home / "plan.json").read_text()))
    except (OSError, ValueError, PlanError):
        return None


def _part_of(pool: DevicePool, layout: TextLayout) -> DevicePool:
    """Return the hosts that hold the first devices, those of the layout."""
    return replace(pool, hosts=-(-layout.num_devices // pool.devices_per_host))
