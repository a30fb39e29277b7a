"""Submit a sweep to Slurm, as a job for each run or as one job array, and show its state later.

All runs are checked and planned before the first one is submitted. No process waits for them:
`task=sweep_status` shows them at any time.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from launcher.base import answer, complain
from launcher.cluster.kinds import kind_of
from launcher.cluster.slurm.commands import job_states
from launcher.cluster.slurm.script import SCRIPT
from launcher.config.cluster import slurm_of
from launcher.config.compose import Point
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.config.sections import Sweep
from launcher.driver.run import guarded
from launcher.report.console import make_console
from launcher.report.sweep import print_comparison, report_sweep
from launcher.stop import Stop
from launcher.submit.job import (
    JOB_FILE,
    Submission,
    freeze,
    hand_in,
    output_file,
    read_job,
    script,
    script_for,
)
from launcher.submit.placing import check_jobs, members, place_sweep


def submit_sweep(points: Sequence[Point], stop: Stop) -> int:
    """Submit every run of a sweep; return the exit code, 0 if Slurm accepted them all."""
    sweep_id, folder = place_sweep(points)
    configs = members(points, sweep_id, folder)
    check_jobs(configs)
    if slurm_of(configs[0].cluster).dry_run:
        if _is_array(configs):
            return answer(_array_script(configs, sweep_id), end="")
        return answer("\n".join(map(script_for, configs)), end="")
    return guarded(lambda: _submit(points, configs, sweep_id, folder, stop))


def _submit(
    points: Sequence[Point], configs: Sequence[Config], sweep_id: str, folder: Path, stop: Stop
) -> int:
    kinds = [kind_of(config.cluster) for config in configs]
    for n, kind in enumerate(kinds):
        if kind.cluster not in [other.cluster for other in kinds[:n]]:
            kind.check_submission()
    homes, made = [], [] if folder.exists() else [folder]
    for n, (config, point) in enumerate(zip(configs, points, strict=True)):
        answer(f"[{n + 1}/{len(points)}] {point.label}")
        homes.append(freeze(config, Console(quiet=True)).path)
    if _is_array(configs):
        text, said = _array_script(configs, sweep_id), "submitted job array {}"
        hand_in(
            Submission(folder / SCRIPT, text, said.format, homes, made, is_array=True),
            configs[0],
            stop,
        )
    else:
        for n, (config, home) in enumerate(zip(configs, homes, strict=True)):
            said = f"submitted job {{}}: {home.name}"
            # If a later one is refused, the first is submitted already.
            undone = [] if n else made
            hand_in(
                Submission(home / SCRIPT, script_for(config), said.format, [home], undone),
                config,
                stop,
            )
    shown = shlex.quote(str(folder))
    answer(f"  folder  {folder}")
    answer(f"  status  python -m launcher task=sweep_status sweep.dir={shown}")
    return 0


def sweep_status(sweep: Sweep) -> int:
    """Print the state and the results of the runs of a sweep."""
    return guarded(lambda: _status(sweep))


def _status(sweep: Sweep) -> int:
    assert sweep.dir is not None
    folder = Path(sweep.dir)
    homes = sorted({file.parent for file in folder.glob(f"*/{JOB_FILE}*")}, key=_number)
    if not homes:
        raise ConfigError(
            f"sweep.dir={sweep.dir} holds no runs that were submitted to Slurm",
            "Name the folder that was printed when the sweep was submitted, multirun/ID.",
            ["sweep.dir"],
        )
    states = job_states()
    shown = []
    for home in homes:
        try:
            job = read_job(home)
        except OSError as error:
            complain(f"{home / JOB_FILE} cannot be read: {error.strerror}")
            job = None
        if job is None:  # it is not known whether it still runs
            shown.append("unknown")
            continue
        state = states.get(job.job_id, "ended")
        shown.append(f"{job.job_id} {state}")
    print_comparison(make_console(), homes, shown)
    report_sweep(make_console(), homes[0].parent, homes)
    return 0


def _number(home: Path) -> tuple[int, str]:
    """Return the sort key of a sweep's run."""
    number = home.name.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else -1, home.name


def _is_array(configs: Sequence[Config]) -> bool:
    return slurm_of(configs[0].cluster).array is not None


def _array_script(configs: Sequence[Config], sweep_id: str) -> str:
    """Return the script of one job array; element n is run n of the sweep."""
    first = configs[0]
    folder = Path(first.run.dir).absolute()
    settings = f'{shlex.quote(f"{folder / sweep_id}-")}"${{SLURM_ARRAY_TASK_ID}}"/config.yaml'
    output = output_file(folder / f"{sweep_id}-%a", "%A_%a")
    elements = f"0-{len(configs) - 1}%{slurm_of(first.cluster).array}"
    return script(first, sweep_id, output, settings, elements)
