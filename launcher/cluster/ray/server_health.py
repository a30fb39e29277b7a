"""Which parameter servers have ended or hang, as the driver finds out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.cluster.errors import WorkerError
from launcher.cluster.ray.worker import WorkerHandle


def ended(servers: Sequence[WorkerHandle]) -> WorkerError | None:
    """Return the death of one of `servers`; None if all live. It waits for nothing."""
    import ray

    lives = {server.life: server for server in servers}
    for life in _over(list(lives), 0):
        try:
            ray.get(life)
        except ray.exceptions.RayError as error:
            return lives[life].death(str(error))
    return None


def silent(servers: Sequence[WorkerHandle], seconds: float) -> list[WorkerHandle]:
    """Return those of `servers` that hang: they answer no new call within `seconds`.

    One that has ended is not among them.
    """
    calls = {server.ping(): server for server in servers}
    over = _over(list(calls), seconds)
    return [server for call, server in calls.items() if call not in over]


def _over(calls: list[Any], seconds: float) -> list[Any]:
    """Return the calls that are over after so many seconds; all, if Ray itself has ended."""
    import ray

    if not calls:
        return []
    try:
        return ray.wait(calls, num_returns=len(calls), timeout=seconds)[0]
    except ray.exceptions.RayError:
        return calls
