"""The outcome of a command line: text for people or, for programs, one object by `--json`.

`schema.json` describes that object. All else that is printed, by processes that a run starts, too,
then goes to standard error.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.base import answer, complain, parse_json, problem_of, read_text
from launcher.cli import command
from launcher.config import errors
from launcher.stop import Stop

VERSION = 1  # of the schema; a program may rely on the fields of one version
_ENDINGS = {75: "preempted", 130: "interrupted"}
_OF_STAGE = (
    *("layers", "hosts", "devices", "logical_mesh", "remat", "forward_seconds"),
    *("backward_seconds", "memory_bytes"),
)
_PRINTING = ("help", "version", "cfg", "info", "hydra_help", "shell_completion")
_FILE = re.compile(r"\.(json|npz|py|txt|ya?ml)$")  # a file's name looks like a setting's
_LARGEST_PLAN = 2**28  # bytes

_Document = dict[str, Any]


def run(argv: Sequence[str], stop: Stop) -> int:
    """Run the command line `argv` and return its exit code.

    Raises:
        KeyboardInterrupt: a signal ended it; `stop` has the exit code.
    """
    if "--json" in argv:
        return answer_in_json([word for word in argv if word != "--json"], stop)
    try:
        return command.carry_out(argv, stop)
    except errors.ConfigError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":  # as Hydra's own programs do
            traceback.print_exc()
        if os.environ.get("SLURM_NODEID", "0") == "0":  # only by one task of a job
            complain(str(error))
        return 2
    except Exception as error:
        if (known := _reported(error)) is None:
            raise
        complain(known[1])
        return known[2]


def _reported(error: Exception) -> tuple[str, str, int] | None:
    if isinstance(error, errors.ConfigError):  # known without the imports
        return error.code, str(error), 2
    from launcher.driver.run import reported

    return reported(error)


def answer_in_json(words: Sequence[str], stop: Stop) -> int:
    """Run the command line `words` and print its answer or its error; return the exit code.

    Raises:
        KeyboardInterrupt: a signal ended it; `stop` has the exit code.
    """
    document: _Document = {"schema": VERSION, "exit_code": 0, "error": None}
    interrupt: KeyboardInterrupt | None = None
    with _apart() as output:
        stop.last_words = lambda: (output, _stopped(stop))
        try:
            document["exit_code"] = _carry_out(words, stop, document)
        except KeyboardInterrupt as error:
            document["exit_code"], interrupt = stop.ending[0], error
        except Exception as error:
            document |= _failure(words, error)
    if document["exit_code"] and document["error"] is None:
        document["error"] = _ending(document)
    stop.last_words = lambda: (2, "")  # it has answered
    # JSON has no number for NaN and infinity.
    known = json.loads(json.dumps(document, default=str), parse_constant=lambda _: None)
    unwritten = answer(json.dumps(known))
    if interrupt is not None:
        raise interrupt
    return int(document["exit_code"]) or unwritten


@contextmanager
def _apart() -> Iterator[int]:
    """Have whatever is written to standard output inside go to standard error; yield its own."""
    if sys.stdout is None:  # closed by the parent process
        yield 1
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield kept
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _carry_out(words: Sequence[str], stop: Stop, document: _Document) -> int:
    """Do what a command line says, and fill in its answer; return the exit code."""
    if words[:1] == ["runs"]:
        from launcher.cli import runs_command

        document["runs"] = runs_command.found(words[1:])
        return 0
    if words[:1] in (["new"], ["schema"]):
        return command.carry_out(words, stop)
    arguments = command.parser().parse_intermixed_args(words)
    if any(getattr(arguments, name) for name in _PRINTING):
        raise errors.ConfigError(
            "--json cannot be combined with a flag that prints text",
            "Leave one of them out.",
            code="command_line",
        )
    command.check(arguments)
    if arguments.multirun:
        return command.carry_out(words, stop)
    config = command.settings_said(arguments)
    if config.task == "check":
        notes = command.notes_on(config)
        document["check"] = {"summary": command.summary_of(config), "notes": notes}
        return 0
    if config.run.id is None and "SLURM_JOB_ID" not in os.environ:  # whose tasks agree on one
        from launcher.driver.folder import make_folder

        made = make_folder.new_id(config.model.name)
        config = replace(config, run=replace(config.run, id=made))
    try:
        return command.perform(arguments, config, stop)
    finally:
        if config.run.id is not None and (home := Path(config.run.dir, config.run.id)).is_dir():
            document |= _run_of(home, config.task)


def _run_of(home: Path, task: str) -> _Document:
    """Return a run's record and, of a plan that was asked for, what matters most."""
    from launcher.cli import runs_command

    found: _Document = {"run": runs_command.found(["show", str(home)])[0]}
    if task == "plan" and (file := home / "plan.json").is_file():
        plan = parse_json(read_text(file, _LARGEST_PLAN))
        found["plan"] = {k: v for k, v in plan.items() if not isinstance(v, dict | list)}
        found["plan"]["stages"] = [{k: one[k] for k in _OF_STAGE} for one in plan["stages"]]
    return found


def _failure(words: Sequence[str], error: Exception) -> _Document:
    """Return the fields of an error, with a remedy that was tried; say it on standard error."""
    kind, text, code = _reported(error) or ("internal", problem_of(error), 1)
    if kind == "internal":
        traceback.print_exception(error)
    else:
        complain(text)
    from launcher.cli.remedy import find_remedy

    edit = find_remedy(words, error, kind)
    remedy = None if edit is None else {"remove": [*edit.remove], "add": [*edit.add]}
    return {"exit_code": code, "error": _error(kind, text, _keys(error), _where(error), remedy)}


def _stopped(stop: Stop) -> str:
    """Return the object of a command that a signal ends at once."""
    code, kind = stop.ending
    return json.dumps({"schema": VERSION, "exit_code": code, "error": _error(kind, kind)}) + "\n"


def _ending(document: _Document) -> _Document:
    """Return the error of a run that ended without one."""
    kind = _ENDINGS.get(document["exit_code"])
    reason = document.get("run", {}).get("exit_reason")
    return _error(kind or "failed", reason or kind or "standard error says why")


def _error(
    code: str,
    message: str,
    keys: Sequence[str] = (),
    where: str | None = None,
    remedy: _Document | None = None,
) -> _Document:
    return {"code": code, "message": message, "keys": keys, "where": where, "remedy": remedy}


def _keys(error: Exception) -> list[str]:
    """Return the settings that an error is about."""
    named = errors.keys_in(str(getattr(error, "problem", error)))
    settings = (key for key in named if not _FILE.search(key))
    return list(dict.fromkeys([*getattr(error, "keys", ()), *settings]))


def _where(error: Exception) -> str | None:
    """Return the file and the line that an error is about; None for the command line."""
    place = re.search(r"\bin ([^,]+?\.ya?ml(?::\d+)?)(?:,|$)", str(getattr(error, "where", "")))
    named = r"([^\s():,'\"]+\.(?:py|ya?ml|json):\d+|^[^\s():,'\"]+\.ya?ml(?= ))"
    place = place or re.search(named, str(error))
    return place[1] if place else None
