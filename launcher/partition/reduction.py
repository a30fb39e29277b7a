"""User settings for summing gradients over the replicas."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.partition.errors import PlanError

REDUCE_DTYPES = "fp32", "bf16"
_EACH = 4  # buckets of a server
_LEAST = 1 << 20  # bytes of a bucket, below which its messages take longer than its bytes


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed over the replicas.

    Attributes:
        bucket_bytes: the most bytes that one collective sums; a larger gradient is summed alone. 0:
            each gradient alone.
        dtype: "fp32": gradients cross in 32 bits, or in 64 if they have so many; "bf16": those of
            at most 32 bits cross in 16.
        workers: the number of workers that hold equal shares of the replicas, each a JAX of its
            own, and reach one another through parameter servers alone; 1: collectives sum.
        servers: the number of parameter servers; 0 for one worker.
    """

    bucket_bytes: int = 25 << 20
    dtype: str = "fp32"
    workers: int = 1
    servers: int = 0

    def bucket_limit(self, nbytes: int) -> int:
        """Return the most bytes in a bucket of several gradients, which have `nbytes` in all.

        Servers get several buckets each, so that they have about equally much to do, and one
        bucket is on its way while another is added.
        """
        if not self.servers:
            return self.bucket_bytes
        return min(self.bucket_bytes, max(nbytes // (_EACH * self.servers), _LEAST))

    def checked(self) -> Reduction:
        """Return it, or raise PlanError if a setting is out of range."""
        if self.bucket_bytes < 0:
            raise PlanError(f"bucket_bytes={self.bucket_bytes} is below 0")
        if self.dtype not in REDUCE_DTYPES:
            raise PlanError(f"reduce_dtype={self.dtype} is none of {', '.join(REDUCE_DTYPES)}")
        if self.workers < 1 or (self.workers > 1) != (self.servers > 0):
            raise PlanError(
                f"{self.servers} parameter servers cannot sum over {self.workers} workers; several "
                "workers need at least one server, and one worker has none"
            )
        return self


DEFAULT_REDUCTION = Reduction()
