"""Execution of a plan: stage programs, instruction lists and the loop that runs them.

Imports `plan`, by its door, and below.
"""

from launcher.runtime.executable import Executable, StageTimes, compile_step
from launcher.runtime.kept import keep_compiled, why_not_kept
from launcher.runtime.permute import PermuteTransport
from launcher.runtime.transfer import move
from launcher.runtime.transport import NotMetError, PullTransport, Transport, met_by_all

__all__ = [
    "Executable",
    "NotMetError",
    "PermuteTransport",
    "PullTransport",
    "StageTimes",
    "Transport",
    "compile_step",
    "keep_compiled",
    "met_by_all",
    "move",
    "why_not_kept",
]
