"""Print every stage of compilation as text, for maintainers and bug reports.

`python -m launcher.debug` takes a run's folder, or settings as the command line has them.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher.base import answer
from launcher.config.errors import ConfigError
from launcher.runtime.compilation import stages_of_compilation
from launcher.stop import Stop

if TYPE_CHECKING:
    from launcher.plan import Plan
    from launcher.trace import TracedStep


_log = logging.getLogger(__name__)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"The command line is wrong: {message}",
            "Name a run's folder, or give settings as key=value; --help shows the rest.",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Print every stage of compilation of a run, or of settings; return the exit code."""
    from launcher.driver.run import guarded

    with Stop() as stop:
        try:
            with stop.interruptible():
                return guarded(lambda: _run(parse_arguments(argv)))
        except KeyboardInterrupt:
            return stop.ending[0]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the words, `config_dir`, `out` and `hlo` of a command line; raises ConfigError."""
    parser = _Parser(
        prog="python -m launcher.debug",
        description="Print every stage of compilation: the loss, its layers, stages, task "
        "programs, the update and the instructions of each worker.",
        allow_abbrev=False,
    )
    words = "a run's folder (its config.yaml and plan.json), or settings, as for `launcher`"
    parser.add_argument("words", nargs="*", metavar="FOLDER | key=value", help=words)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write a file for each of them there"
    )
    parser.add_argument(
        "--hlo", action="store_true", help="compile as well, for CPU devices, and print the HLO"
    )
    parser.add_argument(
        "-cd", "--config-dir", action="append", default=[], metavar="DIR", help="as for `launcher`"
    )
    return parser.parse_intermixed_args(argv)


def _run(arguments: argparse.Namespace) -> int:
    folders = [word for word in arguments.words if "=" not in word]
    settings = [word for word in arguments.words if "=" in word]
    if folders:
        step, plan = _of_run(folders, settings, arguments.hlo)
    else:
        step, plan = _of_settings(settings, arguments.config_dir, arguments.hlo)
    stages = stages_of_compilation(step, plan, arguments.hlo)
    if arguments.out is None:
        return answer("\n\n".join(f"# {name}\n\n{text}" for name, text in stages))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number, (name, text) in enumerate(stages):
        path = arguments.out / f"{number:02}_{name}.txt"
        path.write_text(f"{text}\n", encoding="utf-8")
        answer(str(path))
    return 0


def _of_run(folders: Sequence[str], settings: Sequence[str], hlo: bool) -> tuple[TracedStep, Plan]:
    """Return the train step and the plan of a run, whose devices need not be here."""
    import jax

    from launcher.config.compose import load_frozen
    from launcher.driver.planning.replay import another_program, no_plan, read_plan
    from launcher.plan import Plan
    from launcher.train.program import build_program

    if len(folders) > 1 or not (folder := Path(folders[0])).joinpath("config.yaml").is_file():
        raise ConfigError(
            f"{' '.join(folders)} is not a run's folder: it has no config.yaml",
            "Name one such as outputs/<run id>, or give settings as key=value.",
        )
    config = load_frozen(folder / "config.yaml", settings)
    path = str(folder / "plan.json")
    try:
        plan = Plan.from_dict(read_plan(path))
    except ValueError as error:  # DamagedError and PlanError are one
        raise no_plan(path, str(error)) from error
    _emulate(plan.num_devices, hlo)
    step = build_program(config, plan.cluster["compute_capability"]).train
    step = step.planned_as(plan.fingerprint)
    if plan.fingerprint != step.fingerprint:
        raise another_program(path, made_by=plan.jax_version, here=jax.__version__)
    return step, plan


def _of_settings(
    settings: Sequence[str], config_dirs: Sequence[str], hlo: bool
) -> tuple[TracedStep, Plan]:
    """Return the train step of settings, and the plan that `task=plan` makes of them."""
    from rich.console import Console

    from launcher.base import lines_to
    from launcher.config.compose import load
    from launcher.driver.planning.check import look
    from launcher.driver.planning.plan_from_config import plan_of
    from launcher.driver.planning.prepare import trace
    from launcher.report.console import line_printer

    config = load(settings, config_dirs)
    console = Console(stderr=True, highlight=False)

    with lines_to(line_printer(console)):
        found = look(config, 0, plan_only=True)
        _emulate(found.pool.num_devices if found.pool else config.cluster.gpus or 1, hlo)
        traced = trace(config, console, found)
        step = traced.program.train
        plan = plan_of(config.parallel, step, traced.cluster, nothing_fits=_log.warning)
    return step, plan


def _emulate(count: int, hlo: bool) -> None:
    """Have this process see only CPU devices, and with `hlo` as many as it compiles for."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if hlo and "device_count" not in os.environ.get("XLA_FLAGS", ""):  # JAX takes one word on it
        jax.config.update("jax_num_cpu_devices", count)
