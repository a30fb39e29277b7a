"""How a plan runs: stage programs, instruction lists, the interpreter. Imports `trace`, `plan`."""

from launcher.runtime.executable import Executable, StageTimes, compile_step
from launcher.runtime.transfer import move
from launcher.runtime.transport import PullTransport, Transport

__all__ = ["Executable", "PullTransport", "StageTimes", "Transport", "compile_step", "move"]
