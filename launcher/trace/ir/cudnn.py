"""cuDNN's fused attention on machines without cuDNN: traced as it is, computed by XLA on CPUs.

`jax.nn.dot_product_attention(implementation="cudnn")` asks for cuDNN's version while it is traced,
and has no program for CPUs. A plan for GPUs is made on any machine, so here it is taken to be
there: `described_cudnn` answers in its place, and what JAX binds is lowered for CPUs to what it
means. With cuDNN nothing changes. Where a release of JAX lacks these names, its own error stands.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from launcher.base.jax_compat import fused_attention
from launcher.trace.ir.jaxpr import Equation

Place = tuple[int, int]  # (operand or result, its dimension)

_VERSION = 91_300  # of a cuDNN that has all that JAX asks for
_BIAS, _OFFSETS = 3, 6  # their places among the operands; the bias' gradient is the result 3
_CAUSAL, _PADDED = (2, 3), (1, 3)  # JAX's numbers of masks


@contextlib.contextmanager
def described_cudnn() -> Iterator[None]:
    """Let fused attention be traced where no cuDNN is found; also a decorator of a function."""
    fused = fused_attention()
    version: Callable[[], int] | None = getattr(fused, "check_cudnn_version", None)
    if version is None:
        yield
        return
    _lower_for_cpus()

    def found_or_described() -> int:
        try:
            return version()
        except RuntimeError:
            return _VERSION

    fused.check_cudnn_version = found_or_described
    try:
        yield
    finally:
        fused.check_cudnn_version = version


@functools.cache
def _lower_for_cpus() -> None:
    """Give the primitives a meaning on CPUs, which JAX leaves out."""
    for word, meaning in (("fwd", _forward), ("bwd", _backward)):
        primitive = getattr(fused_attention(), f"_dot_product_attention_{word}_p_wrapper", None)
        if primitive is not None:
            rule = mlir.lower_fun(meaning, multiple_results=True)
            mlir.register_lowering(primitive, rule, platform="cpu")


def _forward(*operands: jax.Array, is_training: bool, **params: Any) -> list[jax.Array]:
    """Return the result and, in training, the logarithms of the softmax's sums, [B, N, T]."""
    out, sums = _attend(params, *operands[:6])
    return [out, jnp.swapaxes(sums, 1, 2).astype(jnp.float32)] if is_training else [out]


def _backward(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Return the gradients of queries, keys, values and, if there is one, the bias."""
    count = 4 if params["variadic_args"][1] else 3

    def out(*moving: jax.Array) -> jax.Array:
        return _attend(params, *moving, *operands[count:6])[0]

    _, vjp = jax.vjp(out, *operands[:count])
    return list(vjp(operands[-1]))


def _heads_first(params: dict[str, Any]) -> bool:
    return bool(params["layout"])


def _attend(
    params: dict[str, Any],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array,
    *lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return XLA's attention, in the layout of its operands, and the softmax's sums."""
    mask, window = _mask_number(params), params["sliding_window_length"]
    padded = dict(zip(("query_seq_lengths", "key_value_seq_lengths"), lengths, strict=True))

    def turned(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 1, 2) if _heads_first(params) else x

    out, sums = jax.nn.dot_product_attention(
        turned(query),
        turned(key),
        turned(value),
        bias if params["variadic_args"][0] else None,
        scale=params["scale"],
        is_causal=mask in _CAUSAL,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla",
        return_residual=True,
        **(padded if mask in _PADDED else {}),
    )
    return turned(out), sums


def _mask_number(params: dict[str, Any]) -> int:
    """Return JAX's number of the mask of fused attention."""
    return int(getattr(params["mask_type"], "value", params["mask_type"]))


def attention_sizes(eqn: Equation) -> tuple[tuple[int, int, int, int], int]:
    """Return batch, queries, heads and a head's size of fused attention, and its keys."""
    batch, a, b, size = eqn.invars[0].aval.shape
    keys = eqn.invars[1].aval.shape
    if _heads_first(eqn.params):
        return (batch, b, a, size), keys[2]
    return (batch, a, b, size), keys[1]


def attention_places(eqn: Equation) -> Iterator[tuple[tuple[Place, ...], tuple[Place, ...]]]:
    """Yield which dimensions of operands and results run together: of the examples, of the heads.

    Heads run together with those of the keys that they share. What is not there is an array of
    length 0. Examples of several texts each stay together: offsets count from the first.
    """
    is_packed = eqn.invars[_OFFSETS].aval.size > 0
    for kind in ("heads",) if is_packed else ("examples", "heads"):
        operands, results = (
            tuple(
                (i, at)
                for i, v in enumerate(side)
                if v.aval.size and (at := _dimension(kind, i, v.aval.ndim, eqn)) is not None
            )
            for side in (eqn.invars, eqn.outvars)
        )
        yield operands, results


def _dimension(kind: str, index: int, rank: int, eqn: Equation) -> int | None:
    """Return the dimension of the examples or heads in an operand or result."""
    if kind == "examples":
        return 0
    if rank == 4:
        return 1 if index == _BIAS or _heads_first(eqn.params) else 2
    return 1 if rank == 3 else None


def attended_pairs(params: dict[str, Any], queries: int, keys: int) -> float:
    """Return how many pairs of a query and a key the fused kernel computes with, for each head.

    Args:
        params: of the primitive.
        queries: their number.
        keys: their number.
    """
    window = min(params["sliding_window_length"] or keys, keys)
    if _mask_number(params) not in _CAUSAL and params["sliding_window_length"] is None:
        return float(queries * keys)
    if window < keys:
        return queries * window - window * window / 2
    return queries * keys / 2
