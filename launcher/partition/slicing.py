"""Slice the batch of a step: microbatches in time, replicas in space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class Slicing:
    """How the batch is cut: `micro_batches` in time × `replicas` in space.

    Where parameter servers sum over `workers`, each of them holds as many of the replicas.
    """

    micro_batches: int
    replicas: int
    workers: int = 1

    @property
    def num_slices(self) -> int:
        """Equal slices of the batch in all."""
        return self.micro_batches * self.replicas

    @property
    def own_replicas(self) -> int:
        """Number of replicas that run as one program; the others are other workers'."""
        return self.replicas // self.workers

    def stack(self, x: Any, axis: int) -> Any:
        """A whole-batch array as `[microbatch, (replica,) rows, …]`, rows first."""
        x = jnp.moveaxis(x, axis, 0) if axis else x
        lead = (self.micro_batches, self.replicas) if self.replicas > 1 else (self.micro_batches,)
        return x.reshape(*lead, x.shape[0] // self.num_slices, *x.shape[1:])

    def own(self, stacked: Any, rank: int) -> Any:
        """Return a worker's part of what `stack` returns, `[microbatch, (replica,) rows, …]`."""
        if self.workers == 1:
            return stacked
        own = stacked[:, rank * self.own_replicas : (rank + 1) * self.own_replicas]
        return own if self.own_replicas > 1 else own[:, 0]


def accumulator_dtype(dtype: Any) -> Any:
    """Sums over microbatches are kept in at least float32."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
