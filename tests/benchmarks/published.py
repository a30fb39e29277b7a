"""Runs that others published, as our plans: does the memory model refuse what ran?

    python tests/benchmarks/published.py [WORD ...]

Prints a line a row, or those whose names hold one of the words: the memory that the plan is said to
need, the device's, and whether it is refused. `published.json` holds the rows with their sources.
Left out of the shares are those that ran by ways that no method of ours has, ZeRO-1, and those
whose microbatch is not told.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turns import table

from launcher.config.compose import load
from launcher.driver.planning.check import look
from launcher.driver.planning.plan_from_config import plan_of
from launcher.driver.planning.prepare import trace
from launcher.plan import Plan
from launcher.report.console import make_console

FILE = Path(__file__).with_suffix(".json")
_CLUSTERS = {
    "h100-sxm-80gb": ("cluster=h100_8_x16",),
    "a100-80gb": ("cluster=a100_8_x8",),
    "a100-40gb": ("cluster=p4d_24xlarge_x4",),
}
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Row:
    """A published run of a GPT.

    Attributes:
        id: its source and number.
        model: a name.
        gpu: the kind of device.
        gpus: how many of them.
        data: degree of data parallelism, as `tensor` and `pipeline` are of theirs.
        zero: what is cut over `data`: 1 the optimizer's state, 2 gradients, too, 3 parameters, too.
        micro_batch: samples of a replica's microbatch; None: not said.
        global_batch: samples of a step.
        sequence: tokens of a sample.
        precision: as its source has it.
        remat: "full" or "none".
        seconds: of a step; None: it ran out of memory.
        memory_gb: what its source says that a device holds, or None.
        layers: of the model, as what follows.
    """

    id: str
    model: str
    gpu: str
    gpus: int
    data: int
    tensor: int
    pipeline: int
    zero: int
    micro_batch: int | None
    global_batch: int
    sequence: int
    precision: str
    remat: str
    seconds: float | None
    memory_gb: float | None
    layers: int
    hidden: int
    heads: int
    vocabulary: int

    @property
    def is_ours(self) -> bool:
        """Whether one of our methods says what it did."""
        cut = self.tensor * self.pipeline > 1
        return self.micro_batch is not None and not (self.zero and cut) and self.zero != 1


def rows() -> Iterator[Row]:
    """Yield the published rows."""
    known: dict[str, Any] = json.loads(FILE.read_text())
    for values in known["rows"]:
        row = dict(zip(known["columns"], values, strict=True))
        shape = zip(known["model_columns"], known["models"][row["model"]], strict=True)
        yield Row(**row, **dict(shape))


def settings(row: Row) -> list[str]:
    """Return a row as the words of a command line."""
    micro_batches = row.global_batch // (row.data * (row.micro_batch or 1))
    words = [
        *("task=plan", "dataset=synthetic", "train.eval_every=0", "wandb.mode=disabled"),
        *("model=gpt", f"model.num_layers={row.layers}", f"model.hidden_size={row.hidden}"),
        *(f"model.num_heads={row.heads}", f"model.sequence_length={row.sequence}"),
        f"model.vocab_size={row.vocabulary}",
        *("train.precision=bf16", f"train.global_batch_size={row.global_batch}"),
        *_CLUSTERS[row.gpu],
        *(f"cluster.gpus={row.gpus}", f"cluster.hosts={-(-row.gpus // 8)}"),
        *(f"parallel.remat={row.remat}", f"parallel.num_micro_batches={micro_batches}"),
    ]
    if row.tensor * row.pipeline > 1:
        axes = {"data": row.data, "model": row.tensor, "pipeline": row.pipeline}
        return [*words, "parallel=three_d", *(f"parallel.{k}={n}" for k, n in axes.items())]
    return [*words, f"parallel={f'zero{row.zero}' if row.zero > 1 else 'data'}"]


def plan(row: Row) -> Plan:
    """Return our plan of a row, whether it fits or not."""
    config = load(settings(row))
    traced = trace(config, make_console(sys.stderr), look(config, 0, plan_only=True))
    return plan_of(config.parallel, traced.program.train, traced.cluster)


def needed(found: Plan) -> int:
    """Return the most bytes that a device of a plan needs."""
    return max(stage.memory_bytes for stage in found.all_stages)


def share(refused: list[bool]) -> str:
    return f"{sum(refused)} of {len(refused)} refused"


def main(*words: str) -> None:
    lines, ran, did_not = [], [], []
    for row in rows():
        if words and not any(word in row.id for word in words):
            continue
        found = plan(row)
        most = found.cluster["memory_bytes"]
        refused = needed(found) > most
        counted = "" if row.is_ours else "not ours"
        if row.seconds is None:
            did_not.append(refused)
        elif row.is_ours:
            ran.append(refused)
        ends = "ran" if row.seconds else "out of memory"
        sizes = f"{needed(found) / _GIB:.1f}", f"{most / _GIB:.1f}", str(row.memory_gb or "")
        lines.append((row.id, row.model, *sizes, "refused" if refused else "", ends, counted))
        print(*lines[-1], file=sys.stderr, flush=True)
    head = ("row", "model", "GiB needed", "GiB usable", "GB said", "plan", "run", "")
    table(head, lines)
    print(f"of those that ran: {share(ran)}; of those that ran out of memory: {share(did_not)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
