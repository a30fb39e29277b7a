"""A real Slurm of two nodes on this one machine, for tests: its own munge, controller and daemons.

Nothing of the system's own Slurm is read or written, no root is needed, and everything listens on
127.0.0.1. Needs Debian's `slurm-wlm` and `munge` (`missing` says which commands are not there).
No epilog tidies up: what a job leaves behind stays, and `left` finds it.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

COMMANDS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "srun")
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
NODES = ("node1", "node2")
_PATIENCE = 300  # seconds for what takes one on a machine that is not busy

CONF = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits
AuthInfo=socket={state}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/%n.pid
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/%n
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/%n.log
PlugStackConfig={state}/plugstack.conf
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
ReturnToService=2
KillWait=120
SlurmdTimeout=15
SlurmctldTimeout=15
InactiveLimit=0
# nodes may claim more CPUs than this machine has
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=4000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=4000
PartitionName=batch Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing() -> list[str]:
    """The commands that are needed and not installed."""
    return [name for name in COMMANDS if shutil.which(name, path=SEARCH) is None]


class SlurmCluster:
    """Two nodes, `node1` and `node2`, of 8 claimed CPUs each; partitions `batch` and `urgent`."""

    def __init__(self) -> None:
        self._state = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.name = f"test{secrets.token_hex(4)}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.scratch = self._state / "t"  # where jobs put what is temporary
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
            "PATH": SEARCH,
            "SLURM_CONF": str(self._state / "slurm.conf"),
            "TMPDIR": str(self.scratch),
        }

    def __enter__(self) -> "SlurmCluster":
        self._write()
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(subprocess.SubprocessError, AssertionError):  # whatever happens, all ends
            self.run("scancel", "--user", getpass.getuser(), check=False)
            wait_until(lambda: not self.run("squeue", "-h"), 60)
        for name in reversed(self._daemons):
            self._kill(self._daemons[name].pid)
        for process in [*self._steps(""), *self.left()]:
            self._kill(process.pid)
        for daemon in self._daemons.values():
            daemon.wait()
        shutil.rmtree(self._state, ignore_errors=True)

    def start(self) -> None:
        """Start what does not run, and wait until every node is ready for a job."""
        state, conf = self._state, str(self._state / "slurm.conf")
        munge = ["munged", "--foreground", "--force", f"--key-file={state}/munge.key"]
        munge += [f"--socket={state}/munge.socket", f"--pid-file={state}/munged.pid"]
        munge += [f"--log-file={state}/munged.log", f"--seed-file={state}/munge.seed"]
        self._launch("munged", munge)
        wait_until((state / "munge.socket").exists, _PATIENCE)
        self._launch("slurmctld", ["slurmctld", "-D", "-f", conf])
        for node in NODES:
            self._launch(node, ["slurmd", "-D", "-N", node, "-f", conf])
        wait_until(self._is_ready, _PATIENCE)

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        """The output of a command that sees this cluster, and `variables` in its environment."""
        environ = {**self.environ, **variables}
        result = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=_PATIENCE
        )
        assert not check or result.returncode == 0, result.stderr
        return result.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What the controller says of a job."""
        told = self.run("scontrol", "--oneliner", "show", "job", job_id, check=False)
        return dict(word.partition("=")[::2] for word in told.split())

    def left(self) -> list[psutil.Process]:
        """The processes of jobs that still run, on whichever node."""
        mine = f"SLURM_CLUSTER_NAME={self.name}"
        return [p for p in psutil.process_iter() if mine in _environ(p)]

    def fail_node(self, node: str) -> None:
        """A power cut: the node's daemon and everything on it are gone at once."""
        for pid in [self._daemons[node].pid, *(p.pid for p in self._steps(node))]:
            self._kill(pid)
        self.kill_tasks(node)
        self._daemons.pop(node).wait()

    def kill_tasks(self, node: str) -> None:
        """Everything that jobs have started on a node is gone."""
        for process in [p for p in self.left() if f"SLURMD_NODENAME={node}" in _environ(p)]:
            self._kill(process.pid)

    def fail_controller(self) -> None:
        """The controller dies at once; jobs continue."""
        controller = self._daemons.pop("slurmctld")
        for child in psutil.Process(controller.pid).children(recursive=True):
            self._kill(child.pid)
        self._kill(controller.pid)
        controller.wait()

    def _write(self) -> None:
        state = self._state
        for folder in ("ctld", *NODES, "t"):
            (state / folder).mkdir()
        (state / "plugstack.conf").touch()
        (state / "munge.key").touch(0o600)
        (state / "munge.key").write_bytes(secrets.token_bytes(1024))
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        (state / "slurm.conf").write_text(
            CONF.format(name=self.name, host=host, user=getpass.getuser(), state=state, ports=ports)
        )

    def _launch(self, name: str, command: list[str]) -> None:
        if name not in self._daemons:
            with open(self._state / f"{name}.out", "ab") as log:
                self._daemons[name] = subprocess.Popen(
                    command,
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def _is_ready(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-p", "batch", "-o", "%T", check=False).split()
        return len(states) == len(NODES) and set(states) <= {"idle", "mixed", "allocated"}

    def _steps(self, node: str) -> list[psutil.Process]:
        """Slurm's own processes for jobs on a node ("": on any)."""
        found = []
        for process in psutil.process_iter(["name"]):
            with suppress(psutil.Error):
                if process.info["name"] == "slurmstepd":
                    files = [file.path for file in process.open_files()]
                    if any(path.startswith(f"{self._state}/{node}") for path in files):
                        found.append(process)
        return found

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    """Return as soon as `condition()` holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this did not come to pass"
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _environ(process: psutil.Process) -> list[str]:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return []
        return [f"{name}={value}" for name, value in process.environ().items()]
    except psutil.Error:  # another user's, or gone
        return []
