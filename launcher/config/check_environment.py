"""Check which settings take the value of a variable (`${oc.env:X}`), which may be a secret.

Most may: what is written of them is the interpolation. Of some the value itself is what is handed
on, to Weights & Biases, to a file's name or to a batch script; those are the command line's.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.config.errors import ConfigError
from launcher.config.fields import Place
from launcher.config.interpolation import dotted, in_shell
from launcher.config.keys import setting_keys
from launcher.config.machines import SlurmCluster
from launcher.config.schema import Config

_SHOWN = ("run.id", *(f"wandb.{name}" for name in ("project", "entity", "group", "name", "tags")))
_IN_SCRIPT = ("cluster.hosts", "cluster.gpus", "cluster.slurm")
# In the section of the job, and no word of its script; of `env` the script asks for the variable.
_NOT_IN_SCRIPT = tuple(
    f"cluster.slurm.{name}"
    for name in ("env", "network_interface", "start_timeout", "dry_run", "wait")
)


def check_sizes(texts: Mapping[Place, str]) -> None:
    """Raise ConfigError for an entry of the table of sizes that a variable fills.

    What is found wrong with it is said with its value, and it is copied to where the model's own
    dimensions are: this comes before.
    """
    for key in map(dotted, texts):
        if _below(key, ("model.sizes",)):
            raise _refused(key, "is a table of sizes, not one model's", "Set the model's own.")


def check_environment(config: Config, texts: Mapping[Place, str]) -> None:
    """Raise ConfigError for a setting of those at `texts` that a variable may not fill."""
    for place, text in texts.items():
        key = dotted(place)
        if not _below(key, setting_keys()):
            raise _refused(key, "is a whole section, which no variable can hold", "Write it out.")
        if _below(key, _SHOWN):
            raise _refused(key, "is shown and sent to others", _by_the_shell(key))
        if not isinstance(config.cluster, SlurmCluster):
            continue
        if _below(key, _IN_SCRIPT) and not _below(key, _NOT_IN_SCRIPT):
            raise _refused(key, "is written into the job's script", _by_the_shell(key))
        if _below(key, ("cluster.slurm.env",)) and (len(place) == 3 or in_shell(text) is None):
            raise _refused(key, "is more than a job's script can ask for", "Write ${oc.env:NAME}.")


def _below(key: str, keys: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in keys)


def _refused(key: str, why: str, remedy: str) -> ConfigError:
    problem = f"{key} {why}, and takes its value from a variable of the environment"
    return ConfigError(problem, remedy, [key])


def _by_the_shell(key: str) -> str:
    return f"Have the shell put it in, on the command line: {key}=$NAME."
