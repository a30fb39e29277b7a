"""The train step as data."""

from launcher.trace.auto_layers import LayerEnds as LayerEnds
from launcher.trace.auto_layers import cluster_layers as cluster_layers
from launcher.trace.auto_layers import layer_ends_at as layer_ends_at
from launcher.trace.errors import BatchError, BoundaryError, GradientError, JoinedError, TraceError
from launcher.trace.errors import LayerCountError as LayerCountError
from launcher.trace.interface import Interface as Interface
from launcher.trace.interface import arrays_only as arrays_only
from launcher.trace.interface import fixed as fixed
from launcher.trace.interface import leaf_names as leaf_names
from launcher.trace.interface import no_array as no_array
from launcher.trace.interface import unfixed as unfixed
from launcher.trace.ir.cost import backward_share as backward_share
from launcher.trace.ir.cost import flops as flops
from launcher.trace.ir.cost import is_fused_attention as is_fused_attention
from launcher.trace.ir.cost import is_unaligned as is_unaligned
from launcher.trace.ir.cost import matmul_flops as matmul_flops
from launcher.trace.ir.cost import moved_bytes as moved_bytes
from launcher.trace.ir.cost import program_flops as program_flops
from launcher.trace.ir.cudnn import described_cudnn as described_cudnn
from launcher.trace.ir.factors import Factor as Factor
from launcher.trace.ir.factors import Place as Place
from launcher.trace.ir.factors import factors as factors
from launcher.trace.ir.jaxpr import Atom as Atom
from launcher.trace.ir.jaxpr import Aval as Aval
from launcher.trace.ir.jaxpr import Body as Body
from launcher.trace.ir.jaxpr import Equation as Equation
from launcher.trace.ir.jaxpr import Jaxpr as Jaxpr
from launcher.trace.ir.jaxpr import Var as Var
from launcher.trace.ir.jaxpr import bodies as bodies
from launcher.trace.ir.jaxpr import called_instead as called_instead
from launcher.trace.ir.jaxpr import captured as captured
from launcher.trace.ir.jaxpr import checkpoint_policy as checkpoint_policy
from launcher.trace.ir.jaxpr import dependents as dependents
from launcher.trace.ir.jaxpr import free_vars as free_vars
from launcher.trace.ir.jaxpr import has_tangent as has_tangent
from launcher.trace.ir.jaxpr import inline_calls as inline_calls
from launcher.trace.ir.jaxpr import is_checkpoint as is_checkpoint
from launcher.trace.ir.jaxpr import is_var as is_var
from launcher.trace.ir.jaxpr import jaxpr_as_fun as jaxpr_as_fun
from launcher.trace.ir.jaxpr import lift_constants as lift_constants
from launcher.trace.ir.jaxpr import make_jaxpr as make_jaxpr
from launcher.trace.ir.jaxpr import make_jaxpr_and_shape as make_jaxpr_and_shape
from launcher.trace.ir.jaxpr import nbytes as nbytes
from launcher.trace.ir.jaxpr import needed as needed
from launcher.trace.ir.jaxpr import read_jaxpr as read_jaxpr
from launcher.trace.ir.jaxpr import renamed as renamed
from launcher.trace.ir.jaxpr import replace_bodies as replace_bodies
from launcher.trace.ir.jaxpr import runs_again as runs_again
from launcher.trace.ir.jaxpr import scan_counts as scan_counts
from launcher.trace.ir.jaxpr import source_line as source_line
from launcher.trace.ir.jaxpr import splice as splice
from launcher.trace.ir.jaxpr import structure_text as structure_text
from launcher.trace.ir.jaxpr import sub_jaxprs as sub_jaxprs
from launcher.trace.ir.jaxpr import walk as walk
from launcher.trace.ir.kernels import Kernel as Kernel
from launcher.trace.ir.kernels import call_kernel as call_kernel
from launcher.trace.ir.primitive_kinds import BARRIERS as BARRIERS
from launcher.trace.ir.primitive_kinds import BROADCASTS as BROADCASTS
from launcher.trace.ir.primitive_kinds import CALLS_WITH_RULES as CALLS_WITH_RULES
from launcher.trace.ir.primitive_kinds import CHEAP as CHEAP
from launcher.trace.ir.primitive_kinds import CONTRACTIONS as CONTRACTIONS
from launcher.trace.ir.primitive_kinds import CONVERSIONS as CONVERSIONS
from launcher.trace.ir.primitive_kinds import COSTLY as COSTLY
from launcher.trace.ir.primitive_kinds import CUSTOM_VJPS as CUSTOM_VJPS
from launcher.trace.ir.primitive_kinds import FORMS as FORMS
from launcher.trace.ir.primitive_kinds import FUSED as FUSED
from launcher.trace.ir.primitive_kinds import GRADIENT_SUMS as GRADIENT_SUMS
from launcher.trace.ir.primitive_kinds import IN_PLACE as IN_PLACE
from launcher.trace.ir.primitive_kinds import IN_STEPS as IN_STEPS
from launcher.trace.ir.primitive_kinds import LENGTHENING as LENGTHENING
from launcher.trace.ir.primitive_kinds import LOOPS as LOOPS
from launcher.trace.ir.primitive_kinds import MAX_POOL_GRADIENTS as MAX_POOL_GRADIENTS
from launcher.trace.ir.primitive_kinds import MOVES as MOVES
from launcher.trace.ir.primitive_kinds import NEGATIONS as NEGATIONS
from launcher.trace.ir.primitive_kinds import OTHER_DIMS as OTHER_DIMS
from launcher.trace.ir.primitive_kinds import OWN_KERNELS as OWN_KERNELS
from launcher.trace.ir.primitive_kinds import PARTIAL_SUMS as PARTIAL_SUMS
from launcher.trace.ir.primitive_kinds import PRODUCTS as PRODUCTS
from launcher.trace.ir.primitive_kinds import RECOMPUTED as RECOMPUTED
from launcher.trace.ir.primitive_kinds import REDUCTIONS as REDUCTIONS
from launcher.trace.ir.primitive_kinds import SEARCHES as SEARCHES
from launcher.trace.ir.primitive_kinds import SPREADING as SPREADING
from launcher.trace.ir.primitive_kinds import UNPARTITIONED as UNPARTITIONED
from launcher.trace.ir.wide_products import products_in_fp32 as products_in_fp32
from launcher.trace.open_scans import Stacks as Stacks
from launcher.trace.open_scans import may_open as may_open
from launcher.trace.open_scans import with_rows_apart as with_rows_apart
from launcher.trace.primitives import grad as grad
from launcher.trace.primitives import mark_pipeline_boundary as mark_pipeline_boundary
from launcher.trace.primitives import microbatched as microbatched
from launcher.trace.primitives import per_slice as per_slice
from launcher.trace.primitives import value_and_grad as value_and_grad
from launcher.trace.slicing.draws import may_be_raw_key as may_be_raw_key
from launcher.trace.slicing.slices import ANY_LAYER as ANY_LAYER
from launcher.trace.slicing.slices import Loss
from launcher.trace.step import TracedStep, trace_step
from launcher.trace.step import no_gradient_note as no_gradient_note
from launcher.trace.step import reached_by_gradients as reached_by_gradients
from launcher.trace.step import trace_users as trace_users

__all__ = [
    "BatchError",
    "BoundaryError",
    "GradientError",
    "JoinedError",
    "Loss",
    "TraceError",
    "TracedStep",
    "trace_step",
]
