"""Submit runs to Slurm from a login node, one or a sweep, follow one, and show a sweep's state.

Settings, data and plans of all runs are checked here, before anything is submitted. The resolved
settings and the batch script are frozen in a run's folder, and only then is Slurm asked. A sweep is
a job for each run or one job array. No process waits for it: `task=sweep_status` shows its runs at
any time.
"""

from __future__ import annotations

import codecs
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from launcher.base import (
    LAUNCH,
    DamagedError,
    answer,
    complain,
    lines_to,
    read_json,
    to_type,
    write_whole,
)
from launcher.base.reading import read
from launcher.cluster.slurm.allocation import read_attempts
from launcher.cluster.slurm.commands import (
    ENDED,
    SCRIPT,
    check_installed,
    check_partition,
    job_state,
    job_states,
    render,
    sbatch,
)
from launcher.config.cluster import slurm_cluster, slurm_of
from launcher.config.compose import Point
from launcher.config.environment import commands_in, in_shell
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.config.sections import Sweep
from launcher.driver.folder import folder
from launcher.driver.folder.folder import RunFolder, delete_on_error, write_plan
from launcher.driver.folder.make_folder import new_id, private_files
from launcher.driver.folder.mirrored import look_at_mirror
from launcher.report.console import line_printer, make_console
from launcher.report.run_record import by_number
from launcher.report.sweep import print_comparison, report_sweep
from launcher.stop import Stop
from launcher.submit.points import JOURNAL, members, place_sweep

JOB_FILE = "job.json"
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Noted:
    """The content of `job.json`.

    Attributes:
        job_id: the run's newest job, `<array>_<element>` in an array.
        script: the script that made it.
    """

    job_id: str
    script: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9]+(_[0-9]+)?", self.job_id):
            raise DamagedError(f"job_id is {self.job_id!r}, not a job's")


def submit(config: Config, stop: Stop) -> int:
    """Submit one run; with `cluster.slurm.wait` follow it to its end.

    Returns:
        The exit code of this process; with `wait`, that of the job.

    Raises:
        KeyboardInterrupt: a signal ended it; `stop` has the exit code.
    """
    slurm = slurm_of(config.cluster)
    if slurm.array is not None:
        raise ConfigError(
            f"cluster.slurm.array={slurm.array} is for sweeps, but this is one run",
            "Add -m, or leave it out.",
        )
    if slurm.dry_run:
        run_id = config.run.id or new_id(config.model.name)
        return answer(script_for(replace(config, run=replace(config.run, id=run_id))), end="")
    check_site([config])
    home = freeze(config, make_console())
    text = script_for(replace(config, run=replace(config.run, id=home.id)))

    def announced(job_id: str) -> str:
        output = output_file(home.path, job_id)
        return (
            f"submitted job {job_id}\n"
            f"  run folder  {home.path}\n"
            f"  log         {output}\n"
            f"  follow      {to_type('tail', '-F', str(output))}\n"
            f"  cancel      scancel {job_id}"
        )

    job_id = hand_in(
        config, home.path / SCRIPT, text, {"": home.path}, announced, home.created, stop
    )
    return wait(home.path, job_id) if slurm_of(config.cluster).wait else 0


def submit_sweep(points: Sequence[Point], stop: Stop) -> int:
    """Submit every run of a sweep; return the exit code, 0 if Slurm accepted them all."""
    sweep_id, folder = place_sweep(points)
    configs = members(points, sweep_id, folder)
    check_jobs(configs)
    if not slurm_of(configs[0].cluster).dry_run:
        return _submit_sweep(points, configs, sweep_id, folder, stop)
    if is_array(configs):
        return answer(array_script(configs, sweep_id), end="")
    return answer("\n".join(map(script_for, configs)), end="")


def _submit_sweep(
    points: Sequence[Point], configs: Sequence[Config], sweep_id: str, folder: Path, stop: Stop
) -> int:
    check_site(configs)
    homes, made = [], [] if folder.exists() else [folder]
    for n, (config, point) in enumerate(zip(configs, points, strict=True)):
        answer(f"[{n + 1}/{len(points)}] {point.label}")
        homes.append(freeze(config, Console(quiet=True)).path)
    if is_array(configs):
        text, elements = array_script(configs, sweep_id), {f"_{n}": h for n, h in enumerate(homes)}
        said, path = "submitted job array {}".format, folder / SCRIPT
        hand_in(configs[0], path, text, elements, said, made, stop)
    else:
        for config, home in zip(configs, homes, strict=True):
            said = f"submitted job {{}}: {home.name}".format
            path, text = home / SCRIPT, script_for(config)
            hand_in(config, path, text, {"": home}, said, made, stop)
            made = []  # if a later one is refused, the first is submitted already
    return say_where(folder)


def say_where(folder: Path) -> int:
    """Say where a submitted sweep is and how to look at it; return the exit code."""
    answer(f"  folder  {folder}")
    status = to_type(*LAUNCH, ("task", "sweep_status"), ("sweep.dir", str(folder)))
    answer(f"  status  {status}")
    return 0


def check_site(configs: Sequence[Config]) -> None:
    """Check that jobs can be submitted from this machine, and that Slurm has their partitions.

    Raises:
        ConfigError: they cannot, or it has not.
        SlurmError: the controller does not answer.
    """
    check_installed()
    clusters = [slurm_of(config.cluster) for config in configs]
    for n, slurm in enumerate(clusters):
        if slurm not in clusters[:n]:
            check_partition(slurm)


def check_jobs(configs: Sequence[Config]) -> None:
    """Check that the runs of a sweep, some of which are for Slurm, can be submitted together.

    Raises:
        ConfigError: they cannot.
    """
    if len({config.cluster.kind for config in configs}) > 1:
        raise ConfigError(
            "cluster is swept, and some of its options are not slurm",
            "Submit those runs in a sweep of their own.",
        )
    if any(slurm_of(config.cluster).wait for config in configs):
        raise ConfigError(
            "cluster.slurm.wait=true follows one run, but this is a sweep",
            "Leave it out; task=sweep_status shows how they are doing.",
        )
    if not is_array(configs):
        return
    # An array has one script with one command line.
    if any(config.allow_modules != configs[0].allow_modules for config in configs):
        raise ConfigError(
            "The runs of a job array cannot be allowed different modules",
            "Allow every run all of them, or set cluster.slurm.array=null for a job each.",
        )
    if any(config.cluster != configs[0].cluster for config in configs):
        raise ConfigError(
            "The runs of a job array cannot have different settings of the cluster",
            "Set cluster.slurm.array=null for a job each.",
        )


def hand_in(
    config: Config,
    path: Path,
    text: str,
    homes: Mapping[str, Path],
    announced: Callable[[str], str],
    made: Sequence[Path],
    stop: Stop,
) -> str:
    """Submit a batch script, note its job in the folders of its runs, and return the job's id.

    A signal is delayed until the job is noted: one that Slurm has accepted, but that is not noted
    anywhere, would be submitted again. The script is private if it holds values of
    `cluster.slurm.env`, which may be secrets.

    Args:
        config: the settings, of the first run for an array.
        path: the file for the script.
        text: the script.
        homes: the folders of its runs, by the end of the run's job id: "" or "_<element>".
        announced: returns the lines for the user, by the job's id.
        made: the folders to delete if Slurm refuses it.
        stop: delays a signal.

    Raises:
        ConfigError: Slurm refuses it.
    """

    def say(text: str) -> None:
        answer(text)

    until = "once Slurm has answered; Ctrl-C once more leaves at once"
    with private_files(config.run):  # the job itself continues to keep them private
        write_whole(path, text, private=config.cluster.holds_secrets)
        with delete_on_error(made, on=ConfigError):
            with stop.heeded(say, until):
                job_id = sbatch(path, sleep=stop.sleep)
                for element, home in homes.items():
                    note_job(home, f"{job_id}{element}", path)
                answer(announced(job_id))
            stop.check()
    return job_id


def freeze(config: Config, console: Console) -> RunFolder:
    """Check and plan a run, and write everything into its folder that the job will read.

    After that only submitting is left.
    """
    with lines_to(line_printer(console)):
        look_at_mirror(config)
        finished = folder.check(config)
        _check_idle(config)
        from launcher.driver.planning.downloads import download
        from launcher.driver.planning.prepare import prepare

        download(config, console, finished)
        ready = prepare(config, console, finished=finished)
        with folder.claim(config) as home:
            write_plan(home, as_run(config), ready.plan)
            home.logs.mkdir(exist_ok=True)
            return home


def as_run(config: Config) -> Config:
    """Return `config` without the parts that are done here: submitting, and making a new folder."""
    cluster = slurm_cluster(config.cluster)
    cluster = replace(cluster, slurm=replace(cluster.slurm, dry_run=False, wait=False))
    resume = "auto" if config.run.resume == "never" else config.run.resume
    task = "preflight" if config.task == "preflight" else "train"
    return replace(config, task=task, cluster=cluster, run=replace(config.run, resume=resume))


def _check_idle(config: Config) -> None:
    """Check that an earlier job of the same run has ended.

    Raises:
        ConfigError: it has not.
    """
    noted = read_job(Path(config.run.dir, config.run.id)) if config.run.id is not None else None
    if noted and (state := job_state(noted.job_id)) and state.is_live:
        raise ConfigError(
            f"run.id={config.run.id} is already job {noted.job_id}, which is {state.state}",
            f"Wait for it, end it with scancel {noted.job_id}, or choose another run.id.",
        )


def script_for(config: Config) -> str:
    """Return the batch script of one run, whose settings are frozen."""
    assert config.run.id is not None
    home = Path(config.run.dir, config.run.id).absolute()
    words = _frozen(config, shlex.quote(str(home / "config.yaml")))
    return script(config, config.run.id, output_file(home, "%j"), words)


def _frozen(config: Config, settings: str) -> list[str]:
    """Return the command line of a run whose settings are in a file, quoted for the shell.

    No file can permit code to be run, so the command line repeats what the user has permitted.

    Args:
        config: the settings.
        settings: their file, quoted.
    """
    allowed = []
    if config.allow_modules:
        allowed.append(f"allow_modules=[{','.join(config.allow_modules)}]")
    if any(commands_in(config)):
        allowed.append("allow_commands=true")
    return ["--frozen", settings, *map(shlex.quote, allowed)]


def script(
    config: Config, name: str, output: Path, words: Sequence[str], array: str | None = None
) -> str:
    """Return a batch script that starts the launcher on each node.

    It refers to values that come from the submitter's environment, which Slurm passes on.

    Args:
        config: the settings, of the first run for an array.
        name: the job's name.
        output: the file for its output.
        words: the launcher's command line, quoted for the shell.
        array: the elements of a job array.
    """
    slurm = slurm_of(config.cluster)
    python = slurm.python or ("python3" if slurm.container.image else sys.executable)
    places = {name: ("cluster", "slurm", "env", name) for name in slurm.env}
    variables = {
        name: word
        for name, place in places.items()
        if place in config.from_environment
        and (word := in_shell(config.from_environment[place][0])) is not None
    }
    command = [shlex.quote(python), "-m", "launcher", *words]
    cluster, folder = slurm_cluster(config.cluster), Path.cwd()
    return render(cluster, name, folder, output, command, array, variables)


def is_array(configs: Sequence[Config]) -> bool:
    """Return whether the runs of a sweep are one job array."""
    return slurm_of(configs[0].cluster).array is not None


def array_script(configs: Sequence[Config], sweep_id: str) -> str:
    """Return the script of one job array; element n is run n of the sweep."""
    first = configs[0]
    folder = Path(first.run.dir).absolute()
    settings = f'{shlex.quote(f"{folder / sweep_id}-")}"${{SLURM_ARRAY_TASK_ID}}"/config.yaml'
    output = output_file(folder / f"{sweep_id}-%a", "%A_%a")
    elements = f"0-{len(configs) - 1}%{slurm_of(first.cluster).array}"
    return script(first, sweep_id, output, _frozen(first, settings), elements)


def output_file(home: Path, job: str) -> Path:
    """Return the file for a job's output, which all attempts share."""
    return home.absolute() / "logs" / f"slurm-{job}.out"


def note_job(home: Path, job_id: str, script: Path) -> None:
    """Write into a run's folder which job it is and which script made it."""
    noted = Noted(job_id, str(script.absolute()))
    write_whole(home / JOB_FILE, json.dumps(asdict(noted)) + "\n")


def read_job(home: Path) -> Noted | None:
    """Return what `note_job` has written last, or None if there is nothing or it is damaged.

    A damaged file is reported and stays where it is, for the run may be another user's.

    Raises:
        OSError: the file cannot be read.
    """
    path = home / JOB_FILE
    try:
        return read(Noted, read_json(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        complain(f"{path} is damaged and not used: {error}")
        return None


def wait(home: Path, job_id: str) -> int:
    """Print a job's output as it comes, and return the job's exit code once it has ended."""
    path, position = output_file(home, job_id), 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # output may end in mid-character
    try:
        while True:
            state = job_state(job_id)
            if path.exists():
                with open(path, "rb") as output:
                    output.seek(position)
                    answer(decoder.decode(output.read()), end="")
                    position = output.tell()
            if state is None:  # Slurm forgets jobs; the run's records stay
                with lines_to(complain):
                    attempts = read_attempts(home)
                code = attempts[-1].exit_code if attempts else None
                return 1 if code is None else code
            if not state.is_live:
                if state.exit_code or state.state == "COMPLETED":
                    return state.exit_code
                complain(f"job {job_id} ended as {state.state}")
                return 1
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        answer("")  # after the ^C
        complain(f"job {job_id} keeps running; to end it: scancel {job_id}")
        raise


def sweep_status(sweep: Sweep) -> int:
    """Print the state and the results of the runs of a sweep."""
    assert sweep.dir is not None
    folder = Path(sweep.dir)
    homes = sorted({file.parent for file in folder.glob(f"*/{JOB_FILE}*")}, key=by_number)
    if not homes:
        raise ConfigError(
            f"sweep.dir={sweep.dir} holds no runs that were submitted to Slurm",
            "Name the folder that was printed when the sweep was submitted, multirun/ID.",
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
    is_idle = all(text.rpartition(" ")[2] in (*ENDED, "ended") for text in shown)
    if is_idle and (folder / JOURNAL).exists():
        from launcher.submit.study import count_ended

        if left := len(homes) - count_ended(folder):
            name = folder.name
            answer(
                f"{left} of {len(homes)} trials have no result, and no job is left: submit the "
                f"sweep again, by the same command with {to_type(('run.id', name))}"
            )
    return 0
