"""What stands for the loss of a function that takes no gradient, such as one that applies them."""

from __future__ import annotations

from launcher.trace.ir.jaxpr import Equation, make_jaxpr
from launcher.trace.primitives import loss_p
from launcher.trace.slicing.slices import Loss


def no_loss_equation() -> Equation:
    """Return a loss that reads nothing, differentiates nothing and returns nothing."""
    nothing = make_jaxpr(lambda: ())
    (eqn,) = make_jaxpr(lambda: loss_p.bind(jaxpr=nothing, wrt=(), reduce=())).eqns
    return eqn


def no_loss(num_slices: int) -> Loss:
    """Return that loss on one of `num_slices` slices: it has no layers."""
    return Loss(num_slices, (), (), (), (), 0, (), (), (), (), ())
