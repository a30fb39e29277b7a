"""How soon `task=generate` has written 50 tokens with the default model.

    python tests/benchmarks/generating.py [rounds]

Trains the default model for a step. Each round generates in two new processes: one with an empty
cache folder, which compiles its programs, and one that finds them there. Prints the seconds that it
takes to read the model, then to the first token, which waits for the programs, and from there to
the 50th.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from turns import ROOT, run_launcher, table

from launcher.config.compose import load
from launcher.driver.tasks import generate
from launcher.inference.answers import model_answers

TOKENS = 50


def measure(*words: str) -> None:
    """Print, as JSON, the seconds of the parts of a generation."""
    marks: list[float] = []

    @contextlib.contextmanager
    def timed(*given: Any) -> Iterator[Iterator[Any]]:
        marks.append(time.perf_counter())
        with model_answers(*given) as tokens:
            marks.append(time.perf_counter())
            yield noted(tokens)

    def noted(tokens: Iterator[Any]) -> Iterator[Any]:
        for token in tokens:
            marks.append(time.perf_counter())
            yield token

    config = load(["task=generate", f"generate.max_new_tokens={TOKENS}", *words])
    with (
        mock.patch.object(generate, "model_answers", timed),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        generate.GenerateTask().run(config, Console(quiet=True))
    began, loaded, first, *_, last = marks
    assert len(marks) == 2 + TOKENS
    print(json.dumps([loaded - began, first - loaded, last - first]))


def main() -> None:
    rounds, rows = int(sys.argv[1]) if len(sys.argv) > 1 else 3, []
    with tempfile.TemporaryDirectory() as folder:
        words = f"run.dir={folder}", "run.id=one"
        short = "train.steps=1", "train.eval_every=0", "wandb.mode=disabled"
        run_launcher(*words, *short, cache=Path(folder, "trained"))
        for number in range(rounds):
            for start in ("first", "second"):
                env = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache_{number}"}
                command = [sys.executable, __file__, "measure", *words]
                told = subprocess.check_output(command, cwd=ROOT, env=env)
                rows.append((f"{start} start", *json.loads(told)))
    table(("", "read, s", "first token, s", f"the other {TOKENS - 1}, s"), rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(*sys.argv[2:])
    else:
        main()
