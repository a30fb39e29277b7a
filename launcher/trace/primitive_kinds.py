"""The table of primitives: their kinds, by the names that JAX gives them.

`factors` says which dimensions of a primitive run together, `bodies` which programs it holds; every
other question about a primitive's name is answered by a set of this table, and no other module
lists names. A new element-wise primitive is one word in `ELEMENTWISE`.
"""

from __future__ import annotations

# fmt: off

# What each element of the result is computed from: the elements at its place. Operands are as long
# as the result, or single numbers.
ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a",
    "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "or", "polygamma",
    "population_count", "pow", "real", "reduce_precision", "regularized_incomplete_beta", "rem",
    "round", "rsqrt", "select_n", "sharding_constraint", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub",
    "tan", "tanh", "xor",
))
# Element-wise in their leading dimensions, but left whole by sharding, as the random bits around
# them are.
UNSHARDED_ELEMENTWISE = frozenset(("bitcast_convert_type", "random_fold_in"))
# Element-wise ones that XLA computes by a loop, which it fuses with nothing.
_BY_LOOP = frozenset((
    "igamma", "igamma_grad_a", "igammac", "polygamma", "regularized_incomplete_beta",
))
# Element-wise ones that XLA does not compute twice for two readers (`IsExpensive`).
COSTLY = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt",
    "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log",
    "log1p", "logistic", "pow", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
))

# Results that are the operands, one by one.
BARRIERS = frozenset(("optimization_barrier",))

# The elements of the operand in another order or shape.
_LAYOUT = frozenset((
    "broadcast_in_dim", "expand_dims", "reshape", "rev", "slice", "squeeze", "transpose",
))
# Results that hold elements of operands, unchanged.
SAME_ELEMENTS = _LAYOUT | BARRIERS | frozenset((
    "concatenate", "copy", "dynamic_slice", "gather", "select_n", "split",
))
# Results that are longer than an operand, which fills a part of them.
LENGTHENING = frozenset(("concatenate", "pad"))
# All elements of the one operand, in another form: a gradient's parts can be added before or after.
FORMS = frozenset(("convert_element_type", "reshape", "squeeze", "transpose"))

# What the compiler computes where it is read.
FUSED = (ELEMENTWISE - _BY_LOOP) | _LAYOUT | BARRIERS | frozenset(("iota", "pad"))
# What may be computed again, and is computed once where two equations are the same.
CHEAP = FUSED - BARRIERS

# Matrix products: the work that is counted as a model's.
PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
# Where the largest or smallest element is.
SEARCHES = frozenset(("argmax", "argmin"))
# What combines the elements along some dimensions.
REDUCTIONS = SEARCHES | frozenset((
    "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum",
    "reduce_xor",
))
# What leaves a device with a part of a sum, where it has a part of the operands.
PARTIAL_SUMS = PRODUCTS | frozenset(("reduce_sum",))
# What adds the parts of a gradient.
GRADIENT_SUMS = frozenset(("add_any",))
# What has an operand whose gradient is summed over what the result has more of.
SPREADING = PRODUCTS | frozenset(("broadcast_in_dim", "gather"))

# A product of two values, linear in each; a quotient is linear in its first operand.
SCALING = frozenset(("mul", "div"))
# What is linear in its operands, or would be if `SCALING` had one of them fixed.
LINEAR = FORMS | SCALING | frozenset((
    "add", "add_any", "broadcast_in_dim", "copy", "neg", "reduce_sum", "sub",
))

# Calls of a function that stand for its body and nothing else.
CALLS = frozenset(("jit", "pjit", "closed_call", "core_call"))
# Those with rules of their own for derivatives or for what is kept.
CALLS_WITH_RULES = frozenset((
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "checkpoint", "remat", "remat2",
    "custom_lin",
))
# fmt: on
