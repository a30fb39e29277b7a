"""The batch scripts: held against golden files, and accepted by bash and shellcheck."""

import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.cluster.slurm.commands import duration, render
from launcher.config.compose import load

HERE = Path(__file__).parent
BY_HAND = HERE.parents[2] / "slurm" / "train.sbatch"
COMMAND = ["/venv/bin/python", "-m", "launcher", "--frozen", "/home/me/outputs/run/config.yaml"]
ELEMENT = '/home/me/multirun/s/s-"${SLURM_ARRAY_TASK_ID}"/config.yaml'
FOLDER = Path("/home/me")
TAIL = "\n# One task on each node"  # from here on the same in every script
ONE_RUN = ("run", FOLDER, "/home/me/outputs/run/logs/slurm-%j.out", COMMAND)

# name: (what is set, the job)
GOLDEN = {
    "one_node": (["cluster.gpus=8"], ONE_RUN),
    "many_nodes": (
        ["cluster.hosts=16", "cluster.gpus=64", "cluster.slurm.partition=gpu"],
        ONE_RUN,
    ),
    "array_sweep": (
        ["cluster.slurm.exclusive=false", "cluster.slurm.cpus=8"],
        (
            *("s", FOLDER, "/home/me/multirun/s/s-%a/logs/slurm-%A_%a.out"),
            *([*COMMAND[:-1], ELEMENT], "0-2%2"),
        ),
    ),
    "container": (
        [
            "cluster.slurm.container.image=nvcr.io/nvidia/jax:25.10-py3",
            "cluster.slurm.container.mounts=[/home/me:/home/me,'/data:/data:ro']",
            "cluster.slurm.container.workdir=/home/me",
        ],
        (*ONE_RUN[:3], ["python3", *COMMAND[1:]]),
    ),
    "everything_set": (
        [
            "cluster.hosts=2",
            "cluster.gpus=16",
            "cluster.slurm.partition=gpu",
            "cluster.slurm.account=physics",
            "cluster.slurm.qos=high",
            "cluster.slurm.time=2d12h30m",
            "cluster.slurm.cpus=96",
            "cluster.slurm.mem=512G",
            "cluster.slurm.gpu_type=a100",
            "cluster.slurm.exclusive=false",
            "cluster.slurm.constraint='nvlink&ib'",
            "cluster.slurm.reservation=course",
            "cluster.slurm.nodelist='node[1-8]'",
            "cluster.slurm.exclude='node[3,5]'",
            "cluster.slurm.dependency='afterok:12:13'",
            "cluster.slurm.job_name=big-one",
            "cluster.slurm.signal=TERM@300",
            "cluster.slurm.max_requeues=0",
            "cluster.slurm.setup=['module load cuda/12.6',umask 027]",
            "cluster.slurm.env={GREETING: 'it\\'s \"now\", 5 !', NCCL_DEBUG: WARN}",
            "cluster.slurm.srun_args=['--mpi=none','--export=ALL,A=b c']",
            "cluster.slurm.extra={mail-type: END, comment: 'two words', contiguous: ''}",
        ],
        ("run", Path("/home/me/my runs"), "/home/me/my runs/slurm-%j.out", COMMAND),
    ),
}


def rendered(name: str) -> str:
    settings, job = GOLDEN[name]
    return render(load(["cluster=slurm", *settings]).cluster, *job)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_script_is_the_golden_one(name: str) -> None:
    """To accept a change: python tests/cluster/slurm/test_script.py, and read the difference."""
    assert rendered(name) == (HERE / "golden" / f"{name}.sbatch").read_text()


@pytest.mark.parametrize("name", [*GOLDEN, BY_HAND])
def test_bash_and_shellcheck_accept_it(name: str | Path) -> None:
    path = name if isinstance(name, Path) else HERE / "golden" / f"{name}.sbatch"
    checkers = [["bash", "-n"]]
    if shutil.which("shellcheck"):
        checkers.append(["shellcheck"])
    for checker in checkers:
        result = subprocess.run([*checker, str(path)], capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_the_script_to_submit_by_hand_does_the_same() -> None:
    assert BY_HAND.read_text().endswith(rendered("one_node").partition(TAIL)[2])


@pytest.mark.parametrize(
    ("text", "slurm"),
    [("90m", "0-01:30:00"), ("4h", "0-04:00:00"), ("2d12h", "2-12:00:00"), ("36h", "1-12:00:00")],
)
def test_a_time_limit_has_one_reading(text: str, slurm: str) -> None:
    assert duration(text) == slurm


@pytest.mark.parametrize(
    ("words", "memory"),
    [
        ([], ["--mem=0"]),
        (["cluster.slurm.mem=64G"], ["--mem=64G"]),
        (["cluster.slurm.extra={mem-per-gpu: 64G}"], ["--mem-per-gpu=64G"]),
        (["cluster.slurm.extra={--mem-per-cpu: 4G}"], ["--mem-per-cpu=4G"]),
        (["cluster.slurm.exclusive=false"], []),
    ],
)
def test_the_memory_of_whole_nodes_gives_way_to_the_users(
    words: list[str], memory: list[str]
) -> None:
    text = render(load(["cluster=slurm", *words]).cluster, *ONE_RUN)
    assert [line.split()[1] for line in text.splitlines() if "SBATCH --mem" in line] == memory


def test_values_reach_bash_as_they_were_set() -> None:
    """The variables and the words of srun, as bash itself sees them."""
    script = rendered("everything_set")
    head = script.partition(TAIL)[0].replace("module load cuda/12.6", "true")
    show = 'printf \'%s\\n\' "$GREETING" "${srun_args[@]}"'
    result = subprocess.run(["bash", "-c", head + show], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        'it\'s "now", 5 !',
        "--mpi=none",
        "--export=ALL,A=b c",
    ]


if __name__ == "__main__":
    for golden in GOLDEN:
        (HERE / "golden" / f"{golden}.sbatch").write_text(rendered(golden))
