"""Starts one process of Ray's with an object in it: a worker, or a parameter server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.base.files import open_own
from launcher.cluster.ray import ray_compat, worker_actor
from launcher.cluster.ray.parameter_server import ExchangeServer
from launcher.cluster.ray.worker import WorkerHandle


def start_worker(
    made_by: tuple[type, Sequence[Any]],
    options: Mapping[str, Any],
    environ: dict[str, str],
    log: Path | None,
    where: tuple[int, str],
) -> WorkerHandle:
    """Have Ray start a worker's process and build its object, and wait for neither.

    Args:
        made_by: the object's class and arguments.
        options: Ray's options of the actor.
        environ: the process's environment.
        log: the file for its output; None leaves that to Ray.
        where: the host's index in the pool, and its address.

    Raises:
        OSError: the log cannot be written.
    """
    actor = _actor(worker_actor.Worker, options, environ, log)
    handle = WorkerHandle(actor, where[0], log or Path(os.devnull), where[1])
    actor.construct.remote(ray_compat.dumps(made_by))
    return handle


def start_server(
    number: int,
    workers: int,
    options: Mapping[str, Any],
    environ: dict[str, str],
    log: Path | None,
    where: tuple[int, str],
) -> WorkerHandle:
    """Have Ray start a parameter server's process; see `start_worker`.

    Args:
        number: the server's number.
        workers: the number of workers that it serves.
        options: Ray's options of the actor.
        environ: the process's environment.
        log: the file for its output; None leaves that to Ray.
        where: the host's index in the pool, and its address.
    """
    actor = _actor(worker_actor.Server, options, environ, log)
    handle = WorkerHandle(actor, where[0], log or Path(os.devnull), where[1], number)
    actor.construct.remote(ray_compat.dumps((ExchangeServer, (workers,))))
    return handle


def _actor(
    actor_class: type, options: Mapping[str, Any], environ: dict[str, str], log: Path | None
) -> Any:
    import ray

    # It runs before anything of this package can be imported.
    ray_compat.register_by_value(worker_actor)
    if log is not None:
        os.close(open_own(log, os.O_WRONLY))
    search_path = [os.path.abspath(entry) for entry in sys.path]
    made: Any = ray.remote(**options)(actor_class)
    return made.remote(environ, search_path, os.getcwd(), log and str(log))
