"""Comparison of pytrees of arrays, wherever they lie, for tests."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def assert_allclose(actual: Any, desired: Any, rtol: float = 1e-5, atol: float = 0.0) -> None:
    """Assert that two pytrees have the same structure and shapes, and nearly the same values.

    `|actual - desired| <= atol + rtol * |desired|` has to hold for every element; NaN equals NaN.
    Leaves are arrays of any kind, `RemoteArray`s included (fetched together), or numbers.

    Raises:
        AssertionError: names the first leaf that differs, its worst element and both values.

    Example:
        >>> launcher.testing.assert_allclose({"loss": jnp.ones(2)}, {"loss": np.ones(2)})
    """
    structures: tuple[Any, Any] = jax.tree.structure(actual), jax.tree.structure(desired)
    if structures[0] != structures[1]:
        raise AssertionError(
            f"the structures differ:\n  actual  {structures[0]}\n  desired {structures[1]}"
        )
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(desired)]
    found, wanted = jax.device_get((jax.tree.leaves(actual), jax.tree.leaves(desired)))
    for path, a, b in zip(paths, map(_plain, found), map(_plain, wanted), strict=True):
        _compare(
            jax.tree_util.keystr(path) or "the array", np.asarray(a), np.asarray(b), rtol, atol
        )


def _compare(name: str, a: np.ndarray, b: np.ndarray, rtol: float, atol: float) -> None:
    if a.shape != b.shape:
        raise AssertionError(f"{name}: shape {a.shape}, desired {b.shape}")
    close = np.isclose(_wide(a), _wide(b), rtol, atol, equal_nan=True)
    if np.all(close):
        return
    with np.errstate(all="ignore"):
        off = np.abs(_wide(a) - _wide(b))
        excess = np.where(
            close, -1.0, np.nan_to_num(off / (atol + rtol * np.abs(_wide(b))), nan=np.inf)
        )
    worst = np.unravel_index(np.argmax(excess), a.shape)
    at = f"[{', '.join(map(str, worst))}]" if a.shape else ""
    raise AssertionError(
        f"{name}: {np.sum(~close)} of {a.size} elements differ by more than rtol={rtol:g}, "
        f"atol={atol:g}; worst at {name}{at}: {a[worst]}, desired {b[worst]} "
        f"(off by {off[worst]:.3g})"
    )


def _plain(leaf: Any) -> Any:
    """Return a leaf, or the data of typed random keys."""
    is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _wide(values: np.ndarray) -> np.ndarray:
    """Return values in a type whose differences are exact enough and do not wrap around."""
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)
