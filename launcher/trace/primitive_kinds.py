"""Kinds of JAX primitives, by name: what the compiler fuses, what costs, what sums."""

from __future__ import annotations

# fmt: off
FUSED = frozenset((
    "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy",
    "cos", "div", "eq", "erf", "exp", "exp2", "expand_dims", "expm1", "ge", "gt", "integer_pow",
    "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "not", "or", "pad", "pow", "reshape", "rev", "round", "rsqrt", "select_n", "sign", "sin",
    "slice", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose", "xor",
    "optimization_barrier",
))
COSTLY = frozenset((
    "cos", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "rsqrt", "sin", "sqrt",
    "tanh",
))
SUMS = frozenset((
    "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax",
    "argmin",
))
# fmt: on
