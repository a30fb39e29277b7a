"""How soon `task=generate` has written 50 tokens with the default model.

    python tests/benchmarks/generating.py [rounds]

Trains the default model for a step. Each round generates in two new processes: one with an empty
cache folder, which compiles its programs, and one that finds them there. Prints the seconds that it
takes to read the model, then to the first token, which waits for the programs, and from there to
the 50th; and the seconds of processor of all that.
"""

from __future__ import annotations

import contextlib
import io
import itertools
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

from launcher.config.compose import load
from launcher.driver.tasks import generate
from launcher.inference.answers import model_answers

ROOT = Path(__file__).parents[2]
TOKENS = 50


def run(cache: Path, *command: str) -> str:
    """The standard output of a Python program whose cache folder this is."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def measure(*words: str) -> None:
    """Print, as JSON, the seconds that a generation and its parts take."""
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
    before = time.process_time()
    with (
        mock.patch.object(generate, "model_answers", timed),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        generate.GenerateTask().run(config, Console(quiet=True))
    cpu = time.process_time() - before
    began, loaded, first, *_, last = marks
    assert len(marks) == 2 + TOKENS
    print(json.dumps([loaded - began, first - loaded, last - first, cpu]))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as folder:
        words = f"run.dir={folder}", "run.id=one"
        trained = *words, "train.steps=1", "train.eval_every=0", "wandb.mode=disabled"
        run(Path(folder, "trained"), "-m", "launcher", *trained)
        for number, start in itertools.product(range(rounds), ("first", "second")):
            cache = Path(folder, f"cache_{number}")
            loading, first, rest, cpu = json.loads(run(cache, __file__, "measure", *words))
            print(
                f"{start} start: read in {loading:.2f} s, {TOKENS} tokens {first + rest:.2f} s "
                f"after that: the first after {first:.2f} s, the others in {rest:.2f} s more "
                f"({cpu:.1f} s of processor; load {os.getloadavg()[0]:.1f})",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(*sys.argv[2:])
    else:
        main()
