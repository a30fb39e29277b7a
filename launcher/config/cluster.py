"""The section `cluster`: a class for each kind, with the settings of that kind and its `check`.

`launcher.cluster.kinds` has the behaviour of each kind, and says how to add one.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from launcher.base import TRANSPORTS
from launcher.config.errors import ConfigError
from launcher.config.fields import Switch, automatic, choice, number, off_or_automatic


@dataclass(frozen=True)
class Device:
    """One device of a described cluster.

    FLOP rates are dense; `sustained` is the share of the peak that large matrix products reach
    inside a training step, `sustained_attention` that of fused attention, and `launch_us` what a
    host takes to launch a product and the kernels around it. XLA's compiler has to know the last
    four (`hardware.target_config`).
    """

    name: str | None = None
    peak_tflops: float | None = number(None, minimum=0.0)  # 16 bit
    peak_tflops_fp32: float | None = number(None, minimum=0.0)  # 32 bit, as JAX computes it
    sustained: float = number(0.65, minimum=0.01, maximum=1.0)
    sustained_attention: float = number(0.45, minimum=0.01, maximum=1.0)
    launch_us: float = number(15.0, minimum=0.0)
    memory_gib: float | None = number(None, minimum=0.0)
    memory_gb_per_second: float | None = number(None, minimum=0.0)
    compute_capability: float | None = number(None, minimum=1.0)
    multiprocessors: int | None = number(None, minimum=1)
    clock_ghz: float | None = number(None, minimum=0.0)
    l2_mib: float | None = number(None, minimum=0.0)


@dataclass(frozen=True)
class LinkSpeeds:
    """How fast the devices of a described cluster reach one another, one way."""

    intra_host_gb_per_second: float | None = number(None, minimum=0.0)  # device to device
    inter_host_gb_per_second: float | None = number(None, minimum=0.0)  # host to host
    latency_us: float = number(10.0, minimum=0.0)


@dataclass(frozen=True)
class Container:
    """Options of srun's container plugin (pyxis); null leaves each out."""

    image: str | None = None
    mounts: list[str] = field(default_factory=list)
    workdir: str | None = None


@dataclass(frozen=True)
class Slurm:
    """Options of a Slurm job; null leaves the choice to the site.

    `conf/cluster/slurm.yaml` describes each setting.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    cpus: int | None = number(None, minimum=1)
    mem: str | None = None
    gpu_type: str | None = None
    gres: str | None = None
    exclusive: bool = True
    constraint: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    dependency: str | None = None
    job_name: str | None = None
    signal: str = "USR2@120"
    max_requeues: int = number(10, minimum=0)
    array: int | None = number(None, minimum=1)
    setup: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    python: str | None = None
    container: Container = field(default_factory=Container)
    srun_args: list[str] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    emulated: bool = False
    network_interface: str | None = None
    start_timeout: int = number(300, minimum=1)
    dry_run: bool = False
    wait: bool = False

    @property
    def node_memory(self) -> str | None:
        """The memory of a node to ask for: all of a whole one, unless the user says otherwise."""
        whole = self.exclusive and _EXCLUSIVE[0].isdisjoint(o.lstrip("-") for o in self.extra)
        return self.mem or ("0" if whole else None)


# The pattern of each text setting of `Slurm`, and the remedy for a value that does not match.
_TEXTS = {
    "time": (
        r"(?=\d)(\d+d)?(\d+h)?(\d+m)?",
        "Write days, hours and minutes, such as 2d12h, 4h or 90m.",
    ),
    "mem": (r"\d+[KMGT]?", "Write it as Slurm does, such as 64G."),
    "signal": (
        r"(TERM|USR1|USR2)@\d{1,5}",
        "Write TERM, USR1 or USR2, @ and the seconds before the time limit, such as USR2@120.",
    ),
    "job_name": (r"[\w.+-]+", "Use letters, digits, '.', '_', '+' and '-'."),
}
# Options of sbatch that `extra` may not set, with the setting to use instead; of those that the
# launcher decides itself there is none.
_DECIDED = "ntasks ntasks-per-node ntasks-per-gpu output error open-mode chdir parsable wait wrap"
_SBATCH_OPTIONS = {
    name.replace("_", "-"): f"cluster.slurm.{name}"
    for name in (
        *("partition", "account", "qos", "time", "mem", "gres", "exclusive", "constraint"),
        *("reservation", "nodelist", "exclude", "dependency", "job_name", "signal", "array"),
    )
} | {
    "nodes": "cluster.hosts",
    "cpus-per-task": "cluster.slurm.cpus",
    "gpus": "cluster.gpus",
    "gpus-per-node": "cluster.gpus",
    "requeue": "cluster.slurm.max_requeues",
    "no-requeue": "cluster.slurm.max_requeues",
    **dict.fromkeys((*_DECIDED.split(), "test-only"), ""),
}
# Options of sbatch and srun of which a job may have one, by their manuals.
_ALTERNATIVES = (
    "mem mem-per-cpu mem-per-gpu, cpus-per-task cpus-per-gpu, exclusive oversubscribe, "
    "core-spec thread-spec, hint threads-per-core, hint ntasks-per-core, hint extra-node-info, "
    "extra-node-info threads-per-core, extra-node-info ntasks-per-core"
)
_EXCLUSIVE = [frozenset(options.split()) for options in _ALTERNATIVES.split(",")]
_KNOWN = frozenset(_SBATCH_OPTIONS).union(*_EXCLUSIVE)


def minutes(time: str) -> int:
    """Return a `Slurm.time`, such as 2d12h or 90m, in minutes."""
    parts = {unit: int(number) for number, unit in re.findall(r"(\d+)([dhm])", time)}
    return (parts.get("d", 0) * 24 + parts.get("h", 0)) * 60 + parts.get("m", 0)


def _check_slurm(slurm: Slurm) -> Iterator[ConfigError]:
    """Yield errors of texts, of a signal before the run begins, and of options given twice."""
    for name, (pattern, remedy) in _TEXTS.items():
        value = getattr(slurm, name)
        if value is not None and not re.fullmatch(pattern, value):
            unread = f"cluster.slurm.{name}={value!r} cannot be understood"
            yield ConfigError(unread, remedy, code="wrong_value")
    for name in slurm.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield ConfigError(
                f"cluster.slurm.env: {name!r} cannot name an environment variable",
                "Use letters, digits and '_'.",
            )
    lead = int(slurm.signal.rpartition("@")[2])
    if slurm.time and 60 * minutes(slurm.time) <= lead:
        yield ConfigError(
            f"cluster.slurm.time={slurm.time} is not above the {lead} s before its end at which "
            f"cluster.slurm.signal={slurm.signal} has the run save and end",
            "Give the job more time, or the signal fewer seconds.",
        )
    if slurm.gres and slurm.gpu_type:
        yield ConfigError(
            f"cluster.slurm.gres={slurm.gres} and cluster.slurm.gpu_type={slurm.gpu_type} both "
            "ask for GPUs",
            "Leave one out.",
        )
    for option in slurm.extra:
        if problem := _extra_problem(option):
            yield ConfigError(*problem, ["cluster.slurm.extra"])
    yield from _contradictions(slurm)


def _contradictions(slurm: Slurm) -> Iterator[ConfigError]:
    """Yield an error for options of the job, or of its step, that exclude each other."""
    job = {"mem": f"cluster.slurm.mem={slurm.mem}"} if slurm.mem else {}
    job |= {"cpus-per-task": f"cluster.slurm.cpus={slurm.cpus}"} if slurm.cpus else {}
    job |= {"exclusive": "cluster.slurm.exclusive=true"} if slurm.exclusive else {}
    job |= {option.lstrip("-"): f"cluster.slurm.extra.{option}" for option in slurm.extra}
    words = (word for word in slurm.srun_args if word.startswith("--"))
    step = {word[2:].partition("=")[0]: f"{word} of cluster.slurm.srun_args" for word in words}
    for options, places in itertools.product(_EXCLUSIVE, (job, step)):
        if len(found := [places[option] for option in sorted(options & places.keys())]) > 1:
            yield ConfigError(
                f"{' and '.join(found)} exclude each other",
                "Leave one out" + (", or set exclusive=false." if "exclusive" in options else "."),
                [text.partition(" of ")[2] or text.partition("=")[0] for text in found],
            )


def _extra_problem(option: str) -> tuple[str, str] | None:
    """Return what is wrong with an option of `Slurm.extra`, and the remedy."""
    name = option.lstrip("-")
    longer = [known for known in sorted(_KNOWN) if known.startswith(name)]
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name):
        problem = f"cluster.slurm.extra: {option!r} cannot name an option of sbatch"
        return problem, "Write its name alone, such as mail-type, and its value behind it."
    if name in _SBATCH_OPTIONS:
        setting = _SBATCH_OPTIONS[name]
        remedy = f"Use {setting}." if setting else "The launcher sets it itself."
        return f"cluster.slurm.extra.{option} cannot be set here", remedy
    if longer and name not in _KNOWN:  # which sbatch takes it for
        return f"cluster.slurm.extra.{option} is short for {longer[0]}", "Write options in full."
    return None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Settings of every kind of cluster.

    Attributes:
        kind: which kind it is.
        gpus: the number of devices in total.
        hosts: the number of hosts.
        price_per_device_hour: what a device costs an hour, in any currency; None: not known.
        hours_between_faults: the mean time between two faults of all hosts together; None: by their
            number (`driver.record.faults`).
        clause: why the kind has no other settings, for messages.
    """

    kind: str
    gpus: int | None = number(None, minimum=1)
    hosts: int = number(1, minimum=1)
    price_per_device_hour: float | None = number(None, minimum=0.0)
    hours_between_faults: float | None = automatic(None, minimum=0.001)
    clause: ClassVar[str] = ""

    @property
    def title(self) -> str:
        """The option that chooses it."""
        return self.kind

    @property
    def holds_secrets(self) -> bool:
        """Whether a setting may be a secret."""
        return False

    @property
    def host_wait(self) -> float:
        """The seconds to wait for a lost host; 0: a run never continues without it."""
        return 0.0

    def check(self) -> Iterator[ConfigError]:
        """Yield the contradictions between these settings."""
        if self.gpus is not None and self.gpus % self.hosts:
            yield ConfigError(
                f"cluster.gpus={self.gpus} cannot be shared evenly by "
                f"cluster.hosts={self.hosts} hosts",
                "cluster.gpus is the total over all hosts: make it a multiple.",
            )


_ANSWER_SECONDS = 600.0  # of an evaluation, a save, or a step before the pace is known


@dataclass(frozen=True, kw_only=True)
class Machines(Cluster):
    """Settings of every cluster that can be trained on.

    Attributes:
        start_timeout: seconds until Ray is up, and then until one more process is up.
        step_timeout: seconds without an answer after which workers are taken to hang; None: by the
            pace of the newest steps (`driver.record.step_log.Pace`).
        max_restarts: how often the workers are started again when they die, hang or lose Ray.
    """

    start_timeout: float = number(120.0, minimum=1.0)
    step_timeout: float | None = automatic(None)
    max_restarts: int = number(3, minimum=0)

    @property
    def answer_timeout(self) -> float:
        """The seconds that an answer may take where no pace is known."""
        return _ANSWER_SECONDS if self.step_timeout is None else self.step_timeout


@dataclass(frozen=True, kw_only=True)
class Local(Machines):
    """This machine: its GPUs, all if `gpus` is None, or CPU devices where it has none."""

    kind: str = "local"
    clause = "which is this one machine"

    def check(self) -> Iterator[ConfigError]:
        """Yield the contradictions between these settings."""
        if self.hosts > 1:
            yield ConfigError(
                f"cluster=local is this one machine, not cluster.hosts={self.hosts}",
                "Use cluster=emulated to emulate several hosts on it.",
            )
        yield from super().check()


@dataclass(frozen=True, kw_only=True)
class Hosts(Machines):
    """Settings of every cluster that may have several hosts.

    Attributes:
        transport: the transport of arrays between worker processes.
    """

    transport: str = choice("auto", "auto", *TRANSPORTS)

    def check(self) -> Iterator[ConfigError]:
        """Yield the contradictions between these settings."""
        yield from super().check()
        if self.transport != "auto" and self.hosts == 1:
            yield ConfigError(
                f"cluster.transport={self.transport} moves arrays between processes, and "
                "cluster.hosts=1 is one",
                "Leave it at auto.",
            )


@dataclass(frozen=True, kw_only=True)
class Nodes(Hosts):
    """Settings of every cluster of machines of their own, of which one may be lost.

    Attributes:
        wait_for_host: seconds for a lost host to come back, before the run continues with those
            that are left; 0, off: it never does. None: by the kind.
    """

    _returns = 600.0  # seconds by which a machine that starts again, or one in its place, is back
    wait_for_host: int | None = off_or_automatic()

    @property
    def host_wait(self) -> float:
        """See `Cluster.host_wait`."""
        return self._returns if self.wait_for_host is None else self.wait_for_host


@dataclass(frozen=True, kw_only=True)
class Emulated(Hosts):
    """CPU devices of this machine that stand in, and several processes for several hosts."""

    kind: str = "emulated"
    gpus: int | None = number(4, minimum=1)
    clause = "which is this one machine"


@dataclass(frozen=True, kw_only=True)
class SlurmCluster(Nodes):
    """Nodes that Slurm lends."""

    _returns = 120.0  # a task that has lost its connection; a node that fails leaves the job
    kind: str = "slurm"
    gpus: int | None = number(8, minimum=1)
    slurm: Slurm = field(default_factory=Slurm)
    switches = (
        Switch(
            ("cluster.slurm.container.mounts", "cluster.slurm.container.workdir"),
            ("cluster.slurm.container.image",),
            lambda c: c.cluster.slurm.container.image is not None,
            "without cluster.slurm.container.image there is no container",
            "name an image",
        ),
        Switch(
            ("cluster.slurm.gpu_type", "cluster.slurm.gres"),
            ("cluster.slurm.emulated",),
            lambda c: not c.cluster.slurm.emulated,
            "cluster.slurm.emulated=true asks for no GPUs",
            "leave that out",
        ),
    )

    @property
    def holds_secrets(self) -> bool:
        """See `Cluster.holds_secrets`."""
        return bool(self.slurm.env)

    def check(self) -> Iterator[ConfigError]:
        """Yield the contradictions between these settings."""
        yield from super().check()
        if self.gpus is None:
            yield ConfigError(
                "cluster.gpus is not set, and cluster=slurm must know how many to ask for",
                "Give the number in total, over all nodes.",
            )
        yield from _check_slurm(self.slurm)


@dataclass(frozen=True, kw_only=True)
class RayCluster(Nodes):
    """Nodes of an existing Ray cluster, with their devices.

    Attributes:
        address: the cluster's address: "auto", or host:port.
        gpus: the number of devices in total; None takes all GPUs of the nodes, or four emulated CPU
            devices a worker where no node has a GPU.
        num_cpus: the CPUs that each worker requests.
        resources: the custom resources that each worker requests, by name.
    """

    kind: str = "ray"
    address: str = "auto"
    num_cpus: float = number(0.0, minimum=0.0)
    resources: dict[str, float] = field(default_factory=dict)

    def check(self) -> Iterator[ConfigError]:
        """Yield errors of the address and of the resources of a worker."""
        yield from super().check()
        if problem := ray_address_problem(self.address):
            unusable = f"cluster.address={self.address} is not a usable address"
            yield ConfigError(unusable, problem, code="wrong_value")
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU"):
                setting = {"CPU": "cluster.num_cpus", "GPU": "cluster.gpus"}[name]
                yield ConfigError(f"cluster.resources.{name} cannot be set here", f"Use {setting}.")
            if amount <= 0:
                yield ConfigError(
                    f"cluster.resources.{name}={amount:g} demands nothing",
                    "Give an amount above 0, or leave it out.",
                )


def ray_address_problem(address: str) -> str:
    """Return the remedy for a wrong address of a Ray cluster; "" for a right one."""
    if address.startswith("ray://"):
        return (
            "That is a Ray Client, which runs this program's calls in another process: run the "
            'launcher on one of its nodes and give "auto", or the host:port that `ray start` '
            "printed."
        )
    host, _, port = address.rpartition(":")
    if address == "auto" or (host and port.isdigit() and 0 < int(port) < 2**16):
        return ""
    return 'Give "auto" for this machine\'s Ray cluster, or host:port as `ray start` printed it.'


@dataclass(frozen=True, kw_only=True)
class Described(Cluster):
    """Machines that are not here: `name`, `device` and `links` say what they are."""

    kind: str = "described"
    name: str | None = None
    device: Device = field(default_factory=Device)
    links: LinkSpeeds = field(default_factory=LinkSpeeds)
    clause = "which is only planned for"
    switches = (
        Switch(
            ("cluster.links.inter_host_gb_per_second",),
            ("cluster.hosts",),
            lambda c: c.cluster.hosts > 1,
            "cluster.hosts=1 has no link to another host",
            "set cluster.hosts",
        ),
    )

    @property
    def title(self) -> str:
        """The option that chooses it, as its file is to be called."""
        return self.name or self.kind

    def check(self) -> Iterator[ConfigError]:
        """Yield the figures that a plan needs and that are missing."""
        yield from super().check()
        figures = ("name", "peak_tflops", "memory_gib", "memory_gb_per_second")
        needed = ["gpus", *(f"device.{name}" for name in figures), "links.intra_host_gb_per_second"]
        if self.hosts > 1:
            needed.append("links.inter_host_gb_per_second")
        for key in needed:
            if not operator.attrgetter(key)(self):
                yield ConfigError(
                    f"cluster.{key} is not set, and a described cluster needs it",
                    "Fill it in from the datasheet; conf/device/h100.yaml is an example.",
                )


CLUSTERS: dict[str, type[Cluster]] = {
    one.kind: one for one in (Local, Emulated, SlurmCluster, RayCluster, Described)
}


def machines_of(cluster: Cluster) -> Machines:
    """Return a cluster that is known to be one to train on."""
    assert isinstance(cluster, Machines)
    return cluster


def slurm_cluster(cluster: Cluster) -> SlurmCluster:
    """Return a cluster that is known to be Slurm's."""
    assert isinstance(cluster, SlurmCluster)
    return cluster


def slurm_of(cluster: Cluster) -> Slurm:
    """Return what a job asks of Slurm, of a cluster that is known to be Slurm's."""
    return slurm_cluster(cluster).slurm
