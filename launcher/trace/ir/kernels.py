"""Hand-written kernels in a program: one equation, `kernel`, that says what it means.

The compiler does not partition kernels, and the planner reads nothing from their code. A `Kernel`
tells both what they need: which dimensions run together, how much work it is, and what it computes
in plain operations, which is its program where no kernel is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import batching, mlir

from launcher.base.jax_compat import kernel_lowering
from launcher.trace.ir.jaxpr import Aval, Primitive

Place = tuple[int, int]  # (operand or result, its dimension)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A pure function of arrays. Use one object for all its calls: equal programs compile once.

    Attributes:
        note: what a plan says of it.
        plain: returns its results by operations that any device has.
        fused: returns them by a kernel for GPUs; None: they have none.
        places: which dimensions of operands and results run together; see `Factor`. Over those
            that reach no result, the results are sums.
        flops: returns its floating-point operations, given its operands' types.
        backward_share: the work of its gradient over its own.
        is_attention: whether it is attention in one kernel, which is slower than products alone.
    """

    note: str
    plain: Callable[..., list[jax.Array]]
    fused: Callable[..., list[jax.Array]] | None
    places: Sequence[tuple[tuple[Place, ...], tuple[Place, ...]]]
    flops: Callable[[Sequence[Aval]], float]
    backward_share: float = 2.0
    is_attention: bool = False


kernel_p = Primitive("kernel")
kernel_p.multiple_results = True


def call_kernel(kernel: Kernel, *operands: jax.Array) -> list[jax.Array]:
    """Return a kernel's results. It has no derivative: give it one with `jax.custom_vjp`."""
    found: list[jax.Array] = kernel_p.bind(*operands, of=kernel)
    return found


def _plainly(*operands: jax.Array, of: Kernel) -> list[jax.Array]:
    return of.plain(*operands)


def _result_types(*avals: Any, of: Kernel) -> list[Any]:
    made = jax.eval_shape(of.plain, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in made]


def _batched(operands: Sequence[Any], axes: Sequence[Any], of: Kernel) -> Any:
    """Compute several at once, in a program whose plan is made; mostly one, a device's replica."""
    pairs = list(zip(operands, axes, strict=True))
    if all(axis is None or x.shape[axis] == 1 for x, axis in pairs):
        alone = (x if axis is None else jax.lax.squeeze(x, (axis,)) for x, axis in pairs)
        outs = [x[None] for x in kernel_p.bind(*alone, of=of)]
        return outs, [0] * len(outs)
    over = functools.partial(jax.vmap, in_axes=tuple(axes))
    fused = of.fused and over(of.fused)
    both = dataclasses.replace(of, plain=over(of.plain), fused=fused)
    outs = kernel_p.bind(*operands, of=both)
    return outs, [0] * len(outs)


def _on_cuda(ctx: Any, *operands: Any, of: Kernel) -> Any:
    types = [jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]  # of no mesh
    rule = mlir.lower_fun(of.fused or of.plain, multiple_results=True)
    with kernel_lowering():
        return rule(ctx.replace(avals_in=types), *operands)


kernel_p.def_impl(_plainly)
kernel_p.def_abstract_eval(_result_types)
mlir.register_lowering(kernel_p, mlir.lower_fun(_plainly, multiple_results=True))
mlir.register_lowering(kernel_p, _on_cuda, platform="cuda")
batching.primitive_batchers[kernel_p] = _batched
