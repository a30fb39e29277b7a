"""Public description of a worker process. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerInfo:
    """A process that runs a plan.

    Attributes:
        host: its index among the workers, as in a stage's `hosts`.
        address: the address of its machine; 127.0.0.1 where all workers are on the driver's.
        process: its process number on that machine.
        devices: its devices, as the plan counts them.
    """

    host: int
    address: str
    process: int
    devices: tuple[int, ...]
