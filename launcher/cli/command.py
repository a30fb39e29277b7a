"""The command line.

The settings are composed and checked before the code that does the work is imported: help,
`task=check` and every wrong setting need neither JAX nor Ray.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base import DISTRIBUTION, answer
from launcher.cli import Parser
from launcher.config.errors import ConfigError, advice
from launcher.stop import Stop

if TYPE_CHECKING:
    from launcher.cluster.kinds import ClusterKind
    from launcher.config.schema import Config

_EXAMPLES = """\
Settings are key=value, options are group=option; the last value given for a setting wins.

examples:
  launcher                                            train a small GPT on this machine
  launcher model.num_layers=8 train.steps=500         change settings
  launcher model=mlp dataset=synthetic                choose other options
  launcher dataset=text dataset.path=/data/books      train on your own text
  launcher cluster=emulated cluster.gpus=8 task=plan  make and print the plan, train nothing
  launcher task=check recipe=smoke                    check the settings, do nothing else
  launcher --cfg job model.size=125m                  print the resulting settings
  launcher -m parallel.num_micro_batches=2,4          run both, then compare them
  launcher -m 'run.seed=range(0,4)' sweep.jobs=2      run all of these, two at a time
  launcher cluster=slurm cluster.hosts=2              submit to Slurm, on two nodes
  launcher --config-dir my_conf recipe=mine           use my_conf/recipe/mine.yaml
  launcher runs                                       list the runs here; launcher runs --help
  launcher new my_project                             begin a project of your own
  launcher --json task=check model.num_layers=4       one JSON object, for programs
  launcher schema                                     its JSON Schema
"""

SCHEMA = Path(__file__).parent / "schema.json"

_EXIT_CODES = """
exit codes:
  0    done
  1    failed
  2    a setting is wrong: nothing was trained
  75   preempted, state saved: run the same command again
  130  interrupted, state saved
"""


def carry_out(argv: Sequence[str], stop: Stop) -> int:
    """Do what a command line says; return the exit code.

    Raises:
        KeyboardInterrupt: a signal ended it; `stop` has the exit code.
        Exception: what `launcher.driver.run.reported` knows, and faults.
    """
    if argv and argv[0] == "runs":
        from launcher.cli.runs_command import main

        with stop.interruptible():
            return main(argv[1:])
    if argv and argv[0] == "new":
        from launcher.cli.new import main as write_new

        return write_new(argv[1:])
    if argv and argv[0] == "schema":
        return answer(SCHEMA.read_text(), end="")
    # Intermixed: overrides may stand before, between and after the flags.
    return _run(parser().parse_intermixed_args(argv), stop)


def parser() -> argparse.ArgumentParser:
    """Return the parser of a command line that is not of `runs` or `new`."""
    parser = Parser(
        "The command line is wrong",
        "Settings are written key=value, without dashes; --help shows the rest.",
        prog="launcher",
        description="Plan, launch and train the model that the settings describe.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings and options")
    flag = parser.add_argument
    flag("-h", "--help", action="store_true", help="show this help and the options of each group")
    flag("--version", action="store_true", help="show the version")
    flag("--json", action="store_true", help="answer with one JSON object on standard output")
    flag(
        "-c",
        "--cfg",
        choices=["job", "hydra", "all"],
        help="print the resulting settings (job), Hydra's own, or both, and stop",
    )
    flag("-p", "--package", metavar="SECTION", help="with --cfg: only this section")
    flag("--resolve", action="store_true", help="with --cfg: with values from the environment")
    infos = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    flag(
        "-i",
        "--info",
        nargs="?",
        const="all",
        choices=infos,
        help="print how settings are composed",
    )
    flag("--hydra-help", action="store_true", help="show Hydra's help")
    flag(
        "-sc",
        "--shell-completion",
        action="store_true",
        help='tab completion for bash, zsh or fish: eval "$(launcher -sc install=bash)"',
    )
    flag("-m", "--multirun", action="store_true", help="run every combination of the values")
    flag("--frozen", metavar="FILE", help="take all settings from a run's own config.yaml")
    flag(
        "-cd",
        "--config-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of your own YAML files, searched first; may be repeated",
    )
    return parser


def _run(arguments: argparse.Namespace, stop: Stop) -> int:
    if arguments.help:
        return answer(_help(arguments.config_dir))
    if arguments.version:
        return answer(f"launcher {_version()}")
    # Imports are deferred here and below: Hydra's takes a tenth of a second, JAX's two.
    if arguments.hydra_help or arguments.shell_completion or arguments.info:
        return _for_hydra(arguments)
    check(arguments)
    if arguments.multirun:
        from launcher.submit.sweep import run_sweep

        return run_sweep(arguments.overrides, arguments.config_dir, stop)

    if arguments.cfg:
        return _show(arguments)
    config = settings_said(arguments)
    if config.task == "check":
        return answer("\n".join([summary_of(config), *notes_on(config)]))
    return perform(arguments, config, stop)


def check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if flags contradict each other, or JAX is of a version that cannot work."""
    from launcher.api.versions import check_versions

    check_versions()
    if arguments.frozen and (arguments.multirun or arguments.config_dir):
        raise ConfigError("--frozen is one run's settings", "Leave out -m and --config-dir.")
    if arguments.resolve and not arguments.cfg:
        raise ConfigError("--resolve is for --cfg", "Add --cfg job.")
    if arguments.package and not arguments.cfg:
        raise ConfigError("--package selects a part of what --cfg shows", "Add --cfg job.")
    if arguments.multirun and arguments.cfg:
        raise ConfigError("--cfg shows the settings of one run", "Leave out -m.")


def settings_said(arguments: argparse.Namespace, words: Sequence[str] = ()) -> Config:
    """Return the settings of one run that a command line gives, and further words after its own.

    Raises ConfigError.
    """
    from launcher.config.compose import load, load_frozen

    if arguments.frozen:
        return load_frozen(Path(arguments.frozen), arguments.overrides)
    return load([*arguments.overrides, *words], arguments.config_dir)


def perform(arguments: argparse.Namespace, config: Config, stop: Stop) -> int:
    """Do a task other than `check`; return the exit code, raise as `carry_out`."""
    if config.task == "sweep_status":
        from launcher.submit.job import sweep_status

        return sweep_status(config.sweep)
    if config.task in ("train", "submit", "preflight"):
        from launcher.cluster.kinds import kind_of

        if (kind := kind_of(config.cluster)).batch:
            return _as_job(config, kind, stop)
    from launcher.driver.run import run

    compose = None if arguments.frozen else partial(settings_said, arguments)
    return run(config, stop, compose=compose)


def _as_job(config: Config, kind: ClusterKind[Any], stop: Stop) -> int:
    """Submit the run or, as a task of its Slurm job, do this task's part."""
    from launcher.cluster.slurm.allocation import find_allocation, settled

    allocation = find_allocation(os.environ)
    if allocation is None or config.task == "submit":
        with stop.interruptible():
            code: int = kind.submission().submit(config, stop)
            return code
    config = settled(config, allocation)
    if allocation.index:
        from launcher.driver.slurm import serve_node

        return serve_node(config, allocation, stop)
    from launcher.driver.slurm import run_allocated

    return run_allocated(config, allocation, stop)


def _help(config_dirs: Sequence[str]) -> str:
    from launcher.config.folders import find_groups, search_folders

    groups = find_groups(search_folders(config_dirs))
    lines = [f"  {group:<10} {' | '.join(options)}" for group, options in groups.items()]
    parts = [parser().format_help(), "groups and their options:", *lines, "", _EXAMPLES]
    return "\n".join(parts) + _EXIT_CODES


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "(a checkout that is not installed)"


def _for_hydra(arguments: argparse.Namespace) -> int:
    """Answer a flag of Hydra's that shows settings or completes words."""
    from launcher.cli import hydra_flags

    if arguments.multirun or arguments.cfg or arguments.frozen:
        raise ConfigError("--info, --hydra-help and -sc stand alone", "Leave the other flags out.")
    if arguments.hydra_help:
        hydra_flags.print_hydra_help()
    elif arguments.shell_completion:
        hydra_flags.complete(arguments.overrides)
    else:
        hydra_flags.print_info(arguments.info, arguments.overrides, arguments.config_dir)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    """Print settings, or one section of them, as YAML."""
    from launcher.cli.hydra_flags import print_hydras_settings
    from launcher.config.sweep import split_arguments

    said, package, code = arguments.overrides, arguments.package, 0
    is_hydras = arguments.cfg == "hydra" or (package or "").partition(".")[0] == "hydra"
    if arguments.frozen and arguments.cfg != "job":
        raise ConfigError("--frozen is for --cfg job", "Use that.")
    if not is_hydras:
        if arguments.cfg == "all":
            arguments.overrides = split_arguments(said)[0]
        config = settings_said(arguments)
        code = answer(_settings(config, arguments), end="")
    if is_hydras or (arguments.cfg == "all" and package is None):
        print_hydras_settings(said, arguments.config_dir, package, arguments.resolve)
    return code


def _settings(config: Config, arguments: argparse.Namespace) -> str:
    """Return the settings, or one section of them, as YAML."""
    from launcher.config.compose import to_dict, to_written, to_yaml

    package = arguments.package
    tree = to_dict(config) if arguments.resolve else to_written(config)
    for name in package.split(".") if package else ():
        if not isinstance(tree, dict) or name not in tree:
            remedy = advice(name, list(tree)) if isinstance(tree, dict) else "It is a value."
            raise ConfigError(f"--package {package} is not a section", remedy)
        tree = tree[name]
    return to_yaml(tree)


def notes_on(config: Config) -> list[str]:
    """Check the settings on this machine as far as that is fast; return and raise as `check`."""
    from launcher.driver.planning.check import check

    return check(config, os.environ)


def summary_of(config: Config) -> str:
    """Return the summary line of `task=check`."""
    parallel, train, cluster = config.parallel, config.train, config.cluster
    layers = config.model.layers or "unknown"
    known = [getattr(parallel, name) for name in ("plan", "schedule") if hasattr(parallel, name)]
    if hasattr(parallel, "num_micro_batches"):
        known.append(f"num_micro_batches={parallel.num_micro_batches or 'auto'}")
    return (
        f"The settings are fine: model={config.model.name} ({layers} layers), "
        f"dataset={config.dataset.name}, optimizer={config.optimizer.name}, "
        f"{train.steps} steps of {train.global_batch_size} samples, "
        f"parallel={parallel.method} ({', '.join(known)}), "
        f"cluster={cluster.title}."
    )
