"""Hand-written kernels in a program: one equation, `kernel`, that says what it means.

The compiler does not partition kernels, and the planner reads nothing from their code. A `Kernel`
tells both what they need: what it computes with plain operations, which is also its program where
there is no kernel, which dimensions run together, and how much work it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.interpreters import batching, mlir

from launcher.base.jax_compat import kernel_lowering
from launcher.trace.ir.jaxpr import Aval, Primitive

Place = tuple[int, int]  # (operand or result, its dimension)
Places = tuple[tuple[Place, ...], tuple[Place, ...]]


class Kernel(Protocol):
    """A pure function of arrays, hashable, whose text is the same in every process.

    Attributes:
        says: what it is, for the plan's notes.
        is_fused: whether the GPUs have the kernel; else its program is the plain one.
        places: which dimensions of operands and results run together; see `Factor`.
        backward_share: the work of its gradient over its own.
    """

    @property
    def says(self) -> str: ...
    @property
    def is_fused(self) -> bool: ...
    @property
    def places(self) -> Sequence[Places]: ...
    @property
    def backward_share(self) -> float: ...

    def flops(self, operands: Sequence[Aval]) -> float:
        """Return its floating-point operations."""

    def plain(self, *operands: jax.Array) -> list[jax.Array]:
        """Return its results by operations that any device has."""

    def fused(self, *operands: jax.Array) -> list[jax.Array]:
        """Return its results by the kernel."""


kernel_p = Primitive("kernel")
kernel_p.multiple_results = True


def call_kernel(kernel: Kernel, *operands: jax.Array) -> list[jax.Array]:
    """Return a kernel's results. It has no derivative: give it one with `jax.custom_vjp`."""
    found: list[jax.Array] = kernel_p.bind(*operands, kernel=kernel)
    return found


def _result_types(*avals: Any, kernel: Kernel) -> list[Any]:
    made = jax.eval_shape(kernel.plain, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in made]


@dataclasses.dataclass(frozen=True)
class _Batched:
    """A kernel under `jax.vmap`, which only meets programs whose plan is made."""

    kernel: Kernel
    axes: tuple[int | None, ...]

    @property
    def is_fused(self) -> bool:
        return self.kernel.is_fused

    def plain(self, *operands: jax.Array) -> Any:
        return jax.vmap(self.kernel.plain, self.axes)(*operands)

    def fused(self, *operands: jax.Array) -> Any:
        return jax.vmap(self.kernel.fused, self.axes)(*operands)


def _batched(operands: Sequence[Any], axes: Sequence[Any], kernel: Kernel) -> Any:
    outs = kernel_p.bind(*operands, kernel=_Batched(kernel, tuple(axes)))
    return outs, [0] * len(outs)


def _on_cuda(ctx: Any, *operands: Any, kernel: Kernel) -> Any:
    fun = kernel.fused if kernel.is_fused else kernel.plain
    with kernel_lowering():
        return mlir.lower_fun(fun, multiple_results=True)(ctx, *operands)


def _anywhere(*operands: jax.Array, kernel: Kernel) -> list[jax.Array]:
    return kernel.plain(*operands)


kernel_p.def_impl(lambda *operands, kernel: jax.jit(call_kernel, static_argnums=0)(kernel, *operands))
kernel_p.def_abstract_eval(_result_types)
mlir.register_lowering(kernel_p, mlir.lower_fun(_anywhere, multiple_results=True))
mlir.register_lowering(kernel_p, _on_cuda, platform="cuda")
batching.primitive_batchers[kernel_p] = _batched
