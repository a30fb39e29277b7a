"""Execution of a plan: stage programs, instruction lists and the loop that runs them.

Imports `plan`, by its door, and below.
"""

from launcher.runtime.emit.instructions import ExchangeSpec
from launcher.runtime.execute.executable import Executable, StepServices, transformed_error
from launcher.runtime.execute.replicas import (
    ReplicaError,
    check_equal,
    named_values,
    odd_replicas,
    shared_copies,
    with_first_replicas,
    with_values,
)
from launcher.runtime.observe.digests import Copies, Digester
from launcher.runtime.observe.recording import StageTimes
from launcher.runtime.programs.compilation_cache import keep_compiled, why_not_kept
from launcher.runtime.programs.compile_step import StepCompilation, compile_step, wait_for_more
from launcher.runtime.transport.permute import PermuteTransport
from launcher.runtime.transport.pull import PullTransport
from launcher.runtime.transport.servers import Servers
from launcher.runtime.transport.transfer import move, wait_for
from launcher.runtime.transport.transport import (
    ProcessMismatchError,
    Transport,
    fail_together,
    make_transport,
)

__all__ = [
    "Copies",
    "Digester",
    "ExchangeSpec",
    "Executable",
    "PermuteTransport",
    "ProcessMismatchError",
    "PullTransport",
    "ReplicaError",
    "Servers",
    "StageTimes",
    "StepCompilation",
    "StepServices",
    "Transport",
    "check_equal",
    "compile_step",
    "fail_together",
    "keep_compiled",
    "make_transport",
    "move",
    "named_values",
    "odd_replicas",
    "shared_copies",
    "transformed_error",
    "wait_for",
    "wait_for_more",
    "why_not_kept",
    "with_first_replicas",
    "with_values",
]
