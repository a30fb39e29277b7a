"""Hand-written kernels in a program: one equation, `kernel`, that says what it means.

The compiler does not partition kernels, and the planner reads nothing from their code. A `Kernel`
tells both what they need: which dimensions run together, how much work it is, and what it computes
in plain operations, which is its program where no kernel is.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax.interpreters import batching, mlir

from launcher.base.jax_compat import kernel_lowering
from launcher.trace.ir.jaxpr import Aval, Primitive

Place = tuple[int, int]  # (operand or result, its dimension)


@dataclasses.dataclass(frozen=True)
class Kernel(abc.ABC):
    """A pure function of arrays, hashable, whose text is the same in every process.

    Attributes:
        is_fused: whether GPUs have the kernel; else its program is the plain one.
        places: which dimensions of operands and results run together; see `Factor`.
        backward_share: the work of its gradient over its own.
    """

    is_fused: bool
    places: ClassVar[Sequence[tuple[tuple[Place, ...], tuple[Place, ...]]]]
    backward_share: ClassVar[float]

    @abc.abstractmethod
    def note(self) -> str:
        """Return what a plan says of it."""

    @abc.abstractmethod
    def flops(self, operands: Sequence[Aval]) -> float:
        """Return its floating-point operations."""

    @abc.abstractmethod
    def plain(self, *operands: jax.Array) -> list[jax.Array]:
        """Return its results by operations that any device has."""

    @abc.abstractmethod
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
    """A kernel under `jax.vmap`, which only programs hold whose plan is made."""

    kernel: Kernel | _Batched
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


def _eagerly(*operands: jax.Array, kernel: Kernel) -> list[jax.Array]:
    return jax.jit(call_kernel, static_argnums=0)(kernel, *operands)


def _on_cuda(ctx: Any, *operands: Any, kernel: Kernel) -> Any:
    fun = kernel.fused if kernel.is_fused else kernel.plain
    types = [jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]  # of no mesh
    with kernel_lowering():
        return mlir.lower_fun(fun, multiple_results=True)(ctx.replace(avals_in=types), *operands)


def _anywhere(*operands: jax.Array, kernel: Kernel) -> list[jax.Array]:
    return kernel.plain(*operands)


kernel_p.def_impl(_eagerly)
kernel_p.def_abstract_eval(_result_types)
mlir.register_lowering(kernel_p, mlir.lower_fun(_anywhere, multiple_results=True))
mlir.register_lowering(kernel_p, _on_cuda, platform="cuda")
batching.primitive_batchers[kernel_p] = _batched
