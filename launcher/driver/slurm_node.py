"""The task on every node but the first of a Slurm job: it lends the node to the driver's Ray.

It neither plans nor trains, and imports neither JAX nor Ray.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing
from pathlib import Path

from launcher.base import DamagedError, complain, lines_to
from launcher.cluster.devices import visible_gpus
from launcher.cluster.errors import ClusterError, last_lines
from launcher.cluster.ray import scratch
from launcher.cluster.ray.environment import ray_environment
from launcher.cluster.ray.head_process import end, start_head
from launcher.cluster.ray.worker_actor import FOR_THE_DRIVER
from launcher.cluster.slurm.allocation import Allocation, own_address
from launcher.cluster.slurm.rendezvous import Answer, ask, join, rejoin
from launcher.config.cluster import slurm_of
from launcher.config.errors import ConfigError
from launcher.config.schema import Config
from launcher.driver.folder.private_files import private_files
from launcher.stop import Stop


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
    config: Config,
    allocation: Allocation,
    connection: socket.socket,
    answer: Answer,
    token: str,
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
        end(head, folder.path)
    finally:
        folder.remove()
    if failed and not was_up:
        raise ClusterError(
            f"Ray ended on {allocation.node}. The last lines of {log}:\n{last_lines(log)}"
        )
