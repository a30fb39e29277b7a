"""How a plan runs: stage programs, instruction lists, the interpreter. Imports `trace`, `plan`."""

from launcher.runtime.executable import Executable, StageTimes, compile_step

__all__ = ["Executable", "StageTimes", "compile_step"]
