"""The operators and methods of `jax.Array` for arrays that are fetched on first use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

_UNARY = "abs", "invert", "neg", "pos"
_BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_COMPARISONS = "eq", "ge", "gt", "le", "lt", "ne"
_OPERATORS = (*_UNARY, *_BINARY, *(f"r{name}" for name in _BINARY), *_COMPARISONS, "getitem")
# Methods of `jax.Array` that do not depend on its placement.
_METHODS = {
    *("T", "all", "any", "argmax", "argmin", "argpartition", "argsort", "astype", "at", "choose"),
    *("clip", "compress", "conj", "conjugate", "copy", "cumprod", "cumsum", "diagonal", "dot"),
    *("flat", "flatten", "imag", "itemsize", "mT", "max", "mean", "min", "nonzero", "prod", "ptp"),
    *("ravel", "real", "repeat", "reshape", "round", "searchsorted", "sort", "squeeze", "std"),
    *("sum", "swapaxes", "take", "tolist", "trace", "transpose", "var", "view"),
}


class ArrayLike:
    """A base class of arrays with a `value`: operators, indexing, NumPy's and JAX's functions.

    The results are `jax.Array`s or numbers of this process.
    """

    __slots__ = ()
    __array_priority__ = 100  # NumPy leaves `number * array` to the array
    __hash__ = None  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which is known without the value."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def value(self) -> jax.Array:
        """The value, an array of this process."""
        raise NotImplementedError

    def item(self) -> Any:
        """Return the value of an array of one element as a Python number."""
        return np.asarray(self).item()

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            return getattr(self.value, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return self.value.__index__()

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value, digits)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __contains__(self, item: Any) -> bool:
        return item in self.value

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __str__(self) -> str:
        return str(self.value)

    def __reduce__(self) -> Any:
        return _given, (self.value,)


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: ArrayLike, *others: Any) -> Any:
        known = [other.value if isinstance(other, ArrayLike) else other for other in others]
        return getattr(self.value, name)(*known)

    operate.__name__ = name
    return operate


for _name in _OPERATORS:
    setattr(ArrayLike, f"__{_name}__", _operator(f"__{_name}__"))


def _given(value: Any) -> Any:
    return value
