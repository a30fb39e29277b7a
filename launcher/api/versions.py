"""The supported versions of JAX, and the answer to any other."""

from __future__ import annotations

import functools
import logging
import re
from importlib.metadata import PackageNotFoundError, version

from launcher.base import problem_of
from launcher.config.errors import ConfigError

OLDEST, NEWEST = (0, 10), (0, 12)  # as pyproject.toml has them, by a test
_TESTED = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
_REMEDY = (
    f"Install one of JAX {_TESTED}: "
    f"pip install 'jax>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
)

_log = logging.getLogger(__name__)


@functools.cache
def check_versions() -> None:
    """Check the installed JAX; one newer than those tested is named in a line.

    Raises:
        ConfigError: it is missing or too old, or so new that a step cannot be traced.
    """
    try:
        check_jax(version("jax"))
    except PackageNotFoundError:
        raise ConfigError("JAX is not installed", _REMEDY) from None


def check_jax(found: str) -> None:
    """Check one version of JAX; see `check_versions`."""
    minor = tuple(int(part) for part in re.findall(r"\d+", found)[:2])  # of 0.13rc1, too
    if minor < OLDEST:
        raise ConfigError(f"JAX {found} is too old", _REMEDY)
    if minor <= NEWEST:
        return
    try:
        _trace_a_step()
    except Exception as error:  # whatever a change of JAX leads to
        problem = f"JAX {found} is too new: a step cannot be traced ({problem_of(error)})"
        raise ConfigError(problem, _REMEDY) from error
    _log.warning(f"JAX {found} is newer than those tested ({_TESTED}); continuing with it")


def _trace_a_step() -> None:
    """Trace and cut a step with a loop, of which every change of the jaxpr's form has been seen."""
    import jax
    import jax.numpy as jnp

    from launcher.trace import trace_step, value_and_grad

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        out, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.mean(out**2)

    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grads = value_and_grad(loss)(weights, x)
        return weights - grads, value

    shapes = jax.ShapeDtypeStruct((2, 4, 4), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    trace_step(step, shapes).opened.loss(2)
