"""How gradients are summed over the replicas: what a user may set of it."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.partition.errors import PlanError

REDUCE_DTYPES = "fp32", "bf16"


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed over the replicas.

    Attributes:
        bucket_bytes: the most bytes that one collective sums; a larger gradient is summed alone. 0:
            each gradient alone.
        dtype: "fp32": gradients cross in 32 bits, or in 64 if they have so many; "bf16": those of
            at most 32 bits cross in 16.
    """

    bucket_bytes: int = 25 << 20
    dtype: str = "fp32"

    def checked(self) -> Reduction:
        """Return it, or raise PlanError if a setting is out of range."""
        if self.bucket_bytes < 0:
            raise PlanError(f"bucket_bytes={self.bucket_bytes} is below 0")
        if self.dtype not in REDUCE_DTYPES:
            raise PlanError(f"reduce_dtype={self.dtype} is none of {', '.join(REDUCE_DTYPES)}")
        return self


DEFAULT_REDUCTION = Reduction()
