"""What a layer costs, which the stage search adds up. Pure numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer on `m` devices of a model axis, for the whole batch, on one of them.

    Attributes:
        work_seconds: seconds of the forward pass without communication.
        fixed_seconds: what every slice takes beside, however few rows it has: to compute something
            of parameters alone.
        back_seconds: the same as `work_seconds` of the backward pass.
        fixed_back_seconds: the same as `fixed_seconds` of the backward pass.
        product_seconds: the part of `work_seconds` and `back_seconds` that matrix products take.
        fixed_product_seconds: the same of `fixed_seconds` and `fixed_back_seconds`.
        forward_bytes: bytes all-reduced along the model axis in the forward pass; what is gathered
            or scattered counts half.
        backward_bytes: the same in the backward pass.
        fixed_backward_bytes: the same of every slice, however few rows it has: of parameters.
        repeated_bytes: the same of what the backward pass gathers as the forward pass did.
        forward_sums: number of all-reduces of `forward_bytes`.
        backward_sums: number of all-reduces of the backward pass.
        repeated_sums: number of all-reduces of `repeated_bytes`.
        residual_bytes: what the forward pass computes and leaves for the backward pass.
        left_bytes: `residual_bytes` and the activations that both passes read.
        forward_peak_bytes: most that the forward pass needs on top of what was there; see
            `cost.stage_memory.Temporaries`.
        forward_early_bytes: the part of it that is there as it begins.
        backward_peak_bytes: most that the backward pass needs on top of what was there.
        backward_early_bytes: what it holds when it reads the first gradient.
        whole_peak_bytes: most that both passes need as one program.
        whole_early_bytes: what that holds when it reads the first gradient.
        fixed_forward_peak_bytes: the part of `forward_peak_bytes` that every slice needs, however
            few rows it has; and so on.
        input_bytes: bytes of the activations that the layer reads.
        checkpoint_bytes: the same; of several layers, of all of them.
        layer_peak_bytes: `whole_peak_bytes`; of several layers, the most of any; and so on.
        selective_seconds: the part of `work_seconds` that runs again where the layer is computed
            again selectively.
        fixed_selective_seconds: the same of `fixed_seconds`.
        selective_bytes: the part of `forward_bytes` that is all-reduced again there.
        selective_sums: number of all-reduces of `selective_bytes`.
        kept_bytes: what the forward pass leaves there beside the activations that the layer reads.
        selective_peak_bytes: `backward_peak_bytes` there; of several layers, the most of any.
        fixed_selective_peak_bytes: the part of it that every slice needs.
        fixed_selective_early_bytes: `fixed_backward_early_bytes` there.
        sent_bytes: bytes of the activations that cross to the next layer, unsharded.
        batch_bytes: bytes of the leaves of the batch that the layer reads.
    """

    work_seconds: float
    fixed_seconds: float
    back_seconds: float
    fixed_back_seconds: float
    product_seconds: float
    fixed_product_seconds: float
    forward_bytes: float
    backward_bytes: float
    fixed_backward_bytes: float
    repeated_bytes: float
    forward_sums: float
    backward_sums: float
    repeated_sums: float
    residual_bytes: float
    left_bytes: float
    forward_peak_bytes: float
    forward_early_bytes: float
    backward_peak_bytes: float
    backward_early_bytes: float
    whole_peak_bytes: float
    whole_early_bytes: float
    fixed_forward_peak_bytes: float
    fixed_forward_early_bytes: float
    fixed_backward_peak_bytes: float
    fixed_backward_early_bytes: float
    fixed_whole_peak_bytes: float
    fixed_whole_early_bytes: float
    input_bytes: float
    checkpoint_bytes: float
    layer_peak_bytes: float
    fixed_layer_peak_bytes: float
    fixed_layer_early_bytes: float
    sent_bytes: float
    batch_bytes: float
    selective_seconds: float = 0.0
    fixed_selective_seconds: float = 0.0
    selective_bytes: float = 0.0
    selective_sums: float = 0.0
    kept_bytes: float = 0.0
    selective_peak_bytes: float = 0.0
    fixed_selective_peak_bytes: float = 0.0
    fixed_selective_early_bytes: float = 0.0


LARGEST = tuple(
    f"{kind}_bytes"
    for name in ("layer", "selective")
    for kind in (f"{name}_peak", f"fixed_{name}_peak", f"fixed_{name}_early")
)
PER_SAMPLE = tuple(
    f.name
    for f in dataclasses.fields(LayerCost)
    if not f.name.startswith("fixed") and not f.name.endswith("sums")
)
