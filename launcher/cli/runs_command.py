"""Runs as things: `launcher runs` lists, compares, watches, notes and removes them.

It reads folders only, from any terminal that sees them; it imports neither JAX nor Ray.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from launcher.base import answer, write_whole
from launcher.cli import Parser
from launcher.config.errors import ConfigError, advice
from launcher.report.console import far_text, make_console, table_of
from launcher.report.run_record import (
    FOLDERS,
    NOTE,
    RunRecord,
    one_run,
    read_run,
    read_runs,
    runs_named,
    runs_of,
)
from launcher.report.summary import Summary
from launcher.report.sweep import print_comparison, read_summary
from launcher.report.text import clock_text, loss_text, seconds_text, shown_path

_LOCK = ".lock"
_HIGHER_IS_BETTER = ("samples_per_second", "tokens_per_second", "mfu")
_LOOK = 1.0  # seconds from one look at a watched run to the next
_SAY = 30.0  # seconds from one line to the next, off a terminal
_CODES = {"done": 0, "planned": 0, "interrupted": 130, "preempted": 75}

HELP = """\
  launcher runs                      all runs below outputs/ and multirun/, newest first
  launcher runs show ID              everything known about one run
  launcher runs best by=eval_loss    finished runs, best first, by a field of summary.json
  launcher runs compare A B [C …]    what differs: settings, plan, outcome; also of multirun/<sweep>
  launcher runs watch ID             follow one, from any terminal, to its end
  launcher runs note ID "text"       add a note to a run; the list shows it
  launcher runs rm ID [ID …]         remove folders and everything in them

--json answers list, show and best with one JSON object; launcher schema describes it.

An ID may be shortened as long as it is unambiguous, or be a folder.
"""


def main(argv: Sequence[str]) -> int:
    """Do what `launcher runs <argv>` says; return the exit code.

    Raises:
        ConfigError: the words are wrong, or name no run.
    """
    words = read_words(argv)
    if words.help:
        return answer(HELP, end="")
    roots, (action, *names) = _roots(words), words.names or ["list"]
    actions: dict[str, Callable[[], int]] = {
        "list": lambda: _list(read_runs(roots)),
        "show": lambda: _show(one_run(roots, names)),
        "best": lambda: _best(*_ranked(roots, names)),
        "compare": lambda: _compare(roots, names),
        "watch": lambda: _watch(one_run(roots, names)),
        "note": lambda: _note(roots, names),
        "rm": lambda: _remove(runs_named(roots, names), words.yes),
    }
    if action not in actions:
        raise ConfigError(f"launcher runs {action} is not known", advice(action, list(actions)))
    return actions[action]()


def found(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Return the runs that `launcher runs <argv>` lists, as data; raise as `main`."""
    words = read_words(argv)
    roots, (action, *names) = _roots(words), words.names or ["list"]
    if action == "best":
        by, rows = _ranked(roots, names)
        return [{by: value, **record.to_dict()} for value, record in rows]
    if action not in ("list", "show"):
        problem = f"launcher runs {action} has no --json"
        raise ConfigError(problem, "Use list, show or best.", code="command_line")
    records = read_runs(roots) if action == "list" else [one_run(roots, names)]
    return [record.to_dict() for record in records]


def _roots(words: argparse.Namespace) -> list[Path]:
    return [Path(root) for root in words.dir or FOLDERS]


def read_words(argv: Sequence[str]) -> argparse.Namespace:
    """Return the words of a command line; raise ConfigError for wrong ones."""
    parser = Parser("launcher runs", "launcher runs --help shows what there is.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--dir", action="append")
    parser.add_argument("--yes", action="store_true")
    return parser.parse_intermixed_args(argv)


def _list(records: Sequence[RunRecord]) -> int:
    if not records:
        return answer(f"no runs below {' and '.join(FOLDERS)}")
    _print(make_console(), records)
    return 0


def _print(console: Console, records: Sequence[RunRecord]) -> None:
    headers = ["run", "state", "step", "loss", "eval", "step time", "age", "plan"]
    notes = ["note"] if any(record.note for record in records) else []
    begins = ["from"] if any(record.forked_from for record in records) else []
    rows: list[list[str | Text]] = [
        [
            *(r.id, _state_text(r), _steps(r), loss_text(r.loss), loss_text(r.eval_loss)),
            *(seconds_text(r.step_seconds), _age(r.updated_at), r.plan or "-"),
            *([Path(r.forked_from or "").name] if begins else []),
            *([r.note or ""] if notes else []),
        ]
        for r in records
    ]
    left = ("run", "state", "plan", "from", "note")
    console.print(table_of(headers + begins + notes, rows, left))
    for record in records:
        if record.slow:
            console.print(f"{record.id}: {record.slow}", soft_wrap=True)
        if record.problem:
            console.print(f"{record.id}: {record.problem}", soft_wrap=True)


def _state_text(record: RunRecord) -> Text:
    bad, good = record.state in ("failed", "died", "lost"), record.is_live
    style = "bold red" if bad or record.problem else "bold green" if good else ""
    return Text(record.state, style=style)


def _steps(record: RunRecord) -> str:
    if record.step is None:
        return "-"
    return f"{record.step}/{record.steps}" if record.steps else f"{record.step}"


def _age(at: float | None) -> str:
    if at is None:
        return "-"
    seconds = max(0.0, time.time() - at)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _show(record: RunRecord) -> int:
    fields = record.to_dict()
    width = max(map(len, fields))
    known = {name: value for name, value in fields.items() if value is not None}
    return answer("\n".join(f"{name:<{width}}  {value}" for name, value in known.items()))


def _ranked(
    roots: Sequence[Path], names: Sequence[str]
) -> tuple[str, list[tuple[float, RunRecord]]]:
    """Return the field that runs are ranked by, and those that are done with it, best first."""
    by = "eval_loss"
    for name in names:
        if not name.startswith("by="):
            raise ConfigError(f"launcher runs best {name} is not by=FIELD", "Write by=eval_loss.")
        by = name.removeprefix("by=")
    fields = [n for n, kind in Summary.__annotations__.items() if "int" in kind or "float" in kind]
    if by not in fields:
        raise ConfigError(f"by={by} is not a number in summary.json", advice(by, fields))
    rows = []
    for record in read_runs(roots):
        value = read_summary(record.folder).get(by)
        if record.state == "done" and isinstance(value, int | float):
            rows.append((value, record))
    rows.sort(key=lambda row: -row[0] if by in _HIGHER_IS_BETTER else row[0])
    return by, rows


def _best(by: str, rows: Sequence[tuple[float, RunRecord]]) -> int:
    if not rows:
        return answer(f"no run that is done has {by}")
    width = max(len(record.id) for _, record in rows)
    lines = [f"{record.id:<{width}}  {value:.6g}  {record.plan or ''}" for value, record in rows]
    return answer("\n".join([f"{'run':<{width}}  {by}", *(line.rstrip() for line in lines)]))


def _compare(roots: Sequence[Path], names: Sequence[str]) -> int:
    folders = [folder for name in names for folder in runs_of(roots, name)]
    if len(folders) < 2:
        raise ConfigError(
            "launcher runs compare needs two runs or more, or a sweep",
            "Write launcher runs compare A B, or launcher runs compare multirun/<sweep>.",
        )
    console = make_console()
    print_comparison(console, folders)
    plans = {folder: read_run(folder).plan for folder in folders}
    if len(set(plans.values())) > 1:
        console.print()
        for folder, plan in plans.items():
            console.print(f"{folder.name}: {plan or 'no plan is recorded'}", soft_wrap=True)
    return 0


def _note(roots: Sequence[Path], names: Sequence[str]) -> int:
    if len(names) != 2:
        raise ConfigError(
            "launcher runs note takes a run and a text", 'Write launcher runs note ID "text".'
        )
    record = one_run(roots, names[:1])
    write_whole(record.folder / NOTE, f"{' '.join(names[1].split())}\n")
    return 0


def _remove(records: Sequence[RunRecord], yes: bool) -> int:
    for record in records:
        if _is_locked(record.folder):
            raise ConfigError(f"{record.id} is running", "Stop it first; nothing was removed.")
        if not os.access(record.folder.parent, os.W_OK):
            raise ConfigError(f"{record.folder} is not yours to remove", "Nothing was removed.")
    named = ", ".join(shown_path(record.folder) for record in records)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"Removing {named} needs a confirmation, and this is not a terminal", "Add --yes."
            )
        if input(f"remove {named}, with checkpoints and all? [y/N] ").strip().lower() != "y":
            return answer("nothing was removed")
    for record in records:
        shutil.rmtree(record.folder)
    return answer(f"removed {named}")


def _is_locked(folder: Path) -> bool:
    """Return whether a process of this machine has claimed the folder."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _watch(record: RunRecord) -> int:
    """Show a run until it ends; return its exit code."""
    console, said, at = make_console(), "", 0.0
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while True:
            line = _line(record)
            if console.is_interactive:
                live.update(Text(line), refresh=True)
            elif record.state != said or time.monotonic() - at >= _SAY:
                console.print(line, soft_wrap=True)
                said, at = record.state, time.monotonic()
            if not record.is_live and record.state != "submitted":
                break
            time.sleep(_LOOK)
            record = read_run(record.folder)
    console.print(_line(record), soft_wrap=True)
    return _CODES.get(record.state, 1)


def _line(record: RunRecord) -> str:
    """Return a run's state in a line."""
    done = record.phase_done
    far = "" if not done else f" {far_text(done, record.phase_total, record.phase_unit)}"
    parts = [record.id, f"{record.state}{far}", f"step {_steps(record)}"]
    if record.loss is not None:
        parts.append(f"loss {loss_text(record.loss)}")
    if record.eval_loss is not None:
        parts.append(f"eval {loss_text(record.eval_loss)}")
    if record.step_seconds is not None:
        parts.append(f"{seconds_text(record.step_seconds)}/step")
    if record.is_live and record.eta_seconds is not None:
        parts.append(f"{clock_text(record.eta_seconds)} left")
    if record.slow:
        parts.append(record.slow)
    if record.exit_reason and record.state == "failed":
        parts.append(record.exit_reason)
    return "  ".join(parts)
