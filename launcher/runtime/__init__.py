"""Execution of a plan: stage programs, instruction lists and the loop that runs them.

Imports `plan`, by its door, and below.
"""

from launcher.runtime.digests import Copies, Digester
from launcher.runtime.executable import Executable, StageTimes, compile_step, transformed_error
from launcher.runtime.kept import keep_compiled, why_not_kept
from launcher.runtime.permute import PermuteTransport
from launcher.runtime.replicas import (
    ReplicaError,
    check_equal,
    odd_replicas,
    shared_copies,
    with_first_replicas,
)
from launcher.runtime.transfer import move
from launcher.runtime.transport import ProcessMismatchError, PullTransport, Transport, fail_together

__all__ = [
    "Copies",
    "Digester",
    "Executable",
    "PermuteTransport",
    "ProcessMismatchError",
    "PullTransport",
    "ReplicaError",
    "StageTimes",
    "Transport",
    "check_equal",
    "compile_step",
    "fail_together",
    "keep_compiled",
    "move",
    "odd_replicas",
    "shared_copies",
    "transformed_error",
    "why_not_kept",
    "with_first_replicas",
]
