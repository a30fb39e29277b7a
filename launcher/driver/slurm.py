"""A run inside a Slurm job: the first task, which is the driver, and those that lend their nodes.

It adds to `run` the rendezvous with the job's other tasks, and the decision whether a run that
failed or was preempted is requeued. Tasks that lend their nodes import neither JAX nor Ray.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from launcher.base import DamagedError, complain, lines_to
from launcher.cluster.devices import visible_gpus
from launcher.cluster.errors import ClusterError, last_lines
from launcher.cluster.ray import scratch
from launcher.cluster.ray.private_ray import end_head, secret, start_head
from launcher.cluster.ray.session import ray_environment
from launcher.cluster.ray.worker_actor import FOR_THE_DRIVER
from launcher.cluster.slurm.allocation import (
    PREEMPTED,
    Allocation,
    own_address,
    preempted_for_nothing,
    read_attempts,
    worth_retrying,
)
from launcher.cluster.slurm.rendezvous import Answer, ask, join, open_rendezvous, rejoin
from launcher.config.cluster import slurm_of
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.folder import folder
from launcher.driver.folder.make_folder import make_folder, private_files
from launcher.stop import Stop

_FOR_NOTHING = (
    "the run was preempted twice in a row before its first step, so it is not requeued. Give the "
    "job more time than it takes to start (cluster.slurm.time), or let cluster.slurm.signal come "
    "later; {logs} shows how far it got."
)


def run_allocated(config: Config, allocation: Allocation, stop: Stop) -> int:
    """Run as task 0 of a Slurm job.

    Returns:
        The exit code: 75 if the job is to be requeued.

    Raises:
        ConfigError: the settings do not fit the job's nodes.
    """
    if allocation.restarts == 0:
        folder.check(config)
    if config.run.resume == "never":  # this job made the folder itself
        config = replace(config, run=replace(config.run, resume="auto"))
    if not slurm_of(config.cluster).emulated:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(config.cluster, os.environ)
    try:
        home = make_folder(config)
    except OSError as error:
        complain(str(error))
        return 1
    with private_files(config.run), lines_to(complain):
        code = _drive(home, config, allocation, stop)
    return note_exit_code(code)


def note_exit_code(code: int) -> int:
    """Give the job's script the exit code of task 0; return it."""
    if file := os.environ.get("LAUNCHER_EXIT_CODE"):
        with suppress(OSError):  # srun's has to do, as inside a container
            Path(file).write_text(str(code))
    return code


def _drive(home: Path, config: Config, allocation: Allocation, stop: Stop) -> int:
    """Run in the run's folder; return the exit code."""
    interrupt: KeyboardInterrupt | None = None
    try:
        with open_rendezvous(home, allocation, slurm_of(config.cluster), secret()) as rendezvous:
            from launcher.driver.run import guarded, run

            code = guarded(lambda: run(config, stop, rendezvous))
    except (ClusterError, OSError) as error:
        complain(str(error))
        code = 1
    except KeyboardInterrupt as error:  # a signal before it trained
        code, interrupt = stop.ending[0], error
    except Exception:
        traceback.print_exc()
        code = 1
    if code == PREEMPTED and _is_in_vain(home, allocation):
        complain(_FOR_NOTHING.format(logs=home / "logs"))
        return 1
    if interrupt is not None:
        raise interrupt
    if code == 1 and _may_come_back(home, allocation):
        complain("the run is requeued to try again")
        return PREEMPTED
    return code


def _is_in_vain(home: Path, allocation: Allocation) -> bool:
    try:
        return preempted_for_nothing(home, allocation)
    except OSError as error:
        complain(f"the records of earlier attempts cannot be read: {error}")
        return False


def _may_come_back(home: Path, allocation: Allocation) -> bool:
    try:
        return worth_retrying(read_attempts(home), allocation)
    except OSError as error:
        complain(f"the run is not requeued: {error}")
        return False


def serve_node(config: Config, allocation: Allocation, stop: Stop) -> int:
    """Join the driver's Ray, and that of each restart, until the driver ends.

    Returns:
        The exit code. It is 0 however the run ended: the job's exit code is the driver's.
    """
    try:
        with private_files(config.run), lines_to(complain):
            return _serve(config, allocation, stop)
    except (ClusterError, ConfigError, DamagedError, OSError) as error:
        complain(str(error))
        return 1


def _serve(config: Config, allocation: Allocation, stop: Stop) -> int:
    assert config.run.id is not None
    home = Path(config.run.dir, config.run.id)
    with stop.interruptible():
        first, token = join(home, allocation, slurm_of(config.cluster))
    # From now on only the driver handles signals, since it needs this node to save the state.
    # Before, they end this task, as they may have ended the driver.
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_DRIVER)
    connection: socket.socket | None = first
    while connection is not None:
        with closing(connection):
            answer = ask(connection, token)
            if answer is not None:
                _lend(config, allocation, connection, answer, token)
        connection = rejoin(home, allocation)
    return 0


def _lend(
    config: Config, allocation: Allocation, connection: socket.socket, answer: Answer, token: str
) -> None:
    """Run a node of the driver's Ray until the driver's head process ends."""
    slurm = slurm_of(config.cluster)
    address = own_address(allocation, slurm.network_interface, answer.ray.split(":")[0])
    folder = scratch.create()
    log = Path(answer.logs, f"ray_{allocation.index}.log")
    try:
        environ = ray_environment(os.environ, folder.token(token), nodes=True)
        if not slurm.emulated:
            environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(config.cluster, environ)
        options = [f"--ip={address}", f"--host={allocation.index}", f"--join={answer.ray}"]
        options += [f"--lifeline={connection.fileno()}"]
        head = start_head(folder, environ, log, 1, options, [connection.fileno()])
        failed = head.wait()
        assert head.stdout is not None
        was_up = bool(head.stdout.read())
        end_head(head, folder.path)
    finally:
        folder.remove()
    if failed and not was_up:
        raise ClusterError(
            f"Ray ended on {allocation.node}. The last lines of {log}:\n{last_lines(log)}"
        )
