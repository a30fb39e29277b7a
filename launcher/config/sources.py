"""Files and overrides that settings come from: their places, checks and precedence.

Files of users are checked for what composing would ignore, and for code that nobody allowed. What a
file sets of an option that it chose is dropped when another option is chosen: a recipe picks
`parallel: manual` and its number of stages, which mean nothing with `parallel=data` on the command
line. With `parallel.method=data` neither do those of `conf/parallel/auto.yaml`. A replay takes from
the run of its plan the settings that make its program, unless they are set here.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from launcher.base import DamagedError
from launcher.base.reading import join_key, read_table, yaml_node
from launcher.config.cluster import CLUSTERS, Emulated, Local
from launcher.config.environment import COMMAND_LINE_ONLY, below, command_at, leaves, not_allowed
from launcher.config.errors import ConfigError, shown
from launcher.config.overrides import COMMAND_LINE
from launcher.config.parallel import METHODS, Replay
from launcher.config.reader import collections, setting_keys, text_keys
from launcher.config.schema import MODELS, Config, read_by

Tree = dict[str, Any]

ON_COMMAND_LINE = sys.maxsize  # a rank above that of every file
SWEEPER, SWEEPER_GROUP = "hydra.sweeper", "hydra/sweeper"
SWEPT = f"{SWEEPER}.params"
_ODD = re.compile(r"[+-]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")  # octal, base 60
_NEEDED = ("model", "dataset", "optimizer", "parallel", "cluster")  # groups
_NULL, _BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OTHER_NODES: Mapping[type, type[yaml.Node]] = {dict: yaml.SequenceNode, list: yaml.MappingNode}

# Settings that make a program: sections, and those of `train`.
OF_PROGRAM = ("model", "dataset", "optimizer", "cluster")
OF_TRAIN = ("steps", "global_batch_size", "precision", "non_finite", "spikes")
# By section, the setting that names its kind.
_KINDS = {
    field.name: f"{field.name}.{field.metadata['variants'].key}"
    for field in dataclasses.fields(Config)
    if "variants" in field.metadata
}
_HERE = (Local, Emulated)  # clusters that can be taken over: the others mean more than devices


@dataclass(frozen=True)
class Source:
    """A YAML file among those that were merged.

    Attributes:
        path: the file.
        package: the dotted section that its top level fills; "" for the whole tree.
        is_own: whether it is the project's.
    """

    path: Path
    package: str
    is_own: bool = False

    @functools.cached_property
    def node(self) -> yaml.Node | None:
        """The file's content with line numbers, read once; raises as `yaml_node`."""
        return yaml_node(self.path)

    @functools.cached_property
    def lines(self) -> Mapping[str, int]:
        """The line (from 1) at which each dotted key is set."""
        return dict(_lines(self.node, self.package))

    @functools.cached_property
    def content(self) -> Any:
        """The file's content as plain data, with its interpolations."""
        return OmegaConf.to_container(OmegaConf.load(self.path))

    def section(self, name: str) -> Tree:
        """Return the file's settings of a section; none where it sets no table."""
        if not isinstance(self.content, dict):
            return {}
        part: Any = {key: value for key, value in self.content.items() if key != "defaults"}
        for package in reversed(self.package.split(".") if self.package else ()):
            part = {package: part}
        section = part.get(name)
        return section if isinstance(section, dict) else {}

    def place(self, node: yaml.Node) -> str:
        """Return the place of a node in words."""
        return f"in {short(self.path)}:{node.start_mark.line + 1}"


@dataclass(frozen=True)
class Origin:
    """All files and overrides in the order of merging; later ones win."""

    sources: Sequence[Source]
    overrides: Sequence[Override]
    groups: Collection[str]

    def of(self, keys: Sequence[str]) -> str:
        """Return the places of `keys` in words; "" for defaults of the schema."""
        ranks = {key: self.rank(key) for key in keys}
        found = {
            key: COMMAND_LINE
            if rank == ON_COMMAND_LINE
            else f"in {short(self.sources[rank].path)}:{self.sources[rank].lines[key]}"
            for key, rank in ranks.items()
            if rank >= 0
        }
        if len(keys) == 1 or len(set(found.values())) == 1 == len(found) / len(keys):
            return next(iter(found.values()), "")
        return ", ".join(f"{key} {place}" for key, place in found.items())

    def rank(self, key: str) -> int:
        """Return how late `key` was set: `ON_COMMAND_LINE`, the index in `sources`, or -1."""
        for override in self.overrides:
            said, value = override.key_or_group, override.value()
            is_option = said in self.groups and not isinstance(value, dict)
            if is_option and key in (said, _KINDS.get(said)):
                return ON_COMMAND_LINE
            if not is_option and any(
                below(one, (key,)) or below(key, (one,)) for one, _ in leaves(said, value)
            ):
                return ON_COMMAND_LINE
        places = reversed(list(enumerate(self.sources)))
        return next((place for place, source in places if key in source.lines), -1)

    def is_users(self, key: str) -> bool:
        """Return whether `key` was set in a user's file, and not by ours after it."""
        rank = self.rank(key)
        return 0 <= rank < len(self.sources) and not self.sources[rank].is_own


def short(path: Path) -> str:
    """Return `path` relative to the working directory if it is below it, otherwise in full."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield the dotted keys below a node with their lines."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = join_key(prefix, name.value)
            yield key, name.start_mark.line + 1
            yield from _lines(value, key)


def refuse_useless(source: Source, commands_allowed: bool) -> None:
    """Check that the settings of a file have an effect, and the intended one.

    Args:
        source: the file.
        commands_allowed: whether its settings may run code.

    Raises:
        ConfigError: a setting would be ignored, or not mean what it seems to.
    """
    lists = set()  # their items come under their keys
    for key, node in _nodes(source.node, source.package):
        where = source.place(node)
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(source, key, node, commands_allowed, where)
        elif key in lists:
            pass
        elif (kind := collections().get(key)) and isinstance(node, _OTHER_NODES[kind]):
            words = ("table", "list") if kind is dict else ("list", "table")
            problem = "{} must be a {}, not a {}".format(key, *words)
            raise ConfigError(problem, where=where, code="file")
        elif isinstance(node, yaml.SequenceNode):
            lists.add(key)


def _check_scalar(
    source: Source, key: str, node: yaml.ScalarNode, commands_allowed: bool, where: str
) -> None:
    top, group = key.partition(".")[0], _group(key)
    if "hydra" in (source.package.partition(".")[0], top) or group.startswith("hydra/"):
        if not is_of_sweeper(key, group):
            raise ConfigError(
                "hydra is Hydra's own section, of which only hydra.sweeper has an effect here",
                "Runs are placed by run.dir and run.id; sweeps are asked for with -m.",
                where=where,
                code="file",
            )
        if not group and key != f"{source.package}.defaults":  # a chosen file is checked itself
            _check_sweeper_value(key, node, commands_allowed, where)
        return
    chosen = _group(key.removeprefix(f"{source.package}."))
    is_nothing = node.tag == _NULL or (node.tag == _BOOL and not yaml.safe_load(node.value))
    is_number = node.style is None and node.tag in _NUMBERS
    if node.tag == _NULL and chosen in _NEEDED:
        # Hydra drops the option that was chosen before, and the schema would fill it in again.
        problem = f"{chosen}: null chooses nothing, and every run needs a {chosen}"
        remedy = "Name an option, or leave the line out."
    elif top in COMMAND_LINE_ONLY and node.value != "false":  # as `--cfg` prints it
        problem = (
            f"{top} can be set only on the command line: a file that allows itself would "
            "protect from nothing"
        )
        remedy = f"Write {top}={COMMAND_LINE_ONLY[top]} on the command line."
    elif not commands_allowed and not is_nothing and (command := command_at(key, node.value)):
        raise not_allowed(command, where)
    elif is_number and key not in text_keys() and _ODD.fullmatch(node.value):
        problem = f"{key}: {node.value} is read as {yaml.safe_load(node.value)}"
        remedy = "Write numbers with decimal digits, and without a 0 in front."
    else:
        return
    raise ConfigError(problem, remedy, where=where, code="file")


def choices(content: Any) -> dict[str, str]:
    """Return the options that a file's defaults list chooses, by group.

    They stand there as `group: option` or `override /group: option`. `content` is the file's, as
    plain data.
    """
    defaults = content.get("defaults") if isinstance(content, dict) else None
    return {
        _group(f"defaults.{name}"): str(choice)
        for entry in defaults or ()
        if isinstance(entry, dict)
        for name, choice in entry.items()
    }


def refuse_unusable(file: Path) -> None:
    """Raise ConfigError for a file that cannot hold settings, before Hydra merges it."""
    if problem := _problem(file):
        remedy = "It must hold names and values."
        raise ConfigError(f"{short(file)} {problem}", remedy, (), code="file")


def _problem(file: Path) -> str:
    try:
        root = yaml_node(file)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except DamagedError as error:
        return str(error).removeprefix("it ")
    except yaml.reader.ReaderError as error:
        return f"is not YAML: {error.reason}"
    except yaml.YAMLError:  # Hydra reports it with its line
        return ""
    if root is None:
        return ""
    if not isinstance(root, yaml.MappingNode):
        return "does not hold settings"
    for defaults in [value for name, value in root.value if name.value == "defaults"][-1:]:
        if not isinstance(defaults, yaml.SequenceNode):
            return "has defaults that are not a list, such as [override /model: gpt]"
        for entry in defaults.value:
            is_text = isinstance(entry, yaml.ScalarNode) and entry.tag.endswith(":str")
            if not is_text and not (isinstance(entry, yaml.MappingNode) and len(entry.value) == 1):
                return "has defaults with an entry that is not 'group: option'"
    return ""


def scalars(source: Source) -> Iterator[tuple[str, str, yaml.ScalarNode]]:
    """Yield every scalar of a file with its dotted key, and the group that it chooses from.

    List items have the list's key.
    """
    for key, node in _nodes(source.node, source.package):
        if isinstance(node, yaml.ScalarNode):
            yield key, _group(key), node


def _nodes(node: yaml.Node | None, key: str) -> Iterator[tuple[str, yaml.Node]]:
    """Yield `node` and all nodes below it, with keys as `scalars`."""
    if node is not None:
        yield key, node
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _nodes(item, key)
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _nodes(value, join_key(key, name.value))


def _group(key: str) -> str:
    """Return the group of an entry of a defaults list; "" for any other value."""
    section, _, group = key.partition(".")
    name = group.removeprefix("override ").lstrip("/").partition("@")[0]
    return name if section == "defaults" else ""


def without_leftovers(
    tree: Tree, sources: Sequence[Source], overrides: Sequence[Override], groups: Mapping[str, Any]
) -> Tree:
    """Return the tree without the files' settings of options that are not chosen.

    Args:
        tree: composed of `sources` and `overrides`, and not yet resolved.
        sources: the files that took part.
        overrides: what the command line says.
        groups: the groups of files, by their names.
    """
    sections = groups.keys() & tree.keys()
    chosen = {
        o.key_or_group: str(o.value())
        for o in overrides
        if o.key_or_group in sections and not isinstance(o.value(), dict)
    }
    users = [source for source in sources if not source.is_own]
    options = {
        name: source.content
        for name in chosen
        for source in sources
        if source.package == name and source.path.stem == chosen[name]
    }
    kinds = _kinds(tree, users, overrides, options)
    for group in dict.fromkeys((*chosen, *kinds)):
        files = [one for one in sources if one.package.partition(".")[0] in ("", group)]
        key, kind = kinds.get(group, ("", None))
        kept = [
            source.section(group)
            for source in files
            if _is_chosen(source, group, chosen.get(group))
            and source.section(group).get(key, kind) == kind
        ]
        if len(kept) == len(files):
            continue
        section: Tree = {}
        for part in kept:
            section = _merged(section, part)
        for names in _said(overrides, group):
            section = _merged(section, _only(tree[group], names))
        tree = {**tree, group: section}
    return tree


def _kinds(
    tree: Tree, files: Sequence[Source], overrides: Sequence[Override], options: Mapping[str, Any]
) -> dict[str, tuple[str, Any]]:
    """Return the kinds of sections whose kind the user sets; settings of other kinds are dropped.

    The command line comes first, then the option that it chose, then the user's files.

    Args:
        tree: all settings.
        files: the user's files.
        overrides: what the command line says.
        options: by section, what the file says that the command line has chosen.

    Returns:
        By section the setting that names the kind, and the kind.
    """
    found = {}
    for field in dataclasses.fields(Config):
        name, variants, section = field.name, field.metadata.get("variants"), tree.get(field.name)
        if variants is None or not isinstance(section, dict) or variants.key not in section:
            continue
        on_command_line = [variants.key] in _said(overrides, name)
        option = options.get(name)
        if not on_command_line and isinstance(option, dict) and variants.key in option:
            found[name] = variants.key, option[variants.key]
        elif on_command_line or any(variants.key in file.section(name) for file in files):
            found[name] = variants.key, section[variants.key]
    return found


def _is_chosen(source: Source, group: str, option: str | None) -> bool:
    """Return whether a file applies to the chosen option."""
    if option is None or source.package == group:
        return True
    return choices(source.content).get(group, option) == option


def _said(overrides: Sequence[Override], group: str) -> Iterator[list[str]]:
    """Yield the settings of the section that the command line sets, without the section's name."""
    for override in overrides:
        section, _, key = override.key_or_group.partition(".")
        if section != group:
            continue
        if key:
            yield key.split(".")
        elif isinstance(table := override.value(), dict):
            yield from ([str(name)] for name in table)


def _only(tree: Any, names: Sequence[str]) -> Any:
    """Return `tree` with only the value at the path `names`."""
    return {names[0]: _only(tree[names[0]], names[1:])} if names else tree


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    both = {name: _merged(below[name], above[name]) for name in below.keys() & above.keys()}
    return {**below, **above, **both}


def with_runs_settings(
    tree: Tree, sources: Sequence[Source], overrides: Sequence[Override]
) -> Tree:
    """Return `tree` with the settings of its program of the run that it evaluates or replays.

    They are the model, the data, the optimizer and more, unless the command line or a recipe sets
    them. `tree` is not yet resolved.
    """
    parallel, plan, reads = tree.get("parallel"), None, read_by(str(tree.get("task")))
    if tree.get("task") in ("evaluate", "generate"):
        plan = plan_of_run(tree)
    elif isinstance(parallel, dict) and METHODS.get(str(parallel.get("method"))) is Replay:
        plan = OmegaConf.select(OmegaConf.create(tree), "parallel.plan")
    run = settings_beside(str(plan)) if plan else {}
    if not run:
        return tree
    said = {override.key_or_group for override in overrides}
    for source in sources:
        if not source.package and source.path.name != "config.yaml":  # all others come after it
            said |= choices(source.content).keys() | {
                key for name, value in source.content.items() for key, _ in leaves(str(name), value)
            }
    said = {key for key in said if reads is None or below(key, reads)}
    for shorthand, names in shorthands_of(tree.get("model")).items():
        if f"model.{shorthand}" in said:
            said |= {f"model.{name}" for name in names}
    taken = {
        name: tree.get(name)
        if _KINDS.get(name) in said
        else _laid_over(run[name], tree.get(name), said, name)
        for name in OF_PROGRAM
    }
    if CLUSTERS.get(str(run["cluster"].get("kind"))) not in _HERE:
        del taken["cluster"]
    if isinstance(tree.get("train"), dict):
        keys = [key for key in OF_TRAIN if key in run["train"] and f"train.{key}" not in said]
        taken["train"] = {**tree["train"], **{key: run["train"][key] for key in keys}}
    return {**tree, **taken}


def refuse_unread(tree: Tree, origin: Origin) -> None:
    """Raise ConfigError for a setting that the task does not read.

    It may say what the run has: so the command that trained a run serves other tasks, too. A file's
    setting counts where the file, or one below it, sets `task`.

    Args:
        tree: composed, and not yet resolved.
        origin: the files and overrides that it is composed of.
    """
    task = str(tree.get("task"))
    reads = read_by(task)
    is_of_run = reads is not None and "run.id" in reads
    plan = plan_of_run(tree) if is_of_run else None
    if reads is None or (is_of_run and plan is None):
        return
    run = settings_beside(str(plan)) if is_of_run else {}
    untracked = () if _at(tree, "report.trackers") else ("report", "report.trackers")
    for key in _counting(origin):
        ours, theirs = _at(tree, key), _at(run, key)
        same = ours == theirs or str(ours) == ("auto" if theirs is None else str(theirs))
        repeats = run and same
        if repeats or key in untracked or below(key, reads):
            continue
        why = f"task={task} does not read it"
        if is_of_run and key.partition(".")[0] in (*OF_PROGRAM, "train", "parallel"):
            why = f"task={task} uses the run's" + (f", {shown(theirs)}" if run else "")
        problem = f"{key} has no effect: {why}"
        raise ConfigError(problem, "Leave it out.", [key], code="no_effect")


def _counting(origin: Origin) -> Iterator[str]:
    """Yield the settings of overrides, and of users' files from the one on that sets `task`."""
    for source in origin.sources[origin.rank("task") :]:
        if not source.is_own:
            yield from (name for name in source.lines if name in setting_keys())
    for override in origin.overrides:
        said, value = override.key_or_group, override.value()
        if said not in origin.groups or isinstance(value, dict):
            yield from (name for name, _ in leaves(said, value))
        elif said in vars(Config()):
            yield _KINDS.get(said, said)


def plan_of_run(tree: Tree) -> Path | None:
    """Return the plan of the run `run.id`, None if none is named."""
    settings = OmegaConf.create(tree)
    run_of = [OmegaConf.select(settings, f"run.{key}") for key in ("dir", "id")]
    return Path(*map(str, run_of)) / "plan.json" if None not in run_of else None


def _at(tree: Any, key: str) -> Any:
    """Return the value of a setting in a tree; None if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def shorthands_of(model: Any) -> Mapping[str, Sequence[str]]:
    """Return the shorthands of a model."""
    kind = MODELS.get(str(model.get("name"))) if isinstance(model, Mapping) else None
    return kind.shorthands if kind else {}


def _laid_over(theirs: Any, ours: Any, said: Set[str], key: str) -> Any:
    """Return the run's settings below `key`, overridden by those set here."""
    if key in said:
        return ours
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return theirs
    laid = {}
    for name in dict.fromkeys((*theirs, *ours)):
        below = f"{key}.{name}"
        if name in theirs and below not in said:
            laid[name] = _laid_over(theirs[name], ours.get(name), said, below)
        elif name in ours and any(word == below or word.startswith(f"{below}.") for word in said):
            laid[name] = ours[name]
    return laid


def settings_beside(plan: str) -> Tree:
    """Return the settings of the run that a plan is of.

    None if there is no such file, or it cannot be read: then the program alone tells whether the
    plan is for it.
    """
    tree = read_table(Path(plan).parent / "config.yaml")
    ours = (*OF_PROGRAM, "train", "run", "parallel")  # and no other program's config.yaml
    return tree if all(isinstance(tree.get(name), dict) for name in ours) else {}


def is_of_sweeper(key: str, group: str) -> bool:
    """Return whether a file's value, or the group that it chooses from, is the sweeper's."""
    return f"{key}.".startswith(f"{SWEEPER}.") or f"{group}/".startswith(f"{SWEEPER_GROUP}/")


def _check_sweeper_value(
    key: str, node: yaml.ScalarNode, commands_allowed: bool, where: str
) -> None:
    """Raise ConfigError for a value of `hydra.sweeper` that refers to another, or may run code.

    Its classes do not: none is made but Hydra's own sweeper and Optuna's samplers.
    """
    if "${" in node.value:
        raise ConfigError(
            f"{key}: {node.value} asks for another value, which has no effect here",
            "Write the value itself.",
            where=where,
        )
    if key.startswith(f"{SWEPT}."):
        _check_param(key.removeprefix(f"{SWEPT}."), node.value, commands_allowed, where)


def _check_param(name: str, value: str, commands_allowed: bool, where: str) -> None:
    """Check a swept setting, whose values become part of each point's command line."""
    if not re.fullmatch(r"[\w./]+", name) or name.partition(".")[0].partition("/")[0] == "hydra":
        raise ConfigError(
            f"{SWEPT}: {name} is not the name of a setting",
            "Write KEY: VALUES, such as train.steps: 1,2.",
            where=where,
        )
    if name.partition(".")[0] in COMMAND_LINE_ONLY:
        raise ConfigError(
            f"{name} can be set only on the command line", "Set it there.", where=where
        )
    # A table may hold a command further below.
    command = command_at(name, "${" if "{" in value else value)
    if command is not None and not commands_allowed:
        raise not_allowed(command, where)
