"""Submit runs to Slurm from a login node, and follow them.

Settings, data and plan are checked here, before anything is submitted. The resolved settings and
the batch script are frozen in the run's folder, and only then is Slurm asked.
"""

from __future__ import annotations

import codecs
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from launcher.base import DamagedError, answer, complain, lines_to, read_json, write_whole
from launcher.base.reading import read
from launcher.cluster.kinds import kind_of
from launcher.cluster.slurm.attempts import read_attempts
from launcher.cluster.slurm.commands import job_state
from launcher.cluster.slurm.script import SCRIPT, Job, render
from launcher.config.cluster import slurm_cluster, slurm_of
from launcher.config.environment import commands_in, in_shell
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.folder import folder
from launcher.driver.folder.folder import RunFolder, delete_on_error
from launcher.driver.folder.make_folder import new_id
from launcher.driver.folder.plan_files import write_plan
from launcher.driver.folder.private_files import private_files
from launcher.driver.planning.prepare import prepare
from launcher.driver.run import guarded
from launcher.report.console import line_printer, make_console
from launcher.stop import Stop

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
    """Submit one run and return; with `cluster.slurm.wait` follow it to its end.

    Returns:
        The exit code of this process; with `wait`, that of the job.

    Raises:
        KeyboardInterrupt: a signal ended it; `stop` has the exit code.
    """
    if (array := slurm_of(config.cluster).array) is not None:
        raise ConfigError(
            f"cluster.slurm.array={array} is for sweeps, but this is one run",
            "Add -m, or leave it out.",
            ["cluster.slurm.array"],
        )
    if slurm_of(config.cluster).dry_run:
        run_id = config.run.id or new_id(config.model.name)
        return answer(script_for(replace(config, run=replace(config.run, id=run_id))), end="")
    return guarded(lambda: _submit(config, stop))


def _submit(config: Config, stop: Stop) -> int:
    kind_of(config.cluster).check_submission()
    home = freeze(config, make_console())
    text = script_for(replace(config, run=replace(config.run, id=home.id)))

    def announced(job_id: str) -> str:
        output = output_file(home.path, job_id)
        return (
            f"submitted job {job_id}\n"
            f"  run folder  {home.path}\n"
            f"  log         {output}\n"
            f"  follow      tail -F {shlex.quote(str(output))}\n"
            f"  cancel      scancel {job_id}"
        )

    submission = Submission(home.path / SCRIPT, text, announced, [home.path], home.created)
    job_id = hand_in(submission, config, stop)
    return wait(home.path, job_id) if slurm_of(config.cluster).wait else 0


@dataclass(frozen=True)
class Submission:
    """A batch script to submit.

    Attributes:
        path: the file for the script.
        text: its text.
        announced: returns the lines for the user, by the job's id.
        homes: the folders of its runs.
        made: the folders to delete if Slurm refuses it.
        is_array: whether element n of the job is run n.
    """

    path: Path
    text: str
    announced: Callable[[str], str]
    homes: Sequence[Path]
    made: Sequence[Path]
    is_array: bool = False


def hand_in(submission: Submission, config: Config, stop: Stop) -> str:
    """Submit a batch script, note its job in the folders of its runs, and return the job's id.

    A signal is delayed until the job is noted: one that Slurm has accepted, but that is not noted
    anywhere, would be submitted again. The script is private if it holds values of
    `cluster.slurm.env`, which may be secrets.

    Raises:
        ConfigError: Slurm refuses it.
    """

    def say(text: str) -> None:
        answer(text)

    path, until = submission.path, "once Slurm has answered; Ctrl-C once more leaves at once"
    with private_files(config.run):  # the job itself continues to keep them private
        write_whole(path, submission.text, private=config.cluster.holds_secrets)
        with delete_on_error(submission.made, on=ConfigError):
            with stop.heeded(say, until):
                job_id = kind_of(config.cluster).submit(path, stop.sleep)
                for n, home in enumerate(submission.homes):
                    note_job(home, f"{job_id}_{n}" if submission.is_array else job_id, path)
                answer(submission.announced(job_id))
            stop.check()
    return job_id


def freeze(config: Config, console: Console) -> RunFolder:
    """Check and plan a run, and write everything into its folder that the job will read.

    After that only submitting is left.
    """
    with lines_to(line_printer(console)):
        finished = folder.check(config)
        _check_idle(config)
        ready = prepare(config, console, finished=finished)
        with folder.claim(config) as home:
            write_plan(home, _settled(config), ready.plan)
            home.logs.mkdir(exist_ok=True)
            return home


def _settled(config: Config) -> Config:
    """Return `config` without the parts that are done here: submitting, and making a new folder."""
    cluster = slurm_cluster(config.cluster)
    cluster = replace(cluster, slurm=replace(cluster.slurm, dry_run=False, wait=False))
    resume = "auto" if config.run.resume == "never" else config.run.resume
    return replace(config, task="train", cluster=cluster, run=replace(config.run, resume=resume))


def _check_idle(config: Config) -> None:
    """Check that an earlier job of the same run has ended.

    Raises:
        ConfigError: it has not.
    """
    if config.run.id is None:
        return
    noted = read_job(Path(config.run.dir, config.run.id))
    if noted is None:
        return
    job_id = noted.job_id
    state = job_state(job_id)
    if state is not None and state.is_live:
        raise ConfigError(
            f"run.id={config.run.id} is already job {job_id}, which is {state.state}",
            f"Wait for it, end it with scancel {job_id}, or choose another run.id.",
            ["run.id"],
        )


def script_for(config: Config) -> str:
    """Return the batch script of one run, whose settings are frozen."""
    assert config.run.id is not None
    home = Path(config.run.dir, config.run.id).absolute()
    settings = shlex.quote(str(home / "config.yaml"))
    return script(config, config.run.id, output_file(home, "%j"), settings)


def script(config: Config, name: str, output: Path, settings: str, array: str | None = None) -> str:
    """Return a batch script that starts the launcher on each node.

    No file can permit code to be run, so the script repeats what the user has permitted. It refers
    to values that come from the submitter's environment, which Slurm passes on.

    Args:
        config: the settings, of the first run for an array.
        name: the job's name.
        output: the file for its output.
        settings: the file of the frozen settings, quoted for the shell.
        array: the elements of a job array.
    """
    slurm = slurm_of(config.cluster)
    python = slurm.python or ("python3" if slurm.container.image else sys.executable)
    allowed = []
    if config.allow_modules:
        allowed.append(f"allow_modules=[{','.join(config.allow_modules)}]")
    if any(commands_in(config)):
        allowed.append("allow_commands=true")
    places = {("cluster", "slurm", "env", name): name for name in slurm.env}
    words = {
        places[place]: in_shell(text)
        for place, (text, _) in config.from_environment.items()
        if place in places
    }
    launcher = [shlex.quote(python), "-m", "launcher", "--frozen", settings]
    job = Job(
        name=name,
        folder=Path.cwd(),
        output=str(output),
        command=[*launcher, *map(shlex.quote, allowed)],
        array=array,
        variables={name: word for name, word in words.items() if word is not None},
    )
    return render(slurm_cluster(config.cluster), job)


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
