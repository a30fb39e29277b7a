"""The instructions that take a step's values through parameter servers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.partition.errors import PlanError
from launcher.partition.exchanges import Exchanged, exchanges
from launcher.partition.gradient_sync import Bucket
from launcher.partition.partitioned import PartitionedStep
from launcher.plan import ServerExchange
from launcher.runtime.emit.instructions import Exchange
from launcher.runtime.emit.slots import Slots
from launcher.runtime.transport.exchange import ExchangeSpec
from launcher.runtime.transport.transfer import plain_aval


def exchange_instructions(
    cut: PartitionedStep, slots: Slots, once: Sequence[Bucket], planned: Sequence[ServerExchange]
) -> tuple[list[Exchange], list[Exchange]]:
    """Return the exchanges before the loss and those after it: one instruction each, or none.

    Args:
        cut: the partitioned step.
        slots: its slots.
        once: the buckets of gradients that are summed once a step.
        planned: the exchanges by the plan, with their servers.

    Raises:
        PlanError: they are not those of the step.
    """
    found = exchanges(cut, once)
    told = [(x.when, x.kind, x.dtype, x.nbytes) for x in found]
    servers = cut.assignment.reduction.servers
    if told != [(x.when, x.kind, x.dtype, x.bytes) for x in planned] or not all(
        0 <= x.server < servers for x in planned
    ):
        raise PlanError(
            f"the plan's exchanges are not those of this step on {servers} servers; plan again"
        )
    both = list(zip(found, planned, strict=True))
    before = [(x, _spec(cut, x, by)) for x, by in both if x.when == "before"]
    after = [(x, _spec(cut, x, by)) for x, by in both if x.when != "before"]
    return _instruction(before, slots, cut.slicing.micro_batches), _instruction(after, slots)


def _spec(cut: PartitionedStep, x: Exchanged, by: ServerExchange) -> ExchangeSpec:
    """Return the shape of a part: a sum is flat; of what is gathered a row of bytes a replica."""
    if x.kind == "sum":
        shape: tuple[int, ...] = (sum(v.aval.size for v in x.values),)
    else:
        plain = [plain_aval(v.aval)[0] for v in x.values]
        size = sum(aval.size * aval.dtype.itemsize for aval in plain)
        shape = cut.slicing.own_replicas, size // cut.slicing.replicas
    return ExchangeSpec(by.name, x.kind, shape, x.dtype, by.server)


def _instruction(
    crossing: Sequence[tuple[Exchanged, ExchangeSpec]], slots: Slots, stacked: int = 0
) -> list[Exchange]:
    """Return the instruction; `stacked`: of batch leaves, how many microbatches they hold."""
    values = [v for x, _ in crossing for v in x.values]
    if not crossing:
        return []
    own = slots.of_rows if stacked else slots.of_worker
    return [
        Exchange(
            mesh=0,
            specs=tuple(spec for _, spec in crossing),
            counts=tuple(len(x.values) for x, _ in crossing),
            inputs=tuple(own(v, 0) for v in values),
            outputs=tuple(slots.of_outer(v, 0) for v in values),
            micro_batches=stacked or 1,
        )
    ]
