"""Variables of other programs' jobs and processes, which reach neither our jobs nor our workers.

Each variable of the manuals is answered here; where Slurm's manuals are installed, they are read.
"""

import gzip
import itertools
import re
import shlex
from pathlib import Path

import pytest

from launcher.base import OF_SLURM
from launcher.cluster.devices import DevicePool
from launcher.cluster.ray.session import worker_environment
from launcher.cluster.slurm.commands import sbatch, surroundings, unheeded
from launcher.config.cluster import Slurm, SlurmCluster
from launcher.config.errors import ConfigError

# Of the manuals' variables, those that a job keeps: they say where it is submitted, and by whom.
KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SBATCH_CLUSTERS", "SLURM_JWT"}
SBATCH = """ACCOUNT ACCTG_FREQ ARRAY_INX BATCH CONSTRAINT CONTAINER CONTAINER_ID CORE_SPEC
CPUS_PER_GPU DELAY_BOOT DISTRIBUTION ERROR EXCLUSIVE EXPORT GET_USER_ENV GPU_BIND GPU_FREQ GPUS
GPUS_PER_NODE GPUS_PER_TASK GRES GRES_FLAGS HINT IGNORE_PBS INPUT JOB_NAME MEM_BIND MEM_PER_CPU
MEM_PER_GPU MEM_PER_NODE NETWORK NO_KILL NO_REQUEUE OPEN_MODE OUTPUT OVERCOMMIT PARTITION POWER
PROFILE QOS REQ_SWITCH REQUEUE RESERVATION SIGNAL SPREAD_JOB THREAD_SPEC THREADS_PER_CORE
TIMELIMIT TRES_BIND TRES_PER_TASK USE_MIN_NODES WAIT WAIT_ALL_NODES WAIT4SWITCH WCKEY""".split()  # noqa: SIM905
# Those by which srun starts a step otherwise, inside a job and with the options that we give it.
SRUN = """BCAST BCAST_EXCLUDE COMPRESS CONTAINER CORE_SPEC CPU_FREQ_REQ CPUS_PER_GPU CPUS_PER_TASK
DIST_PLANESIZE DISTRIBUTION EPILOG EXACT EXCLUSIVE EXPORT_ENV GPU_BIND GPU_FREQ GPUS GPUS_PER_NODE
GPUS_PER_TASK GRES GRES_FLAGS HINT LABELIO MEM_BIND MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE MPI_TYPE
NETWORK NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_SOCKET OPEN_MODE OVERCOMMIT OVERLAP PROFILE
PROLOG REMOTE_CWD RESV_PORTS SEND_LIBS SIGNAL SPREAD_JOB STDERRMODE STDOUTMODE STEP_GRES
TASK_EPILOG TASK_PROLOG THREAD_SPEC THREADS THREADS_PER_CORE TIMELIMIT TRES_BIND TRES_PER_TASK
OOMKILLSTEP UMASK UNBUFFEREDIO USE_MIN_NODES WAIT WORKING_DIR""".split()  # noqa: SIM905
CHANGE = [f"SBATCH_{name}" for name in SBATCH] + [f"SLURM_{name}" for name in SRUN]
# Of a job, or of what Slurm's commands show.
OF_A_JOB = """SLURM_JOB_ID SLURM_JOBID SLURM_NODELIST SLURM_NTASKS SLURM_STEP_ID SLURM_SUBMIT_DIR
SLURM_GPUS_ON_NODE SLURM_TASKS_PER_NODE SLURMD_NODENAME SALLOC_PARTITION SQUEUE_PARTITION
SINFO_PARTITION SCONTROL_ALL SBATCH_DEBUG _SLURM_SPANK_OPTION_pyxis_container_image
SLURM_EXIT_ERROR SLURM_DEBUG""".split()  # noqa: SIM905
# By which other launchers tell a process which one it is; of each, JAX or MPI in a worker asks.
RANKS = """OMPI_COMM_WORLD_LOCAL_RANK OMPI_MCA_orte_hnp_uri PMI_RANK PMIX_RANK
JAX_COORDINATOR_ADDRESS JAX_COORDINATOR_BIND_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID
JAX_LOCAL_DEVICE_IDS JAX_PARTITION_INDEX JAX_SLICE_INDEX RAY_ADDRESS RAY_NAMESPACE""".split()  # noqa: SIM905
# The user's, which travel: nothing of ours asks torchrun's, and Slurm sets its own GPUs.
USERS = """PATH WANDB_API_KEY JAX_PLATFORMS_X JAX_COMPILATION_CACHE_DIR NCCL_DEBUG OMPI_MCA_btl
MASTER_ADDR RANK HYDRA_FULL_ERROR SLURMLESS MY_SLURM_NOTE""".split()  # noqa: SIM905


@pytest.mark.parametrize("command", ["sbatch", "srun"])
def test_every_variable_of_the_manual_is_answered(command: str) -> None:
    """Those that Slurm's commands read, of the version that is installed here, if one is."""
    page = Path(f"/usr/share/man/man1/{command}.1.gz")
    if not page.exists():
        pytest.skip(f"{command}'s manual is not installed")
    text = gzip.decompress(page.read_bytes()).decode().replace("\\fB", "").replace("\\fR", "")
    found = text.split('INPUT ENVIRONMENT VARIABLES"')[1].split(".SH")[0]
    names = set(re.findall(r"^S[A-Z]+_[A-Z0-9_]+", found, re.MULTILINE))
    assert len(names) > 40
    assert {name for name in names if not OF_SLURM.match(name)} == set()
    of_sbatch = {name for name in names if name.startswith("SBATCH_")}
    assert of_sbatch <= {*CHANGE, "SBATCH_CLUSTERS", "SBATCH_DEBUG"}


@pytest.mark.sampled(6, rest="slow")
@pytest.mark.parametrize("name", CHANGE)
def test_a_variable_that_changes_a_job_is_dropped_and_said(name: str) -> None:
    assert surroundings({name: "1", "HOME": "/h"}) == {"HOME": "/h"}
    assert unheeded({name: "1", "HOME": "/h"}) == [name]


@pytest.mark.sampled(4, rest="slow")
@pytest.mark.parametrize("name", [*OF_A_JOB, *sorted(KEPT), *RANKS, *USERS])
def test_the_rest_is_dropped_or_travels_without_a_word(name: str) -> None:
    assert (name in surroundings({name: "1"})) == (name not in OF_A_JOB)
    assert unheeded({name: "1"}) == []


@pytest.mark.sampled(8, rest="slow")
@pytest.mark.parametrize("name", [*CHANGE, *OF_A_JOB, *RANKS, *USERS])
def test_a_worker_does_not_take_itself_for_another_launchers_process(name: str) -> None:
    environ = worker_environment({name: "1"}, DevicePool("cpu", 2, 2, "CPU", ""), 0)
    assert (name in environ) == (name in USERS)


def test_slurm_is_called_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is the job, which gets what sbatch has."""
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nenv > {shlex.quote(str(tmp_path))}/env\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in {*CHANGE, *OF_A_JOB, *KEPT, *USERS} - {"PATH"}:
        monkeypatch.setenv(name, "1")
    assert sbatch(tmp_path / "job") == "7"
    passed = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert passed & {*CHANGE, *OF_A_JOB} == set()
    assert passed >= {*KEPT, *USERS}


# By sbatch's manual, and srun's: of each, a job or a step may have one.
ALTERNATIVES = [
    ("mem", "mem-per-cpu", "mem-per-gpu"),
    ("cpus-per-task", "cpus-per-gpu"),
    ("exclusive", "oversubscribe"),
    ("core-spec", "thread-spec"),
    *itertools.product(["hint"], ["threads-per-core", "ntasks-per-core", "extra-node-info"]),
    *itertools.product(["extra-node-info"], ["threads-per-core", "ntasks-per-core"]),
]
PAIRS = [pair for options in ALTERNATIVES for pair in itertools.combinations(options, 2)]
SETTINGS = {"mem": {"mem": "4G"}, "cpus-per-task": {"cpus": 4}, "exclusive": {"exclusive": True}}


def problems(**settings: object) -> list[ConfigError]:
    slurm = Slurm(**{"exclusive": False, **settings})  # type: ignore[arg-type]
    return list(SlurmCluster(slurm=slurm).check())


@pytest.mark.parametrize("pair", PAIRS)
def test_options_that_exclude_each_other_are_refused_with_both_places(
    pair: tuple[str, str],
) -> None:
    asked = {of: SETTINGS.get(of, {}) for of in pair}
    extra = {of: "2" for of, setting in asked.items() if not setting}
    here = {key: value for setting in asked.values() for key, value in setting.items()}
    assert problems(**here) == []
    assert [problem for of in extra for problem in problems(extra={of: "2"})] == []
    (error,) = problems(**here, extra=extra)
    assert set(error.keys) == {
        f"cluster.slurm.{key}" for key in (*here, *map("extra.{}".format, extra))
    }
    assert "cannot be set here" in str(problems(extra={"ntasks-per-gpu": "2"})[0])
    (error,) = problems(srun_args=[f"--{of}=1" for of in pair])
    assert all(f"--{of}=1 of cluster.slurm.srun_args" in error.problem for of in pair)
