"""Execution of a plan: stage programs, instruction lists and the loop that runs them.

Imports `plan`, by its door, and below.
"""

from launcher.runtime.compiled_report import CompiledStep as CompiledStep
from launcher.runtime.described import Target as Target
from launcher.runtime.described import compile_for as compile_for
from launcher.runtime.described import compile_now as compile_now
from launcher.runtime.described import target_for as target_for
from launcher.runtime.described import target_of as target_of
from launcher.runtime.dispatch_table import StepServices as StepServices
from launcher.runtime.emit.instructions import ExchangeSpec as ExchangeSpec
from launcher.runtime.executable import Executable as Executable
from launcher.runtime.executable import transformed_error as transformed_error
from launcher.runtime.programs.choices import KernelChoices as KernelChoices
from launcher.runtime.programs.choices import choices_in as choices_in
from launcher.runtime.programs.compilation_cache import keep_compiled as keep_compiled
from launcher.runtime.programs.compilation_cache import why_not_kept as why_not_kept
from launcher.runtime.programs.compile import Locality as Locality
from launcher.runtime.programs.compile import StepCompilation as StepCompilation
from launcher.runtime.programs.compile import compile_step as compile_step
from launcher.runtime.programs.compile import locality_of as locality_of
from launcher.runtime.programs.compile import lower_ahead as lower_ahead
from launcher.runtime.programs.compile import wait_for_more as wait_for_more
from launcher.runtime.recording import StageTimes as StageTimes
from launcher.runtime.replicas import Copies as Copies
from launcher.runtime.replicas import Digester as Digester
from launcher.runtime.replicas import ReplicaError as ReplicaError
from launcher.runtime.replicas import check_equal as check_equal
from launcher.runtime.replicas import leaf_name as leaf_name
from launcher.runtime.replicas import named_values as named_values
from launcher.runtime.replicas import odd_replicas as odd_replicas
from launcher.runtime.replicas import shared_copies as shared_copies
from launcher.runtime.replicas import with_first_replicas as with_first_replicas
from launcher.runtime.replicas import with_values as with_values
from launcher.runtime.transport.permute import PermuteTransport as PermuteTransport
from launcher.runtime.transport.pull import PullTransport as PullTransport
from launcher.runtime.transport.transfer import move as move
from launcher.runtime.transport.transfer import plain_aval as plain_aval
from launcher.runtime.transport.transfer import wait_for as wait_for
from launcher.runtime.transport.transport import ProcessMismatchError as ProcessMismatchError
from launcher.runtime.transport.transport import Transport as Transport
from launcher.runtime.transport.transport import fail_together as fail_together
from launcher.runtime.transport.transport import make_transport as make_transport
