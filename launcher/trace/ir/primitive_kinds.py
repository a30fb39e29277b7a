"""The one table of primitives: which kinds each belongs to, by JAX's name for it.

`factors` says which dimensions of a primitive's operands and results run together, and
`jaxpr.bodies` which programs it holds; every other question about a primitive is answered by a set
in this table, and no other module lists names. To add an element-wise primitive, add one
word to `ELEMENTWISE`.
"""

from __future__ import annotations

# fmt: off

# Each element of the result is computed from the operands' elements at the same place. Operands
# have the result's shape, or are scalars.
ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a",
    "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p",
    "log2", "logistic", "lt", "lt_to", "max", "min", "mul", "name", "ne", "neg", "nextafter",
    "not", "one_minus_square", "or", "polygamma", "population_count", "pow", "real",
    "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n",
    "sharding_constraint", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
))
# Element-wise along the leading dimensions, but replicated by sharding: they are part of random
# number generation, which every device does whole.
UNSHARDED_ELEMENTWISE = frozenset(("bitcast_convert_type", "random_fold_in"))
# Element-wise ones that XLA expands to a loop, which it does not fuse.
_BY_LOOP = frozenset((
    "igamma", "igamma_grad_a", "igammac", "polygamma", "regularized_incomplete_beta",
))
# Element-wise ones that XLA does not duplicate into several fusions (`IsExpensive`).
COSTLY = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt",
    "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log",
    "log1p", "log2", "logistic", "pow", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
))
# Element-wise ones that XLA expands to several, of which XLA:CPU stores so many results.
IN_STEPS = {"erfc": 3}
# The gradient of a maximum over windows.
MAX_POOL_GRADIENTS = frozenset(("select_and_scatter_add",))

# Each result is an operand, unchanged.
BARRIERS = frozenset(("optimization_barrier",))

# The result holds the operand's elements in another order or shape.
_LAYOUT = frozenset((
    "broadcast_in_dim", "expand_dims", "reshape", "rev", "slice", "squeeze", "transpose",
))
# The result holds elements of the operands, unchanged.
SAME_ELEMENTS = _LAYOUT | BARRIERS | frozenset((
    "concatenate", "copy", "dynamic_slice", "dynamic_update_slice", "gather", "pad", "scatter",
    "select_n", "split", "stack", "tile", "unstack",
))
# Results hold elements of the first operand alone; the others, if any, say which.
MOVES = _LAYOUT | frozenset(("copy", "dynamic_slice", "gather", "split", "tile", "unstack"))
# The same values in another type.
CONVERSIONS = frozenset(("convert_element_type",))
# An operand fills a part of the result, which is longer.
LENGTHENING = frozenset(("concatenate", "pad"))
# The same values in another form: parts of a gradient can be added before it or after it.
FORMS = frozenset(("convert_element_type", "reshape", "squeeze", "transpose"))
# The same elements with other dimensions.
OTHER_DIMS = frozenset(("expand_dims", "reshape", "squeeze", "transpose"))

# The compiler fuses these into whatever reads them.
FUSED = (ELEMENTWISE - _BY_LOOP) | _LAYOUT | BARRIERS | frozenset(("iota", "pad"))
# The result may take an operand's place: XLA lets these share a buffer with one that dies.
IN_PLACE = FUSED | frozenset((
    "dynamic_update_slice", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul",
    "scatter-sub", "sort",
))
# The result repeats a smaller operand, or counts.
BROADCASTS = frozenset(("broadcast_in_dim", "iota"))
# Cheap enough to be recomputed in the backward pass. A barrier is there to prevent just that.
CHEAP = FUSED - BARRIERS

# Attention in one kernel, which holds no scores of pairs: how many products it is made of. Its
# gradient's kernel computes the scores again.
ATTENTION_PRODUCTS = {
    "dot_product_attention_fwd": 2, "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd": 5, "dot_product_attention_bwd_wrapper": 5,
}
# A product of two operands, in XLA's own terms.
CONTRACTIONS = frozenset(("dot_general", "conv_general_dilated"))
# Kernels that say themselves what a planner asks (`ir.kernels`), mostly products.
OWN_KERNELS = frozenset(("kernel",))
# Matrix products and convolutions: the FLOPs that MFU counts.
PRODUCTS = CONTRACTIONS | OWN_KERNELS | frozenset(ATTENTION_PRODUCTS)
# XLA's partitioner gathers the rows of all replicas for these.
UNPARTITIONED = frozenset(("conv_general_dilated", "top_k"))
# They find the place of the largest or smallest element.
SEARCHES = frozenset(("argmax", "argmin"))
# They combine the elements along some dimensions into one.
REDUCTIONS = SEARCHES | frozenset((
    "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum",
    "reduce_xor",
))
# What the parts of a reduction are combined by, as `jax.lax` calls it.
FOLDS = {
    "reduce_and": "bitwise_and", "reduce_max": "max", "reduce_min": "min",
    "reduce_or": "bitwise_or", "reduce_prod": "mul", "reduce_sum": "add",
}
# A device that has shards of the operands computes a partial sum of the result.
PARTIAL_SUMS = CONTRACTIONS | OWN_KERNELS | frozenset(("reduce_sum",))
NEGATIONS = frozenset(("neg",))
# Autodiff adds the parts of a gradient with these.
GRADIENT_SUMS = frozenset(("add_any",))
# An operand is used for many elements of the result: its gradient is a sum over them.
SPREADING = PRODUCTS | frozenset(("broadcast_in_dim", "gather"))

# A product is linear in each factor, a quotient in its first operand.
SCALING = frozenset(("mul", "div"))

# Linear in the first operand while the others are fixed.
LINEAR_IN_FIRST = FORMS | frozenset((
    "broadcast_in_dim", "copy", "cumsum", "dynamic_slice", "expand_dims", "gather", "imag", "name",
    "neg", "pad", "real", "reduce_precision", "reduce_sum", "rev", "sharding_constraint", "slice",
    "split", "stop_gradient",
))
# Linear in all operands together; of `select_n`, in all but the first.
CASES = frozenset(("add", "add_any", "concatenate", "select_n", "stack", "sub"))
# Map the largest or smallest elements of the slices to those of the whole batch.
SAME_FOR_EXTREMA = frozenset((
    "broadcast_in_dim", "copy", "expand_dims", "name", "reshape", "rev", "squeeze",
    "stop_gradient", "transpose",
))
# Reductions over the examples other than sums, by name.
EXTREMA = {"reduce_and": "min", "reduce_max": "max", "reduce_min": "min", "reduce_or": "max"}

# They draw the numbers themselves.
DRAWS = frozenset(("random_bits", "random_gamma"))
# Each number, or key, that they draw of a key may be a function of its place (`ir.threefry`).
DRAWN_BY_PLACE = frozenset(("random_bits", "random_split"))
# They draw random numbers, or make keys of numbers or keys: along each key on its own.
RANDOM = DRAWN_BY_PLACE | frozenset((
    "random_fold_in", "random_seed", "random_unwrap", "random_wrap", "rng_bit_generator",
    "threefry2x32",
))

# Linear algebra: the last dimensions of the first operand are a matrix; those before count them.
MATRIX_DIMS = {
    "cholesky": 2, "eig": 2, "eigh": 2, "geqrf": 2, "hessenberg": 2, "householder_product": 2,
    "lu": 2, "lu_pivots_to_permutation": 1, "qr": 2, "schur": 2, "svd": 2, "triangular_solve": 2,
    "tridiagonal": 2,
}

# Act on each example separately, for all dimensions.
ROW_WISE = ELEMENTWISE | BARRIERS | UNSHARDED_ELEMENTWISE | RANDOM | frozenset((
    "broadcast_in_dim", "expand_dims", "pipeline_boundary", "squeeze",
))
# Act on each example separately, if the dimension of the examples stays as it is.
KEEPS_ROWS = frozenset(("concatenate", "pad", "reshape", "slice"))

# They run a body a known number of times.
LOOPS = frozenset(("scan",))

# Their derivative is zero everywhere.
WITHOUT_GRADIENT = frozenset(("ceil", "floor", "round", "sign", "stop_gradient"))

# They say how a value is sharded, over which devices.
CONSTRAINTS = frozenset(("shard_map", "sharding_constraint"))
# Hand-written kernels: reads and writes of their own buffers are no side effects of the program.
KERNELS = frozenset(("pallas_call",))
# Plain calls, which can be inlined.
CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"))
# Calls of what the backward pass recomputes (`jax.checkpoint`).
RECOMPUTED = frozenset(("checkpoint", "remat", "remat2"))
# Calls with their own rules for differentiation or rematerialization.
CUSTOM_VJPS = frozenset(("custom_vjp_call", "custom_vjp_call_jaxpr"))
CALLS_WITH_RULES = RECOMPUTED | CUSTOM_VJPS | frozenset(("custom_jvp_call", "custom_lin"))
# fmt: on
