"""A sweep on Slurm: submits a job a run, or one job array, and later says how they are doing.

`__main__` calls it. All runs are checked and planned before the first one is submitted; then
nothing waits for them: `task=sweep_status` shows them, whenever it is asked.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launcher.cluster.slurm_commands import (
    ENDED,
    check_installed,
    check_partition,
    job_states,
    sbatch,
)
from launcher.cluster.slurm_script import SCRIPT, Job, render
from launcher.config.compose import Point
from launcher.config.errors import ConfigError
from launcher.config.schema import Config, Sweep
from launcher.report.sweep import comparison_table, is_done
from launcher.submit import (
    JOB_FILE,
    command,
    freeze,
    frozen,
    note_job,
    output_file,
    script_for,
    unmade,
    write_script,
)
from launcher.sweep import labels, place
from launcher.train.run import guarded


def submit_sweep(points: Sequence[Point]) -> int:
    """Submit every run of a sweep and return; the exit code is 0 where Slurm took them all."""
    sweep_id, folder = place(points)
    configs = [_member(point.config, sweep_id, n, folder) for n, point in enumerate(points)]
    is_array = configs[0].cluster.slurm.array is not None
    _check(configs, is_array)
    if configs[0].cluster.slurm.dry_run:
        scripts = [_array_script(configs, sweep_id)] if is_array else map(script_for, configs)
        print("\n".join(scripts), end="")
        return 0
    return guarded(lambda: _submit(points, configs, sweep_id, folder))


def _submit(points: Sequence[Point], configs: Sequence[Config], sweep_id: str, folder: Path) -> int:
    check_installed()
    settings = [config.cluster.slurm for config in configs]
    for n, slurm in enumerate(settings):
        if slurm not in settings[:n]:
            check_partition(slurm)
    homes, made = [], [] if folder.exists() else [folder]
    for n, (config, text) in enumerate(zip(configs, labels(points), strict=True)):
        print(f"[{n + 1}/{len(points)}] {text}", flush=True)
        homes.append(freeze(config, Console(quiet=True)).path)
    if configs[0].cluster.slurm.array is not None:
        script = folder / SCRIPT
        write_script(script, _array_script(configs, sweep_id), configs[0])
        with unmade(made):
            array_id = sbatch(script)
        for n, home in enumerate(homes):
            note_job(home, f"{array_id}_{n}", script)
        print(f"submitted job array {array_id}")
    else:
        for n, (config, home) in enumerate(zip(configs, homes, strict=True)):
            script = home / SCRIPT
            write_script(script, script_for(config), config)
            with unmade([] if n else made):  # the second is refused: the first job is on its way
                job_id = sbatch(script)
            note_job(home, job_id, script)
            print(f"submitted job {job_id}: {home.name}", flush=True)
    shown = shlex.quote(str(folder))
    print(f"  folder  {folder}")
    print(f"  status  {shlex.join(command())} task=sweep_status sweep.dir={shown}")
    return 0


def sweep_status(sweep: Sweep) -> int:
    """Print where the runs of a sweep are and what came of them; submit again those that failed,
    where `sweep.resubmit` asks for it."""
    return guarded(lambda: _status(sweep))


def _status(sweep: Sweep) -> int:
    assert sweep.dir is not None
    folder = Path(sweep.dir)
    homes = [file.parent for file in folder.glob(f"*/{JOB_FILE}")]
    if not homes:
        raise ConfigError(
            f"sweep.dir={sweep.dir} holds no runs that were submitted to Slurm",
            "Name the folder that was printed when the sweep was submitted, multirun/ID.",
            ["sweep.dir"],
        )
    homes.sort(key=lambda home: int(home.name.rpartition("-")[2]))
    jobs = [json.loads((home / JOB_FILE).read_text()) for home in homes]
    states = job_states()
    shown = []
    for home, job in zip(homes, jobs, strict=True):
        state = states.get(job["job_id"], "ended")
        if sweep.resubmit and state in ENDED | {"ended"} and not is_done(home):
            job_id = _again(job, home)
            note_job(home, job_id, Path(job["script"]))
            job["job_id"], state = job_id, "SUBMITTED"
        shown.append(f"{job['job_id']} {state}")
    Console().print(comparison_table(homes, shown))
    return 0


def _again(job: dict[str, str], home: Path) -> str:
    """Submit one run's script again; of an array only its element."""
    _, is_element, element = job["job_id"].partition("_")
    if not is_element:
        return sbatch(Path(job["script"]))
    return f"{sbatch(Path(job['script']), array=element)}_{element}"


def _member(config: Config, sweep_id: str, number: int, folder: Path) -> Config:
    run = replace(config.run, id=f"{sweep_id}-{number}", dir=str(folder))
    wandb = replace(config.wandb, group=config.wandb.group or sweep_id)
    return replace(config, run=run, wandb=wandb)


def _check(configs: Sequence[Config], is_array: bool) -> None:
    if any(config.cluster.kind != "slurm" for config in configs):
        raise ConfigError(
            "cluster is swept, and some of its options are not slurm",
            "Submit those runs in a sweep of their own.",
            ["cluster.kind"],
        )
    if is_array and any(config.cluster != configs[0].cluster for config in configs):
        raise ConfigError(
            "The runs of a job array cannot ask for different things of the cluster",
            "Set cluster.slurm.array=null for a job each.",
            ["cluster.slurm.array"],
        )


def _array_script(configs: Sequence[Config], sweep_id: str) -> str:
    """The script of one job array; element n is run n of the sweep."""
    first, element = configs[0], "${SLURM_ARRAY_TASK_ID}"
    folder = Path(first.run.dir).absolute()
    settings = f"{shlex.quote(str(folder / sweep_id))}-{element}/config.yaml"
    job = Job(
        name=sweep_id,
        folder=Path.cwd(),
        output=str(output_file(folder / f"{sweep_id}-%a", "%A_%a")),
        command=[*map(shlex.quote, command(first)), *frozen(first, f'"{settings}"')],
        array=f"0-{len(configs) - 1}%{first.cluster.slurm.array}",
    )
    return render(first.cluster, job)
